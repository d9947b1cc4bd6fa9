//! A rank's own index: what it holds, and its last events; for routers that missed some.

use std::collections::VecDeque;

use kvasir_index::Index;
use kvasir_types::WorkerRank;
use kvasir_wire::native::{RecoveryReply, RecoveryRequest, Residency, RouterEvent};

/// Events that can be told again one by one; who missed more is told the whole state.
pub const RING_EVENTS: usize = 1024;

/// What one rank holds, and how it came to that.
#[derive(Debug)]
pub(super) struct LocalIndex {
    rank: WorkerRank,
    index: Index,
    ring: VecDeque<RouterEvent>,
}

impl LocalIndex {
    pub(super) fn new(rank: WorkerRank) -> Self {
        Self {
            rank,
            index: Index::new(),
            ring: VecDeque::new(),
        }
    }

    pub(super) fn apply(&mut self, event: &RouterEvent) {
        // A block whose parent was never announced cannot be told to anybody else either.
        let _ = self.index.apply_once(self.rank, &event.event);
        if self.ring.len() >= RING_EVENTS {
            self.ring.pop_front();
        }
        self.ring.push_back(event.clone());
    }

    /// What is told to one who asks. `newest` is the number of the last event.
    pub(super) fn answer(&self, request: &RecoveryRequest, newest: u64) -> RecoveryReply {
        let start = request.start.unwrap_or(0);
        if let Some(end) = request.end
            && end < start
        {
            return RecoveryReply::InvalidRange { start, end };
        }
        let Some(first) = self.ring.front().map(|event| event.id) else {
            return self.dump(newest);
        };
        if start > newest {
            let end = request.end.unwrap_or(newest);
            return RecoveryReply::TooNew { start, end, newest };
        }
        if start < first || start == 0 {
            return self.dump(newest);
        }
        let missed = self.ring.iter().filter(|event| event.id >= start);
        RecoveryReply::Events {
            events: missed.cloned().collect(),
            last: newest,
        }
    }

    fn dump(&self, newest: u64) -> RecoveryReply {
        let dumped = self.index.dump_rank(self.rank).into_iter();
        let events = dumped.zip(0..).map(|((rank, event), id)| RouterEvent {
            rank,
            id,
            residency: Some(Residency::Worker),
            position: None,
            event,
        });
        RecoveryReply::TreeDump {
            events: events.collect(),
            last: newest,
        }
    }
}
