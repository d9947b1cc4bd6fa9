//! The index as plain objects: who holds which prefix, without a router around it.
//!
//! What always holds: a lookup changes nothing; an event that cannot be read is a `ValueError`, and changes nothing.

use std::time::Duration;

use kvasir_hash::{Scope, sequence_hashes};
use kvasir_index::{Approximate, Index, IndexOptions, Matches};
use kvasir_msgpack::Value;
use kvasir_telemetry::Clock;
use kvasir_types::{KvEvent, LocalHash, WorkerId, WorkerRank};
use kvasir_wire::native::{Residency, RouterEvent};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{hashing, values};

/// Bytes of an event's JSON from which on reading it lets other threads run Python meanwhile.
const LONG_BYTES: usize = 1 << 16;

/// How many leading blocks of a prompt each rank holds. Can be awaited, which gives it itself.
#[pyclass(frozen, module = "kvasir")]
#[derive(Debug, Default)]
pub(crate) struct OverlapScores {
    scores: Vec<(WorkerRank, u32)>,
}

impl OverlapScores {
    pub(crate) fn of(matches: &Matches) -> Self {
        let mut scores: Vec<(WorkerRank, u32)> = matches
            .iter()
            .map(|found| (found.rank, found.disk_cumulative()))
            .collect();
        scores.sort_unstable();
        Self { scores }
    }
}

#[pymethods]
impl OverlapScores {
    /// Blocks by `(worker_id, dp_rank)`.
    #[getter]
    fn scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (rank, blocks) in &self.scores {
            all.set_item((rank.worker.0, rank.rank.0), blocks)?;
        }
        Ok(all)
    }

    /// Always empty: how often a block was asked for is not counted.
    #[getter]
    fn frequencies(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Older releases had these as coroutines.
    fn __await__(slf: Py<Self>) -> Resolved {
        Resolved { value: Some(slf) }
    }

    fn __repr__(&self) -> String {
        let all: Vec<String> = self
            .scores
            .iter()
            .map(|(rank, blocks)| format!("({}, {}): {blocks}", rank.worker, rank.rank))
            .collect();
        format!("OverlapScores({{{}}})", all.join(", "))
    }
}

/// What awaiting a value that is there already goes through.
#[pyclass(module = "kvasir")]
pub(crate) struct Resolved {
    value: Option<Py<OverlapScores>>,
}

#[pymethods]
impl Resolved {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&mut self) -> PyResult<Option<Py<PyAny>>> {
        match self.value.take() {
            Some(value) => Err(pyo3::exceptions::PyStopIteration::new_err((value,))),
            None => Ok(None),
        }
    }
}

/// One event of a rank's cache from JSON: `{"event_id": n, "data": {"stored": ...}, "dp_rank": 0}`, or a whole router event
/// with `worker_id` and `event`, whose worker is then `worker`.
pub(crate) fn read_event(worker: u64, bytes: &[u8]) -> Result<RouterEvent, String> {
    let told = |error: kvasir_msgpack::DecodeError| error.to_string();
    let value = Value::from_json(bytes).map_err(told)?;
    let inner = match value.get("event") {
        Some(_) => value,
        None => Value::Map(vec![("event".into(), value)]),
    };
    let mut members = match inner {
        Value::Map(members) => members,
        _ => return Err("it is not an object".into()),
    };
    members.retain(|(name, _)| name != "worker_id");
    members.push(("worker_id".into(), Value::Uint(worker)));
    RouterEvent::from_value(&Value::Map(members)).map_err(told)
}

/// The whole content of an index as router events, in JSON.
pub(crate) fn dump(index: &Index) -> Vec<String> {
    let json = |(rank, event): (WorkerRank, KvEvent)| {
        let event = RouterEvent {
            rank,
            id: 0,
            residency: Some(Residency::Worker),
            position: None,
            event,
        };
        event.to_value().to_json().to_string()
    };
    index.dump().into_iter().map(json).collect()
}

/// Which worker holds which prefix, by the events that are applied to it.
#[pyclass(frozen, module = "kvasir")]
#[derive(Debug)]
pub(crate) struct RadixTree {
    /// Beside the object: it wants to lie at addresses that Python does not give.
    index: Box<Index>,
}

#[pymethods]
impl RadixTree {
    /// An empty one. Blocks do not expire: `expiration_duration_secs` of older releases is taken and has no effect.
    #[new]
    #[pyo3(signature = (expiration_duration_secs=None))]
    fn new(expiration_duration_secs: Option<f64>) -> Self {
        let _ = expiration_duration_secs;
        Self {
            index: Box::new(Index::new()),
        }
    }

    /// How many leading blocks each rank holds. With `early_exit` the count of the best may be a lower bound.
    #[pyo3(signature = (sequence, early_exit=false))]
    fn find_matches(
        &self,
        sequence: &Bound<'_, PyAny>,
        early_exit: bool,
    ) -> PyResult<OverlapScores> {
        let locals = values::local_hashes(sequence)?;
        let mut matches = Matches::new();
        match early_exit {
            true => self.index.find_winner(&locals, &mut matches),
            false => self.index.find(&locals, &mut matches),
        }
        Ok(OverlapScores::of(&matches))
    }

