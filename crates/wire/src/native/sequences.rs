//! What routers and workers tell each other about requests: `active_sequences_events`, `session_affinity_events`.

use std::time::Duration;

use kvasir_msgpack::{DecodeError, Value};
use kvasir_types::{SequenceHash, WorkerId, WorkerRank};

use super::{map, missing, number, rank_fields, rank_of, text, uint};

/// Something happened to a request: a router booked it, its prefill is done, it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceEvent {
    /// The request, as its frontend named it.
    pub request: String,
    /// Where it runs.
    pub rank: WorkerRank,
    /// Who says it: a router, or the worker itself under its own id.
    pub router: u64,
    /// The adapter that it asks for.
    pub lora: Option<String>,
    /// What happened.
    pub change: SequenceChange,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SequenceChange {
    /// It was sent to the rank.
    Added {
        /// Its full blocks, where blocks are counted.
        blocks: Option<Vec<SequenceHash>>,
        /// Whether its prompt counts as work.
        track_prefill: bool,
        /// How long its answer may be.
        expected_output_tokens: Option<u64>,
        /// What its prompt costs.
        prefill: Option<PrefillHint>,
    },
    /// Its first token was made.
    PrefillCompleted,
    /// It ended.
    Freed,
}

/// What a prompt costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillHint {
    /// Tokens that are to be computed.
    pub tokens: u64,
    /// How long that should take.
    pub duration: Option<Duration>,
}

impl SequenceEvent {
    /// Reads what a message carries: a batch as on ZeroMQ, or one bare event as on NATS.
    pub fn list_from_value(value: &Value) -> Result<Vec<Self>, DecodeError> {
        match value.get("events") {
            Some(events) => {
                let events = events.list().ok_or(missing("events"))?;
                events.iter().map(Self::from_value).collect()
            }
            None => Self::from_value(value).map(|event| vec![event]),
        }
    }

    /// A batch of events, as on ZeroMQ.
    #[must_use]
    pub fn batch_to_value(events: &[Self]) -> Value {
        let events = events.iter().map(Self::to_value).collect();
        map([("events", Value::List(events))])
    }

    /// Reads one event.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let request = value.get("request_id").and_then(Value::text);
        let data = value.get("data").ok_or(missing("data"))?;
        let change = match data.text() {
            Some("MarkPrefillCompleted") => SequenceChange::PrefillCompleted,
            Some("Free") => SequenceChange::Freed,
            Some(_) => return Err(DecodeError::Range { field: "data" }),
            None => added(data.get("AddRequest").ok_or(missing("AddRequest"))?)?,
        };
        let lora = value.get("lora_name").and_then(Value::text);
        Ok(Self {
            request: request.ok_or(missing("request_id"))?.to_owned(),
            rank: rank_of(value.get("worker").ok_or(missing("worker"))?)?,
            router: uint(value, "router_id")?,
            lora: lora.map(str::to_owned),
            change,
        })
    }

    /// The event as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let data = match &self.change {
            SequenceChange::Added {
                blocks,
                track_prefill,
                expected_output_tokens,
                prefill,
            } => {
                let blocks = blocks.as_ref().map(|blocks| {
                    Value::List(blocks.iter().map(|block| Value::Uint(block.0)).collect())
                });
                let body = [
                    ("token_sequence", blocks.unwrap_or(Value::Nil)),
                    ("track_prefill_tokens", Value::Bool(*track_prefill)),
                    ("expected_output_tokens", number(*expected_output_tokens)),
                    (
                        "prefill_load_hint",
                        prefill.map_or(Value::Nil, PrefillHint::to_value),
                    ),
                ];
                map([("AddRequest", map(body))])
            }
            SequenceChange::PrefillCompleted => text("MarkPrefillCompleted"),
            SequenceChange::Freed => text("Free"),
        };
        map([
            ("request_id", text(&self.request)),
            ("worker", map(rank_fields(self.rank))),
            ("data", data),
            ("router_id", Value::Uint(self.router)),
            ("lora_name", self.lora.as_deref().map_or(Value::Nil, text)),
        ])
    }
}

fn added(body: &Value) -> Result<SequenceChange, DecodeError> {
    let blocks = match body.get("token_sequence") {
        None | Some(Value::Nil) => None,
        Some(blocks) => {
            let blocks = blocks.list().ok_or(missing("token_sequence"))?.iter();
            let bits = |block: &Value| {
                let field = "token_sequence";
                let bits = block.bits().ok_or(DecodeError::Range { field });
                bits.map(SequenceHash)
            };
            Some(blocks.map(bits).collect::<Result<_, _>>()?)
        }
    };
    let prefill = match body.get("prefill_load_hint") {
        None | Some(Value::Nil) => None,
        Some(hint) => Some(PrefillHint::from_value(hint)?),
    };
    Ok(SequenceChange::Added {
        blocks,
        track_prefill: body.get("track_prefill_tokens") != Some(&Value::Bool(false)),
        expected_output_tokens: body.get("expected_output_tokens").and_then(Value::uint),
        prefill,
    })
}

impl PrefillHint {
    fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let duration = match value.get("expected_prefill_duration") {
            None | Some(Value::Nil) => None,
            Some(duration) => {
                let field = "expected_prefill_duration";
                let nanos = u32::try_from(uint(duration, "nanos")?);
                let nanos = nanos.ok().filter(|nanos| *nanos < 1_000_000_000);
                let nanos = nanos.ok_or(DecodeError::Range { field })?;
                Some(Duration::new(uint(duration, "secs")?, nanos))
            }
        };
        Ok(Self {
            tokens: uint(value, "initial_effective_prefill_tokens")?,
            duration,
        })
    }

    fn to_value(self) -> Value {
        let duration = self.duration.map(|duration| {
            map([
                ("secs", Value::Uint(duration.as_secs())),
                ("nanos", Value::Uint(u64::from(duration.subsec_nanos()))),
            ])
        });
        map([
            ("initial_effective_prefill_tokens", Value::Uint(self.tokens)),
            ("expected_prefill_duration", duration.unwrap_or(Value::Nil)),
        ])
    }
}

/// A session is bound to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionBinding {
    /// The session.
    pub session: String,
    /// Where its requests go.
    pub rank: WorkerRank,
    /// When it was bound, in nanoseconds of the router's Unix clock: the later one counts.
    pub sequence: u64,
    /// The router that says it.
    pub writer: u64,
}

impl SessionBinding {
    /// Reads a binding.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let session = value.get("session_id").and_then(Value::text);
        Ok(Self {
            session: session.ok_or(missing("session_id"))?.to_owned(),
            rank: rank_of(value)?,
            sequence: uint(value, "sequence")?,
            writer: uint(value, "writer_id")?,
        })
    }

    /// The binding as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let [worker, rank] = rank_fields(self.rank);
        map([
            ("session_id", text(&self.session)),
            worker,
            rank,
            ("sequence", Value::Uint(self.sequence)),
            ("writer_id", Value::Uint(self.writer)),
        ])
    }

    /// The worker.
    #[must_use]
    pub const fn worker(&self) -> WorkerId {
        self.rank.worker
    }
}
