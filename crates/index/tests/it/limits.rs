//! Long chains, the byte budget, memory that comes back, damaged snapshots.

use kvasir_index::{ApplyError, Approximate, Index, IndexOptions, Matches, RestoreError};
use kvasir_types::{
    EngineHash, KvEvent, LocalHash, Rng, SequenceHash, StoredBlock, Tier, Time, WorkerId,
    WorkerRank,
};
use std::time::Duration;

fn chain(seed: u64, len: u64) -> Vec<StoredBlock> {
    let block = |i| StoredBlock {
        engine: EngineHash(Rng::new(seed << 32 | i).next_u64()),
        local: LocalHash(Rng::new(seed << 32 | i | 1 << 63).next_u64()),
    };
    (0..len).map(block).collect()
}

fn stored(parent: Option<EngineHash>, blocks: &[StoredBlock]) -> KvEvent {
    KvEvent::Stored {
        tier: Tier::Device,
        parent,
        blocks: blocks.to_vec(),
    }
}

fn removed(blocks: impl IntoIterator<Item = StoredBlock>) -> KvEvent {
    KvEvent::Removed {
        tier: Tier::Device,
        blocks: blocks.into_iter().map(|b| b.engine).collect(),
    }
}

fn depth(index: &Index, rank: WorkerRank, blocks: &[StoredBlock]) -> u32 {
    let prompt: Vec<LocalHash> = blocks.iter().map(|b| b.local).collect();
    let mut found = Matches::new();
    index.find(&prompt, &mut found);
    found.get(rank).map_or(0, |m| m.device)
}

/// One event of 65,536 blocks; then gaps from the front on, filled again; then all goes.
#[test]
fn a_chain_of_65_536_blocks() {
    let (index, rank, blocks) = (Index::new(), WorkerRank::new(1, 0), chain(1, 65_536));
    let floor = index.stats().bytes;
    index.apply(rank, &stored(None, &blocks)).unwrap();
    assert_eq!(depth(&index, rank, &blocks), 65_536);
    for at in [0, 1, 2, 999, 1_023, 1_024, 40_000, 65_534] {
        index.apply(rank, &removed([blocks[at]])).unwrap();
        assert_eq!(depth(&index, rank, &blocks), at as u32);
        let parent = at.checked_sub(1).map(|p| blocks[p].engine);
        index
            .apply(rank, &stored(parent, &blocks[at..=at]))
            .unwrap();
        assert_eq!(depth(&index, rank, &blocks), 65_536);
        index.check_invariants();
    }
    for block in blocks.iter().take(3_000) {
        index.apply(rank, &removed([*block])).unwrap();
    }
    assert_eq!(depth(&index, rank, &blocks), 0);
    index.check_invariants();
    index.remove_rank(rank);
    assert_eq!(index.stats().blocks, 0);
    assert!(index.stats().bytes <= floor + floor / 100);
}

/// A block that is its own ancestor refuses the whole event, wherever it stands in a long one.
#[test]
fn a_repeated_name_changes_nothing() {
    let (index, rank) = (Index::new(), WorkerRank::new(1, 0));
    for len in [2, 40, 1_024, 3_000] {
        let mut blocks = chain(len, len);
        let (first, last) = (blocks[0].engine, len as usize - 1);
        blocks[last].engine = first;
        let refused = index.apply(rank, &stored(None, &blocks));
        assert_eq!(refused, Err(ApplyError::InvalidBlockSequence(first)));
        assert_eq!(index.stats().blocks, 0);
        index.check_invariants();
    }
}

/// Past the budget the chains that were stored longest ago go; the newest are kept; all is counted.
#[test]
fn the_byte_budget_holds() {
    let max_bytes = 400_000;
    let index = Index::with_options(&IndexOptions {
        max_bytes,
        ..IndexOptions::default()
    });
    let rank = WorkerRank::new(1, 0);
    for seed in 0..200 {
        index.apply(rank, &stored(None, &chain(seed, 300))).unwrap();
        assert!(index.stats().bytes <= max_bytes, "after {seed}");
        assert_eq!(depth(&index, rank, &chain(seed, 300)), 300, "the newest");
        index.check_invariants();
    }
    let stats = index.stats();
    assert_eq!(stats.evicted + stats.entries, 200 * 300);
    assert!(stats.evicted > 0);
    assert_eq!(depth(&index, rank, &chain(0, 300)), 0, "the oldest");
    let gone = index.apply(rank, &removed(chain(0, 300).into_iter().take(1)));
    assert!(matches!(gone, Err(ApplyError::BlockNotFound(_))));
}

