//! A policy: how requests are placed in one run.

use kvasir_index::IndexOptions;
use kvasir_router::{RouterConfig, RouterMode};

/// The router's settings under a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// What it is called in reports.
    pub name: String,
    /// The router's settings; block size and seed are the fleet's.
    pub router: RouterConfig,
    /// What the router's index believes.
    pub index: IndexOptions,
}

impl Policy {
    /// Whether placements ask the index at all.
    pub(crate) fn uses_index(&self) -> bool {
        self.router.router_mode == RouterMode::Kv
            && self.router.router_kv_overlap_score_credit > 0.0
    }
}
