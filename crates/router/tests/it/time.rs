//! Placement by seconds: what it learns, whom it holds, and what keeps its meaning.

use std::sync::Arc;
use std::time::Duration;

use kvasir_router::{
    Arrival, Bucket, Gate, Input, LimitKind, Outcome, Output, PeerChange, PeerEvent, Pin,
    PolicyClass, PolicyConfig, QueuePolicy, Reason, ReplicaId, Role, RouteError, Router,
    RouterConfig, RouterMode, RouterPolicy, SessionAction, SessionRequest, WorkerSpec,
};
use kvasir_types::{DpRank, RequestId, SequenceHash, Time, WorkerId, WorkerRank};

pub(crate) fn config() -> RouterConfig {
    RouterConfig {
        router_mode: RouterMode::Kv,
        router_policy: RouterPolicy::Time,
        ..RouterConfig::default()
    }
}

pub(crate) struct Host {
    pub(crate) router: Router,
    pub(crate) now: f64,
    pub(crate) out: Vec<Output>,
}

impl Host {
    pub(crate) fn new(config: RouterConfig, workers: u64) -> Self {
        let mut host = Self {
            router: Router::new(config),
            now: 1.0,
            out: Vec::new(),
        };
        for id in 1..=workers {
            host.step(Input::Joined(spec(id)));
        }
        host.out.clear();
        host
    }

    pub(crate) fn step(&mut self, input: Input) {
        let now = Time::from_secs_f64(self.now);
        self.router.step(now, input, &mut self.out);
    }

    pub(crate) fn after(&mut self, seconds: f64, input: Input) {
        self.now += seconds;
        self.step(input);
    }

    pub(crate) fn arrive(&mut self, id: u64, isl: u32) {
        self.ask(Arrival::new(rid(id), isl));
    }

    pub(crate) fn ask(&mut self, arrival: Arrival) {
        self.step(Input::Arrived(Box::new(arrival)));
    }

    pub(crate) fn first_token(&mut self, id: u64) {
        self.step(Input::FirstToken { id: rid(id) });
    }

    pub(crate) fn finish(&mut self, id: u64, output_tokens: u32) {
        self.step(Input::Finished {
            id: rid(id),
            on: None,
            outcome: Outcome::Completed { output_tokens },
        });
    }

    /// Who was sent where since it was last asked.
    pub(crate) fn sent(&mut self) -> Vec<(u64, u64)> {
        let sent = self.out.drain(..).filter_map(|output| match output {
            Output::Send(sent) => Some((sent.id.0 as u64, sent.target.worker.0)),
            _ => None,
        });
        sent.collect()
    }

    pub(crate) fn refused(&mut self) -> Vec<RouteError> {
        let refused = self.out.drain(..).filter_map(|output| match output {
            Output::Refuse { error, .. } => Some(error),
            _ => None,
        });
        refused.collect()
    }

    /// A rank with so much prompt that nobody else may go there for now.
    pub(crate) fn close(&mut self, worker: u64, id: u64) {
        let mut arrival = Arrival::new(rid(id), 60_000);
        arrival.pin.worker = Some(WorkerId(worker));
        self.ask(arrival);
        let sent = self.sent();
        assert_eq!(sent, [(id, worker)]);
    }
}

pub(crate) fn rid(id: u64) -> RequestId {
    RequestId(u128::from(id))
}

pub(crate) fn spec(id: u64) -> WorkerSpec {
    WorkerSpec {
        kv_total_blocks: Some(50_000),
        max_num_batched_tokens: Some(8192),
        ..WorkerSpec::new(WorkerId(id))
    }
}

#[test]
fn a_free_fleet_takes_requests_at_once_and_spreads_them() {
    let mut host = Host::new(config(), 4);
    for id in 1..=4 {
        host.arrive(id, 2000);
    }
    let mut workers: Vec<u64> = host.sent().into_iter().map(|(_, worker)| worker).collect();
    workers.sort_unstable();
    assert_eq!(workers, [1, 2, 3, 4]);
    assert_eq!(host.router.queued().0, 0);
}