/// An event drops no more than it may at once; those that follow drop the rest, however far the index is beyond its
/// budget, and what was stored last stays longest.
#[test]
fn an_event_drops_only_some_of_too_much() {
    let rank = WorkerRank::new(1, 0);
    let full = Index::new();
    for seed in 0..1_000 {
        full.apply(rank, &stored(None, &chain(seed, 100))).unwrap();
    }
    let max_bytes = full.stats().bytes / 2;
    let index = Index::with_options(&IndexOptions {
        max_bytes,
        ..IndexOptions::default()
    });
    index.restore(&full.snapshot().unwrap()).unwrap();
    let mut events = 0;
    while index.stats().bytes > max_bytes {
        events += 1;
        let before = index.stats();
        index
            .apply(rank, &stored(None, &chain(1_000 + events, 10)))
            .unwrap();
        let after = index.stats();
        assert!(after.evicted > before.evicted);
        assert!(after.evicted - before.evicted <= 1_024 + 2 * 10 + 100);
        assert_eq!(depth(&index, rank, &chain(1_000 + events, 10)), 10);
        index.check_invariants();
    }
    assert!((40..100).contains(&events), "{events}");
    for seed in 1_001..=1_000 + events {
        assert_eq!(depth(&index, rank, &chain(seed, 10)), 10, "stored later");
    }
}

/// What routing decisions taught counts against the budget too, and goes first.
#[test]
fn the_byte_budget_covers_routing_decisions() {
    let max_bytes = 600_000;
    let index = Index::with_options(&IndexOptions {
        max_bytes,
        predicted_ttl: Some(Duration::from_secs(5)),
        ..IndexOptions::default()
    });
    let rank = WorkerRank::new(1, 0);
    for seed in 0..10 {
        index.apply(rank, &stored(None, &chain(seed, 300))).unwrap();
    }
    let stored_entries = index.stats().entries;
    for seed in 100..200_u64 {
        let blocks = chain(seed, 300);
        let locals: Vec<LocalHash> = blocks.iter().map(|b| b.local).collect();
        let names: Vec<SequenceHash> = blocks.iter().map(|b| SequenceHash(b.engine.0)).collect();
        let now = Time::from_nanos(seed * 200_000_000);
        index.record_routing(now, rank, &locals, &names);
        assert!(index.stats().bytes <= max_bytes, "after {seed}");
        index.check_invariants();
    }
    let stats = index.stats();
    assert!(stats.evicted > 0 && stats.pruned == 0);
    assert_eq!(depth(&index, rank, &chain(0, 300)), 300, "an event's");
    assert!(stats.entries > stored_entries, "the newest predictions");
    for seed in 10..100 {
        index.apply(rank, &stored(None, &chain(seed, 300))).unwrap();
        assert!(index.stats().bytes <= max_bytes, "after {seed}");
    }
}

/// Too many blocks go in parts, the oldest first, and never grow further meanwhile; in the end the target is left.
#[test]
fn a_decision_forgets_only_some_of_too_many_blocks() {
    let (len, max_blocks) = (250_u64, 50_000);
    let index = Index::with_options(&IndexOptions {
        approximate: Some(Approximate {
            max_blocks,
            ..Approximate::default()
        }),
        ..IndexOptions::default()
    });
    let rank = WorkerRank::new(1, 0);
    let mut least = usize::MAX;
    for seed in 0..400_u64 {
        let blocks = chain(seed, len);
        let locals: Vec<LocalHash> = blocks.iter().map(|b| b.local).collect();
        let names: Vec<SequenceHash> = blocks.iter().map(|b| SequenceHash(b.engine.0)).collect();
        let before = index.stats().blocks;
        index.record_routing(Time::from_nanos(seed * 100_000_000), rank, &locals, &names);
        let after = index.stats().blocks;
        assert!(
            after <= max_blocks && before + 250 - after <= 4_096 + 250,
            "{before} {after}"
        );
        assert_eq!(depth(&index, rank, &blocks), 250, "the newest");
        least = if after < before {
            least.min(after)
        } else {
            least
        };
    }
    assert_eq!(least, max_blocks * 8 / 10);
    assert_eq!(depth(&index, rank, &chain(0, len)), 0, "the oldest");
    let stats = index.stats();
    assert_eq!(stats.pruned + stats.entries, 400 * len);
    index.check_invariants();
}

