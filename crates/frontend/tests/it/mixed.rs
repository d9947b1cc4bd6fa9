//! One model, one router, and workers of both kinds: an engine behind HTTP and a token worker on a request plane.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvasir_frontend::{AppOptions, MemberState, MigrationOptions, SourceName, WorkerSource};
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_text::{ModelFolders, TextModel};
use kvasir_transport::MemoryPlane;
use kvasir_types::{
    Codec, EventFeed, FinishReason, ModelCard, PlaneEndpoint, TokenItem, Transport, WorkerId,
    WorkerRecord,
};
use kvasir_upstream::parse_worker;
use serde_json::{Value, json};

use crate::client::Answer;
use crate::engine::{ANSWER, Step, first_event};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, until};

const PLANE_WORKER: WorkerId = WorkerId(7);
/// Where the test's tokenizer is.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/src/builtin");

/// A rig with one engine, and a token worker beside it.
struct Mixed {
    rig: Rig,
    /// What announces the token worker.
    source: WorkerSource,
    asked: Arc<AtomicUsize>,
    /// The token worker dies before its first token.
    dies: Arc<AtomicBool>,
}

fn record() -> WorkerRecord {
    let endpoint = PlaneEndpoint {
        plane: "memory".into(),
        address: "m".into(),
        codec: Codec::default(),
    };
    let mut record = WorkerRecord::new(PLANE_WORKER, Transport::Plane(endpoint));
    record.events = EventFeed::Delivered;
    record.block_size = Some(16);
    record.models = vec![ModelCard {
        name: "m".into(),
        root: None,
        max_model_len: Some(4096),
        parent: None,
        migration_limit: 0,
    }];
    record
}

impl Mixed {
    async fn of(setup: Setup) -> Self {
        let plane = MemoryPlane::new();
        let shared: Arc<MemoryPlane> = Arc::new(plane.clone());
        let folders = ModelFolders::load(Some(MODEL)).unwrap();
        let rig = Rig::with_fleet(1, setup, |fleet| {
            let connect = Arc::new(move |_: WorkerId, _: &PlaneEndpoint| Ok(shared.clone() as _));
            fleet
                .with_plane("memory", connect)
                .with_model_folders(folders)
        })
        .await;
        let source = rig.app.members().source(SourceName::new("test", "plane"));
        let mixed = Self {
            rig,
            source,
            asked: Arc::default(),
            dies: Arc::default(),
        };
        mixed.start_token_worker(&plane);
        mixed.source.join(record()).unwrap();
        mixed.rig.joined(2).await;
        mixed
    }

    fn start_token_worker(&self, plane: &MemoryPlane) {
        let mut inbox = plane.join(PLANE_WORKER);
        let (asked, dies) = (Arc::clone(&self.asked), Arc::clone(&self.dies));
        let words = TextModel::builtin().unwrap().encode_chat("yes").unwrap();
        self.rig.app.tasks().spawn(async move {
            while let Some(call) = inbox.next().await {
                asked.fetch_add(1, Ordering::SeqCst);
                if !dies.load(Ordering::SeqCst) {
                    call.reply.push(TokenItem {
                        tokens: words.clone(),
                        finish: Some(FinishReason::Stop),
                        ..TokenItem::default()
                    });
                }
            }
        });
    }

    /// Requests that each has had: the engine, the token worker.
    fn asked(&self) -> (usize, usize) {
        let by_engine = self.rig.stage.seen().len();
        (by_engine, self.asked.load(Ordering::SeqCst))
    }

    async fn ask(&self, body: impl AsRef<[u8]>) -> Answer {
        self.rig.post(CHAT, body).await
    }

    fn engine(&self) -> WorkerId {
        parse_worker(&self.rig.engines[0].url()).unwrap().id
    }

    fn is_ejected(&self, worker: WorkerId) -> bool {
        let until = self.rig.model().host.ask(|router| {
            let member = router.fleet().member(worker)?;
            member.ejected_until()
        });
        until.is_some()
    }

    async fn at_rest(&self) {
        until("bookings end", || self.rig.booked() == 0).await;
    }
}

/// By cache and load, with what was sent where kept in the index.
fn by_cache() -> Setup {
    let mut setup = Setup::in_mode(RouterMode::Kv);
    setup.router = RouterConfig {
        router_predicted_ttl_secs: Some(60.0),
        ..setup.router
    };
    setup
}

/// A prompt of many blocks, all its own, and a worker that it must go to.
fn long(topic: &str, worker: Option<WorkerId>) -> String {
    let content = format!("all there is to say of {topic} and more ").repeat(20);
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": content}]});
    if let Some(worker) = worker {
        body["nvext"] = json!({"backend_instance_id": worker.0});
    }
    body.to_string()
}

