//! Several writers and readers at once: what a lookup promises while events are applied.
//!
//! Each rank's events are planned ahead, and with them, for every prompt, the depths that the rank goes
//! through. A reader's answer must lie between the least and the greatest of the depths that the rank had
//! during the call. Progress counters around each event say which those can be.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvasir_index::{Index, Matches, Oracle};
use kvasir_types::{EngineHash, KvEvent, LocalHash, Rng, StoredBlock, Tier, WorkerRank};

const RANKS: u64 = 4;
const EVENTS: usize = 800;
const PROMPTS: usize = 8;

/// Prompts that share heads of different lengths.
fn prompts() -> Vec<Vec<LocalHash>> {
    let prompt = |p: u64| {
        (0..60).map(move |i: u64| {
            let branch = if i < 10 * (p % 4) { 0 } else { p + 1 };
            LocalHash(Rng::new(branch << 32 | i).next_u64())
        })
    };
    (0..PROMPTS as u64).map(|p| prompt(p).collect()).collect()
}

fn name(path: &[LocalHash]) -> EngineHash {
    EngineHash(path.iter().fold(1, |h, l| Rng::new(h ^ l.0).next_u64()))
}

struct Plan {
    events: Vec<KvEvent>,
    /// Per event count and prompt: the rank's depth.
    depths: Vec<[u32; PROMPTS]>,
}

/// Events of one rank that are all accepted, and what they make of each prompt.
fn plan(rank: WorkerRank, prompts: &[Vec<LocalHash>]) -> Plan {
    let mut rng = Rng::new(rank.worker.0 + 17);
    let mut oracle = Oracle::default();
    let mut plan = Plan {
        events: Vec::new(),
        depths: vec![[0; PROMPTS]],
    };
    while plan.events.len() < EVENTS {
        let path = &prompts[rng.below(PROMPTS as u64) as usize];
        let from = rng.below(path.len() as u64) as usize;
        let to = from + 1 + rng.below((path.len() - from) as u64) as usize;
        let event = if rng.below(5) < 3 {
            KvEvent::Stored {
                tier: Tier::Device,
                parent: (from > 0).then(|| name(&path[..from])),
                blocks: (from..to)
                    .map(|i| StoredBlock {
                        engine: name(&path[..=i]),
                        local: path[i],
                    })
                    .collect(),
            }
        } else {
            KvEvent::Removed {
                tier: Tier::Device,
                blocks: (from..to).rev().map(|i| name(&path[..=i])).collect(),
            }
        };
        let _refusals_are_part_of_it = oracle.apply(rank, &event);
        let mut found = Matches::new();
        plan.depths.push(std::array::from_fn(|p| {
            oracle.find(&prompts[p], &mut found);
            found.get(rank).map_or(0, |m| m.device)
        }));
        plan.events.push(event);
    }
    plan
}

#[test]
fn lookups_while_four_threads_write() {
    let prompts = prompts();
    let ranks: Vec<WorkerRank> = (0..RANKS).map(|w| WorkerRank::new(w, 0)).collect();
    let plans: Vec<Plan> = ranks.iter().map(|r| plan(*r, &prompts)).collect();
    let index = Index::new();
    let begun: Vec<AtomicUsize> = ranks.iter().map(|_| AtomicUsize::new(0)).collect();
    let ended: Vec<AtomicUsize> = ranks.iter().map(|_| AtomicUsize::new(0)).collect();
    let done = AtomicBool::new(false);
    let asked = std::thread::scope(|scope| {
        let (index, prompts, plans, ranks) = (&index, &prompts, &plans, &ranks);
        let (begun, ended, done) = (&begun, &ended, &done);
        let readers: Vec<_> = (0..2u64)
            .map(|seed| {
                scope.spawn(move || {
                    let (mut rng, mut found, mut asked) = (Rng::new(seed), Matches::new(), 0u64);
                    while !done.load(Ordering::Acquire) || asked < 100 {
                        let p = rng.below(PROMPTS as u64) as usize;
                        let from: Vec<usize> =
                            ended.iter().map(|e| e.load(Ordering::SeqCst)).collect();
                        index.find(&prompts[p], &mut found);
                        for (r, rank) in ranks.iter().enumerate() {
                            let to = begun[r].load(Ordering::SeqCst);
                            let got = found.get(*rank).map_or(0, |m| m.device);
                            let during = plans[r].depths[from[r]..=to].iter().map(|d| d[p]);
                            let (least, most) =
                                (during.clone().min().unwrap(), during.max().unwrap());
                            check(got, least, most, to - from[r]);
                        }
                        asked += 1;
                    }
                    asked
                })
            })
            .collect();
        let writers: Vec<_> = (0..ranks.len())
            .map(|r| {
                scope.spawn(move || {
                    for event in &plans[r].events {
                        begun[r].fetch_add(1, Ordering::SeqCst);
                        let _refusals_are_planned = index.apply(ranks[r], event);
                        ended[r].fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|w| w.join().unwrap());
        done.store(true, Ordering::Release);
        readers.into_iter().map(|r| r.join().unwrap()).sum::<u64>()
    });
    assert!(asked >= 200);
    index.check_invariants();
    let mut found = Matches::new();
    for (p, prompt) in prompts.iter().enumerate() {
        index.find(prompt, &mut found);
        for (r, rank) in ranks.iter().enumerate() {
            assert_eq!(
                found.get(*rank).map_or(0, |m| m.device),
                plans[r].depths[EVENTS][p]
            );
        }
    }
}

/// With at most one event during the call the answer is that of before, of after, or of a part of the
/// event: between the two. With more, blocks of different moments may add up, which `most` does not bound.
fn check(got: u32, least: u32, most: u32, events: usize) {
    assert!(
        got >= least,
        "{got} < {least}: a block held all the while is missing"
    );
    if events <= 1 {
        assert!(
            got <= most,
            "{got} > {most}: a block is credited that was never held"
        );
    }
}
