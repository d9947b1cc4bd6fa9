//! A mock engine's real event sockets, and a router's real event stream at the other end: what the events foretell
//! is what the engine reports; each fault is noticed, named and mended.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_hash::{Scope, local_hashes};
use kvasir_host::{EventStream, StreamObserver};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{EventFormat, Notice, Resync, Sequencer, Skip, StreamOptions};
use kvasir_mocker::{
    EventOptions, EventSockets, Fault, Observer, Worker, WorkerOptions, seeded_answer,
};
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{Endpoint, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{SourceFault, token_stream};
use kvasir_types::{
    DpRank, RequestContext, RequestId, Rng, Sampling, Time, Token, TokenRequest, WorkerId,
    WorkerRank,
};
use kvasir_wire::engine::Dialect;

const BLOCK: u32 = 16;
const ID: WorkerId = WorkerId(7);

#[derive(Default)]
struct Notes(Mutex<Vec<Notice>>);

impl StreamObserver for Notes {
    fn notice(&self, notice: &Notice) {
        self.0.lock().unwrap().push(*notice);
    }
    fn link(&self, _: Option<&SourceFault>) {}
}

/// An engine, its sockets, and somebody who listens to them.
struct Setup {
    worker: Worker,
    sockets: Arc<EventSockets>,
    stream: EventStream,
    index: Arc<Index>,
    notes: Arc<Notes>,
    next: u128,
    rng: Rng,
}

impl Setup {
    async fn new(dialect: Dialect) -> Self {
        let tasks = Tasks::new();
        let start = tokio::time::Instant::now();
        let unix_time = Arc::new(move || 1.7e9 + start.elapsed().as_secs_f64());
        let free = || Endpoint::new("127.0.0.1", 0);
        let mut options = EventOptions::new(free(), Some(free()), BLOCK, unix_time);
        options.dialect = dialect;
        let sockets = Arc::new(EventSockets::bind(&tasks, &options).await.unwrap());
        let observer: Arc<dyn Observer> = Arc::clone(&sockets) as _;
        let engine = EngineConfig {
            block_size: BLOCK,
            num_blocks: 64,
            event_tokens: true,
            max_model_len: 900,
            speedup: 1e6,
            ..EngineConfig::default()
        };
        let options = WorkerOptions {
            engine,
            ranks: 1,
            answer: seeded_answer(50_000),
        };
        let worker = Worker::spawn(&tasks, ID, options, &observer).unwrap();

        let index = Arc::new(Index::new());
        let (events, replay) = sockets.addresses(0).unwrap();
        let at = |port| Endpoint::new("127.0.0.1", port);
        let options =
            ZmqSourceOptions::new(at(events.port()), replay.map(|address| at(address.port())));
        let source = ZmqSource::start(&tasks, options);
        let rank = WorkerRank {
            worker: ID,
            rank: DpRank(0),
        };
        let format = EventFormat::EngineBatches { rank };
        let sequencer = Sequencer::new(format, StreamOptions::new(BLOCK));
        let notes = Arc::new(Notes::default());
        let now = Arc::new(move || Time::ZERO + start.elapsed());
        let stream = EventStream::spawn(
            &tasks,
            source,
            sequencer,
            Arc::clone(&index),
            now,
            Arc::clone(&notes) as _,
        );
        let mut setup = Self {
            worker,
            sockets,
            stream,
            index,
            notes,
            next: 0,
            rng: Rng::new(1),
        };
        setup
            .stream
            .until(|s| s.status.connected && s.status.recovering.is_none())
            .await;
        setup
    }

    /// Waits until the listener has heard all that was published.
    async fn settled(&mut self) {
        let published = self.sockets.published(0);
        let waiting = self.stream.until(|s| {
            let heard = s.status.cursor.map_or(0, |c| c.sequence + 1);
            heard == published && s.status.recovering.is_none()
        });
        let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await;
        assert!(
            waited.is_ok(),
            "{published} published, {:?}",
            self.stream.snapshot()
        );
    }

    fn foretold(&self, prompt: &[Token], salt: Option<&str>) -> u32 {
        let scope = Scope {
            salt: salt.unwrap_or_default(),
            ..Scope::default()
        };
        let mut locals = local_hashes(prompt, BLOCK as usize, &scope);
        // The last token is always computed.
        locals.truncate((prompt.len() - 1) / BLOCK as usize);
        let mut matches = Matches::new();
        self.index.find(&locals, &mut matches);
        matches
            .get(WorkerRank {
                worker: ID,
                rank: DpRank(0),
            })
            .map_or(0, |m| m.device * BLOCK)
    }

    /// Runs a prompt to its end. Returns what it became, and the cached tokens that the engine reports.
    async fn ask(&mut self, prompt: &[Token], salt: Option<&str>) -> (Vec<Token>, u32) {
        self.next += 1;
        let request = TokenRequest {
            id: RequestId(self.next),
            model: "m".into(),
            tokens: prompt.into(),
            sampling: Sampling {
                max_tokens: 20,
                ..Sampling::default()
            },
            rank: DpRank(0),
            priority: 0,
            lora: None,
            salt: salt.map(Into::into),
            context: RequestContext::default(),
        };
        let (sink, mut stream) = token_stream(ID);
        self.worker.submit(&request, sink);
        let (mut all, mut cached) = (prompt.to_vec(), None);
        while let Some(item) = stream.next().await {
            let item = item.unwrap();
            all.extend(item.tokens);
            cached = cached.or(item.cached_tokens);
        }
        (all, cached.unwrap_or(0))
    }

    fn fresh(&mut self, len: u32) -> Vec<Token> {
        (0..len).map(|_| self.rng.below(50_000) as Token).collect()
    }

    /// Conversations that grow turn by turn, some of them evicted meanwhile. Every prediction must be right.
    async fn conversations(&mut self, turns: u32, salt: Option<&str>) {
        let mut talks: Vec<Vec<Token>> = (0..4).map(|_| self.fresh(90)).collect();
        let mut hits = 0;
        for turn in 0..turns {
            let at = self.rng.below(4) as usize;
            self.settled().await;
            let foretold = self.foretold(&talks[at], salt);
            let prompt = talks[at].clone();
            let (mut said, cached) = self.ask(&prompt, salt).await;
            assert_eq!(foretold, cached, "turn {turn}");
            hits += u32::from(cached > 0);
            let more = self.fresh(30);
            said.extend(more);
            talks[at] = match said.len() > 500 {
                true => self.fresh(90),
                false => said,
            };
        }
        assert!(
            hits > turns / 3,
            "{hits} hits in {turns} turns show nothing"
        );
    }

    fn noticed(&self, found: impl Fn(&Notice) -> bool) -> bool {
        self.notes.0.lock().unwrap().iter().any(found)
    }
}

#[tokio::test]
async fn without_faults_every_prediction_is_right() {
    for dialect in [Dialect::Vllm24, Dialect::Vllm09, Dialect::SglangMap] {
        let mut setup = Setup::new(dialect).await;
        setup.conversations(40, None).await;
        assert!(setup.stream.snapshot().status.exact);
        assert!(!setup.noticed(|n| matches!(n, Notice::Gap { .. } | Notice::Restarted)));
    }
}

#[tokio::test]
async fn salted_prompts_are_told_apart() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    setup.conversations(20, Some("tenant-a")).await;
    let prompt = setup.fresh(100);
    let (_, cached) = setup.ask(&prompt, Some("tenant-a")).await;
    assert_eq!(cached, 0);
    setup.settled().await;
    assert_eq!(setup.foretold(&prompt, Some("tenant-a")), 96);
    assert_eq!(setup.foretold(&prompt, None), 0);
}