/// A removed rank's names are forgotten by later events; what they named can be stored again meanwhile.
#[test]
fn a_removed_rank_leaves_names_that_later_events_forget() {
    let (index, other) = (Index::new(), WorkerRank::new(2, 0));
    index.apply(other, &stored(None, &chain(9, 10))).unwrap();
    let small = index.stats().bytes;
    let rank = WorkerRank::new(1, 0);
    for seed in 20..60 {
        index
            .apply(rank, &stored(None, &chain(seed, 1_000)))
            .unwrap();
    }
    assert!(index.stats().bytes > small + 1_000_000);
    index.remove_rank(rank);
    index.check_invariants();
    assert_eq!(index.entries(), 10);
    for seed in 20..30 {
        let blocks = chain(seed, 1_000);
        assert_eq!(depth(&index, rank, &blocks), 0);
        index.apply(other, &stored(None, &blocks)).unwrap();
        assert_eq!(depth(&index, other, &blocks), 1_000);
        index
            .apply(other, &removed(blocks.into_iter().rev()))
            .unwrap();
        index.check_invariants();
    }
    for _ in 0..200 {
        assert_eq!(index.stats().entries, 10);
    }
    let bytes = index.stats().bytes;
    assert!(bytes < small + 150_000, "{bytes} after {small}");
}

/// Filled and emptied in several ways, the index is as small as a new one.
#[test]
fn memory_comes_back() {
    let index = Index::new();
    let floor = index.stats().bytes;
    let ranks: Vec<WorkerRank> = (0..20).map(|w| WorkerRank::new(w, 0)).collect();
    for round in 0..3 {
        for (i, rank) in (0..).zip(&ranks) {
            for seed in 0..20 {
                let blocks = chain(seed * (i % 3 + 1), 200);
                let _refused_where_names_repeat = index.apply(*rank, &stored(None, &blocks));
            }
        }
        assert!(index.stats().bytes > floor * 5);
        for rank in &ranks {
            match round {
                0 => index.remove_rank(*rank),
                1 => index.remove_worker(rank.worker),
                _ => index
                    .apply(*rank, &KvEvent::Cleared { tier: None })
                    .unwrap(),
            }
        }
        assert_eq!(index.stats().blocks, 0);
        let bytes = index.stats().bytes;
        assert!(bytes <= floor + floor / 100, "{bytes} after {floor}");
        index.check_invariants();
    }
}

/// Any single damaged byte is noticed; any content behind a right checksum is refused or makes a sound tree.
#[test]
fn damaged_snapshots_are_refused() {
    let index = Index::new();
    for worker in 0..3 {
        let blocks = chain(7, 40 + 10 * worker);
        index
            .apply(WorkerRank::new(worker, 0), &stored(None, &blocks))
            .unwrap();
    }
    index
        .apply(WorkerRank::new(0, 0), &stored(None, &chain(7, 3)))
        .unwrap();
    index
        .apply(WorkerRank::new(1, 0), &removed([chain(7, 9)[8]]))
        .unwrap();
    let good = index.snapshot().unwrap();
    let restored = Index::new();
    assert_eq!(restored.restore(&good), Ok(()));
    assert_eq!(restored.restore(&good), Err(RestoreError::NotEmpty));
    assert_eq!(restored.snapshot().unwrap().len(), good.len());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        assert!(Index::new().restore(&bad).is_err(), "byte {at}");
        assert!(Index::new().restore(&good[..at]).is_err(), "cut at {at}");
        let body = bad.len() - 8;
        let sum = xxhash_rust::xxh3::xxh3_64(&bad[..body]);
        bad[body..].copy_from_slice(&sum.to_le_bytes());
        let target = Index::new();
        if target.restore(&bad).is_err() {
            assert_eq!(target.stats().blocks, 0);
        }
        target.remove_worker(WorkerId(0));
        (0..3).for_each(|w| target.remove_worker(WorkerId(w)));
    }
    let mut newer = good;
    newer[4] = 9;
    assert_eq!(Index::new().restore(&newer), Err(RestoreError::Version(9)));
    assert_eq!(Index::new().restore(b"{}"), Err(RestoreError::NotASnapshot));
}
