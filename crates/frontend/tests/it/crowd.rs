//! Two thousand workers that join at once, over real sockets, while others are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvasir_discovery::{
    FileStore, Instance, MemStore, ModelEntry, Record, RequestTransport, Store,
};
use kvasir_frontend::{DiscoveryOptions, Fleet};
use kvasir_router::RouterMode;
use kvasir_tasks::Tasks;
use kvasir_text::TextModel;
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{
    EndpointHandler, ResponseOptions, ResponseServer, ServedEndpoint, TokenEndpoint, TokenPlane,
    TokenSink,
};
use kvasir_types::{FinishReason, PlaneEndpoint, TokenItem, WorkerId};
use tokio::time::Instant;

use crate::discovery::{MODEL, card};
use crate::rig::{ASK, CHAT, Probe, Rig, Setup, until};

const CROWD: u64 = 2000;
/// Sockets of the crowd; each serves as many workers as the others.
const SOCKETS: u64 = 4;
/// From the last announcement until all of them serve. The promise is 5 s; a debug build on a busy machine gets more.
const JOIN_MAX: Duration = Duration::from_secs(30);

/// Workers that answer with one word, on a few sockets.
struct Crowd {
    addresses: Vec<std::net::SocketAddr>,
    _served: Vec<ServedEndpoint>,
}

fn path(id: u64) -> String {
    format!("{id:x}/ns/backend/generate")
}

impl Crowd {
    async fn start(tasks: &Tasks) -> Self {
        let words = TextModel::builtin().unwrap().encode_chat("yes").unwrap();
        let mut servers = Vec::new();
        for _ in 0..SOCKETS {
            let options = ServerOptions::new(([127, 0, 0, 1], 0).into());
            servers.push(EndpointServer::bind(options, tasks).await.unwrap());
        }
        let serve = |id: u64| {
            let words = words.clone();
            let generate = TokenEndpoint::new(WorkerId(id), move |_, sink: TokenSink| {
                sink.push(TokenItem {
                    tokens: words.clone(),
                    finish: Some(FinishReason::Stop),
                    ..TokenItem::default()
                });
            });
            let server = &servers[(id % SOCKETS) as usize];
            server.serve(&path(id), Arc::new(generate) as Arc<dyn EndpointHandler>)
        };
        Self {
            _served: (1..=CROWD).map(serve).collect(),
            addresses: servers.iter().map(EndpointServer::local_addr).collect(),
        }
    }

    /// What worker `id` writes into a store.
    fn records(&self, id: u64, card_json: &serde_json::Value) -> [Record; 2] {
        let address = self.addresses[(id % SOCKETS) as usize];
        let model = ModelEntry {
            namespace: "ns".into(),
            component: "backend".into(),
            endpoint: "generate".into(),
            instance_id: id,
            card_json: card_json.clone(),
            model_suffix: None,
        };
        let instance = Instance {
            component: "backend".into(),
            endpoint: "generate".into(),
            namespace: "ns".into(),
            instance_id: id,
            transport: RequestTransport::Tcp(format!("{address}/{}", path(id))),
            device_type: None,
            request_plane_codec: Some("msgpack".into()),
        };
        [Record::Model(model), Record::Endpoint(instance)]
    }
}

/// A frontend that reaches workers over TCP.
async fn frontend() -> Rig {
    let tasks = Tasks::new();
    let home = ResponseOptions {
        bind: ([127, 0, 0, 1], 0).into(),
        ..ResponseOptions::default()
    };
    let home = ResponseServer::start(home, &tasks).await.unwrap();
    let client = Arc::new(TcpClient::new(home, TcpOptions::default(), &tasks));
    let change = |fleet: Fleet| {
        let connect = move |_: WorkerId, endpoint: &PlaneEndpoint| {
            Ok(Arc::new(TokenPlane::new(client.clone(), endpoint.clone())) as _)
        };
        fleet.with_plane("tcp", Arc::new(connect))
    };
    let setup = Setup {
        probe: Some(Probe::default()),
        ..Setup::in_mode(RouterMode::Kv)
    };
    Rig::with_fleet(0, setup, change).await
}

/// Requests one after the other, until told; how long the slowest took.
async fn ask_all_along(rig: &Rig, over: &AtomicBool) -> (usize, Duration) {
    let (mut asked, mut slowest) = (0, Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        slowest = slowest.max(begun.elapsed());
        asked += 1;
    }
    (asked, slowest)
}

/// Lets the crowd join, and says how long it took.
async fn join_at_once(store: &dyn Store, shared: Arc<dyn Store>) -> String {
    let rig = frontend().await;
    let crowd = Crowd::start(rig.app.tasks()).await;
    rig.fleet.discover(shared, DiscoveryOptions::default());
    let card_json = card(MODEL).into_card().unwrap().to_json();
    let lease = store.lease().await.unwrap();
    let put = async |id: u64| {
        for record in crowd.records(id, &card_json) {
            lease.put(record).await.unwrap();
        }
        // Those who ask are on the same task.
        tokio::task::yield_now().await;
    };
    let served = || {
        let model = rig.app.models().get("m");
        model.map_or(0, |model| model.specs().len())
    };
    put(1).await;
    until("the first worker serves", || served() == 1).await;
    let over = AtomicBool::new(false);
    let joined = async {
        let begun = Instant::now();
        for id in 2..=CROWD {
            put(id).await;
        }
        let announced = begun.elapsed();
        let all = async {
            while served() < CROWD as usize {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(JOIN_MAX, all).await.unwrap();
        over.store(true, Ordering::Relaxed);
        (announced, begun.elapsed())
    };
    let ((announced, joined), (asked, slowest)) = tokio::join!(joined, ask_all_along(&rig, &over));
    let told = format!(
        "{}: {CROWD} workers announced in {announced:?}, all serving after {joined:?}; {asked} requests meanwhile, the slowest {slowest:?}",
        store.backend()
    );
    assert!(asked > 0, "{told}");
    rig.app.tasks().stop();
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_workers_join_at_once_and_nobody_waits() {
    let store = MemStore::new();
    let told = join_at_once(&store, Arc::new(store.clone())).await;
    println!("{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_workers_join_a_folder_at_once_and_nobody_waits() {
    let folder = std::env::temp_dir().join(format!("kvasir-crowd-{}", std::process::id()));
    let tasks = Tasks::new();
    let store = Arc::new(FileStore::new(&folder, &tasks));
    let told = join_at_once(&*Arc::clone(&store), store).await;
    println!("{told}");
    tasks.stop();
    let _ = std::fs::remove_dir_all(folder);
}
