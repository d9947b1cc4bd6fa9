//! Sharing, prefill charges, output blocks, expiry: and everything back to nothing. Blocks of 16 tokens.

use super::*;

fn ledger() -> Ledger {
    let mut ledger = Ledger::new(16);
    ledger.grow(3);
    ledger
}

fn sequence(hashes: &[u64]) -> Arc<[SequenceHash]> {
    hashes.iter().map(|h| SequenceHash(*h)).collect()
}

fn booking(hashes: &[u64]) -> Booking {
    Booking {
        sequence: sequence(hashes),
        unnamed_blocks: 0,
        shares: true,
        isl_tokens: hashes.len() as u32 * 16,
        prefill_tokens: hashes.len() as u32 * 16,
        prefill_duration: None,
        decays: true,
        osl: None,
        silent: false,
    }
}

fn at(millis: u64) -> Time {
    Time::from_millis(millis)
}

impl Ledger {
    fn put(&mut self, id: u128, slot: u32, booking: &Booking) {
        assert!(self.book(Time::ZERO, RequestId(id), slot, booking));
    }

    fn blocks(&self, slot: u32) -> u64 {
        self.load(slot, Time::ZERO).active_blocks
    }

    fn done(&mut self, id: u128) {
        self.free(Time::ZERO, RequestId(id));
    }
}

#[test]
fn shared_blocks_count_once_and_go_with_the_last_user() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2, 3, 4]));
    ledger.put(2, 0, &booking(&[1, 2, 3, 9]));
    ledger.put(3, 0, &booking(&[1, 2]));
    ledger.put(4, 1, &booking(&[1, 2, 3, 4]));
    assert_eq!((ledger.blocks(0), ledger.blocks(1)), (5, 4));
    ledger.done(1);
    assert_eq!(ledger.blocks(0), 4);
    ledger.done(2);
    assert_eq!(ledger.blocks(0), 2);
    ledger.done(3);
    assert_eq!((ledger.blocks(0), ledger.blocks(1)), (0, 4));
    ledger.done(4);
    assert!(ledger.is_empty());
}

#[test]
fn without_sharing_everything_adds_up() {
    let mut ledger = ledger();
    let own = Booking {
        shares: false,
        ..booking(&[1, 2, 3])
    };
    ledger.put(1, 0, &own);
    ledger.put(2, 0, &own);
    ledger.put(3, 0, &booking(&[1, 2, 3]));
    assert_eq!(ledger.blocks(0), 9);
    for id in 1..=3 {
        ledger.done(id);
    }
    assert!(ledger.is_empty());
}

#[test]
fn an_id_is_booked_once_and_freed_once() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2]));
    assert!(!ledger.book(Time::ZERO, RequestId(1), 1, &booking(&[7])));
    assert_eq!(ledger.blocks(1), 0);
    assert!(
        !ledger.book(Time::ZERO, RequestId(2), 99, &booking(&[7])),
        "no such slot"
    );
    assert!(ledger.free(Time::ZERO, RequestId(1)).is_some());
    assert!(ledger.free(Time::ZERO, RequestId(1)).is_none());
    assert!(ledger.first_token(Time::ZERO, RequestId(1)).is_none());
    ledger.output(Time::ZERO, RequestId(1), 5, true);
    assert!(ledger.is_empty());
}

#[test]
fn prompt_tokens_are_charged_until_the_first_token_or_the_end() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2]));
    ledger.put(2, 0, &booking(&[5]));
    assert_eq!(ledger.prefill_tokens(0, Time::ZERO), 48);
    assert!(ledger.first_token(Time::ZERO, RequestId(1)).is_some());
    assert!(
        ledger.first_token(Time::ZERO, RequestId(1)).is_none(),
        "again is a no-op"
    );
    assert_eq!(ledger.prefill_tokens(0, Time::ZERO), 16);
    ledger.done(2);
    assert_eq!(ledger.prefill_tokens(0, Time::ZERO), 0);
    let cached = Booking {
        prefill_tokens: 0,
        ..booking(&[8])
    };
    ledger.put(3, 0, &cached);
    assert_eq!(
        ledger.load(0, Time::ZERO).pending,
        0,
        "nothing to compute, nothing booked"
    );
}

