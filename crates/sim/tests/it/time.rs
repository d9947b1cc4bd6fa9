//! Placement by seconds, learned from nothing, beside the linear cost: on generated traffic of several kinds.

use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_profile::{Constants, Preset, StepTimes};
use kvasir_sim::{ArrivalMode, Fleet, FleetChange, RunReport, Trace, Workload};
use kvasir_types::Time;

use crate::play;

fn llama(workers: u32, blocks: Option<u32>) -> Fleet {
    let engine = EngineConfig::preset(Preset::H200Llama8b, 16).unwrap_or_default();
    let num_blocks = blocks.unwrap_or(engine.num_blocks);
    let engine = EngineConfig {
        max_model_len: engine.max_model_len.min((num_blocks - 1) * 16),
        num_blocks,
        ..engine
    };
    Fleet::new(engine, workers)
}

fn traffic(text: &str) -> Trace {
    match Workload::parse(text) {
        Ok(workload) => workload.trace(11),
        Err(error) => panic!("{error}"),
    }
}

/// Both policies on the same traffic; everything is answered.
fn both(trace: &Trace, fleet: &Fleet) -> (RunReport, RunReport) {
    let (kv, time) = (play(trace, fleet, "kv"), play(trace, fleet, "time"));
    for report in [&kv, &time] {
        assert_eq!(
            report.counts.completed, report.requests,
            "{:?}",
            report.counts
        );
    }
    (kv, time)
}

/// `time` is no worse than this many times `kv` in mean first token and mean gap.
fn no_worse(trace: &Trace, fleet: &Fleet, ttft: f64, itl: f64) {
    let (kv, time) = both(trace, fleet);
    let ratios = (time.ttft.mean / kv.ttft.mean, time.itl.mean / kv.itl.mean);
    assert!(
        ratios.0 <= ttft && ratios.1 <= itl,
        "{}: {ratios:?}",
        trace.name
    );
}

#[test]
fn documents_that_fill_the_fleet_wait_less() {
    let trace = traffic("documents,requests=900,rate=9,documents=60,output=200");
    no_worse(&trace, &llama(4, None), 0.95, 1.0);
}

#[test]
fn bursts_of_agents_wait_less() {
    let trace = traffic("agents,tasks=60,rate=1.2,siblings=10,output=150");
    no_worse(&trace, &llama(4, None), 1.0, 1.0);
}

#[test]
fn hot_system_prompts_are_no_worse_off() {
    let trace = traffic("tenants,requests=1500,rate=40,tenants=6,system=3000,output=120");
    no_worse(&trace, &llama(4, None), 1.05, 1.05);
}

#[test]
fn caches_a_quarter_of_the_working_set_are_no_worse_off() {
    let trace = traffic("chat,sessions=150,rate=4,turns=5,system=1500,output=150,think-ms=3000");
    no_worse(&trace, &llama(4, Some(4000)), 1.05, 1.05);
}

#[test]
fn replicas_are_no_worse_off_with_or_without_news_of_each_other() {
    let trace = traffic("documents,requests=700,rate=8,documents=60,output=150");
    for replica_sync in [true, false] {
        let fleet = Fleet {
            replicas: 2,
            replica_sync,
            ..llama(4, None)
        };
        no_worse(&trace, &fleet, 1.05, 1.05);
    }
}

/// One of four engines falls to half its speed after 20 of 90 seconds.
#[test]
fn an_engine_that_slows_down_gets_less() {
    let trace = traffic("documents,requests=800,rate=9,documents=80,output=150");
    let mut fleet = llama(4, None);
    fleet.changes.push(FleetChange::Slows {
        at: Time::from_secs_f64(20.0),
        worker: 2,
        percent: 50,
    });
    no_worse(&trace, &fleet, 0.9, 1.02);
}

#[test]
fn engines_of_two_speeds_are_used_by_their_speed() {
    let trace = traffic("documents,requests=700,rate=6,documents=80,output=150");
    let mut fleet = llama(4, None);
    for worker in [2, 3] {
        fleet.changes.push(FleetChange::Slows {
            at: Time::ZERO,
            worker,
            percent: 50,
        });
    }
    no_worse(&trace, &fleet, 0.9, 1.05);
}

/// A slow machine: 1,000 prompt tokens take 0.2 s, a step 20 ms, a cache of 200 blocks of 32; conversations of 24 clients.
#[test]
fn conversations_stay_where_their_cache_is_on_slow_machines() {
    let engine = EngineConfig {
        block_size: 32,
        num_blocks: 201,
        max_model_len: 6000,
        times: StepTimes::Constant(Constants {
            step_ms: 20.0,
            prompt_token_ms: 0.2,
            decode_ms: 0.2,
        }),
        ..EngineConfig::default()
    };
    let fleet = Fleet {
        arrivals: ArrivalMode::Closed {
            clients: 24,
            think: Duration::from_millis(200),
        },
        ..Fleet::new(engine, 8)
    };
    let trace =
        traffic("chat,sessions=96,turns=6,tenants=96,system=200,user=100,output=40,think-ms=200");
    let (kv, time) = both(&trace, &fleet);
    let sticky = play(&trace, &fleet, "kv,sticky");
    let ttft = [time.ttft.mean, kv.ttft.mean, sticky.ttft.mean];
    assert!(ttft[0] <= ttft[1] && ttft[0] <= ttft[2], "{ttft:?}");
    let hits = [time.hit_share, kv.hit_share, sticky.hit_share];
    assert!(hits[0] >= hits[1] && hits[0] >= 0.95 * hits[2], "{hits:?}");
}

/// Agents that call tools: turns that come back after some seconds, to caches that do not hold all of them.
#[test]
fn agents_that_wait_for_tools_find_their_cache_again() {
    let trace = traffic(
        "chat,sessions=60,rate=1.5,turns=8,tenants=4,system=2500,user=400,output=120,think-ms=4000",
    );
    no_worse(&trace, &llama(4, Some(3000)), 1.0, 1.02);
}

/// What was learned from nothing is as good as what was measured.
#[test]
fn learning_costs_little_beside_the_true_profile() {
    let trace = traffic("documents,requests=900,rate=9,documents=60,output=200");
    let fleet = llama(4, None);
    let [learned, told] = ["time", "time,profile"].map(|policy| play(&trace, &fleet, policy));
    let ratio = learned.ttft.mean / told.ttft.mean;
    assert!((0.9..=1.05).contains(&ratio), "{ratio}");
}
