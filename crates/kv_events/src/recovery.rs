//! One recovery: what was asked of the replay socket, and how its answer is judged.

use std::collections::VecDeque;

use bytes::Bytes;
use kvasir_types::Time;
use kvasir_wire::frame::Frame;

use crate::{Cursor, RecoveryCause};

/// What a recovery waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// An answer, at the latest by then.
    Asking(Time),
    /// The pause before the next attempt.
    Pausing(Time),
}

/// A recovery under way.
#[derive(Clone, Debug)]
pub(crate) struct Recovery {
    pub(crate) cause: RecoveryCause,
    pub(crate) attempt: u64,
    pub(crate) stage: Stage,
    /// The message that must come first, being the last one that was applied: if it is another one under
    /// its number, this is another life of the engine.
    pub(crate) anchor: Option<Cursor>,
    /// Whether the first message of the answer was judged.
    pub(crate) begun: bool,
    /// Attempts without progress.
    pub(crate) tries: u32,
    /// Messages applied.
    pub(crate) messages: u64,
    /// Messages that are to replace the ranks when they are complete.
    pub(crate) replacement: Option<Replacement>,
}

/// A replay collected before it replaces what was known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replacement {
    /// Only if it is the whole story.
    pub(crate) whole: bool,
    pub(crate) frames: Vec<Frame<Bytes>>,
    pub(crate) bytes: usize,
}

impl Recovery {
    /// First sequence number to ask for.
    pub(crate) fn from(&self) -> u64 {
        self.anchor.map_or(0, |anchor| anchor.sequence)
    }

    pub(crate) const fn deadline(&self) -> Time {
        match self.stage {
            Stage::Asking(time) | Stage::Pausing(time) => time,
        }
    }

    /// Whether answers with this number are wanted.
    pub(crate) fn wants(&self, attempt: u64) -> bool {
        self.attempt == attempt && matches!(self.stage, Stage::Asking(_))
    }
}

/// What the first message of an answer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstReplayed {
    /// It is the last one that was applied: go on behind it.
    Anchor,
    /// It follows what was applied.
    Follows,
    /// The stream from its very start.
    Start,
    /// The engine's buffer begins after what is missing.
    TooShort,
    /// Another life of the engine.
    Restart,
    /// Before what was asked for; some servers send all they have.
    Early,
}

pub(crate) fn judge_first(anchor: Option<Cursor>, found: &Cursor) -> FirstReplayed {
    match anchor {
        None if found.sequence == 0 => FirstReplayed::Start,
        None => FirstReplayed::TooShort,
        Some(anchor) if found.sequence < anchor.sequence => FirstReplayed::Early,
        Some(anchor) if found.sequence == anchor.sequence => match found.digest == anchor.digest {
            true => FirstReplayed::Anchor,
            false => FirstReplayed::Restart,
        },
        Some(anchor) if found.sequence == anchor.sequence + 1 && found.at >= anchor.at => {
            FirstReplayed::Follows
        }
        Some(_) => FirstReplayed::TooShort,
    }
}

/// Live messages that wait for a recovery to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldMessages {
    frames: VecDeque<Frame<Bytes>>,
    bytes: usize,
    /// How many of them came before the engine was last asked.
    before_ask: usize,
}

impl HeldMessages {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps a message. Returns how many had to be dropped: all or none, for a stream with a hole in the
    /// middle is worth no more than one with a hole at its start.
    pub(crate) fn push(&mut self, frame: Frame<Bytes>, bytes_max: usize) -> usize {
        let mut dropped = 0;
        if self.bytes + frame.payload.len() > bytes_max {
            dropped = self.frames.len();
            self.clear();
        }
        self.bytes += frame.payload.len();
        self.frames.push_back(frame);
        dropped
    }

    /// Puts back a message that was taken out.
    pub(crate) fn push_front(&mut self, frame: Frame<Bytes>) {
        self.bytes += frame.payload.len();
        self.frames.push_front(frame);
    }

    pub(crate) fn pop(&mut self) -> Option<Frame<Bytes>> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.payload.len();
        self.before_ask = self.before_ask.saturating_sub(1);
        Some(frame)
    }

    /// How many are numbered up to `last`.
    pub(crate) fn count_until(&self, last: Option<u64>) -> u64 {
        let known = |frame: &&Frame<Bytes>| last.is_some_and(|last| frame.sequence <= last);
        self.frames.iter().filter(known).count() as u64
    }

    /// The engine is being asked now.
    pub(crate) fn asked(&mut self) {
        self.before_ask = self.frames.len();
    }

    /// The engine told all that it has, up to `last`. What came before it was asked and is not in its
    /// answer is from an earlier life. Returns how many those were.
    pub(crate) fn drop_unknown(&mut self, last: Option<u64>) -> u64 {
        let mut dropped = 0;
        for _ in 0..self.before_ask {
            let Some(frame) = self.frames.pop_front() else {
                break;
            };
            if last.is_some_and(|last| frame.sequence <= last) {
                self.frames.push_back(frame);
            } else {
                self.bytes -= frame.payload.len();
                dropped += 1;
            }
        }
        let kept = self.before_ask - dropped;
        // The kept ones went to the back; they belong in front of what came later.
        self.frames.rotate_right(kept.min(self.frames.len()));
        self.before_ask = 0;
        dropped as u64
    }
}
