//! Each term of the cost in seconds.

use kvasir_types::Time;

use super::*;

const LAW: StepLaw = StepLaw {
    chunk: 0.010,
    token: 1e-4,
    pair: 0.0,
    step: 0.005,
    stream: 1e-4,
    attend: 1e-8,
};

fn rank(load: TimedLoad) -> RankTime {
    RankTime::new(LAW, 1.0, &load, 8192, &cache(Some(1000), 0.0))
}

fn cache(blocks: Option<u64>, written: f64) -> CacheUse {
    CacheUse {
        block: 16.0,
        blocks,
        written,
        pressure: 0.0,
        returns: 0.0,
    }
}

fn prompt(isl: u32, output: f64) -> TimedPrompt {
    TimedPrompt::new(1_000_000_000, isl, 16, output, LAW, (true, true))
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
}

/// 1,000 tokens at 0.1 ms and one step; nobody else there; an answer of 100 tokens at 5.1 ms and what it reads.
#[test]
fn an_empty_rank_costs_the_prompt_twice_and_the_answer() {
    let terms = prompt(1000, 100.0).terms(
        &rank(TimedLoad::default()),
        &RankPlan::default(),
        (0.0, 0.0),
        1.0,
    );
    near(terms.own, 0.110);
    near(terms.wait, 0.0);
    near(terms.delay, 0.110);
    let lambda = LAMBDA_MAX * 2.0 / (0.025 * 100.0);
    near(
        terms.decode,
        lambda * 100.0 * (0.005 + 1e-4 + 1e-8 * 1050.0),
    );
    near(terms.cost, terms.own + terms.delay + terms.decode);
}

#[test]
fn what_is_cached_is_not_computed_but_the_last_token_always_is() {
    let rank = rank(TimedLoad::default());
    let new = |held, active| {
        let plan = RankPlan::default();
        prompt(1024, 10.0)
            .terms(&rank, &plan, (held, active), 1.0)
            .new_tokens
    };
    assert_eq!(new(0.0, 0.0), 1024.0);
    assert_eq!(new(10.0, 0.0), 1024.0 - 160.0);
    assert_eq!(new(10.0, 20.0), 1024.0 - 320.0);
    assert_eq!(new(64.0, 0.0), 16.0);
    assert_eq!(new(1000.0, 0.0), 16.0);
}

/// Three prompts of 0.1 s wait and the oldest has been computed for 60 ms.
#[test]
fn prompts_that_wait_count_less_as_the_oldest_is_computed() {
    let load = TimedLoad {
        pending: 3,
        prefill: 0.3,
        oldest: 0.1,
        oldest_since: Time::from_millis(940),
        ..TimedLoad::default()
    };
    let wait = |ms: u64| {
        let mut prompt = prompt(160, 1.0);
        prompt.now_ns = ms * 1_000_000;
        prompt
            .terms(&rank(load), &RankPlan::default(), (0.0, 0.0), 1.0)
            .wait
    };
    near(wait(1000), 0.24);
    near(wait(1040), 0.2);
    near(wait(2000), 0.2);
    let planned = RankPlan {
        requests: 2.0,
        own: 0.5,
        tokens: 0.0,
    };
    near(
        prompt(160, 1.0)
            .terms(&rank(load), &planned, (0.0, 0.0), 1.0)
            .wait,
        0.74,
    );
}

/// Ten decode there: the prompt delays each by what its step takes longer than theirs, and each step gets longer for all.
#[test]
fn others_that_decode_are_delayed_and_slowed() {
    let load = TimedLoad {
        decoding: 10,
        context: 20_000,
        ..TimedLoad::default()
    };
    let terms = prompt(1000, 100.0).terms(&rank(load), &RankPlan::default(), (0.0, 0.0), 1.0);
    let lambda = LAMBDA_MAX * 0.8;
    near(terms.own, 0.1 + 0.010 + 10.0 * 1e-4 + 20_000.0 * 1e-8);
    let plain = 0.005 + 10.0 * 1e-4 + 20_000.0 * 1e-8;
    near(terms.delay, terms.own + lambda * 10.0 * (terms.own - plain));
    let slow = 1e-4 + 1e-8 * 1050.0;
    let step = 0.005 + 10.0 * 1e-4 + 1e-8 * (20_000.0 + 10.0 * 50.0);
    near(terms.decode, lambda * 100.0 * (step + slow + 5.0 * slow));
}

