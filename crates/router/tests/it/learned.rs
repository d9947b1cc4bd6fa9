//! What placement by seconds has learned: where it starts, that it is kept, and who is told of it.

use kvasir_router::{Input, RouteError, RouterConfig, RouterPolicy};
use kvasir_types::WorkerRank;

use crate::time::{Host, config, rid, spec};

/// 300 prompts at 0.1 ms a token on a rank that says nothing of itself.
#[test]
fn what_prompts_take_is_learned_and_shown() {
    let mut host = Host::new(config(), 1);
    for id in 1..=300 {
        let isl = 500 + 100 * (id as u32 % 30);
        host.arrive(id, isl);
        host.now += 0.005 + 1e-4 * f64::from(isl);
        host.first_token(id);
        host.now += 0.5;
        host.finish(id, 20);
    }
    let learned = host.router.learned(WorkerRank::new(1, 0)).unwrap();
    let found = learned.law.chunk + learned.law.work(2000.0, 0.0);
    assert!((found / 0.205 - 1.0).abs() < 0.05, "{found}");
    assert_eq!(learned.prompt_samples, 300 - 32);
    let output = host.router.learned_output().unwrap();
    assert!((output - 20.0).abs() < 5.0, "{output}");
}

#[test]
fn the_linear_policy_learns_nothing() {
    let linear = RouterConfig {
        router_policy: RouterPolicy::Kv,
        ..config()
    };
    let mut host = Host::new(linear, 1);
    host.arrive(1, 100);
    assert_eq!(host.router.learned(WorkerRank::new(1, 0)), None);
    let decision = host.router.explain(rid(1)).unwrap();
    assert_eq!(decision.candidates[0].seconds, None);
}

/// A router that has seen prompts of 0.1 ms a token.
fn taught(config: RouterConfig, workers: u64) -> Host {
    let mut host = Host::new(config, workers);
    for id in 1..=200 {
        let isl = 500 + 100 * (id as u32 % 30);
        host.arrive(id, isl);
        host.now += 0.005 + 1e-4 * f64::from(isl);
        host.first_token(id);
        host.now += 0.5;
        host.finish(id, 20);
    }
    host.out.clear();
    host
}

#[test]
fn a_router_goes_on_from_what_another_learned() {
    let first = taught(config(), 2);
    let record = first.router.learned_record().unwrap();
    assert_eq!(record.ranks.len(), 2);
    let mut next = Host::new(config(), 0);
    assert!(next.router.resume_learned(&record));
    next.step(Input::Joined(spec(2)));
    let rank = WorkerRank::new(2, 0);
    assert_eq!(next.router.learned(rank), first.router.learned(rank));
    let output = |host: &Host| host.router.learned_output();
    assert_eq!(output(&next), output(&first));
    // Of the worker that has not come it still knows what it was told.
    let kept = next.router.learned_record().unwrap();
    let mut sorted = record;
    sorted.ranks.sort_by_key(|(rank, _)| *rank);
    assert_eq!(kept, sorted);
    let linear = RouterConfig {
        router_policy: RouterPolicy::Kv,
        ..config()
    };
    let mut linear = Host::new(linear, 1);
    assert!(!linear.router.resume_learned(&kept));
    assert_eq!(linear.router.learned_record(), None);
}

/// Workers join in any order; each is known by what was learned of it.
#[test]
fn what_was_learned_of_a_rank_stays_with_it_whoever_joins() {
    let first = taught(config(), 2);
    let record = first.router.learned_record().unwrap();
    let ranks = [1, 2].map(|worker| WorkerRank::new(worker, 0));
    let samples = ranks.map(|rank| first.router.learned(rank).unwrap().prompt_samples);
    assert!(samples.iter().all(|samples| *samples > 0), "{samples:?}");
    let mut next = Host::new(config(), 0);
    next.step(Input::Joined(spec(2)));
    assert!(next.router.resume_learned(&record));
    next.step(Input::Joined(spec(1)));
    for rank in ranks {
        assert_eq!(next.router.learned(rank), first.router.learned(rank));
    }
    let mut last = Host::new(config(), 0);
    assert!(last.router.resume_learned(&record));
    last.step(Input::Joined(spec(2)));
    last.step(Input::Joined(spec(1)));
    for rank in ranks {
        assert_eq!(last.router.learned(rank), first.router.learned(rank));
    }
}

#[test]
fn a_profile_is_where_learning_starts() {
    let law = kvasir_router::StepLaw {
        token: 7e-4,
        ..kvasir_router::StepLaw::default()
    };
    let told = RouterConfig {
        engine_law: Some(law),
        ..config()
    };
    let host = Host::new(told, 1);
    let learned = host.router.learned(WorkerRank::new(1, 0)).unwrap();
    assert_eq!(learned.law, law);
}

/// 60,000 tokens take some six seconds, and so does what is held behind them.
#[test]
fn who_is_refused_is_told_when_to_come_back() {
    let small = RouterConfig {
        router_queue_max_requests: 1,
        ..config()
    };
    let mut host = taught(small.clone(), 1);
    host.close(1, 1000);
    host.arrive(1001, 20_000);
    host.arrive(1002, 2000);
    let refused = host.refused();
    let [error @ RouteError::QueueLimit { .. }] = &refused[..] else {
        panic!("{refused:?}");
    };
    assert!(
        (6000..=10_000).contains(&error.retry_after_ms()),
        "{error:?}"
    );
    // Nothing is foretold by a guess.
    let mut fresh = Host::new(small, 1);
    fresh.close(1, 1000);
    fresh.arrive(1001, 20_000);
    fresh.arrive(1002, 2000);
    assert_eq!(
        fresh.refused()[0].retry_after_ms(),
        RouteError::RETRY_AFTER_MS
    );
}

/// 2,000 tokens take some 200 ms: then the rank is no longer busy.
#[test]
fn who_is_refused_by_busy_thresholds_is_told_when_to_come_back() {
    let busy = RouterConfig {
        active_prefill_tokens_threshold: Some(1000),
        ..config()
    };
    let mut host = taught(busy.clone(), 1);
    host.arrive(1000, 2000);
    host.now += 0.05;
    host.arrive(1001, 1000);
    let refused = host.refused();
    assert!(
        matches!(
            &refused[..],
            [RouteError::AllEligibleWorkersOverloaded {
                retry_after_ms: Some(120..=180),
                ..
            }]
        ),
        "{refused:?}"
    );
    // Nothing is foretold by a guess.
    let mut fresh = Host::new(busy, 1);
    fresh.arrive(1000, 2000);
    fresh.arrive(1001, 1000);
    let told: Vec<_> = fresh
        .refused()
        .iter()
        .map(RouteError::retry_after_ms)
        .collect();
    assert_eq!(told, [RouteError::RETRY_AFTER_MS]);
}

/// With overload protection a request that would wait too long is refused at once, by what was learned.
#[test]
fn a_wait_that_is_foretold_too_long_is_not_waited() {
    let protected = RouterConfig {
        overload_protection: true,
        ..config()
    };
    let mut host = taught(protected, 1);
    host.close(1, 1000);
    host.arrive(1001, 2000);
    assert!(host.refused().is_empty(), "nobody waits yet");
    host.arrive(1002, 2000);
    let refused = host.refused();
    assert!(
        matches!(
            &refused[..],
            [RouteError::QueueTooSlow {
                expected_ms: 5000..8000,
                predicted: true,
                ..
            }]
        ),
        "{refused:?}"
    );
}