/// 1000 tokens in 100 ms, booked at 0 behind nobody; a second of 500 tokens in 100 ms behind it.
#[test]
fn only_the_oldest_prompt_decays_and_from_when_it_became_the_oldest() {
    let mut ledger = ledger();
    let modelled = |tokens| Booking {
        prefill_tokens: tokens,
        prefill_duration: Some(Duration::from_millis(100)),
        ..booking(&[])
    };
    ledger.put(1, 0, &modelled(1000));
    ledger.put(2, 0, &modelled(500));
    let waiting = |ledger: &Ledger, millis| ledger.prefill_tokens(0, at(millis));
    for (millis, tokens) in [(0, 1500), (25, 1250), (99, 510), (100, 500), (1000, 500)] {
        assert_eq!(waiting(&ledger, millis), tokens, "at {millis} ms");
    }
    ledger.first_token(at(150), RequestId(1));
    for (millis, tokens) in [(150, 500), (200, 250), (250, 0)] {
        assert_eq!(waiting(&ledger, millis), tokens, "at {millis} ms");
    }
    ledger.done(2);
    ledger.done(1);
    assert!(ledger.is_empty());
}

#[test]
fn what_is_left_of_a_decaying_prompt_is_rounded_up() {
    let mut ledger = ledger();
    let slow = Booking {
        prefill_tokens: 10,
        prefill_duration: Some(Duration::from_millis(100)),
        ..booking(&[])
    };
    ledger.put(1, 0, &slow);
    assert_eq!(ledger.prefill_tokens(0, at(15)), 9);
    assert_eq!(ledger.prefill_tokens(0, at(99)), 1);
}

#[test]
fn a_prompt_predicted_to_take_no_time_weighs_nothing_and_an_unpredicted_one_stays() {
    let mut ledger = ledger();
    let instant = Booking {
        prefill_duration: Some(Duration::ZERO),
        ..booking(&[1])
    };
    ledger.put(1, 0, &instant);
    ledger.put(2, 1, &booking(&[1]));
    assert_eq!(ledger.prefill_tokens(0, Time::ZERO), 0);
    assert_eq!(ledger.prefill_tokens(1, at(1_000_000)), 16);
}

#[test]
fn a_younger_prompt_that_finishes_first_leaves_the_oldest_alone() {
    let mut ledger = ledger();
    let modelled = Booking {
        prefill_tokens: 100,
        prefill_duration: Some(Duration::from_millis(100)),
        ..booking(&[])
    };
    ledger.put(1, 0, &modelled);
    ledger.put(2, 0, &modelled);
    let done = ledger.first_token(at(40), RequestId(2)).unwrap();
    assert_eq!(done.took, None, "it was never the oldest");
    assert_eq!(ledger.prefill_tokens(0, at(50)), 50);
    let done = ledger.first_token(at(90), RequestId(1)).unwrap();
    assert_eq!(done.took, Some(Duration::from_millis(90)));
}

/// A prompt of 2 blocks and 8 tokens: the third block is half full, so 8 tokens fit before a new one.
#[test]
fn output_adds_a_block_whenever_an_item_crosses_a_border() {
    let mut ledger = ledger();
    let odd = Booking {
        isl_tokens: 40,
        ..booking(&[1, 2])
    };
    ledger.put(1, 0, &odd);
    let mut grown = |generated| {
        ledger.output(Time::ZERO, RequestId(1), generated, true);
        ledger.blocks(0)
    };
    assert_eq!([1, 8, 9, 24, 25].map(&mut grown), [2, 2, 3, 3, 4]);
    assert_eq!(
        grown(25 + 16 * 3),
        5,
        "one block per item, even across three borders"
    );
    ledger.done(1);
    assert!(ledger.is_empty());
}

