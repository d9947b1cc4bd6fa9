//! What a router's host is made from, and what it asks of a prompt.

use std::sync::Arc;
use std::time::Duration;

use kvasir_index::IndexOptions;
use kvasir_router::RouterConfig;

use crate::remote_index::RemoteIndex;
use crate::shared_cache::SharedCache;

/// What a router is made from.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The router's settings.
    pub config: RouterConfig,
    /// What its index remembers.
    pub index: IndexOptions,
    /// Whether decisions are recorded for ranks whose cache events are trusted, too
    /// (`--router-predicted-ttl-secs`); for the others they always are.
    pub predict_all: bool,
    /// A cache that all workers share.
    pub shared_cache: Option<Arc<SharedCache>>,
    /// Indexes of other routers, which are asked instead of one of its own.
    pub remote_index: Option<RemoteIndex>,
}

impl HostOptions {
    /// A router whose decisions are recorded for every rank, as far as its settings record any.
    #[must_use]
    pub fn new(config: RouterConfig, index: IndexOptions) -> Self {
        Self {
            config,
            index,
            predict_all: true,
            shared_cache: None,
            remote_index: None,
        }
    }

    /// The same, predicting a rank that publishes no events for as long as an approximate index would: what is sent
    /// there is remembered for `ttl`.
    #[must_use]
    pub fn predicting_silent_ranks(mut self, ttl: Duration) -> Self {
        self.predict_all = self.config.records_decisions();
        if !self.predict_all && self.config.needs_index() {
            self.index.predicted_ttl = Some(ttl);
            self.config.router_predicted_ttl_secs = Some(ttl.as_secs_f64());
        }
        self
    }
}

/// Which names of a prompt's blocks the router asks for; follows from its settings and never changes.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// For the index.
    pub index: bool,
    /// For the ledger, or for the index to remember decisions by.
    pub sequence: bool,
}

impl Needs {
    /// Whether it asks for any.
    #[must_use]
    pub fn any(self) -> bool {
        self.index || self.sequence
    }

    pub(super) fn of(config: &RouterConfig) -> Self {
        let index = config.needs_index();
        Self {
            index,
            sequence: index || config.names_active_blocks(),
        }
    }
}
