//! An index written down: as events for anybody, and in a compact form of our own.
//!
//! The compact form is little-endian throughout: `KVIX`, a version (u16), then the ranks, then the runs,
//! parents before children, then XXH3-64 of everything before it. It holds what events said; what routing
//! decisions taught is not kept.

use kvasir_types::{KvEvent, Tier, WorkerRank};
use xxhash_rust::xxh3::xxh3_64;

use crate::index::{TIERS, Writer};
use crate::tree::{DumpEvent, Holder, RunRecord};
use crate::{Index, RestoreError, SnapshotError};

const MAGIC: [u8; 4] = *b"KVIX";
const VERSION: u16 = 2;
const CHECKSUM: usize = 8;

/// Blocks that are copied before other writers get a turn: some tens of microseconds. Few in tests, whose indexes are
/// small and shall be copied in parts.
const BLOCKS_AT_ONCE: usize = if cfg!(any(test, feature = "oracle")) {
    3
} else {
    4096
};

/// Copies in parts that are begun before it is given up.
const COPIES_BEGUN_MAX: usize = 4;

/// How often a copy gives way to others that wait, after each part.
const GIVE_WAY_MAX: usize = 1000;

impl Index {
    /// Everything as events, per rank in the order in which they are to be applied. Weakly consistent only
    /// between ranks: one rank's events are of one moment.
    #[must_use]
    pub fn dump(&self) -> Vec<(WorkerRank, KvEvent)> {
        let ranks: Vec<WorkerRank> = self.write().ranks.sorted();
        ranks
            .into_iter()
            .flat_map(|rank| self.dump_rank(rank))
            .collect()
    }

    /// One rank's part of [`Index::dump`]: what events taught, and in an approximate index what routing decisions did.
    /// Writers of events wait while it is copied; requests never wait for more than a few blocks.
    #[must_use]
    pub fn dump_rank(&self, rank: WorkerRank) -> Vec<(WorkerRank, KvEvent)> {
        let mut dumped = self.dump_events(rank);
        if let Some(routing) = self.approximate() {
            let stored = routing.dump(rank).into_iter();
            dumped.extend(stored.map(|event| (rank, kv_event(Tier::Device, event))));
        }
        dumped
    }

    fn dump_events(&self, rank: WorkerRank) -> Vec<(WorkerRank, KvEvent)> {
        let writer = &mut *self.write();
        let Some(slot) = writer.ranks.get(rank) else {
            return Vec::new();
        };
        let events = &writer.events;
        let tiers = TIERS.iter().enumerate();
        tiers
            .flat_map(|(t, &tier)| {
                let dumped = events.dump(Holder { slot, tier: t });
                dumped
                    .into_iter()
                    .map(move |event| (rank, kv_event(tier, event)))
            })
            .collect()
    }

    /// Every rank of which events told something, in order.
    #[must_use]
    pub fn ranks(&self) -> Vec<WorkerRank> {
        self.write().ranks.sorted()
    }

    /// The compact form, of one moment. An index that keeps changing is in the end copied in one go: all other writers
    /// wait for that.
    pub fn snapshot(&self) -> Result<Vec<u8>, SnapshotError> {
        match self.snapshot_in_parts(|| {}) {
            // Nobody else gets in, so nothing changes.
            Err(SnapshotError::Changed) => self.copy(usize::MAX, &mut || {}),
            copied => copied,
        }
    }

    /// As [`Index::snapshot`], letting other writers in after every few thousand blocks. `give_way` is called there, to
    /// let other threads have a processor. No writer ever waits for more than such a part; an index that keeps changing
    /// is not copied.
    pub fn snapshot_in_parts(&self, mut give_way: impl FnMut()) -> Result<Vec<u8>, SnapshotError> {
        for _ in 1..COPIES_BEGUN_MAX {
            match self.copy(BLOCKS_AT_ONCE, &mut give_way) {
                Err(SnapshotError::Changed) => {}
                copied => return copied,
            }
        }
        self.copy(BLOCKS_AT_ONCE, &mut give_way)
    }

