//! Workers that fail: ejected, readmitted, and tried all the same when nobody else is left.

use std::time::Duration;

use super::*;
use kvasir_router::{BROKEN_MAX, ERRORS_MAX, Observation, Pin, Probe, Reason, TokenProbe};

/// A request pinned to a worker, so that it goes there whatever is held against it.
fn pinned(id: u128, worker: u64) -> Arrival {
    Arrival {
        pin: Pin {
            worker: Some(WorkerId(worker)),
            rank: None,
        },
        ..Arrival::new(RequestId(id), 16)
    }
}

/// A request that ends so on this worker.
fn ends(host: &mut Host, id: u128, worker: u64, outcome: Outcome) {
    host.sent(pinned(id, worker));
    host.input(Input::Finished {
        id: RequestId(id),
        on: Some(WorkerRank::new(worker, 0)),
        outcome,
    });
}

fn probe(host: &mut Host, worker: u64, healthy: bool) {
    let (worker, asked) = (WorkerId(worker), host.now);
    host.input(Input::Probed(Probe {
        worker,
        asked,
        healthy,
    }));
}

fn is_down(host: &Host, worker: u64) -> bool {
    let member = host.router.fleet().member(WorkerId(worker)).unwrap();
    member.ejected_until().is_some()
}

/// Where the next requests go; each ends at once and well.
fn served_by(host: &mut Host, times: u128) -> std::collections::BTreeSet<u64> {
    let ids = 1000..1000 + times;
    ids.map(|id| {
        let worker = host.worker(Arrival::new(RequestId(id), 16));
        host.finish(id);
        worker
    })
    .collect()
}

/// What this machine cannot do is not held against a worker, however often; nor does it forgive one.
#[test]
fn what_was_never_sent_changes_nothing_about_its_worker() {
    let mut host = Host::kv(|_| {}).workers(2);
    for id in 1..20 {
        ends(&mut host, id, 1, Outcome::NotSent);
        assert!(!is_down(&host, 1));
    }
    ends(&mut host, 20, 2, Outcome::Unreachable);
    let until = |host: &Host| {
        host.router
            .fleet()
            .member(WorkerId(2))
            .unwrap()
            .ejected_until()
    };
    let ejected = until(&host);
    assert!(ejected.is_some());
    ends(&mut host, 21, 2, Outcome::NotSent);
    assert_eq!(until(&host), ejected);
}

#[test]
fn a_worker_that_fails_is_ejected_shortly_and_not_from_pins() {
    let mut host = Host::kv(|_| {}).workers(2);
    ends(&mut host, 1, 1, Outcome::Unreachable);
    assert_eq!(served_by(&mut host, 20), [2].into());
    let due = host.router.next_deadline().unwrap();
    assert!(due <= Time::from_millis(250), "{due:?}");
    host.sent(pinned(2, 1));
    host.now = due;
    let back = Output::Observe(Observation::Down {
        worker: WorkerId(1),
        down: false,
    });
    assert!(host.input(Input::Tick).contains(&back));
    assert!(!is_down(&host, 1));
    ends(&mut host, 3, 1, Outcome::Unreachable);
    host.join(1, |_| {});
    assert!(!is_down(&host, 1), "discovery restores it");
    let mut never = Host::kv(|c| c.runtime_inhibited_duration_secs = 0.0).workers(2);
    ends(&mut never, 1, 1, Outcome::Unreachable);
    assert!(!is_down(&never, 1));
}

#[test]
fn a_prompt_that_is_likely_computed_frees_its_load_and_forgives_nothing() {
    let mut host = Host::kv(|_| {}).workers(2);
    ends(&mut host, 1, 1, Outcome::Unreachable);
    host.sent(pinned(2, 1));
    host.input(Input::Prefilled { id: RequestId(2) });
    assert!(is_down(&host, 1), "nothing came of it");
    let mut loads = Vec::new();
    let router = &mut host.router;
    router.potential_loads(host.now, 0, &Overlap::none(), &[], &mut loads);
    assert!(
        loads.iter().all(|load| load.potential_prefill_tokens == 0),
        "{loads:?}"
    );
    host.input(Input::FirstToken { id: RequestId(2) });
    assert!(!is_down(&host, 1), "it serves");
}

