//! From checked options to what each part takes. The only place that knows both.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use kvasir_config::{Command, LogFormat, Origin, Settings, keys, parse_overrides, redacted};
use kvasir_frontend::{
    ApiKeys, AppOptions, Limits, MigrationOptions, Paths, ServerTls, WorkersFile,
};
use kvasir_host::{PolicyFile, RouterSetup};
use kvasir_index::{Approximate, IndexOptions};
use kvasir_profile::Preset;
use kvasir_router::{PrefillLoadModel, Role, RouterConfig, RouterMode, ShadowPolicy};
use kvasir_telemetry::{Clock, Identity, LogBounds, MetricOptions, TunedBounds, log};
use kvasir_text::{FolderError, ModelFolders};
use kvasir_types::{ApiKey, WorkerRecord};
use kvasir_upstream::{
    KEY_FILE_BYTES_MAX, TlsError, TlsFile, WorkerTls, default_api_key, parse_api_key, parse_worker,
    read_bounded_text,
};

use crate::{descriptors, traces};

/// Longest wait in the queue under overload protection, unless another is set.
const PROTECTED_WAIT: Duration = Duration::from_secs(5);

/// Options that cannot be followed, found only when their files or names were looked at. Exit code 2.
#[derive(Debug)]
pub(crate) struct BadConfig(pub(crate) String);

impl std::fmt::Display for BadConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfig {}

/// Anything that stops a command, in words for its user.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How log lines look.
pub(crate) fn log_format(settings: &Settings) -> log::Format {
    match settings.get(keys::LOG_FORMAT) {
        LogFormat::Text => log::Format::Text,
        LogFormat::Json => log::Format::Json,
    }
}

/// The seed of this process's random choices: as given, or drawn once, so that replicas differ. A simulation is
/// the same every time unless asked otherwise.
pub(crate) fn seed(settings: &Settings) -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    // The standard library seeds its hashers from the system; nothing more is needed here.
    let draw = || RandomState::new().build_hasher().finish();
    match settings.get(keys::SEED) {
        Some(seed) => seed,
        None if settings.command() == Command::Replay => 0,
        None => *DRAWN.get_or_init(draw),
    }
}

/// Says at the start how workers are chosen, and the seed that repeats it.
pub(crate) fn say_how(settings: &Settings) {
    let router_mode = mode_of_models(settings);
    tracing::info!(%router_mode, seed = seed(settings), "how workers are chosen");
    if protects(settings) {
        let longest = match *settings.origin(keys::ROUTER_QUEUE_MAX_WAIT_SECS) == Origin::Default {
            true => PROTECTED_WAIT,
            false => settings.get(keys::ROUTER_QUEUE_MAX_WAIT_SECS),
        };
        tracing::info!(
            longest_wait_secs = longest.as_secs_f64(),
            "overload protection is on: workers get what they can begin within a second, the rest waits or is refused; \
             --no-overload-protection turns it off"
        );
    }
}

/// How workers of the models that we serve are chosen. The default of the option is for workers that discovery finds;
/// engine servers are routed by cache, whether a flag, a file or an operator names them (decision 0099).
fn mode_of_models(settings: &Settings) -> RouterMode {
    let unsaid = *settings.origin(keys::ROUTER_MODE) == Origin::Default;
    match unsaid && settings.command() == Command::Frontend {
        true => RouterMode::Kv,
        false => settings.get(keys::ROUTER_MODE),
    }
}

/// Whether the index can be kept where `--index-snapshot` says.
pub(crate) fn probe_snapshot(settings: &Settings) -> Result<(), Failure> {
    let Some(path) = settings.get(keys::INDEX_SNAPSHOT) else {
        return Ok(());
    };
    kvasir_host::probe_snapshot(&path).map_err(|error| {
        let shown = path.display();
        BadConfig(format!(
            "--index-snapshot {shown}: cannot be written ({error}); name a file in a folder that exists and that this \
             user may write"
        ))
        .into()
    })
}

