//! How routers are made from options: the cost, the index, the shadow.
//!
//! Answers one question: given a process's options, how does its router choose, and what does its index remember? The server, the services and the
//! C library all ask it, so that an option means the same everywhere. Files that options name are read once, here.
//!
//! Elsewhere: which options there are (`kvasir-config`), what a router does with its settings (`kvasir-router`), planes by options
//! (`kvasir-planes`).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::time::Duration;

use kvasir_config::{Command, Key, Origin, Settings, keys, parse_overrides};
use kvasir_host::{PolicyFile, RouterSetup};
use kvasir_index::{Approximate, IndexOptions};
use kvasir_profile::{Preset, StepTimes};
use kvasir_router::{
    PrefillLoadModel, Role, RouterConfig, RouterMode, RouterPolicy, ShadowPolicy, StepLaw,
};
use kvasir_upstream::read_bounded_text;

/// An option that cannot be followed, found only when its file or its name was looked at. Printed with the option and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RouterSetupError(String);

/// Longest wait in the queue under overload protection, unless another is set.
pub const PROTECTED_WAIT: Duration = Duration::from_secs(5);
/// Bytes of a file that `--engine-profile` names.
const PROFILE_FILE_BYTES_MAX: u64 = 1 << 16;

/// The seed of this process's random choices: as given, or drawn once, so that replicas differ. A simulation is
/// the same every time unless asked otherwise.
#[must_use]
pub fn seed(settings: &Settings) -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    // The standard library seeds its hashers from the system; nothing more is needed here.
    let draw = || RandomState::new().build_hasher().finish();
    match settings.get(keys::SEED) {
        Some(seed) => seed,
        None if settings.command() == Command::Replay => 0,
        None => *DRAWN.get_or_init(draw),
    }
}

/// How workers of the models that we serve are chosen. The default of the option is for workers that discovery finds;
/// engine servers are routed by cache, whether a flag, a file or an operator names them (decision 0099).
#[must_use]
pub fn mode_of_models(settings: &Settings) -> RouterMode {
    let unsaid = *settings.origin(keys::ROUTER_MODE) == Origin::Default;
    match unsaid && settings.command() == Command::Frontend {
        true => RouterMode::Kv,
        false => settings.get(keys::ROUTER_MODE),
    }
}

/// Whether replicas are linked without a broker.
#[must_use]
pub fn is_linked(settings: &Settings) -> bool {
    settings.is_set(keys::ROUTER_PEERS) || settings.is_set(keys::ROUTER_PEER_LISTEN)
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
pub fn router_setup(settings: &Settings) -> Result<RouterSetup, RouterSetupError> {
    let policies = match settings.get(keys::ROUTER_POLICY_CONFIG) {
        None => None,
        Some(path) => Some(PolicyFile::read(&path).map_err(|error| {
            RouterSetupError(format!(
                "--router-policy-config {}: {error}",
                path.display()
            ))
        })?),
    };
    Ok(RouterSetup {
        policies,
        block_size: settings.get(keys::KV_CACHE_BLOCK_SIZE),
        prefill_policy: role_policy(settings, keys::ROUTER_PREFILL_POLICY)?,
        ..RouterSetup::new(router_config(settings)?, index_options(settings))
    })
}

/// The same for services that are asked for workers: by cache, whatever the default of a frontend is.
pub fn service_setup(settings: &Settings) -> Result<RouterSetup, RouterSetupError> {
    let mut setup = router_setup(settings)?;
    if *settings.origin(keys::ROUTER_MODE) == Origin::Default {
        setup.config.router_mode = RouterMode::Kv;
    }
    // Clients tell of each block of an answer.
    setup.config.router_track_output_blocks = true;
    Ok(setup)
}

/// The policy of one kind of workers, if it is not that of all (`--router-policy`). What holds for all kinds counts where nothing is said of one.
fn role_policy(
    settings: &Settings,
    key: Key<String>,
) -> Result<Option<RouterPolicy>, RouterSetupError> {
    const DEFAULT: &str = "default";
    let of_all = keys::ROUTER_WORKER_SELECTION_POLICY;
    let key = match settings.is_set(key) {
        true => key,
        false => of_all,
    };
    let name = settings.get(key);
    if name == DEFAULT {
        return Ok(None);
    }
    match RouterPolicy::find(&name) {
        Some(policy) => Ok(Some(policy)),
        None => Err(RouterSetupError(format!(
            "--{}: there is no policy `{name}`; there are default, kv and time",
            key.name()
        ))),
    }
}

/// The profile that was measured of this model on this machine; the error names those that there are.
pub fn measured_profile(system: &str, model: &str) -> Result<Preset, RouterSetupError> {
    // Names of presets are made of words that every spelling of the machine and the model has.
    let asked = format!("{system} {model}").to_lowercase();
    let fits = |preset: &Preset| preset.name().split('-').all(|word| asked.contains(word));
    Preset::ALL.into_iter().find(fits).ok_or_else(|| {
        let known: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name()).collect();
        let known = known.join(", ");
        RouterSetupError(format!("no measured profile; there are {known}"))
    })
}

/// The measured profile that the `aic-*` options name.
fn aic_profile(settings: &Settings) -> Result<Preset, RouterSetupError> {
    let system = settings.get(keys::AIC_SYSTEM).unwrap_or_default();
    let model = settings.get(keys::AIC_MODEL_PATH).unwrap_or_default();
    measured_profile(&system, &model).map_err(|error| {
        RouterSetupError(format!(
            "--aic-system {system} --aic-model-path {model}: {error}"
        ))
    })
}