#[test]
fn output_is_not_counted_unless_tracked() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1]));
    ledger.output(Time::ZERO, RequestId(1), 1000, false);
    assert_eq!(ledger.blocks(0), 1);
    ledger.done(1);
    assert!(ledger.is_empty());
}

/// Prompt of 8 blocks, 4 of them shared with another; 100 tokens expected. Own blocks and output fade.
#[test]
fn expected_output_fades_own_blocks_and_leaves_shared_ones_whole() {
    let mut ledger = ledger();
    let hinted = Booking {
        osl: Some(100),
        ..booking(&[1, 2, 3, 4, 5, 6, 7, 8])
    };
    ledger.put(1, 0, &hinted);
    ledger.put(2, 0, &booking(&[1, 2, 3, 4, 90]));
    assert_eq!(ledger.blocks(0), 9);
    ledger.output(Time::ZERO, RequestId(1), 50, true);
    assert_eq!(
        ledger.blocks(0),
        5 + 2 + 1,
        "4 own at a half, 1 output at a half, rounded"
    );
    ledger.output(Time::ZERO, RequestId(1), 51, true);
    assert_eq!(ledger.blocks(0), 8, "no border crossed: the weight stays");
    ledger.output(Time::ZERO, RequestId(1), 100, true);
    assert_eq!(
        ledger.blocks(0),
        5,
        "all expected tokens are there: only shared blocks are left"
    );
    ledger.output(Time::ZERO, RequestId(1), 300, true);
    assert_eq!(ledger.blocks(0), 5, "never below nothing");
    ledger.done(2);
    assert_eq!(
        ledger.blocks(0),
        0,
        "what was shared is its own again, and faded"
    );
    ledger.done(1);
    assert!(ledger.is_empty());
}

#[test]
fn a_faded_block_that_becomes_shared_is_whole_again() {
    let mut ledger = ledger();
    let hinted = Booking {
        osl: Some(16),
        ..booking(&[1, 2])
    };
    ledger.put(1, 0, &hinted);
    ledger.output(Time::ZERO, RequestId(1), 16, true);
    assert_eq!(ledger.blocks(0), 0);
    ledger.put(2, 0, &booking(&[1, 2]));
    assert_eq!(ledger.blocks(0), 2);
    ledger.done(1);
    assert_eq!(ledger.blocks(0), 2);
    ledger.done(2);
    assert!(ledger.is_empty());
}

#[test]
fn an_expected_output_of_0_counts_as_1() {
    assert_eq!(fraction_left(0, 0), WHOLE as u32);
    assert_eq!(fraction_left(1, 0), 0);
    assert_eq!(fraction_left(1, 4), 750_000);
    assert_eq!(fraction_left(u32::MAX, 4), 0);
}

#[test]
fn a_slot_that_goes_forgets_its_requests_and_only_those() {
    let mut ledger = ledger();
    for (id, slot) in [(1, 0), (2, 1), (3, 0)] {
        ledger.put(id, slot, &booking(&[1, 2, 3]));
    }
    let mut gone = Vec::new();
    ledger.clear_slot(Time::ZERO, 0, |freed| gone.push(freed.id.0));
    assert_eq!(gone, [1, 3]);
    assert_eq!((ledger.blocks(0), ledger.blocks(1)), (0, 3));
    assert!(ledger.free(Time::ZERO, RequestId(1)).is_none());
    ledger.done(2);
    assert!(ledger.is_empty());
}

#[test]
fn a_booking_expires_after_its_last_sign_of_life() {
    let mut ledger = ledger();
    let age = Duration::from_secs(300);
    ledger.put(1, 0, &booking(&[1]));
    ledger.put(2, 0, &booking(&[2]));
    ledger.output(at(100_000), RequestId(1), 1, false);
    assert_eq!(ledger.expire(at(299_999), age), None);
    assert_eq!(ledger.expire(at(300_000), age).map(|f| f.id.0), Some(2));
    assert_eq!(ledger.expire(at(399_999), age), None);
    assert_eq!(ledger.expire(at(400_000), age).map(|f| f.id.0), Some(1));
    assert!(ledger.is_empty());
}

