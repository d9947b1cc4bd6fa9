//! Random histories: after every step the index answers as the oracle does.

use kvasir_index::{Kind, follow_at_once, follow_events, follow_gaps, follow_routing};
use kvasir_types::Rng;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        follow_events(&bytes);
    }

    #[test]
    fn gaps_in_long_chains(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        follow_gaps(&bytes);
    }

    #[test]
    fn routing_decisions(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        follow_routing(&bytes);
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
        follow_events(&bytes);
        follow_routing(&bytes);
        follow_gaps(&bytes[..bytes.len() / 4]);
    }
}

/// Several ranks at once: on two threads, on one for each of the six ranks, and all on one, where a failure is
/// the same each time.
#[test]
fn histories_at_once_by_seed() {
    for seed in 0..60 {
        histories_at_once(seed, 4_000);
    }
}

fn histories_at_once(seed: u64, len: u64) {
    let mut rng = Rng::new(seed);
    for kind in [Kind::Orderly, Kind::Chains, Kind::Tangled] {
        for threads in [1, 2, 6] {
            let len = 200 + rng.below(len);
            let bytes = random_bytes(&mut rng, len);
            follow_at_once(&bytes, threads, kind);
        }
    }
}

/// Three thousand more for whoever changes how writers meet, beside the sixty above that always run.
#[test]
#[ignore = "takes minutes"]
fn very_many_histories_at_once_by_seed() {
    for seed in 1_000..4_000 {
        histories_at_once(seed, 10_000);
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
        follow_events(&bytes);
        follow_routing(&bytes);
        follow_gaps(&bytes);
    }
}