/// How many threads serve clients.
pub(crate) fn http_threads(settings: &Settings) -> usize {
    match settings.get(keys::HTTP_THREADS) {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads as usize,
    }
}

/// Where to listen; an error names the option.
pub(crate) fn listen_address(settings: &Settings) -> Result<SocketAddr, Failure> {
    let (host, port) = (settings.get(keys::HTTP_HOST), settings.get(keys::HTTP_PORT));
    resolve("--http-host", &host, port)
}

/// Where to listen for operators, if that is elsewhere.
pub(crate) fn admin_address(settings: &Settings) -> Result<Option<SocketAddr>, Failure> {
    let host = settings.get(keys::ADMIN_HOST);
    let port = settings.get(keys::ADMIN_PORT);
    port.map(|port| resolve("--admin-host", &host, port))
        .transpose()
}

fn resolve(option: &str, host: &str, port: u16) -> Result<SocketAddr, Failure> {
    let found = (host, port).to_socket_addrs();
    match found.map(|mut addresses| addresses.next()) {
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(format!("{option} {host} has no address").into()),
        Err(error) => Err(format!("{option} {host} has no address: {error}").into()),
    }
}

/// The workers that `--worker` names; an error names the option and the value.
pub(crate) fn workers(settings: &Settings) -> Result<Vec<WorkerRecord>, Failure> {
    let key = worker_key(settings)?;
    let parse = |text: &String| -> Result<WorkerRecord, Failure> {
        let mut worker = parse_worker(text)
            .map_err(|error| BadConfig(format!("--worker {}: {error}", redacted(text))))?;
        default_api_key(&mut worker, key.as_ref());
        Ok(worker)
    };
    settings.get(keys::WORKER).iter().map(parse).collect()
}

/// The workers file, read for the first time; an error names it.
pub(crate) fn workers_file(settings: &Settings) -> Result<Option<WorkersFile>, Failure> {
    let Some(path) = settings.get(keys::WORKERS_FILE) else {
        return Ok(None);
    };
    let shown = path.display().to_string();
    let file = WorkersFile::read(path, worker_key(settings)?)
        .map_err(|error| BadConfig(format!("--workers-file {shown} {error}")))?;
    Ok(Some(file))
}

/// The key for workers that have none of their own.
pub(crate) fn worker_key(settings: &Settings) -> Result<Option<ApiKey>, Failure> {
    let key = settings.get(keys::WORKER_API_KEY);
    let key = key.map(|key| parse_api_key(&key)).transpose();
    key.map_err(|error| BadConfig(format!("KVASIR_WORKER_API_KEY: {error}")).into())
}

/// The HTTP side.
pub(crate) fn app_options(settings: &Settings) -> Result<AppOptions, Failure> {
    Ok(AppOptions {
        body_limit_mb: settings.get(keys::HTTP_BODY_LIMIT_MB),
        overload_status: settings.get(keys::HTTP_OVERLOAD_STATUS_CODE),
        retry_limit: settings.get(keys::RETRY_LIMIT),
        migration: MigrationOptions {
            limit: settings.get(keys::MIGRATION_LIMIT),
            max_seq_len: settings.get(keys::MIGRATION_MAX_SEQ_LEN),
        },
        unknown_fields: match settings.get(keys::IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS) {
            true => kvasir_openai::Unknown::Ignore,
            false => kvasir_openai::Unknown::Refuse,
        },
        kv_cache_block_size: settings.get(keys::KV_CACHE_BLOCK_SIZE),
        admin_enabled: !settings.get(keys::DISABLE_FRONTEND_ADMIN_API),
        admin_apart: settings.get(keys::ADMIN_PORT).is_some(),
        admin_token: admin_token(settings)?,
        nvext_enabled: !settings.get(keys::DISABLE_FRONTEND_NVEXT),
        paths: Paths {
            chat: settings.get(keys::HTTP_SVC_CHAT_PATH),
            completions: settings.get(keys::HTTP_SVC_CMP_PATH),
            embeddings: settings.get(keys::HTTP_SVC_EMB_PATH),
            responses: settings.get(keys::HTTP_SVC_RESPONSES_PATH),
            messages: settings
                .get(keys::ENABLE_ANTHROPIC_API)
                .then(|| settings.get(keys::HTTP_SVC_ANTHROPIC_PATH)),
            models: settings.get(keys::HTTP_SVC_MODELS_PATH),
            health: settings.get(keys::HTTP_SVC_HEALTH_PATH),
            live: settings.get(keys::HTTP_SVC_LIVE_PATH),
            metrics: settings.get(keys::HTTP_SVC_METRICS_PATH),
        },
        error_peek: settings
            .get(keys::HTTP_PRE_COMMIT_ERROR_PEEK_MS)
            .map(Duration::from_millis),
        limits: limits(settings),
        tls: server_tls(settings)?,
        keys: key_file("--http-api-key-file", settings.get(keys::HTTP_API_KEY_FILE))?,
        outcomes_max: settings.get(keys::ROUTER_DECISION_LOG) as usize,
        tracer: traces::tracer(settings)?,
        settings: settings.to_json().into(),
    })
}

