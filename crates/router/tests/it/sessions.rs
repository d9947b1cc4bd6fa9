//! Sessions: `session_control` in its four forms, and the session header.

use std::time::Duration;

use super::*;
use kvasir_router::{Observation, SessionAction, SessionCommand, SessionEvent, SessionRequest};

const TIMEOUT: Duration = Duration::from_secs(300);

fn ask(id: u128, session: &str, action: SessionAction) -> Arrival {
    let mut arrival = Arrival::new(RequestId(id), 160);
    arrival.session = Some(SessionRequest {
        id: Arc::from(session),
        action,
    });
    arrival
}

fn bind(id: u128, session: &str) -> Arrival {
    ask(id, session, SessionAction::Bind { timeout: TIMEOUT })
}

fn follow(id: u128, session: &str) -> Arrival {
    ask(id, session, SessionAction::Use)
}

/// Binds session `s` to a worker and makes that worker the dearest of all.
fn bound_and_loaded(host: &mut Host) -> u64 {
    let worker = host.worker(bind(1, "s"));
    let mut load = prompt(900, &words(9, 100));
    load.pin.worker = Some(WorkerId(worker));
    host.sent(load);
    worker
}

#[test]
fn a_bound_session_bypasses_the_cost() {
    let mut host = Host::kv(|_| {}).workers(4);
    let worker = bound_and_loaded(&mut host);
    let mut elsewhere = follow(2, "s");
    elsewhere.overlap = held(&[(worker % 4 + 1, 10)]);
    assert_eq!(host.worker(elsewhere), worker);
    let decision = host.router.explain(RequestId(2)).unwrap();
    assert!(matches!(
        decision.winner,
        Some((_, kvasir_router::Reason::Session))
    ));
    assert_ne!(host.worker(follow(3, "another")), worker);
    assert_eq!(host.router.sessions(), 1, "use alone binds nothing");
}

/// Timeout 300 s: each use restarts it.
#[test]
fn the_timeout_slides() {
    let mut host = Host::kv(|_| {}).workers(4);
    let worker = bound_and_loaded(&mut host);
    for (at, id) in [(299, 2), (598, 3), (897, 4)] {
        assert_eq!(
            host.at(at * 1000).worker(follow(id, "s")),
            worker,
            "at {at} s"
        );
    }
    host.at(1_196_999).input(Input::Tick);
    assert_eq!(host.router.sessions(), 1);
    let due = host.router.next_deadline();
    assert!(due.is_some_and(|due| due <= Time::from_millis(1_197_000)));
    host.at(1_197_000).input(Input::Tick);
    assert_eq!(host.router.sessions(), 0);
}

#[test]
fn a_worker_named_by_the_request_beats_the_session_and_may_take_its_rank() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.join(2, |spec| spec.ranks = 3);
    let mut first = bind(1, "s");
    first.pin = kvasir_router::Pin {
        worker: Some(WorkerId(2)),
        rank: Some(kvasir_types::DpRank(2)),
    };
    host.sent(first);
    let mut other = follow(2, "s");
    other.pin.worker = Some(WorkerId(1));
    assert_eq!(host.worker(other), 1);
    let mut same = follow(3, "s");
    same.pin.worker = Some(WorkerId(2));
    assert_eq!(host.sent(same).target, WorkerRank::new(2, 2));
    let mut rank_only = follow(4, "s");
    rank_only.pin.rank = Some(kvasir_types::DpRank(0));
    host.sent(rank_only);
    let decision = host.router.explain(RequestId(4)).unwrap();
    assert!(
        !matches!(decision.winner, Some((_, kvasir_router::Reason::Session))),
        "a rank alone disables affinity"
    );
}

#[test]
fn a_dead_worker_ends_its_sessions() {
    let mut host = Host::kv(|_| {}).workers(2);
    let worker = host.worker(bind(1, "s"));
    host.input(Input::Left(WorkerId(worker)));
    assert_ne!(host.worker(follow(2, "s")), worker);
    assert_eq!(host.router.sessions(), 0);
    host.worker(bind(3, "t"));
    let mut retry = follow(4, "t");
    retry.failed = vec![WorkerId(3 - worker)];
    assert_eq!(host.refused(retry), RouteError::FailedWorkersUnavailable);
    assert_eq!(
        host.router.sessions(),
        0,
        "a worker that failed the request loses its session"
    );
}

