//! What is held against workers, by the clock.

use super::*;

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);
const LONGEST: Duration = Duration::from_secs(5);

fn at(millis: u64) -> Time {
    Time::from_millis(millis)
}

/// Fails an attempt that was sent just then, and gives the span in milliseconds.
fn fail(health: &mut Health, worker: WorkerId, now: Time) -> u64 {
    let mut rng = Rng::new(1);
    let until = health.failed(worker, now, Some(now), LONGEST, &mut rng);
    (until - now).as_millis() as u64
}

#[test]
fn spans_double_to_the_bound_and_a_success_forgives() {
    let mut health = Health::default();
    let mut now = at(1000);
    for longest in [250, 500, 1000, 2000, 4000, 5000, 5000] {
        let span = fail(&mut health, A, now);
        assert!(
            (longest * 9 / 10..=longest).contains(&span),
            "{span} of {longest}"
        );
        now += Duration::from_millis(span + 1);
        assert_eq!(health.ended(now), Some(A));
        assert_eq!(health.ejected_until(A), None);
    }
    assert!(!health.served(A, now), "it was back already");
    assert!(fail(&mut health, A, now) <= 250);
    assert!(
        health.served(A, now),
        "a request that it serves brings it back"
    );
    assert_eq!(health.due(), None);
    fail(&mut health, A, now);
    let later = now + FORGIVEN_AFTER + Duration::from_millis(1);
    health.ended(later);
    assert!(fail(&mut health, A, later) <= 250, "long ago is forgotten");
}

#[test]
fn one_death_with_many_requests_is_one_failure() {
    let mut health = Health::default();
    let mut rng = Rng::new(1);
    let first = health.failed(A, at(100), Some(at(1)), LONGEST, &mut rng);
    for _ in 0..50 {
        let until = health.failed(A, at(101), Some(at(50)), LONGEST, &mut rng);
        assert_eq!(until, first);
    }
    let until = health.failed(A, at(200), Some(at(150)), LONGEST, &mut rng);
    assert!(until > first, "what was sent after it is another");
}

#[test]
fn a_probe_outweighs_few_failures_from_before_it_and_no_errors() {
    let mut health = Health::default();
    fail(&mut health, A, at(100));
    assert!(!health.healthy(A, at(99)), "it was asked before");
    assert!(health.healthy(A, at(100)));
    fail(&mut health, A, at(200));
    assert!(health.healthy(A, at(201)));
    fail(&mut health, A, at(300));
    assert!(!health.healthy(A, at(301)), "three in a row");
    health.served(A, at(302));
    health.served(B, at(303));
    for millis in [303, 304, 305] {
        let too_often = health.errored(A, at(millis));
        assert_eq!(too_often, millis == 305);
    }
    fail(&mut health, A, at(306));
    assert!(
        !health.healthy(A, at(307)),
        "probes say nothing about requests that fail"
    );
}

#[test]
fn a_sick_worker_is_back_when_a_probe_says_so_and_only_then() {
    let mut health = Health::default();
    health.sick(A, at(10));
    assert_eq!(
        (health.ejected_until(A), health.due()),
        (Some(Time::MAX), None)
    );
    assert!(!health.served(A, at(20)));
    assert!(health.ejected_until(A).is_some());
    assert!(health.healthy(A, at(30)));
    assert!(!health.healthy(A, at(31)), "it is back already");
    assert!(health.held.is_empty(), "nothing is held against it");
}

#[test]
fn errors_count_only_while_another_serves() {
    let mut health = Health::default();
    health.served(B, at(1));
    for millis in 2..20 {
        assert!(
            !health.errored(A, at(millis)),
            "nobody has served since it began"
        );
    }
    health.served(A, at(20));
    assert!(!health.errored(A, at(21)), "it served in between");
    assert!(!health.errored(A, at(21)));
    health.served(A, at(22));
    health.served(B, at(23));
    health.served(A, at(24));
    for (millis, too_often) in [(25, false), (26, false), (27, false)] {
        assert_eq!(health.errored(A, at(millis)), too_often);
    }
    health.served(B, at(28));
    assert!(health.errored(A, at(29)));
    health.leave(B);
    assert!(!health.errored(A, at(30)), "that one is gone");
}

#[test]
fn the_least_bad_is_the_one_whose_span_ends_first_and_the_sick_come_last() {
    let mut health = Health::default();
    fail(&mut health, A, at(100));
    fail(&mut health, B, at(150));
    assert!(health.badness(A) < health.badness(B));
    health.sick(A, at(160));
    assert!(health.badness(B) < health.badness(A));
    health.sick(B, at(170));
    assert!(health.badness(A) < health.badness(B), "it failed first");
}
