//! Overload protection: who waits, who is refused, in every mode.

use super::*;

const MODES: [RouterMode; 5] = [
    RouterMode::RoundRobin,
    RouterMode::Random,
    RouterMode::LeastLoaded,
    RouterMode::PowerOfTwo,
    RouterMode::Kv,
];

fn protected(mode: RouterMode, workers: u64) -> Host {
    Host::new(RouterConfig {
        router_mode: mode,
        overload_protection: true,
        router_queue_max_wait_secs: 5.0,
        ..RouterConfig::default()
    })
    .workers(workers)
}

fn ask(id: u128) -> Arrival {
    Arrival::new(RequestId(id), 160)
}

/// What came of a run: who was sent when, who was refused when after how long, and how many wait at the end.
#[derive(Default)]
struct Run {
    sent: BTreeMap<u128, u64>,
    refused: BTreeMap<u128, (u64, RouteError)>,
}

impl Run {
    fn note(&mut self, host: &Host, now: u64) {
        for output in &host.out {
            match output {
                Output::Send(sent) => drop(self.sent.insert(sent.id.0, now)),
                Output::Refuse { id, error } => {
                    drop(self.refused.insert(id.0, (now, error.clone())));
                }
                _ => {}
            }
        }
    }
}

/// One worker that begins a request every 100 ms, one at a time, and ends it a second later; requests come every 33 ms,
/// three times what it takes. Each request waits at most a few seconds; the others are refused as they come.
#[test]
fn three_times_the_load_is_bounded_in_every_mode_and_refused_at_once() {
    for mode in MODES {
        let mut host = protected(mode, 1);
        let (mut run, mut begun) = (Run::default(), BTreeMap::new());
        for now in (0..60_000).step_by(1) {
            host.at(now);
            if now % 33 == 0 {
                host.arrive(ask(u128::from(now)));
                run.note(&host, now);
            }
            if now % 100 == 0 {
                let next = run.sent.keys().find(|id| !begun.contains_key(*id)).copied();
                if let Some(id) = next {
                    begun.insert(id, now);
                    host.first_token(id);
                    run.note(&host, now);
                }
            }
            if let Some(done) = begun.iter().find(|(_, at)| **at + 1000 == now) {
                let id = *done.0;
                host.finish(id);
                run.note(&host, now);
            }
            host.input(Input::Tick);
            run.note(&host, now);
        }
        let ttft = begun.iter().map(|(id, at)| at - *id as u64).max().unwrap();
        assert!(ttft < 6_000, "{mode:?}: {ttft} ms to a first token");
        let busy = begun.len();
        assert!(busy > 590, "{mode:?}: it is never idle: {busy} of 600");
        let late = run
            .refused
            .iter()
            .filter(|(id, (at, _))| **id as u64 != *at);
        assert_eq!(late.count(), 0, "{mode:?}: refusals are immediate");
        assert!(run.refused.len() > 1000, "{mode:?}");
        for (_, error) in run.refused.values() {
            let kvasir_types::Retry::After(wait) = error.retry() else {
                panic!("{error:?}");
            };
            assert!(
                error.is_overload() && (1_000..5_000).contains(&wait),
                "{error:?}"
            );
        }
    }
}

/// Two workers that begin whatever they have after 300 ms, as many as they have; 400 requests within 400 ms.
#[test]
fn a_burst_into_an_idle_fleet_is_let_in() {
    for mode in MODES {
        let mut host = protected(mode, 2);
        let mut run = Run::default();
        for now in 0..5_000u64 {
            host.at(now);
            if now < 400 {
                host.arrive(ask(u128::from(now)));
                run.note(&host, now);
            }
            let due = run.sent.iter().filter(|(_, at)| **at + 300 == now);
            let due: Vec<u128> = due.map(|(id, _)| *id).collect();
            for id in due {
                host.first_token(id);
                run.note(&host, now);
            }
        }
        assert_eq!(run.refused.len(), 0, "{mode:?}");
        let last = run.sent.values().max().copied();
        assert!(
            run.sent.len() == 400 && last < Some(2_500),
            "{mode:?}: {last:?}"
        );
    }
}

