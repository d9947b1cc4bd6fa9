//! TensorRT-LLM's events: a JSON list that its server gives out, and forgets, on `/kv_cache_events`.
//!
//! Written after its public documentation and examples; **not run** against a real server.
//!
//! Elsewhere: which of them count and what they change (`kvasir-kv-events`).

use kvasir_msgpack::{DecodeError, Value};

/// One numbered event and the rank that it speaks of.
#[derive(Clone, Debug, PartialEq)]
pub struct TrtEvent {
    /// Consecutive per server, from 0 (the `created` event of a fresh cache).
    pub id: u64,
    /// Attention data-parallel rank.
    pub rank: u32,
    /// What happened, as the server says it.
    pub body: Value,
    /// Tokens of the attention window that it speaks of.
    pub window: Option<u64>,
}

/// Reads a whole answer of the route.
pub fn decode(bytes: &[u8]) -> Result<Vec<TrtEvent>, DecodeError> {
    let missing = |field| DecodeError::Missing { field };
    let value = Value::from_json(bytes)?;
    let events = value.list().ok_or(missing("events"))?;
    let read = |event: &Value| {
        let rank = event.get("attention_dp_rank").and_then(Value::uint);
        let rank = u32::try_from(rank.unwrap_or(0));
        Ok(TrtEvent {
            id: event
                .get("event_id")
                .and_then(Value::uint)
                .ok_or(missing("event_id"))?,
            rank: rank.map_err(|_| DecodeError::Range {
                field: "attention_dp_rank",
            })?,
            body: event.get("data").cloned().ok_or(missing("data"))?,
            window: event.get("window_size").and_then(Value::uint),
        })
    };
    events.iter().map(read).collect()
}
