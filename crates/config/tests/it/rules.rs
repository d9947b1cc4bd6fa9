//! Rules between options: what decides what, and what does not go together.

use kvasir_config::{
    Command, DiscoveryBackend, EventPlane, NoticeKind, Origin, RouterMode, RouterPolicy, Settings,
    keys, parse_overrides,
};

use crate::support::{invoke_words, printed, refused, run};

#[test]
fn workers_make_discovery_static_and_mode_kv_unless_said_otherwise() {
    let plain = run("frontend", &[]).settings;
    assert_eq!(plain.get(keys::ROUTER_MODE), RouterMode::RoundRobin);
    assert_eq!(plain.get(keys::DISCOVERY_BACKEND), DiscoveryBackend::Etcd);

    let fleet = run("frontend --worker http://a:1 --worker http://b:2", &[]).settings;
    assert_eq!(fleet.get(keys::WORKER), ["http://a:1", "http://b:2"]);
    assert_eq!(fleet.get(keys::ROUTER_MODE), RouterMode::Kv);
    assert_eq!(fleet.origin(keys::ROUTER_MODE), &Origin::Rule("--worker"));
    assert_eq!(fleet.get(keys::DISCOVERY_BACKEND), DiscoveryBackend::Static);

    let said = run(
        "frontend --worker http://a:1",
        &[("DYN_ROUTER_MODE", "random")],
    )
    .settings;
    assert_eq!(said.get(keys::ROUTER_MODE), RouterMode::Random);
}

/// Whoever gives an option of the reference's router, by whatever way, gets its cost.
#[test]
fn engine_servers_are_placed_by_seconds_unless_an_option_of_the_reference_is_given() {
    let policy = |line: &str, variables: &[(&str, &str)]| {
        let settings = run(line, variables).settings;
        settings.get(keys::ROUTER_POLICY)
    };
    let (kv, time) = (RouterPolicy::Kv, RouterPolicy::Time);
    for line in [
        "frontend --worker http://a:1",
        "frontend --workers-file f",
        "frontend --discovery-backend static",
        "frontend --worker http://a:1 --kv-cache-block-size 32 --active-decode-blocks-threshold 0.9",
        "frontend --worker http://a:1 --router-mode kv --router-policy time",
    ] {
        assert_eq!(policy(line, &[]), time, "{line}");
    }
    for line in [
        "frontend",
        "frontend --discovery-backend file",
        "frontend --worker http://a:1 --router-mode kv",
        "frontend --worker http://a:1 --router-policy kv",
        "frontend --worker http://a:1 --router-prefill-load-scale 4",
        "frontend --worker http://a:1 --router-temperature 0.1",
        "frontend --worker http://a:1 --router-queue-threshold 4",
        "frontend --worker http://a:1 --no-router-kv-events",
        "frontend --worker http://a:1 --load-aware",
        "demo",
        "replay",
    ] {
        assert_eq!(policy(line, &[]), kv, "{line}");
    }
    let worker = "frontend --worker http://a:1";
    assert_eq!(policy(worker, &[("DYN_ROUTER_MODE", "kv")]), kv);
    assert_eq!(policy(worker, &[("DYN_ROUTER_TEMPERATURE", "0.5")]), kv);
    let settings = run(worker, &[]).settings;
    let origin = settings.origin(keys::ROUTER_POLICY);
    assert_eq!(origin, &Origin::Rule("--worker"));
}

#[test]
fn a_demo_with_a_table_logs_warnings_only_unless_asked() {
    let level = |words: &str| run(words, &[]).settings.get(keys::LOG_LEVEL);
    assert_eq!(level("demo"), "info");
    assert_eq!(level("demo --traffic"), "warn");
    assert_eq!(level("demo --traffic --log-level info"), "info");
}

/// Only the demo, and only where nobody named an address.
#[test]
fn a_demo_listens_on_loopback_unless_asked() {
    let host = |words: &str, variables: &[(&str, &str)]| {
        let settings = run(words, variables).settings;
        settings.get(keys::HTTP_HOST)
    };
    assert_eq!(host("demo", &[]), "127.0.0.1");
    assert_eq!(host("demo --http-host 0.0.0.0", &[]), "0.0.0.0");
    assert_eq!(host("demo", &[("DYN_HTTP_HOST", "0.0.0.0")]), "0.0.0.0");
    assert_eq!(host("frontend", &[]), "0.0.0.0");
    assert_eq!(host("mocker", &[]), "0.0.0.0");
}

