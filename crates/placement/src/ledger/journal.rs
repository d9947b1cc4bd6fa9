//! What happened to bookings, for whoever learns from it.
//!
//! A ledger that keeps a journal notes each change with the rank's state around it. The reader takes the notes out; a
//! journal that nobody reads stops at [`NOTES_MAX`] notes. Beside them, the load of a rank in the terms of time.

use std::time::Duration;

use kvasir_types::{RequestId, SequenceHash, Time};

use super::{Ledger, Rank};

/// Notes kept; more are lost, and the reader is told by [`LedgerNote::Lost`].
const NOTES_MAX: usize = 4096;

/// A rank's running requests at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankState {
    /// Requests before their first token.
    pub pending: u32,
    /// The others.
    pub decoding: u32,
    /// Prompt and output tokens of those others.
    pub context: u64,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerNote {
    /// A prompt is to be computed. The state is that after it.
    Booked {
        /// Where.
        slot: u32,
        /// When.
        at: Time,
        /// The rank then.
        state: RankState,
    },
    /// A first token came. The state is that before it, but pending requests are those left.
    FirstToken {
        /// Where.
        slot: u32,
        /// When.
        at: Time,
        /// The request.
        id: RequestId,
        /// Prompt tokens computed.
        new: u32,
        /// Prompt tokens found in the cache.
        cached: u32,
        /// The rank then.
        state: RankState,
    },
    /// A prompt is no longer pending, and nobody knows since when it was computed, or whether it was.
    Unseen {
        /// Where.
        slot: u32,
        /// When.
        at: Time,
        /// Prompt tokens that were to be computed.
        new: u32,
        /// Prompt tokens that should be in the cache.
        cached: u32,
        /// Requests pending still.
        pending: u32,
    },
    /// Tokens came.
    Tokens {
        /// Where.
        slot: u32,
        /// When.
        at: Time,
        /// The request.
        id: RequestId,
        /// Tokens generated until now.
        generated: u32,
        /// The rank then.
        state: RankState,
    },
    /// A request is over.
    Freed {
        /// Where it was.
        slot: u32,
        /// When.
        at: Time,
        /// The request.
        id: RequestId,
        /// The last complete block of its prompt, where blocks have names.
        tail: Option<SequenceHash>,
    },
    /// Notes are missing here.
    Lost,
}

/// The notes not yet read.
#[derive(Clone, Debug, Default)]
pub(super) struct Journal {
    on: bool,
    notes: Vec<LedgerNote>,
    /// Slots whose load changed since they were last asked for, each once.
    changed: Vec<u32>,
    is_changed: Vec<bool>,
}

impl Journal {
    pub(super) fn start(&mut self) {
        self.on = true;
    }

    #[inline]
    pub(super) fn note(&mut self, note: impl FnOnce() -> LedgerNote) {
        if !self.on {
            return;
        }
        match self.notes.len() {
            0..NOTES_MAX => self.notes.push(note()),
            NOTES_MAX => self.notes.push(LedgerNote::Lost),
            _ => {}
        }
    }

    #[inline]
    pub(super) fn mark(&mut self, slot: u32) {
        if !self.on {
            return;
        }
        let at = slot as usize;
        if self.is_changed.len() <= at {
            self.is_changed.resize(at + 1, false);
        }
        if let Some(seen) = self.is_changed.get_mut(at).filter(|seen| !**seen) {
            *seen = true;
            self.changed.push(slot);
        }
    }

    pub(super) fn next_changed(&mut self) -> Option<u32> {
        let slot = self.changed.pop()?;
        if let Some(seen) = self.is_changed.get_mut(slot as usize) {
            *seen = false;
        }
        Some(slot)
    }

    pub(super) fn drain(&mut self, mut each: impl FnMut(LedgerNote)) {
        self.notes.drain(..).for_each(&mut each);
    }
}

/// A rank's load in the terms of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimedLoad {
    /// Requests before their first token.
    pub pending: u32,
    /// Of those, the ones that show no first token: their answers come in one piece.
    pub silent: u32,
    /// The others.
    pub decoding: u32,
    /// Prompt and output tokens of those others.
    pub context: u64,
    /// Prompt tokens of the pending ones, cached ones included.
    pub pending_tokens: u64,
    /// How long their prompts are expected to take, in seconds.
    pub prefill: f64,
    /// Of that, the oldest one's.
    pub oldest: f64,
    /// When that one became the oldest.
    pub oldest_since: Time,
    /// Blocks that running requests hold.
    pub active_blocks: u64,
}

impl Ledger {
    /// Notes every change from now on, for [`Ledger::read_journal`].
    pub fn keep_journal(&mut self) {
        self.journal.start();
    }

    /// Hands out what was noted since it was last asked for, oldest first.
    pub fn read_journal(&mut self, each: impl FnMut(LedgerNote)) {
        self.journal.drain(each);
    }

    /// A slot whose load is wanted again.
    pub(crate) fn mark_changed(&mut self, slot: u32) {
        self.journal.mark(slot);
    }

    /// A slot whose load changed since it was last named here, with its load.
    pub(crate) fn next_changed(&mut self) -> Option<(u32, TimedLoad)> {
        let slot = self.journal.next_changed()?;
        Some((slot, self.timed_load(slot)))
    }

    /// A rank's load in the terms of time.
    #[must_use]
    pub fn timed_load(&self, slot: u32) -> TimedLoad {
        let Some(rank) = self.ranks.get(slot as usize) else {
            return TimedLoad::default();
        };
        let state = rank.state();
        TimedLoad {
            pending: state.pending,
            silent: rank.silent,
            decoding: state.decoding,
            context: state.context,
            pending_tokens: rank.pending_tokens,
            prefill: rank.prefill_ns as f64 * 1e-9,
            oldest: rank.oldest.duration_ns as f64 * 1e-9,
            oldest_since: rank.oldest.since,
            active_blocks: rank.active_blocks(),
        }
    }
}

impl Rank {
    pub(super) fn state(&self) -> RankState {
        let pending = self.waiting.len();
        RankState {
            pending,
            decoding: self.running.len() - pending,
            context: self.context,
        }
    }
}

/// An expected duration in whole nanoseconds; none is 0. At most half an hour, so that sums do not overflow.
pub(super) fn nanos(duration: Option<Duration>) -> u64 {
    let nanos = duration.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
    nanos.min(1 << 41)
}
