//! Traces as text: which format, which line is wrong and why.

use std::collections::HashMap;
use std::time::Duration;

use kvasir_types::Time;
use serde_json::Value;

use super::{Trace, TraceRequest, mooncake, plain};

/// Lines of a trace; more are refused.
const LINES_MAX: usize = 20_000_000;
/// Longest prompt or answer of a trace, in tokens.
pub(super) const TOKENS_MAX: u64 = 16_777_216;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// Block ids instead of tokens, as published with Mooncake.
    Mooncake,
    /// Our own: tokens, text, or the hashes that a router records.
    Plain,
}

/// How to read a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// The format; `None` looks at the first line.
    pub format: Option<TraceFormat>,
    /// Tokens that a block id of a Mooncake trace stands for.
    pub trace_block_size: u32,
    /// What made-up tokens follow from.
    pub seed: u64,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            format: None,
            trace_block_size: 512,
            seed: 0,
        }
    }
}

/// What is wrong with a trace, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A line that cannot be used.
    #[error("line {line}: {problem}")]
    Line {
        /// Which, from 1.
        line: usize,
        /// Why.
        problem: String,
    },
    /// Nothing to play.
    #[error("the trace has no requests")]
    Empty,
    /// A limit of ours.
    #[error("the trace has more than {LINES_MAX} lines; cut it into parts")]
    TooLong,
}

/// A line's request before it is placed among the others.
pub(super) struct Entry {
    pub(super) request: TraceRequest,
    pub(super) session: Option<String>,
    pub(super) delay: Duration,
}

impl Trace {
    /// Reads a trace of one JSON object per line; blank lines are skipped.
    ///
    /// ```
    /// # use kvasir_sim::{Trace, TraceOptions};
    /// let text = r#"{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}"#;
    /// let trace = Trace::read("example", text, &TraceOptions::default())?;
    /// assert_eq!(trace.requests[0].prompt.len(), 700);
    /// let bad = Trace::read("example", "{\"timestamp\": 0}", &TraceOptions::default());
    /// assert!(bad.unwrap_err().to_string().starts_with("line 1: "));
    /// # Ok::<(), kvasir_sim::TraceError>(())
    /// ```
    pub fn read(name: &str, text: &str, options: &TraceOptions) -> Result<Self, TraceError> {
        let mut entries = Vec::new();
        let mut format = options.format;
        for (at, line) in text.lines().enumerate() {
            let bad = |problem: String| TraceError::Line {
                line: at + 1,
                problem,
            };
            if at >= LINES_MAX {
                return Err(TraceError::TooLong);
            }
            if line.trim().is_empty() {
                continue;
            }
            let value: Value = serde_json::from_str(line)
                .map_err(|e| bad(format!("not a JSON object: {}", json_problem(&e))))?;
            if !value.is_object() {
                return Err(bad(format!("expected an object, got {value}")));
            }
            let read = match *format.get_or_insert_with(|| guess(&value)) {
                TraceFormat::Mooncake => mooncake::entry(&value, options, at as u64),
                TraceFormat::Plain => plain::entry(&value, options, at as u64),
            };
            entries.push(read.map_err(bad)?);
        }
        if entries.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(Self {
            name: name.to_owned(),
            requests: place(entries),
        })
    }
}

fn guess(value: &Value) -> TraceFormat {
    match value.get("hash_ids") {
        Some(_) => TraceFormat::Mooncake,
        None => TraceFormat::Plain,
    }
}

/// serde_json ends with "at line 1 column 7"; the line is ours to say.
fn json_problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    format!(
        "{} at column {}",
        text.get(..end).unwrap_or_default(),
        error.column()
    )
}

/// Sorts by time and ties each turn of a session to the turn before it.
fn place(mut entries: Vec<Entry>) -> Vec<TraceRequest> {
    entries.sort_by_key(|entry| entry.request.at);
    let mut last: HashMap<String, u32> = HashMap::new();
    let mut requests = Vec::with_capacity(entries.len());
    for (
        at,
        Entry {
            mut request,
            session,
            delay,
        },
    ) in entries.into_iter().enumerate()
    {
        if let Some(session) = session {
            let before = last.insert(session, at as u32);
            request.follows = before.map(|before| (before, delay));
        }
        requests.push(request);
    }
    requests
}

/// The first of `names` that is there, and its value.
fn field<'v>(value: &'v Value, names: &[&'static str]) -> Option<(&'static str, &'v Value)> {
    names
        .iter()
        .find_map(|name| Some((*name, value.get(name)?)))
}

/// A whole number that must be there.
pub(super) fn count(value: &Value, names: &[&'static str], max: u64) -> Result<u32, String> {
    let Some((name, found)) = field(value, names) else {
        return Err(format!("`{}` is missing", names.first().unwrap_or(&"")));
    };
    let number = found.as_u64().or_else(|| whole(found.as_f64()?));
    match number {
        Some(n) if n <= max.min(u64::from(u32::MAX)) => Ok(n as u32),
        Some(n) => Err(format!("`{name}` is {n}; at most {max} are taken")),
        None => Err(format!(
            "`{name}` is {found}; it must be a whole number of at least 0"
        )),
    }
}

fn whole(number: f64) -> Option<u64> {
    (number >= 0.0 && number.fract() == 0.0 && number < 1e15).then_some(number as u64)
}

/// A time in milliseconds that may be missing.
pub(super) fn millis(value: &Value, names: &[&'static str]) -> Result<Option<Duration>, String> {
    let Some((name, found)) = field(value, names) else {
        return Ok(None);
    };
    match found.as_f64() {
        Some(ms) if (0.0..1e13).contains(&ms) => Ok(Some(Duration::from_nanos((ms * 1e6) as u64))),
        _ => Err(format!(
            "`{name}` is {found}; it must be a number of milliseconds, at least 0"
        )),
    }
}

/// A moment in milliseconds; without one, a session's turn follows the one before at once.
pub(super) fn moment(value: &Value, names: &[&'static str]) -> Result<Option<Time>, String> {
    Ok(millis(value, names)?.map(|since| Time::ZERO + since))
}

/// A name or number that may be missing.
pub(super) fn session(value: &Value) -> Option<String> {
    match field(value, &["session_id", "session"])?.1 {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

pub(super) fn priority(value: &Value) -> Result<i32, String> {
    match value.get("priority") {
        None | Some(Value::Null) => Ok(0),
        Some(found) => found
            .as_i64()
            .and_then(|n| i32::try_from(n).ok())
            .ok_or_else(|| format!("`priority` is {found}; it must be a whole number")),
    }
}