/// Our certificate; an error names the option and the file.
fn server_tls(settings: &Settings) -> Result<Option<ServerTls>, Failure> {
    let files = (
        settings.get(keys::TLS_CERT_PATH),
        settings.get(keys::TLS_KEY_PATH),
    );
    let (Some(certificate), Some(key)) = files else {
        return Ok(None);
    };
    Ok(Some(
        ServerTls::read(&certificate, &key).map_err(|error| bad_tls(&error))?,
    ))
}

/// Who vouches for workers behind https; an error names the option and the file.
pub(crate) fn worker_tls(settings: &Settings) -> Result<WorkerTls, Failure> {
    match settings.get(keys::WORKER_TLS_CA_PATH) {
        None => Ok(WorkerTls::default()),
        Some(path) => Ok(WorkerTls::with_authority(&path).map_err(|error| bad_tls(&error))?),
    }
}

fn bad_tls(error: &TlsError) -> BadConfig {
    let option = match error.file {
        TlsFile::Certificate => "--tls-cert-path",
        TlsFile::Key => "--tls-key-path",
        TlsFile::WorkerAuthority => "--worker-tls-ca-path",
    };
    BadConfig(format!("{option} {error}"))
}

/// What operators must show; an error names the variable or the file.
fn admin_token(settings: &Settings) -> Result<ApiKeys, Failure> {
    match settings.get(keys::ADMIN_TOKEN) {
        None => key_file("--admin-token-file", settings.get(keys::ADMIN_TOKEN_FILE)),
        Some(token) if token.trim().is_empty() => {
            Err(BadConfig("KVASIR_ADMIN_TOKEN is empty; unset it or give a token".into()).into())
        }
        Some(token) => Ok(ApiKeys::one(&token)),
    }
}

/// The keys of a file; an error names it.
pub(crate) fn key_file(option: &str, path: Option<PathBuf>) -> Result<ApiKeys, Failure> {
    let Some(path) = path else {
        return Ok(ApiKeys::default());
    };
    let shown = path.display();
    let bad = |error: &dyn std::fmt::Display| BadConfig(format!("{option} {shown}: {error}"));
    let text = read_bounded_text(&path, KEY_FILE_BYTES_MAX).map_err(|error| bad(&error))?;
    let keys = ApiKeys::parse(&text).map_err(|error| bad(&error))?;
    match keys.is_empty() {
        true => {
            let text = format!("{option} {shown} holds no key; write one on each line");
            Err(BadConfig(text).into())
        }
        false => Ok(keys),
    }
}

