//! How far each rank's cache picture is believed, and what a lookup is worth for it.
//!
//! Answers one question: the index says that these ranks hold so much of a prompt; how much of that counts? The
//! host of `kvasir-trust`: it hands over what answers and events show and does what the judgement asks.
//!
//! What always holds: a lookup waits for no judgement; a rank that nobody judges (a worker in this process, whose
//! events cannot be lost unnoticed) counts in full; what is said of a change is said once.
//!
//! Elsewhere: the judgement (`kvasir-trust`), what is done to a stream (`kvasir-ingest`).

mod forecast;
mod listing;
mod rank;

pub(crate) use forecast::{Forecast, Foretold, Report, cacheable_tokens};
pub(crate) use listing::Sockets;
pub(crate) use rank::Picture;
#[cfg(test)]
pub(crate) use rank::tests::model;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use kvasir_index::{Matches, Sourced};
use kvasir_router::{Overlap, RankOverlap};
use kvasir_trust::{Doubt, Level, Opinion, Standing};
use kvasir_types::{Time, WorkerId, WorkerRank};

use crate::App;
use crate::models::ServedModel;

/// What is believed of each rank, to be read by every lookup.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opinions(Arc<RwLock<Arc<HashMap<WorkerRank, Opinion>>>>);

impl Opinions {
    fn now(&self) -> Arc<HashMap<WorkerRank, Opinion>> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, rank: WorkerRank, opinion: Option<Opinion>) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let all = Arc::make_mut(&mut all);
        match opinion {
            Some(opinion) => all.insert(rank, opinion),
            None => all.remove(&rank),
        };
    }
}

/// The pictures of one model's ranks.
#[derive(Debug, Default)]
pub(crate) struct Pictures {
    ranks: RwLock<BTreeMap<WorkerRank, Arc<Picture>>>,
    opinions: Opinions,
}

impl Pictures {
    /// A rank is there; `bar` says why its events cannot be used, if they cannot. `known` is how it stood
    /// before this process was started, if its picture was kept.
    pub(crate) fn join(
        &self,
        app: &App,
        model: &ServedModel,
        rank: WorkerRank,
        bar: Option<Doubt>,
        known: Option<Standing>,
    ) -> Arc<Picture> {
        let mut ranks = self.ranks.write().unwrap_or_else(PoisonError::into_inner);
        let picture = ranks.entry(rank).or_insert_with(|| {
            let picture = Picture::new(app, model, rank, self.opinions.clone(), known);
            Arc::new(picture)
        });
        let picture = Arc::clone(picture);
        drop(ranks);
        picture.set_bar(bar);
        picture
    }

    /// A worker is gone.
    pub(crate) fn leave(&self, worker: WorkerId) {
        let mut ranks = self.ranks.write().unwrap_or_else(PoisonError::into_inner);
        for (_, picture) in ranks.extract_if(.., |rank, _| rank.worker == worker) {
            picture.leave();
        }
    }

    /// The picture of one rank, if it is judged.
    pub(crate) fn get(&self, rank: WorkerRank) -> Option<Arc<Picture>> {
        let ranks = self.ranks.read().unwrap_or_else(PoisonError::into_inner);
        ranks.get(&rank).cloned()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Arc<Picture>> {
        let ranks = self.ranks.read().unwrap_or_else(PoisonError::into_inner);
        ranks.values().cloned().collect()
    }

    /// Whether what is sent to a rank is to be remembered, because its events are not believed in full.
    pub(crate) fn is_doubted(&self, rank: WorkerRank) -> bool {
        let opinion = self.opinions.now().get(&rank).copied();
        opinion.is_some_and(|opinion| opinion.level != Level::Exact)
    }

    /// What a lookup is worth. `routed`: our own decisions count for every rank, not only for doubted ones.
    pub(crate) fn overlap(&self, matches: &Matches, routed: bool) -> Overlap {
        let opinions = self.opinions.now();
        let believe = |found: Sourced| match opinions.get(&found.events.rank) {
            None => credited(found, 1.0),
            Some(opinion) => {
                let counts = routed || opinion.level != Level::Exact;
                let routed = if counts { found.routed } else { 0 };
                credited(Sourced { routed, ..found }, opinion.credit())
            }
        };
        let ranks = matches.sources().map(believe);
        Overlap {
            ranks: ranks.filter(holds_something).collect(),
            shared: Vec::new(),
        }
    }

    /// Time has passed.
    pub(crate) fn tick(&self, now: Time) {
        for picture in self.all() {
            picture.tick(now);
        }
    }
}

fn holds_something(overlap: &RankOverlap) -> bool {
    overlap.device > 0.0 || overlap.host > 0 || overlap.disk > 0
}

/// What events say at `credit` of its worth, or what our decisions say, if that is more.
fn credited(found: Sourced, credit: f64) -> RankOverlap {
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
    use kvasir_index::Match;

    use super::*;

    fn found(device: u32, host: u32, disk: u32, routed: u32) -> Sourced {
        let rank = WorkerRank::new(1, 0);
        let events = Match {
            rank,
            device,
            host,
            disk,
        };
        Sourced { events, routed }
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

    #[test]
    fn an_exact_rank_is_not_helped_by_old_decisions() {
        let (exact, doubted, unjudged) = (
            WorkerRank::new(1, 0),
            WorkerRank::new(2, 0),
            WorkerRank::new(3, 0),
        );
        let pictures = Pictures::default();
        let opinion = |level, doubt| Some(Opinion { level, doubt });
        pictures.opinions.set(exact, opinion(Level::Exact, None));
        let doubt = Some(Doubt::SilentEviction);
        pictures
            .opinions
            .set(doubted, opinion(Level::Approximate, doubt));
        assert!(pictures.is_doubted(doubted) && !pictures.is_doubted(exact));
        assert!(!pictures.is_doubted(unjudged));
        let index = kvasir_index::Index::with_options(&kvasir_index::IndexOptions {
            predicted_ttl: Some(std::time::Duration::from_secs(9)),
            ..Default::default()
        });
        let locals = [kvasir_types::LocalHash(1), kvasir_types::LocalHash(2)];
        let names = kvasir_hash::sequence_hashes(&locals);
        for rank in [exact, doubted, unjudged] {
            index.record_routing(Time::ZERO, rank, &locals, &names);
        }
        let mut matches = Matches::new();
        index.find(&locals, &mut matches);
        let ranks = |routed| {
            let overlap = pictures.overlap(&matches, routed);
            let mut ranks: Vec<u64> = overlap.ranks.iter().map(|r| r.rank.worker.0).collect();
            ranks.sort_unstable();
            ranks
        };
        assert_eq!(ranks(false), [2, 3]);
        assert_eq!(ranks(true), [1, 2, 3]);
    }
}
