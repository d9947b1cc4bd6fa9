//! Completion scripts, `kvasir completions bash|zsh|fish`.
//!
//! Answers: which words may follow here? Commands, options and the names of choices come from the table; paths
//! are left to the shell. The scripts hold everything and start nothing while the user types.

use std::fmt::Write as _;

use crate::command::{Command, Scope};
use crate::help;
use crate::spec::Spec;
use crate::table;
use crate::value::Kind;

mod bash;
mod fish;
mod zsh;

/// A shell that we write completions for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Shell {
    pub(crate) const NAMES: &[(&str, Self)] = &[
        ("bash", Self::Bash),
        ("zsh", Self::Zsh),
        ("fish", Self::Fish),
    ];

    /// The shell of that name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, shell)| *shell)
    }
}

/// The script.
pub(crate) fn script(shell: Shell) -> String {
    let words = words();
    match shell {
        Shell::Bash => bash::script(&words),
        Shell::Zsh => zsh::script(&words),
        Shell::Fish => fish::script(&words),
    }
}

/// A command as a shell sees it: its name, what may follow, its options.
struct Word {
    name: &'static str,
    summary: String,
    /// Words that may follow it, beside options.
    operands: Vec<&'static str>,
    options: Vec<&'static Spec>,
}

fn words() -> Vec<Word> {
    let options = |scope: Scope| {
        let flags = table::all().filter(|spec| spec.sources.flag);
        flags.filter(|spec| spec.scope.meets(scope)).collect()
    };
    let available = Command::ALL.iter();
    let names: Vec<&'static str> = available.clone().map(|command| command.name()).collect();
    let mut out: Vec<Word> = available
        .map(|command| Word {
            name: command.name(),
            summary: command.summary().to_owned(),
            operands: match command {
                Command::Workers => vec!["add", "remove"],
                _ => Vec::new(),
            },
            options: options(command.scope()),
        })
        .collect();
    for (usage, summary) in help::PAGES {
        let name = usage.split(' ').next().unwrap_or(usage);
        out.push(Word {
            name,
            summary: (*summary).to_owned(),
            operands: match name {
                "config" => vec!["show", "check", "schema"],
                "completions" => Shell::NAMES.iter().map(|(name, _)| *name).collect(),
                _ => names.clone(),
            },
            options: match name {
                // Those of the command that it looks at, unless --for names another.
                "config" => options(Scope::CONFIG.and(Scope::FRONTEND)),
                _ => Vec::new(),
            },
        });
    }
    out
}

/// What a value may be, as far as a shell can help.
enum Values {
    /// A switch has none.
    None,
    Names(Vec<&'static str>),
    Path,
    /// Only the user knows.
    Free,
}

fn values(spec: &Spec) -> Values {
    match spec.kind {
        Kind::Bool => Values::None,
        Kind::Choice(choices) => {
            let mut names: Vec<_> = choices.iter().map(|choice| choice.name).collect();
            if spec.nullable && !names.contains(&"none") {
                names.push("none");
            }
            Values::Names(names)
        }
        Kind::Path => Values::Path,
        Kind::Text(_) if matches!(spec.metavar, "PATH" | "FILE" | "FOLDER") => Values::Path,
        _ => Values::Free,
    }
}

/// Flags of an option as typed, `--name` and for switches `--no-name`.
fn flags(spec: &Spec) -> Vec<String> {
    let mut out = vec![format!("--{}", spec.name)];
    if spec.is_switch() && spec.default == Some("true") {
        out.push(format!("--no-{}", spec.name));
    }
    out
}

/// One line of help.
fn summary(spec: &Spec) -> String {
    let text = spec.summary();
    text.trim_end_matches('.').replace('`', "")
}

/// Quotes a text for a shell, in single quotes.
fn quoted(text: &str) -> String {
    let mut out = String::from("'");
    let _ = write!(out, "{}", text.replace('\'', "'\\''"));
    out.push('\'');
    out
}