#[test]
fn variables_hold_several_workers() {
    let run = run(
        "frontend",
        &[("KVASIR_WORKERS", "http://a:1, http://b:2\nhttp://c:3")],
    );
    assert_eq!(
        run.settings.get(keys::WORKER),
        ["http://a:1", "http://b:2", "http://c:3"]
    );
}

/// Policies have commas in them, so that only spaces part them in a variable.
#[test]
fn variables_hold_several_policies() {
    let policies = "kv,router-temperature=0.5 random";
    let page = printed(
        "config show --for replay --json",
        &[("KVASIR_POLICY", policies)],
        None,
    );
    let page: serde_json::Value = serde_json::from_str(&page).expect("JSON");
    let value = &page["options"]["policy"]["value"];
    assert_eq!(
        value,
        &serde_json::json!(["kv,router-temperature=0.5", "random"])
    );
}

#[test]
fn demo_routes_by_kv_and_takes_any_frontend_option() {
    let demo = run("demo --workers 2 --router-temperature 0.5", &[]).settings;
    assert_eq!(demo.get(keys::ROUTER_MODE), RouterMode::Kv);
    assert_eq!(demo.get(keys::WORKERS), 2);
    assert_eq!(
        run("demo --router-mode random", &[])
            .settings
            .get(keys::ROUTER_MODE),
        RouterMode::Random
    );
}

#[test]
fn event_plane_follows_discovery() {
    let nats = [("NATS_SERVER", "nats://n:4222")];
    let plane = |line: &str| run(line, &[]).settings.get(keys::EVENT_PLANE);
    let with_nats = |line: &str| run(line, &nats).settings.get(keys::EVENT_PLANE);
    assert_eq!(plane("frontend"), EventPlane::Zmq);
    assert_eq!(with_nats("frontend"), EventPlane::Nats);
    assert_eq!(
        with_nats("frontend --discovery-backend kubernetes"),
        EventPlane::Nats
    );
    assert_eq!(
        plane("mocker --nats-server nats://n:4222 --discovery-backend etcd"),
        EventPlane::Nats
    );
    assert_eq!(
        with_nats("frontend --discovery-backend file"),
        EventPlane::Zmq
    );
    assert_eq!(plane("frontend --discovery-backend file"), EventPlane::Zmq);
    assert_eq!(plane("frontend --discovery-backend mem"), EventPlane::Zmq);
    assert_eq!(plane("frontend --worker http://a:1"), EventPlane::Zmq);
    assert_eq!(
        plane("frontend --discovery-backend mem --event-plane nats"),
        EventPlane::Nats
    );
}

/// A present old weight beats the new scale; only zero touches the credit.
#[test]
fn old_weight_maps_to_scale_and_zero_also_to_credit() {
    let both = |line: &str, vars: &[(&str, &str)]| {
        let settings = run(line, vars).settings;
        let scale = settings.get(keys::ROUTER_PREFILL_LOAD_SCALE);
        (scale, settings.get(keys::ROUTER_KV_OVERLAP_SCORE_CREDIT))
    };
    assert_eq!(
        both("frontend --kv-overlap-score-weight 2", &[]),
        (2.0, 1.0)
    );
    assert_eq!(
        both("frontend --router-kv-overlap-score-weight 0", &[]),
        (0.0, 0.0)
    );
    let beaten = "frontend --router-prefill-load-scale 5 --router-kv-overlap-score-credit 0.5";
    assert_eq!(
        both(&format!("{beaten} --kv-overlap-score-weight 3"), &[]),
        (3.0, 0.5)
    );
    assert_eq!(
        both(&format!("{beaten} --kv-overlap-score-weight 0"), &[]),
        (0.0, 0.0)
    );
    assert_eq!(
        both(beaten, &[("DYN_OVERLAP_SCORE_WEIGHT", "0")]),
        (0.0, 0.0)
    );
    let vars = [
        ("DYN_OVERLAP_SCORE_WEIGHT", "0"),
        ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "4"),
    ];
    assert_eq!(both("frontend", &vars), (4.0, 1.0));
}

#[test]
fn old_weight_warns_and_names_what_it_overrides() {
    let line = "frontend --router-prefill-load-scale 5 --kv-overlap-score-weight 3";
    let notices = run(line, &[]).notices;
    let kinds: Vec<_> = notices.iter().map(|notice| notice.kind).collect();
    assert!(kinds.contains(&NoticeKind::Deprecated), "{notices:?}");
    let overridden = notices
        .iter()
        .find(|n| n.kind == NoticeKind::Overridden)
        .expect("told");
    assert_eq!(
        overridden.text,
        "--router-prefill-load-scale is 3.0 because of --router-kv-overlap-score-weight; \
         5.0 (flag) is overridden"
    );
}

