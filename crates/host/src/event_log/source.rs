//! One rank of a log, as a source of events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use kvasir_transport::{EventSource, SourceEvent};
use kvasir_types::WorkerRank;
use kvasir_wire::native::RecoveryRequest;
use tokio::sync::mpsc;

use super::shared::{LogShared, Question};

/// Pieces of the log that wait for one rank; who reads the log waits for room.
const QUEUE_MAX: usize = 256;

/// A piece of the log for one rank.
#[derive(Debug)]
pub(super) struct Piece {
    /// What the rank is told.
    pub(super) event: SourceEvent,
    /// Up to which message of the stream it tells, and the number of the rank's last event in it; none if it tells no events.
    pub(super) until: Option<(u64, u64)>,
    /// Of which stream: one that is made anew counts from the start again.
    pub(super) generation: u64,
}

/// A message of a stream. Those of a later stream are greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    generation: u64,
    sequence: u64,
}

impl Mark {
    /// Its number, if it is of this stream; none of its messages otherwise.
    pub(super) const fn sequence_in(self, generation: u64) -> u64 {
        match self.generation == generation {
            true => self.sequence,
            false => 0,
        }
    }
}

/// How far a rank has come.
#[derive(Debug, Default)]
pub(super) struct Progress(Mutex<Marks>);

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    /// The last message of the stream that was put into the rank's queue.
    queued: Mark,
    /// The last one that its stream took out.
    taken: Mark,
    /// The last one that it is done with.
    applied: Mark,
    /// The number of the rank's last event that was taken out.
    event: u64,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_queued(&self, sequence: u64, generation: u64) {
        self.lock().queued = Mark {
            generation,
            sequence,
        };
    }

    /// The last message that was put into the rank's queue.
    pub(super) fn queued(&self) -> Mark {
        self.lock().queued
    }

    /// Up to which message the rank is done, if something of it waits; nothing does if none.
    pub(super) fn behind_at(&self) -> Option<Mark> {
        let marks = *self.lock();
        (marks.applied != marks.queued).then_some(marks.applied)
    }

    /// What the rank has taken in, while its stream is paused: up to which message, and its last event.
    pub(super) fn taken(&self) -> (Mark, u64) {
        let marks = *self.lock();
        (marks.taken, marks.event)
    }
}

/// The events of one rank. Dropping it ends its part.
#[derive(Debug)]
pub(crate) struct LogSource {
    rank: WorkerRank,
    number: u64,
    shared: Arc<LogShared>,
    pieces: mpsc::Receiver<Piece>,
    progress: Arc<Progress>,
}

impl LogSource {
    pub(super) fn new(rank: WorkerRank, shared: &Arc<LogShared>) -> Self {
        let (queue, pieces) = mpsc::channel(QUEUE_MAX);
        let progress = Arc::new(Progress::default());
        let number = shared.listen(rank, queue, &progress);
        Self {
            rank,
            number,
            shared: Arc::clone(shared),
            pieces,
            progress,
        }
    }
}

impl EventSource for LogSource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        // Whoever asks for more is done with what he has.
        let mut marks = self.progress.lock();
        marks.applied = marks.taken;
        drop(marks);
        let Poll::Ready(Some(piece)) = self.pieces.poll_recv(cx) else {
            return Poll::Pending;
        };
        if let Some((sequence, event)) = piece.until {
            let generation = piece.generation;
            let mut marks = self.progress.lock();
            marks.event = event;
            marks.taken = Mark {
                generation,
                sequence,
            };
        }
        Poll::Ready(piece.event)
    }

    fn replay(&mut self, _: u64, _: u64) {}

    fn cancel_replay(&mut self, attempt: u64) {
        self.shared.take_back(self.rank, attempt);
    }

    fn query(&mut self, attempt: u64, request: RecoveryRequest) {
        self.shared.ask(
            self.rank,
            Question {
                number: self.number,
                attempt,
                start: request.start,
            },
        );
    }
}

impl Drop for LogSource {
    fn drop(&mut self) {
        self.shared.leave(self.rank, self.number);
    }
}
