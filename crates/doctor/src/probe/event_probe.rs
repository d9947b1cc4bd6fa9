//! Subscribes to the events of one rank as the frontend does: the same stream, an index of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_host::{EventStream, StreamObserver};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{EventFormat, Notice, Sequencer, Skip, StreamOptions};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::zmq::{Endpoint, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{EventSource as _, SourceEvent, SourceFault, next_event};
use kvasir_types::{DpRank, LocalHash, WorkerId, WorkerRank};
use kvasir_upstream::EventSource;

use crate::observations::{EventCounts, ReplayProbe};

/// A connection that failed once may be reconnecting.
const SECOND_CHANCE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Anomalies {
    other_block_size: Option<u32>,
    refused: Option<String>,
}

#[derive(Default)]
struct Recorder(Mutex<Anomalies>);

impl Recorder {
    fn notes(&self) -> MutexGuard<'_, Anomalies> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamObserver for Recorder {
    fn notice(&self, notice: &Notice) {
        match notice {
            Notice::Skipped(Skip::BlockSize { engine }) => {
                self.notes().other_block_size = Some(*engine);
            }
            Notice::Refused(error) => self.notes().refused = Some(error.to_string()),
            _ => {}
        }
    }

    fn link(&self, _: Option<&SourceFault>) {}
}

/// One rank's events, going into an index.
pub(crate) struct EventProbe {
    stream: EventStream,
    index: Arc<Index>,
    book: Arc<Recorder>,
    rank: WorkerRank,
    clock: Clock,
    after: Option<Duration>,
}

impl EventProbe {
    /// Begins to listen; an error says what is wrong with the address.
    pub(crate) fn open(
        tasks: &Tasks,
        worker: WorkerId,
        rank: u32,
        block_size: u32,
        source: &EventSource,
    ) -> Result<Self, String> {
        let events = source.events.parse::<Endpoint>();
        let events = events.map_err(|error| error.to_string())?;
        let mut sockets = ZmqSourceOptions::new(events, None);
        sockets.topic.clone_from(&source.topic);
        let mut options = StreamOptions::new(block_size);
        // The past is not needed, and asking for it would keep a busy publisher from its work.
        options.replay = false;
        options.verify_every = None;
        let (index, book) = (Arc::new(Index::new()), Arc::new(Recorder::default()));
        let rank = WorkerRank {
            worker,
            rank: DpRank(rank),
        };
        let clock = Clock::new();
        let stream = EventStream::spawn(
            tasks,
            ZmqSource::start(tasks, sockets),
            Sequencer::new(EventFormat::EngineBatches { rank }, options),
            Arc::clone(&index),
            Arc::new(move || clock.now()),
            Arc::clone(&book) as _,
        );
        Ok(Self {
            stream,
            index,
            book,
            rank,
            clock,
            after: None,
        })
    }

    /// Waits until the socket is reached, or is known not to be there.
    pub(crate) async fn linked(&mut self, timeout: Duration) -> Result<(), SourceFault> {
        let news = self
            .stream
            .until(|s| s.status.connected || s.fault.is_some());
        let _ = tokio::time::timeout(timeout, news).await;
        if !self.stream.snapshot().status.connected {
            let up = self.stream.until(|s| s.status.connected);
            let _ = tokio::time::timeout(SECOND_CHANCE, up).await;
        }
        let snapshot = self.stream.snapshot();
        match snapshot.status.connected {
            true => Ok(()),
            false => Err(snapshot.fault.unwrap_or(SourceFault::Silent)),
        }
    }

    /// Blocks from the start of `locals` that the rank announced; waits until that are all, or until nothing
    /// more is to be expected.
    pub(crate) async fn predicted(&mut self, locals: &[LocalHash], wait: Duration) -> u32 {
        let began = self.clock.now();
        let deadline = began + wait;
        loop {
            let status = self.stream.snapshot().status;
            let found = self.found(locals);
            if status.counts.batches > 0 && self.after.is_none() {
                self.after = Some(self.clock.now() - began);
            }
            let left = deadline - self.clock.now();
            if found as usize >= locals.len() || left.is_zero() {
                return found;
            }
            let more = self
                .stream
                .until(|s| s.status.counts != status.counts || s.fault.is_some());
            let waited = tokio::time::timeout(left, more).await;
            if waited.is_err() || !self.stream.snapshot().status.connected {
                return self.found(locals);
            }
        }
    }

    fn found(&self, locals: &[LocalHash]) -> u32 {
        let mut matches = Matches::new();
        self.index.find(locals, &mut matches);
        matches.get(self.rank).map_or(0, |m| m.device)
    }

    /// What came so far.
    pub(crate) fn seen(&self) -> EventCounts {
        let (status, notes) = (self.stream.snapshot().status, self.book.notes());
        EventCounts {
            batches: status.counts.batches,
            blocks: status.counts.blocks_stored,
            other_block_size: notes.other_block_size,
            refused: notes.refused.clone(),
            after: self.after,
        }
    }

    /// Asks the replay socket for the last batch that came, or for all if none came.
    pub(crate) async fn ask_replay(
        &self,
        tasks: &Tasks,
        source: &EventSource,
        timeout: Duration,
    ) -> ReplayProbe {
        let last = self.stream.snapshot().status.cursor.map(|c| c.sequence);
        let parse = |text: &str| text.parse::<Endpoint>();
        let replay = parse(source.replay.as_deref().unwrap_or_default());
        let (events, replay) = match (parse(&source.events), replay) {
            (Ok(events), Ok(replay)) => (events, replay),
            (Err(error), _) | (_, Err(error)) => {
                return ReplayProbe::Failed(SourceFault::Unreachable(error.to_string()));
            }
        };
        let mut source = ZmqSource::start(tasks, ZmqSourceOptions::new(events, Some(replay)));
        source.replay(1, last.unwrap_or(0));
        let (mut batches, mut has_last) = (0, last.map(|_| false));
        let deadline = self.clock.now() + timeout;
        loop {
            let left: Duration = deadline - self.clock.now();
            let Ok(event) = tokio::time::timeout(left, next_event(&mut source)).await else {
                return ReplayProbe::TimedOut(timeout);
            };
            match event {
                SourceEvent::Replayed { frame, .. } => {
                    batches += 1;
                    has_last = has_last.map(|has| has || Some(frame.sequence) == last);
                }
                SourceEvent::ReplayEnded { .. } => {
                    return ReplayProbe::Answered { batches, has_last };
                }
                SourceEvent::ReplayFailed { fault, .. } => return ReplayProbe::Failed(fault),
                _ => {}
            }
        }
    }
}