#[test]
fn load_aware_forces_its_list_and_keeps_the_rest() {
    let settings = run(
        "frontend --load-aware --router-mode random --router-kv-events --router-durable-kv-events \
         --no-router-track-active-blocks --no-router-track-prefill-tokens --use-remote-indexer \
         --shared-cache-type hicache --router-predicted-ttl-secs 5 --router-prefill-load-scale 7 \
         --router-host-cache-hit-weight 0.5 --router-kv-overlap-score-credit 0.9",
        &[],
    )
    .settings;
    assert_eq!(settings.get(keys::ROUTER_MODE), RouterMode::Kv);
    for off in [
        keys::ROUTER_KV_EVENTS,
        keys::ROUTER_DURABLE_KV_EVENTS,
        keys::ROUTER_ASSUME_KV_REUSE,
        keys::USE_REMOTE_INDEXER,
        keys::SERVE_INDEXER,
    ] {
        assert!(!settings.get(off), "{}", off.name());
        assert_eq!(settings.origin(off), &Origin::Rule("--load-aware"));
    }
    assert!(settings.get(keys::ROUTER_TRACK_ACTIVE_BLOCKS));
    assert!(settings.get(keys::ROUTER_TRACK_PREFILL_TOKENS));
    assert_eq!(settings.get(keys::ROUTER_KV_OVERLAP_SCORE_CREDIT), 0.0);
    assert_eq!(
        settings.get(keys::SHARED_CACHE_TYPE),
        kvasir_config::SharedCacheType::None
    );
    assert_eq!(settings.get(keys::SHARED_CACHE_MULTIPLIER), 0.0);
    assert_eq!(settings.get(keys::ROUTER_PREDICTED_TTL_SECS), None);
    assert_eq!(settings.get(keys::ROUTER_PREFILL_LOAD_SCALE), 7.0);
    assert_eq!(settings.get(keys::ROUTER_HOST_CACHE_HIT_WEIGHT), 0.5);
}

#[test]
fn the_standalone_router_goes_by_cache_and_load_aware_keeps_its_mode() {
    let page = printed(
        "config show --for router --endpoint a.b.c --load-aware --changed",
        &[],
        None,
    );
    let mode = page.lines().find(|line| line.starts_with("router-mode "));
    let mode = mode.unwrap_or_default();
    assert!(
        mode.contains(" kv ") && mode.ends_with("because of kvasir router"),
        "{page}"
    );
    assert!(page.contains("router-kv-events"), "{page}");
}

