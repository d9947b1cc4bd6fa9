//! Cache events that go astray on command.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::RouterEvent;
use kvasir_worker::CacheOutbox;

use crate::Fault;

/// What goes wrong with the events of a worker's ranks. What is lost on the way can still be asked for.
#[derive(Debug, Default)]
pub struct CacheFaults {
    ranks: Mutex<HashMap<WorkerRank, RankFaults>>,
    /// Of ranks that have said nothing yet.
    initial: Mutex<RankFaults>,
}

#[derive(Clone, Debug, Default)]
struct RankFaults {
    drop: u32,
    duplicate: bool,
    reorder: bool,
    mute: bool,
    silent_clear: bool,
    held: Option<Vec<RouterEvent>>,
}

impl RankFaults {
    /// Takes a fault; false if it is none of the event plane.
    fn take(&mut self, fault: Fault) -> bool {
        match fault {
            Fault::Drop(count) => self.drop = count,
            Fault::Duplicate => self.duplicate = true,
            Fault::Reorder => self.reorder = true,
            Fault::Mute => self.mute = true,
            Fault::Unmute => self.mute = false,
            Fault::SilentClear => self.silent_clear = true,
            Fault::Delay(..)
            | Fault::RestartSequence
            | Fault::RestartEmpty
            | Fault::ForgetReplay(_)
            | Fault::BlockSize(_) => return false,
        }
        true
    }

    fn pass(&mut self, mut events: Vec<RouterEvent>) -> Vec<Vec<RouterEvent>> {
        if self.silent_clear {
            let before = events.len();
            events.retain(|event| !matches!(event.event, KvEvent::Cleared { .. }));
            self.silent_clear = events.len() == before;
        }
        if self.mute || events.is_empty() {
            return Vec::new();
        }
        if self.drop > 0 {
            self.drop -= 1;
            return Vec::new();
        }
        if std::mem::take(&mut self.reorder) {
            self.held = Some(events);
            return Vec::new();
        }
        let mut messages = vec![events];
        if std::mem::take(&mut self.duplicate) {
            messages.extend_from_within(..);
        }
        messages.extend(self.held.take());
        messages
    }
}

impl CacheFaults {
    /// Makes something go wrong at every rank; false if that cannot go wrong here.
    pub fn inject(&self, fault: Fault) -> bool {
        let mut initial = self.initial.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.values_mut().for_each(|rank| {
            rank.take(fault);
        });
        initial.take(fault)
    }
}

impl CacheOutbox for CacheFaults {
    fn pass(&self, rank: WorkerRank, events: Vec<RouterEvent>) -> Vec<Vec<RouterEvent>> {
        let initial = self.initial.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let faults = ranks.entry(rank).or_insert_with(|| initial.clone());
        faults.pass(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: u64) -> Vec<RouterEvent> {
        vec![RouterEvent {
            rank: WorkerRank::new(1, 0),
            id,
            residency: None,
            position: None,
            event: KvEvent::Cleared { tier: None },
        }]
    }

    /// The ids that go out, for events 1 to 6.
    fn sent(faults: &[Fault]) -> Vec<u64> {
        let outbox = CacheFaults::default();
        assert!(faults.iter().all(|fault| outbox.inject(*fault)));
        let messages = (1..=6).flat_map(|id| outbox.pass(WorkerRank::new(1, 0), event(id)));
        messages.flatten().map(|event| event.id).collect()
    }

    #[test]
    fn events_go_astray_as_told() {
        assert_eq!(sent(&[]), [1, 2, 3, 4, 5, 6]);
        assert_eq!(sent(&[Fault::Drop(2)]), [3, 4, 5, 6]);
        assert_eq!(sent(&[Fault::Duplicate]), [1, 1, 2, 3, 4, 5, 6]);
        assert_eq!(sent(&[Fault::Reorder]), [2, 1, 3, 4, 5, 6]);
        assert_eq!(sent(&[Fault::SilentClear]), [2, 3, 4, 5, 6]);
        assert!(sent(&[Fault::Mute]).is_empty());
        assert!(!CacheFaults::default().inject(Fault::BlockSize(8)));
    }
}
