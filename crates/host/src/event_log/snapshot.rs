//! What routers write down of a component's caches, and its bytes.
//!
//! `KVJS`, a version, which stream it is of and up to which message it tells all, then the ranks, each with its last event and its blocks as router events in
//! MessagePack; XXH3-64 of everything before at the end. Little-endian; lists and texts begin with their length (u32).
//!
//! What always holds: bytes that were not written by us, or not all of them, are refused as a whole.

use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::{
    Encoding, Residency, RouterEvent, decode_router_events, encode_router_events,
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 4] = *b"KVJS";
const VERSION: u16 = 1;
/// The name of the object.
pub(super) const OBJECT: &str = "kvasir-index";
/// Labels of the object: which stream, and up to which message.
pub(super) const LABEL_CREATED: &str = "stream-created";
pub(super) const LABEL_SEQUENCE: &str = "stream-sequence";

/// What one rank holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RankPart {
    pub(super) rank: WorkerRank,
    /// The number of its last event.
    pub(super) event: u64,
    /// That event is in this message or in an earlier one; all of the rank's in later ones follow it.
    pub(super) sequence: u64,
    /// Whether nothing is missing.
    pub(super) exact: bool,
    pub(super) blocks: Vec<KvEvent>,
}

/// What all ranks of a component hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LogSnapshot {
    /// Which stream it is of: when that was made.
    pub(super) created: String,
    /// All messages up to this one are told.
    pub(super) sequence: u64,
    pub(super) ranks: Vec<RankPart>,
}

/// Bytes that are no snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the snapshot in the object store cannot be read")]
pub(super) struct BadSnapshot;

impl LogSnapshot {
    pub(super) fn part(&self, rank: WorkerRank) -> Option<&RankPart> {
        self.ranks.iter().find(|part| part.rank == rank)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        push_bytes(self.created.as_bytes(), &mut out);
        out.extend(self.sequence.to_le_bytes());
        out.extend((self.ranks.len() as u32).to_le_bytes());
        for part in &self.ranks {
            out.extend(part.rank.worker.0.to_le_bytes());
            out.extend(part.rank.rank.0.to_le_bytes());
            out.extend(part.event.to_le_bytes());
            out.extend(part.sequence.to_le_bytes());
            out.push(part.exact.into());
            let mut blocks = Vec::new();
            let events: Vec<RouterEvent> = part.events(0..).collect();
            encode_router_events(Encoding::MessagePack, &events, &mut blocks);
            push_bytes(&blocks, &mut out);
        }
        let sum = xxh3_64(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, BadSnapshot> {
        read(bytes).ok_or(BadSnapshot)
    }
}

impl RankPart {
    /// Its blocks as events, with these numbers.
    pub(super) fn events(
        &self,
        ids: impl Iterator<Item = u64>,
    ) -> impl Iterator<Item = RouterEvent> {
        let rank = self.rank;
        self.blocks
            .iter()
            .zip(ids)
            .map(move |(event, id)| RouterEvent {
                rank,
                id,
                residency: Some(Residency::Worker),
                position: None,
                event: event.clone(),
            })
    }
}

fn push_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn list(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()?;
        self.take(count as usize)
    }
}

fn read(bytes: &[u8]) -> Option<LogSnapshot> {
    let (told, sum) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
    if xxh3_64(told) != u64::from_le_bytes(sum.try_into().ok()?) {
        return None;
    }
    let mut bytes = Bytes(told);
    if bytes.array()? != MAGIC || bytes.array().map(u16::from_le_bytes)? != VERSION {
        return None;
    }
    let created = String::from_utf8(bytes.list()?.to_vec()).ok()?;
    let mut snapshot = LogSnapshot {
        created,
        sequence: bytes.u64()?,
        ranks: Vec::new(),
    };
    for _ in 0..bytes.u32()? {
        snapshot.ranks.push(read_part(&mut bytes)?);
    }
    bytes.0.is_empty().then_some(snapshot)
}

fn read_part(bytes: &mut Bytes<'_>) -> Option<RankPart> {
    let (worker, rank) = (bytes.u64()?, bytes.u32()?);
    let (event, sequence) = (bytes.u64()?, bytes.u64()?);
    let exact = bytes.take(1)? == [1];
    let mut events = Vec::new();
    decode_router_events(Encoding::MessagePack, bytes.list()?, &mut events).ok()?;
    Some(RankPart {
        rank: WorkerRank::new(worker, rank),
        event,
        sequence,
        exact,
        blocks: events.into_iter().map(|event| event.event).collect(),
    })
}

#[cfg(test)]
mod tests {
    use kvasir_types::{EngineHash, LocalHash, StoredBlock, Tier};

    use super::*;

    #[test]
    fn what_is_written_is_read_and_anything_else_is_refused() {
        let block = |name| StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name + 100),
        };
        let stored = KvEvent::Stored {
            tier: Tier::Device,
            parent: None,
            blocks: vec![block(1), block(2)],
        };
        let part = |worker, exact| RankPart {
            rank: WorkerRank::new(worker, 3),
            event: 7,
            sequence: 9,
            exact,
            blocks: vec![stored.clone()],
        };
        let snapshot = LogSnapshot {
            created: "2026-01-01T00:00:00Z".to_owned(),
            sequence: 8,
            ranks: vec![part(1, true), part(u64::MAX, false)],
        };
        let bytes = snapshot.encode();
        assert_eq!(LogSnapshot::decode(&bytes), Ok(snapshot));
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(LogSnapshot::decode(&other), Err(BadSnapshot));
            assert_eq!(LogSnapshot::decode(&bytes[..at]), Err(BadSnapshot));
        }
    }
}
