//! Rows: prefill and decode on different workers.

use std::path::PathBuf;

use crate::choice::{
    DisaggregationEngine, DisaggregationMode, PrefillFailure, TransferEnforcement,
};
use crate::command::Scope;
use crate::rule_text::CONDITIONAL_DISAGG;
use crate::spec::{Group, options, var};

options! { DISAGG_ROWS, Group::Disagg, Scope::SERVE;

    /// Let the decode worker do a prefill that is small or would wait.
    ///
    /// Only in the frontend, in `kv` mode, with KV events of decode workers.
    ROUTER_CONDITIONAL_DISAGG: bool = "router-conditional-disagg" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("DYN_ROUTER_CONDITIONAL_DISAGG")])
        .default("false").effective();

    /// Conditions for that, as JSON.
    ///
    /// Fields: `policy` (`isl_bounding`, `prefill_load` or `isl_or_load`), `eff_isl_threshold`
    /// (2048), `eff_isl_ratio_threshold` (0.7), `prefill_busy_threshold`, `decode_busy_threshold`.
    ROUTER_CONDITIONAL_DISAGG_CONFIG: Option<String> = "router-conditional-disagg-config" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG")])
        .rule(&CONDITIONAL_DISAGG).effective();

    /// What to do with a request whose prefill worker fails before anything was streamed.
    ROUTER_PREFILL_FAILURE: PrefillFailure = "router-prefill-failure" =>
        env(&[var("KVASIR_ROUTER_PREFILL_FAILURE")]).default("fallback").effective();

    /// Fail requests of a model with decode workers while it has no prefill workers, and those whose prefill fails.
    ///
    /// Without it, decode workers compute prompts themselves then.
    ENFORCE_DISAGG: bool = "enforce-disagg" =>
        env(&[var("DYN_ENFORCE_DISAGG")]).default("false").effective();

    /// Serve from decode workers alone while prefill workers are missing, though disaggregation is enforced.
    DECODE_FALLBACK: bool = "decode-fallback" =>
        env(&[var("DYN_DECODE_FALLBACK")]).default("false").effective();

    /// Which part of a request a mock engine computes.
    ///
    /// With `--discovery-backend` it says so to frontends; without, it is an engine server for `--prefill-worker` or `--worker`.
    DISAGGREGATION_MODE: DisaggregationMode = "disaggregation-mode" =>
        scope(Scope::MOCKER).env(&[var("KVASIR_DISAGGREGATION_MODE")]).default("agg").effective();

    /// Whose words a mock engine server with a --disaggregation-mode speaks.
    DISAGGREGATION_ENGINE: DisaggregationEngine = "disaggregation-engine" =>
        scope(Scope::MOCKER).env(&[var("KVASIR_DISAGGREGATION_ENGINE")]).default("vllm")
        .default_note("vllm; sglang with --bootstrap-ports").effective();

    /// Port where decode workers meet the first mock engine in mode prefill; each further one takes the next.
    ///
    /// Without it, a prefill's answer says where the prompt is.
    BOOTSTRAP_PORTS: Option<u16> = "bootstrap-ports" =>
        scope(Scope::MOCKER).env(&[var("KVASIR_BOOTSTRAP_PORTS")]).metavar("PORT").effective();

    /// Gigabytes a second that an engine which computes prompts hands over; 0: no time is taken.
    KV_TRANSFER_BANDWIDTH: f64 = "kv-transfer-bandwidth" =>
        scope(Scope::MOCKER.and(Scope::REPLAY)).env(&[var("KVASIR_KV_TRANSFER_BANDWIDTH")]).default("64.0")
        .floats(0.0, 1e6).effective();

    /// Bytes of a token's keys and values, for that time.
    ///
    /// In replay, those of the engine's model are the default.
    KV_BYTES_PER_TOKEN: u64 = "kv-bytes-per-token" =>
        scope(Scope::MOCKER.and(Scope::REPLAY)).env(&[var("KVASIR_KV_BYTES_PER_TOKEN")]).default("131072").effective();

    /// Let a mock engine say where it is, with --discovery-backend.
    ///
    /// Workers of a place carry the taint `dynamo.topology/DOMAIN=NAME`.
    TOPOLOGY_ENABLED: bool = "topology-enabled" =>
        scope(Scope::MOCKER).env(&[var("DYN_TOPOLOGY_ENABLED")]).default("false").effective();

    /// Directory with one file per domain that contains its value.
    TOPOLOGY_MOUNT_PATH: PathBuf = "topology-mount-path" =>
        scope(Scope::MOCKER).env(&[var("DYN_TOPOLOGY_MOUNT_PATH")]).default("/etc/dynamo/topology")
        .metavar("DIR").effective();

    /// Domain that transfers from a mock engine in mode prefill stay in.
    KV_TRANSFER_DOMAIN: Option<String> = "kv-transfer-domain" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_DOMAIN")]).metavar("NAME").effective();

    /// How strictly they stay in it.
    KV_TRANSFER_ENFORCEMENT: TransferEnforcement = "kv-transfer-enforcement" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_ENFORCEMENT")]).default("required").effective();

    /// Weight of the domain when it is only preferred; without one, 1.
    KV_TRANSFER_PREFERRED_WEIGHT: Option<f64> = "kv-transfer-preferred-weight" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_PREFERRED_WEIGHT")]).floats(0.0, 1.0).effective();
}