fn limits(settings: &Settings) -> Limits {
    Limits {
        first_byte: settings.get(keys::HTTP_FIRST_BYTE_TIMEOUT_SECS),
        stream_silence: settings
            .get(keys::HTTP_BACKEND_STREAM_TIMEOUT_SECS)
            .map(Duration::from_secs),
        keep_alive: settings
            .get(keys::HTTP_SSE_KEEP_ALIVE_INTERVAL_MS)
            .map(Duration::from_millis),
        connections_max: descriptors::client_connections(settings),
        requests_max: settings.get(keys::HTTP_REQUESTS_MAX) as usize,
        body_bytes_max: settings.get(keys::HTTP_BODY_BUDGET_MB) << 20,
        header_bytes_max: settings.get(keys::HTTP_HEADER_LIMIT_KB) as usize * 1024,
        client_stall: settings.get(keys::HTTP_CLIENT_TIMEOUT_SECS),
    }
}

/// Who exports metrics, and how they are shown.
pub(crate) fn metric_options(settings: &Settings, router_id: u64) -> MetricOptions {
    let identity = Identity {
        frontend_prefix: settings.get(keys::METRICS_PREFIX),
        namespace: settings
            .get(keys::NAMESPACE)
            .unwrap_or_else(|| "dynamo".into()),
        router_id,
        ..Identity::default()
    };
    MetricOptions {
        identity,
        by_cache: settings.get(keys::ROUTER_MODE) == RouterMode::Kv,
        bounds: bucket_bounds(settings),
    }
}

fn bucket_bounds(settings: &Settings) -> TunedBounds {
    let bounds = |min, max, count| LogBounds {
        min: settings.get(min),
        max: settings.get(max),
        count: settings.get(count),
    };
    TunedBounds {
        request_duration: bounds(
            keys::METRICS_REQUEST_DURATION_MIN,
            keys::METRICS_REQUEST_DURATION_MAX,
            keys::METRICS_REQUEST_DURATION_COUNT,
        ),
        ttft: bounds(
            keys::METRICS_TTFT_MIN,
            keys::METRICS_TTFT_MAX,
            keys::METRICS_TTFT_COUNT,
        ),
        itl: bounds(
            keys::METRICS_ITL_MIN,
            keys::METRICS_ITL_MAX,
            keys::METRICS_ITL_COUNT,
        ),
        input_sequence: bounds(
            keys::METRICS_INPUT_SEQUENCE_MIN,
            keys::METRICS_INPUT_SEQUENCE_MAX,
            keys::METRICS_INPUT_SEQUENCE_COUNT,
        ),
        output_sequence: bounds(
            keys::METRICS_OUTPUT_SEQUENCE_MIN,
            keys::METRICS_OUTPUT_SEQUENCE_MAX,
            keys::METRICS_OUTPUT_SEQUENCE_COUNT,
        ),
    }
}

/// What the index remembers.
fn index_options(settings: &Settings) -> IndexOptions {
    let approximate = |ttl| Approximate {
        ttl,
        max_blocks: usize::try_from(settings.get(keys::ROUTER_MAX_TREE_SIZE)).unwrap_or(usize::MAX),
        prune_target_ratio: settings.get(keys::ROUTER_PRUNE_TARGET_RATIO),
    };
    let events = settings.get(keys::ROUTER_KV_EVENTS);
    IndexOptions {
        approximate: (!events).then(|| approximate(settings.get(keys::ROUTER_TTL_SECS))),
        predicted_ttl: settings.get(keys::ROUTER_PREDICTED_TTL_SECS),
        max_bytes: settings.get(keys::INDEX_MAX_BYTES).0,
    }
}

/// How routers are made. Files are read and profiles found once, here; an error names the option and its value.
pub(crate) fn router_setup(settings: &Settings) -> Result<RouterSetup, Failure> {
    let policies = match settings.get(keys::ROUTER_POLICY_CONFIG) {
        None => None,
        Some(path) => Some(PolicyFile::read(&path).map_err(|error| {
            BadConfig(format!(
                "--router-policy-config {}: {error}",
                path.display()
            ))
        })?),
    };
    Ok(RouterSetup {
        policies,
        block_size: settings.get(keys::KV_CACHE_BLOCK_SIZE),
        ..RouterSetup::new(router_config(settings)?, index_options(settings))
    })
}

