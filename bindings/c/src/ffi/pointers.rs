//! Pointers of callers, read.
//!
//! What always holds: nothing is kept after the call; null where something is needed, an address that does not fit the type, an array of
//! impossible length and text that is not UTF-8 are said, and nothing is read there.

use std::ffi::{CStr, c_char};

use crate::routers::RouterFailure;

/// Entries of one array at most; what is longer is a mistake.
const ENTRIES_MAX: usize = 1 << 26;

/// Refuses a place that nothing can be written to.
pub(super) fn check_out<T>(name: &str, out: *mut T) -> Result<(), RouterFailure> {
    match out.is_null() || !out.is_aligned() {
        true => Err(RouterFailure::InvalidParam(format!(
            "{name} is null or not where such a value can lie"
        ))),
        false => Ok(()),
    }
}

/// A text that must be there.
///
/// # Safety
/// `pointer` is null, or its bytes up to a zero byte may be read for as long as the result is used.
pub(super) unsafe fn text<'a>(name: &str, pointer: *const c_char) -> Result<&'a str, String> {
    // SAFETY: as this function asks.
    match unsafe { name_or(name, pointer, "")? } {
        "" => Err(format!("{name} is null or empty")),
        text => Ok(text),
    }
}

/// A text, or `default` where it is null or empty.
///
/// # Safety
/// `pointer` is null, or its bytes up to a zero byte may be read for as long as the result is used.
pub(super) unsafe fn name_or<'a>(
    name: &str,
    pointer: *const c_char,
    default: &'a str,
) -> Result<&'a str, String> {
    if pointer.is_null() {
        return Ok(default);
    }
    // SAFETY: not null, and as this function asks.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text = text
        .to_str()
        .map_err(|_| format!("{name} is not UTF-8"))?
        .trim();
    Ok(if text.is_empty() { default } else { text })
}

/// # Safety
/// As [`text`].
pub(super) unsafe fn json<'a>(
    name: &str,
    pointer: *const c_char,
) -> Result<&'a str, RouterFailure> {
    // SAFETY: as this function asks.
    unsafe { text(name, pointer) }.map_err(RouterFailure::InvalidParam)
}

/// # Safety
/// As [`text`].
pub(super) unsafe fn pods<'a>(pointer: *const c_char) -> Result<&'a str, RouterFailure> {
    // SAFETY: as this function asks.
    unsafe { name_or("pods_json", pointer, "") }.map_err(RouterFailure::InvalidParam)
}

/// An array; none is needed where it has no entries.
///
/// # Safety
/// `pointer` is null, or `count` entries may be read for as long as the result is used.
pub(super) unsafe fn array<'a, T>(
    name: &str,
    pointer: *const T,
    count: usize,
) -> Result<&'a [T], String> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(format!("{name} is null or not where such numbers can lie"));
    }
    if count > ENTRIES_MAX {
        return Err(format!(
            "{name} cannot have {count} entries; {ENTRIES_MAX} are the most"
        ));
    }
    // SAFETY: not null, aligned, of a size that no address space lacks, and as this function asks.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}