#[test]
fn an_allow_list_outweighs_a_session() {
    let mut host = Host::kv(|_| {}).workers(2);
    let worker = host.worker(bind(1, "s"));
    let mut listed = follow(2, "s");
    listed.constraints.allowed = Some(vec![WorkerId(3 - worker)]);
    assert_eq!(host.worker(listed), 3 - worker);
    assert_eq!(host.router.sessions(), 1);
}

#[test]
fn open_binds_when_the_engine_has_opened_it_and_close_unbinds_at_once() {
    let mut host = Host::kv(|_| {}).workers(2);
    let open = |id| ask(id, "s", SessionAction::Open { timeout: TIMEOUT });
    let sent = host.sent(open(1));
    let step = SessionCommand::Open {
        id: Arc::from("s"),
        timeout: TIMEOUT,
    };
    assert_eq!(sent.session, step);
    assert_eq!(host.router.sessions(), 0, "not before the engine says so");
    host.input(Input::Session(SessionEvent::Opened {
        id: Arc::from("s"),
        target: sent.target,
        timeout: TIMEOUT,
    }));
    assert_eq!(host.router.sessions(), 1);
    let again = host.sent(open(2));
    assert_eq!(
        (again.target, again.session),
        (sent.target, SessionCommand::None)
    );
    let closing = host.sent(ask(3, "s", SessionAction::Close));
    assert_eq!(
        closing.target, sent.target,
        "the last turn still goes there"
    );
    assert_eq!(
        closing.session,
        SessionCommand::Close { id: Arc::from("s") }
    );
    assert_eq!(host.router.sessions(), 0);
}

#[test]
fn only_engine_sessions_are_closed_in_the_engine_when_they_expire() {
    let mut host = Host::kv(|_| {}).workers(1);
    let target = WorkerRank::new(1, 0);
    host.sent(bind(1, "router only"));
    host.input(Input::Session(SessionEvent::Opened {
        id: Arc::from("in engine"),
        target,
        timeout: TIMEOUT,
    }));
    host.finish(1);
    let out = host.at(300_000).input(Input::Tick);
    let id = Arc::from("in engine");
    assert_eq!(out, [Output::CloseSession { id, target }]);
    assert_eq!(host.router.sessions(), 0);
}

#[test]
fn there_is_a_bound_and_the_one_that_would_expire_first_makes_room() {
    let mut host = Host::kv(|c| c.router_max_sessions = 2).workers(1);
    for (id, session, millis) in [(1, "a", 0), (2, "b", 10), (3, "a", 20)] {
        host.at(millis).sent(bind(id, session));
    }
    host.at(30).arrive(bind(4, "c"));
    let evicted = Observation::SessionEvicted { id: Arc::from("b") };
    assert!(
        host.out.contains(&Output::Observe(evicted)),
        "{:?}",
        host.out
    );
    assert_eq!(host.router.sessions(), 2);
}

#[test]
fn sessions_are_a_matter_of_kv_mode() {
    let mut host = Host::new(RouterConfig::default()).workers(2);
    let workers = [1, 2, 3, 4].map(|id| host.worker(bind(id, "s")));
    assert_eq!(workers, [1, 2, 1, 2]);
    assert_eq!(host.router.sessions(), 0);
}

fn header_host(ttl: Option<u64>) -> Host {
    Host::kv(|c| c.router_session_affinity_ttl_secs = ttl).workers(4)
}

fn header(id: u128) -> Arrival {
    ask(id, "h", SessionAction::Header)
}

#[test]
fn the_header_does_nothing_without_a_time_to_live() {
    let mut host = header_host(None);
    host.sent(header(1));
    host.first_token(1);
    assert_eq!(host.router.sessions(), 0);
}

