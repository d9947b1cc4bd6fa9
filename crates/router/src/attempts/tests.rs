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
        NextStep::GiveUp(GiveUp::Limit) => "limit",
    }
}

/// What follows when one attempt is left and when none is, for requests that are idempotent and for others. `next`: another worker
/// is asked; else why none is. `again`: the same worker may be chosen if no other is left.
#[test]
fn what_follows_each_failure() {
    let columns = |cells: [&str; 9]| {
        let [
            cause,
            phase,
            fault,
            outcome,
            again,
            one,
            none,
            other_one,
            other_none,
        ] = cells;
        format!(
            "{cause:<13}{phase:<10}{fault:<7}{outcome:<12}{again:<6}{one:<9}{none:<9}{other_one:<13}{other_none}\n"
        )
    };
    let mut table = columns(["", "", "", "", "", "idempotent", "", "not idempotent", ""]);
    table += &columns([
        "cause", "phase", "fault", "outcome", "again", "one left", "none", "one left", "none",
    ]);
    for cause in FailureCause::ALL {
        for phase in [Phase::Opening, Phase::Streaming, Phase::Resuming] {
            let next = |idempotent, left| {
                let mut attempts = attempts(phase, idempotent, left);
                let expected = attempts.next_step(cause);
                let (outcome, next) = attempts.fail(A, cause);
                assert_eq!(next, expected);
                assert_eq!(outcome, Outcome::of_failure(cause, phase));
                shown(next)
            };
            let mut failed = attempts(phase, true, 1);
            let (outcome, _) = failed.fail(A, cause);
            table += &columns([
                &format!("{cause:?}"),
                &format!("{phase:?}"),
                &format!("{:?}", cause.fault()),
                &format!("{outcome:?}"),
                if failed.again { "yes" } else { "no" },
                next(true, 1),
                next(true, 0),
                next(false, 1),
                next(false, 0),
            ]);
        }
    }
    expect![[r#"
                                                        idempotent         not idempotent
        cause        phase     fault  outcome     again one left none     one left     none
        Absent       Opening   Worker Unreachable no    next     limit    next         limit
        Absent       Streaming Worker Unreachable no    next     limit    may have run may have run
        Absent       Resuming  Worker Unreachable no    next     limit    next         limit
        Connect      Opening   Worker Unreachable yes   next     limit    next         limit
        Connect      Streaming Worker Unreachable no    next     limit    may have run may have run
        Connect      Resuming  Worker Unreachable no    next     limit    next         limit
        Disconnected Opening   Worker Unreachable yes   next     limit    may have run may have run
        Disconnected Streaming Worker Unreachable no    next     limit    may have run may have run
        Disconnected Resuming  Worker Unreachable no    next     limit    may have run may have run
        WorkerLost   Opening   Worker Unreachable no    next     limit    may have run may have run
        WorkerLost   Streaming Worker Unreachable no    next     limit    may have run may have run
        WorkerLost   Resuming  Worker Unreachable no    next     limit    may have run may have run
        Timeout      Opening   Worker Unreachable no    next     limit    may have run may have run
        Timeout      Streaming Worker Unreachable no    next     limit    may have run may have run
        Timeout      Resuming  Worker Unreachable no    next     limit    may have run may have run
        Overloaded   Opening   Worker Overloaded  no    next     limit    next         limit
        Overloaded   Streaming Worker Overloaded  no    next     limit    may have run may have run
        Overloaded   Resuming  Worker Overloaded  no    next     limit    next         limit
        BadGateway   Opening   Worker Overloaded  no    next     limit    may have run may have run
        BadGateway   Streaming Worker Overloaded  no    next     limit    may have run may have run
        BadGateway   Resuming  Worker Overloaded  no    next     limit    may have run may have run
        Rejected     Opening   Client Failed      no    rejected rejected rejected     rejected
        Rejected     Streaming Client Failed      no    rejected rejected rejected     rejected
        Rejected     Resuming  Client Failed      no    rejected rejected rejected     rejected
        EngineFailed Opening   Worker Broken      no    rejected rejected rejected     rejected
        EngineFailed Streaming Worker Broken      no    rejected rejected rejected     rejected
        EngineFailed Resuming  Worker Broken      no    rejected rejected rejected     rejected
        ErrorEvent   Opening   Worker Unreachable yes   next     limit    may have run may have run
        ErrorEvent   Streaming Worker Failed      no    next     limit    may have run may have run
        ErrorEvent   Resuming  Worker Unreachable no    next     limit    may have run may have run
        Local        Opening   Router NotSent     yes   next     limit    next         limit
        Local        Streaming Router NotSent     no    next     limit    may have run may have run
        Local        Resuming  Router NotSent     no    next     limit    next         limit
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
        }
        assert_eq!(resumed, resumes);
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
