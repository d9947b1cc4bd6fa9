//! Whole runs: nothing is lost, nothing depends on chance, and what befalls a fleet has its effect.

mod overload;
mod pools;
mod runs;
mod time;
mod traces;

use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_index::{Approximate, IndexOptions};
use kvasir_profile::{Preset, StepTimes};
use kvasir_router::{RouterConfig, RouterMode, RouterPolicy, StepLaw};
use kvasir_sim::{Fleet, Policy, RunReport, Trace, Workload, simulate};

/// Llama-8B engines with a cache small enough to evict.
fn fleet(workers: u32) -> Fleet {
    let preset = EngineConfig::preset(Preset::H200Llama8b, 16);
    let engine = preset.map(|engine| EngineConfig {
        num_blocks: 1501,
        max_model_len: 20_000,
        ..engine
    });
    Fleet::new(engine.unwrap_or_default(), workers)
}

fn workload(text: &str) -> Trace {
    match Workload::parse(text) {
        Ok(workload) => workload.trace(3),
        Err(error) => panic!("{error}"),
    }
}

/// A router mode, then the few options of the router that these tests vary.
fn policy(text: &str) -> Policy {
    let mut router = RouterConfig::default();
    for part in text.split(',') {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        match (name, RouterMode::find(part), value.parse()) {
            (_, Some(mode), _) => router.router_mode = mode,
            ("time", ..) => {
                router.router_mode = RouterMode::Kv;
                router.router_policy = RouterPolicy::Time;
            }
            ("sticky", ..) => router.router_session_affinity_ttl_secs = Some(3600),
            ("profile", ..) => {
                let times = Preset::H200Llama8b.profile().map(StepTimes::Measured);
                router.engine_law = times.ok().map(|times| StepLaw::of_times(&times));
            }
            ("no-router-kv-events", ..) => router.router_kv_events = false,
            ("router-temperature", _, Ok(value)) => router.router_temperature = value,
            ("router-predicted-ttl-secs", _, Ok(value)) => {
                router.router_predicted_ttl_secs = Some(value);
            }
            _ => panic!("{part} is not known here"),
        }
    }
    let seconds = router.router_predicted_ttl_secs;
    let index = IndexOptions {
        approximate: (!router.router_kv_events).then(Approximate::default),
        predicted_ttl: seconds.map(Duration::from_secs_f64),
        ..IndexOptions::default()
    };
    Policy {
        name: text.to_owned(),
        router,
        index,
    }
}

fn play(trace: &Trace, fleet: &Fleet, text: &str) -> RunReport {
    match simulate(trace, fleet, &policy(text), &mut |_| {}) {
        Ok(report) => report,
        Err(error) => panic!("{error}"),
    }
}