#[test]
fn aic_needs_kv_mode_prefill_tokens_and_three_names() {
    let message = refused(
        "frontend --router-prefill-load-model aic --no-router-track-prefill-tokens",
        &[],
        None,
    );
    for part in [
        "--router-mode kv",
        "--router-track-prefill-tokens",
        "--aic-backend, --aic-system, --aic-model-path",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let complete = "--aic-backend vllm --aic-system h200_sxm --aic-model-path m";
    let aic = "frontend --router-mode kv --router-prefill-load-model aic";
    run(&format!("{aic} {complete}"), &[]);
    let other = refused(
        &format!("{aic} {complete} --dyn-chat-processor vllm"),
        &[],
        None,
    );
    assert!(other.contains("--dyn-chat-processor dynamo"), "{other}");
}

#[test]
fn aic_sizes_of_a_mixture_must_multiply_to_the_same() {
    let sizes = "--aic-tp-size 4 --aic-attention-dp-size 2 --aic-moe-tp-size 2";
    run(&format!("frontend {sizes} --aic-moe-ep-size 4"), &[]);
    let message = refused(&format!("frontend {sizes} --aic-moe-ep-size 2"), &[], None);
    assert!(
        message.contains("(8) must equal") && message.contains("(4)"),
        "{message}"
    );
}

#[test]
fn combinations_that_make_no_sense_are_refused() {
    for (line, part) in [
        (
            "--router-track-output-blocks --no-router-track-active-blocks",
            "needs --router-track-active-blocks",
        ),
        (
            "--router-predicted-ttl-secs 5 --no-router-kv-events",
            "needs KV events",
        ),
        (
            "--router-mode kv --serve-indexer --use-remote-indexer",
            "exclude each other",
        ),
        ("--serve-indexer", "needs --router-mode kv"),
        (
            "--router-mode kv --serve-indexer --router-kv-overlap-score-credit 0",
            "above 0",
        ),
        ("--router-conditional-disagg", "needs --router-mode kv"),
        (
            "--router-mode kv --router-conditional-disagg --no-router-kv-events",
            "needs KV events",
        ),
        (
            "--tls-cert-path c",
            "--tls-cert-path needs --tls-key-path too",
        ),
        (
            "--tls-key-path k",
            "--tls-key-path needs --tls-cert-path too",
        ),
        ("--tcp-tls-cert-path c", "needs --tcp-tls-key-path"),
        ("--etcd-auth-client-key k", "needs --etcd-auth-client-cert"),
        (
            "--router-tracking-hash keyed-xxh3-v1",
            "needs --router-tracking-key-file",
        ),
        ("--lora-enabled --router-mode direct", "not with direct"),
        (
            "--metrics-ttft-min 2 --metrics-ttft-max 2",
            "--metrics-ttft-min (2) must be below --metrics-ttft-max (2)",
        ),
    ] {
        let message = refused(&format!("frontend {line}"), &[], None);
        assert!(message.contains(part), "{line}: {message}");
    }
}

#[test]
fn the_standalone_router_needs_an_endpoint_and_has_no_conditional_disagg() {
    let message = refused("config check --for router", &[], None);
    assert!(
        message.contains("needs --endpoint namespace.component.endpoint"),
        "{message}"
    );
    let vars = [
        ("DYN_ROUTER_CONDITIONAL_DISAGG", "1"),
        ("DYN_ROUTER_ENDPOINT", "a.b.c"),
    ];
    let message = refused("config check --for router", &vars, None);
    assert!(
        message.contains("works only in kvasir frontend"),
        "{message}"
    );
}

#[test]
fn a_load_aware_disagg_policy_inherits_the_queue_threshold_or_is_refused() {
    let json = r#"{"policy":"isl_or_load"}"#;
    let words = |rest: &[&'static str]| {
        let mut words = vec![
            "frontend",
            "--router-mode",
            "kv",
            "--router-conditional-disagg",
        ];
        words.extend([
            "--router-conditional-disagg-config",
            r#"{"policy":"isl_or_load"}"#,
        ]);
        words.extend(rest);
        words
    };
    let Ok(kvasir_config::Invocation::Run(run)) = invoke_words(&words(&[]), &[], None) else {
        panic!("inherits")
    };
    let text = run
        .settings
        .get(keys::ROUTER_CONDITIONAL_DISAGG_CONFIG)
        .expect(json);
    let config = kvasir_config::ConditionalDisagg::from_json(&text).expect("checked");
    assert_eq!(config.prefill_busy_threshold, Some(16.0));

    let error = invoke_words(&words(&["--router-queue-threshold", "none"]), &[], None);
    assert!(
        error
            .expect_err("refused")
            .to_string()
            .contains("prefill_busy_threshold")
    );
}

#[test]
fn policy_strings_use_the_same_table_rules_and_messages() {
    let base = Settings::defaults(Command::Replay);
    let policy = |text: &str| parse_overrides(&base, text);
    let kv = policy("kv,router-prefill-load-scale=16").expect("a policy");
    assert_eq!(kv.get(keys::ROUTER_MODE), RouterMode::Kv);
    assert_eq!(kv.get(keys::ROUTER_PREFILL_LOAD_SCALE), 16.0);
    assert_eq!(
        policy("round_robin")
            .expect("a mode")
            .get(keys::ROUTER_MODE),
        RouterMode::RoundRobin
    );
    let loads = policy("kv,load-aware").expect("a switch");
    assert!(!loads.get(keys::ROUTER_KV_EVENTS));
    let back = parse_overrides(&loads, "load-aware=false").expect("undone");
    assert!(back.get(keys::ROUTER_KV_EVENTS));
    for (text, part) in [
        (
            "kv,router-temperature=-1",
            "`-1` (policy kv,router-temperature=-1) is not allowed",
        ),
        ("kv,temperature=1", "Did you mean `router-temperature`?"),
        ("vk", "unknown option `vk`"),
        ("kv,http-port=1", "unknown option `http-port`"),
        (
            "router-track-output-blocks,no-router-track-active-blocks",
            "needs --router-track",
        ),
    ] {
        let error = policy(text).expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_file_for_several_commands_is_checked_and_told() {
    let file = "http-port = 1\nendpoint = \"a.b.c\"\n";
    let page = printed("config check --config f.toml", &[], Some(file));
    assert!(
        page.contains(
            "endpoint (f.toml:2) is an option of kvasir router, kvasir mocker; kvasir frontend does not read it"
        ),
        "{page}"
    );
    let message = refused(
        "config check --config f.toml",
        &[],
        Some("endpoint = \"a.b\"\n"),
    );
    assert!(
        message.contains("--endpoint: `a.b` (f.toml:1) is not allowed"),
        "{message}"
    );
}
