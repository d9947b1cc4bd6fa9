//! Histories made from bytes: the same for property tests, seeded runs and a fuzzer.
//!
//! Few ranks, contents and names, so that gaps, duplicates, names that move and names shared by different
//! blocks are common. After every step the index must answer as the oracle does; at the end, with all
//! removed, it must be as small as a new one.

use std::time::Duration;

use kvasir_types::{
    EngineHash, KvEvent, LocalHash, SequenceHash, StoredBlock, Tier, Time, WorkerId, WorkerRank,
};

use super::{Oracle, RoutingOracle};
use crate::mix::mix;
use crate::{Approximate, Index, IndexOptions, Matches};

pub(super) const WORKERS: u8 = 3;
pub(super) const RANKS: u8 = 2;
const CONTENTS: u8 = 3;
const NAMES: u8 = 14;

/// Bytes as a source of decisions; 0 when used up, with an end.
pub(super) struct Source<'a> {
    bytes: std::slice::Iter<'a, u8>,
    prompts: u64,
}

impl<'a> Source<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes: bytes.iter(),
            prompts: bytes.len() as u64,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.bytes.len() == 0
    }

    pub(super) fn below(&mut self, bound: u8) -> u8 {
        self.bytes.next().map_or(0, |b| b % bound.max(1))
    }

    fn rank(&mut self) -> WorkerRank {
        let (worker, rank) = (self.below(WORKERS), self.below(RANKS));
        WorkerRank::new(worker.into(), rank.into())
    }

    /// Mostly the device.
    fn tier(&mut self) -> Tier {
        match self.below(10) {
            0 => Tier::HostPinned,
            1 => Tier::Disk,
            2 => Tier::External,
            _ => Tier::Device,
        }
    }

    fn path(&mut self, len_max: u8) -> Vec<LocalHash> {
        let len = 1 + self.below(len_max);
        (0..len)
            .map(|_| LocalHash(self.below(CONTENTS).into()))
            .collect()
    }

    /// A prompt to ask for; costs no bytes, so that a shorter history stays the same history.
    pub(super) fn prompt(&mut self) -> Vec<LocalHash> {
        self.prompts = mix(self.prompts);
        let mut bits = self.prompts;
        (0..1 + self.prompts % 11)
            .map(|_| {
                bits = mix(bits);
                LocalHash(bits % u64::from(CONTENTS))
            })
            .collect()
    }
}

/// The name that an engine with hashes of its own gives to the last block of a path.
pub(super) fn name_of(path: &[LocalHash], seed: u64) -> EngineHash {
    EngineHash(path.iter().fold(seed, |h, l| mix(h ^ l.0.wrapping_add(1))))
}

/// Part of a path, with honest names; ranks of one `seed` agree about them.
fn honest_store(source: &mut Source<'_>, tier: Tier, seed: u64) -> KvEvent {
    let path = source.path(10);
    let from = usize::from(source.below(path.len() as u8));
    let blocks = (from..path.len()).map(|i| StoredBlock {
        engine: name_of(&path[..=i], seed),
        local: path[i],
    });
    KvEvent::Stored {
        tier,
        parent: (from > 0).then(|| name_of(&path[..from], seed)),
        blocks: blocks.collect(),
    }
}

fn honest_removal(source: &mut Source<'_>, tier: Tier, seed: u64) -> KvEvent {
    let path = source.path(10);
    let from = usize::from(source.below(path.len() as u8));
    let mut blocks: Vec<EngineHash> = (from..path.len())
        .map(|i| name_of(&path[..=i], seed))
        .collect();
    if source.below(2) == 0 {
        blocks.reverse();
    }
    KvEvent::Removed { tier, blocks }
}

