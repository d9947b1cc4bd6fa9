//! Every cause, phase and kind of request, and what follows.

use expect_test::expect;
use kvasir_types::RequestId;

use super::*;

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);

fn attempts(phase: Phase, idempotent: bool, left: u32) -> Attempts {
    let limits = AttemptLimits {
        retries: left,
        resumes: left,
    };
    let mut attempts = Attempts::new(limits, idempotent);
    attempts.phase = phase;
    attempts
}

fn shown(next: NextStep) -> &'static str {
    match next {
        NextStep::TryNext => "next",
        NextStep::GiveUp(GiveUp::Rejected) => "rejected",
        NextStep::GiveUp(GiveUp::MayHaveRun) => "may have run",
        NextStep::GiveUp(GiveUp::FailedTwice) => "failed twice",
        NextStep::GiveUp(GiveUp::Limit) => "limit",
    }
}

/// What follows when one attempt is left and when none is, for requests that are idempotent and for others. `next`: another worker
/// is asked; else why none is. `second`: what follows, with one attempt left, if a worker died under the request before, and how this
/// attempt then ended. `again`: the same worker may be chosen if no other is left.
#[test]
fn what_follows_each_failure() {
    let columns = |cells: [&str; 11]| {
        let [
            cause,
            phase,
            fault,
            outcome,
            again,
            one,
            none,
            second,
            second_outcome,
            other_one,
            other_none,
        ] = cells;
        format!(
            "{cause:<13}{phase:<10}{fault:<7}{outcome:<12}{again:<6}{one:<9}{none:<9}{second:<13}{second_outcome:<12}{other_one:<13}{other_none}\n"
        )
    };
    let mut table = columns([
        "",
        "",
        "",
        "",
        "",
        "idempotent",
        "",
        "",
        "",
        "not idempotent",
        "",
    ]);
    table += &columns([
        "cause", "phase", "fault", "outcome", "again", "one left", "none", "second", "",
        "one left", "none",
    ]);
    for cause in FailureCause::ALL {
        for phase in [Phase::Opening, Phase::Streaming, Phase::Resuming] {
            let next = |idempotent, left| {
                let mut attempts = attempts(phase, idempotent, left);
                let expected = attempts.next_step(cause);
                let (outcome, next) = attempts.fail(A, cause);
                assert_eq!(next, expected);
                assert_eq!(outcome, Outcome::of_failure(cause));
                shown(next)
            };
            let mut failed = attempts(phase, true, 1);
            let (outcome, _) = failed.fail(A, cause);
            let mut second = attempts(phase, true, 1);
            second.suspect = true;
            let (second_outcome, second) = second.fail(B, cause);
            table += &columns([
                &format!("{cause:?}"),
                &format!("{phase:?}"),
                &format!("{:?}", cause.fault()),
                &format!("{outcome:?}"),
                if failed.again { "yes" } else { "no" },
                next(true, 1),
                next(true, 0),
                shown(second),
                &format!("{second_outcome:?}"),
                next(false, 1),
                next(false, 0),
            ]);
        }
    }
    expect![[r#"
                                                        idempotent                                  not idempotent
        cause        phase     fault  outcome     again one left none     second                   one left     none
        Absent       Opening   Worker Unreachable no    next     limit    next         Unreachable next         limit
        Absent       Streaming Worker Unreachable no    next     limit    next         Unreachable may have run may have run
        Absent       Resuming  Worker Unreachable no    next     limit    next         Unreachable next         limit
        Connect      Opening   Worker Unreachable yes   next     limit    next         Unreachable next         limit
        Connect      Streaming Worker Unreachable no    next     limit    next         Unreachable may have run may have run
        Connect      Resuming  Worker Unreachable no    next     limit    next         Unreachable next         limit
        Disconnected Opening   Worker Unreachable yes   next     limit    failed twice Unreachable may have run may have run
        Disconnected Streaming Worker Unreachable no    next     limit    failed twice Unreachable may have run may have run
        Disconnected Resuming  Worker Unreachable no    next     limit    failed twice Unreachable may have run may have run
        WorkerLost   Opening   Worker Unreachable no    next     limit    failed twice Unreachable may have run may have run
        WorkerLost   Streaming Worker Unreachable no    next     limit    failed twice Unreachable may have run may have run
        WorkerLost   Resuming  Worker Unreachable no    next     limit    failed twice Unreachable may have run may have run
        Timeout      Opening   Worker Unreachable no    next     limit    next         Unreachable may have run may have run
        Timeout      Streaming Worker Unreachable no    next     limit    next         Unreachable may have run may have run
        Timeout      Resuming  Worker Unreachable no    next     limit    next         Unreachable may have run may have run
        Overloaded   Opening   Worker Overloaded  no    next     limit    next         Overloaded  next         limit
        Overloaded   Streaming Worker Overloaded  no    next     limit    next         Overloaded  may have run may have run
        Overloaded   Resuming  Worker Overloaded  no    next     limit    next         Overloaded  next         limit
        BadGateway   Opening   Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        BadGateway   Streaming Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        BadGateway   Resuming  Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        Rejected     Opening   Client Failed      no    rejected rejected rejected     Failed      rejected     rejected
        Rejected     Streaming Client Failed      no    rejected rejected rejected     Failed      rejected     rejected
        Rejected     Resuming  Client Failed      no    rejected rejected rejected     Failed      rejected     rejected
        EngineFailed Opening   Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        EngineFailed Streaming Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        EngineFailed Resuming  Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        ErrorEvent   Opening   Worker Broken      yes   next     limit    failed twice Failed      may have run may have run
        ErrorEvent   Streaming Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        ErrorEvent   Resuming  Worker Broken      no    next     limit    failed twice Failed      may have run may have run
        Local        Opening   Router NotSent     yes   next     limit    next         NotSent     next         limit
        Local        Streaming Router NotSent     no    next     limit    next         NotSent     may have run may have run
        Local        Resuming  Router NotSent     no    next     limit    next         NotSent     next         limit
    "#]]
    .assert_eq(&table);
}

/// Retries and resumes have limits of their own, and each attempt uses one up.
#[test]
fn a_request_is_sent_once_and_then_as_often_as_its_limits_allow() {
    for (retries, resumes) in [(0, 0), (2, 0), (0, 3), (2, 3)] {
        let mut attempts = Attempts::new(AttemptLimits { retries, resumes }, true);
        let mut sent = 1;
        while attempts.fail(A, FailureCause::Connect).1 == NextStep::TryNext {
            sent += 1;
        }
        assert_eq!(sent, 1 + retries);
        let mut attempts = Attempts::new(AttemptLimits { retries, resumes }, true);
        attempts.first_byte();
        let mut resumed = 0;
        while attempts.fail(A, FailureCause::Disconnected).1 == NextStep::TryNext {
            resumed += 1;
            if resumed % 2 == 0 {
                attempts.first_byte();
            }
            attempts.progressed(PROGRESS_TOKENS);
        }
        assert_eq!(resumed, resumes);
    }
}

/// However many attempts are left: workers that had the request and died, or say that they failed, are two at most. Those that could
/// not be reached or are full are not counted, wherever they come between.
#[test]
fn a_request_under_which_workers_fail_takes_two_of_them_at_most() {
    use FailureCause::{BadGateway, Connect, Disconnected, EngineFailed, ErrorEvent};
    use FailureCause::{Overloaded, Timeout, WorkerLost};
    let limits = AttemptLimits {
        retries: 1000,
        resumes: 1000,
    };
    let harmless = [Connect, Overloaded, Timeout, FailureCause::Absent];
    let deadly = [
        Disconnected,
        WorkerLost,
        EngineFailed,
        BadGateway,
        ErrorEvent,
    ];
    for first in deadly {
        for second in deadly {
            for begins in [false, true] {
                let mut attempts = Attempts::new(limits, true);
                let survive = |attempts: &mut Attempts| {
                    for cause in harmless {
                        assert_eq!(attempts.fail(A, cause).1, NextStep::TryNext);
                    }
                };
                survive(&mut attempts);
                if begins {
                    attempts.first_byte();
                }
                assert_eq!(attempts.fail(A, first).1, NextStep::TryNext);
                survive(&mut attempts);
                if begins {
                    attempts.first_byte();
                    attempts.progressed(PROGRESS_TOKENS - 1);
                }
                let (_, next) = attempts.fail(B, second);
                assert_eq!(
                    next,
                    NextStep::GiveUp(GiveUp::FailedTwice),
                    "{first:?} {second:?}"
                );
            }
        }
    }
    // One that has gone on with the answer for a while could run it: that it fails later is its own affair.
    let mut attempts = Attempts::new(limits, true);
    attempts.first_byte();
    for _ in 0..5 {
        assert_eq!(attempts.fail(A, Disconnected).1, NextStep::TryNext);
        attempts.first_byte();
        attempts.progressed(PROGRESS_TOKENS);
    }
}

#[test]
fn the_router_is_told_who_failed_and_how() {
    let mut arrival = Arrival::new(RequestId(1), 1);
    let limits = AttemptLimits {
        retries: 2,
        resumes: 2,
    };
    let mut attempts = Attempts::new(limits, true);
    attempts.fail(A, FailureCause::Connect);
    attempts.describe(&mut arrival);
    assert_eq!(arrival.failed, [A]);
    assert_eq!(arrival.last_failure, Some(Outcome::Unreachable));
    assert!(arrival.again && !arrival.resumed);
    attempts.first_byte();
    attempts.fail(B, FailureCause::Timeout);
    attempts.describe(&mut arrival);
    assert_eq!(arrival.failed, [A, B]);
    assert!(!arrival.again && arrival.resumed);
}

/// A worker that breaks off while it takes the prompt over may be in want of it: it is not ejected, and what it may have taken is
/// not taken by another.
#[test]
fn a_transfer_is_not_tried_twice_and_not_held_against_its_worker() {
    for cause in [
        FailureCause::Disconnected,
        FailureCause::EngineFailed,
        FailureCause::ErrorEvent,
    ] {
        let mut transfer = attempts(Phase::Opening, true, 2);
        transfer.begin_transfer();
        let gives_up = NextStep::GiveUp(GiveUp::MayHaveRun);
        assert_eq!(
            transfer.fail(A, cause),
            (Outcome::Failed, gives_up),
            "{cause:?}"
        );
    }
    let mut transfer = attempts(Phase::Opening, true, 2);
    transfer.begin_transfer();
    let refused = transfer.fail(A, FailureCause::Connect);
    assert_eq!(
        refused,
        (Outcome::Unreachable, NextStep::TryNext),
        "nothing was sent"
    );
    transfer.end_transfer();
    assert_eq!(
        transfer.fail(B, FailureCause::Disconnected).1,
        NextStep::TryNext
    );
}

#[test]
fn a_worker_is_asked_once_where_another_does_its_part() {
    let again = |once: bool| {
        let mut attempts = attempts(Phase::Opening, true, 2);
        if once {
            attempts.ask_once_each();
        }
        attempts.fail(A, FailureCause::Connect);
        let mut arrival = Arrival::new(RequestId(1), 1);
        attempts.describe(&mut arrival);
        arrival.again
    };
    assert!(again(false) && !again(true));
}