/// Tokenizers and templates of models, loaded on a thread of their own; an error names the option and the folder.
pub(crate) async fn model_folders(
    settings: &Settings,
    clock: Clock,
) -> Result<ModelFolders, BadConfig> {
    let Some(path) = settings.get(keys::MODEL_PATH) else {
        return Ok(ModelFolders::default());
    };
    tracing::info!(model_path = %path, "loading the tokenizer");
    let start = clock.now();
    let load = tokio::task::spawn_blocking(move || ModelFolders::load(Some(&path)));
    let folders = load
        .await
        .map_err(|error| BadConfig(format!("--model-path: {error}")))?;
    let folders = folders.map_err(|error| bad_folder(&error))?;
    let took_secs = (clock.now() - start).as_secs_f64();
    tracing::info!(took_secs, "tokenizer loaded");
    Ok(folders)
}

/// A folder of `--model-path` that cannot be used.
pub(crate) fn bad_folder(error: &FolderError) -> BadConfig {
    BadConfig(format!("--model-path {error}"))
}

/// The measured profile that the `aic-*` options name.
fn aic_profile(settings: &Settings) -> Result<Preset, BadConfig> {
    let system = settings.get(keys::AIC_SYSTEM).unwrap_or_default();
    let model = settings.get(keys::AIC_MODEL_PATH).unwrap_or_default();
    // Names of presets are made of words that every spelling of the machine and the model has.
    let asked = format!("{system} {model}").to_lowercase();
    let fits = |preset: &Preset| preset.name().split('-').all(|word| asked.contains(word));
    Preset::ALL.into_iter().find(fits).ok_or_else(|| {
        let known: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name()).collect();
        BadConfig(format!(
            "--aic-system {system} --aic-model-path {model}: no measured profile; there are {}",
            known.join(", ")
        ))
    })
}

/// Whether routers protect their engines from overload: unless that is switched off, or the operator says by the
/// options of the queue and of busy workers what is too much.
pub(crate) fn protects(settings: &Settings) -> bool {
    let is_set = |origin: &Origin| *origin != Origin::Default;
    let by_hand = [
        settings.origin(keys::ROUTER_QUEUE_THRESHOLD),
        settings.origin(keys::ROUTER_POLICY_CONFIG),
        settings.origin(keys::ACTIVE_DECODE_BLOCKS_THRESHOLD),
        settings.origin(keys::ACTIVE_PREFILL_TOKENS_THRESHOLD),
        settings.origin(keys::ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC),
    ];
    let serves = matches!(settings.command(), Command::Frontend);
    let asked = is_set(settings.origin(keys::OVERLOAD_PROTECTION));
    serves && settings.get(keys::OVERLOAD_PROTECTION) && (asked || !by_hand.into_iter().any(is_set))
}

/// The settings of routers with their shadow, if there is one; an error names the option and its value.
fn router_config(settings: &Settings) -> Result<RouterConfig, BadConfig> {
    let mut config = choice_config(settings)?;
    if let Some(spec) = settings.get(keys::SHADOW_POLICY) {
        config.shadow_policy = Some(shadow_policy(settings, &spec)?);
    }
    Ok(config)
}

fn shadow_policy(settings: &Settings, spec: &str) -> Result<ShadowPolicy, BadConfig> {
    let bad = |error: &dyn std::fmt::Display| BadConfig(format!("--shadow-policy {spec}: {error}"));
    let own = parse_overrides(settings, spec).map_err(|error| bad(&error))?;
    let config = choice_config(&own)?;
    if config.router_mode == RouterMode::Direct {
        return Err(bad(&"direct mode chooses nobody; name a mode that does"));
    }
    Ok(ShadowPolicy {
        name: spec.into(),
        config: Box::new(config),
    })
}

