//! Rows: commands that ask a running frontend.

use std::path::PathBuf;
use std::time::Duration;

use crate::command::Scope;
use crate::rule_text::URL as HTTP_URL;
use crate::spec::{Group, options, var};

options! { OPERATE_ROWS, Group::Operate, Scope::OPERATE;

    /// Where the frontend's admin routes are.
    ///
    /// `kvasir doctor` looks at the workers of this frontend; with `--worker` only where it is set.
    URL: String = "url" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).aliases(&["frontend"])
        .env(&[var("KVASIR_URL"), var("KVASIR_FRONTEND")]).default("http://127.0.0.1:8000")
        .rule(&HTTP_URL).effective().common();

    /// Trust this certificate authority, and no other, when the address is https.
    ///
    /// In PEM. Unset believes those that the system believes.
    TLS_CA_PATH: Option<PathBuf> = "tls-ca-path" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).env(&[var("KVASIR_TLS_CA_PATH")]).metavar("FILE")
        .effective();

    /// Give up when no answer has come after so many seconds.
    TIMEOUT_SECS: Duration = "timeout-secs" =>
        scope(Scope::OPERATE.and(Scope::DOCTOR)).env(&[var("KVASIR_TIMEOUT_SECS")]).default("10")
        .positive().metavar("SECONDS").effective();

    /// How many of the latest decisions to list, when no request is named.
    LIMIT: u32 = "limit" =>
        scope(Scope::WHY).default("20").ints(1, 100).flag_only().effective().common();

    /// Seconds between two looks.
    INTERVAL: Duration = "interval" =>
        scope(Scope::TOP).env(&[var("KVASIR_INTERVAL")]).default("1").floats(0.1, 3600.0)
        .metavar("SECONDS").effective().common();

    /// Look once and leave; also when standard output is not a terminal.
    ONCE: bool = "once" => scope(Scope::TOP).default("false").flag_only().effective().common();

    /// Remove the worker at once: what runs there is cut and goes elsewhere where it can.
    FORCE: bool = "force" =>
        scope(Scope::WORKERS).default("false").flag_only().effective().common();
}