/// One at a time, each of its own: every cache gets its share, and none twice before all had one. Also where answers come in
/// one piece, so that nobody sees when a prompt is done.
#[test]
fn new_prompts_on_an_idle_fleet_go_where_cache_is_free() {
    for silent in [false, true] {
        let mut host = Host::new(config(), 4);
        for round in 0..5 {
            let mut workers = Vec::new();
            for turn in 0..4 {
                let id = 1 + round * 4 + turn;
                host.ask(Arrival {
                    silent,
                    ..Arrival::new(rid(id), 2000)
                });
                workers.extend(host.sent().into_iter().map(|(_, worker)| worker));
                host.now += 0.1;
                if !silent {
                    host.first_token(id);
                }
                host.finish(id, 5);
            }
            workers.sort_unstable();
            assert_eq!(workers, [1, 2, 3, 4], "round {round}, silent {silent}");
        }
    }
}

#[test]
fn a_request_is_held_while_its_rank_is_behind_and_goes_when_the_prompt_is_done() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    assert!(host.sent().is_empty());
    assert_eq!(host.router.queued().0, 1);
    host.now += 0.5;
    host.first_token(1);
    assert_eq!(host.sent(), [(2, 1)]);
    let decision = host.router.explain(rid(2)).unwrap();
    assert!((decision.queued.as_secs_f64() - 0.5).abs() < 1e-6);
    assert!(decision.candidates[0].seconds.is_some());
    assert!(
        decision
            .formula()
            .unwrap()
            .to_string()
            .contains("Time for worker_1")
    );
}

/// Both that waited would be computed in one step, and the first would have its first token when the second has.
#[test]
fn one_prompt_waits_at_an_engine_and_longer_ones_here() {
    let mut host = Host::new(config(), 1);
    for id in 1..=3 {
        host.arrive(id, 1000);
    }
    assert_eq!(host.sent(), [(1, 1), (2, 1)]);
    assert_eq!(host.router.queued().0, 1);
    host.now += 0.06;
    host.first_token(1);
    assert_eq!(host.sent(), [(3, 1)]);
    // A short one costs the one that waits less than a step of its own would cost.
    host.arrive(4, 50);
    assert_eq!(host.sent(), [(4, 1)]);
}

/// Nobody sees when their prompts are done: none of them is held for another.
#[test]
fn answers_in_one_piece_hold_up_nobody() {
    let mut host = Host::new(config(), 1);
    for id in 1..=3 {
        host.ask(Arrival {
            silent: true,
            ..Arrival::new(rid(id), 500)
        });
    }
    assert_eq!(host.sent(), [(1, 1), (2, 1), (3, 1)]);
}

/// Nothing happens, but the oldest prompt must be nearly done: the timer alone lets the next one go.
#[test]
fn time_alone_opens_a_rank() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    let due = host.router.next_deadline().unwrap();
    let expected = due.as_secs_f64();
    assert!(expected > 1.1 && expected < 20.0, "{expected}");
    host.now = expected - 0.01;
    host.step(Input::Tick);
    assert!(host.sent().is_empty());
    host.now = expected;
    host.step(Input::Tick);
    assert_eq!(host.sent(), [(2, 1)]);
}

/// Both waited equally long: for the short one that is longer.
#[test]
fn the_longest_wait_for_its_size_goes_first() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    host.arrive(2, 8000);
    host.arrive(3, 200);
    host.now += 0.3;
    host.first_token(1);
    let sent = host.sent();
    assert_eq!(sent.first(), Some(&(3, 1)), "{sent:?}");
}

#[test]
fn priorities_count_as_seconds_waited_and_strict_ones_as_tiers() {
    let order = |jump: Option<i32>, strict: u32| {
        let mut host = Host::new(config(), 1);
        host.close(1, 1);
        host.arrive(2, 200);
        let mut second = Arrival::new(rid(3), 4000);
        second.hints.priority = jump;
        second.hints.strict_priority = strict;
        host.ask(second);
        host.now += 0.3;
        host.first_token(1);
        host.sent().first().map(|(id, _)| *id)
    };
    assert_eq!(order(None, 0), Some(2));
    assert_eq!(order(Some(60), 0), Some(3));
    assert_eq!(order(None, 1), Some(3));
}

