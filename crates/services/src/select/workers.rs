//! The workers of the selection service: what is said of each, and whether it can be chosen.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvasir_host::EventStream;
use kvasir_router::WorkerSpec;
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{SelectGroup, Selector};
use crate::api::Answer;
use crate::event_listener::EventAddress;
use crate::group::{BLOCK_SIZE_MAX, GroupKey, GroupMap, WORKERS_MAX, is_name};

/// Taints that one worker has.
const TAINTS_MAX: usize = 32;

/// A worker, and what listens to it while it is schedulable.
pub(super) struct WorkerEntry {
    pub(super) record: WorkerRecord,
    joined: Option<Joined>,
}

struct Joined {
    group: Arc<SelectGroup>,
    listeners: Vec<EventStream>,
}

/// What is said of a worker; in the order in which answers list it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct WorkerRecord {
    pub(super) worker_id: u64,
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    #[serde(default, skip_deserializing)]
    lifecycle: Lifecycle,
    pub(super) endpoint: Option<String>,
    kv_events_endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    kv_events_endpoints: BTreeMap<u32, String>,
    replay_endpoint: Option<String>,
    block_size: Option<u32>,
    data_parallel_start_rank: Option<u32>,
    data_parallel_size: Option<u32>,
    max_num_batched_tokens: Option<u64>,
    total_kv_blocks: Option<u64>,
    stable_routing_id: Option<Value>,
    is_eagle: Option<bool>,
    #[serde(default)]
    taints: Vec<String>,
    #[serde(default)]
    topology_domains: BTreeMap<String, String>,
    kv_transfer_domain: Option<String>,
    kv_transfer_enforcement: Option<String>,
    kv_transfer_preferred_weight: Option<f64>,
    #[serde(default, skip_deserializing, skip_serializing_if = "Vec::is_empty")]
    not_schedulable_reasons: Vec<String>,
}

/// How far a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Lifecycle {
    #[default]
    Incomplete,
    Schedulable,
    Unschedulable,
}

#[derive(Serialize)]
struct Ready<'w> {
    ready: bool,
    schedulable_workers: usize,
    workers: Vec<&'w WorkerRecord>,
}

impl WorkerRecord {
    fn key(&self) -> GroupKey {
        GroupKey {
            model_name: self.model_name.clone(),
            routing_group: self.routing_group.clone(),
        }
    }

    fn ranks(&self) -> impl Iterator<Item = u32> + use<> {
        let first = self.data_parallel_start_rank.unwrap_or(0);
        let count = self
            .data_parallel_size
            .unwrap_or(1)
            .min(WorkerSpec::RANKS_MAX);
        (0..count).map(move |rank| first.saturating_add(rank))
    }

    /// Where a rank's events come from.
    fn events_of(&self, rank: u32) -> Option<EventAddress> {
        let own = self.kv_events_endpoints.get(&rank);
        let only = self.kv_events_endpoint.as_ref();
        let only =
            only.filter(|_| self.kv_events_endpoints.is_empty() && self.ranks().count() == 1);
        Some(EventAddress {
            events: own.or(only)?.clone(),
            replay: self.replay_endpoint.clone(),
        })
    }

