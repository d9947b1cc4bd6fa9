//! What is to be simulated: from checked options to traces, fleets and policies.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvasir_config::{ConfigError, EnginePreset, Settings, TraceFormat, keys, parse_overrides};
use kvasir_engine::EngineConfig;
use kvasir_index::IndexOptions;
use kvasir_profile::{Constants, Preset, StepTimes};
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_sim::{
    ArrivalMode, Fleet, FleetChange, Policy, SimError, Slo, Trace, TraceError, TraceOptions,
    Workload, WorkloadError, ideal_hit_share,
};
use kvasir_types::Time;

use crate::split::{Split, each_split, splits};

/// Policies that are compared when none is named.
const USUAL_POLICIES: [RouterMode; 4] = [
    RouterMode::RoundRobin,
    RouterMode::Random,
    RouterMode::LeastLoaded,
    RouterMode::Kv,
];

/// Makes the settings of a router and its index, for blocks of this many tokens, as the server does. An
/// error names the option that cannot be followed.
pub type RouterWiring<'a> =
    dyn Fn(&Settings, u32) -> Result<(RouterConfig, IndexOptions), String> + 'a;

/// Everything that will be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One trace for each seed.
    pub traces: Vec<Trace>,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// How requests come, one level of load each.
    pub paces: Vec<ArrivalMode>,
    /// What is compared.
    pub policies: Vec<Policy>,
    /// Who computes prompts and who answers, one for each of `policies`; empty where every worker does both.
    pub splits: Vec<Split>,
    /// Which of them the others are compared with.
    pub baseline: usize,
    /// Everything else; pace and seed are those of each run.
    pub fleet: Fleet,
    /// What the engine is called.
    pub engine_name: String,
    /// The best hit share there could be.
    pub ideal_hit_share: f64,
    /// Runs at a time.
    pub jobs: usize,
    /// Where the JSON goes.
    pub json: Option<PathBuf>,
    /// Where the page goes.
    pub html: Option<PathBuf>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// Options that contradict each other, or lack one.
    #[error("{0}")]
    Options(String),
    /// An invalid policy.
    #[error("{0}")]
    Policy(ConfigError),
    /// A file that cannot be read.
    #[error("--trace {path}: {cause}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// A trace that cannot be used.
    #[error("--trace {path}: {cause}", path = path.display())]
    Trace {
        /// Which.
        path: PathBuf,
        /// What is wrong, and in which line.
        cause: TraceError,
    },
    /// An invalid workload.
    #[error("--workload: {0}")]
    Workload(#[from] WorkloadError),
    /// The simulation cannot run.
    #[error("{0}")]
    Simulation(#[from] SimError),
    /// A report that cannot be written.
    #[error("{path}: {cause}", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
}

impl ReplayError {
    /// 2 for a bad request, 1 for a failure while it was carried out.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Write { .. } => 1,
            _ => 2,
        }
    }
}

impl Plan {
    /// The plan of these settings.
    pub fn from_settings(
        settings: &Settings,
        wiring: &RouterWiring<'_>,
    ) -> Result<Self, ReplayError> {
        let (engine, engine_name) = engine_config(settings)?;
        let block_size = engine.block_size;
        let first = settings.get(keys::SEED).unwrap_or(0);
        let seeds: Vec<u64> = (0..u64::from(settings.get(keys::SEEDS)))
            .map(|n| first.wrapping_add(n))
            .collect();
        let traces = traces(settings, &seeds)?;
        let policies = policies(settings, block_size, wiring)?;
        let ways = splits(settings)?;
        let (policies, splits) = match ways.is_empty() {
            true => (policies, ways),
            false => each_split(policies, &ways),
        };
        let mut fleet = fleet(settings, engine)?;
        if let Some(all) = splits.first() {
            fleet.workers = all.workers;
        }
        let ideal = traces
            .first()
            .map_or(0.0, |trace| ideal_hit_share(trace, block_size));
        Ok(Self {
            baseline: baseline(settings, &policies)?,
            policies,
            splits,
            ideal_hit_share: ideal,
            traces,
            seeds,
            paces: paces(settings),
            fleet,
            engine_name,
            jobs: jobs(settings),
            json: settings.get(keys::REPORT_JSON),
            html: settings.get(keys::REPORT_HTML),
        })
    }
}

