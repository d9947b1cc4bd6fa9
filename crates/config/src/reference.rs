//! The generated reference page, `docs/reference/options.md`.
//!
//! Answers: what would a reader of the documentation look up about an option? Written from the
//! table by `cargo xtask docs`; tidy fails when the file differs.

use std::fmt::Write as _;

use crate::command::Scope;
use crate::help;
use crate::spec::{Group, Spec};
use crate::table;
use crate::value::Kind;

const HEAD: &str = "\
# Options

Generated from the option table in `crates/config/src/table` by `cargo xtask docs`; do not edit.

An option has one name everywhere: `--router-mode kv` on the command line, `router-mode = \"kv\"` in
the TOML file named by `--config`, and a variable such as `DYN_ROUTER_MODE=kv`. A flag wins over its
variable, a variable over the file, the file over the default. `kvasir config show` prints every
value with its origin.

- Switches have a `--no-` form, and read `1`, `true`, `yes`, `on` and `0`, `false`, `no`, `off` or
  an empty text in variables. Anything else is refused.
- Where a value may be `none`, `none` or an empty text unset it. Elsewhere an empty variable counts
  as not given.
- An option that may be given several times takes a list in a file, and in a variable several
  values with spaces between them (or commas, where values have none).
- In a file, keys stand at the top level. A key that is no option is refused; a key of another
  command is checked, and a notice says that it is not read.
- A variable that no option has is left alone. One that differs from ours by a letter or two, and
  every unknown `KVASIR_` one, gets a warning.
- A bad value, wherever it comes from, ends the start with exit code 2. Infinite and undefined
  numbers are bad values.
- *No effect yet* marks options whose feature is still to come: they are accepted, checked, and said
  to be without effect at start.
";

/// The whole page.
///
/// ```
/// assert!(kvasir_config::reference_page().contains("### `--router-mode MODE`"));
/// ```
pub fn reference_page() -> String {
    let mut out = String::from(HEAD);
    for group in Group::ALL {
        let rows: Vec<_> = table::all().filter(|spec| spec.group == *group).collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n## {}", group.title());
        for spec in rows {
            section(&mut out, spec);
        }
    }
    out.push_str("\n## Variables of engines\n\nNot read by Kvasir, but needed beside it.\n\n");
    for (name, text) in table::ENGINE_VARIABLES {
        let _ = writeln!(out, "- `{name}`: {text}");
    }
    out
}

fn section(out: &mut String, spec: &Spec) {
    let _ = writeln!(out, "\n### `{}`\n\n{}", help::usage(spec), spec.summary());
    for text in spec.details() {
        let _ = writeln!(out, "\n{text}");
    }
    out.push('\n');
    if let Kind::Choice(choices) = spec.kind {
        out.push_str("- Values:\n");
        for choice in choices {
            let _ = writeln!(out, "  - `{}`: {}", choice.name, choice.help);
        }
    } else if !spec.is_switch() {
        let or_none = if spec.nullable { ", or `none`" } else { "" };
        let _ = writeln!(out, "- Values: {}{or_none}", spec.kind.expects());
    }
    let _ = writeln!(out, "- Default: {}", default(spec));
    if spec.sources.env {
        let names: Vec<_> = spec.env.iter().map(variable).collect();
        let _ = writeln!(out, "- Variable: {}", names.join(", else "));
    }
    if !spec.aliases.is_empty() {
        let names: Vec<_> = spec
            .aliases
            .iter()
            .map(|alias| format!("`--{alias}`"))
            .collect();
        let _ = writeln!(out, "- Also: {}", names.join(", "));
    }
    let _ = writeln!(out, "- Commands: {}", commands(spec.scope));
    if let Some(status) = help::status(spec) {
        let _ = writeln!(out, "- {status}");
    }
}

fn default(spec: &Spec) -> String {
    match (spec.default_note, spec.default) {
        (Some(note), _) => note.into(),
        (None, Some(text)) => format!("`{text}`"),
        (None, None) => "unset".into(),
    }
}

fn variable(var: &crate::spec::EnvVar) -> String {
    let sense = if var.negated { " (opposite sense)" } else { "" };
    format!("`{}`{sense}", var.name)
}

fn commands(scope: Scope) -> String {
    scope.names().join(", ")
}
