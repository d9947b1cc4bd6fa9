//! The environment.
//!
//! Answers: which options do variables set, and which variables look like a slip? The process
//! environment is read here, once, at the edge; everything else gets a map.
//!
//! Rules: of several variables of an option the first that is present wins. An empty variable
//! means false for a switch, "unset" for an option that can be unset, and nothing for any other.
//! A variable that no option has is left alone, since engines and other services share the
//! `DYN_` names; one that differs from ours by a letter or two is worth a warning, and so is
//! every unknown `KVASIR_` one.

use std::collections::BTreeMap;

use crate::command::Scope;
use crate::error::Problem;
use crate::nearest::distance;
use crate::notice::{Notice, NoticeKind};
use crate::settings::{Assignment, Origin};
use crate::spec::{EnvVar, Spec};
use crate::table;

/// Prefix of variables that only tests read.
const TEST_PREFIX: &str = "KVASIR_TEST_";
/// What one process says to another that it starts; no option.
const TAKE_OVER: &str = "KVASIR_TAKE_OVER";
/// Edits up to which an unknown variable counts as a slip.
const SLIP_EDITS: usize = 2;

/// Variables and their values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The environment of this process. Called once, at the edge.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads the process environment"
    )]
    pub fn from_process() -> Self {
        let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
        Self(
            std::env::vars_os()
                .map(|(name, value)| (text(name), text(value)))
                .collect(),
        )
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of the variable that wins for an option, with that variable.
    pub(crate) fn find(&self, spec: &'static Spec) -> Option<(&'static EnvVar, &str)> {
        spec.env
            .iter()
            .find_map(|var| self.value(var.name).map(|value| (var, value)))
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        Self(
            pairs
                .into_iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        )
    }
}

/// What the variables set, for the options of `scope`.
pub(crate) fn assignments(env: &Environment, scope: Scope) -> (Vec<Assignment>, Vec<Problem>) {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    let rows = table::all().filter(|spec| spec.sources.env && spec.scope.meets(scope));
    for spec in rows {
        let Some((var, text)) = env.find(spec) else {
            continue;
        };
        let origin = Origin::Variable(var.name);
        if text.contains('\u{FFFD}') {
            problems.push(Problem::bad_value(spec, text, &origin));
            continue;
        }
        if text.trim().is_empty() && !spec.is_switch() && !spec.nullable {
            continue;
        }
        let texts = if spec.repeated {
            split_list(text, spec.comma_separated)
        } else {
            vec![text.to_owned()]
        };
        found.push(Assignment {
            spec,
            texts,
            negated: var.negated,
            origin,
        });
    }
    (found, problems)
}

/// Several values in one variable: separated by spaces or new lines, and mostly commas too. Where commas
/// belong to values, one before a space still belongs to none.
fn split_list(text: &str, commas: bool) -> Vec<String> {
    let separator = |c: char| (commas && c == ',') || c.is_whitespace();
    text.split(separator)
        .map(|part| part.trim_end_matches(','))
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Warnings for variables that look like a misspelled one of ours.
pub(crate) fn slips(env: &Environment) -> Vec<Notice> {
    let known: Vec<&str> = table::all()
        .flat_map(|spec| spec.env)
        .map(|var| var.name)
        .collect();
    let prefixes = ["DYN_", "KVASIR_", "NATS_", "ETCD_"];
    let ours = |name: &&String| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let unknown = |name: &&String| !known.contains(&name.as_str());
    env.0
        .keys()
        .filter(ours)
        .filter(unknown)
        .filter_map(|name| slip(name, &known))
        .collect()
}

/// The variable of the option that `name` spells with our prefix: most have one that engines share.
fn of_that_option(name: &str) -> Option<&'static str> {
    let option = name.strip_prefix("KVASIR_")?.to_ascii_lowercase();
    let spec = table::named(&option.replace('_', "-"))?;
    spec.env.first().map(|var| var.name)
}

fn slip(name: &str, known: &[&str]) -> Option<Notice> {
    if name.starts_with(TEST_PREFIX) || name == TAKE_OVER {
        return None;
    }
    let near = known
        .iter()
        .map(|candidate| (distance(name, candidate), *candidate))
        .min_by_key(|(edits, _)| *edits)
        .filter(|(edits, _)| *edits <= SLIP_EDITS);
    let near = near
        .map(|(_, right)| right)
        .or_else(|| of_that_option(name));
    let text = match near {
        Some(right) => {
            format!("variable {name} is set, but no option reads it. Did you mean {right}?")
        }
        None if name.starts_with("KVASIR_") => {
            format!("variable {name} is set, but no option reads it")
        }
        None => return None,
    };
    Some(Notice {
        kind: NoticeKind::UnknownVariable,
        option: None,
        text,
    })
}
