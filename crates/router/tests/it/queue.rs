//! The queue: who waits, in which order they go, what bounds it. Batches of 100 tokens, threshold 2.

use super::*;
use kvasir_router::{Gate, LimitKind, PolicyClass, PolicyConfig, QueuePolicy};
use kvasir_types::Fault;

/// `workers` workers that are closed above 200 waiting prompt tokens.
fn host(workers: u64, change: impl FnOnce(&mut RouterConfig)) -> Host {
    let mut host = Host::kv(|c| {
        c.router_queue_threshold = Some(2.0);
        change(c);
    });
    for id in 1..=workers {
        host.join(id, |spec| spec.max_num_batched_tokens = Some(100));
    }
    host
}

fn ask(id: u128, tokens: u32) -> Arrival {
    Arrival::new(RequestId(id), tokens)
}

fn pinned(id: u128, tokens: u32, worker: u64) -> Arrival {
    let mut arrival = ask(id, tokens);
    arrival.pin.worker = Some(WorkerId(worker));
    arrival
}

/// Arrives and must be parked.
fn park(host: &mut Host, arrival: Arrival) {
    let id = arrival.id;
    let out = host.arrive(arrival);
    assert!(
        matches!(out, [Output::Queued { id: of, .. }] if *of == id),
        "{out:?}"
    );
}

#[test]
fn the_default_threshold_is_the_seeds() {
    assert_eq!(RouterConfig::default().router_queue_threshold, Some(16.0));
}

#[test]
fn a_request_waits_only_above_the_threshold_strictly() {
    for (waiting, waits) in [(199, false), (200, false), (201, true)] {
        let mut host = host(1, |_| {});
        host.sent(ask(1, waiting));
        host.arrive(ask(2, 10));
        assert_eq!(host.router.queued().0 == 1, waits, "{waiting} tokens");
    }
}

#[test]
fn one_open_rank_is_enough_and_a_closed_one_is_still_a_candidate() {
    let mut host = host(2, |_| {});
    host.sent(pinned(1, 300, 1));
    let mut warm = ask(2, 320);
    warm.overlap = held(&[(1, 20)]);
    assert_eq!(
        host.worker(warm),
        1,
        "the threshold removes nobody: 18.75 blocks against 20"
    );
}

#[test]
fn an_unknown_batch_size_counts_as_ten_million() {
    let mut host = Host::kv(|c| c.router_queue_threshold = Some(0.0001)).workers(1);
    host.sent(ask(1, 1000));
    host.sent(ask(2, 1));
    park(&mut host, ask(3, 1));
}

#[test]
fn without_a_threshold_nobody_waits() {
    let mut host = host(1, |c| c.router_queue_threshold = None);
    for id in 0..50 {
        host.sent(ask(id, 1000));
    }
}

#[test]
fn nobody_eligible_is_an_error_and_no_reason_to_wait() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 1000));
    let mut nowhere = ask(2, 10);
    nowhere.constraints.allowed = Some(vec![WorkerId(9)]);
    assert!(matches!(
        host.refused(nowhere),
        RouteError::NoEndpoints { .. }
    ));
}

#[test]
fn a_busy_worker_that_is_open_does_not_make_a_request_wait() {
    let mut host = host(1, |c| c.active_prefill_tokens_threshold = Some(50));
    host.sent(ask(1, 100));
    let error = host.refused(ask(2, 10));
    assert_eq!(
        error,
        RouteError::AllEligibleWorkersOverloaded {
            workers: 1,
            retry_after_ms: None
        }
    );
}

#[test]
fn a_first_token_an_end_and_a_newcomer_let_requests_go() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    for id in 2..=4 {
        park(&mut host, ask(id, 250));
    }
    host.first_token(1);
    assert_eq!(host.released(), [2]);
    host.finish(2);
    assert_eq!(host.released(), [3]);
    host.join(2, |spec| spec.max_num_batched_tokens = Some(100));
    assert_eq!(host.released(), [4]);
    assert_eq!(host.router.queued().0, 0);
}