    /// What is missing for it to be chosen.
    fn missing(&self, asks_events: bool, asks_batch: bool) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.endpoint.as_deref().unwrap_or_default().is_empty() {
            reasons.push("endpoint is required".to_owned());
        }
        if !(1..=BLOCK_SIZE_MAX).contains(&self.block_size.unwrap_or(0)) {
            reasons.push("block_size must be greater than 0".to_owned());
        }
        if self.data_parallel_size == Some(0) {
            reasons.push("data_parallel_size must be greater than 0".to_owned());
        }
        if asks_batch && self.max_num_batched_tokens.unwrap_or(0) == 0 {
            reasons.push("max_num_batched_tokens is required when queueing is enabled".to_owned());
        }
        if asks_events {
            for rank in self.ranks().filter(|rank| self.events_of(*rank).is_none()) {
                reasons.push(format!("kv_events endpoint is required for dp_rank {rank}"));
            }
        }
        reasons
    }

    fn spec(&self) -> WorkerSpec {
        WorkerSpec {
            first_rank: DpRank(self.data_parallel_start_rank.unwrap_or(0)),
            ranks: self.data_parallel_size.unwrap_or(1),
            kv_total_blocks: self.total_kv_blocks,
            max_num_batched_tokens: self.max_num_batched_tokens,
            taints: self
                .taints
                .iter()
                .map(|taint| taint.as_str().into())
                .collect(),
            ..WorkerSpec::new(WorkerId(self.worker_id))
        }
    }

    /// What cannot be kept of what was said.
    fn check(&self) -> Result<(), Answer> {
        let texts = [
            &self.endpoint,
            &self.kv_events_endpoint,
            &self.replay_endpoint,
        ];
        let is_sound = self.key().is_sound()
            && texts.into_iter().flatten().all(|text| is_name(text))
            && self.taints.len() <= TAINTS_MAX
            && self.taints.iter().all(|taint| is_name(taint))
            && self.kv_events_endpoints.len() <= WorkerSpec::RANKS_MAX as usize
            && self.topology_domains.len() <= TAINTS_MAX;
        match is_sound {
            true => Ok(()),
            false => Err(Answer::error(
                400,
                "names and endpoints have 1 to 256 bytes without control characters; at most 32 taints and domains",
            )),
        }
    }
}

