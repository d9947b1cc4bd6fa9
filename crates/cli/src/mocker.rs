//! `kvasir mocker`: mock engines that answer as vLLM servers do, one port each; or that join a fleet.

mod events;
mod fleet;
mod topology;

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use kvasir_config::{DisaggregationEngine, DisaggregationMode, Settings, keys};
use kvasir_mocker::{
    EventSockets, HttpFault, HttpPart, MeetingPoint, MockAdapter, MockServer, MockServerOptions,
    Observer, SideChannel, Worker, WorkerOptions, answers_in_words,
};
use kvasir_tasks::Tasks;
use kvasir_text::{FolderError, TextModel};
use kvasir_types::{RequestId, WorkerId};
use tokio::signal::unix::{SignalKind, signal};

use crate::wiring::{self, Failure};

/// The model's name where nothing gives one.
const MODEL: &str = "kvasir-mock";

/// Serves until a signal.
pub(crate) async fn run(settings: &Settings) -> Result<(), Failure> {
    if settings.is_set(keys::DISCOVERY_BACKEND) {
        return fleet::run(settings).await;
    }
    let tasks = Tasks::new();
    let first = wiring::listen_address(settings)?;
    let plan = events::Plan::read(settings, &first.ip().to_string())?;
    let (options, mut worker) = options(settings)?;
    worker.engine.event_tokens = plan.is_some();
    tracing::info!(seed = options.seed, "mock engines start");
    let mut servers = Vec::new();
    for at in 0..settings.get(keys::WORKERS) {
        let id = WorkerId(u64::from(at));
        let events = match &plan {
            Some(plan) => Some(Arc::new(plan.open(&tasks, at).await?)),
            None => None,
        };
        let observer: Arc<dyn Observer> = match &events {
            Some(sockets) => Arc::clone(sockets) as _,
            None => Arc::new(()),
        };
        let worker = Worker::spawn(&tasks, id, worker.clone(), &observer)?;
        let seed = options.seed.wrapping_add(u64::from(at));
        let options = MockServerOptions {
            seed,
            part: part(settings, (first.ip(), at), seed, &tasks).await?,
            ..options.clone()
        };
        let address = nth(first, at)?;
        let server = MockServer::start(&tasks, address, worker, options)
            .await
            .map_err(|error| {
                format!("cannot listen on {address}: {error}; choose another port with --http-port")
            })?;
        let line = format!(
            "{} on http://{}\n",
            settings_name(settings),
            server.address()
        );
        let _ = std::io::stdout().write_all(line.as_bytes());
        if let Some(sockets) = events {
            print_sockets(&sockets);
            server.announce_events(sockets);
        }
        servers.push(server);
    }
    told_to_end(settings).await?;
    drop(servers);
    let timeout = settings.get(keys::RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
    tokio::select! {
        _ = tasks.shut_down(timeout) => {}
        _ = signalled() => {}
    }
    Ok(())
}

/// Says where each rank's events are.
fn print_sockets(sockets: &EventSockets) {
    for (events, replay) in (0..sockets.ranks()).filter_map(|rank| sockets.addresses(rank)) {
        let replay = replay.map_or_else(
            || "no replay".to_owned(),
            |at| format!("replay at tcp://{at}"),
        );
        let line = format!("  cache events at tcp://{events}, {replay}\n");
        let _ = std::io::stdout().write_all(line.as_bytes());
    }
}

/// Waits for a signal, or for the end of standard input where that is one.
async fn told_to_end(settings: &Settings) -> Result<(), Failure> {
    let is_watched = settings.get(keys::UNTIL_STDIN_CLOSES);
    let closed = async {
        match is_watched {
            true => drop(tokio::task::spawn_blocking(read_to_end).await),
            false => std::future::pending().await,
        }
    };
    tokio::select! {
        signalled = signalled() => signalled,
        () = closed => Ok(()),
    }
}

/// Reads standard input until it is closed; what comes is nobody's.
fn read_to_end() {
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
}

/// Waits for SIGINT or SIGTERM.
async fn signalled() -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// What all servers have in common.
fn options(settings: &Settings) -> Result<(MockServerOptions, WorkerOptions), Failure> {
    let (mut engine, _) = kvasir_replay::engine_config(settings)?;
    let path = settings.get(keys::MODEL_PATH);
    let text = match &path {
        Some(path) => TextModel::load(path.as_ref())
            .map_err(|error| wiring::bad_folder(&FolderError::new(path, &error)))?,
        None => TextModel::builtin()?,
    };
    if let Some(longest) = text.context_length()
        && settings.get(keys::MAX_MODEL_LEN).is_none()
    {
        engine.max_model_len = engine.max_model_len.min(longest);
    }
    let faults = settings.get(keys::FAULT_AT_START);
    let faults: Result<Vec<HttpFault>, _> = faults.iter().map(|text| text.parse()).collect();
    let worker = WorkerOptions {
        engine,
        ranks: settings.get(keys::DATA_PARALLEL_SIZE),
        answer: answers_in_words(&text)?,
    };
    let server = MockServerOptions {
        model: settings_name(settings).into(),
        root: path.unwrap_or_else(|| MODEL.to_owned()),
        text: Arc::new(text),
        faults: faults?,
        seed: wiring::seed(settings),
        prompt_tokens_details: settings.get(keys::ENABLE_PROMPT_TOKENS_DETAILS),
        adapters: settings
            .get(keys::LORA_MODULES)
            .iter()
            .map(|text| MockAdapter::read(text))
            .collect(),
        part: HttpPart::Whole,
    };
    Ok((server, worker))
}

/// Which part of requests the server number `at` computes.
async fn part(
    settings: &Settings,
    (host, at): (IpAddr, u32),
    seed: u64,
    tasks: &Tasks,
) -> Result<HttpPart, Failure> {
    let mode = settings.get(keys::DISAGGREGATION_MODE);
    let port = settings.get(keys::BOOTSTRAP_PORTS);
    let is_sglang =
        port.is_some() || settings.get(keys::DISAGGREGATION_ENGINE) == DisaggregationEngine::Sglang;
    let per_token = fleet::transfer_time(settings);
    Ok(match (mode, is_sglang) {
        (DisaggregationMode::Agg, _) => HttpPart::Whole,
        (_, false) => {
            let engine_id = RequestId(u128::from(seed) << 64 | u128::from(at)).to_string();
            let any = SocketAddr::from((host, 0));
            let side = SideChannel::open_at(any, engine_id, tasks).await;
            let side = side.map_err(|error| format!("cannot listen on {any}: {error}"))?;
            HttpPart::Connector { side, per_token }
        }
        (DisaggregationMode::Prefill, true) => {
            let address = nth(SocketAddr::from((host, port.unwrap_or(0))), at)?;
            let meeting = MeetingPoint::open_at(address, tasks).await;
            let meeting = meeting.map_err(|error| {
                format!("cannot listen on {address}: {error}; choose another port with --bootstrap-ports")
            })?;
            HttpPart::SglangPrefill { meeting, per_token }
        }
        (DisaggregationMode::Decode, true) => HttpPart::SglangDecode,
    })
}

/// The served name: as given, or that of the model's folder.
fn settings_name(settings: &Settings) -> String {
    let folder = || {
        let path = settings.get(keys::MODEL_PATH)?;
        let name = std::path::Path::new(&path).file_name()?;
        Some(name.to_string_lossy().into_owned())
    };
    settings
        .get(keys::MODEL_NAME)
        .or_else(folder)
        .unwrap_or_else(|| MODEL.to_owned())
}

/// The address of the server number `at`: ports follow each other, unless each takes a free one.
fn nth(first: SocketAddr, at: u32) -> Result<SocketAddr, Failure> {
    let mut address = first;
    if first.port() != 0 {
        let port = u32::from(first.port()) + at;
        let port = u16::try_from(port).map_err(|_| {
            format!(
                "--workers {} from port {} need ports above 65535",
                at + 1,
                first.port()
            )
        })?;
        address.set_port(port);
    }
    Ok(address)
}
