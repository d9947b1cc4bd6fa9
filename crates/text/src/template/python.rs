//! Where MiniJinja and Jinja in Python part ways, and templates notice.
//!
//! Answers one question: what would Python have done here? Methods of strings that the compatibility library
//! lacks, tests that see more in a value, the length of nothing.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use super::guards;

/// Calls a Python method that a value does not have of itself.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    guards::call_method(name, value, args, || {
        if let Some(text) = value.as_str()
            && let Some(result) = string_method(text, name, args)
        {
            return result;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
    })
}

/// The method `name` of a string, if it is one of those kept here.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let first = args.first().and_then(Value::as_str);
    let missing = || Error::new(ErrorKind::MissingArgument, format!("{name} needs a string"));
    let one = |f: &dyn Fn(&str) -> Value| Some(first.map(f).ok_or_else(missing));
    match name {
        "removeprefix" => one(&|p| Value::from(text.strip_prefix(p).unwrap_or(text))),
        "removesuffix" => one(&|p| Value::from(text.strip_suffix(p).unwrap_or(text))),
        "partition" => one(&|p| parts(text.split_once(p), p, [text, "", ""])),
        "rpartition" => one(&|p| parts(text.rsplit_once(p), p, ["", "", text])),
        "index" => Some(first.ok_or_else(missing).and_then(|part| index(text, part))),
        "rsplit" => Some(rsplit(text, first, args.get(1))),
        _ => None,
    }
}

fn parts(split: Option<(&str, &str)>, separator: &str, otherwise: [&str; 3]) -> Value {
    let three = split.map_or(otherwise, |(a, b)| [a, separator, b]);
    three.into_iter().collect()
}

/// In characters, as Python counts.
fn index(text: &str, part: &str) -> Result<Value, Error> {
    match text.find(part) {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None => Err(Error::new(
            ErrorKind::InvalidOperation,
            "substring not found",
        )),
    }
}

fn rsplit(text: &str, separator: Option<&str>, most: Option<&Value>) -> Result<Value, Error> {
    let most = most
        .and_then(Value::as_i64)
        .and_then(|m| usize::try_from(m).ok());
    let limit = most.map_or(usize::MAX, |m| m.saturating_add(1));
    let mut pieces: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(limit, separator).collect(),
        None if most.is_none() => text.split_whitespace().rev().collect(),
        None => {
            let reason = "rsplit with a limit needs a separator";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    };
    pieces.reverse();
    Ok(pieces.into_iter().collect())
}

/// The length; nothing has none.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        let kind = value.kind();
        Error::new(ErrorKind::InvalidOperation, format!("{kind} has no length"))
    })
}

/// `none` is not iterable, which templates rely on when there are no tools.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Python's strings and dictionaries are sequences too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map
    )
}
