//! Workers that a store announces: from their records to answers, and what happens when something is wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvasir_discovery::{
    Artefact, Instance, Lease, MemStore, ModelEntry, ModelInput, ModelType, Namespaces, NewCard,
    Record, RequestTransport, Store, WorkerType,
};
use kvasir_frontend::{DiscoveryOptions, Fleet};
use kvasir_text::TextModel;
use kvasir_transport::MemoryPlane;
use kvasir_types::{FinishReason, PlaneEndpoint, TokenItem, WorkerId};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// Where the test's tokenizer is.
pub(crate) const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/src/builtin");
const FILES: [(&str, &str, &str); 4] = [
    ("model_info", "hf_config_json", "config.json"),
    ("tokenizer", "hf_tokenizer_json", "tokenizer.json"),
    (
        "prompt_formatter",
        "hf_tokenizer_config_json",
        "tokenizer_config.json",
    ),
    (
        "chat_template_file",
        "hf_chat_template_jinja",
        "chat_template.jinja",
    ),
];

/// A frontend that follows a store in this process, and the plane that its workers are on.
pub(crate) struct Discovered {
    pub(crate) rig: Rig,
    store: MemStore,
    plane: MemoryPlane,
    asked: Arc<AtomicUsize>,
}

/// A worker that is announced.
pub(crate) struct Worker {
    pub(crate) lease: Arc<dyn Lease>,
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(format!("{MODEL}/{name}")).unwrap()
}

/// A card whose files are below `place`, which is a folder or a URL.
pub(crate) fn card(place: &str) -> NewCard {
    let file = |(slot, kind, name): (&'static str, &str, &str)| {
        (
            slot,
            Artefact::new(kind, &format!("{place}/{name}"), &read(name)),
        )
    };
    NewCard {
        name: "m".into(),
        aliases: Vec::new(),
        model_type: ModelType::TEXT,
        model_input: ModelInput::Tokens,
        worker_type: WorkerType::Aggregated,
        needs: Vec::new(),
        kv_cache_block_size: 16,
        context_length: 4096,
        migration_limit: 0,
        source_path: place.into(),
        artefacts: FILES.into_iter().map(file).collect(),
        runtime_config: json!({"total_kv_blocks": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 2048}),
    }
}

impl Discovered {
    pub(crate) async fn new(min_initial_workers: u32) -> Self {
        Self::holding(min_initial_workers, Duration::ZERO).await
    }

    async fn holding(min_initial_workers: u32, restore_grace: Duration) -> Self {
        let options = DiscoveryOptions {
            namespaces: Namespaces::One("ns".into()),
            min_initial_workers,
            restore_grace,
            ..DiscoveryOptions::default()
        };
        Self::with(options, Setup::usual(), |fleet| fleet).await
    }

    pub(crate) async fn with(
        options: DiscoveryOptions,
        setup: Setup,
        change: impl FnOnce(Fleet) -> Fleet,
    ) -> Self {
        let (store, plane) = (MemStore::new(), MemoryPlane::new());
        let shared = Arc::new(plane.clone());
        let change = |fleet: Fleet| {
            let connect = Arc::new(move |_: WorkerId, _: &PlaneEndpoint| Ok(shared.clone() as _));
            change(fleet.with_plane("tcp", connect))
        };
        let rig = Rig::with_fleet(0, setup, change).await;
        rig.fleet.discover(Arc::new(store.clone()), options);
        Self {
            rig,
            store,
            plane,
            asked: Arc::default(),
        }
    }

    /// A worker that answers, announced with this card.
    pub(crate) async fn join(&self, card: NewCard) -> Worker {
        let card = card.into_card().unwrap();
        self.join_at("ns", "backend", card.to_json()).await
    }

    /// The same, in this namespace and component.
    pub(crate) async fn join_at(&self, namespace: &str, component: &str, card: Value) -> Worker {
        let lease = self.store.lease().await.unwrap();
        let id = lease.id();
        let mut inbox = self.plane.join(WorkerId(id));
        let words = TextModel::builtin().unwrap().encode_chat("yes").unwrap();
        let asked = Arc::clone(&self.asked);
        self.rig.app.tasks().spawn(async move {
            while let Some(call) = inbox.next().await {
                asked.fetch_add(1, Ordering::SeqCst);
                call.reply.push(TokenItem {
                    tokens: words.clone(),
                    finish: Some(FinishReason::Stop),
                    ..TokenItem::default()
                });
            }
        });
        let worker = Worker { lease };
        worker.announce_at(namespace, component, card).await;
        worker
    }