#[test]
fn a_success_or_a_probe_brings_a_worker_back_at_once() {
    let mut host = Host::kv(|_| {}).workers(2);
    ends(&mut host, 1, 1, Outcome::Unreachable);
    probe(&mut host, 1, true);
    assert!(!is_down(&host, 1));
    ends(&mut host, 2, 1, Outcome::Unreachable);
    host.sent(pinned(3, 1));
    host.first_token(3);
    assert!(!is_down(&host, 1), "it serves");
}

#[test]
fn when_all_are_ejected_the_least_bad_one_is_tried() {
    let mut host = Host::kv(|_| {}).workers(3);
    for worker in [2, 3, 1] {
        let millis = u64::try_from((host.now - Time::ZERO).as_millis()).unwrap();
        host.at(millis + 100);
        ends(&mut host, u128::from(worker), worker, Outcome::Unreachable);
    }
    assert!((1..=3).all(|worker| is_down(&host, worker)));
    let mut request = Arrival::new(RequestId(50), 16);
    assert_eq!(host.sent(request.clone()).target.worker, WorkerId(2));
    let decision = host.router.explain(RequestId(50)).unwrap();
    assert_eq!(decision.winner.unwrap().1, Reason::LastResort);
    // It fails there, too: the others first, and it only then.
    let mut order = Vec::new();
    for last in [2, 3, 1] {
        host.input(Input::Finished {
            id: RequestId(50),
            on: Some(WorkerRank::new(last, 0)),
            outcome: Outcome::Unreachable,
        });
        request.failed.push(WorkerId(last));
        request.last_failure = Some(Outcome::Unreachable);
        request.again = true;
        order.push(host.sent(request.clone()).target.worker.0);
    }
    assert_eq!(order, [3, 1, 2]);
    host.input(Input::Finished {
        id: RequestId(50),
        on: None,
        outcome: Outcome::Cancelled,
    });
    request.again = false;
    assert_eq!(host.refused(request), RouteError::FailedWorkersUnavailable);
}

#[test]
fn one_worker_alone_is_never_refused_for_its_failures() {
    let mut host = Host::kv(|_| {}).workers(1);
    for id in 1..20 {
        let sent = host.sent(Arrival::new(RequestId(id), 16));
        host.input(Input::Finished {
            id: RequestId(id),
            on: Some(sent.target),
            outcome: Outcome::Unreachable,
        });
    }
    probe(&mut host, 1, false);
    assert_eq!(served_by(&mut host, 3), [1].into());
}

#[test]
fn a_sick_worker_gets_nothing_until_it_is_well() {
    let mut host = Host::kv(|_| {}).workers(2);
    probe(&mut host, 1, false);
    host.now += Duration::from_secs(3600);
    host.input(Input::Tick);
    assert_eq!(served_by(&mut host, 20), [2].into());
    ends(&mut host, 1, 1, Outcome::Completed { output_tokens: 1 });
    assert!(is_down(&host, 1), "its probes have the last word");
    probe(&mut host, 1, true);
    assert_eq!(served_by(&mut host, 40), [1, 2].into());
}

fn generated(host: &mut Host, worker: u64, supported: bool) {
    let (worker, asked) = (WorkerId(worker), host.now);
    host.input(Input::Generated(TokenProbe {
        worker,
        asked,
        supported,
    }));
}

