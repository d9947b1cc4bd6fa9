//! Pools that answer, fail, hang and come back; and a store whose events come over a real socket.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use kvasir_index::IndexOptions;
use kvasir_router::{Arrival, RouterConfig, RouterMode, WorkerSpec};
use kvasir_transport::zmq::{ZmqLimits, ZmqPublisher};
use kvasir_types::{RequestId, WorkerId};
use serde_json::{Value, json};

use super::*;
use crate::testing::context;
use crate::{Model, ModelSpec, RouterSetup};

/// Nothing here takes this long unless it hangs.
const HANGS: Duration = Duration::from_secs(20);
const TIMEOUT: Duration = Duration::from_millis(50);

/// What a pool does next.
#[derive(Clone, Debug)]
enum Act {
    Holds(Vec<Range<u32>>),
    Fail,
    Hang,
}

#[derive(Debug)]
struct Scripted {
    act: Mutex<Act>,
    asked: AtomicUsize,
}

impl CachePool for Scripted {
    fn find<'a>(&'a self, _: &'a PoolPrompt) -> PoolFuture<'a> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let act = self.act.lock().unwrap().clone();
        Box::pin(async move {
            match act {
                Act::Holds(ranges) => Ok(SharedRanges::from_ranges(ranges)),
                Act::Fail => Err("no".to_owned()),
                Act::Hang => std::future::pending().await,
            }
        })
    }
}

/// All of the prompt.
fn holds_four() -> Act {
    Act::Holds(vec![0..2, 2..4])
}

struct Rig {
    pool: Arc<Scripted>,
    model: Model,
    context: HostContext,
}

impl Rig {
    fn new(act: Act, multiplier: f64) -> Self {
        let pool = Arc::new(Scripted {
            act: Mutex::new(act),
            asked: AtomicUsize::new(0),
        });
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            shared_cache_multiplier: multiplier,
            ..RouterConfig::default()
        };
        let context = context();
        let mut setup = RouterSetup::new(config, IndexOptions::default());
        setup.shared_cache = Some(SharedCache::new(Arc::clone(&pool) as _, TIMEOUT));
        let model = setup.make(&spec(), None, &context);
        for id in [1, 2] {
            model.join(WorkerSpec::new(WorkerId(id)));
        }
        Self {
            pool,
            model,
            context,
        }
    }

    fn act(&self, act: Act) {
        *self.pool.act.lock().unwrap() = act;
    }

    fn asked(&self) -> usize {
        self.pool.asked.load(Ordering::SeqCst)
    }

    fn counted(&self, result: &str) -> u64 {
        let queries = &self.context.metrics.shared_cache_queries_total;
        queries.with_label_values(&[result]).get()
    }

    /// Books a prompt of four blocks; the blocks that the pool was credited with for the winner.
    async fn credit(&self, id: u128) -> f64 {
        let blocks = self.model.name_blocks(&tokens(), "");
        let arrival = Box::new(Arrival::new(RequestId(id), 64));
        let booking = self.model.book(arrival, &blocks).await.unwrap();
        let explained = |router: &kvasir_router::Router| {
            let decision = router.explain(RequestId(id)).unwrap();
            decision.chosen().unwrap().terms.shared_blocks
        };
        let credit = self.model.host.ask(explained);
        drop(booking);
        credit
    }
}

fn spec() -> ModelSpec {
    ModelSpec {
        name: "m".into(),
        block_size: 16,
        context_length: 4096,
        parent: None,
        migration_limit: 0,
    }
}

fn tokens() -> Vec<Token> {
    (0..64).collect()
}

#[tokio::test]
async fn what_the_pool_holds_is_credited_and_cut_to_the_prompt() {
    let rig = Rig::new(Act::Holds(vec![0..2, 3..99]), 0.5);
    assert_eq!(rig.credit(1).await, 1.5);
    assert_eq!(rig.counted("answered"), 1);
    let metrics = &rig.context.metrics;
    assert_eq!(metrics.router_shared_cache_hit_rate.get_sample_sum(), 0.75);
    let beyond = &metrics.router_shared_cache_beyond_blocks;
    assert_eq!(
        (beyond.get_sample_count(), beyond.get_sample_sum()),
        (1, 3.0)
    );
}

