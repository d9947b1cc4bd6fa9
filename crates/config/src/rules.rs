//! Rules between options.
//!
//! Answers: which options decide others, and which combinations make no sense? First the deciding
//! ones act, in a fixed order (defaults that depend on others, the old overlap weight, load-aware
//! mode), then what is left is checked as a whole.
//!
//! Elsewhere: ranges of single options (`table`).

use crate::choice::{
    ChatProcessor, DiscoveryBackend, EventPlane, PrefillLoadModel, RouterMode, RouterPolicy,
    TrackingHash,
};
use crate::command::Command;
use crate::disagg::ConditionalDisagg;
use crate::error::Problem;
use crate::keys;
use crate::notice::{Notice, NoticeKind};
use crate::settings::Settings;
use crate::spec::Key;
use crate::value::Value;

const LOAD_AWARE: &str = "--load-aware";
const OLD_WEIGHT: &str = "--router-kv-overlap-score-weight";

/// Lets options decide others. Returns what users should know about it.
pub(crate) fn apply(settings: &mut Settings) -> Vec<Notice> {
    let mut notices = Vec::new();
    settings.forget_rules();
    dependent_defaults(settings);
    old_weight(settings, &mut notices);
    load_aware(settings, &mut notices);
    inherited_threshold(settings);
    notices
}

fn dependent_defaults(settings: &mut Settings) {
    let kv = Value::Choice(RouterMode::Kv.name());
    if settings.get(keys::ROUTER_POLICY) == RouterPolicy::Time {
        settings.prefer(keys::ROUTER_MODE, kv.clone(), "--router-policy time");
    }
    if matches!(settings.command(), Command::Demo) {
        settings.prefer(keys::ROUTER_MODE, kv.clone(), "kvasir demo");
        // A first look opens no port to the network unless it is asked to.
        settings.prefer(
            keys::HTTP_HOST,
            Value::Text("127.0.0.1".into()),
            "kvasir demo",
        );
        if settings.get(keys::TRAFFIC) {
            // Its table moves on the terminal; ten lines a second would move it away.
            settings.prefer(keys::LOG_LEVEL, Value::Text("warn".into()), "--traffic");
        }
    }
    if settings.command() == Command::Router {
        settings.prefer(keys::ROUTER_MODE, kv.clone(), "kvasir router");
    }
    engine_defaults(settings);
    let selector = settings.get(keys::WORKER_SELECTOR);
    let cause = match settings.get(keys::WORKER).is_empty() {
        false => Some("--worker"),
        true => settings.get(keys::WORKERS_FILE).map(|_| "--workers-file"),
    };
    let cause = cause.or(selector.map(|_| "--worker-selector"));
    if let Some(cause) = cause {
        settings.prefer(keys::ROUTER_MODE, kv, cause);
        let backend = Value::Choice(DiscoveryBackend::Static.name());
        settings.prefer(keys::DISCOVERY_BACKEND, backend, cause);
    }
    policy_of_engine_servers(settings, cause);
    let remote = matches!(
        settings.get(keys::DISCOVERY_BACKEND),
        DiscoveryBackend::Etcd | DiscoveryBackend::Kubernetes
    );
    let zmq = Value::Choice(EventPlane::Zmq.name());
    if !remote {
        settings.prefer(keys::EVENT_PLANE, zmq, "--discovery-backend");
    } else if !settings.is_set(keys::NATS_SERVER) {
        // Sockets of each process need nothing installed.
        settings.prefer(keys::EVENT_PLANE, zmq, "no --nats-server");
    }
    selection_policy(settings);
}

/// Engine servers are placed by seconds, unless an option of the reference's router was given: whoever gives one wants its
/// cost.
fn policy_of_engine_servers(settings: &mut Settings, cause: Option<&'static str>) {
    let alone = settings.get(keys::DISCOVERY_BACKEND) == DiscoveryBackend::Static;
    let cause = cause.or(alone.then_some("--discovery-backend static"));
    let Some(cause) = cause.filter(|_| settings.command() == Command::Frontend) else {
        return;
    };
    let of_reference = settings.iter().any(|(spec, setting)| {
        let mut names = spec.env.iter().map(|variable| variable.name);
        setting.origin.is_user() && names.any(|name| name.starts_with("DYN_ROUTER_"))
    });
    if !of_reference {
        let time = Value::Choice(RouterPolicy::Time.name());
        settings.prefer(keys::ROUTER_POLICY, time, cause);
    }
}