    /// Fails if the index changed between two parts.
    fn copy(&self, blocks: usize, give_way: &mut impl FnMut()) -> Result<Vec<u8>, SnapshotError> {
        let (mut out, mut part) = (Vec::new(), Vec::new());
        let mut cursor = None;
        loop {
            let mut guard = self.write();
            let writer = &mut *guard;
            let events = &writer.events;
            let cursor = cursor.get_or_insert_with(|| {
                out.reserve(64 + events.blocks() * 17);
                write_head(&mut part, writer.ranks.by_slot(), events.runs());
                events.begin_packing()
            });
            let more = events.pack_some(cursor, blocks, |run| write_run(&mut part, run))?;
            drop(guard);
            out.append(&mut part);
            if !more {
                out.extend(xxh3_64(&out).to_le_bytes());
                return Ok(out);
            }
            give_way();
            // They got nothing of it if the lock is taken again before they have it.
            for _ in 0..GIVE_WAY_MAX {
                if !self.has_waiting_writers() {
                    break;
                }
                give_way();
            }
        }
    }

    /// Takes over what [`Index::snapshot`] wrote down. The index must hold nothing from events; on an error
    /// it holds nothing afterwards.
    pub fn restore(&self, bytes: &[u8]) -> Result<(), RestoreError> {
        let mut writer = self.write();
        if writer.events.blocks() > 0 {
            return Err(RestoreError::NotEmpty);
        }
        let body = checked(bytes)?;
        let restored = self.read(&mut Reader(body), &mut writer);
        drop(writer);
        if restored.is_none() {
            let ranks = self.write().ranks.sorted();
            ranks.into_iter().for_each(|rank| self.remove_rank(rank));
        }
        restored.ok_or(RestoreError::Corrupt)
    }

    fn read(&self, reader: &mut Reader<'_>, writer: &mut Writer) -> Option<()> {
        let count = reader.u32()?;
        let mut slots = Vec::new();
        for _ in 0..count {
            let rank = WorkerRank::new(reader.u64()?, reader.u32()?);
            slots.push(writer.ranks.slot(rank, self.rank_table()));
        }
        let events = &mut writer.events;
        let (mut ids, mut run) = (vec![0], RunRecord::default());
        for _ in 0..reader.u32()? {
            read_run(reader, &slots, &mut run)?;
            events.unpack(&run, &mut ids).then_some(())?;
        }
        (reader.0.is_empty() && events.is_trim()).then_some(())
    }
}

fn write_head(out: &mut Vec<u8>, ranks: &[WorkerRank], runs: usize) {
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend((ranks.len() as u32).to_le_bytes());
    for rank in ranks {
        out.extend(rank.worker.0.to_le_bytes());
        out.extend(rank.rank.0.to_le_bytes());
    }
    out.extend((runs as u32).to_le_bytes());
}

fn kv_event(tier: Tier, event: DumpEvent) -> KvEvent {
    match event {
        DumpEvent::Stored(parent, blocks) => KvEvent::Stored {
            tier,
            parent,
            blocks,
        },
        DumpEvent::Removed(blocks) => KvEvent::Removed { tier, blocks },
    }
}

/// What lies between version and checksum.
fn checked(bytes: &[u8]) -> Result<&[u8], RestoreError> {
    let rest = bytes
        .strip_prefix(&MAGIC)
        .ok_or(RestoreError::NotASnapshot)?;
    let (version, rest) = rest.split_first_chunk().ok_or(RestoreError::NotASnapshot)?;
    let version = u16::from_le_bytes(*version);
    if version != VERSION {
        return Err(RestoreError::Version(version));
    }
    let (body, sum) = rest
        .split_last_chunk::<CHECKSUM>()
        .ok_or(RestoreError::Corrupt)?;
    let covered = &bytes[..bytes.len() - CHECKSUM];
    if xxh3_64(covered) != u64::from_le_bytes(*sum) {
        return Err(RestoreError::Corrupt);
    }
    Ok(body)
}