#[test]
fn the_load_carries_what_a_cost_in_seconds_needs() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2]));
    ledger.put(2, 0, &booking(&[3]));
    ledger.first_token(at(30), RequestId(1));
    ledger.output(at(40), RequestId(1), 10, false);
    let load = ledger.load(0, at(50));
    assert_eq!(
        (load.requests, load.pending, load.context_tokens),
        (2, 1, 42)
    );
    assert_eq!(load.oldest_since, Some(at(30)));
}

/// Depths as the trie finds them, against a scan of every prompt, for a few thousand random histories.
#[test]
fn depths_equal_a_scan() {
    let mut rng = kvasir_types::Rng::new(5);
    for _ in 0..300 {
        let mut ledger = ledger();
        let mut live: Vec<(u128, u32, Vec<u64>)> = Vec::new();
        for step in 0..40 {
            let prompt = random_prompt(&mut rng);
            if rng.below(3) > 0 {
                let slot = rng.below(3) as u32;
                ledger.put(step, slot, &booking(&prompt));
                live.push((step, slot, prompt));
            } else if !live.is_empty() {
                let (id, ..) = live.remove(rng.below(live.len() as u64) as usize);
                ledger.done(id);
            }
            check(&mut ledger, &live, &random_prompt(&mut rng));
        }
    }
}

/// Up to 6 chained blocks over a small alphabet: place and all letters before it make the hash.
fn random_prompt(rng: &mut kvasir_types::Rng) -> Vec<u64> {
    let mut hash = 1;
    let length = rng.below(7);
    (0..length)
        .map(|_| {
            hash = hash * 3 + rng.below(3);
            hash
        })
        .collect()
}

fn check(ledger: &mut Ledger, live: &[(u128, u32, Vec<u64>)], prompt: &[u64]) {
    let common =
        |other: &[u64]| prompt.iter().zip(other).take_while(|(a, b)| a == b).count() as u32;
    let mut found = [0; 3];
    ledger.depths(&sequence(prompt), |slot, depth| {
        let new = found[slot as usize] == 0;
        if new {
            found[slot as usize] = depth;
        }
        new
    });
    for slot in 0..3u32 {
        let here = live.iter().filter(|(_, s, _)| *s == slot);
        let depth = here.clone().map(|(.., p)| common(p)).max().unwrap_or(0);
        assert_eq!(
            found[slot as usize], depth,
            "slot {slot}, {prompt:?} over {live:?}"
        );
        let blocks: std::collections::BTreeSet<_> = here.flat_map(|(.., p)| p).collect();
        assert_eq!(
            ledger.blocks(slot),
            blocks.len() as u64,
            "slot {slot}, {live:?}"
        );
    }
}

/// Hashes that are not chained at all: figures may be odd, but nothing is lost and nothing panics.
#[test]
fn unchained_hashes_still_come_back_to_nothing() {
    let mut rng = kvasir_types::Rng::new(9);
    for _ in 0..300 {
        let mut ledger = ledger();
        let mut live = Vec::new();
        for id in 0..60 {
            let length = rng.below(6);
            let hashes: Vec<u64> = (0..length).map(|_| rng.below(3)).collect();
            ledger.put(id, rng.below(3) as u32, &booking(&hashes));
            live.push(id);
            if rng.below(2) == 0 {
                let at = rng.below(live.len() as u64) as usize;
                ledger.done(live.swap_remove(at));
            }
        }
        for id in live {
            ledger.done(id);
        }
        assert!(ledger.is_empty());
    }
}

/// A run that was split for a branch is one run again when the branch is gone.
#[test]
fn runs_grow_together_again() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2, 3, 4]));
    assert_eq!(ledger.trie.nodes(), 1);
    ledger.put(2, 1, &booking(&[1, 2, 8, 9]));
    ledger.put(3, 0, &booking(&[1]));
    assert_eq!(ledger.trie.nodes(), 4);
    ledger.done(2);
    ledger.done(3);
    assert_eq!(ledger.trie.nodes(), 1);
    check(&mut ledger, &[(1, 0, vec![1, 2, 3, 4])], &[1, 2, 3, 7]);
}