/// What simulated engines have where nothing was given.
fn engine_defaults(settings: &mut Settings) {
    let (workers, cause) = match settings.command() {
        Command::Replay => (8, "kvasir replay"),
        Command::Mocker => (1, "kvasir mocker"),
        _ => return,
    };
    settings.prefer(keys::WORKERS, Value::Int(workers), cause);
    settings.prefer(keys::BLOCK_SIZE, Value::Int(16), cause);
}

/// The common selector applies where the one for a role is not set.
fn selection_policy(settings: &mut Settings) {
    if !settings.is_set(keys::ROUTER_WORKER_SELECTION_POLICY) {
        return;
    }
    let common = Value::Text(settings.get(keys::ROUTER_WORKER_SELECTION_POLICY));
    for key in [keys::ROUTER_PREFILL_POLICY, keys::ROUTER_DECODE_POLICY] {
        settings.prefer(key, common.clone(), "--router-worker-selection-policy");
    }
}

/// A present old weight beats the new scale; an old zero beats the new credit as well.
fn old_weight(settings: &mut Settings, notices: &mut Vec<Notice>) {
    let Some(weight) = settings.get(keys::ROUTER_KV_OVERLAP_SCORE_WEIGHT) else {
        return;
    };
    let scale = Value::Float(weight);
    decide(
        settings,
        notices,
        keys::ROUTER_PREFILL_LOAD_SCALE,
        scale,
        OLD_WEIGHT,
    );
    if weight == 0.0 {
        let credit = keys::ROUTER_KV_OVERLAP_SCORE_CREDIT;
        decide(settings, notices, credit, Value::Float(0.0), OLD_WEIGHT);
    }
}

/// Routing by load alone: no index is kept.
fn load_aware(settings: &mut Settings, notices: &mut Vec<Notice>) {
    if !settings.get(keys::LOAD_AWARE) {
        return;
    }
    if matches!(settings.command(), Command::Frontend | Command::Demo) {
        let kv = Value::Choice(RouterMode::Kv.name());
        decide(settings, notices, keys::ROUTER_MODE, kv, LOAD_AWARE);
    }
    let switches = [
        (keys::ROUTER_KV_EVENTS, false),
        (keys::ROUTER_DURABLE_KV_EVENTS, false),
        (keys::ROUTER_ASSUME_KV_REUSE, false),
        (keys::ROUTER_TRACK_ACTIVE_BLOCKS, true),
        (keys::ROUTER_TRACK_PREFILL_TOKENS, true),
        (keys::USE_REMOTE_INDEXER, false),
        (keys::SERVE_INDEXER, false),
    ];
    for (key, on) in switches {
        decide(settings, notices, key, Value::Bool(on), LOAD_AWARE);
    }
    let credit = keys::ROUTER_KV_OVERLAP_SCORE_CREDIT;
    decide(settings, notices, credit, Value::Float(0.0), LOAD_AWARE);
    let multiplier = keys::SHARED_CACHE_MULTIPLIER;
    decide(settings, notices, multiplier, Value::Float(0.0), LOAD_AWARE);
    let no_cache = Value::Choice("none");
    decide(
        settings,
        notices,
        keys::SHARED_CACHE_TYPE,
        no_cache,
        LOAD_AWARE,
    );
    decide(
        settings,
        notices,
        keys::ROUTER_PREDICTED_TTL_SECS,
        Value::Unset,
        LOAD_AWARE,
    );
}

/// Forces a value, and says so where a person had asked for another.
fn decide<T>(
    settings: &mut Settings,
    notices: &mut Vec<Notice>,
    key: Key<T>,
    value: Value,
    cause: &'static str,
) {
    let contrary = settings
        .setting(key.name())
        .filter(|old| old.origin.is_user() && old.value != value)
        .map(|old| {
            format!(
                "--{} is {} because of {cause}; {} ({}) is overridden",
                key.name(),
                value.text(),
                old.value.text(),
                old.origin.place(key.name())
            )
        });
    if let Some(text) = contrary {
        let kind = NoticeKind::Overridden;
        notices.push(Notice {
            kind,
            option: Some(key.name()),
            text,
        });
    }
    settings.force(key, value, cause);
}

