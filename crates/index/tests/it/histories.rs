//! Random histories: after every step the index answers as the oracle does.

use kvasir_index::{
    HistoryKind, check_concurrent_histories, check_event_history, check_gap_history,
    check_routing_history,
};
use kvasir_types::Rng;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check_event_history(&bytes);
    }

    #[test]
    fn gaps_in_long_chains(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_gap_history(&bytes);
    }

    #[test]
    fn routing_decisions(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check_routing_history(&bytes);
    }
}

fn random_bytes(rng: &mut Rng, len: u64) -> Vec<u8> {
    (0..len).map(|_| rng.next_u64() as u8).collect()
}

/// What a fuzzer does, from a seed and bounded: longer histories than the property tests shrink well.
#[test]
fn long_histories_by_seed() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let len = 200 + rng.below(4_000);
        let bytes = random_bytes(&mut rng, len);
        check_event_history(&bytes);
        check_routing_history(&bytes);
        check_gap_history(&bytes[..bytes.len() / 4]);
    }
}

/// Several ranks concurrently: on two threads, on one for each of the six ranks, and all on one, where a failure is
/// the same each time.
#[test]
fn concurrent_histories_by_seed() {
    for seed in 0..60 {
        concurrent_histories(seed, 4_000);
    }
}

fn concurrent_histories(seed: u64, len: u64) {
    let mut rng = Rng::new(seed);
    for kind in [
        HistoryKind::Orderly,
        HistoryKind::Chains,
        HistoryKind::Tangled,
    ] {
        for threads in [1, 2, 6] {
            let len = 200 + rng.below(len);
            let bytes = random_bytes(&mut rng, len);
            check_concurrent_histories(&bytes, threads, kind);
        }
    }
}

/// Three thousand more for whoever changes how writers meet, beside the sixty above that always run.
#[test]
#[ignore = "takes minutes"]
fn very_many_concurrent_histories_by_seed() {
    for seed in 1_000..4_000 {
        concurrent_histories(seed, 10_000);
    }
}

/// Twenty thousand more for whoever changes the tree, beside those above that always run:
/// `cargo test -p kvasir-index -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn very_many_histories_by_seed() {
    for seed in 1_000..21_000 {
        let mut rng = Rng::new(seed);
        let len = 100 + rng.below(3_000);
        let bytes = random_bytes(&mut rng, len);
        check_event_history(&bytes);
        check_routing_history(&bytes);
        check_gap_history(&bytes);
    }
}
