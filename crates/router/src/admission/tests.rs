//! What ranks and queues show, and what follows from it.

use super::*;

fn at(millis: u64) -> Time {
    Time::from_millis(millis)
}

fn one_rank() -> Admission {
    let mut admission = Admission::new(true);
    admission.joined(0, None);
    admission
}

/// A sign of a request that nothing was known of, and that found others before it.
fn sign(admission: &mut Admission, millis: u64, sign: Sign) {
    let change = SignChange {
        slot: 0,
        before: Sign::Awaited,
        sign,
        booked_at: at(millis),
        ahead: 9,
        silent: sign == Sign::Presumed,
    };
    admission.signed(at(millis), &change);
}

#[test]
fn a_rank_is_given_a_few_requests_and_then_what_it_begins_within_a_second() {
    let mut admission = one_rank();
    for taken in 1..=RANK_MIN {
        assert!(admission.is_open(0));
        admission.booked(at(0), 0);
        assert_eq!(admission.is_open(0), taken < RANK_MIN);
    }
    // 100 a second, and each that begins is followed by two others as long as the rank is open.
    let mut waiting = RANK_MIN;
    for millis in (10..5_000).step_by(10) {
        sign(&mut admission, millis, Sign::Seen);
        waiting -= 1;
        for _ in 0..2 {
            if admission.is_open(0) {
                admission.booked(at(millis), 0);
                waiting += 1;
            }
        }
    }
    assert!((95..=105).contains(&waiting), "{waiting} of 100 a second");
}

#[test]
fn a_stalled_rank_is_given_less_and_a_rank_that_left_nothing() {
    let mut admission = one_rank();
    for millis in 0..1000 {
        admission.booked(at(millis), 0);
        sign(&mut admission, millis, Sign::Seen);
    }
    for _ in 0..100 {
        admission.booked(at(1000), 0);
    }
    assert!(admission.is_open(0));
    admission.booked(at(60_000), 0);
    assert!(!admission.is_open(0), "it has begun nothing for a minute");
    admission.left(0);
    assert!(admission.is_open(0));
}

#[test]
fn silent_requests_are_presumed_begun_unless_the_engine_lets_others_wait() {
    let mut admission = one_rank();
    for _ in 0..50 {
        admission.booked(at(0), 0);
        sign(&mut admission, 0, Sign::Presumed);
    }
    assert!(admission.is_open(0), "nothing says that they wait");
    admission.reported(at(10), 0, 7);
    assert!(admission.is_open(0));
    admission.booked(at(20), 0);
    sign(&mut admission, 30, Sign::Presumed);
    assert!(!admission.is_open(0), "it waits behind the seven");
    admission.ended(at(40), 0, Sign::Presumed, true);
    assert!(admission.is_open(0), "one ended, so one of them begins");
    admission.reported(at(50), 0, 100);
    assert!(!admission.is_open(0));
    admission.tick(at(5_049));
    assert!(!admission.is_open(0));
    admission.tick(at(5_050));
    assert!(admission.is_open(0), "an old word does not count");
}

#[test]
fn requests_above_what_an_engine_runs_at_once_wait_in_it() {
    let mut admission = one_rank();
    admission.joined(0, Some(4));
    for _ in 0..4 + RANK_MIN {
        assert!(admission.is_open(0));
        admission.booked(at(0), 0);
        sign(&mut admission, 0, Sign::Presumed);
    }
    assert!(!admission.is_open(0));
    admission.ended(at(1), 0, Sign::Presumed, true);
    assert!(admission.is_open(0));
}

#[test]
fn a_queue_expects_by_what_left_it_and_nothing_at_first() {
    let (mut admission, model) = (one_rank(), None);
    assert_eq!(
        admission.too_late(at(0), &model, 5000),
        None,
        "nobody waits"
    );
    for _ in 0..100 {
        admission.entered(at(0), &model);
    }
    let burst = admission.clone().too_late(at(1999), &model, 9000);
    assert_eq!(burst, None, "a burst");
    // Ten a second.
    for millis in (100..=2000).step_by(100) {
        admission.went(at(millis), &model, true);
    }
    let late = admission.too_late(at(2000), &model, 80).unwrap();
    assert!(
        (6.0..9.0).contains(&late.expected.as_secs_f64()),
        "{late:?}"
    );
    assert_eq!(late.retry_after, late.expected, "80 wait");
    assert_eq!(admission.too_late(at(2000), &model, 10), None);
    assert_eq!(
        admission.too_late(at(2000), &Some("other".into()), 500),
        None,
        "each model has its queue"
    );
    for _ in 0..80 {
        admission.went(at(2000), &model, false);
    }
    admission.entered(at(60_000), &model);
    assert_eq!(
        admission.too_late(at(60_000), &model, 100),
        None,
        "long ago"
    );
}

#[test]
fn nothing_is_counted_while_it_is_off_and_lanes_are_bounded() {
    let mut off = Admission::new(false);
    off.joined(0, Some(1));
    for _ in 0..100 {
        off.booked(at(0), 0);
        off.entered(at(0), &None);
    }
    assert!(off.is_open(0) && off.lanes.is_empty());
    let mut on = one_rank();
    for model in 0..2 * LANES_MAX {
        let model = Some(Arc::from(model.to_string()));
        on.entered(at(0), &model);
        on.went(at(0), &model, true);
    }
    assert!(on.lanes.len() <= LANES_MAX);
}

/// A gateway that begins to answer after 1.2 s, however much it has to do: it gets more and more.
#[test]
fn a_rank_that_is_slow_to_begin_is_given_more_as_long_as_it_begins_as_much() {
    let mut admission = one_rank();
    let mut sent = Vec::new();
    for millis in 0..12_000 {
        if admission.is_open(0) {
            sent.push((millis, sent.iter().any(|(at, _)| at + 1200 > millis)));
            admission.booked(at(millis), 0);
        }
        for (begun, crowded) in sent.iter().filter(|(at, _)| at + 1200 == millis) {
            let change = SignChange {
                slot: 0,
                before: Sign::Awaited,
                sign: Sign::Seen,
                booked_at: at(*begun),
                ahead: u32::from(*crowded),
                silent: false,
            };
            admission.signed(at(millis), &change);
        }
    }
    let last = sent.iter().filter(|(at, _)| *at >= 10_800).count();
    assert!(last > 30, "{last} in the last 1.2 s, 8 in the first");
}

/// The first that is seen of an answer in one piece is all of it: that says nothing about how fast the rank begins.
#[test]
fn whole_answers_do_not_make_a_rank_slow_to_begin() {
    let mut admission = one_rank();
    admission.reported(at(0), 0, 30);
    for millis in (0..4_000).step_by(100) {
        admission.booked(at(millis), 0);
        let whole = SignChange {
            slot: 0,
            before: Sign::Awaited,
            sign: Sign::Seen,
            booked_at: Time::ZERO,
            ahead: 0,
            silent: true,
        };
        admission.signed(at(millis), &whole);
        let flow = admission.ranks[0];
        let expected = 30u32.saturating_sub(millis as u32 / 100 + 1);
        assert_eq!((flow.alone_secs, flow.behind), (0.0, expected));
    }
}

#[test]
fn a_queue_that_engines_have_too_is_no_burst() {
    let (mut admission, model) = (one_rank(), None);
    for _ in 0..100 {
        admission.entered(at(0), &model);
    }
    assert_eq!(admission.too_late(at(500), &model, 100), None);
    admission.reported(at(500), 0, 40);
    assert!(admission.too_late(at(500), &model, 100).is_some());
}
