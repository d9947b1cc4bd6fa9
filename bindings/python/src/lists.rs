//! Lists of whole numbers, read in one pass.
//!
//! Answers one question: which numbers does this list hold, without an object's worth of work for each? Prompts come as lists of
//! thousands of numbers, and to ask each item what it is takes longer than to route them. The one module of this crate with `unsafe`.
//!
//! What always holds: whatever is not a list of exact `int`s within range is not read here but by the slow way, which says what is wrong
//! with it; no code of Python's runs while a list is read.

#![expect(
    unsafe_code,
    reason = "three functions of the stable ABI, called for each item; each place says why it is sound"
)]

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// A whole number that fits 64 bits.
#[derive(Clone, Copy)]
enum Whole {
    /// It fits with a sign.
    Signed(i64),
    /// It fits without one alone.
    Unsigned(u64),
}

/// The item of a list at an index, if it is an exact `int` that fits 64 bits.
fn whole(list: &Bound<'_, PyList>, at: isize) -> Option<Whole> {
    // SAFETY: `list` is a list and the GIL is held: its type says both. An index past the end gives null and sets an exception, which is
    // taken below. The item is borrowed from the list, which nothing changes until the item is read: the GIL is kept, and none of
    // Python's code runs, for an exact `int` is read without a call of any of its methods.
    let read = unsafe {
        let item = ffi::PyList_GetItem(list.as_ptr(), at);
        if item.is_null() || ffi::Py_TYPE(item) != &raw mut ffi::PyLong_Type {
            None
        } else {
            let mut overflow: c_int = 0;
            let signed = ffi::PyLong_AsLongLongAndOverflow(item, &raw mut overflow);
            match overflow {
                0 => Some(Whole::Signed(signed)),
                1 => Some(Whole::Unsigned(ffi::PyLong_AsUnsignedLongLong(item))),
                _ => None,
            }
        }
    };
    match read {
        Some(Whole::Signed(_)) => read,
        // The greatest number is what stands for an error, too.
        Some(Whole::Unsigned(number)) if number != u64::MAX => read,
        _ => {
            drop(PyErr::take(list.py()));
            None
        }
    }
}

/// The items of a list, if all are exact `int`s for which `fit` has a value.
fn exact<T>(value: &Bound<'_, PyAny>, fit: impl Fn(Whole) -> Option<T>) -> Option<Vec<T>> {
    let list = value.cast::<PyList>().ok()?;
    let length = isize::try_from(list.len()).ok()?;
    let mut found = Vec::with_capacity(list.len());
    for at in 0..length {
        found.push(fit(whole(list, at)?)?);
    }
    Some(found)
}

/// The numbers of a list, if it is one of exact `int`s that fit 32 bits.
pub(crate) fn unsigned(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    exact(value, |number| match number {
        Whole::Signed(number) => u32::try_from(number).ok(),
        Whole::Unsigned(_) => None,
    })
}

/// The bits of a list's numbers, if it is one of exact `int`s that fit 64 bits, with a sign or without.
pub(crate) fn bits(value: &Bound<'_, PyAny>) -> Option<Vec<u64>> {
    exact(value, |number| match number {
        Whole::Signed(number) => Some(number.cast_unsigned()),
        Whole::Unsigned(number) => Some(number),
    })
}
