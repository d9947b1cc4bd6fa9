//! Workers that operators and a file add and remove, while requests run.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_frontend::{AppOptions, WorkersFile};
use kvasir_tasks::Tasks;
use kvasir_types::WorkerId;
use kvasir_upstream::parse_worker;

use crate::client::{Answer, Client};
use crate::engine::{ANSWER, DONE, Engine, FIRST, Step, first_event};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// Clients that ask at once.
const CLIENTS: usize = 6;
/// Times that a worker is added and removed.
const ROUNDS: usize = 5;

async fn ask(rig: &Rig, method: &str, path: &str, body: &str) -> Answer {
    let mut client = rig.client().await;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(head).await;
    in_time(path, client.answer()).await
}

async fn add(rig: &Rig, engine: &Engine) -> Answer {
    let body = format!(r#"{{"url":"{}"}}"#, engine.url());
    ask(rig, "POST", "/workers", &body).await
}

fn id_of(engine: &Engine) -> WorkerId {
    parse_worker(&engine.url()).unwrap().id
}

/// The rows of `GET /workers` that are about this engine.
async fn rows(rig: &Rig, engine: &Engine) -> Vec<serde_json::Value> {
    let all = ask(rig, "GET", "/workers", "").await.json();
    let rows = all["workers"].as_array().unwrap().iter();
    let of = |row: &&serde_json::Value| row["url"] == engine.url();
    rows.filter(of).cloned().collect()
}

/// Several clients ask without pause, streams and answers in one piece, until `done`; each answer must be whole.
fn under_load(rig: &Rig, clients: &Tasks, done: &Arc<AtomicBool>) -> Vec<Running> {
    let address = rig.address();
    (0..CLIENTS)
        .map(|number| {
            let done = Arc::clone(done);
            clients.spawn(async move {
                let mut client = Client::connect(address).await;
                let mut asked = 0;
                while !done.load(Ordering::SeqCst) {
                    let body = if number % 2 == 0 { ASK } else { ASK_STREAM };
                    client.post(CHAT, "", body).await;
                    let answer = in_time("answer", client.answer()).await;
                    assert_eq!(
                        (answer.status, answer.whole, answer.text()),
                        (200, true, ANSWER)
                    );
                    asked += 1;
                }
                asked
            })
        })
        .collect()
}

type Running = tokio::task::JoinHandle<Option<usize>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_added_and_removed_under_load_and_nothing_is_lost() {
    let rig = Rig::of(1).await;
    let (clients, done) = (Tasks::new(), Arc::new(AtomicBool::new(false)));
    let running = under_load(&rig, &clients, &done);
    for round in 0..ROUNDS {
        let engine = Engine::start(&rig.stage).await;
        let added = add(&rig, &engine).await;
        assert_eq!(added.status, 201, "{}", added.text());
        assert_eq!(added.json()["worker_id"], id_of(&engine).0);
        rig.joined(2).await;
        let port = engine.address.port();
        until("it serves", || {
            rig.stage.seen().iter().any(|seen| seen.port == port)
        })
        .await;
        let name = match round % 2 {
            0 => id_of(&engine).0.to_string(),
            _ => engine.url().replace(':', "%3A").replace('/', "%2F"),
        };
        let removed = ask(&rig, "DELETE", &format!("/workers/{name}"), "").await;
        assert_eq!(
            (removed.status, removed.json()["draining"].as_bool()),
            (202, Some(true))
        );
        rig.joined(1).await;
        until("it is forgotten", || {
            rig.app.members().get(id_of(&engine)).is_none()
        })
        .await;
        until("its connections are closed", || engine.open() == 0).await;
        // Only now does it stop: whatever it had was done.
        drop(engine);
    }
    done.store(true, Ordering::SeqCst);
    for client in running {
        assert!(in_time("client ends", client).await.unwrap().unwrap() > 0);
    }
    assert_eq!(
        rig.metric("dynamo_frontend_model_migration_total").await,
        0.0
    );
    rig.at_rest().await;
}

#[tokio::test]
async fn a_removed_worker_drains_and_can_be_taken_back_or_cut() {
    let rig = Rig::of(1).await;
    let worker = id_of(&rig.engines[0]);
    let path = format!("/workers/{}", worker.0);
    rig.stage.play(vec![first_event(), Step::Hang]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until("\n\n").await);

    assert_eq!(ask(&rig, "DELETE", &path, "").await.status, 202);
    until("draining", || rig.is_draining(worker)).await;
    let row = rows(&rig, &rig.engines[0]).await.remove(0);
    assert_eq!(
        (&row["state"], &row["draining"]),
        (&"draining".into(), &true.into())
    );
    assert_eq!(row["ranks"][0]["active_requests"], 1);
    assert_eq!(rig.post(CHAT, ASK).await.status, 503);

    assert_eq!(add(&rig, &rig.engines[0]).await.status, 201);
    until("it is back", || !rig.is_draining(worker)).await;
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    assert_eq!(add(&rig, &rig.engines[0]).await.status, 200, "it is there");

    assert_eq!(
        ask(&rig, "DELETE", &format!("{path}?force=true"), "")
            .await
            .status,
        202
    );
    let answer = in_time("its client is told", client.answer()).await;
    assert!(answer.whole);
    let rest = answer.text().strip_prefix(FIRST).unwrap();
    assert!(
        rest.starts_with("data: {\"error\"") && rest.ends_with(DONE),
        "{rest}"
    );
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.joined(0).await;
    until("it is forgotten", || rig.app.members().list().is_empty()).await;
    assert_eq!(ask(&rig, "DELETE", &path, "").await.status, 404);
    drop(client);
    rig.at_rest().await;
}

/// A request that waits for its first byte when its worker is cut goes to another one unseen.
#[tokio::test]
async fn what_a_cut_worker_has_not_begun_goes_elsewhere() {
    let rig = Rig::of(2).await;
    rig.stage.play(vec![Step::Hang]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK).await;
    until("an engine has it", || !rig.stage.seen().is_empty()).await;
    let port = rig.stage.seen()[0].port;
    let engine = rig.engines.iter().find(|e| e.address.port() == port);
    let path = format!("/workers/{}?force", id_of(engine.unwrap()).0);
    assert_eq!(ask(&rig, "DELETE", &path, "").await.status, 202);
    let answer = in_time("answer", client.answer()).await;
    assert_eq!((answer.status, answer.text()), (200, ANSWER));
    rig.joined(1).await;
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn what_cannot_be_a_worker_is_refused_with_words() {
    let rig = Rig::of(1).await;
    for (body, word) in [
        ("{", "Validation"),
        ("{}", "url"),
        (r#"{"url":"gpu-1:8000"}"#, "http://host:8000"),
        (
            r#"{"url":"http://a:1","block_size":0}"#,
            "whole number from 1",
        ),
        (r#"{"url":"http://a:1","blocksize":1}"#, "blocksize"),
        (r#"{"url":"http://a:1","events":"5557"}"#, "tcp://"),
    ] {
        let answer = ask(&rig, "POST", "/workers", body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.text().contains(word), "{body}: {}", answer.text());
    }
    for (path, status) in [
        ("/workers/nonsense", 400),
        ("/workers/1", 404),
        ("/workers/1?now", 400),
    ] {
        assert_eq!(ask(&rig, "DELETE", path, "").await.status, status, "{path}");
    }
    assert_eq!(rig.app.members().list().len(), 1);
    // One that nobody answers at is wanted all the same, and said to be so.
    let engine = Engine::start(&rig.stage).await;
    let url = engine.url();
    drop(engine);
    let body = format!(r#"{{"url":"{url}","api_key":"hush"}}"#);
    let added = ask(&rig, "POST", "/workers", &body).await;
    assert_eq!(added.status, 201);
    let id = added.json()["worker_id"].as_u64().unwrap();
    until("it is tried", || {
        let member = rig.app.members().get(WorkerId(id)).unwrap();
        member.state == kvasir_frontend::MemberState::Unreachable
    })
    .await;
    let page = ask(&rig, "GET", "/workers", "").await;
    assert_eq!(page.json()["absent"][0]["worker_id"], id);
    assert!(page.text().contains("unreachable") && !page.text().contains("hush"));
    assert_eq!(
        ask(&rig, "DELETE", &format!("/workers/{id}"), "")
            .await
            .status,
        202
    );
    until("it is forgotten", || rig.app.members().list().len() == 1).await;
    rig.at_rest().await;
}

#[tokio::test]
async fn a_worker_is_shown_its_own_key_and_never_the_clients_to_us() {
    let keys = kvasir_frontend::ApiKeys::parse("ours").unwrap();
    let options = AppOptions {
        keys,
        ..AppOptions::default()
    };
    let rig = Rig::with(1, Setup::options(options)).await;
    let mut client = rig.client().await;
    client
        .post(CHAT, "authorization: Bearer ours\r\n", ASK)
        .await;
    assert_eq!(client.answer().await.text(), ANSWER);
    client
        .post("/v1/embeddings", "authorization: Bearer ours\r\n", ASK)
        .await;
    assert_eq!(client.answer().await.status, 200);
    for seen in rig.stage.seen() {
        assert!(seen.header("authorization").is_empty(), "{}", seen.head);
    }
    let with_key = format!(r#"{{"url":"{}","api_key":"theirs"}}"#, rig.engines[0].url());
    client
        .post("/workers", "authorization: Bearer ours\r\n", with_key)
        .await;
    assert_eq!(client.answer().await.status, 200);
    in_time("the new key is shown", async {
        loop {
            client
                .post(CHAT, "authorization: Bearer ours\r\n", ASK)
                .await;
            assert_eq!(client.answer().await.text(), ANSWER);
            let seen = rig.stage.seen().pop().unwrap();
            if seen.header("authorization") == ["Bearer theirs"] {
                break;
            }
        }
    })
    .await;
    drop(client);
    // Without keys of ours, what the client shows is for the engine.
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    client
        .post(CHAT, "authorization: Bearer mine\r\n", ASK)
        .await;
    assert_eq!(client.answer().await.text(), ANSWER);
    let seen = rig.stage.seen().pop().unwrap();
    assert_eq!(seen.header("authorization"), ["Bearer mine"]);
}

/// A file of its own for one test.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, text: &str) -> Self {
        let name = format!("kvasir-{name}-{}", std::process::id());
        let file = Self(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_workers_file_is_followed_under_load() {
    let rig = Rig::of(1).await;
    let (clients, done) = (Tasks::new(), Arc::new(AtomicBool::new(false)));
    let (second, third) = (
        Engine::start(&rig.stage).await,
        Engine::start(&rig.stage).await,
    );
    let file = TempFile::new("workers", &format!("# ours\n{}\n", second.url()));
    let taken = WorkersFile::read(file.0.clone(), None).unwrap();
    taken.start(rig.app.members(), rig.app.metrics(), rig.app.tasks());
    rig.joined(2).await;
    let running = under_load(&rig, &clients, &done);
    file.write(&format!("{}\n{}\n", second.url(), third.url()));
    rig.joined(3).await;
    file.write("rubbish\n");
    in_time("it is refused", async {
        while rig.metric("kvasir_workers_file_rejected_total").await == 0.0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    rig.joined(3).await;
    file.write(&format!("{},block-size=16\n", third.url()));
    rig.joined(2).await;
    until("the old one is forgotten", || {
        rig.app.members().get(id_of(&second)).is_none()
    })
    .await;
    assert_eq!(
        rows(&rig, &third).await[0]["origins"],
        serde_json::json!(["file"])
    );
    done.store(true, Ordering::SeqCst);
    for client in running {
        assert!(in_time("client ends", client).await.unwrap().unwrap() > 0);
    }
    assert_eq!(rig.booked(), 0);
}

#[tokio::test]
async fn a_workers_file_that_is_not_one_is_refused_at_the_start() {
    let missing = WorkersFile::read("/nonexistent/workers".into(), None).unwrap_err();
    assert!(missing.to_string().contains("cannot be read"));
    let file = TempFile::new("bad-workers", "http://a:1\nb:1\n");
    let bad = WorkersFile::read(file.0.clone(), None).unwrap_err();
    assert!(bad.to_string().starts_with("line 2: "), "{bad}");
}

/// A frontend that is named as its own worker does not join, and a request never goes round.
#[tokio::test]
async fn a_frontend_is_not_its_own_worker() {
    let every = std::time::Duration::from_millis(20);
    let rig = Rig::with_fleet(1, Setup::usual(), |fleet| fleet.asking_every(every)).await;
    let own = format!("http://{}", rig.address());
    let body = format!(r#"{{"url":"{own}"}}"#);
    assert_eq!(ask(&rig, "POST", "/workers", &body).await.status, 201);
    let id = parse_worker(&own).unwrap().id;
    until("it is seen through", || {
        let member = rig.app.members().get(id);
        member.is_some_and(|m| m.state == kvasir_frontend::MemberState::Unreachable)
    })
    .await;
    rig.joined(1).await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    // What comes back by another way is told so.
    let via = rig.stage.seen()[0].header("via")[0].to_owned();
    let mut client = rig.client().await;
    client
        .post(
            CHAT,
            &format!("connection: close\r\nvia: 1.1 other, {via}\r\n"),
            ASK,
        )
        .await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 508);
    assert!(answer.text().contains("--worker"), "{}", answer.text());
}
