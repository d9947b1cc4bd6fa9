//! The manual pages, `kvasir man`.
//!
//! Answers: what would `man kvasir` say? Written from the table and the list of commands, in the macros that
//! both `man` and `mandoc` read. One page for all, or one for a command.

use std::fmt::Write as _;

use crate::command::Command;
use crate::help;
use crate::spec::{Group, Spec};
use crate::table;
use crate::value::Kind;

/// The page of the program, or of one command.
pub(crate) fn page(command: Option<Command>) -> String {
    let mut out = String::new();
    match command {
        Some(command) => command_head(&mut out, command),
        None => program_head(&mut out),
    }
    out.push_str(".SH OPTIONS\n");
    text(
        &mut out,
        "A flag wins over its variable, a variable over the file of --config, the file over the default. Switches \
         have a --no- form.",
    );
    let listed = |spec: &&Spec| command.is_none_or(|command| spec.scope.meets(command.scope()));
    for group in Group::ALL {
        let rows: Vec<&Spec> = table::all()
            .filter(|spec| spec.group == *group)
            .filter(listed)
            .collect();
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(out, ".SS {}", escaped(group.title()));
        for spec in rows {
            option(&mut out, spec, command.is_none());
        }
    }
    tail(&mut out);
    out
}

fn program_head(out: &mut String) {
    title(out, "kvasir");
    out.push_str(".SH NAME\n");
    text(out, "kvasir - a KV-cache-aware router for LLM inference");
    out.push_str(".SH SYNOPSIS\n.B kvasir\n.I command\n.RI [ options ]\n");
    out.push_str(".SH DESCRIPTION\n");
    text(
        out,
        "Kvasir stands in front of many inference engines and sends each request where the least uncached prompt \
         work and decode load await.",
    );
    out.push_str(".SH COMMANDS\n");
    for command in Command::ALL {
        let usage = format!("{} {}", command.name(), command.operands());
        let _ = writeln!(out, ".TP\n.B {}", escaped(usage.trim_end()));
        text(out, &format!("{}.", command.summary()));
    }
    for (usage, summary) in help::PAGES {
        let _ = writeln!(out, ".TP\n.B {}", escaped(usage));
        text(out, &format!("{summary}."));
    }
}

fn command_head(out: &mut String, command: Command) {
    let name = format!("kvasir-{}", command.name());
    title(out, &name);
    out.push_str(".SH NAME\n");
    text(out, &format!("{name} - {}", command.summary()));
    let usage = format!("kvasir {} {}", command.name(), command.operands());
    let _ = write!(
        out,
        ".SH SYNOPSIS\n.B {}\n.RI [ options ]\n",
        escaped(usage.trim_end())
    );
}

fn title(out: &mut String, name: &str) {
    let _ = writeln!(
        out,
        ".TH {} 1 \"\" \"kvasir {}\" \"Kvasir manual\"",
        escaped(&name.to_uppercase()),
        env!("CARGO_PKG_VERSION")
    );
}

fn option(out: &mut String, spec: &Spec, with_commands: bool) {
    out.push_str(".TP\n");
    let short = spec.short.map(|letter| format!("-{letter}, "));
    let flag = match (spec.sources.flag, spec.kind) {
        (false, _) => spec.name.to_owned(),
        (true, Kind::Bool) => format!("{}--[no-]{}", short.unwrap_or_default(), spec.name),
        (true, _) => format!("{}--{}", short.unwrap_or_default(), spec.name),
    };
    match spec.kind {
        Kind::Bool => {
            let _ = writeln!(out, ".B {}", escaped(&flag));
        }
        _ => {
            let _ = writeln!(out, ".BI \"{} \" {}", escaped(&flag), escaped(spec.metavar));
        }
    }
    text(out, &spec.summary());
    for details in spec.details() {
        more(out, &details);
    }
    for fact in help::facts(spec) {
        more(out, &fact);
    }
    if with_commands {
        let names = spec.scope.names().join(", ");
        more(out, &format!("Of: {names}."));
    }
}

fn tail(out: &mut String) {
    out.push_str(".SH EXIT STATUS\n");
    for (code, meaning) in [
        ("0", "Success."),
        ("1", "Failure, or no response from the frontend or worker."),
        ("2", "An option, a variable or the file is invalid."),
    ] {
        let _ = writeln!(out, ".TP\n.B {code}");
        text(out, meaning);
    }
    out.push_str(".SH EXAMPLES\n");
    let examples = [
        ("Try it without a GPU:", "kvasir demo --traffic"),
        (
            "Two vLLM servers:",
            "kvasir frontend --worker http://10.0.0.7:8000 --worker http://10.0.0.8:8000",
        ),
        (
            "Why a request went where it went:",
            "kvasir why chatcmpl-2f1c…",
        ),
        (
            "Options in effect and their origin:",
            "kvasir config show --changed --config kvasir.toml",
        ),
    ];
    for (at, (what, line)) in examples.into_iter().enumerate() {
        out.push_str(if at > 0 { ".PP\n" } else { "" });
        text(out, what);
        let _ = write!(out, ".RS 4\n.nf\n{}\n.fi\n.RE\n", escaped(line));
    }
}

/// A text as it follows a tag or a heading.
fn text(out: &mut String, text: &str) {
    let _ = writeln!(out, "{}", escaped(text));
}

/// A further line of the same option.
fn more(out: &mut String, words: &str) {
    out.push_str(".br\n");
    text(out, words);
}

/// Escapes a text for roff.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    if text.starts_with(['.', '\'']) {
        out.push_str("\\&");
    }
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\e"),
            '-' => out.push_str("\\-"),
            '"' => out.push_str("\\(dq"),
            '\'' => out.push_str("\\(aq"),
            '`' => out.push_str("\\(ga"),
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
