//! Streams and the index while the file is written.

use crate::events::EventStream;
use kvasir_kv_events::{EventFormat, Sequencer, StreamOptions};
use kvasir_transport::{MemoryPublisher, SourceEvent, memory_source};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier};

use super::*;
use crate::testing::{context, host};

/// Blocks of an index that takes several parts.
const BLOCKS: u64 = 20_000;

/// A rank whose stream begins now.
fn rank(host: &RouterHost) -> (MemoryPublisher, EventStream, Arc<CacheView>) {
    let rank = WorkerRank::new(1, 0);
    let view = host.judge(rank, "http://engine", None, None);
    let (engine, source) = memory_source();
    let sequencer = Sequencer::new(EventFormat::EngineBatches { rank }, StreamOptions::new(16));
    let (context, index) = (host.context(), Arc::clone(host.index()));
    let clock = context.clock;
    let now = Arc::new(move || clock.now());
    let stream = view.subscribe("tcp://engine", || {
        EventStream::spawn(&context.tasks, source, sequencer, index, now, Arc::new(()))
    });
    (engine, stream, view)
}

/// Events of a stream that is not in the file are in the index all the same: it must not change while it is copied.
#[tokio::test]
async fn a_stream_that_is_not_worth_keeping_pauses_too() {
    let host = host(&context());
    let (engine, mut stream, view) = rank(&host);
    let mut paused = pause_all(vec![view], Then::Continue).await;
    let (_, paused) = paused.pop().unwrap();
    assert_eq!(paused.kept, None, "nothing came yet");
    let pause = paused.pause.expect("it pauses");
    engine.events.send(SourceEvent::Connected).await.unwrap();
    tokio::task::yield_now().await;
    assert!(!stream.snapshot().status.connected);
    drop(pause);
    stream.until(|s| s.status.connected).await;
}

fn chain(worker: u64, first: u64, blocks: u64) -> (WorkerRank, KvEvent) {
    let block = |i| StoredBlock {
        engine: EngineHash(i),
        local: LocalHash(i),
    };
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        parent: None,
        blocks: (first..first + blocks).map(block).collect(),
    };
    (WorkerRank::new(worker, 0), stored)
}

/// Nobody waits for the whole of an index that is in use; at the end nobody is left who would.
#[test]
fn an_index_that_keeps_changing_is_left_for_later() {
    let index = Index::new();
    let (rank, event) = chain(1, 1, BLOCKS);
    index.apply(rank, &event).unwrap();
    let mut next = 2 * BLOCKS;
    let mut changes = || {
        next += 1;
        let (rank, event) = chain(2, next, 1);
        index.apply(rank, &event).unwrap();
    };
    let copied = copy(&index, Then::Continue, &mut changes);
    assert_eq!(copied, Err(SnapshotError::Changed));
    assert!(next > 2 * BLOCKS, "others had their turn");
    for then in [Then::Continue, Then::End] {
        let restored = Index::new();
        restored
            .restore(&copy(&index, then, || {}).unwrap())
            .unwrap();
        assert_eq!(restored.stats().blocks, index.stats().blocks);
    }
}

/// One router, by its name.
struct Only(Arc<RouterHost>);

impl Routers for Only {
    fn all(&self) -> Vec<Arc<RouterHost>> {
        vec![Arc::clone(&self.0)]
    }

    fn named(&self, name: &str) -> Option<Arc<RouterHost>> {
        (**self.0.name() == *name).then(|| Arc::clone(&self.0))
    }
}

fn timed_host(context: &HostContext) -> Arc<RouterHost> {
    let config = kvasir_router::RouterConfig {
        router_mode: kvasir_router::RouterMode::Kv,
        router_policy: kvasir_router::RouterPolicy::Time,
        ..kvasir_router::RouterConfig::default()
    };
    let options = crate::HostOptions::new(config, kvasir_index::IndexOptions::default());
    RouterHost::start(&Arc::from("m"), options, context)
}

/// What was learned of engines is kept, even where no event stream is; who joins later is known, too.
#[tokio::test]
async fn what_was_learned_of_engines_is_in_the_file() {
    use kvasir_router::{Arrival, Input, Outcome, WorkerSpec};
    use kvasir_types::{RequestId, WorkerId};

    let context = context();
    let first = timed_host(&context);
    first.tell(Input::Joined(WorkerSpec::new(WorkerId(1))));
    for id in 1..=20 {
        let id = RequestId(id);
        first.tell(Input::Arrived(Box::new(Arrival::new(id, 500))));
        // Nobody takes the verdict of a request that nobody waits for: its end is told at once.
        first.tell(Input::FirstToken { id });
        first.tell(Input::Finished {
            id,
            on: None,
            outcome: Outcome::Completed { output_tokens: 9 },
        });
    }
    let learned = |host: &RouterHost| host.ask(|router| router.learned_record());
    let path = std::env::temp_dir().join(format!("kvasir-learned-{}", std::process::id()));
    let loaded = Arc::new(LoadedSnapshot::default());
    let routers: Arc<dyn Routers> = Arc::new(Only(Arc::clone(&first)));
    let writer = SnapshotWriter::new(&context, routers, loaded, path.clone());
    writer.finish().await.unwrap();
    let second = timed_host(&context);
    let loaded = Arc::new(LoadedSnapshot::load(&path).unwrap().unwrap());
    std::fs::remove_file(&path).unwrap();
    let routers: Arc<dyn Routers> = Arc::new(Only(Arc::clone(&second)));
    loaded.restore(&second, Arc::downgrade(&routers));
    assert_eq!(learned(&second), learned(&first));
    second.tell(Input::Joined(WorkerSpec::new(WorkerId(1))));
    assert_eq!(learned(&second), learned(&first));
}

/// A device that is given by mistake stays what it is.
#[test]
fn what_is_no_file_is_not_replaced() {
    let folder = std::env::temp_dir().join(format!("kvasir-snapshot-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let error = replace(&folder, &[]).unwrap_err();
    assert!(
        error.to_string().contains("is not a regular file"),
        "{error}"
    );
    assert!(folder.is_dir());
    let file = folder.join("index.kv");
    std::fs::write(&file, "old").unwrap();
    let bytes = replace(&file, &[]).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), bytes);
    std::fs::remove_dir_all(&folder).unwrap();
}
