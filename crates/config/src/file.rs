//! The `--config` file.
//!
//! Answers: which options does this TOML text set, and in which line? The file is flat: its keys
//! are the names of flags without dashes (docs/decisions/0031). Values become the text one would
//! type, so that they are checked by the same code as flags and variables.
//!
//! Invariants: a key that is no option is a problem; a key of another command is checked too.

use toml::de::{DeTable, DeValue};

use crate::command::{Command, Scope};
use crate::error::{NameScope, Problem, quoted};
use crate::notice::{Notice, NoticeKind};
use crate::settings::{self, Assignment, Origin};
use crate::spec::Spec;
use crate::table;

/// Largest file that is read.
pub(crate) const FILE_BYTES_MAX: usize = 1 << 20;

/// What a file says.
#[derive(Debug, Default)]
pub(crate) struct FileContent {
    pub(crate) assignments: Vec<Assignment>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) problems: Vec<Problem>,
}

/// Reads the text of a file for a command.
pub(crate) fn read(path: &str, text: &str, command: Command) -> FileContent {
    let mut out = FileContent::default();
    if text.len() > FILE_BYTES_MAX {
        let message = format!("{path}: larger than {FILE_BYTES_MAX} bytes");
        out.problems.push(Problem::File { message });
        return out;
    }
    let parsed = match DeTable::parse(text) {
        Ok(parsed) => parsed,
        Err(error) => {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            let message = format!("{path}:{line}: not valid TOML: {}", error.message());
            out.problems.push(Problem::File { message });
            return out;
        }
    };
    let mut keys: Vec<_> = parsed.get_ref().iter().collect();
    keys.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in keys {
        let origin = Origin::File {
            path: path.into(),
            line: line_of(text, key.span().start),
        };
        entry(&mut out, key.get_ref(), value.get_ref(), origin, command);
    }
    out
}

fn entry(out: &mut FileContent, key: &str, value: &DeValue<'_>, origin: Origin, command: Command) {
    let Some(spec) =
        table::named_for(key, command.scope()).filter(|spec| !spec.scope.is_only(Scope::CONFIG))
    else {
        out.problems.push(unknown_key(key, value, &origin));
        return;
    };
    if !spec.sources.file {
        let message = format!("{origin}: {} is not allowed in a file", quoted(key));
        out.problems.push(Problem::Misplaced {
            option: spec.name,
            message,
        });
        return;
    }
    let texts = match texts_of(spec, value) {
        Some(texts) => texts,
        None => {
            out.problems
                .push(Problem::bad_value(spec, shape(value), &origin));
            return;
        }
    };
    let assignment = Assignment {
        spec,
        texts,
        negated: false,
        origin,
    };
    if spec.scope.meets(command.scope()) {
        out.assignments.push(assignment);
        return;
    }
    out.problems.extend(settings::check(&assignment).err());
    out.notices
        .push(other_command(spec, &assignment.origin, command));
}

fn other_command(spec: &Spec, origin: &Origin, command: Command) -> Notice {
    let text = format!(
        "{} ({origin}) is an option of kvasir {}; kvasir {} does not read it",
        spec.name,
        spec.scope.names().join(", kvasir "),
        command.name()
    );
    Notice {
        kind: NoticeKind::OtherCommand,
        option: Some(spec.name),
        text,
    }
}

fn unknown_key(key: &str, value: &DeValue<'_>, origin: &Origin) -> Problem {
    if matches!(value, DeValue::Table(_)) {
        let message = format!(
            "{origin}: [{key}] is a section, and the file has none; write all options at the top \
             level, such as router-mode = \"kv\""
        );
        return Problem::File { message };
    }
    let switch = key
        .strip_prefix("no-")
        .and_then(table::named)
        .filter(|spec| spec.is_switch());
    if let Some(spec) = switch {
        let message = format!(
            "{origin}: {} is a flag only; write {} = false",
            quoted(key),
            spec.name
        );
        return Problem::Misplaced {
            option: spec.name,
            message,
        };
    }
    Problem::unknown_name(key, "", &origin.to_string(), NameScope(None))
}

/// The texts one would type for a TOML value; `None` where the shape is wrong.
fn texts_of(spec: &Spec, value: &DeValue<'_>) -> Option<Vec<String>> {
    if let (true, DeValue::Array(items)) = (spec.repeated, value) {
        return items.iter().map(|item| scalar(item.get_ref())).collect();
    }
    scalar(value).map(|text| vec![text])
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let digits = number.as_str();
            let parsed = i128::from_str_radix(digits, number.radix()).ok();
            Some(parsed.map_or_else(|| digits.to_owned(), |number| number.to_string()))
        }
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(yes) => Some(yes.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

/// Stands for a value that has no text of its own in a message.
fn shape(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::Array(_) => "[…]",
        DeValue::Table(_) => "{…}",
        DeValue::Datetime(_) => "a date",
        _ => "…",
    }
}

/// Line, from 1, of a byte offset.
fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().get(..offset).unwrap_or(text.as_bytes());
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}