/// Who reads an answer and comes back costs as much as who decodes, but for the context that it does not hold now.
#[test]
fn those_expected_back_count_as_if_they_were_there() {
    let decode = |decoding, returns, present| {
        let used = CacheUse {
            returns,
            ..cache(Some(1000), 0.0)
        };
        let load = TimedLoad {
            decoding,
            ..TimedLoad::default()
        };
        let rank = RankTime::new(LAW, 1.0, &load, 8192, &used);
        let mut prompt = prompt(1000, 100.0);
        prompt.present = present;
        let terms = prompt.terms(&rank, &RankPlan::default(), (0.0, 0.0), 1.0);
        let cost = prompt.cost(&rank, &RankPlan::default(), 0.0, 0.0);
        assert_eq!(cost, terms.cost);
        terms.decode
    };
    near(decode(0, 4.0, 0.5), decode(2, 0.0, 0.5));
    near(decode(0, 4.0, 0.0), decode(0, 0.0, 0.0));
    assert!(decode(0, 4.0, 0.5) > decode(0, 4.0, 0.25));
}

/// 16,000 tokens of cache: 1,000 blocks active leave no room.
#[test]
fn a_full_cache_must_be_waited_for_unless_the_prompt_is_active_there() {
    let load = TimedLoad {
        decoding: 10,
        active_blocks: 1000,
        ..TimedLoad::default()
    };
    let room = |active| {
        let plan = RankPlan::default();
        prompt(1600, 100.0)
            .terms(&rank(load), &plan, (0.0, active), 1.0)
            .room
    };
    let mine = 16_000.0 + 10.0 * 50.0;
    let short: f64 = mine + 1600.0 - 16_000.0;
    near(room(0.0), short / mine * 200.0 * (0.005 + 1e-3));
    assert!(room(99.0) < room(0.0));
    let unknown = RankTime::new(LAW, 1.0, &load, 8192, &cache(None, 0.0));
    let plan = RankPlan::default();
    assert_eq!(prompt(1600, 100.0).room(&unknown, &plan, 0.0), 0.0);
}

/// 16,000 tokens of cache, 15,500 written: 1,000 new tokens and an answer of 100 push 600 out.
#[test]
fn what_leaves_a_full_cache_has_a_price() {
    let evict = |written, pressure, held| {
        let used = CacheUse {
            pressure,
            ..cache(Some(1000), written)
        };
        let rank = RankTime::new(LAW, 2.0, &TimedLoad::default(), 8192, &used);
        let plan = RankPlan::default();
        prompt(1000, 100.0)
            .terms(&rank, &plan, (held, 0.0), 1.0)
            .evict
    };
    assert_eq!(evict(14_900.0, 0.6, 0.0), 0.0);
    near(evict(15_500.0, 0.6, 0.0), 0.6 * 1e-4 * 600.0);
    near(evict(99_000.0, 0.6, 0.0), 0.6 * 1e-4 * 1100.0);
    near(evict(99_000.0, 0.6, 50.0), 0.6 * 1e-4 * 300.0);
    assert_eq!(evict(99_000.0, 0.0, 0.0), 0.0);
}

/// Where half of a prefix is missing, half of what was waited for it counts. Once that is what the prompt takes, for itself and for
/// those who come next, the prompt costs nothing there; where nothing is missing it costs what it did.
#[test]
fn a_prefix_that_was_waited_for_is_copied_for_nothing() {
    let rank = rank(TimedLoad::default());
    let parts = |waited, held| {
        let mut prompt = prompt(1000, 100.0);
        prompt.count_copy(waited, 60.0);
        let plan = RankPlan::default();
        let parts = prompt.terms(&rank, &plan, (held, 0.0), 1.0);
        assert_eq!(prompt.cost(&rank, &plan, held, 0.0), parts.cost);
        near(
            parts.cost,
            parts.wait + parts.own + parts.delay + parts.decode + parts.evict,
        );
        parts
    };
    let (before, full) = (parts(0.0, 30.0), parts(0.0, 60.0));
    let price = 2.0 * before.own * (1.0 + KAPPA);
    assert_eq!(parts(0.999 * price, 30.0), before);
    let free = parts(1.001 * price, 30.0);
    near(free.cost, before.wait + before.decode);
    assert_eq!((free.own, free.decode), (before.own, before.decode));
    assert_eq!(
        (parts(1e9, 60.0), parts(1e9, 62.0).delay > 0.0),
        (full, true)
    );
}

