//! Runs of small workloads.

use std::time::Duration;

use expect_test::expect;
use kvasir_sim::{
    ArrivalMode, Counts, Fleet, FleetChange, Progress, RunReport, SimError, Trace, Workload,
    ideal_hit_share, simulate,
};
use kvasir_types::Time;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::{fleet, play, policy, workload};

fn all_completed(report: &RunReport) {
    let expected = Counts {
        completed: report.requests,
        ..Counts::default()
    };
    assert_eq!(report.counts, expected, "{}", report.policy);
}

const MODES: [&str; 7] = [
    "round-robin",
    "random",
    "least-loaded",
    "power-of-two",
    "kv",
    "kv,no-router-kv-events",
    "time",
];

/// Every policy answers every request, with all its tokens, whatever the number of workers.
#[test]
fn nothing_is_lost_under_any_policy() {
    let trace = workload("tenants,requests=200,rate=30,system=600,output=40,tenants=8");
    let tokens: u64 = trace
        .requests
        .iter()
        .map(|r| u64::from(r.output_tokens))
        .sum();
    for workers in [1, 3, 8] {
        for mode in MODES {
            let report = play(&trace, &fleet(workers), mode);
            all_completed(&report);
            assert_eq!(report.output_tokens, tokens, "{mode}");
            assert_eq!(report.prompt_tokens, trace.prompt_tokens(), "{mode}");
            assert!(
                report.hit_share <= ideal_hit_share(&trace, 16) + 0.02,
                "{mode}"
            );
        }
    }
}

