//! Rows: general switches, logs and metrics.

use std::path::PathBuf;

use crate::choice::{ForCommand, LogFormat};
use crate::command::Scope;
use crate::rule_text::{HOST, LOG_FILTER, METRIC_PREFIX, URL};
use crate::spec::{Group, options, var};

options! { GENERAL_ROWS, Group::General, Scope::ALL.and(Scope::CONFIG).and(Scope::OPERATE)
    .and(Scope::DOCTOR);

    /// Read options from this TOML file.
    ///
    /// Keys are the names of flags without the dashes, at the top level: `router-mode = "kv"`.
    /// Unknown keys are refused. Variables and flags take precedence over the file.
    CONFIG: Option<PathBuf> = "config" =>
        env(&[var("KVASIR_CONFIG")]).metavar("FILE").not_in_file().effective().common();

    /// Command whose options to show or check.
    FOR: ForCommand = "for" =>
        scope(Scope::CONFIG).default("frontend").metavar("COMMAND").flag_only().effective()
        .common();

    /// Print JSON instead of text.
    JSON: bool = "json" =>
        scope(Scope::CONFIG.and(Scope::OPERATE).and(Scope::DOCTOR)).default("false").flag_only()
        .effective().common();

    /// Show only values that differ from their defaults.
    CHANGED: bool = "changed" =>
        scope(Scope::CONFIG).default("false").flag_only().effective().common();

    /// Seed of all random choices: ties, temperature, mock engines, traffic.
    ///
    /// If unset, a seed is drawn and logged at start, so that replicas differ; `kvasir replay` uses 0. The same seed
    /// and the same inputs give the same decisions.
    SEED: Option<u64> = "seed" => scope(Scope::ALL).env(&[var("KVASIR_SEED")]).effective();

    /// Write the values in use and their origin to this file at start, as JSON.
    DUMP_CONFIG_TO: Option<PathBuf> = "dump-config-to" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("DYN_DUMP_CONFIG_TO")]).metavar("FILE")
        .effective();
}

options! { OBSERVABILITY_ROWS, Group::Observability, Scope::ALL;

    /// Log level, or log levels by module.
    ///
    /// For example `info,kvasir_router=debug` adds the cost of every candidate of a decision.
    LOG_LEVEL: String = "log-level" =>
        env(&[var("KVASIR_LOG"), var("DYN_LOG")]).default("info").default_note("info; warn with --traffic").rule(&LOG_FILTER).common()
        .effective();

    /// Format of log lines.
    LOG_FORMAT: LogFormat = "log-format" =>
        env(&[var("KVASIR_LOG_FORMAT")]).default("text").common().effective();

    /// Number of routing decisions kept for `kvasir why`.
    ROUTER_DECISION_LOG: u32 = "router-decision-log" of router =>
        scope(Scope::ROUTING).env(&[var("KVASIR_ROUTER_DECISION_LOG")]).effective();

    /// Prefix of the frontend's metric names.
    METRICS_PREFIX: String = "metrics-prefix" =>
        scope(Scope::SERVE).env(&[var("DYN_METRICS_PREFIX")]).default("dynamo_frontend")
        .rule(&METRIC_PREFIX).effective();

    /// Send spans of requests to an OpenTelemetry collector.
    ///
    /// Needs a build with the feature `otel`; other builds log a warning at start. An incoming
    /// `traceparent` is continued, and the engine gets a child span.
    OTEL_EXPORT_ENABLED: bool = "otel-export-enabled" =>
        scope(Scope::SERVE).env(&[var("OTEL_EXPORT_ENABLED")]).default("false").effective();

    /// URL of the collector for traces: OTLP over HTTP, protobuf.
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: String = "otel-exporter-otlp-traces-endpoint" =>
        scope(Scope::SERVE).env(&[var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")])
        .default("http://localhost:4318/v1/traces").rule(&URL).effective();

    /// Service name in traces.
    OTEL_SERVICE_NAME: String = "otel-service-name" =>
        scope(Scope::SERVE).env(&[var("OTEL_SERVICE_NAME")]).default("kvasir").metavar("NAME")
        .effective();

    /// Share of requests without a `traceparent` that are sampled; others follow their caller.
    OTEL_TRACES_SAMPLER_ARG: f64 = "otel-traces-sampler-arg" =>
        scope(Scope::SERVE).env(&[var("OTEL_TRACES_SAMPLER_ARG")]).default("1").floats(0.0, 1.0)
        .effective();

    /// Port of a status server with `/metrics`, `/health` and `/live`; unset starts none.
    ///
    /// Of `kvasir mocker` only where it joins a fleet: its HTTP servers have all three themselves. Its card then names the model's files by
    /// URLs of this server instead of paths, so that frontends on other machines get them, too.
    SYSTEM_PORT: Option<u16> = "system-port" =>
        scope(Scope::ROUTER.and(Scope::MOCKER)).env(&[var("DYN_SYSTEM_PORT")]).ints(0, 65_535).metavar("PORT").effective();

    /// Address that it listens on.
    SYSTEM_HOST: String = "system-host" =>
        scope(Scope::ROUTER.and(Scope::MOCKER)).env(&[var("DYN_SYSTEM_HOST")]).default("0.0.0.0").rule(&HOST).effective();
}
