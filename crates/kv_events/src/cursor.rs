//! How far a publisher's stream was read, and how to tell a repeated message from a new one.

use kvasir_wire::engine::peek_time;
use xxhash_rust::xxh3::xxh3_64;

/// Digests kept: how far back a duplicate is known as one.
const DIGESTS: usize = 256;

/// The last batch applied. Its digest tells one life of an engine from another: sequence numbers begin
/// again with the process, and nothing else says so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cursor {
    /// Its sequence number.
    pub sequence: u64,
    /// Hash of its payload.
    pub digest: u64,
    /// When the engine made it, by the engine's clock.
    pub at: f64,
}

impl Cursor {
    pub(crate) fn of(sequence: u64, payload: &[u8]) -> Self {
        Self {
            sequence,
            digest: xxh3_64(payload),
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

/// The cursor and the digests of the last messages before it.
#[derive(Clone, Debug)]
pub(crate) struct History {
    last: Option<Cursor>,
    digests: Box<[Option<(u64, u64)>; DIGESTS]>,
}

impl History {
    pub(crate) fn new(last: Option<Cursor>) -> Self {
        let mut history = Self {
            last: None,
            digests: Box::new([None; DIGESTS]),
        };
        if let Some(last) = last {
            history.advance(last);
        }
        history
    }

    pub(crate) const fn last(&self) -> Option<Cursor> {
        self.last
    }

    pub(crate) fn advance(&mut self, cursor: Cursor) {
        self.digests[cursor.sequence as usize % DIGESTS] = Some((cursor.sequence, cursor.digest));
        self.last = Some(cursor);
    }

    pub(crate) fn clear(&mut self) {
        self.last = None;
        self.digests.fill(None);
    }

    /// Judges a message whose sequence number is not after the cursor's.
    pub(crate) fn judge(&self, found: &Cursor) -> Repeat {
        let known = self.digests[found.sequence as usize % DIGESTS];
        if known == Some((found.sequence, found.digest)) {
            return Repeat::Duplicate;
        }
        match self.last.is_some_and(|last| found.at > last.at) {
            true => Repeat::Restart,
            false => Repeat::Stale,
        }
    }
}