impl Selector {
    pub(super) fn groups(&self) -> RwLockReadGuard<'_, GroupMap<SelectGroup>> {
        self.groups.all()
    }

    /// Adds a worker, or says something else about one.
    pub(super) async fn upsert(&self, record: WorkerRecord) -> Result<Answer, Answer> {
        record.check()?;
        let mut workers = self.workers.lock().await;
        if workers.len() >= WORKERS_MAX && !workers.contains_key(&record.worker_id) {
            return Err(Answer::error(
                409,
                format_args!("there are {WORKERS_MAX} workers already"),
            ));
        }
        self.put(&mut workers, record, 201).await
    }

    /// Changes some of what is said about a worker.
    pub(super) async fn patch(&self, id: &str, change: Value) -> Result<Answer, Answer> {
        let mut workers = self.workers.lock().await;
        let entry = find(&workers, id)?;
        let Ok(Value::Object(mut whole)) = serde_json::to_value(&entry.record) else {
            return Err(Answer::error(500, "the worker cannot be read back"));
        };
        let Value::Object(change) = change else {
            return Err(Answer::error(
                400,
                "an object with the fields to change is expected",
            ));
        };
        if change.contains_key("worker_id") || change.contains_key("model_name") {
            return Err(Answer::error(
                400,
                "worker_id and model_name cannot be changed",
            ));
        }
        whole.extend(change);
        let record: WorkerRecord = serde_json::from_value(Value::Object(whole))
            .map_err(|error| Answer::error(400, error))?;
        record.check()?;
        self.put(&mut workers, record, 200).await
    }

    async fn put(
        &self,
        workers: &mut BTreeMap<u64, WorkerEntry>,
        mut record: WorkerRecord,
        status: u16,
    ) -> Result<Answer, Answer> {
        let id = record.worker_id;
        let config = &self.groups.setup().config;
        let queues = config.router_queue_threshold.is_some();
        let mut missing = record.missing(config.router_kv_events, queues);
        let group = match missing.is_empty() {
            false => None,
            true => Some(self.group_for(&record.key(), record.block_size.unwrap_or(0))?),
        };
        if let Some(before) = workers.remove(&id) {
            before.leave().await;
        }
        let joined = group.map(|group| self.join(group, &record)).transpose();
        let joined = joined.unwrap_or_else(|error| {
            missing.push(error);
            None
        });
        record.lifecycle = match joined.is_some() {
            true => Lifecycle::Schedulable,
            false => Lifecycle::Incomplete,
        };
        record.not_schedulable_reasons = missing;
        let answer = Answer::json(status, &record);
        workers.insert(id, WorkerEntry { record, joined });
        Ok(answer)
    }

    /// Lets a worker be chosen, and listens to its events.
    fn join(&self, group: Arc<SelectGroup>, record: &WorkerRecord) -> Result<Joined, String> {
        let host = &group.model.host;
        self.takeover.restore(host);
        group.model.join(record.spec());
        let mut listeners = Vec::new();
        if self.groups.setup().config.router_kv_events {
            for rank in record.ranks() {
                let Some(address) = record.events_of(rank) else {
                    continue;
                };
                let rank = WorkerRank::new(record.worker_id, rank);
                match address.open(host, rank, self.takeover.loaded(), self.threads.as_ref()) {
                    Ok(opened) => listeners.extend(opened),
                    Err(error) => {
                        group.model.leave(WorkerId(record.worker_id));
                        return Err(error);
                    }
                }
            }
        }
        let endpoint = record.endpoint.clone().unwrap_or_default();
        group.write_endpoints().insert(record.worker_id, endpoint);
        let is_eagle = record.is_eagle.unwrap_or(false);
        group.is_eagle.store(is_eagle, Ordering::Relaxed);
        Ok(Joined { group, listeners })
    }

    fn group_for(&self, key: &GroupKey, block_size: u32) -> Result<Arc<SelectGroup>, Answer> {
        self.groups
            .get_or_make(key, block_size, |model| SelectGroup {
                key: key.clone(),
                model,
                endpoints: RwLock::default(),
                is_eagle: AtomicBool::new(false),
            })
    }

    /// Takes a worker out; its bookings go with it.
    pub(super) async fn delete(&self, id: &str) -> Result<Answer, Answer> {
        let mut workers = self.workers.lock().await;
        let id = find(&workers, id)?.record.worker_id;
        let Some(mut entry) = workers.remove(&id) else {
            return Err(not_found(&id.to_string()));
        };
        entry.record.lifecycle = Lifecycle::Unschedulable;
        entry.record.not_schedulable_reasons.clear();
        let answer = Answer::json(200, &entry.record);
        entry.leave().await;
        Ok(answer)
    }

    pub(super) async fn list_workers(&self) -> Answer {
        let workers = self.workers.lock().await;
        let rows: Vec<&WorkerRecord> = workers.values().map(|entry| &entry.record).collect();
        Answer::json(200, &rows)
    }

    pub(super) async fn ready(&self) -> Answer {
        let workers = self.workers.lock().await;
        let schedulable = workers
            .values()
            .filter(|entry| entry.joined.is_some())
            .count();
        let page = Ready {
            ready: schedulable > 0,
            schedulable_workers: schedulable,
            workers: workers.values().map(|entry| &entry.record).collect(),
        };
        Answer::json(if page.ready { 200 } else { 503 }, &page)
    }
}

impl SelectGroup {
    fn write_endpoints(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, String>> {
        self.endpoints
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Where requests for a worker go.
    pub(super) fn endpoint_of(&self, worker: WorkerId) -> String {
        let endpoints = self
            .endpoints
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        endpoints.get(&worker.0).cloned().unwrap_or_default()
    }
}

impl WorkerEntry {
    /// It is chosen no more, and nothing is known of its cache.
    async fn leave(self) {
        if let Some(joined) = self.joined {
            for listener in joined.listeners {
                let _ = listener.stop().await;
            }
            let id = self.record.worker_id;
            joined.group.write_endpoints().remove(&id);
            joined.group.model.leave(WorkerId(id));
        }
    }
}

fn not_found(id: &str) -> Answer {
    Answer::error(404, format_args!("worker {id} not found"))
}

fn find<'w>(workers: &'w BTreeMap<u64, WorkerEntry>, id: &str) -> Result<&'w WorkerEntry, Answer> {
    let entry = id.parse().ok().and_then(|id: u64| workers.get(&id));
    let short = id.get(..id.floor_char_boundary(64)).unwrap_or_default();
    entry.ok_or_else(|| not_found(short))
}
