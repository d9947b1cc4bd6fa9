//! Router events: what Dynamo's workers publish, and what we publish and dump ourselves.
//!
//! The same event comes as JSON (JetStream, HTTP dumps, recovery) and as MessagePack with names (event
//! plane). Blocks carry their local hashes already, so nothing is hashed here. Field order never matters;
//! absent fields have the defaults of older releases.
//!
//! Beside them all else that the event plane carries: load, what routers book, sessions, what an engine computed in
//! a step; and the questions that a worker's own index answers.

mod forward_pass;
mod index_query;
mod log_names;
mod plane;
mod read;
mod recovery;
mod replica;
mod sequences;
mod slot_news;
mod topic;
mod write;

pub use forward_pass::{ForwardPass, QueuedWork, ScheduledWork};
pub use index_query::{
    IndexQuery, IndexReply, QUERY_BLOCKS_MAX, QUERY_RANKS_MAX, RoutingRecord, TierScore,
};
pub use log_names::LogNames;
pub use plane::{ActiveLoad, ENVELOPE_VERSION, Envelope};
pub use read::decode_router_events;
pub use recovery::{RecoveryReply, RecoveryRequest};
pub use replica::ReplicaMessage;
pub use sequences::{PrefillHint, SequenceChange, SequenceEvent, SessionBinding};
pub use slot_news::{SLOT_TOPIC, SlotNews};
pub use topic::{EventScope, Topic};
pub use write::{encode_router_event, encode_router_events};

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

use kvasir_msgpack::{DecodeError, Value};

/// Events in one message; far above any publisher's batch.
pub const EVENTS_MAX: usize = 1 << 20;

/// How router events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// MessagePack with field names: the event plane.
    MessagePack,
    /// JSON: JetStream, dumps over HTTP.
    Json,
}

/// Whose residency an event speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// The worker's own memory.
    Worker,
    /// A cache that outlives the worker.
    CacheOwner,
}

/// One change of one rank's cache, as a publisher numbered it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterEvent {
    /// Whose cache.
    pub rank: WorkerRank,
    /// Consecutive per publisher, from 1.
    pub id: u64,
    /// Absent in old events, where a clear empties every tier.
    pub residency: Option<Residency>,
    /// Where in its sequence the first block stands; positional dumps give this instead of a parent.
    pub position: Option<u64>,
    /// The change.
    pub event: KvEvent,
}

const fn missing(field: &'static str) -> DecodeError {
    DecodeError::Missing { field }
}

impl RouterEvent {
    /// Reads one event from JSON.
    pub fn from_json(bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::from_value(&Value::from_json(bytes)?)
    }

    /// Reads one event from MessagePack.
    pub fn from_msgpack(bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::from_value(&Value::from_msgpack(bytes)?)
    }

    /// Reads the list of events that a message carries, or a single one.
    pub fn list_from_value(value: &Value) -> Result<Vec<Self>, DecodeError> {
        match value {
            Value::List(events) => events.iter().map(Self::from_value).collect(),
            single => Self::from_value(single).map(|event| vec![event]),
        }
    }

    /// Reads one event from a tree.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let worker = value.get("worker_id").and_then(Value::uint);
        let inner = value.get("event").ok_or(missing("event"))?;
        let id = inner.get("event_id").and_then(Value::uint);
        let rank = match inner.get("dp_rank") {
            None | Some(Value::Nil) => 0,
            Some(rank) => rank
                .uint()
                .and_then(|rank| u32::try_from(rank).ok())
                .ok_or(DecodeError::Range { field: "dp_rank" })?,
        };
        let tier = tier(value.get("storage_tier"))?;
        let residency = residency(value.get("residency_domain"))?;
        let data = inner.get("data").ok_or(missing("data"))?;
        let (event, position) = data_event(data, tier, residency)?;
        Ok(Self {
            rank: WorkerRank::new(worker.ok_or(missing("worker_id"))?, rank),
            id: id.ok_or(missing("event_id"))?,
            residency,
            position,
            event,
        })
    }

    /// This event as a tree, in the order in which Dynamo 1.6 writes its fields.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let (tier, data) = match &self.event {
            KvEvent::Stored {
                tier,
                parent,
                blocks,
            } => (*tier, self.stored_value(*parent, blocks)),
            KvEvent::Removed { tier, blocks } => {
                let names = blocks.iter().map(|name| Value::Uint(name.0)).collect();
                let body = map([("block_hashes", Value::List(names))]);
                (*tier, map([("removed", body)]))
            }
            KvEvent::Cleared { tier } => (tier.unwrap_or_default(), text("cleared")),
        };
        let mut fields = vec![
            ("worker_id", Value::Uint(self.rank.worker.0)),
            ("storage_tier", text(tier_name(tier))),
        ];
        match self.residency {
            Some(Residency::Worker) => fields.push(("residency_domain", text("worker"))),
            Some(Residency::CacheOwner) => fields.push(("residency_domain", text("cache_owner"))),
            None => {}
        }
        let event = map([
            ("event_id", Value::Uint(self.id)),
            ("data", data),
            ("dp_rank", Value::Uint(u64::from(self.rank.rank.0))),
        ]);
        fields.push(("event", event));
        map(fields)
    }

    fn stored_value(&self, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Value {
        let blocks = blocks.iter().map(|block| {
            map([
                ("block_hash", Value::Uint(block.engine.0)),
                ("tokens_hash", Value::Uint(block.local.0)),
                ("mm_extra_info", Value::Nil),
            ])
        });
        let body = map([
            (
                "parent_hash",
                parent.map_or(Value::Nil, |p| Value::Uint(p.0)),
            ),
            (
                "start_position",
                self.position.map_or(Value::Nil, Value::Uint),
            ),
            ("blocks", Value::List(blocks.collect())),
        ]);
        map([("stored", body)])
    }
}

