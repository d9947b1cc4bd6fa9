//! What would run, and why.
//!
//! Answers: what is every option of a command set to, and who set it? As a table for people, as
//! JSON for programs and for `--dump-config-to`. Secrets are shown as set or not, and passwords in addresses
//! not at all.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json, json};

use crate::help;
use crate::notice::Notice;
use crate::redact::redacted;
use crate::settings::{Origin, Setting, Settings};
use crate::spec::{Group, Spec};
use crate::value::Value;

/// Stands for the value of a secret.
const HIDDEN: &str = "(hidden)";
/// Values longer than this push their origin to the right instead of widening the column.
const VALUE_WIDTH_MAX: usize = 32;

/// The table for people.
pub(crate) fn text(settings: &Settings, notices: &[Notice], changed_only: bool) -> String {
    let mut out = format!("# kvasir {}\n", settings.command().name());
    let widths = widths(settings, changed_only);
    let mut group: Option<Group> = None;
    for (spec, setting) in rows(settings, changed_only) {
        if group != Some(spec.group) {
            group = Some(spec.group);
            let _ = writeln!(out, "\n# {}", spec.group.title());
        }
        let value = shown(spec, setting);
        let (name, origin) = (spec.name, &setting.origin);
        let _ = writeln!(out, "{name:<0$}  {value:<1$}  {origin}", widths.0, widths.1);
    }
    if !notices.is_empty() {
        out.push_str("\n# Notices\n");
    }
    for notice in notices {
        let _ = writeln!(out, "{notice}");
    }
    out
}

/// Widths of the columns for names and values.
fn widths(settings: &Settings, changed_only: bool) -> (usize, usize) {
    rows(settings, changed_only).fold((0, 0), |(name, value), (spec, setting)| {
        let length = shown(spec, setting).chars().count().min(VALUE_WIDTH_MAX);
        (name.max(spec.name.len()), value.max(length))
    })
}

/// The same as JSON.
pub(crate) fn json(settings: &Settings, notices: &[Notice], changed_only: bool) -> String {
    let options: Map<String, Json> = rows(settings, changed_only)
        .map(|(spec, setting)| (spec.name.to_owned(), json_row(spec, setting)))
        .collect();
    let notices: Vec<_> = notices.iter().map(ToString::to_string).collect();
    let page = json!({
        "command": settings.command().name(),
        "options": options,
        "notices": notices,
    });
    format!("{page:#}\n")
}

/// The report of `kvasir config check` when nothing is wrong.
pub(crate) fn checked(settings: &Settings, notices: &[Notice]) -> String {
    let set = settings
        .iter()
        .filter(|(_, setting)| setting.origin.is_user())
        .count();
    let mut out = String::new();
    for notice in notices {
        let _ = writeln!(out, "warning: {notice}");
    }
    let _ = writeln!(
        out,
        "ok: kvasir {} would start; {set} options set",
        settings.command().name()
    );
    out
}

fn rows(
    settings: &Settings,
    changed_only: bool,
) -> impl Iterator<Item = (&'static Spec, &Setting)> {
    settings
        .iter()
        .filter(move |(_, setting)| !changed_only || setting.origin != Origin::Default)
}

fn shown(spec: &Spec, setting: &Setting) -> String {
    match setting.value {
        Value::Unset => "none".into(),
        _ if spec.secret => HIDDEN.into(),
        _ => redacted(&setting.value.text()),
    }
}

fn json_row(spec: &Spec, setting: &Setting) -> Json {
    let value = match &setting.value {
        Value::Unset => Json::Null,
        _ if spec.secret => HIDDEN.into(),
        Value::Bool(yes) => (*yes).into(),
        Value::Int(number) => (*number).into(),
        Value::Float(number) => (*number).into(),
        Value::Text(text) => redacted(text).into(),
        Value::Choice(name) => (*name).into(),
        Value::List(items) => items.iter().map(|item| redacted(item)).collect(),
    };
    let mut row = json!({
        "value": value,
        "origin": setting.origin.kind(),
        "default": spec.default,
    });
    if setting.origin != Origin::Default {
        row["from"] = setting.origin.to_string().into();
    }
    if let Some(status) = help::status(spec) {
        row["status"] = status.into();
    }
    row
}

impl Settings {
    /// All values with their origin, as JSON: the content of `--dump-config-to`.
    pub fn to_json(&self) -> String {
        json(self, &[], false)
    }
}