#[test]
fn the_header_binds_after_the_first_dispatch_that_succeeds() {
    let mut host = header_host(Some(60));
    let worker = host.worker(header(1));
    assert_eq!(host.router.sessions(), 0);
    let out = host.first_token(1).to_vec();
    let bound = Observation::SessionBound {
        id: Arc::from("h"),
        target: WorkerRank::new(worker, 0),
        since: Time::ZERO,
    };
    assert_eq!(out, [Output::Observe(bound)]);
    for id in 2..6 {
        assert_eq!(host.worker(header(id)), worker);
    }
}

/// Idle time 60 s starts when the last request ends, not when it was sent.
#[test]
fn requests_hold_the_header_session() {
    let mut host = header_host(Some(60));
    let worker = host.worker(header(1));
    host.first_token(1);
    host.sent(header(2));
    host.at(50_000).finish(1);
    host.at(200_000).finish(2);
    assert_eq!(
        host.router.next_deadline(),
        Some(Time::from_millis(260_000))
    );
    host.at(259_999).input(Input::Tick);
    assert_eq!(host.worker(header(3)), worker);
    host.finish(3);
    host.at(319_999).input(Input::Tick);
    assert_eq!(host.router.sessions(), 0);
}

#[test]
fn a_failure_invalidates_the_header_session() {
    let mut host = header_host(Some(60));
    let worker = host.worker(header(1));
    host.first_token(1);
    host.input(Input::Finished {
        id: RequestId(1),
        on: Some(WorkerRank::new(worker, 0)),
        outcome: Outcome::Failed,
    });
    assert_eq!(host.router.sessions(), 0);
    host.sent(header(2));
    host.input(Input::Finished {
        id: RequestId(2),
        on: None,
        outcome: Outcome::Failed,
    });
    assert_eq!(
        host.router.sessions(),
        0,
        "a first dispatch that fails binds nothing"
    );
}

/// One waits for its session's worker, which is asked to go: it is free to go elsewhere, as are those after it.
#[test]
fn a_session_moves_when_its_worker_is_on_its_way_out() {
    let mut host = Host::kv(|c| c.router_queue_threshold = Some(2.0));
    for id in 1..=2 {
        host.join(id, |spec| spec.max_num_batched_tokens = Some(100));
    }
    let worker = host.worker(bind(1, "s"));
    for (id, on) in [(2, 1), (3, 2)] {
        let mut full = Arrival::new(RequestId(id), 1000);
        full.pin.worker = Some(WorkerId(on));
        host.sent(full);
    }
    let parked = host.arrive(follow(4, "s"));
    assert!(matches!(parked, [Output::Queued { .. }]), "{parked:?}");
    host.input(Input::Draining(WorkerId(worker)));
    let other = 3 - worker;
    let out = host.first_token(1 + other as u128);
    let target = out.iter().find_map(|o| match o {
        Output::Send(sent) => Some((sent.id, sent.target.worker.0)),
        _ => None,
    });
    assert_eq!(target, Some((RequestId(4), other)), "{out:?}");
    assert_eq!(host.worker(follow(5, "s")), other);
    assert_eq!(host.router.sessions(), 0);
}

/// What the process before had bound goes on; what is bound here since is not undone.
#[test]
fn inherited_sessions_are_followed_unless_they_are_bound_anew() {
    let mut host = Host::kv(|_| {}).workers(4);
    let inherited = |id: &str, worker| {
        Input::Session(SessionEvent::Inherited {
            id: id.into(),
            target: WorkerRank::new(worker, 0),
            in_engine: false,
            by_header: false,
            timeout: TIMEOUT,
        })
    };
    host.input(inherited("s", 3));
    assert_eq!(host.worker(follow(1, "s")), 3);
    host.input(inherited("s", 2));
    assert_eq!(host.worker(follow(2, "s")), 3, "it stays");
    host.input(inherited("gone", 99));
    assert_eq!(host.router.sessions(), 1, "nobody has that rank");
    let row = &host.router.session_rows(9)[0];
    assert_eq!(
        (row.idle, row.in_engine, row.by_header),
        (TIMEOUT, false, false)
    );
}
