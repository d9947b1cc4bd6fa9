//! What may rendering cost?
//!
//! MiniJinja counts instructions (its *fuel*), but one instruction may double a string, search a list or print a tree. So
//! everything that makes or looks through a value pays for its size, in bytes, from a purse that is filled when rendering
//! begins; and no value is nested deeper than can be printed and dropped on any thread.
//!
//! Invariant: between [`begin`] and the drop of what it returns, the sum of all charges is at most what was granted.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// How much may be spent on one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// So little that a thread that serves others can bear it: some milliseconds.
    Brief,
    /// All that is ever spent: a second or two, for a thread that has nothing else to do.
    Full,
}

impl Effort {
    /// Instructions that may run.
    pub(super) const fn fuel(self) -> u64 {
        match self {
            Self::Brief => 30_000,
            Self::Full => 2_000_000,
        }
    }

    /// Bytes that may be made, copied and looked through for a conversation of so many bytes.
    const fn bytes(self, input: u64) -> u64 {
        let (least, each, most) = match self {
            Self::Brief => (2 << 20, 32, 8 << 20),
            Self::Full => (256 << 20, 256, 4 << 30),
        };
        let sum = input.saturating_mul(each).saturating_add(least);
        if sum < most { sum } else { most }
    }
}

/// Deepest value: clients' JSON has 128 levels at most.
const DEPTH_MAX: u32 = 256;
/// What is said of a namespace inside another value.
pub(super) const NAMESPACE_INSIDE: &str = "it puts a namespace into another value";
/// What a value costs beside its text.
const VALUE_BYTES: u64 = 32;

thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// While this lives, the thread renders.
pub(super) struct Metered(u64);

/// Fills the purse for a conversation of so many bytes.
pub(super) fn begin(effort: Effort, input: usize) -> Metered {
    Metered(LEFT.replace(effort.bytes(input as u64)))
}

impl Drop for Metered {
    fn drop(&mut self) {
        LEFT.set(self.0);
    }
}

/// Pays; an error if the purse does not have it.
pub(super) fn charge(bytes: u64) -> Result<(), Error> {
    match LEFT.get().checked_sub(bytes) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => Err(too_much("it makes or searches too much text")),
    }
}

/// A template does more than it may.
pub(super) fn too_much(what: &'static str) -> Error {
    Error::new(ErrorKind::OutOfFuel, what)
}

/// Pays for a value and everything in it.
pub(super) fn charge_all(value: &Value) -> Result<(), Error> {
    charge_at(value, 0)
}

fn charge_at(value: &Value, depth: u32) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(too_much("it nests values too deep"));
    }
    if depth > 0 && is_namespace(value) {
        return Err(too_much(NAMESPACE_INSIDE));
    }
    charge(VALUE_BYTES + text_bytes(value))?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter().into_iter().flatten() {
                charge_at(&item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter().into_iter().flatten() {
                charge(VALUE_BYTES + text_bytes(&key))?;
                if let Ok(item) = value.get_item(&key) {
                    charge_at(&item, depth + 1)?;
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// Pays for a value, but not for what is in it.
pub(super) fn charge_shallow(value: &Value) -> Result<(), Error> {
    let items = match value.as_str() {
        // Each character may become a value.
        Some(text) => text.len() as u64,
        None => value.len().unwrap_or(0) as u64,
    };
    charge(items.saturating_mul(VALUE_BYTES))
}

/// Whether a value is what `namespace()` makes: the only one that can come to hold itself.
pub(super) fn is_namespace(value: &Value) -> bool {
    let kind = value.as_object().map(|object| object.type_name());
    kind.is_some_and(|kind| kind.ends_with("Namespace"))
}

fn text_bytes(value: &Value) -> u64 {
    value.as_str().map_or(0, |text| text.len() as u64)
}