/// A load-aware disaggregation policy without a threshold of its own takes the queue's.
fn inherited_threshold(settings: &mut Settings) {
    let Some(text) = settings.get(keys::ROUTER_CONDITIONAL_DISAGG_CONFIG) else {
        return;
    };
    let Some(config) = ConditionalDisagg::from_json(&text) else {
        return;
    };
    let Some(threshold) = settings.get(keys::ROUTER_QUEUE_THRESHOLD) else {
        return;
    };
    if !config.is_load_aware() || config.prefill_busy_threshold.is_some() {
        return;
    }
    let Ok(mut json) = serde_json::from_str::<serde_json::Value>(&text) else {
        return;
    };
    if let Some(fields) = json.as_object_mut() {
        fields.insert("prefill_busy_threshold".into(), threshold.into());
    }
    let completed = Value::Text(json.to_string());
    settings.force(
        keys::ROUTER_CONDITIONAL_DISAGG_CONFIG,
        completed,
        "--router-queue-threshold, which it inherits",
    );
}

/// Combinations that make no sense.
pub(crate) fn check(settings: &Settings) -> Vec<Problem> {
    let mut problems = Vec::new();
    aic(settings, &mut problems);
    aic_sizes(settings, &mut problems);
    cache_events(settings, &mut problems);
    conditional_disagg(settings, &mut problems);
    pairs(settings, &mut problems);
    standalone(settings, &mut problems);
    lora(settings, &mut problems);
    buckets(settings, &mut problems);
    problems
}

fn aic(settings: &Settings, problems: &mut Vec<Problem>) {
    if settings.get(keys::ROUTER_PREFILL_LOAD_MODEL) != PrefillLoadModel::Aic {
        return;
    }
    let model = keys::ROUTER_PREFILL_LOAD_MODEL.name();
    let frontend = matches!(settings.command(), Command::Frontend | Command::Demo);
    if frontend && settings.get(keys::ROUTER_MODE) != RouterMode::Kv {
        let message = "--router-prefill-load-model aic needs --router-mode kv";
        problems.push(Problem::conflict(
            &[model, keys::ROUTER_MODE.name()],
            message,
        ));
    }
    if !settings.get(keys::ROUTER_TRACK_PREFILL_TOKENS) {
        let message = "--router-prefill-load-model aic needs --router-track-prefill-tokens";
        let options = [model, keys::ROUTER_TRACK_PREFILL_TOKENS.name()];
        problems.push(Problem::conflict(&options, message));
    }
    if settings.get(keys::DYN_CHAT_PROCESSOR) != ChatProcessor::Dynamo {
        let message = "--router-prefill-load-model aic needs --dyn-chat-processor dynamo";
        let options = [model, keys::DYN_CHAT_PROCESSOR.name()];
        problems.push(Problem::conflict(&options, message));
    }
    let required = [keys::AIC_BACKEND, keys::AIC_SYSTEM, keys::AIC_MODEL_PATH];
    let missing: Vec<&'static str> = required
        .into_iter()
        .filter(|key| settings.get(*key).is_none())
        .map(Key::name)
        .collect();
    if !missing.is_empty() {
        let flags: Vec<_> = missing.iter().map(|name| format!("--{name}")).collect();
        let message = format!(
            "--router-prefill-load-model aic also needs {}",
            flags.join(", ")
        );
        problems.push(Problem::conflict(&missing, message));
    }
}

/// Attention and experts of a mixture model must use the same number of devices.
fn aic_sizes(settings: &Settings, problems: &mut Vec<Problem>) {
    let tensor = settings.get(keys::AIC_MOE_TP_SIZE);
    let expert = settings.get(keys::AIC_MOE_EP_SIZE);
    if tensor.is_none() && expert.is_none() {
        return;
    }
    let size = |given: Option<u32>| u64::from(given.unwrap_or(1));
    let attention = u64::from(settings.get(keys::AIC_TP_SIZE))
        * size(settings.get(keys::AIC_ATTENTION_DP_SIZE));
    let experts = size(tensor) * size(expert);
    if attention != experts {
        let message = format!(
            "--aic-tp-size times --aic-attention-dp-size ({attention}) must equal \
             --aic-moe-tp-size times --aic-moe-ep-size ({experts})"
        );
        let options = [
            keys::AIC_TP_SIZE.name(),
            keys::AIC_ATTENTION_DP_SIZE.name(),
            keys::AIC_MOE_TP_SIZE.name(),
            keys::AIC_MOE_EP_SIZE.name(),
        ];
        problems.push(Problem::conflict(&options, message));
    }
}

