//! Rows: commands that ask a running frontend.

use std::path::PathBuf;
use std::time::Duration;

use crate::command::Scope;
use crate::rule_text::URL as HTTP_URL;
use crate::spec::{Group, options, var};

options! { OPERATE_ROWS, Group::Operate, Scope::OPERATE;

    /// Base URL of the frontend's admin API.
    ///
    /// `kvasir doctor` checks the workers of this frontend; with `--worker`, only if this is set.
    URL: String = "url" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).aliases(&["frontend"])
        .env(&[var("KVASIR_URL"), var("KVASIR_FRONTEND")]).default("http://127.0.0.1:8000")
        .rule(&HTTP_URL).effective().common();

    /// Trust only this certificate authority when the URL is https.
    ///
    /// In PEM. Unset uses the system's certificate authorities.
    TLS_CA_PATH: Option<PathBuf> = "tls-ca-path" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).env(&[var("KVASIR_TLS_CA_PATH")]).metavar("FILE")
        .effective();

    /// Time to wait for a response.
    TIMEOUT_SECS: Duration = "timeout-secs" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).env(&[var("KVASIR_TIMEOUT_SECS")]).default("10")
        .positive().metavar("SECONDS").effective();

    /// Ask only whether the process is alive: true while it loads and while it drains, too.
    LIVE: bool = "live" => scope(Scope::HEALTH).default("false").flag_only().effective().common();

    /// Number of latest decisions to list when no request is named.
    LIMIT: u32 = "limit" =>
        scope(Scope::WHY).default("20").ints(1, 100).flag_only().effective().common();

    /// Seconds between two updates.
    INTERVAL: Duration = "interval" =>
        scope(Scope::TOP).env(&[var("KVASIR_INTERVAL")]).default("1").floats(0.1, 3600.0)
        .metavar("SECONDS").effective().common();

    /// Print one update and exit; implied when standard output is not a terminal.
    ONCE: bool = "once" => scope(Scope::TOP).default("false").flag_only().effective().common();

    /// Remove the worker at once; its requests are cut off and continue elsewhere if possible.
    FORCE: bool = "force" =>
        scope(Scope::WORKERS).default("false").flag_only().effective().common();
}
