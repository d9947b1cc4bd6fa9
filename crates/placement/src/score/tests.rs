//! Tiers, the shared cache, active prefixes and the record. Blocks of 16 tokens, workers 1 to n on slots 0 to
//! n-1.

use kvasir_types::{RequestId, WorkerId, WorkerRank};

use super::*;
use crate::{Booking, RankOverlap, WorkerSpec};

struct World {
    fleet: Fleet,
    ledger: Ledger,
    scorer: Scorer,
    rng: Rng,
}

fn world(workers: u64) -> World {
    let mut fleet = Fleet::default();
    for id in 1..=workers {
        fleet.put(WorkerSpec::new(WorkerId(id)), |_| {});
    }
    let mut ledger = Ledger::new(16);
    ledger.grow(fleet.slot_end());
    World {
        fleet,
        ledger,
        scorer: Scorer::default(),
        rng: Rng::new(3),
    }
}

impl World {
    fn score(
        &mut self,
        weights: &Weights,
        prompt: &Prompt<'_>,
    ) -> (Option<(u32, WinReason)>, Vec<Candidate>) {
        let mut kept = Vec::new();
        let eligible = self.fleet.open().clone();
        let context = ScoringContext {
            now: Time::ZERO,
            weights,
            prompt,
            fleet: &self.fleet,
        };
        let won = self.scorer.choose(
            &context,
            0.0,
            &eligible,
            &mut self.ledger,
            &mut self.rng,
            &mut kept,
        );
        kept.sort_by_key(|found| found.rank);
        (won, kept)
    }

    fn book(&mut self, id: u128, slot: u32, sequence: &[u64]) {
        let booking = Booking {
            sequence: sequence.iter().map(|h| SequenceHash(*h)).collect(),
            unnamed_blocks: 0,
            shares: true,
            isl_tokens: sequence.len() as u32 * 16,
            prefill_tokens: 0,
            prefill_duration: None,
            decays: true,
            osl: None,
            silent: false,
        };
        assert!(self.ledger.book(Time::ZERO, RequestId(id), slot, &booking));
    }
}

fn prompt<'a>(blocks: u32, overlap: &'a Overlap, sequence: &'a [SequenceHash]) -> Prompt<'a> {
    Prompt {
        isl_tokens: blocks * 16,
        overlap,
        sequence,
        shares: true,
        preferred_taints: &[],
    }
}

fn overlap(ranks: &[(u64, f64, u32, u32)]) -> Overlap {
    let ranks = ranks
        .iter()
        .map(|&(worker, device, host, disk)| RankOverlap {
            rank: WorkerRank::new(worker, 0),
            device,
            host,
            disk,
        });
    Overlap {
        ranks: ranks.collect(),
        shared: Vec::new(),
    }
}

#[test]
fn worked_example_d_lower_tiers() {
    let held = overlap(&[(1, 2.0, 4, 4)]);
    let (_, kept) = world(2).score(&Weights::default(), &prompt(10, &held, &[]));
    assert_eq!(kept[0].terms.credit_blocks, 6.0);
    assert_eq!(kept[1].terms.credit_blocks, 0.0);
}

#[test]
fn the_shared_cache_counts_only_beyond_what_the_device_holds() {
    let mut held = overlap(&[(1, 3.0, 0, 0)]);
    held.shared = vec![0..2, 4..6];
    let weights = Weights {
        shared_cache_multiplier: 0.5,
        ..Weights::default()
    };
    let (_, kept) = world(2).score(&weights, &prompt(10, &held, &[]));
    assert_eq!(
        kept[0].terms.credit_blocks, 4.0,
        "3 held, 2 of the shared beyond them"
    );
    assert_eq!(kept[1].terms.credit_blocks, 2.0, "all 4 shared");
    assert_eq!(
        kept[1].terms.cached_blocks, 0.0,
        "shared blocks book like uncached ones"
    );
}

#[test]
fn overlap_is_at_most_the_prompt_and_never_poison() {
    let held = overlap(&[
        (1, f64::NAN, 0, 0),
        (2, f64::INFINITY, 0, 0),
        (3, -5.0, 0, 0),
        (99, 4.0, 0, 0),
    ]);
    let (won, kept) = world(3).score(&Weights::default(), &prompt(4, &held, &[]));
    let credits: Vec<f64> = kept.iter().map(|k| k.terms.credit_blocks).collect();
    assert_eq!(credits, [0.0, 4.0, 0.0]);
    assert_eq!(won, Some((1, WinReason::LowestCost)));
}

#[test]
fn an_effective_overlap_alone_stands_for_the_device() {
    let held = overlap(&[(1, 2.5, 0, 0)]);
    let (_, kept) = world(1).score(&Weights::default(), &prompt(4, &held, &[]));
    assert_eq!(kept[0].terms.credit_blocks, 2.5);
}

#[test]
fn only_blocks_beyond_the_longest_active_prefix_are_added() {
    let mut world = world(3);
    world.book(1, 0, &[10, 11, 12, 13]);
    world.book(2, 1, &[10, 11, 99]);
    let sequence = [10, 11, 12, 77].map(SequenceHash);
    let none = Overlap::none();
    let (_, kept) = world.score(&Weights::default(), &prompt(4, &none, &sequence));
    let decode: Vec<f64> = kept.iter().map(|k| k.terms.decode_blocks).collect();
    assert_eq!(decode, [5.0, 5.0, 4.0]);
    let unshared = Prompt {
        shares: false,
        ..prompt(4, &none, &sequence)
    };
    let (_, kept) = world.score(&Weights::default(), &unshared);
    let decode: Vec<f64> = kept.iter().map(|k| k.terms.decode_blocks).collect();
    assert_eq!(decode, [8.0, 7.0, 4.0]);
}

#[test]
fn buffers_are_clean_for_the_next_prompt() {
    let mut world = world(2);
    let (held, none) = (overlap(&[(1, 4.0, 2, 2)]), Overlap::none());
    world.score(&Weights::default(), &prompt(8, &held, &[]));
    let (_, kept) = world.score(&Weights::default(), &prompt(8, &none, &[]));
    assert_eq!(kept[0].terms, kept[1].terms);
}

#[test]
fn the_record_keeps_the_cheapest_and_always_the_winner() {
    let mut many = world(40);
    let held: Vec<_> = (1..=40).map(|w| (w, f64::from(w as u32), 0, 0)).collect();
    let held = overlap(&held);
    let (won, kept) = many.score(&Weights::default(), &prompt(100, &held, &[]));
    assert_eq!(won, Some((39, WinReason::LowestCost)));
    assert_eq!(
        kept.iter().map(|k| k.rank.worker.0).collect::<Vec<_>>(),
        (33..41).collect::<Vec<_>>()
    );
    let none = Overlap::none();
    for _ in 0..20 {
        let (won, kept) = many.score(&Weights::default(), &prompt(100, &none, &[]));
        let (slot, _) = won.unwrap();
        assert_eq!(kept.len(), CANDIDATES_KEPT);
        assert!(
            kept.iter().any(|k| k.rank.worker.0 == u64::from(slot) + 1),
            "a tie among 40 may draw any"
        );
    }
}
