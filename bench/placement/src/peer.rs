//! The scheduler of `dynamo-kv-router` behind the benchmark's interface: load projection into a map that is
//! kept, its default selector, booking and freeing in its sequence tracker.

use std::collections::{HashMap, HashSet};

use dynamo_kv_router::protocols::{
    PrefillLoadHint, RoutingConstraints, WorkerConfigLike, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapSignals, ScheduleMode};
use dynamo_kv_router::sequences::{
    ActiveSequencesMultiWorker, NoopSequencePublisher, SequenceRequest,
};
use dynamo_kv_router::{
    DefaultWorkerSelector, KvRouterConfig, SchedulingRequest, WorkerSelectionInput, WorkerSelector,
};
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use crate::{Ask, BLOCK, Scheduler};

#[derive(Default)]
struct Worker {
    taints: HashSet<String>,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }

    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}

pub(crate) struct Peer {
    workers: HashMap<u64, Worker>,
    active: ActiveSequencesMultiWorker<NoopSequencePublisher>,
    selector: DefaultWorkerSelector,
    now: Instant,
    /// The map of loads, kept between decisions as its queue keeps it.
    loads: FxHashMap<WorkerWithDpRank, dynamo_kv_router::WorkerLoadProjection>,
}

impl Scheduler for Peer {
    type Prepared = (String, SchedulingRequest);

    fn new(workers: u64) -> Self {
        let ranges = (0..workers).map(|id| (id, (0, 1))).collect();
        Self {
            workers: (0..workers).map(|id| (id, Worker::default())).collect(),
            active: ActiveSequencesMultiWorker::new_without_expiry(
                NoopSequencePublisher,
                BLOCK as usize,
                ranges,
                false,
                1,
                "backend",
            ),
            selector: DefaultWorkerSelector::new(Some(KvRouterConfig::default()), "backend"),
            now: Instant::now(),
            loads: FxHashMap::default(),
        }
    }

    fn seed(&mut self, id: u64, worker: u64, sequence: &[u64], started: bool) {
        let tokens = sequence.len() * BLOCK as usize;
        let worker = WorkerWithDpRank::from_worker_id(worker);
        self.book(id.to_string(), worker, sequence.to_vec(), tokens);
        if started {
            let id = id.to_string();
            self.active
                .mark_prefill_completed(&id, self.now)
                .expect("known");
        }
    }

    fn prepare(&mut self, ask: &Ask) -> (String, SchedulingRequest) {
        let request = SchedulingRequest {
            mode: ScheduleMode::Tracked {
                request_id: ask.id.to_string(),
            },
            token_seq: Some(ask.sequence.clone()),
            isl_tokens: ask.sequence.len() * BLOCK as usize,
            lora_name: None,
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints {
                required_taints: HashSet::new(),
                preferred_taints: HashMap::new(),
            },
            router_config_override: None,
            track_prefill_tokens: true,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap: overlap(ask),
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
            worker_loads: std::mem::take(&mut self.loads),
            resp_tx: None,
        };
        (ask.id.to_string(), request)
    }

    fn decide(&mut self, (id, mut request): (String, SchedulingRequest)) -> u64 {
        self.active.bench_project_worker_loads_into(
            request.token_seq.as_deref(),
            self.now,
            &mut request.worker_loads,
        );
        let input =
            WorkerSelectionInput::configured(&self.workers, &request, request.eligibility(), BLOCK);
        let chosen = self.selector.select_worker(input).expect("a worker");
        let tokens = request.isl_tokens - chosen.cached_tokens;
        let sequence = request.token_seq.take().expect("given");
        self.book(id, chosen.worker, sequence, tokens);
        self.loads = std::mem::take(&mut request.worker_loads);
        chosen.worker.worker_id
    }

    fn end(&mut self, id: u64) {
        let id = id.to_string();
        self.active
            .mark_prefill_completed(&id, self.now)
            .expect("known");
        self.active.free(&id, self.now).expect("known");
    }

    fn loads(&mut self, ask: &Ask) -> Vec<(u64, u64, u64)> {
        let found = self
            .active
            .project_worker_loads(Some(&ask.sequence), self.now);
        let mut loads: Vec<_> = found
            .iter()
            .map(|(worker, load)| {
                (
                    worker.worker_id,
                    load.active_prefill_tokens as u64,
                    load.potential_decode_blocks() as u64,
                )
            })
            .collect();
        loads.sort_unstable();
        loads
    }
}

impl Peer {
    fn book(&self, id: String, worker: WorkerWithDpRank, sequence: Vec<u64>, tokens: usize) {
        let request = SequenceRequest {
            request_id: id,
            token_sequence: Some(sequence),
            track_prefill_tokens: true,
            expected_output_tokens: None,
            prefill_load_hint: Some(PrefillLoadHint {
                initial_effective_prefill_tokens: tokens,
                expected_prefill_duration: None,
            }),
            worker,
            lora_name: None,
        };
        self.active
            .add_request(request, self.now)
            .expect("a new id");
    }
}

fn overlap(ask: &Ask) -> OverlapSignals {
    let mut signals = OverlapSignals::default();
    for &(worker, blocks) in &ask.held {
        let worker = WorkerWithDpRank::from_worker_id(worker);
        signals
            .tier_overlap_blocks
            .device
            .insert(worker, blocks as usize);
        signals
            .effective_overlap_blocks
            .insert(worker, f64::from(blocks));
        signals
            .effective_cached_tokens
            .insert(worker, (blocks * BLOCK) as usize);
    }
    signals
}
