//! What an engine computed in one step: `forward-pass-metrics`. Idle workers send one a second.

use kvasir_msgpack::{DecodeError, Value};
use kvasir_types::WorkerRank;

use super::{map, missing, uint};

/// One step of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForwardPass {
    /// Whose.
    pub rank: WorkerRank,
    /// Counts the rank's reports, from 1.
    pub counter: u64,
    /// How long the step took, in seconds; 0 for a sign of life.
    pub wall_time: f64,
    /// What was computed.
    pub scheduled: ScheduledWork,
    /// What waits.
    pub queued: QueuedWork,
}

/// The requests of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScheduledWork {
    /// All but this.
    pub work: QueuedWork,
    /// Tokens before those that were computed, of requests in prefill.
    pub prefill_kv_tokens: u64,
}

/// Some requests, and what they ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueuedWork {
    /// Requests in prefill.
    pub prefill_requests: u64,
    /// Their tokens.
    pub prefill_tokens: u64,
    /// How their lengths vary.
    pub prefill_length_variance: f64,
    /// Requests in decode.
    pub decode_requests: u64,
    /// Their tokens.
    pub decode_kv_tokens: u64,
    /// How these vary.
    pub decode_kv_variance: f64,
}

/// The version that 1.6 writes.
const VERSION: u64 = 1;

fn float(value: &Value, field: &'static str) -> Result<f64, DecodeError> {
    match value.get(field) {
        Some(Value::Float(value)) => Ok(*value),
        Some(Value::Uint(value)) => Ok(*value as f64),
        Some(Value::Sint(value)) => Ok(*value as f64),
        _ => Err(missing(field)),
    }
}

impl QueuedWork {
    fn from_value(value: &Value) -> Result<Self, DecodeError> {
        Ok(Self {
            prefill_requests: uint(value, "num_prefill_requests")?,
            prefill_tokens: uint(value, "sum_prefill_tokens")?,
            prefill_length_variance: float(value, "var_prefill_length")?,
            decode_requests: uint(value, "num_decode_requests")?,
            decode_kv_tokens: uint(value, "sum_decode_kv_tokens")?,
            decode_kv_variance: float(value, "var_decode_kv_tokens")?,
        })
    }

    fn to_value(self, prefill_kv_tokens: Option<u64>) -> Value {
        let mut fields = vec![
            ("num_prefill_requests", Value::Uint(self.prefill_requests)),
            ("sum_prefill_tokens", Value::Uint(self.prefill_tokens)),
            (
                "var_prefill_length",
                Value::Float(self.prefill_length_variance),
            ),
        ];
        fields.extend(prefill_kv_tokens.map(|n| ("sum_prefill_kv_tokens", Value::Uint(n))));
        fields.extend([
            ("num_decode_requests", Value::Uint(self.decode_requests)),
            ("sum_decode_kv_tokens", Value::Uint(self.decode_kv_tokens)),
            (
                "var_decode_kv_tokens",
                Value::Float(self.decode_kv_variance),
            ),
        ]);
        map(fields)
    }
}

impl ForwardPass {
    /// Reads a report. The worker is named by a text here.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let field = "worker_id";
        let worker = match value.get(field).ok_or(missing(field))? {
            Value::Text(worker) => worker.parse().ok(),
            worker => worker.uint(),
        };
        let rank = value.get("dp_rank").and_then(Value::uint).unwrap_or(0);
        let rank = u32::try_from(rank).map_err(|_| DecodeError::Range { field: "dp_rank" })?;
        let part = |field| value.get(field).ok_or(missing(field));
        let scheduled = part("scheduled_requests")?;
        Ok(Self {
            rank: WorkerRank::new(worker.ok_or(DecodeError::Range { field })?, rank),
            counter: uint(value, "counter_id")?,
            wall_time: float(value, "wall_time")?,
            scheduled: ScheduledWork {
                work: QueuedWork::from_value(scheduled)?,
                prefill_kv_tokens: uint(scheduled, "sum_prefill_kv_tokens")?,
            },
            queued: QueuedWork::from_value(part("queued_requests")?)?,
        })
    }

    /// The report as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let scheduled = &self.scheduled;
        let kv_tokens = Some(scheduled.prefill_kv_tokens);
        map([
            ("version", Value::Uint(VERSION)),
            ("worker_id", Value::Text(self.rank.worker.to_string())),
            ("dp_rank", Value::Uint(u64::from(self.rank.rank.0))),
            ("counter_id", Value::Uint(self.counter)),
            ("wall_time", Value::Float(self.wall_time)),
            ("scheduled_requests", scheduled.work.to_value(kv_tokens)),
            ("queued_requests", self.queued.to_value(None)),
        ])
    }
}