/// The same inputs give the same report, all of it; another seed gives another one.
#[test]
fn a_seed_is_a_report() {
    let trace = workload("chat,sessions=40,turns=4,rate=4,system=500,output=60");
    let run = |seed| {
        let fleet = Fleet {
            seed,
            event_loss: 0.05,
            replicas: 2,
            replica_sync: true,
            ..fleet(4)
        };
        play(&trace, &fleet, "kv,router-temperature=0.5")
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    assert_eq!(workload("chat,sessions=40"), workload("chat,sessions=40"));
}

/// A conversation's next turn comes after the answer and the pause, and quotes the answer: on one engine
/// all of it but the new words is found.
#[test]
fn turns_follow_answers_and_find_them_cached() {
    let trace =
        workload("chat,sessions=1,turns=5,tenants=1,system=320,user=100,output=64,think-ms=500");
    let report = play(&trace, &fleet(1), "round-robin");
    all_completed(&report);
    assert_eq!(report.hit_share, ideal_hit_share(&trace, 16));
    assert!(report.hit_share > 0.6, "{}", report.hit_share);
    assert!(report.duration_s > 4.0 * 0.5);
    assert!(report.queue.p99 < 1e-3, "one at a time never queues");
}

/// Two conversations on two engines: kv keeps each where its words are, round-robin does not know them.
#[test]
fn kv_keeps_conversations_where_they_are_cached() {
    let trace =
        workload("chat,sessions=60,turns=6,rate=3,tenants=30,system=800,user=100,output=40");
    let [rr, kv] = ["round-robin", "kv"].map(|mode| play(&trace, &fleet(4), mode));
    assert!(
        kv.hit_share > rr.hit_share + 0.1,
        "{} {}",
        kv.hit_share,
        rr.hit_share
    );
    assert!(kv.ttft.mean < rr.ttft.mean, "{:?} {:?}", kv.ttft, rr.ttft);
}

#[test]
fn a_closed_loop_never_has_more_than_its_clients() {
    let trace = workload("tenants,requests=120,rate=1000,system=200,output=30");
    let think = Duration::from_millis(20);
    let closed = Fleet {
        arrivals: ArrivalMode::Closed { clients: 3, think },
        ..fleet(2)
    };
    let report = play(&trace, &closed, "least-loaded");
    all_completed(&report);
    let most = report
        .series
        .loads
        .iter()
        .map(|loads| loads.iter().sum::<u32>())
        .max();
    assert!(most <= Some(3), "{most:?}");
    assert_eq!(report.queued, 0);
}

/// A worker dies with requests in it and comes back: they end elsewhere, with all their tokens.
#[test]
fn requests_of_a_dead_worker_end_elsewhere() {
    let trace = workload("tenants,requests=200,rate=40,system=600,output=80,tenants=8");
    let changes = vec![
        FleetChange::Leaves {
            at: Time::from_millis(1500),
            worker: 1,
        },
        FleetChange::Joins {
            at: Time::from_millis(3000),
            worker: 1,
        },
        FleetChange::Joins {
            at: Time::from_millis(3500),
            worker: 3,
        },
    ];
    for mode in MODES {
        let broken = Fleet {
            changes: changes.clone(),
            ..fleet(3)
        };
        let report = play(&trace, &broken, mode);
        all_completed(&report);
        assert!(report.retries > 0, "{mode}: nobody was there");
        let tokens: u64 = trace
            .requests
            .iter()
            .map(|r| u64::from(r.output_tokens))
            .sum();
        assert_eq!(report.output_tokens, tokens, "{mode}");
        assert_eq!(
            report.series.loads.last().map(Vec::len),
            Some(4),
            "{mode}: the new one serves"
        );
    }
}

/// With the last worker gone there is nobody; conversations end with their refused turn.
#[test]
fn without_workers_requests_are_refused_and_their_turns_dropped() {
    let trace = workload("chat,sessions=10,turns=3,rate=2,output=20");
    let changes = vec![FleetChange::Leaves {
        at: Time::from_millis(1000),
        worker: 0,
    }];
    let report = play(
        &trace,
        &Fleet {
            changes,
            ..fleet(1)
        },
        "kv",
    );
    let counts = report.counts;
    assert!(counts.refused > 0 && counts.dropped > 0, "{counts:?}");
    assert_eq!(counts.stuck, 0);
    let sum = counts.completed + counts.refused + counts.rejected + counts.dropped;
    assert_eq!(sum, report.requests);
}

#[test]
fn prompts_too_long_for_the_engine_are_rejected() {
    let trace = workload("documents,requests=20,document=60000");
    let report = play(&trace, &fleet(2), "kv");
    let counts = report.counts;
    assert!(counts.rejected > 0, "{counts:?}");
    assert_eq!(counts.completed + counts.rejected, report.requests);
}

/// A router that loses events finds less; one that gets none finds nothing.
#[test]
fn lost_events_cost_hits() {
    let trace =
        workload("chat,sessions=60,turns=6,rate=3,tenants=30,system=800,user=100,output=40");
    let hits = |event_loss| {
        play(
            &trace,
            &Fleet {
                event_loss,
                ..fleet(4)
            },
            "kv",
        )
        .hit_share
    };
    let (all, half, none) = (hits(0.0), hits(0.5), hits(1.0));
    assert!(all > half && half > none, "{all} {half} {none}");
}

/// Ranks are engines of their own: two workers of two ranks hold as much as four of one.
#[test]
fn ranks_serve() {
    let trace = workload("tenants,requests=100,rate=30,system=600,output=40,tenants=8");
    for mode in MODES {
        let report = play(
            &trace,
            &Fleet {
                ranks: 2,
                ..fleet(2)
            },
            mode,
        );
        all_completed(&report);
        assert_eq!(report.series.loads.last().map(Vec::len), Some(4));
    }
}

#[test]
fn senseless_fleets_are_refused() {
    let trace = workload("tenants,requests=2");
    let refuse = |fleet: Fleet| {
        let policy = policy("kv");
        simulate(&trace, &fleet, &policy, &mut |_| {}).unwrap_err()
    };
    assert_eq!(refuse(fleet(0)), SimError::Zero("workers"));
    assert_eq!(
        refuse(Fleet {
            replicas: 0,
            ..fleet(1)
        }),
        SimError::Zero("replicas")
    );
    let still = ArrivalMode::Open { speed: 0.0 };
    assert_eq!(
        refuse(Fleet {
            arrivals: still,
            ..fleet(1)
        }),
        SimError::Speed(0.0)
    );
}

#[test]
fn progress_reaches_the_end() {
    let trace = workload("tenants,requests=300,rate=100");
    let mut last = Progress {
        done: 0,
        total: 0,
        now: Time::ZERO,
    };
    let policy = policy("round-robin");
    let mut see = |p: Progress| {
        assert!(p.done >= last.done && p.now >= last.now);
        last = p;
    };
    simulate(&trace, &fleet(2), &policy, &mut see).unwrap();
    assert_eq!((last.done, last.total), (300, 300));
}

/// A small run in numbers: a change here is a change of the engine model, to be looked at.
#[test]
fn a_small_run_in_numbers() {
    let trace = workload("agents,tasks=12,siblings=4,context=2000,rate=2,output=50");
    let r = play(&trace, &fleet(3), "round-robin");
    let text = format!(
        "ttft {:.1} {:.1}  itl {:.2} {:.2}  hits {:.3} of {:.3}  imbalance {:.2}",
        r.ttft.mean,
        r.ttft.p99,
        r.itl.mean,
        r.itl.p99,
        r.hit_share,
        ideal_hit_share(&trace, 16),
        r.imbalance,
    );
    expect!["ttft 79.8 169.4  itl 5.81 5.44  hits 0.225 of 0.674  imbalance 1.05"].assert_eq(&text);
}

/// Siblings come at once, before any event of the first one: only a router that predicts keeps them
/// together.
#[test]
fn siblings_need_prediction() {
    let trace = workload("agents,tasks=12,siblings=4,context=2000,rate=2,output=50");
    let hits = |policy| play(&trace, &fleet(3), policy).hit_share;
    assert!(hits("kv,router-predicted-ttl-secs=5") > hits("kv") + 0.02);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Conservation: whatever the fleet, each request ends in exactly one way, completed ones have all
    /// their tokens, and nothing is stuck.
    #[test]
    fn requests_are_conserved(
        workers in 1u32..5,
        ranks in 1u32..3,
        replicas in 1u32..4,
        sync in any::<bool>(),
        loss in prop_oneof![Just(0.0), 0.0..1.0],
        latency_ms in 0u64..50,
        waiting in 1u32..20,
        death in prop::option::of((0u64..4000, 0u32..5)),
        mode in prop::sample::select(&MODES[..]),
        kind in prop::sample::select(&["tenants,requests=60", "chat,sessions=15,turns=3", "agents,tasks=10"][..]),
        rate in 1u32..60,
        seed in any::<u64>(),
    ) {
        let workload = Workload::parse(&format!("{kind},rate={rate},output=30")).unwrap();
        let trace: Trace = workload.trace(seed);
        let mut base = fleet(workers);
        base.engine.max_waiting = waiting;
        let changes = death.map(|(ms, worker)| {
            FleetChange::Leaves { at: Time::from_millis(ms), worker: worker % workers }
        });
        let fleet = Fleet {
            ranks,
            replicas,
            replica_sync: sync,
            event_loss: loss,
            event_latency: Duration::from_millis(latency_ms),
            changes: changes.into_iter().collect(),
            seed,
            ..base
        };
        let report = play(&trace, &fleet, mode);
        let Counts { completed, refused, rejected, dropped, stuck } = report.counts;
        prop_assert_eq!(stuck, 0);
        prop_assert_eq!(completed + refused + rejected + dropped, report.requests);
        prop_assert!(report.hit_share <= 1.0 && report.imbalance >= 1.0 - 1e-9);
        if death.is_none() && refused == 0 {
            let tokens: u64 = trace.requests.iter().map(|r| u64::from(r.output_tokens)).sum();
            prop_assert_eq!(report.output_tokens, tokens);
        }
    }
}
