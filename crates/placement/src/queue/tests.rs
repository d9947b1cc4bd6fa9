//! Order inside a class, lanes of pinned requests, deficit round robin between classes, bounds.

use super::*;
use crate::{Gate, QueuePolicy, WaitingRequest};
use expect_test::expect;

fn entry(id: u128, class: usize, isl_tokens: u32) -> QueueEntry<()> {
    QueueEntry {
        id: RequestId(id),
        class,
        model: None,
        rank: None,
        strict_priority: 0,
        urgency: 0.0,
        isl_tokens,
        cached_tokens: 0,
        payload: (),
    }
}

fn class(name: &str, quantum: u64) -> PolicyClass {
    PolicyClass {
        name: name.to_owned(),
        quantum,
        ..PolicyClass::only(QueuePolicy::Fcfs, Gate::default())
    }
}

fn queue(quanta: &[u64]) -> Queue<()> {
    Queue::new(quanta.iter().map(|q| class("c", *q)).collect())
}

impl Queue<()> {
    fn put(&mut self, entry: QueueEntry<()>) {
        assert!(self.push(Time::ZERO, entry));
    }

    fn pop(&mut self, ready: impl FnMut(&PolicyClass, &QueueEntry<()>) -> bool) -> Option<u128> {
        let id = self.next(ready)?;
        self.take(id).map(|(entry, _)| entry.id.0)
    }

    fn drain(&mut self) -> Vec<u128> {
        std::iter::from_fn(|| self.pop(|_, _| true)).collect()
    }
}