/// The engine of these settings and its name; the mock server uses it too.
pub fn engine_config(settings: &Settings) -> Result<(EngineConfig, String), ReplayError> {
    let block_size = settings.get(keys::BLOCK_SIZE);
    let engine_preset = settings.get(keys::ENGINE);
    let preset = match engine_preset {
        EnginePreset::H200Llama8b => Some(Preset::H200Llama8b),
        EnginePreset::H200Qwen32b => Some(Preset::H200Qwen32b),
        EnginePreset::Polynomial | EnginePreset::Constant => None,
    };
    let base = match preset {
        Some(preset) => EngineConfig::preset(preset, block_size).map_err(SimError::from)?,
        None => EngineConfig {
            block_size,
            ..EngineConfig::default()
        },
    };
    let times = match engine_preset {
        EnginePreset::Constant => StepTimes::Constant(Constants {
            step_ms: settings.get(keys::STEP_MS),
            prompt_token_ms: settings.get(keys::PROMPT_TOKEN_MS),
            decode_ms: settings.get(keys::DECODE_MS),
        }),
        _ => base.times.clone(),
    };
    let mut engine = EngineConfig {
        times,
        family: settings.get(keys::ENGINE_TYPE),
        num_blocks: settings.get(keys::NUM_BLOCKS).unwrap_or(base.num_blocks),
        max_num_seqs: settings.get(keys::MAX_NUM_SEQS),
        max_num_batched_tokens: settings.get(keys::MAX_NUM_BATCHED_TOKENS),
        chunked_prefill: settings.get(keys::ENABLE_CHUNKED_PREFILL),
        long_prefill_tokens: settings.get(keys::LONG_PREFILL_TOKEN_THRESHOLD),
        prefix_caching: settings.get(keys::ENABLE_PREFIX_CACHING),
        preemption: settings.get(keys::PREEMPTION_MODE),
        speedup: settings.get(keys::SPEEDUP),
        ..base
    };
    let holds = u64::from(engine.usable_blocks()) * u64::from(block_size);
    let longest = u32::try_from(holds)
        .unwrap_or(u32::MAX)
        .min(EngineConfig::default().max_model_len);
    engine.max_model_len = settings.get(keys::MAX_MODEL_LEN).unwrap_or(longest);
    engine.check().map_err(SimError::from)?;
    Ok((engine, engine_preset.name().to_owned()))
}

fn traces(settings: &Settings, seeds: &[u64]) -> Result<Vec<Trace>, ReplayError> {
    let limit = settings
        .get(keys::REQUESTS)
        .map_or(usize::MAX, |n| n as usize);
    let spread = settings.get(keys::SPREAD);
    let one = |seed: u64, base: &Trace| {
        let mut trace = base.clone();
        if spread {
            trace.spread(seed);
        }
        trace.truncate(limit);
        trace
    };
    match (settings.get(keys::TRACE), settings.get(keys::WORKLOAD)) {
        (Some(path), None) => {
            let base = read_trace(settings, &path)?;
            Ok(seeds.iter().map(|seed| one(*seed, &base)).collect())
        }
        (None, Some(text)) => {
            let workload = Workload::parse(&text)?;
            let made = |seed: &u64| {
                let mut trace = workload.trace(*seed);
                trace.name = text.clone();
                trace.truncate(limit);
                trace
            };
            Ok(seeds.iter().map(made).collect())
        }
        (None, None) => Err(ReplayError::Options(
            "nothing to replay; give --trace FILE, or --workload such as chat".to_owned(),
        )),
        (Some(_), Some(_)) => Err(ReplayError::Options(
            "--trace and --workload are both given; give one of them".to_owned(),
        )),
    }
}

fn read_trace(settings: &Settings, path: &Path) -> Result<Trace, ReplayError> {
    let text = std::fs::read_to_string(path).map_err(|cause| ReplayError::Read {
        path: path.into(),
        cause,
    })?;
    let options = TraceOptions {
        format: match settings.get(keys::TRACE_FORMAT) {
            TraceFormat::Auto => None,
            TraceFormat::Mooncake => Some(kvasir_sim::TraceFormat::Mooncake),
            TraceFormat::Plain => Some(kvasir_sim::TraceFormat::Plain),
        },
        trace_block_size: settings.get(keys::TRACE_BLOCK_SIZE),
        seed: 0,
    };
    let name = path
        .file_name()
        .map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    Trace::read(&name, &text, &options).map_err(|cause| ReplayError::Trace {
        path: path.into(),
        cause,
    })
}

