//! Help for the terminal.
//!
//! Answers: which commands and options are there? `-h` lists what most people need, one line
//! each; `--help` lists every option with its text, values, default and variables.

use std::fmt::Write as _;

use crate::args::HelpLength;
use crate::command::{Command, Scope};
use crate::spec::{Effect, Group, Spec};
use crate::table;
use crate::value::Kind;

/// Width of help text.
const WIDTH: usize = 100;
/// Column at which texts of options begin in full help.
const INDENT: usize = 10;

/// Commands that only print: as in usage, and what they are for.
pub(crate) const PAGES: &[(&str, &str)] = &[
    (
        "config show|check|schema",
        "Show every option with its origin, check them, or print the file's schema",
    ),
    (
        "completions bash|zsh|fish",
        "Print a completion script for a shell",
    ),
    (
        "man [COMMAND]",
        "Print the manual page, of all or of a command",
    ),
    ("help [COMMAND]", "Show this, or the help of a command"),
];

/// The list of commands.
pub(crate) fn overview() -> String {
    let mut out = String::from(
        "kvasir: a KV-cache-aware router for LLM inference\n\n\
         Usage: kvasir <command> [options]\n\nCommands:\n",
    );
    let row = |out: &mut String, name: &str, text: &str| {
        let _ = writeln!(out, "  {name:<13}{text}");
    };
    for command in Command::ALL {
        row(&mut out, command.name(), command.summary());
    }
    for (usage, summary) in PAGES {
        row(&mut out, usage.split(' ').next().unwrap_or(usage), summary);
    }
    out.push_str(
        "\nA first try:\n  kvasir demo --traffic\n  \
         kvasir frontend --worker http://10.0.0.7:8000 --worker http://10.0.0.8:8000\n\n\
         Options of a command: kvasir <command> -h (short) or --help (all)\n",
    );
    out
}

/// Help of one command.
pub(crate) fn command(command: Command, length: HelpLength) -> String {
    let head = format!(
        "{}\n\nUsage: {} [options]\n",
        command.summary(),
        format!("kvasir {} {}", command.name(), command.operands()).trim_end()
    );
    page(
        &head,
        command.scope(),
        length,
        &format!("kvasir {}", command.name()),
    )
}

/// Help of `kvasir config`.
pub(crate) fn config(length: HelpLength) -> String {
    let head = "Show or check what a command would run with\n\n\
                Usage: kvasir config show [--for COMMAND] [--changed] [--json] \
                [options of COMMAND]\n       \
                kvasir config check [--for COMMAND] [options of COMMAND]\n       \
                kvasir config schema\n";
    page(head, Scope::CONFIG, length, "kvasir config")
}

/// Help of `kvasir completions`.
pub(crate) const COMPLETIONS: &str = "\
Print a completion script for a shell

Usage: kvasir completions bash|zsh|fish

  bash   source <(kvasir completions bash)
  zsh    kvasir completions zsh > \"${fpath[1]}/_kvasir\"
  fish   kvasir completions fish > ~/.config/fish/completions/kvasir.fish
";

/// Help of `kvasir man`.
pub(crate) const MANUAL: &str = "\
Print the manual page, of all or of a command

Usage: kvasir man [COMMAND]

  kvasir man | man -l -                             read it
  kvasir man frontend > kvasir-frontend.1           keep it
";

fn page(head: &str, scope: Scope, length: HelpLength, name: &str) -> String {
    let mut out = String::from(head);
    let short = |spec: &Spec| spec.common && !matches!(spec.effect, Effect::NotYet | Effect::Never);
    let listed =
        |spec: &&&Spec| spec.scope.meets(scope) && (length == HelpLength::Full || short(spec));
    let all: Vec<&Spec> = table::all().collect();
    for group in Group::ALL {
        let rows: Vec<_> = all
            .iter()
            .filter(|spec| spec.group.within(scope) == *group)
            .filter(listed)
            .collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{}:", group.title());
        for (index, spec) in rows.into_iter().enumerate() {
            match length {
                HelpLength::Short => short_row(&mut out, spec),
                HelpLength::Full if index == 0 => full_row(&mut out, spec),
                HelpLength::Full => {
                    out.push('\n');
                    full_row(&mut out, spec);
                }
            }
        }
    }
    tail(&mut out, scope, length, name);
    out
}

