//! From a prompt's blocks to a placed request: find, credit by trust, arrive, record.
//!
//! Answers one question: what does an index lookup count for a request, and what does the index learn from where the
//! request went? The server and the simulator run these steps, so that both give a rank the same credit.
//!
//! What always holds: a rank that nobody judges counts in full; our own routing decisions help only a rank whose
//! events are not fully trusted, unless the request says otherwise.
//!
//! Elsewhere: how trust is earned and lost (`kvasir-trust`), what credit is worth in a cost (`kvasir-placement`).

use std::ops::Range;
use std::sync::Arc;

use kvasir_index::{Index, MatchSources, Matches};
use kvasir_placement::{Overlap, RankOverlap};
use kvasir_trust::{CacheState, TrustLevels};
use kvasir_types::{LocalHash, SequenceHash, Time};

use crate::{Arrival, Placement};

/// One prompt as it is looked up.
#[derive(Clone, Debug)]
pub struct Lookup {
    /// Names of its blocks for the index; empty where the index is not asked.
    pub locals: Arc<[LocalHash]>,
    /// Names of its prefixes for the ledger, and for recording where it went.
    pub sequence: Arc<[SequenceHash]>,
    /// Routing decisions count and are recorded for every rank, not only for those that are not fully trusted.
    pub predict_all: bool,
    /// Its blocks that a cache holds which all workers share: sorted, disjoint, half open.
    pub shared: Arc<[Range<u32>]>,
}

impl Lookup {
    /// Finds the prompt in `index` and credits what is found. `matches` is a buffer that keeps what was found.
    #[must_use]
    pub fn find(&self, index: &Index, trust: &TrustLevels, matches: &mut Matches) -> Overlap {
        let ranks = match self.locals.is_empty() {
            true => Vec::new(),
            false => {
                index.find(&self.locals, matches);
                credit(matches, trust, self.predict_all)
            }
        };
        Overlap {
            ranks,
            shared: self.shared.to_vec(),
        }
    }

    /// Credits what was found elsewhere, as [`Self::find`] does what it finds.
    #[must_use]
    pub fn credit_of(&self, matches: &Matches, trust: &TrustLevels) -> Overlap {
        Overlap {
            ranks: credit(matches, trust, self.predict_all),
            shared: self.shared.to_vec(),
        }
    }

    /// Gives a request what the router has to know of its blocks.
    pub fn arrive(&self, arrival: &mut Arrival, overlap: Overlap) {
        arrival.overlap = overlap;
        arrival.sequence = Arc::clone(&self.sequence);
    }

    /// Records where the request went, if the index is to learn from it.
    pub fn record(&self, now: Time, sent: &Placement, index: &Index, trust: &TrustLevels) {
        if sent.record && (self.predict_all || trust.is_doubted(sent.target)) {
            index.record_routing(now, sent.target, &self.locals, &self.sequence);
        }
    }
}

/// What a lookup is worth. `predict_all`: routing decisions count for every rank, not only for doubted ones.
fn credit(matches: &Matches, trust: &TrustLevels, predict_all: bool) -> Vec<RankOverlap> {
    let believe = |found: MatchSources| match trust.get(found.events.rank) {
        None => credited(found, 1.0),
        Some(trust) => {
            let counts = predict_all || trust.state != CacheState::Exact;
            let routed = if counts { found.routed } else { 0 };
            credited(MatchSources { routed, ..found }, trust.credit())
        }
    };
    let ranks = matches.sources().map(believe);
    ranks.filter(holds_something).collect()
}

fn holds_something(overlap: &RankOverlap) -> bool {
    overlap.device > 0.0 || overlap.host > 0 || overlap.disk > 0
}