#[tokio::test]
async fn lost_repeated_late_and_disordered_batches_are_mended() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    let delay = Fault::Delay(1, Duration::from_millis(20));
    for fault in [Fault::Drop(3), Fault::Duplicate, Fault::Reorder, delay] {
        setup.sockets.inject(fault);
        // Enough steps that something follows the fault and shows it.
        for _ in 0..3 {
            let prompt = setup.fresh(100);
            setup.ask(&prompt, None).await;
        }
        setup.conversations(10, None).await;
        assert!(setup.stream.snapshot().status.exact, "{fault:?}");
    }
    assert!(setup.noticed(|n| matches!(n, Notice::Gap { .. })));
    assert!(setup.stream.snapshot().status.counts.duplicates >= 1);
}

#[tokio::test]
async fn a_restarted_engine_is_noticed_and_relearned() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    setup.conversations(10, None).await;
    let prompt = setup.fresh(100);
    setup.ask(&prompt, None).await;
    setup.settled().await;
    assert_eq!(setup.foretold(&prompt, None), 96);
    setup.worker.restart().await;
    setup.stream.until(|s| s.status.counts.restarts == 1).await;
    assert_eq!(setup.foretold(&prompt, None), 0);
    setup.conversations(10, None).await;
    assert!(setup.noticed(|n| *n == Notice::Restarted));
    assert!(setup.stream.snapshot().status.exact);
}

