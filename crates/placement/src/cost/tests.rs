//! Every term of the cost, with the boundary where it matters. Blocks of 16 tokens.

use super::*;
use expect_test::expect;

fn state() -> CandidateState {
    CandidateState {
        taint_factor: 1.0,
        ..CandidateState::default()
    }
}

fn cost(weights: &Weights, isl_tokens: u32, state: CandidateState) -> f64 {
    weights.terms(isl_tokens, &state).cost
}

/// The example of Dynamo's documentation: 10 blocks of prompt; (overlap, decode) per worker.
#[test]
fn worked_examples_a_and_b() {
    let workers = [(2.0, 10.0), (5.0, 5.0), (8.0, 9.0)];
    let table = |scale, credit| {
        let weights = Weights {
            prefill_load_scale: scale,
            overlap_score_credit: credit,
            ..Weights::default()
        };
        workers.map(|(device, active_blocks)| {
            let state = CandidateState {
                device,
                active_blocks,
                ..state()
            };
            cost(&weights, 160, state)
        })
    };
    assert_eq!(table(1.0, 1.0), [18.0, 10.0, 11.0]);
    assert_eq!(table(2.0, 1.0), [26.0, 15.0, 13.0]);
    assert_eq!(table(1.0, 0.0), [20.0, 15.0, 19.0]);
    assert_eq!(table(0.0, 1.0), [10.0, 5.0, 9.0]);
}

#[test]
fn worked_example_c_active_prefill() {
    let terms = Weights::default().terms(
        160,
        &CandidateState {
            prefill_tokens: 320.0,
            device: 4.0,
            active_blocks: 7.0,
            ..state()
        },
    );
    assert_eq!(
        (terms.raw_prefill_blocks, terms.prefill_blocks, terms.cost),
        (30.0, 26.0, 33.0)
    );
}

#[test]
fn the_prompt_is_not_rounded_to_blocks() {
    assert_eq!(cost(&Weights::default(), 24, state()), 1.5);
}

#[test]
fn worked_example_e_credits_never_go_below_zero_nor_into_decode() {
    let held = |device| CandidateState {
        device,
        active_blocks: 5.0,
        ..state()
    };
    for (device, expected) in [(2.0, 6.0), (3.0, 5.0), (4.0, 5.0)] {
        assert_eq!(cost(&Weights::default(), 48, held(device)), expected);
    }
}

#[test]
fn a_credit_below_1_leaves_the_rest_as_cost() {
    let weights = Weights {
        overlap_score_credit: 0.25,
        ..Weights::default()
    };
    let held = CandidateState {
        device: 4.0,
        ..state()
    };
    assert_eq!(cost(&weights, 160, held), 9.0);
}

#[test]
fn the_device_credit_does_not_scale_lower_tiers_or_the_shared_cache() {
    let weights = Weights {
        overlap_score_credit: 0.5,
        ..Weights::default()
    };
    let terms = weights.terms(
        160,
        &CandidateState {
            device: 2.0,
            lower: 4.0,
            shared: 1.5,
            ..state()
        },
    );
    assert_eq!((terms.credit_blocks, terms.cached_blocks), (6.5, 6.0));
}

#[test]
fn without_prefill_tracking_there_is_no_prefill_term() {
    let weights = Weights {
        track_prefill_tokens: false,
        ..Weights::default()
    };
    let loaded = CandidateState {
        prefill_tokens: 1600.0,
        active_blocks: 3.0,
        new_blocks: 2.0,
        ..state()
    };
    assert_eq!(cost(&weights, 160, loaded), 5.0);
}

#[test]
fn a_running_request_costs_its_weight() {
    let weights = Weights {
        decode_active_request_weight: 2.5,
        ..Weights::default()
    };
    let running = CandidateState {
        requests: 4.0,
        ..state()
    };
    assert_eq!(cost(&weights, 16, running), 11.0);
    assert_eq!(cost(&Weights::default(), 16, running), 1.0);
}

