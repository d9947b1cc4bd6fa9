//! Operators' routes: at which door they are, and who gets in.

use kvasir_frontend::{ApiKeys, AppOptions};

use crate::client::{Answer, Client};
use crate::rig::{CHAT, Rig, Setup, in_time};

const OPERATORS: [&str; 4] = ["/workers", "/busy_threshold", "/decisions", "/openapi.json"];
const ANYONES: [&str; 4] = ["/health", "/live", "/metrics", "/openapi.json"];

async fn rig(options: AppOptions) -> Rig {
    let setup = Setup::options(options);
    Rig::with(1, setup).await
}

async fn get(address: std::net::SocketAddr, path: &str, key: &str) -> Answer {
    let mut client = Client::connect(address).await;
    let key = match key {
        "" => String::new(),
        key => format!("authorization: Bearer {key}\r\n"),
    };
    client
        .send(format!("GET {path} HTTP/1.1\r\nhost: door\r\n{key}\r\n"))
        .await;
    in_time(path, client.answer()).await
}

#[tokio::test]
async fn with_a_door_of_their_own_operators_are_only_there() {
    let mut rig = rig(AppOptions {
        admin_apart: true,
        admin_token: ApiKeys::one("root"),
        ..AppOptions::default()
    })
    .await;
    rig.server
        .start_admin("127.0.0.1:0".parse().unwrap())
        .await
        .unwrap();
    let (data, admin) = (rig.address(), rig.server.admin_address().unwrap());
    for path in ANYONES {
        assert_eq!(get(data, path, "").await.status, 200, "{path}");
        assert_eq!(get(admin, path, "").await.status, 200, "{path}");
    }
    for path in OPERATORS.into_iter().filter(|p| !ANYONES.contains(p)) {
        assert_eq!(get(data, path, "root").await.status, 404, "{path}");
        assert_eq!(get(admin, path, "root").await.status, 200, "{path}");
        let refused = get(admin, path, "").await;
        assert_eq!(refused.status, 401, "{path}");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        for wrong in ["roo", "roots", "ROOT"] {
            assert_eq!(get(admin, path, wrong).await.status, 401, "{path}");
        }
    }
    assert_eq!(get(data, "/v1/models", "").await.status, 200);
    assert_eq!(get(admin, "/v1/models", "root").await.status, 404);
    assert_eq!(get(admin, CHAT, "root").await.status, 405);
    // Each door describes what is behind it.
    let (outer, inner) = (
        get(data, "/openapi.json", "").await.json(),
        get(admin, "/openapi.json", "").await.json(),
    );
    assert!(outer["paths"].get("/workers").is_none() && outer["paths"].get(CHAT).is_some());
    assert!(inner["paths"].get("/workers").is_some() && inner["paths"].get(CHAT).is_none());
}

#[tokio::test]
async fn a_clients_key_does_not_open_what_the_token_closes() {
    let rig = rig(AppOptions {
        admin_token: ApiKeys::one("root"),
        keys: ApiKeys::parse("client").unwrap(),
        ..AppOptions::default()
    })
    .await;
    let door = rig.address();
    assert_eq!(get(door, "/workers", "client").await.status, 401);
    assert_eq!(get(door, "/workers", "root").await.status, 200);
    assert_eq!(get(door, "/v1/models", "client").await.status, 200);
    assert_eq!(get(door, "/v1/models", "root").await.status, 401);
    assert_eq!(get(door, "/health", "").await.status, 200);
}
