//! What TensorRT-LLM's `/metrics` says: a JSON list of the steps that it ran since it was asked last.
//!
//! An engine that ran none says `[]`, which says nothing about the shape of its cache.

use serde::Deserialize;

use super::RankLoad;

/// One step of the engine.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Iteration {
    num_active_requests: u64,
    num_queued_requests: u64,
    max_num_tokens_runtime: Option<u64>,
    kv_cache_stats: KvCacheStats,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KvCacheStats {
    max_num_blocks: Option<u64>,
    used_num_blocks: Option<u64>,
    tokens_per_block: Option<u32>,
}

/// Whether a page of metrics is such a list: every other engine writes lines of text.
pub(super) fn is_list(page: &str) -> bool {
    page.trim_start().starts_with('[')
}

/// The last step on the page; none if it ran none, or the page cannot be read.
pub(super) fn last(page: &str) -> Option<Iteration> {
    let steps: Vec<Iteration> = serde_json::from_str(page).ok()?;
    steps.into_iter().next_back()
}

impl Iteration {
    /// Tokens in a block.
    pub(super) fn block_size(&self) -> Option<u32> {
        self.kv_cache_stats
            .tokens_per_block
            .filter(|size| *size > 0)
    }

    /// KV blocks.
    pub(super) fn kv_blocks(&self) -> Option<u64> {
        self.kv_cache_stats
            .max_num_blocks
            .filter(|blocks| *blocks > 0)
    }

    /// Tokens computed in one step, at most.
    pub(super) fn max_batched_tokens(&self) -> Option<u64> {
        self.max_num_tokens_runtime.filter(|tokens| *tokens > 0)
    }

    /// How busy it is.
    pub(super) fn load(&self) -> RankLoad {
        let used = self.kv_cache_stats.used_num_blocks.zip(self.kv_blocks());
        RankLoad {
            running: self.num_active_requests,
            waiting: self.num_queued_requests,
            kv_usage: used.map(|(used, all)| (used as f64 / all as f64).clamp(0.0, 1.0)),
        }
    }
}
