//! What the router must know of a worker to place requests on it.

use std::sync::Arc;

use kvasir_types::{Device, DpRank, TransportKind, WorkerId, WorkerRank};

/// A worker as placement knows it. A later announcement of the same id replaces the earlier one.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    /// Who it is.
    pub id: WorkerId,
    /// Its first data-parallel rank (`data_parallel_start_rank`).
    pub first_rank: DpRank,
    /// How many ranks it has (`data_parallel_size`); 0 is taken for 1, more than
    /// [`WorkerSpec::RANKS_MAX`] for that.
    pub ranks: u32,
    /// KV blocks of one rank; `None` switches the decode-block check off for it.
    pub kv_total_blocks: Option<u64>,
    /// Tokens one rank computes per step; `None` counts as [`WorkerSpec::UNKNOWN_BATCH`].
    pub max_num_batched_tokens: Option<u64>,
    /// Sequences one rank runs at once. Reported only: no choice uses it.
    pub max_num_seqs: Option<u64>,
    /// What it computes on; only `device-aware-weighted` asks.
    pub device: Device,
    /// How requests reach it: some requests can be sent only one way.
    pub transport: TransportKind,
    /// Labels that requests may require or prefer.
    pub taints: Vec<Arc<str>>,
    /// Adapters it has loaded.
    pub loras: Vec<Arc<str>>,
    /// Names of the models that it serves, where one router places requests of several; if empty, of all.
    pub serves: Vec<Arc<str>>,
}

impl WorkerSpec {
    /// Ranks beyond this are not served: a broken card must not cost gigabytes.
    pub const RANKS_MAX: u32 = 1024;
    /// What an unknown `max_num_batched_tokens` counts as: never the limit in practice.
    pub const UNKNOWN_BATCH: u64 = 10_000_000;

    /// A worker with one rank, about which nothing else is known.
    #[must_use]
    pub fn new(id: WorkerId) -> Self {
        Self {
            id,
            first_rank: DpRank(0),
            ranks: 1,
            kv_total_blocks: None,
            max_num_batched_tokens: None,
            max_num_seqs: None,
            device: Device::Accelerator,
            transport: TransportKind::default(),
            taints: Vec::new(),
            loras: Vec::new(),
            serves: Vec::new(),
        }
    }

    /// Its ranks, lowest first.
    pub fn rank_iter(&self) -> impl ExactSizeIterator<Item = WorkerRank> + use<> {
        let (worker, first) = (self.id, self.first_rank.0);
        (0..self.rank_count()).map(move |i| WorkerRank {
            worker,
            rank: DpRank(first.saturating_add(i)),
        })
    }

    /// How many ranks are served.
    #[must_use]
    pub fn rank_count(&self) -> u32 {
        self.ranks.clamp(1, Self::RANKS_MAX)
    }
}
