//! Options of an index.

use std::time::Duration;

use kvasir_options::router;

/// How an index learns and how much it may remember.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IndexOptions {
    /// Bytes the whole index may take; past it the least useful entries go. 0: no limit.
    pub max_bytes: u64,
    /// Learn from our own routing decisions instead of KV events (`--no-router-kv-events`).
    pub approximate: Option<Approximate>,
    /// Beside KV events, believe for this long that a routed prompt is cached where it was sent
    /// (`--router-predicted-ttl-secs`). Without effect on an approximate index.
    pub predicted_ttl: Option<Duration>,
}

/// What an index believes that learns from routing decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Approximate {
    /// How long a routed block is believed to stay cached. Counted up to the next
    /// [`Approximate::EXPIRY_TICK`].
    pub ttl: Duration,
    /// Blocks over all ranks; past it the oldest go.
    pub max_blocks: usize,
    /// What share of `max_blocks` is left after such a pruning.
    pub prune_target_ratio: f64,
}

impl Approximate {
    /// Expiries are rounded up to multiples of this.
    pub const EXPIRY_TICK: Duration = Duration::from_millis(100);

    /// Blocks left after a pruning.
    #[must_use]
    pub fn prune_target(&self) -> usize {
        (self.max_blocks as f64 * self.prune_target_ratio.clamp(0.0, 1.0)) as usize
    }
}

impl Default for Approximate {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs_f64(router::ROUTER_TTL_SECS.default),
            max_blocks: usize::try_from(router::ROUTER_MAX_TREE_SIZE.default).unwrap_or(usize::MAX),
            prune_target_ratio: router::ROUTER_PRUNE_TARGET_RATIO.default,
        }
    }
}
