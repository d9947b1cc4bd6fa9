//! What runs where, for programs that route by themselves and want to know how loaded each rank is.
//!
//! Requests are told by their names; the router's ledger counts them. What always holds: a request that nobody speaks of for
//! `router-active-request-expiry-secs` is forgotten.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_host::{HostContext, Model, RouterHost, RouterSetup};
use kvasir_router::{Input, Overlap, PeerChange, WorkerSpec};
use kvasir_types::{DpRank, SequenceHash, WorkerId, WorkerRank};
use serde::{Deserialize, Serialize};

use crate::api::{Answer, Api, Ask, Verb, query_value, read};
use crate::group::{BLOCK_SIZE_MAX, Group, GroupKey, Groups, WORKERS_MAX};
use crate::reading::Hashes;
use crate::sync::{ReplicaSync, SyncedService, Told};

mod tracked;

use tracked::TrackedRequests;

/// The service.
pub struct SlotTracker {
    groups: Arc<Groups<SlotGroup>>,
    sync: SyncedService,
}

struct SlotGroup {
    host: Arc<RouterHost>,
    workers: Mutex<BTreeMap<u64, SlotWorker>>,
    requests: TrackedRequests,
}

impl Group for SlotGroup {
    fn host(&self) -> &Arc<RouterHost> {
        &self.host
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct SlotWorker {
    worker_id: u64,
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    block_size: u32,
    #[serde(default)]
    dp_start: u32,
    #[serde(default = "one")]
    dp_size: u32,
}

fn one() -> u32 {
    1
}

#[derive(Deserialize)]
struct Unregister {
    worker_id: u64,
    #[serde(flatten)]
    key: GroupKey,
}

#[derive(Deserialize)]
struct Add {
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    request_id: String,
    worker_id: u64,
    #[serde(default)]
    dp_rank: u32,
    sequence_hashes: Hashes,
    #[serde(default)]
    new_isl_tokens: u32,
}

#[derive(Deserialize)]
struct Request {
    request_id: String,
    #[serde(flatten)]
    key: GroupKey,
}

#[derive(Deserialize)]
struct Potential {
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    #[serde(default)]
    sequence_hashes: Hashes,
    #[serde(default)]
    new_isl_tokens: u32,
}

#[derive(Serialize)]
struct LoadRow<'k> {
    model_name: &'k str,
    routing_group: &'k str,
    worker_id: u64,
    dp_rank: u32,
    active_prefill_tokens: u64,
    active_decode_blocks: u64,
}

/// What a rank would have to do if a prompt went there.
#[derive(Serialize)]
pub(crate) struct PotentialRow {
    worker_id: u64,
    dp_rank: u32,
    potential_prefill_tokens: u64,
    potential_decode_blocks: u64,
    active_requests: u32,
}

impl PotentialRow {
    /// Of every rank, in order.
    pub(crate) fn all(
        host: &RouterHost,
        isl_tokens: u32,
        overlap: &Overlap,
        sequence: &[SequenceHash],
    ) -> Vec<Self> {
        let mut loads = Vec::new();
        host.potential_loads(isl_tokens, overlap, sequence, &mut loads);
        loads.sort_unstable_by_key(|load| load.rank);
        let rows = loads.into_iter().map(|load| Self {
            worker_id: load.rank.worker.0,
            dp_rank: load.rank.rank.0,
            potential_prefill_tokens: load.potential_prefill_tokens,
            potential_decode_blocks: load.potential_decode_blocks,
            active_requests: load.active_requests,
        });
        rows.collect()
    }
}

impl Api for SlotTracker {
    async fn answer(&self, ask: Ask) -> Answer {
        let body = &ask.body;
        let answered = match (ask.verb, ask.path.as_str()) {
            (Verb::Post, "/add") => read(body).and_then(|add| self.add(add)),
            (Verb::Post, "/free") => read(body).and_then(|request| self.free(&request)),
            (Verb::Post, "/prefill_complete") => {
                read(body).and_then(|request| self.prefill_complete(&request))
            }
            (Verb::Get, "/loads") => Ok(self.loads(ask.query.as_deref())),
            (Verb::Post, "/potential_loads") => read(body).and_then(|asked| self.potential(&asked)),
            (Verb::Post, "/register") => read(body).and_then(|worker| self.register(worker)),
            (Verb::Post, "/unregister") => read(body).and_then(|asked| self.unregister(&asked)),
            (Verb::Get, "/workers") => Ok(self.workers()),
            (Verb::Get, "/replica_sync/peers") => Ok(self.sync.list()),
            (Verb::Post, "/replica_sync/register_peer") => {
                read(body).and_then(|peer| self.sync.register(&peer, &self.groups))
            }
            (Verb::Post, "/replica_sync/deregister_peer") => {
                read(body).and_then(|peer| self.sync.deregister(&peer))
            }
            (Verb::Get, "/health") => Ok(Answer::empty(200)),
            (_, path) => {
                const ROUTES: [&str; 9] = [
                    "/add",
                    "/free",
                    "/prefill_complete",
                    "/loads",
                    "/potential_loads",
                    "/register",
                    "/unregister",
                    "/workers",
                    "/health",
                ];
                Err(Answer::no_route(ROUTES.contains(&path)))
            }
        };
        answered.unwrap_or_else(|refusal| refusal)
    }
}

impl SlotTracker {
    /// An empty one; `setup` says how load is counted.
    #[must_use]
    pub fn new(setup: RouterSetup, context: HostContext) -> Self {
        Self {
            groups: Arc::new(Groups::new(setup, context)),
            sync: SyncedService::default(),
        }
    }

