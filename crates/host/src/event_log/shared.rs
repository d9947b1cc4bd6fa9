//! What the parts of a log share: its ranks, their questions, and how far it was read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_index::Index;
use kvasir_types::WorkerRank;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::source::{Mark, Piece, Progress};
use crate::events::EventStreamHandle;

/// Ranks that nobody listens to are remembered for this long: their workers may not have been found yet.
pub(super) const STRANGER_AGE: Duration = Duration::from_secs(60);
/// So many of them.
const STRANGERS_MAX: usize = 1 << 16;

/// What a rank wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// Of which listener.
    pub(super) number: u64,
    /// Goes with the answer.
    pub(super) attempt: u64,
    /// The first event that it misses; none if it knows nothing.
    pub(super) start: Option<u64>,
}

/// A rank that is listened to.
#[derive(Clone, Debug)]
pub(super) struct LogRank {
    pub(super) number: u64,
    pub(super) queue: mpsc::Sender<Piece>,
    pub(super) progress: Arc<Progress>,
    /// It was told that the log is being read.
    pub(super) is_connected: bool,
    /// The last event that it was given, once it was told what came before; until then it is given none.
    pub(super) newest: Option<u64>,
    /// Where its events end up.
    pub(super) into: Option<(Arc<Index>, EventStreamHandle)>,
}

/// A rank of which messages came though nobody listens.
#[derive(Clone, Copy, Debug)]
struct Stranger {
    /// The first of them.
    first: u64,
    since: Instant,
}

/// How far the log was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// Which stream it is: when it was made.
    pub(super) created: String,
    /// How many streams there were before it.
    pub(super) generation: u64,
    /// The last message that was handed on.
    pub(super) position: u64,
    /// All messages after this one were seen.
    pub(super) since: Option<u64>,
    /// It was made while we read: what its messages follow is told by none of them.
    pub(super) is_anew: bool,
}

/// What the parts of a log share.
#[derive(Debug, Default)]
pub(super) struct LogShared {
    inner: Mutex<Inner>,
    next: AtomicU64,
    /// Somebody listens or asks.
    pub(super) wake: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    ranks: BTreeMap<WorkerRank, LogRank>,
    questions: BTreeMap<WorkerRank, Question>,
    strangers: BTreeMap<WorkerRank, Stranger>,
    reading: Reading,
}

impl LogShared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody listens to a rank; the number of the listener.
    pub(super) fn listen(
        &self,
        rank: WorkerRank,
        queue: mpsc::Sender<Piece>,
        progress: &Arc<Progress>,
    ) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let listener = LogRank {
            number,
            queue,
            progress: Arc::clone(progress),
            is_connected: false,
            newest: None,
            into: None,
        };
        self.lock().ranks.insert(rank, listener);
        self.wake.notify_one();
        number
    }

    pub(super) fn opened(&self, rank: WorkerRank, index: Arc<Index>, stream: EventStreamHandle) {
        if let Some(open) = self.lock().ranks.get_mut(&rank) {
            open.into = Some((index, stream));
        }
    }

    pub(super) fn leave(&self, rank: WorkerRank, number: u64) {
        let mut inner = self.lock();
        if inner
            .ranks
            .get(&rank)
            .is_some_and(|open| open.number == number)
        {
            inner.ranks.remove(&rank);
            inner.questions.remove(&rank);
        }
    }

    pub(super) fn ask(&self, rank: WorkerRank, question: Question) {
        self.lock().questions.insert(rank, question);
        self.wake.notify_one();
    }

    pub(super) fn take_back(&self, rank: WorkerRank, attempt: u64) {
        let mut inner = self.lock();
        if inner
            .questions
            .get(&rank)
            .is_some_and(|q| q.attempt == attempt)
        {
            inner.questions.remove(&rank);
        }
    }

    /// What ranks want to know; each is told once.
    pub(super) fn take_questions(&self) -> BTreeMap<WorkerRank, Question> {
        std::mem::take(&mut self.lock().questions)
    }

    pub(super) fn has_questions(&self) -> bool {
        !self.lock().questions.is_empty()
    }

    pub(super) fn has_listeners(&self) -> bool {
        !self.lock().ranks.is_empty()
    }

    /// The queues of ranks that are to be told that the log is being read, or that it is not; each is told once.
    pub(super) fn tell_link(&self, is_connected: bool) -> Vec<mpsc::Sender<Piece>> {
        let mut inner = self.lock();
        let ranks = inner.ranks.values_mut();
        let others = ranks.filter(|open| open.is_connected != is_connected);
        let told = others.map(|open| {
            open.is_connected = is_connected;
            open.queue.clone()
        });
        told.collect()
    }

    pub(super) fn rank(&self, rank: WorkerRank) -> Option<LogRank> {
        self.lock().ranks.get(&rank).cloned()
    }

    pub(super) fn ranks(&self) -> BTreeMap<WorkerRank, LogRank> {
        self.lock().ranks.clone()
    }

    /// A listener was given all up to this event; it is no stranger any more.
    pub(super) fn set_newest(&self, rank: WorkerRank, number: u64, newest: u64) {
        let mut inner = self.lock();
        inner.strangers.remove(&rank);
        if let Some(open) = inner.ranks.get_mut(&rank)
            && open.number == number
        {
            open.newest = Some(newest);
        }
    }

    /// A message came of a rank that is not given any.
    pub(super) fn note_stranger(&self, rank: WorkerRank, sequence: u64) {
        let mut inner = self.lock();
        if inner.strangers.len() < STRANGERS_MAX || inner.strangers.contains_key(&rank) {
            let since = Instant::now();
            let first = sequence;
            inner
                .strangers
                .entry(rank)
                .and_modify(|known| known.first = known.first.min(first))
                .or_insert(Stranger { first, since });
        }
    }

    pub(super) fn reading(&self) -> Reading {
        self.lock().reading.clone()
    }

    pub(super) fn generation(&self) -> u64 {
        self.lock().reading.generation
    }

    pub(super) fn set_reading(&self, change: impl FnOnce(&mut Reading)) {
        change(&mut self.lock().reading);
    }

    /// Up to which message everything is in the index, as far as anybody here may want it: what ranks are done with, and what came before the first
    /// message of a rank whose worker may still be found. Beside it the last message that each rank was given by now.
    pub(super) fn floor(&self) -> (u64, BTreeMap<WorkerRank, Mark>) {
        let now = Instant::now();
        let mut inner = self.lock();
        inner
            .strangers
            .retain(|_, stranger| now - stranger.since < STRANGER_AGE);
        let position = inner.reading.position;
        let ranks = inner.ranks.values();
        let generation = inner.reading.generation;
        let behind = ranks.filter_map(|open| open.progress.behind_at());
        let behind = behind.map(|mark| mark.sequence_in(generation));
        let strangers = inner.strangers.values();
        let before = strangers.map(|stranger| stranger.first.saturating_sub(1));
        let floor = behind.chain(before).fold(position, u64::min);
        let given = inner.ranks.iter();
        let given = given.map(|(rank, open)| (*rank, open.progress.queued()));
        (floor, given.collect())
    }
}
