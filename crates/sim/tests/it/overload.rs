//! Three times too much for three minutes, with the overload protection that a frontend has by default.

use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_sim::{Fleet, Policy, RunReport, Slo, Trace, simulate};
use kvasir_types::Time;

use crate::{fleet, policy, workload};

const SURGE: Duration = Duration::from_secs(180);
const SETTLED: Duration = Duration::from_secs(5);

/// Two engines that run 32 requests at once.
fn small_fleet() -> Fleet {
    let fleet = fleet(2);
    Fleet {
        engine: EngineConfig {
            max_num_seqs: 32,
            num_blocks: 6001,
            ..fleet.engine
        },
        ..fleet
    }
}

fn protected(mode: RouterMode, on: bool) -> Policy {
    let base = policy("kv");
    let router = RouterConfig {
        router_mode: mode,
        overload_protection: on,
        router_queue_max_wait_secs: if on { 5.0 } else { 600.0 },
        ..base.router
    };
    Policy { router, ..base }
}

/// Requests of 800 tokens, half of them shared by a tenant, at `rate` a second for so long, from `start` on.
fn load(rate: f64, span: Duration, start: Time) -> Trace {
    let requests = (rate * span.as_secs_f64()).ceil();
    let mut trace = workload(&format!(
        "tenants,requests={requests},rate={rate},system=400,user=400,output=120,tenants=8"
    ));
    for request in &mut trace.requests {
        request.at += start - Time::ZERO;
    }
    trace
}

fn run(trace: &Trace, fleet: &Fleet, policy: &Policy) -> RunReport {
    match simulate(trace, fleet, policy, &mut |_| {}) {
        Ok(report) => report,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn three_times_the_load_for_three_minutes_is_served_or_refused_in_time_and_forgotten_soon() {
    let mut fleet = small_fleet();
    fleet.slo = Slo {
        ttft: Duration::from_secs(1),
        itl: Duration::from_secs(10),
    };
    let flood = load(500.0, Duration::from_secs(4), Time::ZERO);
    let open = protected(RouterMode::RoundRobin, false);
    let capacity = run(&flood, &fleet, &open).requests_per_s;
    let normal = 0.6 * capacity;
    for mode in [
        RouterMode::Kv,
        RouterMode::RoundRobin,
        RouterMode::LeastLoaded,
    ] {
        let policy = protected(mode, true);
        let calm = run(
            &load(normal, Duration::from_secs(60), Time::ZERO),
            &fleet,
            &policy,
        );
        assert_eq!(
            calm.counts.refused, 0,
            "{mode:?}: nobody is refused without need"
        );
        let surge = load(3.0 * capacity, SURGE, Time::ZERO);
        let alone = run(&surge, &fleet, &policy);
        let RunReport { counts, ttft, .. } = &alone;
        println!(
            "{mode:?}: capacity {capacity:.1}/s, served {:.1}/s, {counts:?}, TTFT {ttft:?}, longest queue {:?}",
            alone.requests_per_s, alone.queue
        );
        assert!(ttft.p99 < 10_000.0, "{mode:?}: {ttft:?}");
        assert!(
            alone.requests_per_s > 0.85 * capacity,
            "{mode:?}: engines stay full"
        );
        assert_eq!(counts.completed + counts.refused, alone.requests);
        // The same and then the usual load, from five seconds after the end: all of that is served as ever.
        let after = load(
            normal,
            Duration::from_secs(60),
            Time::ZERO + SURGE + SETTLED,
        );
        let (mut both, later) = (surge, after.requests.len() as f64);
        both.requests.extend(after.requests);
        let both = run(&both, &fleet, &policy);
        assert_eq!(both.counts.refused, counts.refused, "{mode:?}");
        let good = |report: &RunReport| report.goodput_share * f64::from(report.requests);
        let share = (good(&both) - good(&alone)) / later;
        assert!(share > 0.99, "{mode:?}: {share} within a second");
    }
}

/// What the protection is for: without it everybody is let in and waits.
#[test]
fn without_protection_three_times_the_load_waits_ever_longer() {
    let fleet = small_fleet();
    let surge = load(180.0, Duration::from_secs(60), Time::ZERO);
    let open = run(&surge, &fleet, &protected(RouterMode::Kv, false));
    assert!(open.ttft.p99 > 60_000.0, "{:?}", open.ttft);
}
