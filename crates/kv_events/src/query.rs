//! One question to a worker's own index, and the live events that wait for its answer.

use std::collections::BTreeMap;

use kvasir_types::KvEvent;
use kvasir_wire::native::RouterEvent;

use crate::RecoveryCause;
use crate::recovery::Stage;

/// A question under way: one cause, several attempts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) cause: RecoveryCause,
    /// The number of the attempt that is out.
    pub(crate) attempt: u64,
    pub(crate) stage: Stage,
    /// Attempts that failed.
    pub(crate) tries: u32,
    /// Whether the whole state is asked for: what is known is not built upon.
    pub(crate) whole: bool,
    /// The first number asked for by the attempt that is out.
    pub(crate) start: Option<u64>,
}

impl Query {
    /// Whether this answer is wanted.
    pub(crate) fn wants(&self, attempt: u64) -> bool {
        self.attempt == attempt && matches!(self.stage, Stage::Asking(_))
    }
}

/// Live events of one rank that wait for an answer, by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldEvents {
    events: BTreeMap<u64, RouterEvent>,
    bytes: usize,
    /// Some had to be dropped.
    pub(crate) overflowed: bool,
}

impl HeldEvents {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn first_id(&self) -> Option<u64> {
        self.events.keys().next().copied()
    }

    /// Keeps an event. Returns how many had to be dropped: all or none, for what follows a hole waits for another answer
    /// anyway.
    pub(crate) fn push(&mut self, event: &RouterEvent, bytes_max: usize) -> u64 {
        let mut dropped = 0;
        if self.bytes + size(event) > bytes_max {
            dropped = self.events.len() as u64 + 1;
            self.clear();
            self.overflowed = true;
            return dropped;
        }
        if self.events.insert(event.id, event.clone()).is_none() {
            self.bytes += size(event);
        }
        dropped
    }

    /// The event with this number, if it waits; what has a smaller one is known and goes.
    pub(crate) fn take(&mut self, id: u64) -> Option<RouterEvent> {
        while let Some(first) = self.events.first_entry()
            && *first.key() <= id
        {
            let event = first.remove();
            self.bytes = self.bytes.saturating_sub(size(&event));
            if event.id == id {
                return Some(event);
            }
        }
        None
    }
}

/// About what an event takes in memory.
fn size(event: &RouterEvent) -> usize {
    const EVENT: usize = size_of::<RouterEvent>();
    match &event.event {
        KvEvent::Stored { blocks, .. } => EVENT + 16 * blocks.len(),
        KvEvent::Removed { blocks, .. } => EVENT + 8 * blocks.len(),
        KvEvent::Cleared { .. } => EVENT,
    }
}
