//! The bytes of an index snapshot file.
//!
//! Little-endian throughout: `KVST`, a version (u16), the routers, then XXH3-64 of everything before it. Texts
//! and lists begin with their length (u32). The index inside has a form, a version and a checksum of its own.

use std::io;
use std::sync::Arc;

use kvasir_kv_events::{Cursor, StreamCheckpoint, TranslatorState};
use kvasir_trust::{CacheState, TrustRecord};
use kvasir_types::{DpRank, EngineHash, WorkerRank};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::SnapshotFileError;

const MAGIC: [u8; 4] = *b"KVST";
const VERSION: u16 = 1;
const CHECKSUM: usize = 8;

/// One router's part.
#[derive(Debug, PartialEq)]
pub(super) struct RouterSnapshot {
    pub(super) name: String,
    pub(super) block_size: u32,
    pub(super) streams: Vec<StreamSnapshot>,
    /// As `Index::snapshot` made it.
    pub(super) index: Vec<u8>,
}

/// One event stream's part.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StreamSnapshot {
    pub(super) rank: WorkerRank,
    pub(super) trust: TrustRecord,
    pub(super) kept: StreamCheckpoint,
}

/// Writes the parts of routers. Returns how many bytes that took.
pub(super) fn write(routers: &[RouterSnapshot], to: impl io::Write) -> io::Result<u64> {
    let mut out = Summed {
        to,
        sum: Xxh3::new(),
        bytes: 0,
    };
    let mut head = Writer(Vec::new());
    head.0.extend(MAGIC);
    head.0.extend(VERSION.to_le_bytes());
    head.u32(routers.len() as u32);
    out.write(&head.0)?;
    for router in routers {
        let mut part = Writer(Vec::new());
        part.bytes(router.name.as_bytes());
        part.u32(router.block_size);
        part.list(&router.streams, Writer::stream);
        part.u64(router.index.len() as u64);
        out.write(&part.0)?;
        out.write(&router.index)?;
    }
    let sum = out.sum.digest();
    out.write(&sum.to_le_bytes())?;
    Ok(out.bytes)
}

/// Sums up what it passes on.
struct Summed<W> {
    to: W,
    sum: Xxh3,
    bytes: u64,
}

impl<W: io::Write> Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        self.to.write_all(bytes)
    }
}

