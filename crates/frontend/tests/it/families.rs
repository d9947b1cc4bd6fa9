//! Names that one engine serves: they share a router, come and go with what it lists, and end with their last request.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::{DONE, Engine, FIRST, Stage, Step, chunk, first_event};
use crate::rig::{ASK, CHAT, Rig, Setup, in_time, until};
use kvasir_frontend::Fleet;
use kvasir_upstream::parse_worker;

const LIST: &str = "/v1/models";
const ASK_ADAPTER: &str =
    r#"{"model":"sql","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;

/// What an engine lists: names, and of which each is an adapter.
fn list(models: &[(&str, Option<&str>)]) -> String {
    let row = |(name, parent): &(&str, Option<&str>)| serde_json::json!({ "id": name, "root": "hub/weights", "parent": parent });
    let rows: Vec<_> = models.iter().map(row).collect();
    serde_json::json!({ "object": "list", "data": rows }).to_string()
}

impl Rig {
    /// From now on every engine lists these.
    fn lists(&self, models: &[(&str, Option<&str>)]) {
        let mut pages = self.stage.pages.lock().unwrap();
        pages.insert(LIST, list(models));
    }

    async fn knows(&self, name: &str, known: bool) {
        until(name, || self.app.models().get(name).is_some() == known).await;
    }
}

/// One engine that is soon asked again what it lists.
async fn looking_often() -> Rig {
    let often = |fleet: Fleet| fleet.asking_every(Duration::from_millis(10));
    Rig::with_fleet(1, Setup::usual(), often).await
}

#[tokio::test]
async fn an_adapter_shares_the_router_and_its_series_end_with_its_last_request() {
    let rig = looking_often().await;
    rig.lists(&[("sql", Some("m")), ("m", None)]);
    rig.knows("sql", true).await;
    let (base, sql) = (rig.model(), rig.app.models().get("sql").unwrap());
    assert!(Arc::ptr_eq(&base.host, &sql.host));
    assert_eq!(**sql.host.name(), *"m");
    drop(sql);
    let rest = [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    rig.stage
        .play(vec![first_event(), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_ADAPTER).await;
    assert!(client.read_until("\n\n").await);
    assert_eq!(
        rig.booked_requests(),
        1,
        "the base sees what its adapter has"
    );
    rig.lists(&[("m", None)]);
    rig.knows("sql", false).await;
    assert_eq!(rig.post(CHAT, ASK_ADAPTER).await.status, 404);
    let running = r#"active_requests{model="sql"} 1"#;
    assert!(rig.page().await.contains(running), "what runs is counted");
    rig.stage.gate.add_permits(1);
    let answer = in_time("end", client.answer()).await;
    assert_eq!(answer.text(), [FIRST, DONE].concat());
    drop(client);
    rig.at_rest().await;
    let page = rig.page().await;
    assert!(!page.contains(r#"model="sql""#), "{page}");
    assert!(page.contains(r#"model="m""#));
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
}

#[tokio::test]
async fn a_name_that_is_back_while_a_request_of_it_runs_keeps_its_series() {
    let rig = looking_often().await;
    let both = [("m", None), ("sql", Some("m"))];
    rig.lists(&both);
    rig.knows("sql", true).await;
    let rest = [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    rig.stage
        .play(vec![first_event(), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_ADAPTER).await;
    assert!(client.read_until("\n\n").await);
    rig.lists(&both[..1]);
    rig.knows("sql", false).await;
    rig.lists(&both);
    rig.knows("sql", true).await;
    rig.stage.gate.add_permits(1);
    in_time("end", client.answer()).await;
    drop(client);
    rig.at_rest().await;
    let page = rig.page().await;
    assert!(page.contains(r#"active_requests{model="sql"} 0"#), "{page}");
    assert!(page.contains(r#"model_ready{model="sql"} 1"#));
}

/// A worker that serves names which were apart before is a member of both routers.
#[tokio::test]
async fn names_that_were_apart_stay_so_and_are_served() {
    let rig = Rig::of(0).await;
    let (mut engines, mut ids) = (Vec::new(), Vec::new());
    for names in [&["x"][..], &["y"][..], &["x", "y"][..]] {
        let stage = Stage::new();
        let rows: Vec<_> = names.iter().map(|name| (*name, None)).collect();
        stage.pages.lock().unwrap().insert(LIST, list(&rows));
        let engine = Engine::start(&stage).await;
        let address = parse_worker(&engine.url()).unwrap();
        ids.push(address.id);
        assert!(rig.fleet.watch(address));
        for name in names {
            let id = ids.last().unwrap();
            let served = || {
                let model = rig.app.models().get(name);
                model.is_some_and(|m| m.specs().iter().any(|spec| spec.id == *id))
            };
            until("it serves", served).await;
        }
        engines.push(engine);
    }
    let [x, y] = ["x", "y"].map(|name| rig.app.models().get(name).unwrap());
    assert!(!Arc::ptr_eq(&x.host, &y.host));
    for _ in 0..4 {
        for name in ["x", "y"] {
            assert_eq!(
                rig.post(CHAT, ASK.replace("\"m\"", &format!("\"{name}\"")))
                    .await
                    .status,
                200
            );
        }
    }
    assert!(rig.fleet.forget(ids[2]));
    until("it is gone", || rig.app.members().list().len() == 2).await;
    for (model, left) in [(x, ids[0]), (y, ids[1])] {
        let workers: Vec<_> = model.specs().iter().map(|spec| spec.id).collect();
        assert_eq!(workers, [left]);
        let there = |id| model.host.ask(|router| router.fleet().member(id).is_some());
        assert!(there(left) && !there(ids[2]));
    }
}