/// Prompt of 10 blocks, all held; the other rank is idle. `excess = waiting blocks / 10`.
#[test]
fn the_credit_fades_with_prompt_work_beyond_the_least_loaded() {
    let mut rows = String::from("decay  waiting  credit\n");
    for decay in [0.0, 1.0, 4.0] {
        for waiting in [0, 160, 320] {
            let weights = Weights {
                overlap_score_credit_decay: decay,
                ..Weights::default()
            };
            let held = CandidateState {
                device: 10.0,
                prefill_tokens: 1000.0 + f64::from(waiting),
                least_prefill_tokens: 1000.0,
                ..state()
            };
            let credit = weights.terms(160, &held).credit_blocks;
            rows += &format!("{decay:5}  {waiting:7}  {credit:.3}\n");
        }
    }
    expect![[r#"
        decay  waiting  credit
            0        0  10.000
            0      160  10.000
            0      320  10.000
            1        0  10.000
            1      160  5.000
            1      320  3.333
            4        0  10.000
            4      160  2.000
            4      320  1.111
    "#]]
    .assert_eq(&rows);
    let untracked = Weights {
        overlap_score_credit_decay: 4.0,
        track_prefill_tokens: false,
        ..Weights::default()
    };
    let held = CandidateState {
        device: 10.0,
        prefill_tokens: 320.0,
        ..state()
    };
    assert_eq!(untracked.terms(160, &held).credit_blocks, 10.0);
}

/// Only generation, no prompt tokens counted, a credit above 0: then, and only then, decode is credited.
#[test]
fn the_decode_stage_takes_credits_off_decode() {
    let stage = Weights {
        decode_stage: true,
        track_prefill_tokens: false,
        ..Weights::default()
    };
    let held = |device| CandidateState {
        device,
        active_blocks: 6.0,
        requests: 1.0,
        ..state()
    };
    assert_eq!(cost(&stage, 160, held(4.0)), 2.0);
    assert_eq!(cost(&stage, 160, held(9.0)), 0.0);
    let weighted = Weights {
        decode_active_request_weight: 3.0,
        ..stage
    };
    assert_eq!(
        cost(&weighted, 160, held(9.0)),
        3.0,
        "requests are never credited"
    );
    let without = [
        Weights {
            track_prefill_tokens: true,
            prefill_load_scale: 0.0,
            ..stage
        },
        Weights {
            overlap_score_credit: 0.0,
            ..stage
        },
        Weights {
            decode_stage: false,
            ..stage
        },
    ];
    for weights in without {
        assert_eq!(cost(&weights, 160, held(4.0)), 6.0);
    }
}

#[test]
fn taints_multiply_the_whole_sum_within_e() {
    assert_eq!(taint_factor(0.0), 1.0);
    assert!((taint_factor(1e9) - 1.0 / std::f64::consts::E).abs() < 1e-12);
    assert!((taint_factor(-1e9) - std::f64::consts::E).abs() < 1e-12);
    assert_eq!(taint_factor(f64::NAN), 1.0);
    let weights = Weights {
        decode_active_request_weight: 1.0,
        ..Weights::default()
    };
    let liked = CandidateState {
        active_blocks: 2.0,
        requests: 1.0,
        taint_factor: 0.5,
        ..state()
    };
    assert_eq!(cost(&weights, 16, liked), 2.0);
}

/// A warm worker loses once its decode load costs more than the prefill it saves. Prompt 10 blocks, the
/// warm one holds 8; scale 1 and 2.
#[test]
fn crossover_of_overlap_and_decode_load() {
    let mut rows = String::from("scale  busy  warm  cold  cheaper\n");
    for scale in [1.0, 2.0] {
        let weights = Weights {
            prefill_load_scale: scale,
            ..Weights::default()
        };
        let edge = (8.0 * scale) as u64;
        for busy in edge - 1..=edge + 1 {
            let warm = CandidateState {
                device: 8.0,
                active_blocks: busy as f64,
                ..state()
            };
            let (warm, cold) = (cost(&weights, 160, warm), cost(&weights, 160, state()));
            let cheaper = match warm.total_cmp(&cold) {
                std::cmp::Ordering::Less => "warm",
                std::cmp::Ordering::Equal => "tie",
                std::cmp::Ordering::Greater => "cold",
            };
            rows += &format!("{scale:5}  {busy:4}  {warm:4}  {cold:4}  {cheaper}\n");
        }
    }
    expect![[r#"
        scale  busy  warm  cold  cheaper
            1     7     9    10  warm
            1     8    10    10  tie
            1     9    11    10  cold
            2    15    19    20  warm
            2    16    20    20  tie
            2    17    21    20  cold
    "#]]
    .assert_eq(&rows);
}