/// Whatever the load, it is finite, and what is compared is what is recorded.
#[test]
fn the_sum_is_the_sum_of_its_parts() {
    for decoding in [0, 1, 7, 300] {
        let load = TimedLoad {
            decoding,
            pending: decoding / 3,
            context: u64::from(decoding) * 1777,
            prefill: 0.137 * f64::from(decoding),
            active_blocks: u64::from(decoding) * 9,
            ..TimedLoad::default()
        };
        for isl in [1, 16, 17, 4000, 40_000] {
            let (prompt, rank) = (prompt(isl, 77.0), rank(load));
            let plan = RankPlan {
                requests: 1.0,
                own: 0.01,
                tokens: 100.0,
            };
            let cost = prompt.cost(&rank, &plan, 3.0, 2.0);
            assert_eq!(cost, prompt.terms(&rank, &plan, (3.0, 2.0), 1.0).cost);
            assert!(cost.is_finite() && cost > 0.0);
        }
    }
}

/// A quarter of a full step of 8,192 tokens is 0.2048 s.
#[test]
fn a_rank_opens_when_little_waits_and_time_alone_may_open_it() {
    let load = |prefill, oldest| TimedLoad {
        pending: 1,
        prefill,
        oldest,
        ..TimedLoad::default()
    };
    let second = 1_000_000_000;
    assert!(rank(load(0.2, 0.2)).is_open(0));
    let closed = rank(load(0.5, 0.5));
    assert!(!closed.is_open(0));
    let opens = closed.opens_at(0).unwrap();
    assert!(!closed.is_open(opens - 3) && closed.is_open(opens));
    near(opens as f64 * 1e-9, 0.5 - 0.010 - 0.2048 + 2e-9);
    let never = rank(load(5.0, 0.5));
    assert!(!never.is_open(100 * second) && never.opens_at(0).is_none());
    assert_eq!(rank(load(0.1, 0.1)).opens_at(0), None);
}

/// A step has a fixed cost of 10 ms here. One prompt is under way, and one or more wait for it to end.
#[test]
fn prompts_share_a_step_only_if_that_costs_less_than_it_saves() {
    let rank = |pending| {
        rank(TimedLoad {
            pending,
            ..TimedLoad::default()
        })
    };
    assert!(!rank(0).is_crowded_by(5.0, 0.0) && !rank(1).is_crowded_by(5.0, 0.0));
    // 19 ms of work delay the one that waits by 19 ms; a step of its own delays this one and the next by 10 ms each.
    assert!(!rank(2).is_crowded_by(0.029, 0.0));
    assert!(rank(2).is_crowded_by(0.031, 0.0));
    // Two that wait are delayed; two that are held gain a step each.
    assert!(rank(3).is_crowded_by(0.029, 0.0));
    assert!(!rank(3).is_crowded_by(0.029, 2.0));
    let load = TimedLoad {
        pending: 3,
        silent: 2,
        ..TimedLoad::default()
    };
    let unknown = RankTime::new(LAW, 1.0, &load, 8192, &cache(None, 0.0));
    assert!(!unknown.is_crowded_by(5.0, 0.0));
}

/// Prompts too fast to be told apart: all of their time is the fixed cost.
#[test]
fn an_idle_rank_is_open_whatever_the_law_says() {
    let law = StepLaw { token: 0.0, ..LAW };
    let idle = TimedLoad::default();
    let rank = RankTime::new(law, 1.0, &idle, 8192, &cache(None, 0.0));
    assert!(rank.is_open(0) && rank.is_open(1_000_000_000));
}

#[test]
fn only_what_happens_there_counts_in_a_split_role() {
    let rank = rank(TimedLoad {
        decoding: 5,
        ..TimedLoad::default()
    });
    let terms = |roles| {
        let prompt = TimedPrompt::new(0, 1000, 16, 100.0, LAW, roles);
        prompt.terms(&rank, &RankPlan::default(), (0.0, 0.0), 1.0)
    };
    assert_eq!(terms((true, false)).decode, 0.0);
    assert!(terms((true, false)).own > 0.0);
    assert_eq!(terms((false, true)).own, 0.0);
    assert!(terms((false, true)).decode > 0.0);
}
