//! What a rank is told that knows nothing, or that misses something: the snapshot, and its events in the stream since.
//!
//! Answers one question: given a rank's part of the snapshot and its events in the stream, which state can be built upon, and which events follow it? Pure.
//!
//! What always holds: what is told is a state that the rank's cache went through, followed by all events since; or that such a state is not known, followed by
//! the events since the last one that is missing.

use kvasir_transport::SourceEvent;
use kvasir_wire::native::{RecoveryReply, RouterEvent};

use super::snapshot::RankPart;
use super::source::Piece;

/// Events that are kept back to see whether one is missing among them; then they go out.
const HELD_EVENTS_MAX: usize = 20_000;
/// The number of a rank's first event.
const FIRST_ID: u64 = 1;

/// What the events that were seen follow.
#[derive(Debug)]
enum Base {
    /// What the snapshot says.
    Part(Box<RankPart>),
    /// An empty cache.
    Nothing,
    /// Events that are not known, up to this number.
    Unknown(u64),
}

/// One rank that is being told.
#[derive(Debug)]
pub(super) struct CatchUp {
    attempt: u64,
    base: Base,
    /// Whether it is known that nothing is missing between the base and the first event after it.
    is_sure: bool,
    /// The message that the base tells up to.
    sequence: u64,
    /// The number that comes next.
    next: u64,
    held: Vec<(u64, Vec<RouterEvent>)>,
    held_events: usize,
    /// The answer is out.
    has_answered: bool,
}

impl CatchUp {
    /// A rank that asked, and its part of the snapshot. `is_sure` says whether the stream goes on where the snapshot ends.
    pub(super) fn new(attempt: u64, part: Option<&RankPart>, is_sure: bool) -> Self {
        let (base, sequence, next) = match part {
            Some(part) => {
                let next = part.event + 1;
                (Base::Part(Box::new(part.clone())), part.sequence, next)
            }
            None => (Base::Nothing, 0, FIRST_ID),
        };
        Self {
            attempt,
            base,
            is_sure,
            sequence,
            next,
            held: Vec::new(),
            held_events: 0,
            has_answered: false,
        }
    }

