//! Who may serve a request, and the error for each way to end with nobody.

use super::*;
use kvasir_router::{Exclusion, ExclusionReason, LoadReport, Pin};
use kvasir_types::{DpRank, Fault, Retry, TransportKind};

fn arrival() -> Arrival {
    Arrival::new(RequestId(1), 16)
}

fn pinned(worker: u64, rank: Option<u32>) -> Arrival {
    let mut arrival = arrival();
    arrival.pin = Pin {
        worker: Some(WorkerId(worker)),
        rank: rank.map(DpRank),
    };
    arrival
}

fn taints(names: &[&str]) -> Vec<Arc<str>> {
    names.iter().map(|n| Arc::from(*n)).collect()
}

/// A worker whose only rank says that it uses 90 of 100 blocks, with a threshold at 80 %.
fn make_busy(host: &mut Host, worker: u64) {
    host.join(worker, |spec| spec.kv_total_blocks = Some(100));
    host.input(Input::Load(LoadReport {
        rank: WorkerRank::new(worker, 0),
        kv_used_blocks: Some(90),
        ..LoadReport::default()
    }));
}

fn host_with_threshold() -> Host {
    Host::kv(|c| c.active_decode_blocks_threshold = Some(0.8))
}

#[test]
fn nobody_there_is_no_endpoints_and_our_fault() {
    let error = Host::kv(|_| {}).refused(arrival());
    assert_eq!(error, RouteError::NoEndpoints { known: 0, down: 0 });
    assert_eq!(error.fault(), Fault::Router);
    assert_eq!(error.retry(), Retry::After(RouteError::RETRY_AFTER_MS));
    assert!(!error.is_overload());
}

#[test]
fn a_prompt_needs_tokens_and_overrides_need_sense() {
    let mut host = Host::kv(|_| {}).workers(1);
    assert_eq!(
        host.refused(Arrival::new(RequestId(1), 0)),
        RouteError::EmptyPrompt
    );
    for value in [-0.1, f64::NAN, f64::INFINITY] {
        let mut bad = arrival();
        bad.overrides.router_temperature = Some(value);
        let error = host.refused(bad);
        assert!(matches!(
            error,
            RouteError::InvalidOverride {
                name: "router_temperature",
                ..
            }
        ));
        assert_eq!(
            (error.fault(), error.retry()),
            (Fault::Client, Retry::Never)
        );
    }
}

#[test]
fn a_request_that_can_be_sent_only_one_way_goes_to_workers_that_are_reached_so() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.join(2, |spec| spec.transport = TransportKind::Plane);
    let over = |transport| {
        let mut arrival = arrival();
        arrival.constraints.transport = Some(transport);
        arrival
    };
    for (transport, expected) in [(TransportKind::Http, 1), (TransportKind::Plane, 2)] {
        assert_eq!(host.worker(over(transport)), expected);
        host.finish(1);
        let excluded = host.router.explain(RequestId(1)).unwrap().excluded.clone();
        assert_eq!(excluded.named[0].1, ExclusionReason::Transport);
        let mut other = pinned(3 - expected, None);
        other.constraints.transport = Some(transport);
        let unknown = RouteError::PinnedWorkerUnknown(WorkerId(3 - expected));
        assert_eq!(host.refused(other), unknown);
    }
    host.input(Input::Left(WorkerId(2)));
    let nobody = RouteError::NoEndpoints { known: 0, down: 0 };
    assert_eq!(host.refused(over(TransportKind::Plane)), nobody);
}

#[test]
fn the_allow_list_keeps_others_out() {
    let mut host = Host::kv(|_| {}).workers(3);
    for id in 0..20 {
        let mut only = Arrival::new(RequestId(id), 16);
        only.constraints.allowed = Some(vec![WorkerId(2)]);
        assert_eq!(host.worker(only), 2);
    }
    let mut nobody = arrival();
    nobody.id = RequestId(99);
    nobody.constraints.allowed = Some(vec![WorkerId(9)]);
    assert_eq!(
        host.refused(nobody),
        RouteError::NoEndpoints { known: 3, down: 0 }
    );
}

#[test]
fn a_pin_must_be_allowed_known_and_complete() {
    let mut host = Host::kv(|_| {}).workers(2);
    host.join(3, |spec| (spec.first_rank, spec.ranks) = (DpRank(4), 2));
    let mut outside = pinned(1, None);
    outside.constraints.allowed = Some(vec![WorkerId(2)]);
    assert_eq!(
        host.refused(outside),
        RouteError::PinnedWorkerNotAllowed(WorkerId(1))
    );
    assert_eq!(
        host.refused(pinned(9, None)),
        RouteError::PinnedWorkerUnknown(WorkerId(9))
    );
    let missing = RouteError::PinnedRankMissing {
        worker: WorkerId(3),
        ranks: 2,
    };
    assert_eq!(host.refused(pinned(3, None)), missing);
    for rank in [3, 6] {
        let error = RouteError::PinnedRankUnknown {
            worker: WorkerId(3),
            rank: DpRank(rank),
            first: 4,
            end: 6,
        };
        assert_eq!(host.refused(pinned(3, Some(rank))), error);
    }
    assert_eq!(host.sent(pinned(3, Some(5))).target, WorkerRank::new(3, 5));
    host.finish(1);
    assert_eq!(
        host.worker(pinned(2, None)),
        2,
        "its only rank is filled in"
    );
}