pub(super) fn event(source: &mut Source<'_>, rank: WorkerRank) -> KvEvent {
    let tier = source.tier();
    // Worker 2 hashes with a seed of its own.
    let seed = u64::from(rank.worker == WorkerId(2)) * 77;
    let short = |source: &mut Source<'_>| EngineHash(source.below(NAMES).into());
    match source.below(16) {
        0..=5 => honest_store(source, tier, seed),
        6..=9 => honest_removal(source, tier, seed),
        10..=12 => KvEvent::Stored {
            tier,
            parent: (source.below(3) > 0).then(|| short(source)),
            blocks: (0..source.below(5))
                .map(|_| StoredBlock {
                    engine: short(source),
                    local: LocalHash(source.below(CONTENTS).into()),
                })
                .collect(),
        },
        13..=14 => KvEvent::Removed {
            tier,
            blocks: (0..source.below(4)).map(|_| short(source)).collect(),
        },
        _ => KvEvent::Cleared {
            tier: (source.below(2) == 0).then_some(tier),
        },
    }
}

/// Plays a history of events that `bytes` stand for.
///
/// # Panics
/// If the index and the oracle disagree, or the index contradicts itself.
pub fn check_event_history(bytes: &[u8]) {
    let (index, mut oracle) = (Index::new(), Oracle::default());
    let mut source = Source::new(bytes);
    let floor = index.stats().bytes;
    while !source.is_over() {
        let rank = source.rank();
        match source.below(40) {
            0 => {
                index.remove_rank(rank);
                oracle.remove_rank(rank);
            }
            1 => {
                index.remove_worker(rank.worker);
                oracle.remove_worker(rank.worker);
            }
            _ => {
                let event = event(&mut source, rank);
                let expected = oracle.apply(rank, &event);
                assert_eq!(index.apply(rank, &event), expected, "{rank} {event:?}");
            }
        }
        let prompts: [_; 4] = std::array::from_fn(|_| source.prompt());
        check_step(&index, &oracle, prompts.into_iter());
    }
    check_copies(&index, &oracle, &mut source);
    check_empty(&index, floor);
}

/// After a step: the index is sound and answers as the oracle does.
pub(super) fn check_step(
    index: &Index,
    oracle: &Oracle,
    prompts: impl Iterator<Item = Vec<LocalHash>>,
) {
    index.check_invariants();
    assert_eq!(index.entries() as usize, oracle.entries());
    let mut matches = (Matches::new(), Matches::new());
    for prompt in prompts {
        oracle.find(&prompt, &mut matches.0);
        index.find(&prompt, &mut matches.1);
        assert_eq!(matches.1.sorted(), matches.0.sorted(), "{prompt:?}");
        check_winner(index, &prompt, &matches.0);
    }
}

/// With all workers removed the index is as small as a new one, which took `floor` bytes.
pub(super) fn check_empty(index: &Index, floor: u64) {
    for worker in 0..WORKERS {
        index.remove_worker(WorkerId(worker.into()));
    }
    let stats = index.stats();
    assert_eq!((stats.entries, stats.blocks), (0, 0));
    assert!(stats.bytes <= floor + 200, "{} > {floor}", stats.bytes);
}

/// What was dumped or written down and made again answers alike, and goes on alike.
pub(super) fn check_copies(index: &Index, oracle: &Oracle, source: &mut Source<'_>) {
    let (replayed, restored) = (Index::new(), Index::new());
    for (rank, event) in index.dump() {
        assert_eq!(replayed.apply(rank, &event), Ok(()), "{event:?} of a dump");
    }
    let kept = index.snapshot().map(|bytes| restored.restore(&bytes));
    assert_eq!(kept, Ok(Ok(())));
    for (how, copy) in [("replayed", &replayed), ("restored", &restored)] {
        copy.check_invariants();
        let mut oracle = oracle.clone();
        let mut matches = (Matches::new(), Matches::new());
        // A fixed history of its own, so that it is long enough for every copy.
        let bytes: Vec<u8> = (0..120u64).map(|i| mix(i ^ source.prompts) as u8).collect();
        let mut later = Source::new(&bytes);
        while !later.is_over() {
            assert_eq!(copy.entries() as usize, oracle.entries());
            let prompt = later.prompt();
            oracle.find(&prompt, &mut matches.0);
            copy.find(&prompt, &mut matches.1);
            assert_eq!(matches.1.sorted(), matches.0.sorted(), "{prompt:?}");
            let rank = later.rank();
            let event = event(&mut later, rank);
            assert_eq!(
                copy.apply(rank, &event),
                oracle.apply(rank, &event),
                "{how}: {event:?}"
            );
        }
    }
}