    /// Applies one event, written in JSON. What a rank cannot hold (a block without its parent) is left out.
    fn apply_event(
        &self,
        py: Python<'_>,
        worker_id: u64,
        kv_cache_event_bytes: &[u8],
    ) -> PyResult<()> {
        let apply = || {
            let read = read_event(worker_id, kv_cache_event_bytes)?;
            // A block whose parent is not there, or that is not there to be removed, is no mistake of the caller's.
            let _ = self.index.apply_once(read.rank, &read.event);
            Ok(())
        };
        let applied: Result<(), String> = match kv_cache_event_bytes.len() < LONG_BYTES {
            true => apply(),
            false => py.detach(apply),
        };
        applied.map_err(|error| {
            PyValueError::new_err(format!("Failed to deserialize KvCacheEvent: {error}"))
        })
    }

    /// Forgets a worker and all that it held.
    fn remove_worker(&self, worker_id: u64) {
        self.index.remove_worker(WorkerId(worker_id));
    }

    /// Forgets all that a worker held.
    fn clear_all_blocks(&self, worker_id: u64) {
        let of_worker = |rank: &WorkerRank| rank.worker.0 == worker_id;
        for rank in self.index.ranks().into_iter().filter(of_worker) {
            let _ = self
                .index
                .apply_once(rank, &KvEvent::Cleared { tier: None });
        }
    }

    /// All that it holds, as events that would make it again: one JSON text each.
    fn dump_tree_as_events(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| dump(&self.index))
    }
}

/// Which worker likely holds which prefix, by where requests were sent: for engines that publish no events.
#[pyclass(frozen, subclass, module = "kvasir")]
#[derive(Debug)]
pub(crate) struct ApproxKvIndexer {
    /// Beside the object: it wants to lie at addresses that Python does not give.
    index: Box<Index>,
    block_size: u32,
    clock: Clock,
}

#[pymethods]
impl ApproxKvIndexer {
    /// `endpoint` is whose workers are meant; nothing is asked of it. What was sent counts as cached for `router_ttl_secs`.
    #[new]
    #[pyo3(signature = (endpoint, kv_block_size, router_ttl_secs=None, max_tree_size=None, prune_target_ratio=None))]
    fn new(
        endpoint: &Bound<'_, PyAny>,
        kv_block_size: u32,
        router_ttl_secs: Option<f64>,
        max_tree_size: Option<usize>,
        prune_target_ratio: Option<f64>,
    ) -> PyResult<Self> {
        let _ = endpoint;
        let mut approximate = Approximate::default();
        if let Some(ttl) = router_ttl_secs {
            approximate.ttl = Duration::try_from_secs_f64(ttl).map_err(|_| {
                PyValueError::new_err("router_ttl_secs must be finite and at least 0")
            })?;
        }
        approximate.max_blocks = max_tree_size.unwrap_or(approximate.max_blocks);
        approximate.prune_target_ratio =
            prune_target_ratio.unwrap_or(approximate.prune_target_ratio);
        let options = IndexOptions {
            approximate: Some(approximate),
            ..IndexOptions::default()
        };
        Ok(Self {
            index: Box::new(Index::with_options(&options)),
            block_size: values::positive("kv_block_size", kv_block_size)?,
            clock: Clock::new(),
        })
    }

    /// How many leading blocks of a prompt each rank likely holds. Can be awaited.
    #[pyo3(signature = (token_ids, lora_name=None, is_eagle=None))]
    fn find_matches_for_request(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        is_eagle: Option<bool>,
    ) -> PyResult<OverlapScores> {
        let locals = self.locals(py, token_ids, lora_name, is_eagle)?;
        self.index.expire(self.clock.now());
        let mut matches = Matches::new();
        self.index.find(&locals, &mut matches);
        Ok(OverlapScores::of(&matches))
    }

    /// Tokens in a block.
    fn block_size(&self) -> u32 {
        self.block_size
    }

    /// A prompt was sent to a rank; `kvasir.llm` has it as a coroutine.
    #[pyo3(signature = (tokens, worker_id, dp_rank=0, lora_name=None))]
    fn record_routing(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        worker_id: u64,
        dp_rank: u32,
        lora_name: Option<&str>,
    ) -> PyResult<()> {
        let locals = self.locals(py, tokens, lora_name, None)?;
        let sequence = sequence_hashes(&locals);
        let rank = WorkerRank::new(worker_id, dp_rank);
        self.index
            .record_routing(self.clock.now(), rank, &locals, &sequence);
        Ok(())
    }

    /// Forgets a worker and all that was sent to it.
    fn remove_worker(&self, worker_id: u64) {
        self.index.remove_worker(WorkerId(worker_id));
    }
}

impl ApproxKvIndexer {
    fn locals(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        is_eagle: Option<bool>,
    ) -> PyResult<Vec<LocalHash>> {
        let tokens = values::tokens(tokens)?;
        let scope = Scope {
            lora: lora_name.unwrap_or_default(),
            eagle: is_eagle.unwrap_or(false),
            ..Scope::default()
        };
        Ok(hashing::block_hashes(py, &tokens, self.block_size, &scope))
    }
}
