//! Whole runs: nothing is lost, nothing depends on chance, and what befalls a fleet has its effect.

mod runs;
mod traces;

use kvasir_engine::EngineConfig;
use kvasir_profile::Preset;
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

fn play(trace: &Trace, fleet: &Fleet, policy: &str) -> RunReport {
    let policy = match Policy::parse(policy) {
        Ok(policy) => policy,
        Err(error) => panic!("{error}"),
    };
    match simulate(trace, fleet, &policy, &mut |_| {}) {
        Ok(report) => report,
        Err(error) => panic!("{error}"),
    }
}