/// An engine that is broken answers at once, so it looks idle: two answers are enough, and only a token brings it back.
#[test]
fn a_broken_engine_gets_nothing_until_it_generates() {
    let mut host = Host::kv(|_| {}).workers(3);
    for id in 0..u128::from(BROKEN_MAX) {
        assert!(!is_down(&host, 1));
        ends(&mut host, id, 1, Outcome::Broken);
    }
    assert!(is_down(&host, 1), "though nobody has served yet");
    assert!(host.router.awaits_token(WorkerId(1)));
    probe(&mut host, 1, true);
    host.now += Duration::from_secs(3600);
    host.input(Input::Tick);
    assert_eq!(served_by(&mut host, 20), [2, 3].into());
    generated(&mut host, 1, true);
    assert!(!is_down(&host, 1) && !host.router.awaits_token(WorkerId(1)));
    // One answer is enough if it comes faster than any before.
    host.sent(pinned(50, 1));
    host.now += Duration::from_millis(40);
    host.first_token(50);
    host.finish(50);
    host.sent(pinned(51, 1));
    host.now += Duration::from_millis(2);
    host.input(Input::Finished {
        id: RequestId(51),
        on: None,
        outcome: Outcome::Broken,
    });
    assert!(host.router.awaits_token(WorkerId(1)));
    // It has no route that generates: a span that ends has to do.
    generated(&mut host, 1, false);
    assert!(is_down(&host, 1) && !host.router.awaits_token(WorkerId(1)));
    host.now = host.router.next_deadline().unwrap();
    host.input(Input::Tick);
    assert!(!is_down(&host, 1));
}

/// Nobody can ask a worker on a request plane for a token.
#[test]
fn workers_on_a_plane_are_ejected_for_spans() {
    let mut host = Host::kv(|_| {});
    for worker in [1, 2] {
        host.join(worker, |spec| {
            spec.transport = kvasir_types::TransportKind::Plane
        });
    }
    for id in 0..u128::from(ERRORS_MAX) {
        assert!(!is_down(&host, 1));
        let well = Outcome::Completed { output_tokens: 1 };
        ends(&mut host, 100 + id, 2, well);
        ends(&mut host, id, 1, Outcome::Broken);
    }
    assert!(is_down(&host, 1) && !host.router.awaits_token(WorkerId(1)));
}

#[test]
fn one_that_is_full_again_and_again_while_others_serve_is_ejected() {
    let outcome = Outcome::Overloaded;
    let mut host = Host::kv(|_| {}).workers(2);
    for id in 0..u128::from(ERRORS_MAX) {
        assert!(!is_down(&host, 1));
        ends(
            &mut host,
            100 + id,
            2,
            Outcome::Completed { output_tokens: 1 },
        );
        ends(&mut host, id, 1, outcome);
    }
    assert!(is_down(&host, 1));
    assert_eq!(served_by(&mut host, 20), [2].into());
    probe(&mut host, 1, true);
    assert!(
        is_down(&host, 1),
        "a probe says nothing about requests that fail"
    );
    // Back, it has one request to show that it is well.
    host.now = host.router.next_deadline().unwrap();
    host.input(Input::Tick);
    ends(&mut host, 200, 1, outcome);
    assert!(is_down(&host, 1));
    let span = host.router.next_deadline().unwrap() - host.now;
    assert!(span > Duration::from_millis(400), "{span:?}");
}

#[test]
fn errors_of_every_engine_leave_the_last_one() {
    let mut host = Host::kv(|_| {}).workers(3);
    for id in 0..60 {
        let target = host.sent(Arrival::new(RequestId(id), 16)).target;
        host.input(Input::Finished {
            id: RequestId(id),
            on: Some(target),
            outcome: Outcome::Broken,
        });
    }
    let up = (1..=3).filter(|worker| !is_down(&host, *worker)).count();
    assert_eq!(up, 1);
}

#[test]
fn a_fleet_that_is_full_takes_nobody_down() {
    let outcome = Outcome::Overloaded;
    let mut host = Host::kv(|_| {}).workers(3);
    for id in 0..60 {
        let target = host.sent(Arrival::new(RequestId(id), 16)).target;
        host.input(Input::Finished {
            id: RequestId(id),
            on: Some(target),
            outcome,
        });
    }
    assert!((1..=3).all(|worker| !is_down(&host, worker)));
    // While others serve, all but the last may go.
    for id in 100..160 {
        ends(
            &mut host,
            1000 + id,
            2,
            Outcome::Completed { output_tokens: 1 },
        );
        ends(&mut host, 2000 + id, 1, outcome);
        ends(&mut host, 3000 + id, 3, outcome);
    }
    assert_eq!(
        [1, 2, 3].map(|worker| is_down(&host, worker)),
        [true, false, true]
    );
    for id in 0..20 {
        ends(&mut host, 5000 + id, 2, outcome);
    }
    assert!(!is_down(&host, 2), "never the last");
}
