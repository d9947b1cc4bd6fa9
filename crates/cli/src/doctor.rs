//! `kvasir doctor`: looks at workers, prints what is wrong and which flag mends it.
//!
//! Exit code 0 if nothing failed, 1 if something did or nothing could be looked at, 2 for a wrong command line.

mod planes;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{Settings, keys};
use kvasir_doctor::{ListedWorker, Probe, Report, Target, WorkerReport, examine, examine_pair};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_text::TextModel;
use kvasir_upstream::default_api_key;

use crate::operate;
use crate::wiring::{self, Failure};

/// Looks, prints, and says by its code whether all is well.
pub(crate) async fn run(settings: &Settings) -> Result<ExitCode, Failure> {
    let tasks = Tasks::new();
    let clock = Clock::new();
    let model_path = settings.get(keys::MODEL_PATH);
    let load = |path: &String| {
        let model = TextModel::load(Path::new(path));
        model.map(Arc::new).map_err(|error| error.to_string())
    };
    let probe = Probe {
        timeout: settings.get(keys::TIMEOUT_SECS),
        worker_tls: wiring::worker_tls(settings)?,
        text: model_path.as_ref().map(load),
        seed: clock.unix_millis(clock.now()) ^ u64::from(std::process::id()) << 48,
    };
    let target = |listed: ListedWorker| {
        Some(Target {
            endpoint: listed.worker.transport.http()?.clone(),
            worker: listed.worker,
            index_block_size: listed.block_size,
            model: settings.get(keys::MODEL_NAME),
            block_size: settings.get(keys::KV_CACHE_BLOCK_SIZE),
            model_path: model_path.clone(),
        })
    };
    // Who names a store wants to know about it, and about nothing else unless that is named, too.
    let on_planes = match settings.is_set(keys::DISCOVERY_BACKEND) {
        true => planes::look(settings, &tasks).await?,
        false => Vec::new(),
    };
    let is_named = settings.is_set(keys::URL) || !wiring::workers(settings)?.is_empty();
    let workers = match is_named || on_planes.is_empty() {
        true => workers(settings).await?,
        false => Vec::new(),
    };
    let observations = probe
        .look(&tasks, workers.into_iter().filter_map(target).collect())
        .await;
    let examined = observations.iter().map(|observed| WorkerReport {
        worker: observed.target.endpoint.to_string(),
        checks: examine(observed),
    });
    let pairs = probe.look_at_pairs(&observations).await;
    let pairs = pairs.iter().map(|pair| WorkerReport {
        worker: format!("{} and {}", pair.prefill, pair.decode),
        checks: vec![examine_pair(pair)],
    });
    let report = Report {
        workers: on_planes.into_iter().chain(examined).chain(pairs).collect(),
    };
    tasks.shut_down(Duration::ZERO).await;
    let text = match settings.get(keys::JSON) {
        true => report.to_json() + "\n",
        false => report.to_string(),
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(match report.is_well() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Those that are named, and those of the frontend at `--url`, which is asked unless workers are named alone.
async fn workers(settings: &Settings) -> Result<Vec<ListedWorker>, Failure> {
    let named = wiring::workers(settings)?.into_iter();
    let mut workers: Vec<ListedWorker> = named
        .map(|worker| ListedWorker {
            worker,
            block_size: None,
        })
        .collect();
    if !workers.is_empty() && !settings.is_set(keys::URL) {
        return Ok(workers);
    }
    let key = wiring::worker_key(settings)?;
    for mut listed in operate::engines(settings).await? {
        let id = listed.worker.id;
        if !workers.iter().any(|w| w.worker.id == id) {
            default_api_key(&mut listed.worker, key.as_ref());
            workers.push(listed);
        }
    }
    Ok(workers)
}
