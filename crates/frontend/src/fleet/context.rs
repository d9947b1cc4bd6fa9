//! What a fleet works with: the list of members, the models they serve, and its surroundings.

use std::sync::Arc;

use http::HeaderValue;
use kvasir_host::HostContext;

use super::members::Members;
use super::peers::Peers;
use crate::http::shortage::Shortage;
use crate::models::Models;

/// The surroundings of a fleet. Clones are one.
#[derive(Clone)]
pub struct FleetContext {
    /// Clock, metrics and tasks.
    pub host: HostContext,
    /// The models that its workers serve.
    pub models: Arc<Models>,
    /// The pools of workers that compute the prompts of models for others.
    pub prefill_pools: Arc<Models>,
    /// Which workers there are to be.
    pub members: Members,
    /// Replicas that are named.
    pub peers: Peers,
    /// Whether this machine is short of what connections need.
    pub shortage: Shortage,
    /// The `via` field that what is asked of engines carries, so that a loop is noticed.
    pub via: HeaderValue,
    /// Tokens in a block of every model (`--kv-cache-block-size`); none: what its workers say.
    pub kv_cache_block_size: Option<u32>,
}