    async fn health(&self) -> Value {
        let mut client = self.rig.client().await;
        client
            .send("GET /health HTTP/1.1\r\nhost: door\r\n\r\n")
            .await;
        client.answer().await.json()
    }

    pub(crate) async fn serves(&self) -> bool {
        self.rig.post(CHAT, ASK).await.status == 200
    }

    async fn until_state(&self, state: &str) {
        in_time("discovery is in that state", async {
            while self.health().await["discovery"][0]["state"] != state {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    pub(crate) async fn until_served(&self, workers: usize) {
        let app = &self.rig.app;
        let count = || app.models().get("m").map_or(0, |model| model.specs().len());
        until("workers of the model are there", || count() == workers).await;
    }
}

impl Worker {
    async fn announce(&self, card: NewCard) {
        let card = card.into_card().unwrap();
        self.announce_at("ns", "backend", card.to_json()).await;
    }

    async fn announce_at(&self, namespace: &str, component: &str, card: Value) {
        let id = self.lease.id();
        let entry = Record::Model(ModelEntry {
            namespace: namespace.into(),
            component: component.into(),
            endpoint: "generate".into(),
            instance_id: id,
            card_json: card,
            model_suffix: None,
        });
        let address = format!("here:1/{id:x}/{namespace}/{component}/generate");
        let instance = Record::Endpoint(Instance {
            component: component.into(),
            endpoint: "generate".into(),
            namespace: namespace.into(),
            instance_id: id,
            transport: RequestTransport::Tcp(address),
            device_type: None,
            request_plane_codec: None,
        });
        self.lease.put(entry).await.unwrap();
        self.lease.put(instance).await.unwrap();
    }
}

#[tokio::test]
async fn a_discovered_worker_serves_its_model_and_leaves_with_it() {
    let fleet = Discovered::new(0).await;
    assert_eq!(fleet.health().await["status"], "not_ready");
    let worker = fleet.join(card(MODEL)).await;
    fleet.until_served(1).await;
    let answer = fleet.rig.post(CHAT, ASK).await;
    assert_eq!(answer.status, 200);
    let body: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "yes");
    assert!(
        fleet
            .rig
            .post(CHAT, ASK_STREAM)
            .await
            .text()
            .contains("[DONE]")
    );
    assert_eq!(fleet.asked.load(Ordering::SeqCst), 2);
    let health = fleet.health().await;
    assert_eq!(health["status"], "healthy");
    assert_eq!(health["discovery"][0]["source"], "mem this process");
    assert_eq!(health["discovery"][0]["state"], "ready");
    let second = fleet.join(card(MODEL)).await;
    fleet.until_served(2).await;
    worker.lease.revoke().await.unwrap();
    fleet.until_served(1).await;
    assert!(fleet.serves().await);
    second.lease.revoke().await.unwrap();
    until("the model is forgotten", || {
        fleet.rig.app.models().is_empty()
    })
    .await;
    assert_eq!(fleet.rig.post(CHAT, ASK).await.status, 404);
    // And back again.
    let _third = fleet.join(card(MODEL)).await;
    fleet.until_served(1).await;
    assert!(fleet.serves().await);
}

#[tokio::test]
async fn the_fleet_goes_on_while_discovery_is_lost() {
    let fleet = Discovered::new(0).await;
    let first = fleet.join(card(MODEL)).await;
    fleet.until_served(1).await;
    assert_eq!(
        fleet
            .rig
            .metric(r#"kvasir_discovery_up{backend="mem"}"#)
            .await,
        1.0
    );
    fleet.store.fail("the cable was pulled");
    let second = fleet.join(card(MODEL)).await;
    first.lease.remove(first_key(&first)).await.unwrap();
    fleet.until_state("lost").await;
    let health = fleet.health().await;
    assert_eq!(health["status"], "healthy");
    assert_eq!(health["discovery"][0]["error"], "the cable was pulled");
    assert_eq!(
        fleet
            .rig
            .metric(r#"kvasir_discovery_up{backend="mem"}"#)
            .await,
        0.0
    );
    assert!(fleet.serves().await, "the last known worker serves");
    fleet.store.repair();
    in_time("the second is there and the first is not", async {
        loop {
            let specs = fleet.rig.app.models().get("m").map(|model| model.specs());
            let ids: Vec<u64> = specs
                .unwrap_or_default()
                .iter()
                .map(|spec| spec.id.0)
                .collect();
            if ids == [second.lease.id()] {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(fleet.health().await["discovery"][0]["state"], "ready");
    assert!(fleet.serves().await);
}

/// A store that comes back empty, as an etcd without its disk does, empties no fleet.
#[tokio::test]
async fn workers_go_on_while_a_store_that_forgot_them_hears_of_them_again() {
    let fleet = Discovered::holding(0, Duration::from_secs(3600)).await;
    let worker = fleet.join(card(MODEL)).await;
    fleet.until_served(1).await;
    fleet.store.fail("gone");
    fleet.until_state("lost").await;
    worker.lease.revoke().await.unwrap();
    fleet.store.repair();
    let newcomer = fleet.join(card(MODEL)).await;
    fleet.until_served(2).await;
    assert!(fleet.serves().await);
    newcomer.lease.revoke().await.unwrap();
    assert!(fleet.serves().await);
}

fn first_key(worker: &Worker) -> kvasir_discovery::RecordKey {
    let key = format!("ns/backend/generate/{:x}", worker.lease.id());
    kvasir_discovery::RecordKey::new(kvasir_discovery::Bucket::Instances, key)
}

/// A worker that was announced with a wrong checksum is not served, and is when its card is put right.
#[tokio::test]
async fn files_that_are_not_what_the_card_says_are_not_used() {
    let fleet = Discovered::new(0).await;
    let mut wrong = card(MODEL);
    let (_, tokenizer) = &mut wrong.artefacts[1];
    *tokenizer = Artefact::new(&tokenizer.kind, &tokenizer.path, b"another file");
    let worker = fleet.join(wrong).await;
    let asked = fleet.rig.post(CHAT, ASK).await.status;
    assert!(asked == 503 || asked == 404, "{asked}");
    worker.announce(card(MODEL)).await;
    fleet.until_served(1).await;
    assert!(fleet.serves().await);
}

/// Hands out the files of the model over HTTP, as a worker with a system port does; the first request fails.
async fn file_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let files: BTreeMap<String, Vec<u8>> = FILES
        .iter()
        .map(|(_, _, name)| {
            (
                format!("/v1/metadata/ns/backend/generate/m/_base/{name}"),
                read(name),
            )
        })
        .collect();
    let mut is_first = true;
    let tasks = kvasir_tasks::Tasks::new();
    tasks.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                    break;
                }
                let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
                while stream.read_line(&mut line).await.unwrap_or(0) > 2 {}
                let (status, body) = match files.get(&path) {
                    Some(_) if std::mem::take(&mut is_first) => {
                        ("503 Service Unavailable", &b""[..])
                    }
                    Some(file) => ("200 OK", &file[..]),
                    None => ("404 Not Found", &b""[..]),
                };
                let head = format!(
                    "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                let _ = stream.get_mut().write_all(head.as_bytes()).await;
                let _ = stream.get_mut().write_all(body).await;
            }
            let _ = stream.read(&mut [0; 1]).await;
        }
    });
    format!("http://{address}/v1/metadata/ns/backend/generate/m/_base")
}

#[tokio::test]
async fn files_come_from_the_worker_itself_and_a_failure_is_tried_again() {
    let fleet = Discovered::new(0).await;
    let _worker = fleet.join(card(&file_server().await)).await;
    fleet.until_served(1).await;
    assert!(fleet.serves().await);
}

#[tokio::test]
async fn a_model_waits_for_enough_workers_once() {
    let fleet = Discovered::new(2).await;
    let first = fleet.join(card(MODEL)).await;
    fleet.until_state("ready").await;
    assert!(!fleet.serves().await);
    let _second = fleet.join(card(MODEL)).await;
    fleet.until_served(2).await;
    first.lease.revoke().await.unwrap();
    fleet.until_served(1).await;
    assert!(fleet.serves().await, "one is enough from then on");
}