fn policies(
    settings: &Settings,
    block_size: u32,
    wiring: &RouterWiring<'_>,
) -> Result<Vec<Policy>, ReplayError> {
    let mut names = settings.get(keys::POLICY);
    if names.is_empty() {
        names = USUAL_POLICIES.map(|mode| mode.name().to_owned()).to_vec();
    }
    let mut policies: Vec<Policy> = Vec::new();
    for name in names {
        let own = parse_overrides(settings, &name).map_err(ReplayError::Policy)?;
        let (router, index) = wiring(&own, block_size).map_err(ReplayError::Options)?;
        if policies.iter().all(|policy| policy.name != name) {
            policies.push(Policy {
                name,
                router,
                index,
            });
        }
    }
    Ok(policies)
}

fn baseline(settings: &Settings, policies: &[Policy]) -> Result<usize, ReplayError> {
    let Some(name) = settings.get(keys::BASELINE) else {
        return Ok(0);
    };
    policies
        .iter()
        .position(|policy| policy.name == name)
        .ok_or_else(|| {
            let known: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
            let known = known.join("`, `");
            ReplayError::Options(format!(
                "--baseline {name} is not a policy of this run; they are `{known}`"
            ))
        })
}

/// Numbers between commas; the option's rule has checked their form.
fn numbers(text: &str) -> impl Iterator<Item = f64> {
    text.split(',').filter_map(|part| part.trim().parse().ok())
}

fn paces(settings: &Settings) -> Vec<ArrivalMode> {
    let millis = settings.get(keys::THINK_MS);
    let think = Duration::from_nanos((millis * 1e6) as u64);
    match settings.get(keys::CLOSED_LOOP) {
        Some(clients) => numbers(&clients)
            .map(|clients| ArrivalMode::Closed {
                clients: clients as u32,
                think,
            })
            .collect(),
        None => {
            let speeds = settings.get(keys::SPEED);
            numbers(&speeds)
                .map(|speed| ArrivalMode::Open { speed })
                .collect()
        }
    }
}

fn fleet(settings: &Settings, engine: EngineConfig) -> Result<Fleet, ReplayError> {
    let millis = |ms: f64| Duration::from_nanos((ms * 1e6) as u64);
    let workers = settings.get(keys::WORKERS);
    let mut changes = Vec::new();
    for text in settings.get(keys::WORKER_LEAVES) {
        let (worker, at) = worker_at(&text);
        if worker >= workers {
            let last = workers.saturating_sub(1);
            return Err(ReplayError::Options(format!(
                "--worker-leaves {text}: there is no worker {worker}; workers are 0 to {last}"
            )));
        }
        changes.push(FleetChange::Leaves { at, worker });
    }
    for text in settings.get(keys::WORKER_JOINS) {
        let (worker, at) = worker_at(&text);
        changes.push(FleetChange::Joins { at, worker });
    }
    for text in settings.get(keys::WORKER_SPEED) {
        let (worker, percent, at) = worker_speed(&text);
        if worker >= workers {
            let last = workers.saturating_sub(1);
            return Err(ReplayError::Options(format!(
                "--worker-speed {text}: there is no worker {worker}; workers are 0 to {last}"
            )));
        }
        changes.push(FleetChange::Slows {
            at,
            worker,
            percent,
        });
    }
    Ok(Fleet {
        ranks: settings.get(keys::DATA_PARALLEL_SIZE),
        replicas: settings.get(keys::REPLICAS),
        replica_sync: settings.get(keys::REPLICA_SYNC),
        event_latency: millis(settings.get(keys::EVENT_LATENCY_MS)),
        event_loss: settings.get(keys::EVENT_LOSS),
        retries: settings.get(keys::RETRY_LIMIT),
        changes,
        slo: Slo {
            ttft: millis(settings.get(keys::SLO_TTFT_MS)),
            itl: millis(settings.get(keys::SLO_ITL_MS)),
        },
        ..Fleet::new(engine, workers)
    })
}

/// `worker@seconds`; the option's rule has checked the form.
fn worker_at(text: &str) -> (u32, Time) {
    let (worker, seconds) = text.split_once('@').unwrap_or((text, "0"));
    let at = Time::from_secs_f64(seconds.parse().unwrap_or(0.0));
    (worker.parse().unwrap_or(0), at)
}

/// `worker=percent@seconds`; the option's rule has checked the form.
fn worker_speed(text: &str) -> (u32, u32, Time) {
    let (worker, rest) = text.split_once('=').unwrap_or((text, "100@0"));
    let (percent, at) = worker_at(rest);
    (worker.parse().unwrap_or(0), percent, at)
}

fn jobs(settings: &Settings) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    settings.get(keys::JOBS).map_or_else(all, |n| n as usize)
}
