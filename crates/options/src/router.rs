//! Rows of the router and its index, with Dynamo's defaults where Dynamo has the option.

use crate::row::{Row, row};
use crate::{PrefillLoadModel, QueuePolicy, RouterMode, RouterPolicy};

const WHOLE_MAX: u64 = u32::MAX as u64;
/// A year.
const YEAR_SECS: u64 = 31_536_000;

/// Tokens in a KV block where neither options nor workers say it.
pub const BLOCK_SIZE_DEFAULT: u32 = 16;

// Selection.

/// How a worker is chosen.
pub const ROUTER_MODE: Row<RouterMode> = row!(RouterMode::RoundRobin);
/// What `kv` mode takes for the cost of a placement.
pub const ROUTER_POLICY: Row<RouterPolicy> = row!(RouterPolicy::Kv);
/// Tokens in a KV block; unset takes what workers announce.
pub const KV_CACHE_BLOCK_SIZE: Row<Option<u32>> = row!(None).whole(1, WHOLE_MAX);
/// A rank is busy above this share of its KV blocks.
pub const ACTIVE_DECODE_BLOCKS_THRESHOLD: Row<Option<f64>> = row!(None).between(0.0, 1.0);
/// A rank is busy above this many waiting prompt tokens.
pub const ACTIVE_PREFILL_TOKENS_THRESHOLD: Row<Option<u64>> = row!(None);
/// A rank is busy above this many batches of waiting prompt tokens.
pub const ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC: Row<Option<f64>> = row!(None).not_negative();
/// Idle time after which a session is forgotten; unset ignores sessions.
pub const ROUTER_SESSION_AFFINITY_TTL_SECS: Row<Option<u64>> = row!(None).whole(1, YEAR_SECS);
/// Sessions remembered.
pub const ROUTER_MAX_SESSIONS: Row<u32> = row!(100000).whole(1, WHOLE_MAX);
/// Weight of GPU encoders against CPU ones.
pub const ENCODER_CUDA_TO_CPU_RATIO: Row<u32> = row!(8).whole(1, WHOLE_MAX);
/// Longest time that a failing worker is ejected.
pub const RUNTIME_INHIBITED_DURATION_SECS: Row<f64> = row!(5 as f64).seconds();
/// Decisions kept for `kvasir why`.
pub const ROUTER_DECISION_LOG: Row<u32> = row!(4096).whole(0, 1 << 24);

// Cost.

/// Blocks of cost saved per block held in device memory.
pub const ROUTER_KV_OVERLAP_SCORE_CREDIT: Row<f64> = row!(1.0).between(0.0, 1.0);
/// How fast that credit falls with the prompt work that waits.
pub const ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY: Row<f64> = row!(0 as f64).not_negative();
/// Weight of the prefill term against the decode term.
pub const ROUTER_PREFILL_LOAD_SCALE: Row<f64> = row!(1.0).not_negative();
/// Deprecated weight; sets the scale, and the credit when it is 0.
pub const ROUTER_KV_OVERLAP_SCORE_WEIGHT: Row<Option<f64>> = row!(None).not_negative();
/// Cost of each running request, in blocks.
pub const ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT: Row<f64> = row!(0 as f64).not_negative();
/// Worth of a block in host memory.
pub const ROUTER_HOST_CACHE_HIT_WEIGHT: Row<f64> = row!(0.75).between(0.0, 1.0);
/// Worth of a block on disk or further away.
pub const ROUTER_DISK_CACHE_HIT_WEIGHT: Row<f64> = row!(0.25).between(0.0, 1.0);
/// Worth of a block in a cache that workers share.
pub const SHARED_CACHE_MULTIPLIER: Row<f64> = row!(0.5).between(0.0, 1.0);
/// Softmax temperature over normalised costs; 0 takes the cheapest.
pub const ROUTER_TEMPERATURE: Row<f64> = row!(0.0).not_negative();

// Load tracking.

/// Count the blocks of running requests.
pub const ROUTER_TRACK_ACTIVE_BLOCKS: Row<bool> = row!(true);
/// Count the blocks that they generate, too.
pub const ROUTER_TRACK_OUTPUT_BLOCKS: Row<bool> = row!(false);
/// Running requests of a worker share equal blocks.
pub const ROUTER_ASSUME_KV_REUSE: Row<bool> = row!(true);
/// Count prompt tokens that are not computed yet.
pub const ROUTER_TRACK_PREFILL_TOKENS: Row<bool> = row!(true);
/// How tracked prefill work decays.
pub const ROUTER_PREFILL_LOAD_MODEL: Row<PrefillLoadModel> = row!(PrefillLoadModel::None);
/// A booking without news for this long is freed.
pub const ROUTER_ACTIVE_REQUEST_EXPIRY_SECS: Row<f64> =
    row!(300 as f64).between(0.001, YEAR_SECS as f64);

// Queue.

/// Requests wait while every eligible rank has more batches of prompt tokens than this.
pub const ROUTER_QUEUE_THRESHOLD: Row<Option<f64>> = row!(Some(16.0)).positive();
/// Order of the queue.
pub const ROUTER_QUEUE_POLICY: Row<QueuePolicy> = row!(QueuePolicy::Fcfs);
/// Requests that may wait.
pub const ROUTER_QUEUE_MAX_REQUESTS: Row<u32> = row!(16384).whole(1, WHOLE_MAX);
/// Longest wait.
pub const ROUTER_QUEUE_MAX_WAIT_SECS: Row<f64> = row!(600 as f64).seconds();
/// Wait after which caches are looked up again; 0 never.
pub const ROUTER_OVERLAP_REFRESH_AFTER_SECS: Row<f64> = row!(10 as f64).seconds();

// KV cache index.

/// Whether engines announce their blocks.
pub const ROUTER_KV_EVENTS: Row<bool> = row!(true);
/// How long a routed block counts as cached when there are no events.
pub const ROUTER_TTL_SECS: Row<f64> = row!(120.0).seconds();
/// Predicted blocks kept when there are no events.
pub const ROUTER_MAX_TREE_SIZE: Row<u64> = row!(1048576).whole(1, u64::MAX);
/// Share of them that pruning leaves.
pub const ROUTER_PRUNE_TARGET_RATIO: Row<f64> = row!(0.8).between(0.0, 1.0);
/// How long a routed prompt counts as cached beside events.
pub const ROUTER_PREDICTED_TTL_SECS: Row<Option<f64>> = row!(None).seconds();
