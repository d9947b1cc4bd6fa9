//! Selections that may still be turned into reservations: bounded in number, bytes and time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvasir_types::{SequenceHash, Time, WorkerRank};

use super::{SelectGroup, SelectOptions};

/// What a reservation needs to be made later.
#[derive(Clone)]
pub(super) struct Selection {
    pub(super) group: Arc<SelectGroup>,
    pub(super) target: WorkerRank,
    pub(super) sequence: Arc<[SequenceHash]>,
    pub(super) prefill_tokens: u32,
    pub(super) osl: Option<u32>,
}

impl Selection {
    fn bytes(&self) -> usize {
        self.sequence.len() * size_of::<SequenceHash>() + size_of::<Self>()
    }
}

/// The selections, by the name that each was given.
pub(super) struct Selections {
    options: SelectOptions,
    by_id: HashMap<String, (u64, Selection)>,
    /// When each was made; one that was made again or used is left here until its turn.
    order: VecDeque<(Time, u64, String)>,
    bytes: usize,
    last: u64,
}

impl Selections {
    pub(super) fn new(options: SelectOptions) -> Self {
        Self {
            options,
            by_id: HashMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            last: 0,
        }
    }

    /// Keeps one; an older one of this name is forgotten, and so are the oldest when there are too many.
    pub(super) fn put(&mut self, now: Time, id: &str, selection: Selection) {
        self.take(now, id);
        self.last += 1;
        self.bytes += selection.bytes();
        self.by_id.insert(id.to_owned(), (self.last, selection));
        self.order.push_back((now, self.last, id.to_owned()));
        self.expire(now);
    }

    /// Takes one out.
    pub(super) fn take(&mut self, now: Time, id: &str) -> Option<Selection> {
        self.expire(now);
        let (_, selection) = self.by_id.remove(id)?;
        self.bytes -= selection.bytes();
        Some(selection)
    }

    fn expire(&mut self, now: Time) {
        while let Some((made, number, id)) = self.order.front() {
            let is_current = self
                .by_id
                .get(id)
                .is_some_and(|(current, _)| current == number);
            let is_over = now - *made >= self.options.ttl
                || self.by_id.len() > self.options.entries_max
                || self.bytes > self.options.bytes_max;
            if is_current && !is_over {
                return;
            }
            if is_current && let Some((_, gone)) = self.by_id.remove(id) {
                self.bytes -= gone.bytes();
            }
            self.order.pop_front();
        }
    }
}