#[test]
fn limits_of_the_queue_refuse() {
    let limited = RouterConfig {
        router_queue_max_requests: 1,
        router_queue_max_wait_secs: 2.0,
        ..config()
    };
    let mut host = Host::new(limited, 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    host.arrive(3, 2000);
    let refused = host.refused();
    assert!(matches!(
        refused[..],
        [RouteError::QueueLimit {
            limit_kind: LimitKind::Requests,
            current: 1,
            limit: 1,
            ..
        }]
    ));
    // Nothing happens any more: by time alone it goes, or is refused.
    for _ in 0..5 {
        host.after(0.5, Input::Tick);
    }
    let ended = host.out.iter().any(|output| {
        matches!(output, Output::Refuse { id, .. } | Output::Send(kvasir_router::Placement { id, .. }) if *id == rid(2))
    });
    assert!(ended);
}

fn class(name: &str, quantum: u64, limit: Option<u64>) -> PolicyClass {
    PolicyClass {
        name: name.into(),
        serves: Some((name.into(), "all".into())),
        quantum,
        request_queue_limit_per_worker: limit,
        ..PolicyClass::only(QueuePolicy::Fcfs, Gate::default())
    }
}

fn classes(quanta: (u64, u64), limit: Option<u64>) -> RouterConfig {
    RouterConfig {
        router_policy_config: Some(PolicyConfig {
            default_policy_family: "chat".into(),
            uncached_isl_buckets: vec![Bucket {
                min_tokens: 0,
                bucket: "all".into(),
            }],
            classes: vec![
                class("chat", quanta.0, limit),
                class("batch", quanta.1, limit),
            ],
        }),
        ..config()
    }
}

/// Twenty of each class wait; the class with three times the quantum gets three times the tokens.
#[test]
fn classes_share_by_their_quanta() {
    let mut host = Host::new(classes((6000, 2000), None), 1);
    host.close(1, 1);
    for id in 0..20 {
        for (base, family) in [(100, "batch"), (200, "chat")] {
            let mut arrival = Arrival::new(rid(base + id), 2000);
            arrival.policy_class = Some(Arc::from(family));
            host.ask(arrival);
        }
    }
    host.now += 0.4;
    host.first_token(1);
    let mut order: Vec<u64> = host.sent().into_iter().map(|(id, _)| id).collect();
    while order.len() < 16 {
        let last = *order.last().unwrap();
        host.now += 0.3;
        host.first_token(last);
        let more = host.sent();
        assert!(!more.is_empty(), "{order:?}");
        order.extend(more.into_iter().map(|(id, _)| id));
    }
    let chat = order.iter().take(16).filter(|id| **id >= 200).count();
    assert!((11..=13).contains(&chat), "{order:?}");
}

#[test]
fn a_class_keeps_its_limits_and_its_gate() {
    let mut host = Host::new(classes((1, 1), Some(1)), 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    host.arrive(3, 2000);
    let refused = host.refused();
    assert!(matches!(
        &refused[..],
        [RouteError::QueueLimit { policy_class, .. }] if policy_class == "chat"
    ));
    // A gate of 10 tokens closes a rank that time would leave open.
    let mut gated = classes((1, 1), None);
    if let Some(config) = &mut gated.router_policy_config {
        config.classes[0].gate = Gate {
            tokens: Some(10),
            batches: None,
        };
    }
    let mut host = Host::new(gated, 1);
    host.arrive(1, 100);
    host.arrive(2, 100);
    assert_eq!(host.sent(), [(1, 1)]);
    host.now += 0.01;
    host.first_token(1);
    assert_eq!(host.sent(), [(2, 1)]);
}

/// The other rank is free, and it is not the one.
#[test]
fn pins_and_sessions_wait_for_their_rank() {
    let mut host = Host::new(
        RouterConfig {
            router_session_affinity_ttl_secs: Some(60),
            ..config()
        },
        2,
    );
    let session = |id| {
        let mut arrival = Arrival::new(rid(id), 1000);
        arrival.session = Some(SessionRequest {
            id: Arc::from("s"),
            action: SessionAction::Bind {
                timeout: Duration::from_secs(60),
            },
        });
        arrival
    };
    host.ask(session(1));
    let home = host.sent()[0].1;
    host.first_token(1);
    host.finish(1, 10);
    host.close(home, 2);
    host.ask(session(3));
    let mut pinned = Arrival::new(rid(4), 1000);
    pinned.pin = Pin {
        worker: Some(WorkerId(home)),
        rank: Some(DpRank(0)),
    };
    host.ask(pinned);
    host.arrive(5, 1000);
    assert_eq!(host.sent(), [(5, 3 - home)]);
    host.now += 0.3;
    host.first_token(2);
    let sent = host.sent();
    assert!(
        sent.contains(&(3, home)) && sent.iter().all(|(_, w)| *w == home),
        "{sent:?}"
    );
    let reason = host.router.explain(rid(3)).unwrap().winner.unwrap().1;
    assert_eq!(reason, Reason::Session);
}

/// A preferred taint multiplies the cost: it draws small differences, not large ones.
#[test]
fn preferred_taints_multiply_the_cost() {
    let mut host = Host::new(config(), 1);
    let tainted = WorkerSpec {
        taints: vec![Arc::from("fast")],
        ..spec(2)
    };
    host.step(Input::Joined(tainted));
    for id in 1..=10 {
        let mut arrival = Arrival::new(rid(id), 100);
        arrival.constraints.preferred_taints = vec![(Arc::from("fast"), 1.0)];
        host.ask(arrival);
        assert_eq!(host.sent(), [(id, 2)]);
        host.first_token(id);
        host.finish(id, 5);
    }
    host.close(2, 20);
    let mut arrival = Arrival::new(rid(21), 100);
    arrival.constraints.preferred_taints = vec![(Arc::from("fast"), 1.0)];
    host.ask(arrival);
    assert_eq!(host.sent(), [(21, 1)]);
}

#[test]
fn a_busy_rank_is_no_choice_and_all_busy_refuses() {
    let thresholds = RouterConfig {
        active_prefill_tokens_threshold: Some(100),
        ..config()
    };
    let mut host = Host::new(thresholds, 2);
    host.arrive(1, 200);
    let first = host.sent()[0].1;
    host.arrive(2, 200);
    assert_eq!(host.sent()[0].1, 3 - first);
    host.arrive(3, 200);
    assert!(matches!(
        host.refused()[..],
        [RouteError::AllEligibleWorkersOverloaded { workers: 2, .. }]
    ));
}

#[test]
fn a_prefill_router_counts_prompts_and_a_decode_router_answers() {
    let seconds = |role, id| {
        let mut host = Host::new(
            RouterConfig {
                router_role: role,
                ..config()
            },
            2,
        );
        host.arrive(id, 3000);
        host.sent();
        host.router.explain(rid(id)).unwrap().candidates[0]
            .seconds
            .unwrap()
    };
    let prefill = seconds(Role::Prefill, 1);
    assert!(prefill.own > 0.0 && prefill.decode == 0.0);
    let decode = seconds(Role::Decode, 1);
    assert!(decode.own == 0.0 && decode.decode > 0.0);
    let both = seconds(Role::Aggregated, 1);
    assert!(both.own > 0.0 && both.decode > 0.0);
}

/// What another replica sent to a rank takes as long as if it were ours.
#[test]
fn prompts_of_other_replicas_are_waited_for() {
    let mut host = Host::new(config(), 1);
    let added = PeerChange::Add {
        sequence: (0..3750).map(SequenceHash).collect(),
        prefill_tokens: 60_000,
        prefill_duration: None,
        osl: None,
    };
    let peer = |change| Input::Peer {
        from: ReplicaId(7),
        event: Box::new(PeerEvent {
            id: rid(900),
            target: WorkerRank::new(1, 0),
            change,
        }),
        recalled: false,
    };
    host.step(peer(added));
    host.arrive(1, 1000);
    assert!(host.sent().is_empty());
    host.now += 0.2;
    host.step(peer(PeerChange::PrefillCompleted));
    assert_eq!(host.sent(), [(1, 1)]);
}

#[test]
fn a_question_is_answered_at_once_and_books_nothing() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    let mut question = Arrival::new(rid(2), 1000);
    question.query_only = true;
    host.ask(question);
    assert_eq!(host.sent(), [(2, 1)]);
    assert_eq!((host.router.booked(), host.router.queued().0), (1, 0));
}

#[test]
fn whoever_leaves_while_held_is_forgotten_and_nothing_is_left_behind() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    host.step(Input::Finished {
        id: rid(2),
        on: None,
        outcome: Outcome::Cancelled,
    });
    host.first_token(1);
    assert!(host.sent().is_empty());
    host.finish(1, 5);
    assert!(host.router.is_idle());
}