fn cache_events(settings: &Settings, problems: &mut Vec<Problem>) {
    if settings.get(keys::ROUTER_TRACK_OUTPUT_BLOCKS)
        && !settings.get(keys::ROUTER_TRACK_ACTIVE_BLOCKS)
    {
        let options = [
            keys::ROUTER_TRACK_OUTPUT_BLOCKS.name(),
            keys::ROUTER_TRACK_ACTIVE_BLOCKS.name(),
        ];
        let message = "--router-track-output-blocks needs --router-track-active-blocks";
        problems.push(Problem::conflict(&options, message));
    }
    if settings.get(keys::ROUTER_PREDICTED_TTL_SECS).is_some()
        && !settings.get(keys::ROUTER_KV_EVENTS)
    {
        let options = [
            keys::ROUTER_PREDICTED_TTL_SECS.name(),
            keys::ROUTER_KV_EVENTS.name(),
        ];
        let message = "--router-predicted-ttl-secs needs KV events; leave out \
                       --no-router-kv-events, or use --router-ttl-secs without events";
        problems.push(Problem::conflict(&options, message));
    }
    if !settings.get(keys::SERVE_INDEXER) {
        return;
    }
    let serve = keys::SERVE_INDEXER.name();
    if settings.get(keys::USE_REMOTE_INDEXER) {
        let message = "--serve-indexer and --use-remote-indexer exclude each other: \
                       serve the index here, or query that of another router";
        problems.push(Problem::conflict(
            &[serve, keys::USE_REMOTE_INDEXER.name()],
            message,
        ));
    }
    let frontend = matches!(settings.command(), Command::Frontend | Command::Demo);
    if frontend && settings.get(keys::ROUTER_MODE) != RouterMode::Kv {
        let message = "--serve-indexer needs --router-mode kv";
        problems.push(Problem::conflict(
            &[serve, keys::ROUTER_MODE.name()],
            message,
        ));
    }
    if settings.get(keys::ROUTER_KV_OVERLAP_SCORE_CREDIT) == 0.0 {
        let message = "--serve-indexer needs --router-kv-overlap-score-credit above 0: \
                       with credit 0 there is no index";
        let options = [serve, keys::ROUTER_KV_OVERLAP_SCORE_CREDIT.name()];
        problems.push(Problem::conflict(&options, message));
    }
}

fn conditional_disagg(settings: &Settings, problems: &mut Vec<Problem>) {
    if !settings.get(keys::ROUTER_CONDITIONAL_DISAGG) {
        return;
    }
    let name = keys::ROUTER_CONDITIONAL_DISAGG.name();
    if settings.command() == Command::Router {
        let message = "--router-conditional-disagg works only in kvasir frontend";
        problems.push(Problem::conflict(&[name], message));
        return;
    }
    if settings.get(keys::ROUTER_MODE) != RouterMode::Kv {
        let message = "--router-conditional-disagg needs --router-mode kv";
        problems.push(Problem::conflict(
            &[name, keys::ROUTER_MODE.name()],
            message,
        ));
    }
    if !settings.get(keys::ROUTER_KV_EVENTS) {
        let message = "--router-conditional-disagg needs KV events; leave out \
                       --no-router-kv-events and --load-aware";
        problems.push(Problem::conflict(
            &[name, keys::ROUTER_KV_EVENTS.name()],
            message,
        ));
    }
    let config = settings
        .get(keys::ROUTER_CONDITIONAL_DISAGG_CONFIG)
        .and_then(|text| ConditionalDisagg::from_json(&text))
        .unwrap_or_default();
    if config.is_load_aware() && config.prefill_busy_threshold.is_none() {
        let message = "the policy in --router-conditional-disagg-config uses load: give it \
                       prefill_busy_threshold, or set --router-queue-threshold";
        let options = [
            keys::ROUTER_CONDITIONAL_DISAGG_CONFIG.name(),
            keys::ROUTER_QUEUE_THRESHOLD.name(),
        ];
        problems.push(Problem::conflict(&options, message));
    }
}