    /// The number of the last event that it was told.
    pub(super) const fn newest(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// Takes the rank's events of a message, in the stream's order. Returns what can be told already.
    pub(super) fn take(&mut self, sequence: u64, events: Vec<RouterEvent>) -> Vec<Piece> {
        if sequence <= self.sequence {
            return Vec::new();
        }
        let mut kept = Vec::with_capacity(events.len());
        for event in events {
            if event.id == self.next {
                self.is_sure = true;
            } else if event.id == FIRST_ID && !self.has_answered {
                // It began again: nothing before matters.
                self.begin(Base::Nothing, true, &mut kept);
            } else if event.id > self.next && !self.has_answered {
                self.begin(Base::Unknown(event.id - 1), false, &mut kept);
            } else if event.id < self.next && event.id != FIRST_ID {
                continue;
            }
            self.next = event.id + 1;
            kept.push(event);
        }
        if kept.is_empty() {
            return Vec::new();
        }
        if self.has_answered {
            return vec![piece(sequence, kept)];
        }
        self.held_events += kept.len();
        self.held.push((sequence, kept));
        match self.held_events > HELD_EVENTS_MAX {
            true => self.finish(),
            false => Vec::new(),
        }
    }

    fn begin(&mut self, base: Base, is_sure: bool, kept: &mut Vec<RouterEvent>) {
        self.base = base;
        self.is_sure = is_sure;
        self.held.clear();
        self.held_events = 0;
        kept.clear();
    }

    /// Everything was read: what is left to be told.
    pub(super) fn finish(&mut self) -> Vec<Piece> {
        if std::mem::replace(&mut self.has_answered, true) {
            return Vec::new();
        }
        let (reply, event) = self.reply();
        let attempt = self.attempt;
        let answer = Piece {
            event: SourceEvent::Answered { attempt, reply },
            until: Some((self.sequence, event)),
            generation: 0,
        };
        let held = std::mem::take(&mut self.held).into_iter();
        let events = held.map(|(sequence, events)| piece(sequence, events));
        std::iter::once(answer).chain(events).collect()
    }

    /// The answer, and the number of the event that it tells up to.
    fn reply(&self) -> (RecoveryReply, u64) {
        let unknown = |last| {
            let message = "the log does not hold all events".to_owned();
            (RecoveryReply::TreeDumpFailed { last, message }, last)
        };
        match &self.base {
            Base::Part(part) if !self.is_sure => unknown(part.event),
            Base::Part(part) if part.exact => {
                let (events, last) = (part.events(0..).collect(), part.event);
                (RecoveryReply::TreeDump { events, last }, last)
            }
            Base::Part(part) if part.blocks.is_empty() => unknown(part.event),
            Base::Part(part) => {
                // Events that do not begin with the first one: what came before is not known.
                let (events, last) = (part.events(std::iter::repeat(part.event)), part.event);
                let events = events.collect();
                (RecoveryReply::Events { events, last }, last)
            }
            Base::Nothing if !self.is_sure => unknown(0),
            Base::Nothing => {
                let (events, last) = (Vec::new(), 0);
                (RecoveryReply::TreeDump { events, last }, last)
            }
            Base::Unknown(last) => unknown(*last),
        }
    }
}

/// Events of a message as a rank is given them; who sends it says of which stream it is.
pub(super) fn piece(sequence: u64, events: Vec<RouterEvent>) -> Piece {
    let last = events.last().map_or(0, |event| event.id);
    Piece {
        event: SourceEvent::Events(events),
        until: Some((sequence, last)),
        generation: 0,
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

    use super::*;

    const RANK: WorkerRank = WorkerRank {
        worker: kvasir_types::WorkerId(1),
        rank: kvasir_types::DpRank(0),
    };

    fn event(id: u64) -> RouterEvent {
        RouterEvent {
            rank: RANK,
            id,
            residency: None,
            position: None,
            event: KvEvent::Cleared { tier: None },
        }
    }

    fn part(event: u64, exact: bool) -> RankPart {
        let block = StoredBlock {
            engine: EngineHash(1),
            local: LocalHash(1),
        };
        RankPart {
            rank: RANK,
            event,
            sequence: 10,
            exact,
            blocks: vec![KvEvent::Stored {
                tier: Tier::Device,
                parent: None,
                blocks: vec![block],
            }],
        }
    }

    /// What a rank is told: the answer in short, then the numbers of the events.
    fn told(part: Option<&RankPart>, is_sure: bool, messages: &[(u64, &[u64])]) -> String {
        let mut catch_up = CatchUp::new(1, part, is_sure);
        let mut pieces = Vec::new();
        for (sequence, ids) in messages {
            let events = ids.iter().map(|id| event(*id)).collect();
            pieces.extend(catch_up.take(*sequence, events));
        }
        pieces.extend(catch_up.finish());
        let words = pieces.iter().map(|piece| match &piece.event {
            SourceEvent::Answered { reply, .. } => match reply {
                RecoveryReply::TreeDump { events, last } => {
                    format!("all {} to {last}", events.len())
                }
                RecoveryReply::Events { events, last } => {
                    format!("some {} to {last}", events.len())
                }
                RecoveryReply::TreeDumpFailed { last, .. } => format!("nothing to {last}"),
                other => format!("{other:?}"),
            },
            SourceEvent::Events(events) => {
                let ids: Vec<String> = events.iter().map(|event| event.id.to_string()).collect();
                ids.join(" ")
            }
            other => format!("{other:?}"),
        });
        words.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn what_follows_the_snapshot_is_told_after_it() {
        let known = part(5, true);
        assert_eq!(told(Some(&known), true, &[]), "all 1 to 5");
        // Message 10 is in it already, whatever its numbers are.
        let log: &[(u64, &[u64])] = &[(10, &[5]), (11, &[6, 7]), (14, &[8])];
        assert_eq!(told(Some(&known), true, log), "all 1 to 5, 6 7, 8");
        assert_eq!(told(None, true, &[(1, &[1, 2])]), "all 0 to 0, 1 2");
        assert_eq!(told(None, true, &[]), "all 0 to 0");
    }

    #[test]
    fn what_may_have_been_missed_is_not_built_upon() {
        let known = part(5, true);
        assert_eq!(told(Some(&known), false, &[]), "nothing to 5");
        // The next number shows that nothing was.
        assert_eq!(told(Some(&known), false, &[(11, &[6])]), "all 1 to 5, 6");
        assert_eq!(told(Some(&known), true, &[(11, &[8])]), "nothing to 7, 8");
        assert_eq!(
            told(Some(&part(5, false)), true, &[(11, &[6])]),
            "some 1 to 5, 6"
        );
        assert_eq!(
            told(None, true, &[(1, &[4]), (2, &[5])]),
            "nothing to 3, 4, 5"
        );
        assert_eq!(told(None, false, &[]), "nothing to 0");
        // Of two holes the last one counts.
        let log: &[(u64, &[u64])] = &[(11, &[6, 8]), (12, &[9, 12, 13])];
        assert_eq!(told(Some(&known), true, log), "nothing to 11, 12 13");
    }

    #[test]
    fn a_publisher_that_began_again_and_messages_that_came_twice_are_known() {
        let known = part(5, true);
        let again: &[(u64, &[u64])] = &[(11, &[6]), (12, &[1, 2])];
        assert_eq!(told(Some(&known), true, again), "all 0 to 0, 1 2");
        let twice: &[(u64, &[u64])] = &[(11, &[6, 7]), (12, &[6, 7]), (13, &[8])];
        assert_eq!(told(Some(&known), true, twice), "all 1 to 5, 6 7, 8");
    }
}