#[test]
fn the_deadline_refuses_who_was_let_in_and_then_waits_too_long() {
    let mut host = protected(RouterMode::RoundRobin, 1);
    for id in 0..8 {
        host.sent(ask(id));
    }
    host.arrive(ask(8));
    assert_eq!(host.router.queued().0, 1);
    let deadline = host.router.next_deadline().unwrap();
    assert!(deadline <= Time::from_millis(5_000));
    host.at(5_000).input(Input::Tick);
    let refused = matches!(
        host.out.as_slice(),
        [Output::Refuse {
            id: RequestId(8),
            error: RouteError::QueueTooSlow {
                limit_ms: 5_000,
                ..
            }
        }]
    );
    assert!(refused, "{:?}", host.out);
}

/// A worker that begins nothing keeps its eight; the others get the rest, in turn.
#[test]
fn a_slow_worker_is_passed_over() {
    let mut host = protected(RouterMode::RoundRobin, 2);
    let mut counts = [0; 3];
    for id in 0..100 {
        let worker = host.worker(ask(id));
        counts[worker as usize] += 1;
        if worker == 2 {
            host.first_token(id);
        }
    }
    assert_eq!(counts, [0, 8, 92]);
}

#[test]
fn another_attempt_of_a_request_is_not_judged_again() {
    for mode in MODES {
        let mut host = protected(mode, 2);
        for id in 0..16 {
            host.sent(ask(id));
        }
        host.arrive(ask(16));
        assert_eq!(host.router.queued().0, 1);
        let again = Arrival {
            failed: vec![WorkerId(1)],
            resumed: true,
            ..ask(17)
        };
        assert_eq!(host.worker(again), 2, "{mode:?}");
    }
}

/// A session waits for its worker, and goes to another one before it is refused.
#[test]
fn a_session_goes_elsewhere_when_its_worker_stays_full() {
    let mut host = protected(RouterMode::Kv, 2);
    let of_session = |id| Arrival {
        session: Some(kvasir_router::SessionRequest {
            id: "s".into(),
            action: kvasir_router::SessionAction::Bind {
                timeout: std::time::Duration::from_secs(300),
            },
        }),
        ..ask(id)
    };
    let bound = host.worker(of_session(0));
    for id in 1..8 {
        assert_eq!(host.worker(of_session(id)), bound);
    }
    host.arrive(of_session(8));
    assert_eq!(host.router.queued().0, 1);
    host.at(5_000).input(Input::Tick);
    let target = host.out.iter().find_map(|output| match output {
        Output::Send(sent) => Some(sent.target.worker.0),
        _ => None,
    });
    assert_eq!(target, Some(3 - bound), "{:?}", host.out);
}

/// Requests that only a full worker may serve wait for it, and hold up nobody else.
#[test]
fn constraints_that_nobody_can_meet_now_hold_up_only_those_who_have_them() {
    let mut host = protected(RouterMode::RoundRobin, 1);
    host.join(2, |spec| spec.taints = vec!["gpu".into()]);
    let bound = |id| {
        let mut arrival = ask(id);
        arrival.constraints.required_taints = vec!["gpu".into()];
        arrival
    };
    for id in 0..8 {
        assert_eq!(host.worker(bound(id)), 2);
    }
    host.arrive(bound(8));
    assert_eq!(host.router.queued().0, 1);
    for id in 100..500 {
        host.at((id - 90) as u64 * 10);
        assert_eq!(host.worker(ask(id)), 1);
        host.first_token(id);
    }
    host.arrive(bound(9));
    host.first_token(0);
    assert_eq!(host.released(), [8]);
}

#[test]
fn a_client_that_leaves_the_queue_makes_room_and_nothing_is_left() {
    let mut host = protected(RouterMode::Random, 1);
    for id in 0..8 {
        host.sent(ask(id));
    }
    for id in 8..12 {
        host.arrive(ask(id));
    }
    for id in 8..12 {
        host.finish(id);
    }
    for id in 0..8 {
        host.finish(id);
    }
    assert!(host.router.is_idle());
    host.sent(ask(20));
}

#[test]
fn without_it_nobody_waits_in_the_modes_that_do_not_weigh_load() {
    let mut host = Host::new(RouterConfig::default()).workers(1);
    for id in 0..500 {
        host.sent(ask(id));
    }
}
