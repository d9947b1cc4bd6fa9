//! One source's stream: how it is stepped, whatever its format.

use std::time::Duration;

use kvasir_types::{Time, WorkerId, WorkerRank};
use kvasir_wire::SourceEvent;
use kvasir_wire::native::RecoveryRequest;

use crate::batches::BatchSequencer;
use crate::router_events::RouterEventSequencer;
use crate::{
    Cache, Counts, Cursor, EventFormat, Notice, RecoveryCause, Resync, StreamCheckpoint,
    StreamOptions,
};

/// Old messages in a row after which a restart of their publisher is assumed.
pub(crate) const STALE_RUN_MAX: u32 = 8;

/// How a stream stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamStatus {
    /// Whether the subscription stands.
    pub connected: bool,
    /// Why a recovery runs, if one does.
    pub recovering: Option<RecoveryCause>,
    /// Whether the cache holds exactly what the engines announced since their caches were last empty.
    pub exact: bool,
    /// The last batch applied; router events have a number per rank instead.
    pub cursor: Option<Cursor>,
    /// Blocks that wait for their parents.
    pub orphan_blocks: usize,
    /// Bytes of live messages that wait for a recovery.
    pub held_bytes: usize,
    /// How late messages of the last minute came at worst, beside the quickest; zero where messages have no time.
    pub lag: Duration,
    /// Totals.
    pub counts: Counts,
}

/// What a stream asks of its host.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Ask the replay socket for all messages from `from` on. Ends an earlier replay.
    Replay {
        /// Goes with every answer.
        attempt: u64,
        /// First sequence number wanted.
        from: u64,
    },
    /// Ask the worker's own index.
    Query {
        /// Goes with the answer.
        attempt: u64,
        /// What to ask.
        request: RecoveryRequest,
    },
    /// The replay or the question with this number is no longer wanted.
    CancelReplay {
        /// As the request was numbered.
        attempt: u64,
    },
    /// Something that an operator may want to read once.
    Notice(Notice),
}

/// Puts one source's events in order, asks for what is missing, and applies them.
#[derive(Clone, Debug)]
pub struct Sequencer {
    format: Format,
}

#[derive(Clone, Debug)]
enum Format {
    Batches(Box<BatchSequencer>),
    RouterEvents(Box<RouterEventSequencer>),
}

impl Sequencer {
    /// A stream of which nothing came yet.
    #[must_use]
    pub fn new(format: EventFormat, options: StreamOptions) -> Self {
        let format = match format {
            EventFormat::EngineBatches { rank } => {
                Format::Batches(Box::new(BatchSequencer::new(rank, options, None)))
            }
            EventFormat::RouterEvents(encoding) => {
                Format::RouterEvents(Box::new(RouterEventSequencer::new(encoding, options)))
            }
        };
        Self { format }
    }

    /// A stream of batches whose cache is as it was at `cursor`; it is compared with the engine's on connecting.
    #[must_use]
    pub fn resume(rank: WorkerRank, options: StreamOptions, cursor: Option<Cursor>) -> Self {
        let batches = BatchSequencer::new(rank, options, cursor);
        Self {
            format: Format::Batches(Box::new(batches)),
        }
    }

    /// As [`Self::resume`], from what [`Self::checkpoint`] gave.
    #[must_use]
    pub fn restore(
        rank: WorkerRank,
        options: StreamOptions,
        checkpoint: &StreamCheckpoint,
    ) -> Self {
        let batches = BatchSequencer::restore(rank, options, checkpoint);
        Self {
            format: Format::Batches(Box::new(batches)),
        }
    }

    /// What a later stream needs to go on from here with the same cache; `None` if the cache is not what
    /// the engine announced up to the cursor, and for router events.
    #[must_use]
    pub fn checkpoint(&self) -> Option<StreamCheckpoint> {
        match &self.format {
            Format::Batches(batches) => batches.checkpoint(),
            Format::RouterEvents(_) => None,
        }
    }

    /// How the stream stands.
    #[must_use]
    pub fn status(&self) -> StreamStatus {
        match &self.format {
            Format::Batches(batches) => batches.status(),
            Format::RouterEvents(events) => events.status(),
        }
    }

    /// The ranks that this source spoke of.
    #[must_use]
    pub fn ranks(&self) -> Vec<WorkerRank> {
        match &self.format {
            Format::Batches(batches) => batches.ranks().collect(),
            Format::RouterEvents(events) => events.ranks().collect(),
        }
    }

    /// When [`Self::tick`] is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        match &self.format {
            Format::Batches(batches) => batches.next_deadline(),
            Format::RouterEvents(events) => events.next_deadline(),
        }
    }

    /// Takes what happened at the source. Effects on blocks go to `cache` at once, the rest to `out`.
    pub fn step<C: Cache>(
        &mut self,
        now: Time,
        event: SourceEvent,
        cache: &C,
        out: &mut Vec<Output>,
    ) {
        let mut io = Io { now, cache, out };
        match &mut self.format {
            Format::Batches(batches) => batches.step(event, &mut io),
            Format::RouterEvents(events) => events.step(event, &mut io),
        }
    }

    /// The cache view was found wrong.
    pub fn resync<C: Cache>(
        &mut self,
        now: Time,
        resync: Resync,
        cache: &C,
        out: &mut Vec<Output>,
    ) {
        let mut io = Io { now, cache, out };
        match &mut self.format {
            Format::Batches(batches) => batches.resync(resync, &mut io),
            Format::RouterEvents(events) => events.resync(resync, &mut io),
        }
    }

    /// A deadline may have passed.
    pub fn tick<C: Cache>(&mut self, now: Time, cache: &C, out: &mut Vec<Output>) {
        let mut io = Io { now, cache, out };
        match &mut self.format {
            Format::Batches(batches) => batches.tick(&mut io),
            Format::RouterEvents(events) => events.tick(&mut io),
        }
    }

    /// Router events of this rank count from now on, and its whole state is asked for as soon as the source is
    /// connected. A stream of batches has its rank from the start.
    pub fn add_rank(&mut self, rank: WorkerRank) {
        if let Format::RouterEvents(events) = &mut self.format {
            events.add_rank(rank);
        }
    }

    /// Router events of this worker count from now on. A stream of batches has its worker from the start.
    pub fn add_worker(&mut self, worker: WorkerId) {
        if let Format::RouterEvents(events) = &mut self.format {
            events.add_worker(worker);
        }
    }

    /// Forgets a worker that left, and ignores what still comes of it.
    pub fn remove_worker<C: Cache>(&mut self, worker: WorkerId, cache: &C) {
        if let Format::RouterEvents(events) = &mut self.format {
            events.remove_worker(worker, cache);
        }
    }

    /// Forgets every rank of this source; for the end of a stream.
    pub fn leave<C: Cache>(&mut self, cache: &C) {
        match &mut self.format {
            Format::Batches(batches) => batches.leave(cache),
            Format::RouterEvents(events) => events.leave(cache),
        }
    }
}

/// The world as one step sees it.
pub(crate) struct Io<'a, C> {
    pub(crate) now: Time,
    pub(crate) cache: &'a C,
    pub(crate) out: &'a mut Vec<Output>,
}

impl<C> Io<'_, C> {
    pub(crate) fn notice(&mut self, notice: Notice) {
        self.out.push(Output::Notice(notice));
    }
}
