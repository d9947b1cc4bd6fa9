//! How much of a prompt each rank holds, as `overlap_scores` says it.

use kvasir_host::Model;
use kvasir_index::Matches;
use kvasir_types::LocalHash;
use serde::Serialize;

/// The answer.
#[derive(Serialize)]
pub(crate) struct OverlapReply {
    block_size: u32,
    num_blocks: usize,
    workers: Vec<OverlapRow>,
    shared_cache: SharedCache,
}

#[derive(Serialize)]
struct OverlapRow {
    worker_id: u64,
    dp_rank: u32,
    device_blocks: u32,
    host_pinned_blocks: u32,
    disk_blocks: u32,
    host_pinned_extension_blocks: u32,
    disk_extension_blocks: u32,
    shared_beyond_device_blocks: Option<u32>,
}

/// No cache that workers share is asked.
#[derive(Default, Serialize)]
struct SharedCache {
    enabled: bool,
    total_hit_blocks: u32,
    ranges: [u32; 0],
    error: Option<String>,
}

impl OverlapReply {
    /// Of each rank of a model's workers; a tier's blocks include those that are nearer, its extension does not.
    pub(crate) fn of(model: &Model, locals: &[LocalHash]) -> Self {
        let mut found = Matches::new();
        model.host.index().find(locals, &mut found);
        let specs = model.specs();
        let ranks = specs.iter().flat_map(|spec| spec.rank_iter());
        let rows = ranks.map(|rank| {
            let held = found.get(rank).unwrap_or_default();
            OverlapRow {
                worker_id: rank.worker.0,
                dp_rank: rank.rank.0,
                device_blocks: held.device,
                host_pinned_blocks: held.host_cumulative(),
                disk_blocks: held.disk_cumulative(),
                host_pinned_extension_blocks: held.host,
                disk_extension_blocks: held.disk,
                shared_beyond_device_blocks: None,
            }
        });
        Self {
            block_size: model.block_size,
            num_blocks: locals.len(),
            workers: rows.collect(),
            shared_cache: SharedCache::default(),
        }
    }
}