#[test]
fn a_worker_that_leaves_with_its_load_turns_waiting_into_an_error() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    let out = host.input(Input::Left(WorkerId(1)));
    let refused = matches!(
        out,
        [Output::Refuse {
            id: RequestId(2),
            error: RouteError::NoEndpoints { .. }
        }]
    );
    assert!(refused, "{out:?}");
}

#[test]
fn a_newcomer_does_not_overtake_the_backlog() {
    let mut host = host(2, |_| {});
    host.sent(pinned(1, 300, 1));
    host.sent(pinned(2, 300, 2));
    let mut bound = ask(3, 10);
    bound.constraints.allowed = Some(vec![WorkerId(1)]);
    park(&mut host, bound);
    host.first_token(2);
    assert_eq!(
        host.released(),
        [],
        "worker 2 is open, but the head may not go there"
    );
    park(&mut host, ask(4, 10));
    host.first_token(1);
    assert_eq!(host.released(), [3, 4]);
}

#[test]
fn a_blocked_pin_does_not_block_others() {
    let mut host = host(2, |_| {});
    host.sent(pinned(1, 300, 1));
    host.sent(pinned(2, 300, 2));
    park(&mut host, pinned(3, 10, 1));
    park(&mut host, ask(4, 10));
    host.first_token(2);
    assert_eq!(host.released(), [4]);
    assert_eq!(
        host.worker(pinned(5, 10, 2)),
        2,
        "a pin to an open rank passes blocked lanes"
    );
    host.first_token(1);
    assert_eq!(host.released(), [3]);
}

#[test]
fn released_requests_are_placed_on_fresh_load() {
    let mut host = host(2, |_| {});
    host.sent(pinned(1, 300, 1));
    host.sent(pinned(2, 300, 2));
    for id in 3..=4 {
        park(&mut host, ask(id, 250));
    }
    host.first_token(1);
    assert_eq!(host.released(), [3], "one fills the rank that opened");
    host.first_token(2);
    let target = host.out.iter().find_map(|o| match o {
        Output::Send(sent) => Some((sent.id.0, sent.target.worker.0)),
        _ => None,
    });
    assert_eq!(target, Some((4, 2)));
}

#[test]
fn priorities_order_the_queue_and_the_record_says_how_long_it_took() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    let hinted = |id, priority, strict| {
        let mut arrival = ask(id, 250);
        arrival.hints.priority = priority;
        arrival.hints.strict_priority = strict;
        arrival
    };
    for (at, arrival) in [
        (0, hinted(2, None, 0)),
        (1000, hinted(3, None, 0)),
        (2000, hinted(4, Some(10), 0)),
        (3000, hinted(5, Some(-10), 1)),
    ] {
        host.at(at);
        park(&mut host, arrival);
    }
    host.at(5000);
    let mut order = Vec::new();
    for _ in 0..4 {
        let last = order.last().copied().unwrap_or(1);
        host.finish(last);
        order.extend(host.released());
    }
    assert_eq!(order, [5, 4, 2, 3]);
    let queued = host.router.explain(RequestId(3)).unwrap().queued;
    assert_eq!(queued.as_millis(), 4000);
}

#[test]
fn short_prompts_go_first_under_wspt_and_cached_ones_under_its_other_form() {
    for (policy, expected) in [
        (QueuePolicy::Wspt, [3, 2]),
        (QueuePolicy::WsptUncached, [2, 3]),
    ] {
        let mut host = host(1, |c| c.router_queue_policy = policy);
        host.sent(ask(1, 300));
        let mut long = ask(2, 320);
        long.overlap = held(&[(1, 20)]);
        park(&mut host, long);
        park(&mut host, ask(3, 250));
        host.finish(1);
        let mut order = host.released();
        host.finish(3);
        order.extend(host.released());
        assert_eq!(order, expected, "{policy:?}");
    }
}

#[test]
fn a_cancelled_waiter_is_gone_and_books_nothing() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    host.input(Input::Finished {
        id: RequestId(2),
        on: None,
        outcome: Outcome::Cancelled,
    });
    host.finish(1);
    assert_eq!(host.released(), []);
    assert!(host.router.is_idle());
}