#[test]
fn a_rank_without_a_worker_is_that_rank_of_any() {
    let mut host = Host::kv(|_| {}).workers(1);
    let mut pinned = arrival();
    pinned.pin.rank = Some(DpRank(0));
    assert_eq!(host.sent(pinned.clone()).target, WorkerRank::new(1, 0));
    host.finish(1);
    pinned.pin.rank = Some(DpRank(7));
    assert_eq!(
        host.refused(pinned),
        RouteError::NoEndpoints { known: 1, down: 0 }
    );
}

#[test]
fn every_required_taint_must_be_there() {
    let mut host = Host::kv(|_| {});
    host.join(1, |spec| spec.taints = taints(&["a"]));
    host.join(2, |spec| spec.taints = taints(&["a", "b"]));
    let mut both = arrival();
    both.constraints.required_taints = taints(&["b", "a"]);
    assert_eq!(host.worker(both.clone()), 2);
    host.finish(1);
    both.constraints.required_taints = taints(&["a", "c"]);
    assert_eq!(
        host.refused(both.clone()),
        RouteError::NoEndpoints { known: 2, down: 0 }
    );
    both.pin.worker = Some(WorkerId(1));
    assert_eq!(
        host.refused(both),
        RouteError::PinnedWorkerUnknown(WorkerId(1))
    );
}

#[test]
fn preferred_taints_lower_the_cost_and_a_pin_ignores_them() {
    let mut host = Host::kv(|_| {});
    host.join(1, |_| {});
    host.join(2, |spec| spec.taints = taints(&["near"]));
    let cost_of = |host: &mut Host, weight: f64| {
        let mut wish = arrival();
        wish.constraints.preferred_taints = vec![(Arc::from("near"), weight)];
        let worker = host.worker(wish);
        host.finish(1);
        let decision = host.router.explain(RequestId(1)).unwrap();
        (worker, decision.chosen().unwrap().terms.taint_factor)
    };
    let (worker, factor) = cost_of(&mut host, 0.5);
    assert_eq!(worker, 2);
    assert!((factor - (-0.5f64.tanh()).exp()).abs() < 1e-12);
    assert_eq!(
        cost_of(&mut host, -0.5),
        (1, 1.0),
        "a negative weight repels"
    );
    let (_, extreme) = cost_of(&mut host, 1e9);
    assert!(
        (extreme - (-1.0f64).exp()).abs() < 1e-12,
        "at most a factor of e"
    );
    let mut bound = pinned(2, None);
    bound.constraints.preferred_taints = vec![(Arc::from("near"), 1e9)];
    host.sent(bound);
    let decision = host.router.explain(RequestId(1)).unwrap();
    assert_eq!(decision.chosen().unwrap().terms.taint_factor, 1.0);
}

#[test]
fn an_adapter_narrows_but_never_to_nobody() {
    let mut host = Host::kv(|_| {}).workers(2);
    host.join(3, |spec| spec.loras = taints(&["poet"]));
    let mut with = arrival();
    with.constraints.lora = Some(Arc::from("poet"));
    for id in 0..10 {
        with.id = RequestId(id);
        assert_eq!(host.worker(with.clone()), 3);
    }
    with.constraints.lora = Some(Arc::from("nobody has it"));
    with.id = RequestId(77);
    host.sent(with.clone());
    with.id = RequestId(78);
    with.constraints.lora = Some(Arc::from("poet"));
    with.constraints.allowed = Some(vec![WorkerId(1)]);
    assert_eq!(host.worker(with), 1, "never widens");
}

#[test]
fn busy_workers_are_left_out_and_all_busy_is_overload() {
    let mut host = host_with_threshold().workers(1);
    make_busy(&mut host, 2);
    for id in 0..10 {
        assert_eq!(host.worker(Arrival::new(RequestId(id), 16)), 1);
    }
    let excluded = &host.router.explain(RequestId(9)).unwrap().excluded;
    let busy = (WorkerRank::new(2, 0), ExclusionReason::Busy);
    assert_eq!(
        *excluded,
        Exclusion {
            count: 1,
            named: vec![busy]
        }
    );
    let overloaded = RouteError::PinnedWorkerOverloaded(WorkerId(2));
    let mut pin = pinned(2, None);
    pin.id = RequestId(77);
    assert_eq!(host.refused(pin.clone()), overloaded);
    assert!(overloaded.is_overload());
    pin.constraints.allowed = Some(vec![WorkerId(1)]);
    let first = RouteError::PinnedWorkerNotAllowed(WorkerId(2));
    assert_eq!(
        host.refused(pin),
        first,
        "the allow-list comes before the busy set"
    );
    host.input(Input::Left(WorkerId(1)));
    let error = host.refused(Arrival::new(RequestId(78), 16));
    assert_eq!(
        error,
        RouteError::AllEligibleWorkersOverloaded {
            workers: 1,
            retry_after_ms: None
        }
    );
    assert_eq!(
        error.to_string(),
        "All workers are busy, please retry later"
    );
}

