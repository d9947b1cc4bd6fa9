//! From checked options to what each part takes. The only place that knows both.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvasir_config::{
    Command, ConditionalDisagg, DisaggPolicy, LogFormat, Origin, PrefillFailure, ReasoningField,
    Settings, keys, redacted,
};
use kvasir_frontend::{
    ApiKeys, AppOptions, Limits, MigrationOptions, Paths, ServerTls, StreamDispatch, WorkersFile,
};
use kvasir_planes::SetupError;
use kvasir_router::{BypassPolicy, BypassTerms, RouterMode, TwoStepTerms};
use kvasir_setup::{PROTECTED_WAIT, RouterSetupError, mode_of_models};
pub(crate) use kvasir_setup::{protects, router_setup, seed, service_setup};
use kvasir_telemetry::{Clock, Identity, LogBounds, MetricOptions, ProcessKind, TunedBounds, log};
use kvasir_text::{FolderError, ModelFolders};
use kvasir_types::{ApiKey, Role, WorkerRecord};
use kvasir_upstream::{
    KEY_FILE_BYTES_MAX, TlsError, TlsFile, WorkerTls, default_api_key, parse_api_key, parse_worker,
    read_bounded_text,
};

use crate::{descriptors, traces};

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

/// What tells this process from others, whatever their seeds are.
pub(crate) fn process_id() -> u64 {
    // The standard library seeds its hashers from the system; nothing more is needed here.
    RandomState::new().build_hasher().finish()
}

/// Says at the start how workers are chosen, and the seed that repeats it.
pub(crate) fn say_how(settings: &Settings) {
    let router_mode = mode_of_models(settings);
    let router_policy = settings.get(keys::ROUTER_POLICY);
    let policy = (router_mode == RouterMode::Kv).then_some(router_policy.name());
    tracing::info!(%router_mode, router_policy = policy, seed = seed(settings), "how workers are chosen");
    if matches!(settings.origin(keys::ROUTER_POLICY), Origin::Rule(_)) {
        tracing::info!(
            "placements cost seconds, which are learned from the workers; any option of Dynamo's router, such as --router-mode kv, \
             selects its cost in blocks"
        );
    }
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

pub(crate) fn resolve(option: &str, host: &str, port: u16) -> Result<SocketAddr, Failure> {
    Ok(kvasir_planes::resolve(option, host, port)?)
}

/// Whether a command stopped because an option cannot be followed.
pub(crate) fn is_bad_config(error: &Failure) -> bool {
    let setup = error.downcast_ref::<SetupError>();
    error.is::<BadConfig>()
        || error.is::<RouterSetupError>()
        || setup.is_some_and(SetupError::is_option)
}

/// The workers that `--worker` names; an error names the option and the value.
pub(crate) fn workers(settings: &Settings) -> Result<Vec<WorkerRecord>, Failure> {
    let key = worker_key(settings)?;
    let prefill = settings.get(keys::PREFILL_WORKER);
    // Beside servers that compute prompts, the others compute answers.
    let of_workers = match prefill.is_empty() {
        true => Role::Aggregated,
        false => Role::Decode,
    };
    let parse = |option: &str, role: Role, text: &String| -> Result<WorkerRecord, Failure> {
        let mut worker = parse_worker(text)
            .map_err(|error| BadConfig(format!("{option} {}: {error}", redacted(text))))?;
        if worker.role == Role::Aggregated {
            worker.role = role;
        }
        default_api_key(&mut worker, key.as_ref());
        Ok(worker)
    };
    let workers = settings.get(keys::WORKER);
    let workers = workers
        .iter()
        .map(|text| parse("--worker", of_workers, text));
    let prefill = prefill
        .iter()
        .map(|text| parse("--prefill-worker", Role::Prefill, text));
    workers.chain(prefill).collect()
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

/// When a model's decode workers compute prompts themselves, though it has or had prefill workers.
fn two_step(settings: &Settings) -> TwoStepTerms {
    let enforced = settings.get(keys::ENFORCE_DISAGG);
    let fails = settings.get(keys::ROUTER_PREFILL_FAILURE) == PrefillFailure::Fail;
    TwoStepTerms {
        serves_alone: !enforced || settings.get(keys::DECODE_FALLBACK),
        falls_back: !enforced && !fails,
    }
}

/// When a prompt goes past the prefill workers.
fn bypass(settings: &Settings) -> Option<BypassTerms> {
    if !settings.get(keys::ROUTER_CONDITIONAL_DISAGG) {
        return None;
    }
    let text = settings.get(keys::ROUTER_CONDITIONAL_DISAGG_CONFIG);
    let config = text.and_then(|text| ConditionalDisagg::from_json(&text));
    let config = config.unwrap_or_default();
    Some(BypassTerms {
        policy: match config.policy {
            DisaggPolicy::IslBounding => BypassPolicy::IslBounding,
            DisaggPolicy::PrefillLoad => BypassPolicy::PrefillLoad,
            DisaggPolicy::IslOrLoad => BypassPolicy::IslOrLoad,
        },
        uncached_tokens: config.eff_isl_threshold,
        uncached_share: config.eff_isl_ratio_threshold,
        prefill_busy: config.prefill_busy_threshold,
        decode_busy: config.decode_busy_threshold,
    })
}

/// The HTTP side.
pub(crate) fn app_options(settings: &Settings) -> Result<AppOptions, Failure> {
    Ok(AppOptions {
        body_limit_mb: settings.get(keys::HTTP_BODY_LIMIT_MB),
        overload_status: settings.get(keys::HTTP_OVERLOAD_STATUS_CODE),
        retry_limit: settings.get(keys::RETRY_LIMIT),
        migration: MigrationOptions {
            limit: settings.get(keys::MIGRATION_LIMIT),
            follows_cards: !settings.is_set(keys::MIGRATION_LIMIT),
            max_seq_len: settings.get(keys::MIGRATION_MAX_SEQ_LEN),
        },
        two_step: two_step(settings),
        bypass: bypass(settings),
        unknown_fields: match settings.get(keys::IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS) {
            true => kvasir_openai::Unknown::Ignore,
            false => kvasir_openai::Unknown::Refuse,
        },
        reasoning_field: match settings.get(keys::REASONING_FIELD_NAME) {
            ReasoningField::ReasoningContent => kvasir_openai::ReasoningField::ReasoningContent,
            ReasoningField::Reasoning => kvasir_openai::ReasoningField::Reasoning,
        },
        stream_dispatch: StreamDispatch {
            tool_calls: settings.get(keys::ENABLE_STREAMING_TOOL_DISPATCH),
            reasoning: settings.get(keys::ENABLE_STREAMING_REASONING_DISPATCH),
        },
        exclude_tools: settings.get(keys::EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE),
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
        process: match settings.command() {
            Command::Router => ProcessKind::Router,
            Command::Indexer => ProcessKind::Indexer,
            Command::Mocker => ProcessKind::Worker,
            _ => ProcessKind::Frontend,
        },
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