#[test]
fn the_length_of_the_queue_is_bounded() {
    let mut host = host(1, |c| c.router_queue_max_requests = 2);
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    park(&mut host, ask(3, 10));
    let error = host.refused(ask(4, 10));
    let expected = RouteError::QueueLimit {
        policy_class: "default".to_owned(),
        limit_kind: LimitKind::Requests,
        current: 2,
        limit: 2,
        retry_after_ms: None,
    };
    assert_eq!(error, expected);
    assert!(error.is_overload() && error.fault() == Fault::Router);
    assert_eq!(
        error.to_string(),
        "queue of class `default` is full: 2 of 2 requests"
    );
}

#[test]
fn nobody_waits_for_ever() {
    let mut host = host(1, |c| c.router_queue_max_wait_secs = 30.0);
    host.sent(ask(1, 300));
    host.at(1000);
    park(&mut host, ask(2, 10));
    assert_eq!(host.router.next_deadline(), Some(Time::from_millis(31_000)));
    assert!(host.at(30_999).input(Input::Tick).is_empty());
    let out = host.at(31_000).input(Input::Tick);
    let refused = matches!(
        out,
        [Output::Refuse {
            id: RequestId(2),
            error: RouteError::QueueLimit {
                limit_kind: LimitKind::WaitMs,
                current: 30_000,
                ..
            }
        }]
    );
    assert!(refused, "{out:?}");
}

#[test]
fn an_old_lookup_is_asked_for_again_before_the_choice() {
    let mut host = host(2, |_| {});
    host.sent(pinned(1, 300, 1));
    host.sent(pinned(2, 300, 2));
    let mut warm = ask(3, 160);
    warm.overlap = held(&[(1, 10)]);
    park(&mut host, warm);
    park(&mut host, ask(4, 160));
    host.at(10_000)
        .input(Input::FirstToken { id: RequestId(1) });
    assert_eq!(
        host.out,
        [Output::Refresh { id: RequestId(3) }],
        "it keeps its place"
    );
    host.input(Input::FirstToken { id: RequestId(2) });
    assert_eq!(host.released(), [], "the next one does not pass it");
    host.input(Input::Refreshed {
        id: RequestId(3),
        overlap: Some(held(&[(2, 10)])),
    });
    let Some(Output::Send(sent)) = host.out.first() else {
        panic!("{:?}", host.out)
    };
    assert_eq!(
        (sent.id.0, sent.target.worker.0),
        (3, 2),
        "by the new lookup"
    );
    assert_eq!(host.out[1], Output::Refresh { id: RequestId(4) });
    host.input(Input::Refreshed {
        id: RequestId(4),
        overlap: None,
    });
    assert_eq!(host.released(), [4], "a failed lookup keeps the old one");
}

#[test]
fn a_lookup_that_never_comes_back_holds_nobody_for_long() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    host.at(20_000).first_token(1);
    assert_eq!(host.out, [Output::Refresh { id: RequestId(2) }]);
    assert_eq!(host.router.next_deadline(), Some(Time::from_millis(21_000)));
    host.at(21_000).input(Input::Tick);
    assert_eq!(host.released(), [2]);
}

#[test]
fn lookups_are_not_repeated_before_their_time_or_when_switched_off() {
    for (after, waited) in [(10.0, 9_999), (0.0, 100_000)] {
        let mut host = host(1, |c| c.router_overlap_refresh_after_secs = after);
        host.sent(ask(1, 300));
        park(&mut host, ask(2, 10));
        host.at(waited).first_token(1);
        assert_eq!(host.released(), [2]);
    }
}

#[test]
fn questions_do_not_wait() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    let mut query = ask(3, 10);
    query.query_only = true;
    let sent = host.sent(query);
    assert!(!sent.booked);
    assert_eq!(host.router.booked(), 1);
}