/// The settings of routers; block size and policy classes are their models'.
fn choice_config(settings: &Settings) -> Result<RouterConfig, BadConfig> {
    let secs = |span: Duration| span.as_secs_f64();
    let aic_profile = match settings.get(keys::ROUTER_PREFILL_LOAD_MODEL) {
        PrefillLoadModel::Aic => Some(aic_profile(settings)?),
        _ => None,
    };
    let overload_protection = protects(settings);
    let longest_wait = match overload_protection
        && *settings.origin(keys::ROUTER_QUEUE_MAX_WAIT_SECS) == Origin::Default
    {
        true => PROTECTED_WAIT,
        false => settings.get(keys::ROUTER_QUEUE_MAX_WAIT_SECS),
    };
    Ok(RouterConfig {
        kv_cache_block_size: RouterConfig::default().kv_cache_block_size,
        router_mode: mode_of_models(settings),
        router_policy: settings.get(keys::ROUTER_POLICY),
        router_role: Role::Aggregated,
        router_kv_overlap_score_credit: settings.get(keys::ROUTER_KV_OVERLAP_SCORE_CREDIT),
        router_kv_overlap_score_credit_decay: settings
            .get(keys::ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY),
        router_prefill_load_scale: settings.get(keys::ROUTER_PREFILL_LOAD_SCALE),
        router_decode_active_request_weight: settings
            .get(keys::ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT),
        router_host_cache_hit_weight: settings.get(keys::ROUTER_HOST_CACHE_HIT_WEIGHT),
        router_disk_cache_hit_weight: settings.get(keys::ROUTER_DISK_CACHE_HIT_WEIGHT),
        router_temperature: settings.get(keys::ROUTER_TEMPERATURE),
        router_kv_events: settings.get(keys::ROUTER_KV_EVENTS),
        router_predicted_ttl_secs: settings.get(keys::ROUTER_PREDICTED_TTL_SECS).map(secs),
        router_track_active_blocks: settings.get(keys::ROUTER_TRACK_ACTIVE_BLOCKS),
        router_track_output_blocks: settings.get(keys::ROUTER_TRACK_OUTPUT_BLOCKS),
        router_assume_kv_reuse: settings.get(keys::ROUTER_ASSUME_KV_REUSE),
        router_track_prefill_tokens: settings.get(keys::ROUTER_TRACK_PREFILL_TOKENS),
        router_prefill_load_model: settings.get(keys::ROUTER_PREFILL_LOAD_MODEL),
        aic_profile,
        router_queue_threshold: settings.get(keys::ROUTER_QUEUE_THRESHOLD),
        router_queue_policy: settings.get(keys::ROUTER_QUEUE_POLICY),
        router_policy_config: None,
        router_queue_max_requests: settings.get(keys::ROUTER_QUEUE_MAX_REQUESTS),
        router_queue_max_wait_secs: secs(longest_wait),
        overload_protection,
        router_overlap_refresh_after_secs: secs(
            settings.get(keys::ROUTER_OVERLAP_REFRESH_AFTER_SECS),
        ),
        router_active_request_expiry_secs: secs(
            settings.get(keys::ROUTER_ACTIVE_REQUEST_EXPIRY_SECS),
        ),
        active_decode_blocks_threshold: settings.get(keys::ACTIVE_DECODE_BLOCKS_THRESHOLD),
        active_prefill_tokens_threshold: settings.get(keys::ACTIVE_PREFILL_TOKENS_THRESHOLD),
        active_prefill_tokens_threshold_frac: settings
            .get(keys::ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC),
        router_session_affinity_ttl_secs: settings.get(keys::ROUTER_SESSION_AFFINITY_TTL_SECS),
        router_max_sessions: settings.get(keys::ROUTER_MAX_SESSIONS),
        encoder_cuda_to_cpu_ratio: settings.get(keys::ENCODER_CUDA_TO_CPU_RATIO),
        runtime_inhibited_duration_secs: secs(settings.get(keys::RUNTIME_INHIBITED_DURATION_SECS)),
        shadow_policy: None,
        router_decision_log: settings.get(keys::ROUTER_DECISION_LOG),
        router_seed: seed(settings),
        // No shared cache is asked yet, so the option has no effect.
        shared_cache_multiplier: RouterConfig::default().shared_cache_multiplier,
    })
}