pub(super) fn read(bytes: &[u8]) -> Result<Vec<RouterSnapshot>, SnapshotFileError> {
    let rest = bytes
        .strip_prefix(&MAGIC)
        .ok_or(SnapshotFileError::Foreign)?;
    let (version, rest) = rest.split_first_chunk().ok_or(SnapshotFileError::Corrupt)?;
    let version = u16::from_le_bytes(*version);
    if version != VERSION {
        return Err(SnapshotFileError::Version(version));
    }
    let (body, sum) = rest
        .split_last_chunk::<CHECKSUM>()
        .ok_or(SnapshotFileError::Corrupt)?;
    let summed = bytes.len() - CHECKSUM;
    if xxh3_64(bytes.get(..summed).unwrap_or_default()) != u64::from_le_bytes(*sum) {
        return Err(SnapshotFileError::Corrupt);
    }
    let mut reader = Reader(body);
    let routers = reader.list(Reader::router);
    routers
        .filter(|_| reader.0.is_empty())
        .ok_or(SnapshotFileError::Corrupt)
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend(bytes);
    }

    fn list<T>(&mut self, items: &[T], mut one: impl FnMut(&mut Self, &T)) {
        self.u32(items.len() as u32);
        items.iter().for_each(|item| one(self, item));
    }

    fn stream(&mut self, stream: &StreamSnapshot) {
        self.u64(stream.rank.worker.0);
        self.u32(stream.rank.rank.0);
        self.0.push(match stream.trust.state {
            CacheState::Approximate => 0,
            CacheState::Discounted => 1,
            CacheState::Exact => 2,
        });
        self.u32(stream.trust.demotions);
        let cursor = stream.kept.cursor;
        self.u64(cursor.sequence);
        self.u64(cursor.digest);
        self.u64(cursor.at.to_bits());
        self.list(&stream.kept.ranks, |out, (rank, learned)| {
            out.u32(rank.0);
            out.list(&learned.groups, |out, whole| {
                out.0.push(whole.map_or(2, u8::from));
            });
            out.list(&learned.salts, |out, (name, salt, count)| {
                out.u64(name.0);
                out.bytes(salt.as_bytes());
                out.u32(*count);
            });
        });
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Option<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let count = self.u32()? as usize;
        String::from_utf8(self.take(count)?.to_vec()).ok()
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()?;
        // An item has at least one byte: a length that lies costs no memory.
        (count as usize <= self.0.len()).then_some(())?;
        (0..count).map(|_| one(self)).collect()
    }

    fn router(&mut self) -> Option<RouterSnapshot> {
        let (name, block_size) = (self.text()?, self.u32()?);
        let streams = self.list(Self::stream)?;
        let count = usize::try_from(self.u64()?).ok()?;
        Some(RouterSnapshot {
            name,
            block_size,
            streams,
            index: self.take(count)?.to_vec(),
        })
    }

    fn stream(&mut self) -> Option<StreamSnapshot> {
        let rank = WorkerRank::new(self.u64()?, self.u32()?);
        let state = match self.u8()? {
            0 => CacheState::Approximate,
            1 => CacheState::Discounted,
            2 => CacheState::Exact,
            _ => return None,
        };
        let demotions = self.u32()?;
        let cursor = Cursor {
            sequence: self.u64()?,
            digest: self.u64()?,
            at: f64::from_bits(self.u64()?),
        };
        let ranks = self.list(|r| Some((DpRank(r.u32()?), r.learned()?)))?;
        Some(StreamSnapshot {
            rank,
            trust: TrustRecord { state, demotions },
            kept: StreamCheckpoint { cursor, ranks },
        })
    }

    fn learned(&mut self) -> Option<TranslatorState> {
        let groups = self.list(|r| match r.u8()? {
            0 => Some(Some(false)),
            1 => Some(Some(true)),
            2 => Some(None),
            _ => None,
        })?;
        let salts = self.list(|r| {
            let (name, salt) = (EngineHash(r.u64()?), r.text()?);
            Some((name, Arc::from(salt), r.u32()?))
        })?;
        Some(TranslatorState { groups, salts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routers() -> Vec<RouterSnapshot> {
        let learned = TranslatorState {
            groups: vec![Some(true), None, Some(false)],
            salts: vec![(EngineHash(7), "tenant".into(), 2)],
        };
        let stream = StreamSnapshot {
            rank: WorkerRank::new(u64::MAX, 3),
            trust: TrustRecord {
                state: CacheState::Exact,
                demotions: 1,
            },
            kept: StreamCheckpoint {
                cursor: Cursor {
                    sequence: 99,
                    digest: 5,
                    at: 1.5,
                },
                ranks: vec![(DpRank(3), learned)],
            },
        };
        vec![
            RouterSnapshot {
                name: "org/model".into(),
                block_size: 16,
                streams: vec![stream],
                index: vec![1, 2, 3],
            },
            RouterSnapshot {
                name: String::new(),
                block_size: 0,
                streams: Vec::new(),
                index: Vec::new(),
            },
        ]
    }

    fn written(routers: &[RouterSnapshot]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let count = write(routers, &mut bytes).unwrap();
        assert_eq!(count, bytes.len() as u64);
        bytes
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(read(&written(&routers())).unwrap(), routers());
        assert_eq!(read(&written(&[])).unwrap(), []);
    }

    #[test]
    fn any_other_bytes_are_refused() {
        let good = written(&routers());
        for end in 0..good.len() {
            assert!(read(&good[..end]).is_err(), "cut at {end}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(read(&bad).is_err(), "bit of byte {at}");
        }
        assert!(matches!(
            read(b"#!/bin/sh"),
            Err(SnapshotFileError::Foreign)
        ));
        assert!(matches!(
            read(b"KVST\x02\x00"),
            Err(SnapshotFileError::Version(2))
        ));
        // A right checksum over lengths that lie.
        let mut lying = MAGIC.to_vec();
        lying.extend(VERSION.to_le_bytes());
        lying.extend(u32::MAX.to_le_bytes());
        lying.extend(xxh3_64(&lying).to_le_bytes());
        assert!(matches!(read(&lying), Err(SnapshotFileError::Corrupt)));
    }
}