#[test]
fn a_waiting_id_is_in_use_and_the_end_of_an_older_attempt_does_not_cancel_it() {
    let mut host = host(1, |_| {});
    host.sent(ask(1, 300));
    park(&mut host, ask(2, 10));
    assert_eq!(host.refused(ask(2, 10)), RouteError::DuplicateRequest);
    host.input(Input::Finished {
        id: RequestId(2),
        on: Some(WorkerRank::new(1, 0)),
        outcome: Outcome::Failed,
    });
    assert_eq!(host.router.queued().0, 1);
}

/// Two classes: `fast` closes above 300 tokens, `slow` above 100 and holds one request per worker.
fn classes() -> PolicyConfig {
    let class = |name: &str, tokens, limit| PolicyClass {
        name: name.to_owned(),
        serves: Some((name.to_owned(), "all".to_owned())),
        quantum: 100,
        request_queue_limit_per_worker: limit,
        ..PolicyClass::only(
            QueuePolicy::Fcfs,
            Gate {
                tokens: Some(tokens),
                batches: None,
            },
        )
    };
    PolicyConfig {
        default_policy_family: "slow".to_owned(),
        uncached_isl_buckets: vec![kvasir_router::Bucket {
            min_tokens: 0,
            bucket: "all".to_owned(),
        }],
        classes: vec![class("fast", 300, None), class("slow", 100, Some(1))],
    }
}

#[test]
fn classes_have_their_own_threshold_backlog_and_bounds() {
    let mut host = host(1, |c| c.router_policy_config = Some(classes()));
    let of = |id, class: Option<&str>| {
        let mut arrival = ask(id, 150);
        arrival.policy_class = class.map(Arc::from);
        arrival
    };
    host.sent(of(1, None));
    park(&mut host, of(2, Some("slow")));
    host.sent(of(3, Some("fast")));
    host.sent(of(4, Some("fast")));
    park(&mut host, of(5, Some("fast")));
    let error = host.refused(of(6, Some("unknown is the default")));
    let expected = RouteError::QueueLimit {
        policy_class: "slow".to_owned(),
        limit_kind: LimitKind::Requests,
        current: 1,
        limit: 1,
        retry_after_ms: None,
    };
    assert_eq!(error, expected);
    let stats: Vec<_> = host
        .router
        .queue_stats()
        .map(|(name, s)| (name.to_owned(), s.requests))
        .collect();
    assert_eq!(stats, [("fast".to_owned(), 1), ("slow".to_owned(), 1)]);
    host.first_token(1);
    assert_eq!(
        host.released(),
        [5],
        "300 waiting: open for fast, closed for slow"
    );
    for id in [3, 4, 5] {
        host.first_token(id);
    }
    assert_eq!(host.released(), [2]);
}

/// Quanta of 8000 and 1000 tokens, prompts of 1000, and one rank that opens for one prompt at a time.
#[test]
fn quanta_are_shares_when_capacity_frees_for_one_request_at_a_time() {
    let class = |name: &str, quantum| PolicyClass {
        name: name.to_owned(),
        serves: Some((name.to_owned(), "any".to_owned())),
        quantum,
        gate: Gate {
            tokens: Some(0),
            batches: None,
        },
        ..PolicyClass::only(QueuePolicy::Fcfs, Gate::default())
    };
    let config = PolicyConfig {
        default_policy_family: "large".to_owned(),
        uncached_isl_buckets: vec![kvasir_router::Bucket {
            min_tokens: 0,
            bucket: "any".to_owned(),
        }],
        classes: vec![class("large", 8000), class("small", 1000)],
    };
    let mut host = host(1, |c| c.router_policy_config = Some(config));
    let of = |id: u128, class: &str| {
        let mut arrival = ask(id, 1000);
        arrival.policy_class = Some(class.into());
        arrival
    };
    host.sent(of(0, "large"));
    for id in 1..=200 {
        park(&mut host, of(id, "large"));
        park(&mut host, of(1000 + id, "small"));
    }
    let (mut running, mut small) = (0, 0);
    for _ in 0..180 {
        host.first_token(running);
        let next = host.released();
        assert_eq!(next.len(), 1);
        running = next[0];
        small += u32::from(running > 1000);
    }
    assert_eq!(small, 20, "of 180, one in nine");
}