/// Four requests at 0, 1, 2, 3 s: prompts 100, 50, 400, 10 tokens, 0, 0, 390, 5 of them cached, the second
/// with a jump of 5.
#[test]
fn the_four_orders() {
    let requests = [
        (0, 0.0, 100, 0),
        (1, 5.0, 50, 0),
        (2, 0.0, 400, 390),
        (3, 0.0, 10, 5),
    ];
    let mut rows = String::new();
    for (name, order) in [
        ("fcfs", QueuePolicy::Fcfs),
        ("lcfs", QueuePolicy::Lcfs),
        ("wspt", QueuePolicy::Wspt),
        ("wspt-uncached", QueuePolicy::WsptUncached),
    ] {
        let mut queue = queue(&[1]);
        for (second, priority_jump, isl_tokens, cached) in requests {
            let waiting = WaitingRequest {
                arrived: Time::from_millis(second * 1000),
                priority_jump,
                isl_tokens,
                uncached_tokens: isl_tokens - cached,
            };
            queue.put(QueueEntry {
                urgency: waiting.urgency(order),
                ..entry(u128::from(second), 0, isl_tokens)
            });
        }
        rows += &format!("{name:13} {:?}\n", queue.drain());
    }
    expect![[r#"
        fcfs          [1, 0, 2, 3]
        lcfs          [1, 3, 2, 0]
        wspt          [1, 3, 0, 2]
        wspt-uncached [3, 1, 2, 0]
    "#]]
    .assert_eq(&rows);
}

/// A jump of 2 s passes those that came up to 2 s before, and at exactly 2 s the earlier one stays ahead.
#[test]
fn a_priority_is_a_jump_in_seconds() {
    for (earlier, first) in [(1999, 2), (2000, 1), (2001, 1)] {
        let mut queue = queue(&[1]);
        for (id, arrived, priority_jump) in [(1, 10_000 - earlier, 0.0), (2, 10_000, 2.0)] {
            let waiting = WaitingRequest {
                arrived: Time::from_millis(arrived),
                priority_jump,
                isl_tokens: 1,
                uncached_tokens: 1,
            };
            queue.put(QueueEntry {
                urgency: waiting.urgency(QueuePolicy::Fcfs),
                ..entry(id, 0, 1)
            });
        }
        assert_eq!(queue.drain()[0], first, "{earlier} ms earlier");
    }
}

#[test]
fn strict_priority_beats_any_urgency_and_equals_keep_their_order() {
    let mut queue = queue(&[1]);
    for (id, strict_priority, urgency) in [(1, 0, 9e9), (2, 1, -9e9), (3, 1, -9e9), (4, 0, 9e9)] {
        queue.put(QueueEntry {
            strict_priority,
            urgency,
            ..entry(id, 0, 1)
        });
    }
    assert_eq!(queue.drain(), [2, 3, 1, 4]);
}

#[test]
fn a_blocked_pin_blocks_only_its_lane() {
    let mut queue = queue(&[1]);
    let (closed, open) = (WorkerRank::new(1, 0), WorkerRank::new(2, 0));
    for (id, lane) in [
        (1, Some(closed)),
        (2, Some(closed)),
        (3, None),
        (4, Some(open)),
    ] {
        queue.put(QueueEntry {
            rank: lane,
            ..entry(id, 0, 1)
        });
    }
    let ready = |_: &PolicyClass, entry: &QueueEntry<()>| entry.rank != Some(closed);
    assert_eq!(
        [queue.pop(ready), queue.pop(ready), queue.pop(ready)],
        [Some(3), Some(4), None]
    );
    assert_eq!(queue.drain(), [1, 2]);
}

#[test]
fn a_blocked_head_is_not_overtaken_in_its_lane() {
    let mut queue = queue(&[1]);
    for id in 1..=2 {
        queue.put(entry(id, 0, 1));
    }
    assert_eq!(queue.pop(|_, entry| entry.id.0 != 1), None);
    assert_eq!(queue.drain(), [1, 2]);
}

#[test]
fn a_request_is_in_once_and_leaves_from_anywhere() {
    let mut queue = queue(&[1, 1]);
    let lane = Some(WorkerRank::new(1, 0));
    queue.put(entry(1, 0, 30));
    queue.put(QueueEntry {
        rank: lane,
        cached_tokens: 7,
        ..entry(2, 1, 40)
    });
    assert!(!queue.push(Time::ZERO, entry(1, 1, 1)), "known already");
    assert!(!queue.push(Time::ZERO, entry(9, 5, 1)), "no such class");
    assert_eq!(
        queue.stats(1),
        QueueStats {
            requests: 1,
            raw_isl_tokens: 40,
            cached_tokens: 7
        }
    );
    assert_eq!(queue.oldest(), Some((RequestId(1), Time::ZERO)));
    assert!(queue.remove(RequestId(2)).is_some());
    assert!(queue.remove(RequestId(2)).is_none());
    assert_eq!(queue.stats(1), QueueStats::default());
    assert_eq!(queue.drain(), [1]);
    assert!(queue.is_empty() && queue.oldest().is_none());
}

/// Quanta 3 to 1, equal costs: three of the first for each of the second.
#[test]
fn quanta_are_shares() {
    let mut queue = queue(&[30, 10]);
    for id in 0..8 {
        queue.put(entry(id, 0, 10));
        queue.put(entry(100 + id, 1, 10));
    }
    assert_eq!(
        queue.drain(),
        [
            0, 1, 2, 100, 3, 4, 5, 101, 6, 7, 102, 103, 104, 105, 106, 107
        ]
    );
}

#[test]
fn a_class_with_dearer_requests_gets_as_many_tokens_not_as_many_requests() {
    let mut queue = queue(&[10, 10]);
    for id in 0..4 {
        queue.put(entry(id, 0, 40));
    }
    for id in 100..116 {
        queue.put(entry(id, 1, 10));
    }
    let order = queue.drain();
    let first_half: u32 = order[..10].iter().map(|id| u32::from(*id < 100)).sum();
    assert_eq!(first_half, 2, "2 of 40 tokens beside 8 of 10: {order:?}");
}

/// Heads far above the quantum: whole rounds are added at once, weights kept. The second of the first class and the
/// first of the second are due in the same round.
#[test]
fn oversized_heads_make_progress() {
    let mut queue = queue(&[2, 1]);
    queue.put(entry(1, 0, 1_000_000_000));
    queue.put(entry(2, 1, 1_000_000_000));
    queue.put(entry(3, 0, 1_000_000_000));
    assert_eq!(queue.drain(), [1, 3, 2]);
}

#[test]
fn a_blocked_class_keeps_its_credit_and_gains_none() {
    let mut queue = queue(&[100, 10]);
    for id in 0..3 {
        queue.put(entry(id, 0, 60));
        queue.put(entry(10 + id, 1, 10));
    }
    assert_eq!(queue.pop(|_, _| true), Some(0));
    assert_eq!(queue.classes[0].deficit, 40);
    for expected in [10, 11, 12] {
        assert_eq!(queue.pop(|_, entry| entry.class == 1), Some(expected));
        assert_eq!(queue.classes[0].deficit, 40);
    }
    assert_eq!(queue.pop(|_, _| false), None);
    assert_eq!(
        queue.classes[0].deficit, 40,
        "nobody could go: nobody is credited"
    );
    assert_eq!(queue.drain(), [1, 2]);
    assert_eq!(queue.classes[0].deficit, 0, "an empty class keeps nothing");
}

#[test]
fn the_cost_of_a_wholly_cached_request_is_1() {
    let cached = QueueEntry {
        cached_tokens: 50,
        ..entry(1, 0, 50)
    };
    assert_eq!(cost(&cached), 1);
    assert_eq!(cost(&entry(1, 0, 50)), 50);
}

/// Limits are per worker and tested before adding: the one that crosses is let in, the next is not.
#[test]
fn bounds_count_workers_and_let_the_crossing_request_in() {
    let limited = |change: fn(&mut PolicyClass)| {
        let mut class = class("c", 1);
        change(&mut class);
        Queue::<()>::new(vec![class])
    };
    let mut requests = limited(|c| c.request_queue_limit_per_worker = Some(1));
    let mut tokens = limited(|c| c.raw_isl_token_queue_limit_per_worker = Some(50));
    let mut cached = limited(|c| c.cached_token_queue_limit_per_worker = Some(5));
    for id in 1..=2 {
        for queue in [&mut requests, &mut tokens, &mut cached] {
            assert_eq!(queue.full(0, 2), None);
            queue.put(QueueEntry {
                cached_tokens: 8,
                ..entry(id, 0, 60)
            });
        }
    }
    let full = |limit_kind, current, limit| {
        Some(QueueFull {
            limit_kind,
            current,
            limit,
        })
    };
    assert_eq!(requests.full(0, 2), full(QueueLimit::Requests, 2, 2));
    assert_eq!(tokens.full(0, 2), full(QueueLimit::RawIslTokens, 120, 100));
    assert_eq!(cached.full(0, 2), full(QueueLimit::CachedTokens, 16, 10));
    assert_eq!(requests.full(0, 3), None, "another worker makes room");
}

#[test]
fn a_blocked_model_blocks_only_its_lane() {
    let mut queue = queue(&[1]);
    for (id, model) in [(1, "closed"), (2, "open"), (3, "closed"), (4, "open")] {
        queue.put(QueueEntry {
            model: Some(model.into()),
            ..entry(id, 0, 1)
        });
    }
    let ready = |_: &PolicyClass, entry: &QueueEntry<()>| entry.model.as_deref() == Some("open");
    let open = [queue.pop(ready), queue.pop(ready), queue.pop(ready)];
    assert_eq!(open, [Some(2), Some(4), None]);
    assert_eq!(queue.drain(), [1, 3]);
    assert!(queue.classes.iter().all(|class| class.lanes.is_empty()));
}

/// Serves one request at a time from classes that never run out, asking once more in vain after each, as a
/// router does whose ranks open for one request only. Returns the tokens that each class got.
fn serve_one_at_a_time(quanta: &[u64], costs: &[u32], rounds: usize) -> Vec<u64> {
    let mut queue = queue(quanta);
    let mut id = 0;
    for _ in 0..3 {
        for (class, cost) in costs.iter().enumerate() {
            id += 1;
            queue.put(entry(id, class, *cost));
        }
    }
    let mut served = vec![0; quanta.len()];
    for _ in 0..rounds {
        let next = queue.next(|_, _| true).unwrap();
        let (gone, _) = queue.take(next).unwrap();
        served[gone.class] += u64::from(gone.isl_tokens);
        id += 1;
        queue.put(entry(id, gone.class, gone.isl_tokens));
        assert_eq!(queue.next(|_, _| false), None, "the rank is full again");
    }
    served
}

#[test]
fn quanta_are_shares_when_capacity_comes_back_for_one_request_at_a_time() {
    assert_eq!(
        serve_one_at_a_time(&[8000, 1000], &[1000, 1000], 900),
        [800_000, 100_000]
    );
}

/// The model: over any stretch in which all classes wait, each has had its quantum as often as every other, up to
/// one round and one request.
#[test]
fn tokens_served_are_proportional_to_quanta_for_any_quanta_and_costs() {
    let mut rng = kvasir_types::Rng::new(7);
    for case in 0..200 {
        let classes = 1 + rng.below(5) as usize;
        let mut draw = |most: u64| 1 + rng.below(most);
        let quanta: Vec<u64> = (0..classes).map(|_| draw(10_000)).collect();
        let costs: Vec<u32> = (0..classes).map(|_| draw(5_000) as u32).collect();
        let served = serve_one_at_a_time(&quanta, &costs, 4_000);
        let rounds = |class: usize| served[class] as f64 / quanta[class] as f64;
        for class in 0..classes {
            let ahead = rounds(class) - rounds(0);
            let slack = |at: usize| 1.0 + f64::from(costs[at]) / quanta[at] as f64;
            let most = slack(class) + slack(0);
            assert!(
                ahead.abs() <= most,
                "case {case}: quanta {quanta:?}, costs {costs:?}, served {served:?}"
            );
        }
    }
}

#[test]
fn a_request_knows_how_many_of_its_lane_go_before_it() {
    let mut queue = queue(&[1]);
    let pinned = Some(WorkerRank::new(1, 0));
    for (id, urgency, rank) in [(1, 5.0, None), (2, 3.0, None), (3, 9.0, pinned)] {
        queue.put(QueueEntry {
            urgency,
            rank,
            ..entry(id, 0, 1)
        });
    }
    for (urgency, ahead) in [(9.0, 0), (5.0, 1), (4.0, 1), (3.0, 2), (0.0, 2)] {
        let new = QueueEntry {
            urgency,
            ..entry(9, 0, 1)
        };
        assert_eq!(queue.ahead(&new), ahead, "urgency {urgency}");
    }
    let tier = QueueEntry {
        strict_priority: 1,
        ..entry(9, 0, 1)
    };
    assert_eq!(queue.ahead(&tier), 0);
}