#[tokio::test]
async fn a_prompt_is_asked_for_once_however_often_it_is_placed() {
    let rig = Rig::new(holds_four(), 1.0);
    let blocks = rig.model.name_blocks(&tokens(), "");
    for id in 0..3 {
        let arrival = Box::new(Arrival::new(RequestId(id), 64));
        rig.model.book(arrival, &blocks).await.unwrap();
    }
    assert_eq!(rig.asked(), 1);
    let mut guessed = rig.model.name_blocks(&tokens(), "");
    guessed.set_guessed(true);
    let arrival = Box::new(Arrival::new(RequestId(9), 64));
    rig.model.book(arrival, &guessed).await.unwrap();
    assert_eq!(rig.asked(), 1, "what is no token is not asked for");
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_fails_or_hangs_costs_its_credit_and_no_more() {
    let rig = Rig::new(Act::Fail, 1.0);
    assert_eq!(rig.credit(1).await, 0.0);
    rig.act(Act::Hang);
    assert_eq!(rig.credit(2).await, 0.0);
    assert_eq!((rig.counted("error"), rig.counted("late")), (1, 1));
    assert_eq!(rig.context.metrics.shared_cache_errors_total.get(), 2);
    rig.act(holds_four());
    assert_eq!(rig.credit(3).await, 4.0);
    // Too many in a row: it is left alone.
    rig.act(Act::Fail);
    for id in 0..u128::from(crate::lookaside::FAILURES_MAX) {
        rig.credit(10 + id).await;
    }
    let asked = rig.asked();
    assert_eq!(rig.credit(20).await, 0.0);
    assert_eq!((rig.asked(), rig.counted("away")), (asked, 1));
}

#[tokio::test]
async fn only_so_many_questions_are_under_way() {
    let rig = Rig::new(holds_four(), 1.0);
    let cache = Arc::clone(rig.model.host.shared_cache().unwrap());
    let all = cache.lookaside.fill().unwrap();
    assert_eq!(rig.credit(1).await, 0.0);
    assert_eq!((rig.asked(), rig.counted("busy")), (0, 1));
    drop(all);
    assert_eq!(rig.credit(2).await, 4.0);
}

#[test]
fn the_pool_reaches_on_from_what_a_worker_has_without_a_hole() {
    let holds = PoolAnswer::Holds(Arc::new([0..2, 4..6, 6..8, 10..12]));
    for (own, reach) in [
        (0, 2),
        (2, 2),
        (3, 3),
        (4, 8),
        (5, 8),
        (8, 8),
        (9, 9),
        (10, 12),
    ] {
        assert_eq!(holds.reach(own), reach, "{own}");
    }
    assert_eq!(PoolAnswer::Unknown.reach(3), u32::MAX);
}

/// A Mooncake store: its master's event socket.
struct Store {
    socket: ZmqPublisher,
    sequence: AtomicUsize,
}

impl Store {
    async fn start(context: &HostContext) -> Self {
        let free = "tcp://127.0.0.1:0".parse().unwrap();
        let socket = ZmqPublisher::bind(&context.tasks, &free, ZmqLimits::default());
        Self {
            socket: socket.await.unwrap(),
            sequence: AtomicUsize::new(0),
        }
    }

    fn say(&self, events: &Value) {
        let batch = json!([1, events, 0]).to_string();
        let batch = kvasir_msgpack::Value::from_json(batch.as_bytes()).unwrap();
        let mut payload = Vec::new();
        batch.to_msgpack(&mut payload);
        let sequence = self.sequence.fetch_add(1, Ordering::SeqCst) as u64;
        let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
        self.socket.publish(&[Bytes::new(), number, payload.into()]);
    }
}

fn prompt(salt: &str, block_size: u32) -> PoolPrompt {
    PoolPrompt {
        model: "m".into(),
        tokens: (1..=10).collect(),
        block_size,
        salt: salt.into(),
        lora: Arc::default(),
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(HANGS, wait).await;
    waited.unwrap_or_else(|_| panic!("{what}"));
}

const PAGE_1: &str = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
const PAGE_2: &str = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";

#[tokio::test]
async fn a_store_is_known_by_its_events_and_forgotten_when_some_are_missing() {
    let context = context();
    let store = Store::start(&context).await;
    let at = format!("tcp://{}", store.socket.address());
    let pool = HicachePool::new(&context, None);
    let model: Arc<str> = "m".into();
    let data = json!({"backend": "mooncake", "page_size": 4, "kv_events_endpoint": at});
    let without = json!({"backend": "mooncake", "page_size": 4});
    // The second worker does not say where; the first one's word holds.
    let announce = |data: &[&Value]| pool.announce(data.iter().map(|data| (&model, *data)));
    announce(&[&data, &without]);
    until("subscription", || store.socket.subscribers() == 1).await;
    let total = |prompt: &PoolPrompt| pool.find_now(prompt).total();
    let stored =
        |key: String| json!({"event_type": "stored", "object_key": key, "tenant_id": "default"});
    store.say(&json!([
        stored(format!("{PAGE_1}_0_k")),
        stored(format!("{PAGE_2}_0_k"))
    ]));
    store.say(&json!([stored(format!("{PAGE_2}_0_v"))]));
    until("second page", || total(&prompt("", 4)) == 1).await;
    let found = pool.find_now(&prompt("", 4));
    assert_eq!(
        (found.beyond(0), found.beyond(1), found.beyond(2)),
        (1, 1, 0),
        "the first lacks its half"
    );
    assert_eq!(
        (total(&prompt("tenant", 4)), total(&prompt("", 16))),
        (0, 0)
    );
    store.say(&json!([stored(format!("{PAGE_1}_0_v"))]));
    until("both pages", || total(&prompt("", 4)) == 2).await;
    // Announced again, as with every change of the fleet: what is known stays.
    announce(&[&data]);
    assert_eq!(total(&prompt("", 4)), 2);
    store.say(&json!([{"event_type": "removed", "object_key": format!("{PAGE_1}_0_k")}]));
    until("one page", || total(&prompt("", 4)) == 1).await;
    // One message is lost.
    store.sequence.fetch_add(1, Ordering::SeqCst);
    store.say(&json!([]));
    until("nothing", || total(&prompt("", 4)) == 0).await;
    // Workers that differ share nothing, and one that is alone again does.
    let other = json!({"backend": "mooncake", "page_size": 4, "tp_size": 2});
    announce(&[&data, &other]);
    assert_eq!(total(&prompt("", 4)), 0);
    until("nobody listens", || store.socket.subscribers() == 0).await;
    announce(&[&data]);
    until("subscription", || store.socket.subscribers() == 1).await;
    context.tasks.stop();
}