#[test]
fn blocks_without_names_count_for_each_request_and_are_freed() {
    let mut ledger = ledger();
    let plain = Booking {
        unnamed_blocks: 5,
        ..booking(&[])
    };
    for id in 1..=2 {
        assert!(ledger.book(at(0), RequestId(id), 0, &plain));
    }
    assert_eq!(ledger.load(0, at(0)).active_blocks, 10);
    for id in 1..=2 {
        assert!(ledger.free(at(1), RequestId(id)).is_some());
    }
    assert!(ledger.is_empty());
}

#[test]
fn a_sign_is_news_once_and_a_token_outweighs_a_presumption() {
    let mut ledger = ledger();
    ledger.book(at(0), RequestId(1), 0, &booking(&[1]));
    let id = RequestId(1);
    let mut before = |sign| ledger.sign(id, sign).map(|change| change.before);
    assert_eq!(before(Sign::Presumed), Some(Sign::Awaited));
    assert_eq!(before(Sign::Presumed), None);
    assert_eq!(before(Sign::Seen), Some(Sign::Presumed));
    assert_eq!(ledger.sign(id, Sign::Presumed), None);
    assert_eq!(ledger.sign(RequestId(9), Sign::Seen), None);
    assert_eq!(ledger.free(at(1), id).map(|f| f.sign), Some(Sign::Seen));
}

/// Four prompts are charged, one of them a stream's. The engine says that one request waits: that is the newest.
#[test]
fn what_an_engine_no_longer_lets_wait_is_computed_unless_it_streams_or_is_new() {
    let mut ledger = ledger();
    for (id, silent) in [(1, true), (2, false), (3, true), (4, true)] {
        let prompt = Booking {
            silent,
            ..booking(&[id])
        };
        ledger.book(at(id * 100), RequestId(u128::from(id)), 0, &prompt);
    }
    assert_eq!(ledger.computed_silently(0, at(100), 1), None, "not before");
    for expected in [Some(1), Some(3), None] {
        let found = ledger.computed_silently(0, at(500), 1);
        assert_eq!(found, expected.map(RequestId));
        if let Some(id) = found {
            ledger.first_token(at(500), id);
        }
    }
    assert_eq!(ledger.computed_silently(0, at(500), 0), Some(RequestId(4)));
    assert_eq!(ledger.computed_silently(7, at(500), 0), None);
}

/// What a row says, booked elsewhere, is the same load.
#[test]
fn what_runs_can_be_booked_elsewhere_and_weighs_the_same() {
    let mut ledger = ledger();
    ledger.put(1, 0, &booking(&[1, 2, 3, 4]));
    ledger.put(2, 0, &booking(&[1, 2, 9]));
    ledger.put(3, 1, &booking(&[1, 2]));
    let unnamed = Booking {
        unnamed_blocks: 5,
        ..booking(&[])
    };
    ledger.put(4, 0, &unnamed);
    ledger.done(1);
    ledger.first_token(at(1), RequestId(3));
    let mut copy = self::ledger();
    for row in ledger.running(|_| true) {
        let same = Booking {
            sequence: row.sequence.into(),
            prefill_tokens: row.prefill_tokens,
            ..booking(&[])
        };
        assert!(copy.book(at(2), row.id, row.slot, &same));
    }
    for slot in 0..2 {
        let (ours, theirs) = (ledger.load(slot, at(2)), copy.load(slot, at(2)));
        assert_eq!(ours.active_blocks, theirs.active_blocks, "{slot}");
        assert_eq!(ours.prefill_tokens, theirs.prefill_tokens, "{slot}");
        assert_eq!(ours.requests, theirs.requests, "{slot}");
    }
    assert_eq!(ledger.running(|id| id.0 == 2).count(), 3);
    let named = ledger
        .running(|id| id.0 == 2)
        .filter(|row| !row.sequence.is_empty());
    assert_eq!(named.count(), 1);
}
