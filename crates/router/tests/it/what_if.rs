//! Decisions scored again with other weights.

use kvasir_router::{Arrival, Output, WeightChange};
use kvasir_types::WorkerRank;

use super::*;

const NO_CHANGE: WeightChange = WeightChange {
    overlap_score_credit: None,
    overlap_score_credit_decay: None,
    prefill_load_scale: None,
    decode_active_request_weight: None,
};

/// Worker 1 holds `cached` blocks of a prompt of 20 and runs a request; worker 2 is idle.
fn decided(cached: u32) -> Host {
    let mut host = Host::kv(|config| config.router_temperature = 0.0).workers(2);
    let mut busy = Arrival::new(RequestId(1), 160);
    busy.sequence = (1..=10).map(SequenceHash).collect();
    busy.overlap = held(1, 20);
    host.input(Input::Arrived(Box::new(busy)));
    let mut asked = Arrival::new(RequestId(2), 320);
    asked.sequence = (101..=120).map(SequenceHash).collect();
    asked.overlap = held(1, cached);
    host.input(Input::Arrived(Box::new(asked)));
    host
}

fn held(worker: u64, blocks: u32) -> Overlap {
    Overlap {
        ranks: vec![RankOverlap {
            rank: WorkerRank::new(worker, 0),
            device: f64::from(blocks),
            ..RankOverlap::default()
        }],
        ..Overlap::none()
    }
}

fn went_to(host: &Host) -> WorkerRank {
    host.router.explain(RequestId(2)).unwrap().winner.unwrap().0
}

#[test]
fn with_the_weights_in_force_nothing_moves() {
    for cached in [0, 5, 10, 15, 20] {
        let host = decided(cached);
        let same = host.router.what_if(&NO_CHANGE, 10, None);
        assert_eq!((same.considered, same.moved, same.skipped), (2, 0, 0));
        assert_eq!(same.before, same.after);
        let decision = host.router.explain(RequestId(2)).unwrap();
        let weights = kvasir_router::Weights::default();
        for candidate in &decision.candidates {
            let again = weights.terms(decision.isl_tokens, &candidate.state);
            assert_eq!(
                again, candidate.terms,
                "the record holds all that the cost reads"
            );
        }
    }
}

/// A request that brings its own weights was not weighed by the router's: scored with those it would seem to have moved.
#[test]
fn what_was_weighed_otherwise_is_left_out() {
    let mut host = decided(20);
    let mut own = Arrival::new(RequestId(3), 320);
    own.sequence = (201..=220).map(SequenceHash).collect();
    own.overlap = held(1, 20);
    own.overrides.overlap_score_credit = Some(0.0);
    host.input(Input::Arrived(Box::new(own)));
    let same = host.router.what_if(&NO_CHANGE, 10, None);
    assert_eq!((same.considered, same.moved, same.skipped), (2, 0, 1));
}

#[test]
fn without_credit_the_cached_rank_loses_its_lead() {
    let host = decided(20);
    assert_eq!(went_to(&host), WorkerRank::new(1, 0));
    let change = WeightChange {
        overlap_score_credit: Some(0.0),
        ..NO_CHANGE
    };
    let other = host.router.what_if(&change, 1, None);
    assert_eq!((other.considered, other.moved), (1, 1));
    let moved = &other.moves[0];
    assert_eq!(
        (moved.from, moved.to),
        (WorkerRank::new(1, 0), WorkerRank::new(2, 0))
    );
    assert!(moved.cost.1 < moved.cost.0);
    assert_eq!(
        (other.before.cached_blocks, other.after.cached_blocks),
        (20.0, 0.0)
    );
    let shares = [1, 2].map(|worker| other.ranks[&WorkerRank::new(worker, 0)]);
    assert_eq!(
        shares.map(|share| (share.before, share.after)),
        [(1, 0), (0, 1)]
    );
}

#[test]
fn what_no_cost_decided_is_skipped_and_models_are_told_apart() {
    let mut host = decided(10);
    let mut pinned = Arrival::new(RequestId(3), 16);
    pinned.pin.worker = Some(WorkerId(2));
    pinned.model = Some("other".into());
    host.input(Input::Arrived(Box::new(pinned)));
    assert!(matches!(host.out.last(), Some(Output::Send(_))));
    let all = host.router.what_if(&NO_CHANGE, 10, None);
    assert_eq!((all.considered, all.skipped), (2, 1));
    assert_eq!(host.router.what_if(&NO_CHANGE, 10, Some("m")).skipped, 0);
    assert_eq!(host.router.what_if(&NO_CHANGE, 1, Some("other")).skipped, 1);
    assert_eq!(
        WeightChange {
            prefill_load_scale: Some(-1.0),
            ..NO_CHANGE
        }
        .fault(),
        Some("prefill_load_scale")
    );
    assert_eq!(NO_CHANGE.fault(), None);
}