fn write_run(out: &mut Vec<u8>, run: &RunRecord) {
    out.extend(run.parent.to_le_bytes());
    out.extend((run.names.len() as u16).to_le_bytes());
    out.extend((run.unnamed.len() as u16).to_le_bytes());
    out.extend((run.owners.len() as u32).to_le_bytes());
    out.extend((run.patches.len() as u32).to_le_bytes());
    out.extend((run.aliases.len() as u32).to_le_bytes());
    out.extend(run.locals.iter().flat_map(|l| l.to_le_bytes()));
    out.extend(run.names.iter().flat_map(|n| n.to_le_bytes()));
    out.extend(
        run.unnamed
            .iter()
            .flat_map(|pos| (*pos as u16).to_le_bytes()),
    );
    for &(slot, tier, extent) in &run.owners {
        out.extend(slot.to_le_bytes());
        out.extend([tier as u8]);
        out.extend((extent as u16).to_le_bytes());
    }
    for (slot, tier, words) in &run.patches {
        out.extend(slot.to_le_bytes());
        out.extend([*tier as u8]);
        out.extend(words.iter().flat_map(|w| w.to_le_bytes()));
    }
    for &(slot, tier, pos, name, count) in &run.aliases {
        out.extend(slot.to_le_bytes());
        out.extend([tier as u8]);
        out.extend((pos as u16).to_le_bytes());
        out.extend(name.to_le_bytes());
        out.extend(count.to_le_bytes());
    }
}

fn read_run(reader: &mut Reader<'_>, slots: &[u32], run: &mut RunRecord) -> Option<()> {
    run.parent = reader.u32()?;
    let len = usize::from(reader.u16()?);
    let unnamed = reader.u16()?;
    let (owners, patches, aliases) = (reader.u32()?, reader.u32()?, reader.u32()?);
    reader.words(len, &mut run.locals)?;
    reader.words(len, &mut run.names)?;
    run.unnamed.clear();
    for _ in 0..unnamed {
        run.unnamed.push(u32::from(reader.u16()?));
    }
    run.owners.clear();
    for _ in 0..owners {
        let slot = *slots.get(reader.u32()? as usize)?;
        let owner = (slot, usize::from(reader.u8()?), u32::from(reader.u16()?));
        run.owners.push(owner);
    }
    run.patches.clear();
    for _ in 0..patches {
        let slot = *slots.get(reader.u32()? as usize)?;
        let (tier, mut words) = (usize::from(reader.u8()?), Vec::new());
        reader.words(len.div_ceil(64), &mut words)?;
        run.patches.push((slot, tier, words));
    }
    let heads = run.owners.iter().map(|o| (o.0, o.1));
    let patches = run.patches.iter().map(|p| (p.0, p.1));
    let mut owned: Vec<_> = heads.chain(patches).collect();
    owned.sort_unstable();
    owned.windows(2).all(|two| two[0] != two[1]).then_some(())?;
    run.aliases.clear();
    for _ in 0..aliases {
        let slot = *slots.get(reader.u32()? as usize)?;
        let (tier, pos) = (usize::from(reader.u8()?), u32::from(reader.u16()?));
        run.aliases
            .push((slot, tier, pos, reader.u64()?, reader.u32()?));
    }
    Some(())
}

/// Bytes still to be read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|b| b[0])
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn words(&mut self, count: usize, out: &mut Vec<u64>) -> Option<()> {
        let (head, rest) = self.0.split_at_checked(count * 8)?;
        let (words, _) = head.as_chunks();
        out.clear();
        out.extend(words.iter().map(|w| u64::from_le_bytes(*w)));
        self.0 = rest;
        Some(())
    }
}