/// What `--engine-profile` says of the speed of workers; an error names it.
fn engine_law(settings: &Settings) -> Result<Option<StepLaw>, RouterSetupError> {
    let Some(named) = settings.get(keys::ENGINE_PROFILE) else {
        return Ok(None);
    };
    let bad = |error: &dyn std::fmt::Display| {
        RouterSetupError(format!("--engine-profile {named}: {error}"))
    };
    if let Some(preset) = Preset::find(&named) {
        let profile = preset.profile().map_err(|error| bad(&error))?;
        return Ok(Some(StepLaw::of_times(&StepTimes::Measured(profile))));
    }
    let path = std::path::Path::new(&named);
    let text = read_bounded_text(path, PROFILE_FILE_BYTES_MAX).map_err(|error| {
        let known: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name()).collect();
        bad(&format!(
            "{error}; name a file or one of {}",
            known.join(", ")
        ))
    })?;
    let law: StepLaw = serde_json::from_str(&text).map_err(|error| bad(&error))?;
    match law.is_sound() {
        true => Ok(Some(law)),
        false => Err(bad(
            &"each number must be seconds, 0 or more, token and step above 0",
        )),
    }
}

/// Whether routers protect their engines from overload: unless that is switched off, or the operator says by the
/// options of the queue and of busy workers what is too much.
#[must_use]
pub fn protects(settings: &Settings) -> bool {
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
fn router_config(settings: &Settings) -> Result<RouterConfig, RouterSetupError> {
    let mut config = choice_config(settings)?;
    if let Some(spec) = settings.get(keys::SHADOW_POLICY) {
        config.shadow_policy = Some(shadow_policy(settings, &spec)?);
    }
    Ok(config)
}

fn shadow_policy(settings: &Settings, spec: &str) -> Result<ShadowPolicy, RouterSetupError> {
    let bad = |error: &dyn std::fmt::Display| {
        RouterSetupError(format!("--shadow-policy {spec}: {error}"))
    };
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
fn choice_config(settings: &Settings) -> Result<RouterConfig, RouterSetupError> {
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
        router_policy: role_policy(settings, keys::ROUTER_DECODE_POLICY)?
            .unwrap_or_else(|| settings.get(keys::ROUTER_POLICY)),
        router_role: Role::Aggregated,
        router_conditional_disagg: settings.get(keys::ROUTER_CONDITIONAL_DISAGG),
        router_replica_sync: settings.get(keys::ROUTER_REPLICA_SYNC) || is_linked(settings),
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
        engine_law: engine_law(settings)?,
        shadow_policy: None,
        router_decision_log: settings.get(keys::ROUTER_DECISION_LOG),
        router_seed: seed(settings),
        shared_cache_multiplier: settings.get(keys::SHARED_CACHE_MULTIPLIER),
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
             --router-decision-log 31 --router-replica-sync --shared-cache-multiplier 0.32
             --router-conditional-disagg",
        );
        let expected = RouterConfig {
            kv_cache_block_size: 16,
            router_mode: RouterMode::Kv,
            router_policy: RouterPolicy::Time,
            router_role: Role::Aggregated,
            router_conditional_disagg: true,
            router_replica_sync: true,
            router_kv_overlap_score_credit: 0.11,
            router_kv_overlap_score_credit_decay: 0.12,
            router_prefill_load_scale: 0.13,
            router_decode_active_request_weight: 0.14,
            router_host_cache_hit_weight: 0.15,
            router_disk_cache_hit_weight: 0.16,
            shared_cache_multiplier: 0.32,
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
            engine_law: None,
            shadow_policy: None,
            router_decision_log: 31,
            router_seed: 1,
        };
        assert_eq!(config, expected);
        let without = config_of("frontend --no-router-kv-events --no-router-track-active-blocks");
        assert!(!without.router_kv_events && !without.router_track_active_blocks);
    }

    #[test]
    fn a_profile_is_a_preset_or_a_file_of_seconds() {
        let law = |word: &str| {
            let settings = format!("frontend --engine-profile {word}");
            let words = settings.split_whitespace().map(Into::into);
            let read = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
            let run = kvasir_config::parse(words, &kvasir_config::Environment::default(), read);
            let Ok(kvasir_config::Invocation::Run(run)) = run else {
                panic!("{run:?}")
            };
            engine_law(&run.settings)
        };
        assert!(law("h200-llama-8b").unwrap().unwrap().is_sound());
        let file = std::env::temp_dir().join(format!("kvasir-profile-{}", std::process::id()));
        let name = file.to_str().unwrap().to_owned();
        let said = r#"{"chunk":0.02,"token":2e-4,"pair":0,"step":0.02,"stream":1e-4,"attend":0}"#;
        std::fs::write(&file, said).unwrap();
        assert_eq!(law(&name).unwrap().unwrap().token, 2e-4);
        for wrong in [
            "{}",
            &said.replace("0.02", "-1"),
            &said.replace("2e-4", "0"),
        ] {
            std::fs::write(&file, wrong).unwrap();
            assert!(
                law(&name)
                    .unwrap_err()
                    .to_string()
                    .contains("--engine-profile"),
                "{wrong}"
            );
        }
        std::fs::remove_file(&file).unwrap();
        let missing = law(&name).unwrap_err().to_string();
        assert!(missing.contains("h200-llama-8b"), "{missing}");
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