#[cfg(test)]
mod tests {
    use kvasir_router::{QueuePolicy, RouterPolicy};

    use super::*;

    #[test]
    fn overload_protection_is_on_until_a_limit_is_set_by_hand() {
        let of = |words: &str| {
            let config = config_of(&format!("frontend --seed 1 {words}"));
            (
                config.overload_protection,
                config.router_queue_max_wait_secs,
            )
        };
        assert_eq!(of(""), (true, 5.0));
        assert_eq!(of("--router-mode round-robin"), (true, 5.0));
        assert_eq!(of("--router-queue-max-wait-secs 3"), (true, 3.0));
        assert_eq!(of("--no-overload-protection"), (false, 600.0));
        for limit in [
            "--router-queue-threshold 16",
            "--router-queue-threshold none",
            "--busy-threshold 0.9",
            "--active-decode-blocks-threshold 0.9",
            "--active-prefill-tokens-threshold 9",
            "--active-prefill-tokens-threshold-frac 9",
        ] {
            assert_eq!(of(limit), (false, 600.0), "{limit}");
            assert_eq!(of(&format!("{limit} --overload-protection")), (true, 5.0));
        }
    }

    #[test]
    fn a_seed_is_drawn_once_unless_it_is_given_or_nothing_is_served() {
        let frontend = Settings::defaults(Command::Frontend);
        assert_eq!(seed(&frontend), seed(&frontend));
        let config = router_setup(&frontend).unwrap().config("m", 16);
        assert_eq!(config.router_seed, seed(&frontend));
        assert_eq!(seed(&Settings::defaults(Command::Replay)), 0);
    }

    fn config_of(words: &str) -> RouterConfig {
        let words = words.split_whitespace().map(Into::into);
        let read = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
        let run = kvasir_config::parse(words, &kvasir_config::Environment::default(), read);
        let Ok(kvasir_config::Invocation::Run(run)) = run else {
            panic!("{run:?}")
        };
        router_setup(&run.settings).unwrap().config("m", 16)
    }

    /// Every option has a value of its own here, so that a field which reads another option is seen.
    #[test]
    fn every_option_reaches_its_own_field() {
        let config = config_of(
            "frontend --seed 1 --router-mode kv --router-policy time --router-kv-overlap-score-credit 0.11
             --router-kv-overlap-score-credit-decay 0.12 --router-prefill-load-scale 0.13
             --router-decode-active-request-weight 0.14 --router-host-cache-hit-weight 0.15
             --router-disk-cache-hit-weight 0.16 --router-temperature 0.17
             --router-predicted-ttl-secs 0.18 --router-track-output-blocks
             --no-router-assume-kv-reuse --no-router-track-prefill-tokens
             --router-prefill-load-model learned --router-queue-threshold 0.19
             --router-queue-policy wspt --router-queue-max-requests 20
             --router-queue-max-wait-secs 0.21 --router-overlap-refresh-after-secs 0.22
             --router-active-request-expiry-secs 0.23 --active-decode-blocks-threshold 0.24
             --active-prefill-tokens-threshold 25 --active-prefill-tokens-threshold-frac 0.26
             --router-session-affinity-ttl-secs 27 --router-max-sessions 28
             --encoder-cuda-to-cpu-ratio 29 --runtime-inhibited-duration-secs 0.30
             --router-decision-log 31",
        );
        let expected = RouterConfig {
            kv_cache_block_size: 16,
            router_mode: RouterMode::Kv,
            router_policy: RouterPolicy::Time,
            router_role: Role::Aggregated,
            router_kv_overlap_score_credit: 0.11,
            router_kv_overlap_score_credit_decay: 0.12,
            router_prefill_load_scale: 0.13,
            router_decode_active_request_weight: 0.14,
            router_host_cache_hit_weight: 0.15,
            router_disk_cache_hit_weight: 0.16,
            shared_cache_multiplier: 0.5,
            router_temperature: 0.17,
            router_kv_events: true,
            router_predicted_ttl_secs: Some(0.18),
            router_track_active_blocks: true,
            router_track_output_blocks: true,
            router_assume_kv_reuse: false,
            router_track_prefill_tokens: false,
            router_prefill_load_model: PrefillLoadModel::Learned,
            aic_profile: None,
            router_queue_threshold: Some(0.19),
            router_queue_policy: QueuePolicy::Wspt,
            router_policy_config: None,
            router_queue_max_requests: 20,
            router_queue_max_wait_secs: 0.21,
            overload_protection: false,
            router_overlap_refresh_after_secs: 0.22,
            router_active_request_expiry_secs: 0.23,
            active_decode_blocks_threshold: Some(0.24),
            active_prefill_tokens_threshold: Some(25),
            active_prefill_tokens_threshold_frac: Some(0.26),
            router_session_affinity_ttl_secs: Some(27),
            router_max_sessions: 28,
            encoder_cuda_to_cpu_ratio: 29,
            runtime_inhibited_duration_secs: 0.3,
            shadow_policy: None,
            router_decision_log: 31,
            router_seed: 1,
        };
        assert_eq!(config, expected);
        let without = config_of("frontend --no-router-kv-events --no-router-track-active-blocks");
        assert!(!without.router_kv_events && !without.router_track_active_blocks);
    }