    /// The same, in step with other services of its kind.
    #[must_use]
    pub fn with_sync(mut self, sync: Option<ReplicaSync>) -> Self {
        self.sync = SyncedService::new(sync);
        self
    }

    /// Listens to another service at `tcp://host:port`; an error says why not.
    pub fn listen_to(&self, endpoint: &str) -> Result<(), String> {
        self.sync.listen(endpoint, &self.groups)
    }

    /// Peers are told of a request.
    fn tell(
        &self,
        key: &GroupKey,
        group: &SlotGroup,
        request: (&str, WorkerRank),
        change: &PeerChange,
    ) {
        let told = Told {
            key,
            block_size: group.host.block_size(),
            request: request.0,
            target: request.1,
        };
        self.sync.tell(&told, change);
    }

    fn group(&self, key: &GroupKey) -> Result<Arc<SlotGroup>, Answer> {
        let found = self.groups.get(key);
        found.ok_or_else(|| Answer::error(404, format_args!("no slot tracker for {key}")))
    }

    fn register(&self, worker: SlotWorker) -> Result<Answer, Answer> {
        let key = GroupKey {
            model_name: worker.model_name.clone(),
            routing_group: worker.routing_group.clone(),
        };
        let is_sound = key.is_sound()
            && (1..=BLOCK_SIZE_MAX).contains(&worker.block_size)
            && (1..=WorkerSpec::RANKS_MAX).contains(&worker.dp_size);
        if !is_sound {
            let text = "model_name and routing_group must be names of 1 to 256 bytes, block_size from 1 to 1048576, dp_size from 1 to 1024";
            return Err(Answer::error(400, text));
        }
        let make = |model: Model| SlotGroup {
            host: model.host,
            workers: Mutex::default(),
            requests: TrackedRequests::default(),
        };
        let group = self.groups.get_or_make(&key, worker.block_size, make)?;
        let mut workers = group.workers();
        if workers.len() >= WORKERS_MAX && !workers.contains_key(&worker.worker_id) {
            return Err(Answer::error(
                409,
                format_args!("there are {WORKERS_MAX} workers already"),
            ));
        }
        let spec = WorkerSpec {
            first_rank: DpRank(worker.dp_start),
            ranks: worker.dp_size,
            ..WorkerSpec::new(WorkerId(worker.worker_id))
        };
        let known = workers.insert(worker.worker_id, worker);
        group.host.tell(match known {
            Some(_) => Input::Updated(spec),
            None => Input::Joined(spec),
        });
        Ok(Answer::done(201))
    }