/// The worker that all wait for leaves: they are refused, not forgotten.
#[test]
fn those_held_for_a_worker_that_leaves_are_answered() {
    let mut host = Host::new(config(), 1);
    host.close(1, 1);
    host.arrive(2, 2000);
    host.step(Input::Left(WorkerId(1)));
    assert!(matches!(
        host.refused()[..],
        [RouteError::NoEndpoints { .. }]
    ));
    assert!(host.router.is_idle());
}

/// The rank that holds the prompt failed: it is no choice until it is back, whatever it costs elsewhere.
#[test]
fn an_ejected_rank_is_no_choice() {
    let mut host = Host::new(config(), 2);
    host.arrive(1, 2000);
    let failed = host.sent()[0].1;
    host.step(Input::Finished {
        id: rid(1),
        on: Some(WorkerRank::new(failed, 0)),
        outcome: Outcome::Unreachable,
    });
    host.close(3 - failed, 2);
    for id in 3..6 {
        host.arrive(id, 1000);
    }
    assert!(host.sent().is_empty(), "held for the one that is left");
    // It is out for a short while only.
    host.now += 0.01;
    host.first_token(2);
    let sent = host.sent();
    assert!(
        !sent.is_empty() && sent.iter().all(|(_, worker)| *worker == 3 - failed),
        "{sent:?}"
    );
}