fn data_event(
    data: &Value,
    tier: Tier,
    residency: Option<Residency>,
) -> Result<(KvEvent, Option<u64>), DecodeError> {
    if data.text() == Some("cleared") || data.get("cleared").is_some() {
        let tier = residency.map(|_| tier);
        return Ok((KvEvent::Cleared { tier }, None));
    }
    if let Some(removed) = data.get("removed") {
        let names = removed.get("block_hashes").and_then(Value::list);
        let names = names.ok_or(missing("block_hashes"))?.iter();
        let blocks = names.map(name).collect::<Result<_, _>>()?;
        return Ok((KvEvent::Removed { tier, blocks }, None));
    }
    let stored = data.get("stored").ok_or(missing("stored"))?;
    let parent = match stored.get("parent_hash") {
        None | Some(Value::Nil) => None,
        Some(parent) => Some(name(parent)?),
    };
    let blocks = stored.get("blocks").and_then(Value::list);
    let blocks = blocks.ok_or(missing("blocks"))?.iter().map(|block| {
        let local = block.get("tokens_hash").and_then(Value::bits);
        Ok(StoredBlock {
            engine: name(block.get("block_hash").ok_or(missing("block_hash"))?)?,
            local: LocalHash(local.ok_or(missing("tokens_hash"))?),
        })
    });
    let event = KvEvent::Stored {
        tier,
        parent,
        blocks: blocks.collect::<Result<_, DecodeError>>()?,
    };
    Ok((event, stored.get("start_position").and_then(Value::uint)))
}

fn name(value: &Value) -> Result<EngineHash, DecodeError> {
    let bits = value.bits();
    bits.map(EngineHash).ok_or(DecodeError::Range {
        field: "block_hash",
    })
}

const TIERS: [(&str, Tier); 4] = [
    ("device", Tier::Device),
    ("host_pinned", Tier::HostPinned),
    ("disk", Tier::Disk),
    ("external", Tier::External),
];

fn tier(value: Option<&Value>) -> Result<Tier, DecodeError> {
    match value {
        None => Ok(Tier::Device),
        Some(name) => tier_of(name.text().unwrap_or_default().as_bytes()),
    }
}

fn tier_of(name: &[u8]) -> Result<Tier, DecodeError> {
    let found = TIERS.iter().find(|(n, _)| n.as_bytes() == name);
    found.map(|(_, tier)| *tier).ok_or(DecodeError::Range {
        field: "storage_tier",
    })
}

fn tier_name(tier: Tier) -> &'static str {
    let found = TIERS.iter().find(|(_, t)| *t == tier);
    found.map_or("device", |(name, _)| name)
}

fn residency(value: Option<&Value>) -> Result<Option<Residency>, DecodeError> {
    let name = value.map(|name| name.text().unwrap_or_default());
    name.map(|name| residency_of(name.as_bytes())).transpose()
}

fn residency_of(name: &[u8]) -> Result<Residency, DecodeError> {
    match name {
        b"worker" => Ok(Residency::Worker),
        b"cache_owner" => Ok(Residency::CacheOwner),
        _ => Err(DecodeError::Range {
            field: "residency_domain",
        }),
    }
}

/// The encoded form of a tree.
fn encode(value: &Value, encoding: Encoding, out: &mut Vec<u8>) {
    match encoding {
        Encoding::MessagePack => value.to_msgpack(out),
        Encoding::Json => out.extend_from_slice(value.to_json().to_string().as_bytes()),
    }
}

/// The tree of an encoded form.
fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Value, DecodeError> {
    match encoding {
        Encoding::MessagePack => Value::from_msgpack(bytes),
        Encoding::Json => Value::from_json(bytes),
    }
}

/// A rank as most messages write it: two fields, the second 0 where it is left out.
fn rank_of(value: &Value) -> Result<WorkerRank, DecodeError> {
    let worker = value.get("worker_id").and_then(Value::uint);
    let rank = match value.get("dp_rank") {
        None | Some(Value::Nil) => 0,
        Some(rank) => rank
            .uint()
            .and_then(|rank| u32::try_from(rank).ok())
            .ok_or(DecodeError::Range { field: "dp_rank" })?,
    };
    Ok(WorkerRank::new(worker.ok_or(missing("worker_id"))?, rank))
}

fn rank_fields(rank: WorkerRank) -> [(&'static str, Value); 2] {
    [
        ("worker_id", Value::Uint(rank.worker.0)),
        ("dp_rank", Value::Uint(u64::from(rank.rank.0))),
    ]
}

fn number(value: Option<u64>) -> Value {
    value.map_or(Value::Nil, Value::Uint)
}

fn uint(value: &Value, field: &'static str) -> Result<u64, DecodeError> {
    value.get(field).and_then(Value::uint).ok_or(missing(field))
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn map<'n>(pairs: impl IntoIterator<Item = (&'n str, Value)>) -> Value {
    let pairs = pairs.into_iter();
    Value::Map(
        pairs
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}
