//! Router events to MessagePack without a tree: what a worker publishes at every step, and dumps of whole caches.
//!
//! Writes the bytes that the tree of [`crate::value`] writes; a test compares the two.

use kvasir_msgpack::{Value, Writer};
use kvasir_types::{EngineHash, KvEvent, StoredBlock};

use super::{Encoding, Residency, RouterEvent, encode, tier_name};

/// Appends a list of events, as the topic `kv-events` carries it.
pub fn encode_router_events(encoding: Encoding, events: &[RouterEvent], out: &mut Vec<u8>) {
    match encoding {
        Encoding::MessagePack => {
            Writer::new(out).array(events.len());
            events.iter().for_each(|event| write_event(event, out));
        }
        Encoding::Json => {
            let list = events.iter().map(RouterEvent::to_value).collect();
            encode(&Value::List(list), encoding, out);
        }
    }
}

/// Appends one event that stands alone, as JetStream keeps it.
pub fn encode_router_event(encoding: Encoding, event: &RouterEvent, out: &mut Vec<u8>) {
    match encoding {
        Encoding::MessagePack => write_event(event, out),
        Encoding::Json => encode(&event.to_value(), encoding, out),
    }
}

fn write_event(event: &RouterEvent, out: &mut Vec<u8>) {
    let tier = match &event.event {
        KvEvent::Stored { tier, .. } | KvEvent::Removed { tier, .. } => *tier,
        KvEvent::Cleared { tier } => tier.unwrap_or_default(),
    };
    let mut w = Writer::new(out);
    w.map(if event.residency.is_some() { 4 } else { 3 });
    w.str("worker_id");
    w.uint(event.rank.worker.0);
    w.str("storage_tier");
    w.str(tier_name(tier));
    if let Some(residency) = event.residency {
        w.str("residency_domain");
        w.str(match residency {
            Residency::Worker => "worker",
            Residency::CacheOwner => "cache_owner",
        });
    }
    w.str("event");
    w.map(3);
    w.str("event_id");
    w.uint(event.id);
    w.str("data");
    match &event.event {
        KvEvent::Stored { parent, blocks, .. } => write_stored(event, *parent, blocks, &mut w),
        KvEvent::Removed { blocks, .. } => {
            w.map(1);
            w.str("removed");
            w.map(1);
            w.str("block_hashes");
            w.array(blocks.len());
            blocks.iter().for_each(|name| w.uint(name.0));
        }
        KvEvent::Cleared { .. } => w.str("cleared"),
    }
    w.str("dp_rank");
    w.uint(u64::from(event.rank.rank.0));
}

fn write_stored(
    event: &RouterEvent,
    parent: Option<EngineHash>,
    blocks: &[StoredBlock],
    w: &mut Writer<'_>,
) {
    let optional = |w: &mut Writer<'_>, value: Option<u64>| match value {
        Some(value) => w.uint(value),
        None => w.nil(),
    };
    w.map(1);
    w.str("stored");
    w.map(3);
    w.str("parent_hash");
    optional(w, parent.map(|parent| parent.0));
    w.str("start_position");
    optional(w, event.position);
    w.str("blocks");
    w.array(blocks.len());
    for block in blocks {
        w.map(3);
        w.str("block_hash");
        w.uint(block.engine.0);
        w.str("tokens_hash");
        w.uint(block.local.0);
        w.str("mm_extra_info");
        w.nil();
    }
}
