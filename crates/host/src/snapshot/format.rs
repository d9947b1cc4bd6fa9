//! The bytes of an index snapshot file.
//!
//! Little-endian throughout: `KVST`, a version (u16), the routers, then XXH3-64 of everything before it. Texts
//! and lists begin with their length (u32). The index inside has a form, a version and a checksum of its own.
//!
//! What always holds: of a file whose checksum is wrong no more is held than [`READ_BYTES`], however long it is; of one whose
//! checksum is right, what it holds, once.

use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;

use kvasir_kv_events::{Cursor, StreamCheckpoint, TranslatorState};
use kvasir_router::LearnedRecord;
use kvasir_trust::{CacheState, TrustRecord};
use kvasir_types::{DpRank, EngineHash, WorkerRank};
use xxhash_rust::xxh3::Xxh3;

use super::SnapshotFileError;

const MAGIC: [u8; 4] = *b"KVST";
const VERSION: u16 = 2;
const CHECKSUM: usize = 8;
/// Bytes that are read at once.
const READ_BYTES: usize = 256 << 10;
/// Routers that are read: as many as there can be models.
const ROUTERS_MAX: usize = crate::Models::<crate::Model>::MAX;

/// One router's part.
#[derive(Debug, PartialEq)]
pub(super) struct RouterSnapshot {
    pub(super) name: String,
    pub(super) block_size: u32,
    pub(super) streams: Vec<StreamSnapshot>,
    /// How long its engines take, where that is learned.
    pub(super) learned: Option<LearnedRecord>,
    /// As `Index::snapshot` made it; empty where only that is kept.
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
        part.times(router.learned.as_ref());
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

/// Reads a file of `size` bytes: first its checksum, and if that is right its content.
pub(super) fn read(
    mut from: impl Read + Seek,
    size: u64,
) -> Result<Vec<RouterSnapshot>, SnapshotFileError> {
    let head = verify(&mut from, size)?;
    from.seek(SeekFrom::Start(head))?;
    let mut reader = Reader {
        from: BufReader::with_capacity(READ_BYTES, from),
        left: size - head - CHECKSUM as u64,
    };
    let routers = reader.list(Reader::router);
    routers
        .filter(|routers| reader.left == 0 && routers.len() <= ROUTERS_MAX)
        .ok_or(SnapshotFileError::Corrupt)
}

/// Reads all of it once, and keeps nothing. Returns where the content begins.
fn verify(from: &mut impl Read, size: u64) -> Result<u64, SnapshotFileError> {
    let mut sum = Xxh3::new();
    let mut next = |bytes: &mut [u8]| -> Result<(), SnapshotFileError> {
        match from.read_exact(bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(SnapshotFileError::Corrupt)
            }
            read => Ok(read?),
        }
    };
    let (mut magic, mut version) = ([0; MAGIC.len()], [0; 2]);
    match next(&mut magic) {
        Ok(()) if magic == MAGIC => {}
        Ok(()) | Err(SnapshotFileError::Corrupt) => return Err(SnapshotFileError::Foreign),
        Err(error) => return Err(error),
    }
    next(&mut version)?;
    match u16::from_le_bytes(version) {
        VERSION => {}
        other => return Err(SnapshotFileError::Version(other)),
    }
    sum.update(&magic);
    sum.update(&version);
    let head = (magic.len() + version.len()) as u64;
    let content = size.checked_sub(head + CHECKSUM as u64);
    let mut left = content.ok_or(SnapshotFileError::Corrupt)?;
    let mut part = vec![0; READ_BYTES];
    while left > 0 {
        let count = left.min(READ_BYTES as u64);
        let part = part.get_mut(..count as usize).unwrap_or_default();
        next(part)?;
        sum.update(part);
        left -= count;
    }
    let mut expected = [0; CHECKSUM];
    next(&mut expected)?;
    match sum.digest() == u64::from_le_bytes(expected) {
        true => Ok(head),
        false => Err(SnapshotFileError::Corrupt),
    }
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