    /// A shadow differs from the live policy only in what its words say.
    #[test]
    fn a_shadow_policy_is_the_live_one_with_its_words_laid_over() {
        let config = config_of(
            "frontend --router-policy time --shadow-policy kv,router-policy=kv,router-prefill-load-scale=16",
        );
        let shadow = config.shadow_policy.clone().unwrap();
        assert_eq!(
            &*shadow.name,
            "kv,router-policy=kv,router-prefill-load-scale=16"
        );
        let expected = RouterConfig {
            kv_cache_block_size: shadow.config.kv_cache_block_size,
            router_policy: RouterPolicy::Kv,
            router_prefill_load_scale: 16.0,
            shadow_policy: None,
            ..config
        };
        assert_eq!(*shadow.config, expected);
        let time = config_of("frontend --shadow-policy time")
            .shadow_policy
            .unwrap();
        assert!(time.config.counts_seconds());
        let plain = config_of("frontend --router-policy time --shadow-policy kv");
        assert!(
            !plain.shadow_policy.unwrap().config.counts_seconds(),
            "the name is the policy"
        );
    }

    #[test]
    fn load_aware_beats_what_was_set() {
        let config = config_of(
            "frontend --load-aware --router-predicted-ttl-secs 5 --router-prefill-load-scale 3
             --no-router-track-active-blocks",
        );
        assert_eq!(config.router_mode, RouterMode::Kv);
        assert_eq!(config.router_kv_overlap_score_credit, 0.0);
        assert!(!config.router_kv_events && !config.router_assume_kv_reuse);
        assert!(config.router_track_active_blocks && config.router_track_prefill_tokens);
        assert_eq!(config.router_predicted_ttl_secs, None);
        assert_eq!(config.router_prefill_load_scale, 3.0);
        assert!(!config.needs_index() && !config.records_decisions());
    }

    /// An engine server is routed alike whether a flag, a file or an operator names it.
    #[test]
    fn the_mode_of_engine_servers_does_not_depend_on_who_names_them() {
        let mode = |words| config_of(words).router_mode;
        assert_eq!(mode("frontend"), RouterMode::Kv);
        assert_eq!(mode("frontend --worker http://a:1"), RouterMode::Kv);
        assert_eq!(mode("frontend --workers-file f"), RouterMode::Kv);
        assert_eq!(
            mode("frontend --router-mode round-robin"),
            RouterMode::RoundRobin
        );
        assert_eq!(mode("demo"), RouterMode::Kv);
        assert_eq!(mode("replay"), RouterMode::RoundRobin);
    }
}