/// The next turn of a conversation that lives on worker 1, by a client that stays there.
fn turn(id: u64, number: u64) -> Arrival {
    let words: Vec<u64> = (0..10 * number).collect();
    let mut arrival = Arrival {
        overlap: crate::held(&[(1, 10 * (number as u32 - 1))]),
        sequence: crate::chain(&words),
        ..Arrival::new(rid(id), 160 * number as u32 + 8)
    };
    arrival.pin.worker = Some(WorkerId(1));
    arrival
}

/// More was written to the cache of worker 2, so a new prompt would go to worker 1; but there somebody reads an answer who
/// has come back half a second after each. Once it has stayed away for long, nobody waits for it any more.
#[test]
fn a_rank_whose_client_reads_an_answer_is_not_free() {
    let mut host = Host::new(config(), 2);
    let mut written = Arrival::new(rid(1), 30_000);
    written.pin.worker = Some(WorkerId(2));
    host.ask(written);
    host.now += 1.0;
    host.first_token(1);
    host.finish(1, 20);
    for number in 1..=40 {
        host.now += 0.5;
        host.ask(turn(100 + number, number));
        host.now += 0.05;
        host.first_token(100 + number);
        host.now += 0.2;
        host.finish(100 + number, 20);
    }
    host.sent();
    let mut new_prompt = |id, after| {
        host.now += after;
        host.arrive(id, 2000);
        let sent = host.sent();
        host.now += 0.1;
        host.first_token(id);
        host.finish(id, 20);
        sent
    };
    assert_eq!(new_prompt(201, 0.1), [(201, 2)]);
    assert_eq!(new_prompt(202, 60.0), [(202, 1)]);
}

/// A prompt of 110 blocks of which worker 1 holds the first 100; `prompt` says which, `id` how it goes on.
fn with_prefix(id: u64, prompt: u64) -> Arrival {
    let words: Vec<u64> = (0..100)
        .map(|word| 1000 * prompt + word)
        .chain((0..10).map(|word| 1_000_000 * id + word))
        .collect();
    Arrival {
        overlap: crate::held(&[(1, 100)]),
        sequence: crate::chain(&words),
        ..Arrival::new(rid(id), 110 * 16)
    }
}

/// In which round of `each` requests at once, all of the prompt that `prompt` says, one first goes to worker 2.
fn first_copy(each: u64, prompt: impl Fn(u64) -> u64) -> Option<u64> {
    let mut host = Host::new(config(), 2);
    for round in 1..=300 {
        let ids = each * round..each * (round + 1);
        for id in ids.clone() {
            host.ask(with_prefix(id, prompt(round)));
        }
        let sent = host.sent();
        assert_eq!(sent.len() as u64, each, "{sent:?}");
        if sent.iter().any(|(_, worker)| *worker == 2) {
            return Some(round);
        }
        for id in ids.clone() {
            host.now += 0.01;
            host.first_token(id);
        }
        for id in ids {
            host.now += 0.1;
            host.finish(id, 20);
        }
        host.now += 0.5;
    }
    None
}

/// One of two that come together waits for the rank that holds their prefix. Once as much was waited as a copy takes, the next
/// makes one. Where it is another prefix each time, as in conversations, or one request comes after the other, nobody does.
#[test]
fn a_prefix_that_is_waited_for_again_and_again_is_copied() {
    let copied = first_copy(2, |_| 1);
    assert!(copied.is_some_and(|round| round > 3), "{copied:?}");
    assert_eq!(first_copy(2, |_| 1), copied);
    assert_eq!(first_copy(2, |round| round), None);
    assert_eq!(first_copy(1, |_| 1), None);
}
