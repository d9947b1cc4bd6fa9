//! A pool behind HTTP that all engines share: what it is asked, what its answer counts, and what happens when it fails.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_frontend::HttpPool;
use kvasir_host::SharedCache;
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_upstream::WorkerTls;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::rig::{Rig, Setup, until};

/// Where completions are asked for.
const COMPLETION: &str = "/v1/completions";

/// What the pool does with a question.
#[derive(Clone, Copy, Debug)]
enum Act {
    Say(&'static str),
    Status(u16),
    Hang,
    Close,
}

/// A pool, and what it was asked.
#[derive(Clone)]
struct PoolServer {
    act: Arc<Mutex<Act>>,
    asked: Arc<Mutex<Vec<Value>>>,
    url: String,
}

impl PoolServer {
    async fn start(act: Act) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let this = Self {
            act: Arc::new(Mutex::new(act)),
            asked: Arc::default(),
            url: format!("http://{}/find?pool=a", listener.local_addr().unwrap()),
        };
        let (tasks, server) = (kvasir_tasks::Tasks::new(), this.clone());
        let each = tasks.clone();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                each.spawn(async move { server.serve(stream).await });
            }
        });
        this
    }

    async fn serve(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        loop {
            let (mut line, mut length) = (String::new(), 0);
            if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                return;
            }
            assert!(line.starts_with("POST /find?pool=a HTTP/1.1"), "{line}");
            loop {
                line.clear();
                if stream.read_line(&mut line).await.unwrap_or(0) <= 2 {
                    break;
                }
                let (name, value) = line.split_once(':').unwrap();
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await.unwrap();
            let asked = serde_json::from_slice(&body).unwrap();
            self.asked.lock().unwrap().push(asked);
            let act = *self.act.lock().unwrap();
            let (status, said) = match act {
                Act::Say(said) => (200, said),
                Act::Status(status) => (status, "no"),
                Act::Hang => return std::future::pending().await,
                Act::Close => return,
            };
            let answer = format!(
                "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{said}",
                said.len()
            );
            stream.get_mut().write_all(answer.as_bytes()).await.unwrap();
        }
    }

    fn act(&self, act: Act) {
        *self.act.lock().unwrap() = act;
    }

    fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap().clone()
    }
}

async fn rig(pool: &PoolServer, timeout: Duration) -> Rig {
    let router = RouterConfig {
        router_mode: RouterMode::Kv,
        ..RouterConfig::default()
    };
    let http = HttpPool::new(&pool.url, &WorkerTls::default()).unwrap();
    let setup = Setup {
        router,
        shared_cache: Some(SharedCache::new(Arc::new(http), timeout)),
        ..Setup::usual()
    };
    Rig::with(2, setup).await
}

/// Asks for a completion of 72 tokens and gives the blocks that the pool was credited with, for the worker that won.
async fn credit(rig: &Rig, more: &Value) -> f64 {
    let tokens: Vec<u32> = (100..172).collect();
    let mut body = json!({"model": "m", "prompt": tokens});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    assert_eq!(rig.post(COMPLETION, body.to_string()).await.status, 200);
    let mut client = rig.client().await;
    client
        .send("GET /decisions?limit=1 HTTP/1.1\r\nhost: door\r\n\r\n")
        .await;
    let list = client.answer().await.json();
    let terms = &list["decisions"][0]["candidates"][0]["terms"];
    terms["shared_blocks"].as_f64().unwrap()
}

async fn queries(rig: &Rig, result: &str) -> f64 {
    let page = rig.page().await;
    let series = format!("kvasir_shared_cache_queries_total{{result=\"{result}\"}} ");
    let line = page.lines().find_map(|line| line.strip_prefix(&series));
    line.map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn the_blocks_of_a_pool_are_credited_and_stand_in_the_decision() {
    let pool = PoolServer::start(Act::Say(r#"{"ranges":[[0,3],[4,9]]}"#)).await;
    let rig = rig(&pool, Duration::from_secs(10)).await;
    // Three of the four whole blocks, at half their worth.
    assert_eq!(credit(&rig, &json!({})).await, 1.5);
    let asked = pool.asked();
    assert_eq!(asked.len(), 1);
    let tokens: Vec<u32> = (100..172).collect();
    let expected = json!({"model": "m", "block_size": 16, "tokens": tokens});
    assert_eq!(asked[0], expected);
    pool.act(Act::Say(r#"{"tokens":40}"#));
    assert_eq!(credit(&rig, &json!({"cache_salt": "s"})).await, 1.0);
    assert_eq!(pool.asked()[1]["cache_salt"], "s");
    let own = json!({"nvext": {"router_config_override": {"shared_cache_multiplier": 1.0}}});
    assert_eq!(credit(&rig, &own).await, 2.0);
    assert_eq!(queries(&rig, "answered").await, 3.0);
    let seen = "dynamo_component_router_shared_cache_hit_rate_count";
    assert_eq!(rig.metric(seen).await, 3.0);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_pool_that_fails_in_any_way_fails_no_request() {
    let pool = PoolServer::start(Act::Status(500)).await;
    let rig = rig(&pool, Duration::from_secs(10)).await;
    let acts = [Act::Status(500), Act::Close, Act::Say("{}"), Act::Say("[")];
    for act in acts {
        pool.act(act);
        assert_eq!(credit(&rig, &json!({})).await, 0.0, "{act:?}");
    }
    assert_eq!(queries(&rig, "error").await, 4.0);
    assert_eq!(
        rig.metric("dynamo_router_shared_cache_errors_total").await,
        4.0
    );
    // One good answer, and the count begins anew.
    pool.act(Act::Say(r#"{"tokens":64}"#));
    assert_eq!(credit(&rig, &json!({})).await, 2.0);
    pool.act(Act::Status(503));
    for _ in 0..5 {
        credit(&rig, &json!({})).await;
    }
    // Five in a row: it is left alone, and found again when it is back.
    let asked = pool.asked().len();
    assert_eq!(credit(&rig, &json!({})).await, 0.0);
    assert_eq!(
        (pool.asked().len(), queries(&rig, "away").await),
        (asked, 1.0)
    );
    pool.act(Act::Say(r#"{"tokens":64}"#));
    let mut found = 0.0;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while found == 0.0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
        found = credit(&rig, &json!({})).await;
    }
    assert_eq!(found, 2.0);
}

#[tokio::test]
async fn a_pool_that_hangs_is_not_waited_for() {
    let pool = PoolServer::start(Act::Hang).await;
    let rig = rig(&pool, Duration::from_millis(20)).await;
    assert_eq!(credit(&rig, &json!({})).await, 0.0);
    assert_eq!(queries(&rig, "late").await, 1.0);
    until("the question is taken back", || rig.booked() == 0).await;
    // Nobody listens there any more.
    let gone = PoolServer {
        url: "http://127.0.0.1:9/find?pool=a".into(),
        ..pool
    };
    let rig = self::rig(&gone, Duration::from_secs(10)).await;
    assert_eq!(credit(&rig, &json!({})).await, 0.0);
    assert_eq!(queries(&rig, "error").await, 1.0);
}
