//! Letting held requests go, on everything that may have opened a rank.

use std::time::Duration;

use kvasir_placement::Overlap;
use kvasir_types::{RequestId, Time};

use super::{FreedCapacity, Router};
use crate::Output;

impl Router {
    /// Sends whoever may go, best first, until nobody may.
    pub(super) fn release(&mut self, out: &mut Vec<Output>) {
        let freed = std::mem::replace(&mut self.freed, FreedCapacity::Nothing);
        if self.time.is_some() {
            return self.bind_held(freed != FreedCapacity::Nothing, out);
        }
        if self.queue.is_empty() || !self.worth_looking(freed) {
            return;
        }
        self.queue_checked = self.now;
        while let Some(id) = self.next_ready() {
            if self.ask_refresh(id, out) {
                continue;
            }
            let Some((entry, entered)) = self.queue.take(id) else {
                return;
            };
            self.no_longer_waits(&entry, true);
            let waiting = entry.payload;
            self.place(&waiting.arrival, waiting.pin, Some(entered), out);
        }
        self.freed = FreedCapacity::Nothing;
    }

    /// Whether anybody could have become able to go. Every head was found blocked before: if all that
    /// changed is one rank, and it is still closed to every class, they still are.
    fn worth_looking(&self, freed: FreedCapacity) -> bool {
        match freed {
            FreedCapacity::Nothing => false,
            FreedCapacity::Anything => true,
            FreedCapacity::Slot(slot) => {
                if !self.admission.is_open(slot) {
                    return false;
                }
                if !self.policy.weighs_load() {
                    return true;
                }
                let waiting = self.ledger.prefill_tokens(slot, self.now);
                let batch = self.fleet.max_batched(slot);
                let mut classes = (0..).map_while(|at| self.queue.class(at));
                self.model.decays() || classes.any(|class| !class.gate.closes(waiting, batch))
            }
        }
    }

    fn next_ready(&mut self) -> Option<RequestId> {
        // The queue lends its entries to the question whether they may go, which needs the rest of the
        // router; so it is taken out for that long.
        let mut queue =
            std::mem::replace(&mut self.queue, kvasir_placement::Queue::new(Vec::new()));
        let next = queue.next(|class, entry| {
            let waiting = &entry.payload;
            !self.awaits_lookup(waiting.asked)
                && self.may_go(&waiting.arrival, waiting.pin, class.gate)
        });
        self.queue = queue;
        next
    }

    pub(super) fn awaits_lookup(&self, asked: Option<Time>) -> bool {
        asked.is_some_and(|at| self.now < at + Self::REFRESH_WAIT)
    }

    /// Asks for a new lookup if the request's is old. Says whether it was asked for.
    pub(super) fn ask_refresh(&mut self, id: RequestId, out: &mut Vec<Output>) -> bool {
        let after = self.config.router_overlap_refresh_after_secs;
        if after <= 0.0 || !after.is_finite() || !self.config.needs_index() {
            return false;
        }
        let now = self.now;
        let after = Duration::try_from_secs_f64(after).unwrap_or(Duration::MAX);
        let Some(waiting) = self.queue.payload_mut(id) else {
            return false;
        };
        if waiting.asked.is_some() || now - waiting.looked_up < after {
            return false;
        }
        waiting.asked = Some(now);
        self.asks.push_back(now);
        out.push(Output::Refresh { id });
        true
    }

    /// A lookup came back. The request keeps its place; a failed lookup keeps the old answer.
    pub(super) fn refreshed(&mut self, id: RequestId, overlap: Option<Overlap>) {
        let now = self.now;
        let Some(waiting) = self.queue.payload_mut(id) else {
            return;
        };
        if let Some(overlap) = overlap {
            waiting.arrival.overlap = overlap;
        }
        waiting.looked_up = now;
        waiting.asked = None;
        self.freed = FreedCapacity::Anything;
    }
}