#[test]
fn workers_that_failed_a_request_are_not_tried_again() {
    let mut host = Host::kv(|_| {}).workers(2);
    let mut retry = arrival();
    retry.failed = vec![WorkerId(1)];
    assert_eq!(host.worker(retry.clone()), 2);
    host.finish(1);
    retry.failed = vec![WorkerId(1), WorkerId(2)];
    retry.last_failure = Some(Outcome::Overloaded);
    assert_eq!(
        host.refused(retry.clone()),
        RouteError::FailedWorkersOverloaded
    );
    retry.last_failure = Some(Outcome::Unreachable);
    assert_eq!(
        host.refused(retry.clone()),
        RouteError::FailedWorkersUnavailable
    );
    assert_eq!(RouteError::FailedWorkersUnavailable.fault(), Fault::Worker);
    retry.pin.worker = Some(WorkerId(2));
    assert_eq!(host.refused(retry), RouteError::FailedWorkersUnavailable);
}

#[test]
fn who_can_do_without_is_not_sent_to_a_worker_that_is_ejected() {
    let mut host = Host::kv(|_| {}).workers(1);
    let mut dispensable = arrival();
    dispensable.dispensable = true;
    assert_eq!(host.worker(dispensable.clone()), 1);
    host.input(Input::Finished {
        id: RequestId(1),
        on: None,
        outcome: Outcome::Unreachable,
    });
    assert_eq!(
        host.refused(dispensable),
        RouteError::FailedWorkersUnavailable
    );
    assert_eq!(host.worker(arrival()), 1, "others have nobody else");
}

#[test]
fn a_retry_frees_the_attempt_that_is_known_to_have_failed_and_no_other() {
    let mut host = Host::kv(|_| {}).workers(2);
    let first = host.worker(prompt(1, &words(1, 4)));
    assert_eq!(
        host.refused(prompt(1, &words(1, 4))),
        RouteError::DuplicateRequest
    );
    let mut retry = prompt(1, &words(1, 4));
    retry.failed = vec![WorkerId(first)];
    let second = host.worker(retry);
    assert_ne!(first, second);
    assert_eq!((host.load(first), host.load(second)), ((0, 0), (64, 4)));
    let late = Input::Finished {
        id: RequestId(1),
        on: Some(WorkerRank::new(first, 0)),
        outcome: Outcome::Failed,
    };
    host.input(late);
    assert_eq!(
        host.load(second),
        (64, 4),
        "the end of the first attempt frees only that"
    );
}

#[test]
fn each_rank_is_a_candidate() {
    let mut host = Host::kv(|_| {});
    host.join(1, |spec| (spec.first_rank, spec.ranks) = (DpRank(2), 3));
    let mut seen = std::collections::BTreeSet::new();
    for id in 0..3 {
        seen.insert(host.sent(prompt(id, &words(id as u64, 8))).target);
    }
    let all: Vec<_> = (2..5).map(|rank| WorkerRank::new(1, rank)).collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), all);
}

#[test]
fn a_worker_on_its_way_out_ends_what_it_has_and_gets_nothing_new() {
    let mut host = Host::kv(|_| {}).workers(2);
    let first = host.sent(arrival()).target;
    host.input(Input::Draining(first.worker));
    for id in 2..8 {
        let target = host.sent(Arrival::new(RequestId(id), 16)).target;
        assert_ne!(target.worker, first.worker);
        host.finish(id);
    }
    assert_eq!(host.router.load(first).unwrap().requests, 1);
    let excluded = host.router.explain(RequestId(7)).unwrap().excluded.clone();
    assert_eq!(excluded.named, [(first, ExclusionReason::Draining)]);
    let mut pinned = pinned(first.worker.0, Some(0));
    pinned.id = RequestId(8);
    let error = host.refused(pinned);
    assert_eq!(error, RouteError::PinnedWorkerUnknown(first.worker));
    host.finish(1);
    assert_eq!(host.router.load(first).unwrap().requests, 0);
    // News about it leaves the mark; coming back lifts it.
    host.input(Input::Updated(WorkerSpec::new(first.worker)));
    assert!(
        host.router
            .fleet()
            .member(first.worker)
            .unwrap()
            .is_draining()
    );
    host.input(Input::Joined(WorkerSpec::new(first.worker)));
    assert!(
        !host
            .router
            .fleet()
            .member(first.worker)
            .unwrap()
            .is_draining()
    );
}