fn pairs(settings: &Settings, problems: &mut Vec<Problem>) {
    let pairs = [
        (keys::TLS_CERT_PATH, keys::TLS_KEY_PATH),
        (keys::TCP_TLS_CERT_PATH, keys::TCP_TLS_KEY_PATH),
        (keys::ETCD_AUTH_CLIENT_CERT, keys::ETCD_AUTH_CLIENT_KEY),
    ];
    for (cert, key) in pairs {
        let (given, missing) = match (settings.get(cert), settings.get(key)) {
            (Some(_), None) => (cert.name(), key.name()),
            (None, Some(_)) => (key.name(), cert.name()),
            _ => continue,
        };
        let message =
            format!("--{given} needs --{missing} too: a certificate and its key go together");
        problems.push(Problem::conflict(&[given, missing], message));
    }
    let keyed = settings.get(keys::ROUTER_TRACKING_HASH) == TrackingHash::Keyed;
    let file = settings.get(keys::ROUTER_TRACKING_KEY_FILE).is_some();
    let id = settings.get(keys::ROUTER_TRACKING_KEY_ID).is_some();
    if keyed && !(file && id) {
        let message = "--router-tracking-hash keyed-xxh3-v1 needs --router-tracking-key-file \
                       and --router-tracking-key-id";
        let options = [
            keys::ROUTER_TRACKING_KEY_FILE.name(),
            keys::ROUTER_TRACKING_KEY_ID.name(),
        ];
        problems.push(Problem::conflict(&options, message));
    }
}

fn standalone(settings: &Settings, problems: &mut Vec<Problem>) {
    if settings.get(keys::WORKER_PORT).is_some() && settings.get(keys::WORKER_SELECTOR).is_none() {
        let options = [keys::WORKER_PORT.name(), keys::WORKER_SELECTOR.name()];
        let message =
            "--worker-port needs --worker-selector: other workers are named with their ports";
        problems.push(Problem::conflict(&options, message));
    }
    if settings.command() == Command::Router && settings.get(keys::ENDPOINT).is_none() {
        let message = "kvasir router needs --endpoint namespace.component.endpoint \
                       (variable DYN_ROUTER_ENDPOINT)";
        problems.push(Problem::conflict(&[keys::ENDPOINT.name()], message));
    }
}

/// Buckets lie between a least and a greatest bound.
fn buckets(settings: &Settings, problems: &mut Vec<Problem>) {
    let spans = [
        (
            keys::METRICS_REQUEST_DURATION_MIN,
            keys::METRICS_REQUEST_DURATION_MAX,
        ),
        (keys::METRICS_TTFT_MIN, keys::METRICS_TTFT_MAX),
        (keys::METRICS_ITL_MIN, keys::METRICS_ITL_MAX),
        (
            keys::METRICS_INPUT_SEQUENCE_MIN,
            keys::METRICS_INPUT_SEQUENCE_MAX,
        ),
        (
            keys::METRICS_OUTPUT_SEQUENCE_MIN,
            keys::METRICS_OUTPUT_SEQUENCE_MAX,
        ),
    ];
    for (min, max) in spans {
        let (least, greatest) = (settings.get(min), settings.get(max));
        if least >= greatest {
            let (low, high) = (min.name(), max.name());
            let message = format!("--{low} ({least}) must be below --{high} ({greatest})");
            problems.push(Problem::conflict(&[low, high], message));
        }
    }
}

fn lora(settings: &Settings, problems: &mut Vec<Problem>) {
    let mode = settings.get(keys::ROUTER_MODE);
    let fits = matches!(
        mode,
        RouterMode::Kv | RouterMode::Random | RouterMode::RoundRobin
    );
    if settings.get(keys::LORA_ENABLED) && !fits {
        let message = format!(
            "--lora-enabled works with --router-mode kv, random or round-robin, not with {}",
            mode.name()
        );
        let options = [keys::LORA_ENABLED.name(), keys::ROUTER_MODE.name()];
        problems.push(Problem::conflict(&options, message));
    }
}
