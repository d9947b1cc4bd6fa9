//! What is known of each rank's cache, and how far that is trusted.
//!
//! Answers one question: the index says that these ranks hold so much of a prompt; may it be believed? The host of
//! `kvasir-trust`: it hands over what answers and events show, and does what the judgement asks.
//!
//! What always holds: a lookup waits for no judgement; a rank that nobody judges (a worker in this process, whose
//! events cannot be lost unnoticed) counts in full; a change is logged once.
//!
//! Elsewhere: the judgement (`kvasir-trust`), what trust makes of a lookup (`kvasir-router`), what is done to a stream of
//! events (`kvasir-kv-events`).

mod listing;
mod looks;
mod notices;
mod prediction;
mod rank;
mod urls;

pub use listing::EventSockets;
pub use prediction::UsageReport;
pub(crate) use prediction::{PendingPrediction, Prediction, cacheable_tokens};
pub use rank::CacheView;
pub(crate) use urls::WorkerUrls;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use kvasir_trust::{Cause, TrustLevel, TrustLevels, TrustRecord};
use kvasir_types::{Time, WorkerId, WorkerRank};

use crate::router_host::RouterHost;

/// How far each rank is trusted, to be read by every lookup. Clones are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedTrust(Arc<RwLock<Arc<TrustLevels>>>);

impl SharedTrust {
    fn now(&self) -> Arc<TrustLevels> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, rank: WorkerRank, trust: Option<TrustLevel>) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut all).set(rank, trust);
    }
}

/// The cache views of one router's ranks.
#[derive(Debug, Default)]
pub struct CacheViews {
    ranks: RwLock<BTreeMap<WorkerRank, Arc<CacheView>>>,
    trust: SharedTrust,
    foreign: looks::ForeignPrompts,
    urls: WorkerUrls,
}

impl CacheViews {
    /// A rank of `host` is there, of the worker at `url`; `unusable` says why its events cannot be used, if they cannot. `known` is how it
    /// stood before this process was started, if its view was kept.
    pub(crate) fn join(
        &self,
        host: &RouterHost,
        rank: WorkerRank,
        url: &str,
        unusable: Option<Cause>,
        known: Option<TrustRecord>,
    ) -> Arc<CacheView> {
        self.urls.set(rank.worker, url);
        let mut ranks = self.ranks.write().unwrap_or_else(PoisonError::into_inner);
        let view = ranks.entry(rank).or_insert_with(|| {
            let view = CacheView::new(host, rank, self.trust.clone(), self.foreign.clone(), known);
            Arc::new(view)
        });
        let view = Arc::clone(view);
        drop(ranks);
        view.set_unusable(unusable);
        view
    }

    /// A worker is gone.
    pub(crate) fn leave(&self, worker: WorkerId) {
        let mut ranks = self.ranks.write().unwrap_or_else(PoisonError::into_inner);
        for (_, view) in ranks.extract_if(.., |rank, _| rank.worker == worker) {
            view.leave();
        }
        self.urls.remove(worker);
    }

    /// Where workers are, for log lines.
    pub(crate) fn urls(&self) -> &WorkerUrls {
        &self.urls
    }

    /// The view of one rank, if it is judged.
    #[must_use]
    pub fn get(&self, rank: WorkerRank) -> Option<Arc<CacheView>> {
        let ranks = self.ranks.read().unwrap_or_else(PoisonError::into_inner);
        ranks.get(&rank).cloned()
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<CacheView>> {
        let ranks = self.ranks.read().unwrap_or_else(PoisonError::into_inner);
        ranks.values().cloned().collect()
    }

    /// How far each rank is trusted now.
    pub(crate) fn trust(&self) -> Arc<TrustLevels> {
        self.trust.now()
    }

    /// Time has passed.
    pub(crate) fn tick(&self, now: Time) {
        for view in self.all() {
            view.tick(now);
        }
    }
}