#[tokio::test]
async fn both_kinds_serve_one_model_under_one_router() {
    let mixed = Mixed::of(Setup::usual()).await;
    for stream in [false, true] {
        let body = if stream { ASK_STREAM } else { ASK };
        for _ in 0..4 {
            let answer = mixed.ask(body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(answer.text().contains("choices"));
        }
    }
    assert_eq!(mixed.asked(), (4, 4), "in turn");
    // Each gets the request as it wants it: the engine has the client's own bytes.
    assert_eq!(mixed.rig.stage.seen()[0].body, ASK.as_bytes());
    let rows = mixed.rig.workers().await;
    let mut urls: Vec<bool> = rows.iter().map(|row| row["url"].is_string()).collect();
    urls.sort_unstable();
    assert_eq!(urls, [false, true]);
    let origins: Vec<&Value> = rows.iter().map(|row| &row["origins"][0]).collect();
    assert!(origins.contains(&&json!("flag")) && origins.contains(&&json!("test")));
    mixed.at_rest().await;
}

#[tokio::test]
async fn the_index_is_shared() {
    let mixed = Mixed::of(by_cache()).await;
    let (here, there) = (long("rivers", None), long("mountains", None));
    let pinned = [
        long("rivers", Some(PLANE_WORKER)),
        long("mountains", Some(mixed.engine())),
    ];
    for body in &pinned {
        assert_eq!(mixed.ask(body).await.status, 200);
    }
    assert_eq!(mixed.asked(), (1, 1));
    mixed.at_rest().await;
    for _ in 0..3 {
        assert_eq!(mixed.ask(&here).await.status, 200);
        mixed.at_rest().await;
        assert_eq!(mixed.ask(&there).await.status, 200);
        mixed.at_rest().await;
    }
    assert_eq!(mixed.asked(), (4, 4), "each where its beginning is cached");
}

#[tokio::test]
async fn the_load_is_shared() {
    let mixed = Mixed::of(by_cache()).await;
    mixed.rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let held = mixed.ask(long("glaciers", Some(mixed.engine())));
    let others = async {
        until("it is held", || mixed.asked().0 == 1).await;
        for topic in ["deserts", "forests", "oceans"] {
            assert_eq!(mixed.ask(long(topic, None)).await.status, 200);
        }
        assert_eq!(mixed.asked(), (1, 3), "the engine is busy");
        mixed.rig.stage.gate.add_permits(1);
    };
    let (held, ()) = tokio::join!(held, others);
    assert_eq!(held.text(), ANSWER);
    mixed.at_rest().await;
}

#[tokio::test]
async fn a_token_worker_that_dies_is_replaced_by_an_engine() {
    for body in [ASK, ASK_STREAM] {
        let mixed = Mixed::of(Setup::usual()).await;
        mixed.dies.store(true, Ordering::SeqCst);
        for _ in 0..4 {
            assert_eq!(mixed.ask(body).await.status, 200);
        }
        let (by_engine, by_plane) = mixed.asked();
        assert!(by_engine == 4 && by_plane >= 1, "{by_engine} {by_plane}");
        assert!(mixed.is_ejected(PLANE_WORKER) && !mixed.is_ejected(mixed.engine()));
        mixed.at_rest().await;
    }
}

#[tokio::test]
async fn an_engine_that_fails_is_replaced_by_a_token_worker() {
    const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}";
    for body in [ASK, ASK_STREAM] {
        let mixed = Mixed::of(Setup::usual()).await;
        // One for each time that it may be asked: a close on a kept connection is followed by another try, and a token brings it back.
        for _ in 0..4 {
            mixed.rig.stage.play(vec![Step::Close]);
            mixed.rig.stage.play(vec![Step::Write(FULL.to_vec())]);
        }
        for _ in 0..4 {
            let answer = mixed.ask(body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        let (by_engine, by_plane) = mixed.asked();
        assert!(by_engine >= 1 && by_plane == 4, "{by_engine} {by_plane}");
        mixed.at_rest().await;
    }
}

#[tokio::test]
async fn what_token_workers_cannot_take_goes_to_engines_alone() {
    let mixed = Mixed::of(Setup::usual()).await;
    let odd = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"engine_knob":1}"#;
    for _ in 0..3 {
        assert_eq!(mixed.ask(odd).await.text(), ANSWER);
        let embedded = mixed
            .rig
            .post("/v1/embeddings", r#"{"model":"m","input":"a"}"#);
        assert_eq!(embedded.await.status, 200);
    }
    assert_eq!(mixed.asked(), (6, 0));
    // Several choices are one request for an engine, and as many for token workers.
    let two = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"n":2}"#;
    for _ in 0..2 {
        assert_eq!(mixed.ask(two).await.status, 200);
    }
    let (engines, lanes) = mixed.asked();
    assert_eq!((engines - 6) + lanes / 2, 2, "{engines} {lanes}");
    // Where only token workers are left, they judge.
    assert!(mixed.rig.fleet.forget(mixed.engine()));
    mixed.rig.joined(1).await;
    assert_eq!(mixed.ask(odd).await.status, 400);
    assert_eq!(mixed.ask(ASK).await.status, 200);
    mixed.at_rest().await;
}

#[tokio::test]
async fn the_rest_of_an_engines_answer_is_not_asked_of_token_workers() {
    let setup = Setup::options(AppOptions {
        migration: MigrationOptions {
            limit: 2,
            ..MigrationOptions::default()
        },
        ..AppOptions::default()
    });
    let mixed = Mixed::of(setup).await;
    mixed.rig.stage.play(vec![first_event(), Step::Close]);
    let mut broken = 0;
    for _ in 0..2 {
        let answer = mixed.ask(ASK_STREAM).await;
        broken += usize::from(answer.text().contains("\"error\""));
    }
    assert_eq!((broken, mixed.asked().1), (1, 1));
    assert!(!mixed.is_ejected(PLANE_WORKER), "it did nothing wrong");
    mixed.at_rest().await;
}

#[tokio::test]
async fn a_lost_source_takes_its_worker_along_and_the_other_kind_serves_on() {
    let mixed = Mixed::of(Setup::usual()).await;
    let members = mixed.rig.app.members().clone();
    let state = || members.get(PLANE_WORKER).map(|member| member.state);
    assert_eq!(state(), Some(MemberState::Serving));
    mixed.source.withdraw();
    mixed.rig.joined(1).await;
    until("its row ends", || state().is_none()).await;
    mixed.rig.only_others_serve(0).await;
    // It comes back as it was.
    mixed.source.replace([record()]).unwrap();
    mixed.rig.joined(2).await;
    for _ in 0..2 {
        assert_eq!(mixed.ask(ASK).await.status, 200);
    }
    assert_eq!(mixed.asked().1, 1);
}
