//! RoutingTree decisions on many threads at once, beside events, sweeps and ranks that come and go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvasir_index::{Approximate, Index, IndexOptions, Matches};
use kvasir_types::{
    EngineHash, KvEvent, LocalHash, Rng, SequenceHash, StoredBlock, Tier, Time, WorkerId,
    WorkerRank,
};

/// A prompt of one of few paths, by its number: blocks 0..len of path `path`, which share their first half.
fn prompt(path: u64, len: u64) -> (Vec<LocalHash>, Vec<SequenceHash>) {
    let local = |i| LocalHash(if i < 10 { i } else { path << 32 | i });
    let locals: Vec<LocalHash> = (0..len).map(local).collect();
    let sequence = kvasir_hash::sequence_hashes(&locals);
    (locals, sequence)
}

fn index() -> Index {
    Index::with_options(&IndexOptions {
        approximate: Some(Approximate {
            ttl: Duration::from_millis(300),
            max_blocks: 300,
            prune_target_ratio: 0.5,
        }),
        ..IndexOptions::default()
    })
}

/// Four threads decide, one sweeps, one removes workers, one applies events. Whatever they make of it is sound, a
/// rank's blocks are no other rank's, and all of it expires.
#[test]
fn concurrent_decisions() {
    let (index, over) = (index(), AtomicBool::new(false));
    let clock = |step: u64| Time::from_nanos(step * 1_000_000);
    std::thread::scope(|scope| {
        let deciders: Vec<_> = (0..4_u64)
            .map(|thread| {
                let index = &index;
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    for step in 0..3_000 {
                        let rank = WorkerRank::new(rng.below(6), 0);
                        // Each worker is sent paths of its own.
                        let path = rank.worker.0 * 8 + rng.below(8);
                        let (locals, names) = prompt(path, 1 + rng.below(30));
                        index.record_routing(clock(step), rank, &locals, &names);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut step = 0;
            while !over.load(Ordering::Relaxed) {
                step = (step + 1) % 3_000;
                index.expire_some(clock(step));
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            let mut rng = Rng::new(99);
            while !over.load(Ordering::Relaxed) {
                index.remove_worker(WorkerId(rng.below(6)));
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            let blocks = vec![StoredBlock {
                engine: EngineHash(1),
                local: LocalHash(0),
            }];
            let stored = KvEvent::Stored {
                tier: Tier::Device,
                parent: None,
                blocks,
            };
            while !over.load(Ordering::Relaxed) {
                // Takes a slot that others may have had.
                assert_eq!(index.apply(WorkerRank::new(50, 0), &stored), Ok(()));
                index.remove_worker(WorkerId(50));
            }
        });
        let mut found = Matches::new();
        while !deciders.iter().all(|d| d.is_finished()) {
            for path in 0..48 {
                index.find(&prompt(path, 30).0, &mut found);
                for m in found.iter() {
                    let own = m.rank.worker.0 == path / 8;
                    let most = if own { 30 } else { 10 };
                    assert!(m.device <= most, "{m:?} of path {path}");
                    assert!(m.rank.worker.0 != 50 || m.device <= 1, "{m:?}");
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    index.check_invariants();
    assert!(index.stats().pruned > 0);
    index.expire(clock(10_000));
    let stats = index.stats();
    assert_eq!((stats.entries, stats.blocks), (0, 0));
    assert_eq!(index.next_expiry(), None);
}