/// Only the numbering begins again: the engine still holds what the listener then forgets, and the listener
/// says that its cache view is not exact... until the engine is known to be empty.
#[tokio::test]
async fn a_sequence_that_begins_again_empties_the_picture() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    let prompt = setup.fresh(100);
    setup.ask(&prompt, None).await;
    setup.settled().await;
    setup.sockets.inject(Fault::RestartSequence);
    let other = setup.fresh(100);
    setup.ask(&other, None).await;
    setup.stream.until(|s| s.status.counts.restarts == 1).await;
    setup.settled().await;
    assert_eq!(
        (setup.foretold(&prompt, None), setup.foretold(&other, None)),
        (0, 96)
    );
}

#[tokio::test]
async fn a_replay_that_no_longer_reaches_back_is_named() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    setup.conversations(5, None).await;
    setup.settled().await;
    setup.sockets.inject(Fault::Drop(1000));
    for _ in 0..2 {
        let prompt = setup.fresh(100);
        setup.ask(&prompt, None).await;
    }
    setup.sockets.inject(Fault::Drop(0));
    setup.sockets.inject(Fault::ForgetReplay(0));
    let prompt = setup.fresh(100);
    setup.ask(&prompt, None).await;
    setup.settled().await;
    assert!(setup.noticed(|n| matches!(n, Notice::ReplayTooShort { .. })));
    assert!(!setup.stream.snapshot().status.exact);
    assert_eq!(setup.foretold(&prompt, None), 96);
    // A clear that is told makes the cache view exact again.
    assert!(setup.worker.clear_cache().await);
    setup.conversations(10, None).await;
    assert!(setup.stream.snapshot().status.exact);
}

#[tokio::test]
async fn a_silent_clear_is_mended_by_forgetting() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    let prompt = setup.fresh(100);
    setup.ask(&prompt, None).await;
    setup.settled().await;
    setup.sockets.inject(Fault::SilentClear);
    assert!(setup.worker.clear_cache().await);
    let other = setup.fresh(100);
    setup.ask(&other, None).await;
    setup.settled().await;
    assert_eq!(setup.foretold(&prompt, None), 96, "nobody was told");
    setup.stream.resync(Resync::Forget);
    setup.stream.until(|s| !s.status.exact).await;
    assert_eq!(setup.foretold(&prompt, None), 0);
}

#[tokio::test]
async fn another_block_size_is_named() {
    let mut setup = Setup::new(Dialect::Vllm24).await;
    setup.sockets.inject(Fault::BlockSize(8));
    let prompt = setup.fresh(100);
    setup.ask(&prompt, None).await;
    setup.settled().await;
    let skip = Notice::Skipped(Skip::BlockSize { engine: 8 });
    assert!(setup.noticed(|n| *n == skip));
    assert_eq!(setup.foretold(&prompt, None), 0);
}
