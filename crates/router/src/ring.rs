//! The latest decisions, in a ring whose records are used again: a decision allocates nothing once the ring
//! has been round.

use kvasir_types::RequestId;

use crate::Decision;

/// The latest decisions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ring {
    capacity: usize,
    decisions: Vec<Decision>,
    /// The ids again, close together, for the search.
    ids: Vec<RequestId>,
    next: usize,
}

impl Ring {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            ..Self::default()
        }
    }

    /// The record to fill next; `None` if none are kept.
    pub(crate) fn record(&mut self, id: RequestId) -> Option<&mut Decision> {
        if self.capacity == 0 {
            return None;
        }
        let at = self.next;
        self.next = (at + 1) % self.capacity;
        if at == self.decisions.len() {
            self.decisions.push(Decision::default());
            self.ids.push(id);
        }
        *self.ids.get_mut(at)? = id;
        self.decisions.get_mut(at)
    }

    /// The record filled last.
    pub(crate) fn latest(&mut self) -> Option<&mut Decision> {
        let at = self.newest_first().next()?;
        self.decisions.get_mut(at)
    }

    /// The latest decision about a request.
    pub(crate) fn find(&self, id: RequestId) -> Option<&Decision> {
        self.newest_first()
            .find(|at| self.ids.get(*at) == Some(&id))
            .and_then(|at| self.decisions.get(at))
    }

    /// All decisions kept, newest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Decision> {
        self.newest_first().filter_map(|at| self.decisions.get(at))
    }

    fn newest_first(&self) -> impl Iterator<Item = usize> + use<> {
        let (len, next) = (self.ids.len(), self.next);
        (1..=len).map(move |back| (next + len - back) % len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(ring: &mut Ring, id: u128, isl_tokens: u32) {
        if let Some(decision) = ring.record(RequestId(id)) {
            (decision.id, decision.isl_tokens) = (RequestId(id), isl_tokens);
        }
    }

    #[test]
    fn the_oldest_goes_and_the_latest_about_a_request_is_found() {
        let mut ring = Ring::new(3);
        for (id, isl) in [(1, 10), (2, 20), (1, 11), (3, 30)] {
            put(&mut ring, id, isl);
        }
        assert_eq!(ring.find(RequestId(1)).map(|d| d.isl_tokens), Some(11));
        assert_eq!(
            ring.iter().map(|d| d.isl_tokens).collect::<Vec<_>>(),
            [30, 11, 20]
        );
        put(&mut ring, 4, 40);
        assert_eq!(ring.find(RequestId(2)).map(|d| d.isl_tokens), None);
    }

    #[test]
    fn a_ring_of_nothing_keeps_nothing() {
        let mut ring = Ring::new(0);
        put(&mut ring, 1, 1);
        assert_eq!(ring.find(RequestId(1)), None);
        assert_eq!(ring.iter().count(), 0);
    }
}
