//! Where in a publisher's stream we stand, and how to know a message again.

use kvasir_wire::engine::peek_time;
use xxhash_rust::xxh3::xxh3_64;

/// Prints remembered: how far back a duplicate is known as one.
const PRINTS: usize = 256;

/// The last batch applied. Its print tells one life of an engine from another: sequence numbers begin
/// again with the process, and nothing else says so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cursor {
    /// Its sequence number.
    pub sequence: u64,
    /// Hash of its payload.
    pub print: u64,
    /// When the engine made it, by the engine's clock.
    pub at: f64,
}

impl Cursor {
    pub(crate) fn of(sequence: u64, payload: &[u8]) -> Self {
        Self {
            sequence,
            print: xxh3_64(payload),
            at: peek_time(payload).unwrap_or(0.0),
        }
    }
}

/// What a message with an old sequence number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// The same message again.
    Duplicate,
    /// A newer message under an old number: the engine began again.
    Restart,
    /// An old message that came late.
    Stale,
}

/// The cursor and the prints of the last messages before it.
#[derive(Clone, Debug)]
pub(crate) struct Trail {
    last: Option<Cursor>,
    prints: Box<[Option<(u64, u64)>; PRINTS]>,
}

impl Trail {
    pub(crate) fn new(last: Option<Cursor>) -> Self {
        let mut trail = Self {
            last: None,
            prints: Box::new([None; PRINTS]),
        };
        if let Some(last) = last {
            trail.advance(last);
        }
        trail
    }

    pub(crate) const fn last(&self) -> Option<Cursor> {
        self.last
    }

    pub(crate) fn advance(&mut self, cursor: Cursor) {
        self.prints[cursor.sequence as usize % PRINTS] = Some((cursor.sequence, cursor.print));
        self.last = Some(cursor);
    }

    pub(crate) fn clear(&mut self) {
        self.last = None;
        self.prints.fill(None);
    }

    /// Judges a message whose sequence number is not after the cursor's.
    pub(crate) fn judge(&self, found: &Cursor) -> Repeat {
        let known = self.prints[found.sequence as usize % PRINTS];
        if known == Some((found.sequence, found.print)) {
            return Repeat::Duplicate;
        }
        match self.last.is_some_and(|last| found.at > last.at) {
            true => Repeat::Restart,
            false => Repeat::Stale,
        }
    }
}