/// What events say at `credit` of its worth, or what our decisions say, if that is more.
fn credited(found: MatchSources, credit: f64) -> RankOverlap {
    let share = |blocks: u32| (f64::from(blocks) * credit) as u32;
    let device = f64::from(found.events.device) * credit;
    let raised = (f64::from(found.routed) - device).max(0.0);
    let (host, disk) = (share(found.events.host), share(found.events.disk));
    let from_host = (raised as u32).min(host);
    RankOverlap {
        rank: found.events.rank,
        device: device + raised,
        host: host - from_host,
        disk: disk - (raised as u32 - from_host).min(disk),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvasir_index::{IndexOptions, Match};
    use kvasir_trust::{Cause, TrustLevel};
    use kvasir_types::{RequestId, WorkerRank};

    use super::*;
    use crate::SessionCommand;

    fn found(device: u32, host: u32, disk: u32, routed: u32) -> MatchSources {
        let rank = WorkerRank::new(1, 0);
        let events = Match {
            rank,
            device,
            host,
            disk,
        };
        MatchSources { events, routed }
    }

    #[test]
    fn credit_shrinks_what_events_say_and_nothing_else() {
        let parts = |o: RankOverlap| (o.device, o.host, o.disk);
        assert_eq!(parts(credited(found(10, 4, 2, 0), 1.0)), (10.0, 4, 2));
        assert_eq!(parts(credited(found(10, 4, 2, 0), 0.5)), (5.0, 2, 1));
        assert_eq!(parts(credited(found(10, 4, 2, 8), 0.0)), (8.0, 0, 0));
        // Five by events at half their worth, eight by our decisions: the lower tiers lose the three.
        assert_eq!(parts(credited(found(10, 4, 2, 8), 0.5)), (8.0, 0, 0));
        assert_eq!(parts(credited(found(4, 4, 2, 5), 1.0)), (5.0, 3, 2));
    }

    /// Without a judgement credit is what the index itself makes of events and decisions.
    #[test]
    fn full_credit_is_the_merged_match() {
        for sides in 0..3u32.pow(4) {
            let part = |nth: u32| sides / 3u32.pow(nth) % 3 * 3;
            let both = found(part(0), part(1), part(2), part(3) + 1);
            let (whole, merged) = (credited(both, 1.0), both.merged());
            assert_eq!(whole.device, f64::from(merged.device), "{both:?}");
            assert_eq!((whole.host, whole.disk), (merged.host, merged.disk));
        }
    }

    const EXACT: WorkerRank = WorkerRank::new(1, 0);
    const DOUBTED: WorkerRank = WorkerRank::new(2, 0);
    const UNJUDGED: WorkerRank = WorkerRank::new(3, 0);

    fn trust() -> TrustLevels {
        let mut trust = TrustLevels::default();
        let level = |state, cause| TrustLevel { state, cause };
        trust.set(EXACT, Some(level(CacheState::Exact, None)));
        let cause = Some(Cause::SilentEviction);
        trust.set(DOUBTED, Some(level(CacheState::Approximate, cause)));
        trust
    }

    fn index() -> Index {
        Index::with_options(&IndexOptions {
            predicted_ttl: Some(Duration::from_secs(9)),
            ..Default::default()
        })
    }

    fn lookup(predict_all: bool) -> Lookup {
        Lookup {
            locals: Arc::new([LocalHash(1), LocalHash(2)]),
            sequence: Arc::new([SequenceHash(1), SequenceHash(2)]),
            predict_all,
            shared: Arc::default(),
        }
    }

    fn found_by(lookup: &Lookup, index: &Index) -> Vec<u64> {
        let overlap = lookup.find(index, &trust(), &mut Matches::new());
        let mut ranks: Vec<u64> = overlap.ranks.iter().map(|r| r.rank.worker.0).collect();
        ranks.sort_unstable();
        ranks
    }

    #[test]
    fn an_exact_rank_is_not_helped_by_old_decisions() {
        let index = index();
        let Lookup {
            locals, sequence, ..
        } = lookup(true);
        for rank in [EXACT, DOUBTED, UNJUDGED] {
            index.record_routing(Time::ZERO, rank, &locals, &sequence);
        }
        assert_eq!(found_by(&lookup(false), &index), [2, 3]);
        assert_eq!(found_by(&lookup(true), &index), [1, 2, 3]);
    }

    #[test]
    fn only_a_doubted_rank_is_recorded_unless_all_are() {
        let sent = |target, record| Placement {
            id: RequestId(1),
            target,
            booked: true,
            record,
            overlap_blocks: 0,
            cached_tokens: 0,
            predicted: Default::default(),
            best_cached_tokens: 0,
            overlap_lost: 0.0,
            queued: Duration::ZERO,
            session: SessionCommand::None,
        };
        let recorded = |predict_all, record| {
            let index = index();
            for rank in [EXACT, DOUBTED, UNJUDGED] {
                let sent = sent(rank, record);
                lookup(predict_all).record(Time::ZERO, &sent, &index, &trust());
            }
            found_by(&lookup(true), &index)
        };
        assert_eq!(recorded(false, true), [2]);
        assert_eq!(recorded(true, true), [1, 2, 3]);
        assert_eq!(recorded(true, false), []);
    }

    #[test]
    fn a_prompt_without_blocks_asks_nothing_and_still_brings_its_sequence() {
        let mut arrival = Arrival::new(RequestId(1), 40);
        let lookup = Lookup {
            locals: Arc::default(),
            ..lookup(true)
        };
        let overlap = lookup.find(&index(), &trust(), &mut Matches::new());
        lookup.arrive(&mut arrival, overlap);
        assert!(arrival.overlap.ranks.is_empty());
        assert_eq!(arrival.sequence.len(), 2);
        let pooled = Lookup {
            shared: Arc::new([0..1, 2..3]),
            ..lookup
        };
        let overlap = pooled.find(&index(), &trust(), &mut Matches::new());
        assert_eq!(overlap.shared_beyond(2), 1, "what all share needs no index");
    }
}