/// The best of a lookup that may stop early is one of the best, and nothing is said to be deeper than it is.
fn check_winner(index: &Index, prompt: &[LocalHash], exact: &Matches) {
    let mut found = Matches::new();
    index.find_winner(prompt, &mut found);
    let best = |m: &Matches| m.iter().map(|m| m.device).max().unwrap_or(0);
    for m in found.iter() {
        let truth = exact.get(m.rank).map_or(0, |t| t.device);
        assert!(m.device <= truth);
        assert!(
            m.device < best(&found) || truth == best(exact),
            "{prompt:?}"
        );
    }
    assert_eq!(found.is_empty(), exact.is_empty());
}

/// Plays a history of routing decisions that `bytes` stand for, with a clock of its own.
///
/// # Panics
/// If the index and the oracle disagree, or the index contradicts itself.
pub fn check_routing_history(bytes: &[u8]) {
    let mut source = Source::new(bytes);
    let options = Approximate {
        ttl: Duration::from_millis(150 + 100 * u64::from(source.below(8))),
        max_blocks: 5 + usize::from(source.below(60)),
        prune_target_ratio: f64::from(source.below(11)) / 10.0,
    };
    let index = Index::with_options(&IndexOptions {
        approximate: Some(options),
        ..IndexOptions::default()
    });
    let mut oracle = RoutingOracle::new(options);
    let mut matches = (Matches::new(), Matches::new());
    let mut now = Time::ZERO;
    while !source.is_over() {
        now += Duration::from_millis(u64::from(source.below(60)));
        let rank = source.rank();
        match source.below(20) {
            0 => {
                index.remove_rank(rank);
                oracle.remove_rank(rank);
            }
            1 => {
                index.remove_worker(rank.worker);
                oracle.remove_worker(rank.worker);
            }
            2..=5 => {
                index.expire(now);
                oracle.expire(now);
                assert!(index.next_expiry().is_none_or(|next| next > now));
            }
            _ => {
                let path = source.path(12);
                let names: Vec<SequenceHash> = (1..=path.len())
                    .map(|end| SequenceHash(name_of(&path[..end], 0).0))
                    .collect();
                // A decision while what has expired is being swept, unless too many blocks would be pruned.
                let sweeps =
                    source.below(4) == 0 && oracle.entries() + path.len() <= options.max_blocks;
                if sweeps {
                    index.expire_some(now);
                    index.check_invariants();
                    oracle.expire(now);
                }
                index.record_routing(now, rank, &path, &names);
                oracle.record(now, rank, &path, &names);
                if sweeps {
                    index.check_invariants();
                    index.expire(now);
                }
            }
        }
        index.check_invariants();
        assert_eq!(index.entries() as usize, oracle.entries());
        let copy = Index::new();
        for (rank, event) in index.dump() {
            assert_eq!(copy.apply(rank, &event), Ok(()), "{event:?} of a dump");
        }
        assert_eq!(copy.entries() as usize, oracle.entries());
        for _ in 0..4 {
            let prompt = source.prompt();
            oracle.find(&prompt, &mut matches.0);
            index.find(&prompt, &mut matches.1);
            assert_eq!(matches.1.sorted(), matches.0.sorted(), "{prompt:?}");
            copy.find(&prompt, &mut matches.1);
            assert_eq!(
                matches.1.sorted(),
                matches.0.sorted(),
                "{prompt:?} of a dump"
            );
        }
    }
    index.expire(now + Duration::from_secs(10));
    assert_eq!(index.stats().entries, 0);
    assert_eq!(index.next_expiry(), None);
}