    fn unregister(&self, asked: &Unregister) -> Result<Answer, Answer> {
        let group = self.group(&asked.key)?;
        let worker = asked.worker_id;
        if group.workers().remove(&worker).is_none() {
            return Err(Answer::error(
                404,
                format_args!("worker {worker} not found"),
            ));
        }
        group.host.leave(WorkerId(worker));
        Ok(Answer::done(200))
    }

    fn workers(&self) -> Answer {
        let groups = self.groups.all();
        let workers = groups.values().flat_map(|group| {
            let workers = group.workers();
            workers.values().cloned().collect::<Vec<_>>()
        });
        Answer::json(200, &workers.collect::<Vec<_>>())
    }

    fn add(&self, add: Add) -> Result<Answer, Answer> {
        let key = GroupKey {
            model_name: add.model_name,
            routing_group: add.routing_group,
        };
        let group = self.group(&key)?;
        let change = PeerChange::Add {
            sequence: add.sequence_hashes.named(SequenceHash),
            prefill_tokens: add.new_isl_tokens,
            prefill_duration: None,
            osl: None,
        };
        let target = WorkerRank::new(add.worker_id, add.dp_rank);
        let added = group
            .requests
            .add(&group.host, &add.request_id, target, change.clone());
        added.map_err(|error| Answer::error(error.status(), error))?;
        self.tell(&key, &group, (&add.request_id, target), &change);
        Ok(Answer::done(201))
    }

    fn prefill_complete(&self, request: &Request) -> Result<Answer, Answer> {
        let (group, id) = (self.group(&request.key)?, &request.request_id);
        let change = PeerChange::PrefillCompleted;
        match group.requests.change(&group.host, id, change.clone()) {
            Some(target) => {
                self.tell(&request.key, &group, (id, target), &change);
                Ok(Answer::done(200))
            }
            None => Err(Answer::error(404, format_args!("Request {id} not found"))),
        }
    }

    fn free(&self, request: &Request) -> Result<Answer, Answer> {
        let (group, id) = (self.group(&request.key)?, &request.request_id);
        if let Some(target) = group.requests.free(&group.host, id) {
            self.tell(&request.key, &group, (id, target), &PeerChange::Free);
        }
        Ok(Answer::done(200))
    }

    fn loads(&self, query: Option<&str>) -> Answer {
        let model = query_value(query, "model_name");
        let groups = self.groups.all();
        let mut rows = Vec::new();
        for (key, group) in groups.iter() {
            if model.as_ref().is_some_and(|model| *model != key.model_name) {
                continue;
            }
            let all = PotentialRow::all(&group.host, 0, &Overlap::none(), &[]);
            rows.extend(all.into_iter().map(|row| LoadRow {
                model_name: &key.model_name,
                routing_group: &key.routing_group,
                worker_id: row.worker_id,
                dp_rank: row.dp_rank,
                active_prefill_tokens: row.potential_prefill_tokens,
                active_decode_blocks: row.potential_decode_blocks,
            }));
        }
        Answer::json(200, &rows)
    }

    fn potential(&self, asked: &Potential) -> Result<Answer, Answer> {
        let group = self.group(&GroupKey {
            model_name: asked.model_name.clone(),
            routing_group: asked.routing_group.clone(),
        })?;
        let sequence = asked.sequence_hashes.named(SequenceHash);
        let isl = asked.new_isl_tokens;
        let rows = PotentialRow::all(&group.host, isl, &Overlap::none(), &sequence);
        Ok(Answer::json(200, &rows))
    }
}

impl SlotGroup {
    fn workers(&self) -> MutexGuard<'_, BTreeMap<u64, SlotWorker>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
