//! Why a start is refused.
//!
//! Answers: what is wrong, where does it stand, what would be right? All problems of an
//! invocation are reported together, one line each, so that they need not be fixed one start at a time.
//!
//! Invariants: the same mistake reads the same from flag, variable, file and policy, but for its
//! place; a secret's value and the password in an address are never printed.

use std::fmt;

use crate::nearest::nearest;
use crate::redact::redacted;
use crate::settings::Origin;
use crate::spec::Spec;
use crate::table;
use crate::value::Kind;

/// Longest piece of a bad value that a message repeats.
const SHOWN_MAX: usize = 120;

/// Everything that is wrong with an invocation.
#[derive(Debug)]
pub struct ConfigError {
    help: String,
    problems: Vec<Problem>,
}

impl ConfigError {
    /// `command` is where to read more: `kvasir` or `kvasir frontend`.
    pub(crate) fn new(command: &str, problems: Vec<Problem>) -> Self {
        Self {
            help: format!("{command} --help"),
            problems,
        }
    }

    /// Exit code of the process: 2, the conventional one for wrong usage.
    pub fn exit_code(&self) -> u8 {
        2
    }

    /// The problems, in the order flags, variables, file, rules.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "error: {problem}")?;
        }
        write!(f, "More: {}", self.help)
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A value is not of its option's kind or range.
    #[error(
        "--{option}: {value} ({origin}) is not allowed; give {expects}{}",
        suggest(nearest)
    )]
    BadValue {
        /// Name of the option.
        option: &'static str,
        /// The value between backticks, shortened; hidden for a secret.
        value: String,
        /// Where it stood.
        origin: String,
        /// What would be right.
        expects: String,
        /// The nearest right value, for a choice.
        nearest: Option<String>,
    },
    /// No option has that name.
    #[error("unknown option {written} ({origin}){}", suggest(nearest))]
    UnknownName {
        /// The name as it stood, between backticks.
        written: String,
        /// Where it stood.
        origin: String,
        /// The nearest right name.
        nearest: Option<String>,
    },
    /// The option exists, but not for this command or from this place.
    #[error("{message}")]
    Misplaced {
        /// Name of the option.
        option: &'static str,
        /// The whole sentence.
        message: String,
    },
    /// A flag at the end, or before another flag, without its value.
    #[error("--{option} needs a value: --{option} {metavar}, {expects}")]
    MissingValue {
        /// Name of the option.
        option: &'static str,
        /// Name of the value.
        metavar: &'static str,
        /// What would be right.
        expects: String,
    },
    /// Options that do not go together, or one that needs another.
    #[error("{message}")]
    Conflict {
        /// The options concerned.
        options: Vec<&'static str>,
        /// The whole sentence.
        message: String,
    },
    /// The file cannot be read or is not TOML.
    #[error("{message}")]
    File {
        /// The whole sentence.
        message: String,
    },
    /// A word that is no command, or an argument where none belongs.
    #[error("{message}")]
    Usage {
        /// The whole sentence.
        message: String,
    },
}

fn suggest(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map_or_else(String::new, |name| format!(". Did you mean `{name}`?"))
}

impl Problem {
    pub(crate) fn bad_value(spec: &Spec, text: &str, origin: &Origin) -> Self {
        let nearest = match spec.kind {
            Kind::Choice(choices) => {
                nearest(text, choices.iter().map(|choice| choice.name)).map(str::to_owned)
            }
            _ => None,
        };
        let mut expects = spec.kind.expects();
        if spec.nullable {
            expects.push_str(", or none");
        }
        let value = if spec.secret {
            "the value".into()
        } else {
            quoted(text)
        };
        let origin = origin.place(spec.name);
        Self::BadValue {
            option: spec.name,
            value,
            origin,
            expects,
            nearest,
        }
    }

    /// A flag, key or policy part that names no option. `dashes` says how to write the right one.
    pub(crate) fn unknown_name(
        written: &str,
        dashes: &str,
        origin: &str,
        scope: NameScope,
    ) -> Self {
        let bare = written.trim_start_matches('-');
        let negated = bare.strip_prefix("no-").filter(|_| !dashes.is_empty());
        let names = || {
            table::all()
                .filter(|spec| scope.0.is_none_or(|scope| spec.scope.meets(scope)))
                .flat_map(|spec| std::iter::once(spec.name).chain(spec.aliases.iter().copied()))
        };
        let no_form = negated
            .and_then(|rest| nearest(rest, names()))
            .filter(|name| table::named(name).is_some_and(Spec::is_switch));
        let found = match no_form {
            Some(name) => Some(format!("{dashes}no-{name}")),
            None => nearest(bare, names()).map(|name| format!("{dashes}{name}")),
        };
        Self::UnknownName {
            written: quoted(written),
            origin: origin.into(),
            nearest: found,
        }
    }

    pub(crate) fn conflict(options: &[&'static str], message: impl Into<String>) -> Self {
        Self::Conflict {
            options: options.to_vec(),
            message: message.into(),
        }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
        }
    }
}

/// Options among which a nearest name is looked for: those of a scope, or all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameScope(pub(crate) Option<crate::command::Scope>);

/// A text between backticks, cut where it gets long, with control characters made visible and passwords not.
pub(crate) fn quoted(text: &str) -> String {
    let visible = |c: char| {
        if c.is_control() {
            c.escape_debug().to_string()
        } else {
            c.into()
        }
    };
    let text = redacted(text);
    let shown: String = text.chars().take(SHOWN_MAX).map(visible).collect();
    let more = if text.chars().count() > SHOWN_MAX {
        "…"
    } else {
        ""
    };
    format!("`{shown}{more}`")
}