fn tail(out: &mut String, scope: Scope, length: HelpLength, name: &str) {
    out.push_str("\n  -h, --help  Short or full help\n");
    match length {
        HelpLength::Short => {
            let count = table::all().filter(|spec| spec.scope.meets(scope)).count();
            let _ = writeln!(out, "\nAll {count} options: {name} --help");
        }
        HelpLength::Full => out.push_str(
            "\nA flag wins over its variable, a variable over the --config file, the file over the \
             default.\nSwitches have a --no- form.\n",
        ),
    }
}

/// Flag with its value's name, as in usage.
pub(crate) fn usage(spec: &Spec) -> String {
    let short = spec
        .short
        .map(|letter| format!("-{letter}, "))
        .unwrap_or_default();
    match (spec.sources.flag, spec.kind) {
        (false, _) => format!("({} in file or environment)", spec.name),
        (true, Kind::Bool) if spec.default == Some("true") => {
            format!("{short}--[no-]{}", spec.name)
        }
        (true, Kind::Bool) => format!("{short}--{}", spec.name),
        (true, _) => format!("{short}--{} {}", spec.name, spec.metavar),
    }
}

fn short_row(out: &mut String, spec: &Spec) {
    let usage = usage(spec);
    let variable = spec
        .env
        .first()
        .map(|var| format!("{}, ", var.name))
        .unwrap_or_default();
    let note = format!("[{variable}default: {}]", spec.default_text());
    let _ = writeln!(out, "  {usage}");
    paragraph(out, &format!("{} {note}", spec.summary()), INDENT);
}

fn full_row(out: &mut String, spec: &Spec) {
    let _ = writeln!(out, "  {}", usage(spec));
    paragraph(out, &spec.summary(), INDENT);
    for text in spec.details() {
        paragraph(out, &text, INDENT);
    }
    for fact in facts(spec) {
        paragraph(out, &fact, INDENT);
    }
}

/// The facts below an option's text, a line each.
pub(crate) fn facts(spec: &Spec) -> Vec<String> {
    let mut facts = Vec::new();
    if let Kind::Choice(choices) = spec.kind {
        facts.extend(
            choices
                .iter()
                .map(|choice| format!("{}: {}", choice.name, choice.help)),
        );
    } else if !spec.is_switch() {
        facts.push(format!(
            "Values: {}{}",
            spec.kind.expects(),
            if spec.nullable { ", or none" } else { "" }
        ));
    }
    let mut line = format!("Default: {}", spec.default_text());
    let variables: Vec<_> = spec.env.iter().map(|var| var.name).collect();
    if !variables.is_empty() {
        let _ = write!(line, ". Variable: {}", variables.join(", else "));
    }
    if !spec.aliases.is_empty() {
        let old: Vec<_> = spec
            .aliases
            .iter()
            .map(|alias| format!("--{alias}"))
            .collect();
        let _ = write!(line, ". Also: {}", old.join(", "));
    }
    facts.push(line);
    facts.extend(status(spec));
    facts
}

/// What a reader should know about an option's state, if anything.
pub(crate) fn status(spec: &Spec) -> Option<String> {
    let replaced = spec.deprecated.map(|note| match spec.effect {
        Effect::Never => format!("Ignored: {note}."),
        _ => format!("Deprecated: {note}."),
    });
    let missing = match spec.effect {
        Effect::Now | Effect::Never => None,
        Effect::Partly(note) => Some(format!("Partly: {note}.")),
        Effect::NotYet => Some("No effect yet.".to_owned()),
    };
    match (replaced, missing) {
        (Some(replaced), Some(missing)) => Some(format!("{replaced} {missing}")),
        (replaced, missing) => replaced.or(missing),
    }
}

/// Appends a text, broken at words, every line indented.
fn paragraph(out: &mut String, text: &str, indent: usize) {
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
}
