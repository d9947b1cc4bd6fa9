//! Rows: prefill and decode on different workers.

use std::path::PathBuf;

use crate::choice::{PrefillFailure, TransferEnforcement};
use crate::command::Scope;
use crate::rule_text::CONDITIONAL_DISAGG;
use crate::spec::{Group, options, var};

options! { DISAGG_ROWS, Group::Disagg, Scope::SERVE;

    /// Let the decode worker do a prefill that is small or would wait.
    ///
    /// Only in the frontend, in `kv` mode, with KV events of decode workers.
    ROUTER_CONDITIONAL_DISAGG: bool = "router-conditional-disagg" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("DYN_ROUTER_CONDITIONAL_DISAGG")])
        .default("false");

    /// Conditions for that, as JSON.
    ///
    /// Fields: `policy` (`isl_bounding`, `prefill_load` or `isl_or_load`), `eff_isl_threshold`
    /// (2048), `eff_isl_ratio_threshold` (0.7), `prefill_busy_threshold`, `decode_busy_threshold`.
    ROUTER_CONDITIONAL_DISAGG_CONFIG: Option<String> = "router-conditional-disagg-config" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG")])
        .rule(&CONDITIONAL_DISAGG);

    /// What to do with a request whose prefill worker fails before anything was streamed.
    ROUTER_PREFILL_FAILURE: PrefillFailure = "router-prefill-failure" =>
        env(&[var("KVASIR_ROUTER_PREFILL_FAILURE")]).default("fallback");

    /// Removed: refuse decode-only service while prefill workers are missing.
    ENFORCE_DISAGG: bool = "enforce-disagg" =>
        env(&[var("DYN_ENFORCE_DISAGG")]).default("false")
        .ignored("use --router-prefill-failure fail");

    /// Serve from decode workers alone while prefill workers are missing.
    DECODE_FALLBACK: bool = "decode-fallback" =>
        env(&[var("DYN_DECODE_FALLBACK")]).default("false");

    /// Keep KV transfers inside a topology domain.
    TOPOLOGY_ENABLED: bool = "topology-enabled" =>
        scope(Scope::MOCKER).env(&[var("DYN_TOPOLOGY_ENABLED")]).default("false");

    /// Directory with one file per domain that contains its value.
    TOPOLOGY_MOUNT_PATH: PathBuf = "topology-mount-path" =>
        scope(Scope::MOCKER).env(&[var("DYN_TOPOLOGY_MOUNT_PATH")]).default("/etc/dynamo/topology")
        .metavar("DIR");

    /// Domain that transfers should stay in.
    KV_TRANSFER_DOMAIN: Option<String> = "kv-transfer-domain" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_DOMAIN")]).metavar("NAME");

    /// How strictly they stay in it.
    KV_TRANSFER_ENFORCEMENT: TransferEnforcement = "kv-transfer-enforcement" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_ENFORCEMENT")]).default("required");

    /// Weight of the domain when it is only preferred.
    KV_TRANSFER_PREFERRED_WEIGHT: Option<f64> = "kv-transfer-preferred-weight" =>
        scope(Scope::MOCKER).env(&[var("DYN_KV_TRANSFER_PREFERRED_WEIGHT")]).floats(0.0, 1.0);
}
