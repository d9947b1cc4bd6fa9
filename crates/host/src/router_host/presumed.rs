//! Prompts that are likely computed, though their engine has not said so.
//!
//! Answers one question: of which answers that come in one piece is the prompt done by now? Each has a time from which it is
//! presumed so. Nobody is woken at that time: whoever next looks at the load asks, and the timer does where requests wait
//! for room. A timer of its own for each request cost more than the rest of its booking.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvasir_types::{RequestId, Time};

/// Prompts that are kept; beyond it the one that is due first is presumed done.
const PRESUMED_MAX: usize = 1 << 16;

/// Requests, by the time from which their prompt is presumed done. One that has ended stays until then and means nothing.
#[derive(Debug, Default)]
pub(super) struct PresumedPrefills {
    due: BinaryHeap<Reverse<(Time, RequestId)>>,
}

impl PresumedPrefills {
    /// A prompt is presumed done from `at` on. Returns one that is presumed done at once, if there are too many.
    pub(super) fn push(&mut self, at: Time, id: RequestId) -> Option<RequestId> {
        self.due.push(Reverse((at, id)));
        match self.due.len() > PRESUMED_MAX {
            true => self.due.pop().map(|Reverse((_, id))| id),
            false => None,
        }
    }

    /// When the next is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    /// One that is due.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<RequestId> {
        self.next().filter(|at| *at <= now)?;
        self.due.pop().map(|Reverse((_, id))| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_due_in_order_of_time_and_bounded_in_number() {
        let mut presumed = PresumedPrefills::default();
        let at = |ms| Time::from_millis(ms);
        assert_eq!(presumed.push(at(20), RequestId(1)), None);
        assert_eq!(presumed.push(at(10), RequestId(2)), None);
        assert_eq!(presumed.next(), Some(at(10)));
        assert_eq!(presumed.pop_due(at(9)), None);
        assert_eq!(presumed.pop_due(at(30)), Some(RequestId(2)));
        assert_eq!(presumed.pop_due(at(30)), Some(RequestId(1)));
        assert_eq!(presumed.pop_due(at(30)), None);
        for id in 0..PRESUMED_MAX as u128 {
            assert_eq!(presumed.push(at(id as u64), RequestId(id)), None);
        }
        let over = RequestId(PRESUMED_MAX as u128);
        assert_eq!(presumed.push(at(1 << 20), over), Some(RequestId(0)));
    }
}