    fn times(&mut self, learned: Option<&LearnedRecord>) {
        let number = |out: &mut Self, number: &f64| out.u64(number.to_bits());
        self.list(learned.map_or(&[], |learned| &learned.fleet), number);
        self.list(
            learned.map_or(&[], |learned| &learned.ranks),
            |out, (rank, numbers)| {
                out.u64(rank.worker.0);
                out.u32(rank.rank.0);
                out.list(numbers, number);
            },
        );
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

/// Content whose checksum is right, still to be read.
struct Reader<R> {
    from: BufReader<R>,
    left: u64,
}

impl<R: Read> Reader<R> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.left = self.left.checked_sub(N as u64)?;
        self.from.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    /// `count` bytes, if there are as many: a length that lies costs no memory.
    fn take(&mut self, count: u64) -> Option<Vec<u8>> {
        self.left = self.left.checked_sub(count)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(count).ok()?).ok()?;
        Read::take(&mut self.from, count)
            .read_to_end(&mut bytes)
            .ok()?;
        (bytes.len() as u64 == count).then_some(bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let count = self.u32()?;
        String::from_utf8(self.take(count.into())?).ok()
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()?;
        // An item has at least one byte.
        (u64::from(count) <= self.left).then_some(())?;
        (0..count).map(|_| one(self)).collect()
    }

    fn router(&mut self) -> Option<RouterSnapshot> {
        let (name, block_size) = (self.text()?, self.u32()?);
        let streams = self.list(Self::stream)?;
        let learned = self.times()?;
        let count = self.u64()?;
        Some(RouterSnapshot {
            name,
            block_size,
            streams,
            learned: Some(learned).filter(|learned| *learned != LearnedRecord::default()),
            index: self.take(count)?,
        })
    }

    /// What they mean is checked by whoever goes on from them.
    fn times(&mut self) -> Option<LearnedRecord> {
        let number = |r: &mut Self| r.u64().map(f64::from_bits);
        let fleet = self.list(number)?;
        let rank = |r: &mut Self| Some((WorkerRank::new(r.u64()?, r.u32()?), r.list(number)?));
        let ranks = self.list(rank)?;
        Some(LearnedRecord { fleet, ranks })
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
    use xxhash_rust::xxh3::xxh3_64;

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
                learned: Some(LearnedRecord {
                    fleet: vec![0.5, 2.0],
                    ranks: vec![(WorkerRank::new(7, 1), vec![1.0])],
                }),
                index: vec![1, 2, 3],
            },
            RouterSnapshot {
                name: String::new(),
                block_size: 0,
                streams: Vec::new(),
                learned: None,
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

    fn read_all(bytes: &[u8]) -> Result<Vec<RouterSnapshot>, SnapshotFileError> {
        read(io::Cursor::new(bytes), bytes.len() as u64)
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(read_all(&written(&routers())).unwrap(), routers());
        assert_eq!(read_all(&written(&[])).unwrap(), []);
    }

    #[test]
    fn any_other_bytes_are_refused() {
        let good = written(&routers());
        for end in 0..good.len() {
            assert!(read_all(&good[..end]).is_err(), "cut at {end}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(read_all(&bad).is_err(), "bit of byte {at}");
        }
        assert!(matches!(
            read_all(b"#!/bin/sh"),
            Err(SnapshotFileError::Foreign)
        ));
        assert!(matches!(
            read_all(b"KVST\x01\x00"),
            Err(SnapshotFileError::Version(1))
        ));
        // A right checksum over lengths that lie.
        let mut lying = MAGIC.to_vec();
        lying.extend(VERSION.to_le_bytes());
        lying.extend(u32::MAX.to_le_bytes());
        lying.extend(xxh3_64(&lying).to_le_bytes());
        assert!(matches!(read_all(&lying), Err(SnapshotFileError::Corrupt)));
    }
}
