//! Python's values as the router takes them.
//!
//! What always holds: a value of another type is a `TypeError`, one out of range a `ValueError` or `OverflowError`; a long list is read in one
//! pass, and whatever has a buffer (`array`, NumPy) without a Python object for each number.

use kvasir_types::{EngineHash, LocalHash, Token};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

use crate::lists;

/// Tokens of a prompt: a list or any other sequence of whole numbers, or a buffer of them.
pub(crate) fn tokens(value: &Bound<'_, PyAny>) -> PyResult<Vec<Token>> {
    if let Some(tokens) = lists::unsigned(value) {
        return Ok(tokens);
    }
    if !value.is_instance_of::<PyList>()
        && let Some(tokens) = token_buffer(value)?
    {
        return Ok(tokens);
    }
    if value.is_instance_of::<PyString>() {
        let text = "token ids are whole numbers; tokenize the text first";
        return Err(PyTypeError::new_err(text));
    }
    let mut tokens = Vec::new();
    for item in value.try_iter()? {
        tokens.push(item?.extract()?);
    }
    Ok(tokens)
}

/// The numbers of a buffer, if there is one.
fn token_buffer(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Token>>> {
    let py = value.py();
    if let Ok(buffer) = PyBuffer::<u32>::get(value) {
        return buffer.to_vec(py).map(Some);
    }
    if let Ok(buffer) = PyBuffer::<i32>::get(value) {
        return narrow(buffer.to_vec(py)?).map(Some);
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(value) {
        return narrow(buffer.to_vec(py)?).map(Some);
    }
    if let Ok(buffer) = PyBuffer::<u64>::get(value) {
        return narrow(buffer.to_vec(py)?).map(Some);
    }
    Ok(None)
}

fn narrow<T: TryInto<Token>>(wide: Vec<T>) -> PyResult<Vec<Token>> {
    let narrow = |number: T| number.try_into();
    let tokens: Result<Vec<Token>, _> = wide.into_iter().map(narrow).collect();
    tokens.map_err(|_| PyValueError::new_err("a token id is from 0 to 4294967295"))
}

/// A hash that an engine gave: any 64 bits, signed or not.
pub(crate) fn hash_bits(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<i64>() {
        Ok(signed) => Ok(signed.cast_unsigned()),
        Err(_) => value.extract::<u64>(),
    }
}

/// Many of them: a list or any other sequence, or a buffer.
fn all_bits(value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Some(bits) = lists::bits(value) {
        return Ok(bits);
    }
    let py = value.py();
    if let Ok(buffer) = PyBuffer::<u64>::get(value) {
        return buffer.to_vec(py);
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(value) {
        let signed = buffer.to_vec(py)?.into_iter();
        return Ok(signed.map(i64::cast_unsigned).collect());
    }
    value.try_iter()?.map(|item| hash_bits(&item?)).collect()
}

/// Hashes that an engine gave.
pub(crate) fn engine_hashes(value: &Bound<'_, PyAny>) -> PyResult<Vec<EngineHash>> {
    Ok(all_bits(value)?.into_iter().map(EngineHash).collect())
}

/// Hashes of blocks, as `compute_block_hash_for_seq` gives them.
pub(crate) fn local_hashes(value: &Bound<'_, PyAny>) -> PyResult<Vec<LocalHash>> {
    Ok(all_bits(value)?.into_iter().map(LocalHash).collect())
}

/// How many tokens each of several blocks has.
pub(crate) fn sizes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    lists::unsigned(value).map_or_else(|| value.extract(), Ok)
}

/// A number of blocks or tokens that must not be 0.
pub(crate) fn positive(name: &str, value: u32) -> PyResult<u32> {
    match value {
        0 => Err(PyValueError::new_err(format!("{name} must be at least 1"))),
        value => Ok(value),
    }
}
