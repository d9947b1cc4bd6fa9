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
    assert!(!health.served(A, now, None, true), "it was back already");
    assert!(fail(&mut health, A, now) <= 250);
    assert!(
        health.served(A, now, None, true),
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
    health.served(A, at(302), None, true);
    health.served(B, at(303), None, true);
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
    assert!(!health.served(A, at(20), None, true));
    assert!(health.ejected_until(A).is_some());
    assert!(health.healthy(A, at(30)));
    assert!(!health.healthy(A, at(31)), "it is back already");
    assert!(health.held.is_empty(), "nothing is held against it");
}

#[test]
fn errors_count_only_while_another_serves() {
    let mut health = Health::default();
    health.served(B, at(1), None, true);
    for millis in 2..20 {
        assert!(
            !health.errored(A, at(millis)),
            "nobody has served since it began"
        );
    }
    health.served(A, at(20), None, true);
    assert!(!health.errored(A, at(21)), "it served in between");
    assert!(!health.errored(A, at(21)));
    health.served(A, at(22), None, true);
    health.served(B, at(23), None, true);
    health.served(A, at(24), None, true);
    for (millis, too_often) in [(25, false), (26, false), (27, false)] {
        assert_eq!(health.errored(A, at(millis)), too_often);
    }
    health.served(B, at(28), None, true);
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

/// Two errors in a row, or one that came faster than any answer did: the worker is ejected until it generates a token.
#[test]
fn a_broken_engine_is_ejected_until_it_generates() {
    let mut health = Health::default();
    assert!(!health.broke(A, at(10), Some(at(9))), "it never answered");
    health.served(A, at(60), Some(at(20)), true);
    assert!(
        !health.broke(A, at(140), Some(at(100))),
        "no faster than ever"
    );
    assert!(
        health.broke(A, at(180), Some(at(140))),
        "the second in a row"
    );
    health.served(A, at(230), Some(at(190)), true);
    assert!(health.broke(A, at(240), Some(at(201))), "faster than ever");
    health.eject_broken(A, at(240));
    let is_out = |health: &Health| health.ejected_until(A) == Some(Time::MAX);
    assert!(is_out(&health) && health.is_broken(A) && health.due().is_none());
    assert!(
        !health.healthy(A, at(250)),
        "a server can be well without its engine"
    );
    assert!(
        !health.served(A, at(251), Some(at(239)), true),
        "that was sent before it broke"
    );
    health.generated(A, at(239));
    assert!(is_out(&health), "so was that");
    health.generated(A, at(240));
    assert_eq!((health.ejected_until(A), health.held.len()), (None, 0));
    health.eject_broken(A, at(300));
    assert!(
        health.served(A, at(310), Some(at(301)), true),
        "it serves what was sent since"
    );
    assert!(!health.is_broken(A));
    health.eject_broken(A, at(400));
    health.sick(A, at(410));
    health.generated(A, at(420));
    assert!(
        is_out(&health) && !health.is_broken(A),
        "its probes have the last word"
    );
    health.leave(A);
    assert!(health.fastest.is_empty());
    // It begins each answer and completes none.
    assert!(!health.broke(A, at(500), Some(at(450))));
    health.served(A, at(510), Some(at(505)), false);
    assert!(
        health.broke(A, at(520), Some(at(505))),
        "the second that it did not complete"
    );
}

#[test]
fn a_broken_engine_is_tried_before_a_sick_worker_and_after_all_others() {
    let mut health = Health::default();
    health.sick(A, at(1));
    health.eject_broken(B, at(2));
    assert!(health.badness(B) < health.badness(A));
    health.healthy(A, at(3));
    fail(&mut health, A, at(4));
    assert!(health.badness(A) < health.badness(B));
}
