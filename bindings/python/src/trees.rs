//! Values of the planes as Python's own: dictionaries, lists, numbers, text.

use kvasir_msgpack::{DEPTH_MAX, Value};
use kvasir_protocol::Payload;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple,
};

use crate::errors::Failure;

/// A value as Python has it.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Nil => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Uint(number) => number.into_pyobject(py)?.into_any(),
        Value::Sint(number) => number.into_pyobject(py)?.into_any(),
        Value::Float(number) => PyFloat::new(py, *number).into_any(),
        Value::Text(text) => PyString::new(py, text).into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::List(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_python(py, item)?)?;
            }
            list.into_any()
        }
        Value::Map(pairs) => {
            let map = PyDict::new(py);
            for (name, value) in pairs {
                map.set_item(name, to_python(py, value)?)?;
            }
            map.into_any()
        }
    })
}

/// What Python has, as a value: whatever JSON could say, and bytes.
pub(crate) fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    read(value, 0)
}

fn read(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth > DEPTH_MAX {
        let text = format!("the value is nested deeper than {DEPTH_MAX} levels");
        return Err(PyValueError::new_err(text));
    }
    let below = depth + 1;
    if value.is_none() {
        return Ok(Value::Nil);
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::Text(text.to_cow()?.into_owned()));
    }
    if let Ok(flag) = value.cast::<PyBool>() {
        return Ok(Value::Bool(flag.is_true()));
    }
    if value.is_instance_of::<PyInt>() {
        return match value.extract::<u64>() {
            Ok(number) => Ok(Value::Uint(number)),
            Err(_) => Ok(Value::Sint(value.extract::<i64>()?)),
        };
    }
    if let Ok(number) = value.cast::<PyFloat>() {
        return Ok(Value::Float(number.value()));
    }
    if let Ok(map) = value.cast::<PyDict>() {
        let mut pairs = Vec::with_capacity(map.len());
        for (name, value) in map.iter() {
            let name: String = name
                .extract()
                .map_err(|_| PyTypeError::new_err("the keys of a dictionary must be str"))?;
            pairs.push((name, read(&value, below)?));
        }
        return Ok(Value::Map(pairs));
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(Value::Bytes(bytes.as_bytes().to_vec()));
    }
    if let Ok(bytes) = value.cast::<PyByteArray>() {
        return Ok(Value::Bytes(bytes.to_vec()));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?.map(|item| read(&item?, below));
        return items.collect::<PyResult<_>>().map(Value::List);
    }
    // Pydantic models and the like say themselves what they are.
    if let Ok(dump) = value.getattr("model_dump") {
        return read(&dump.call0()?, below);
    }
    let text = format!(
        "{} cannot be sent: dict, list, str, numbers, bool, bytes and None can",
        value.get_type().name()?
    );
    Err(PyTypeError::new_err(text))
}

/// A payload's content.
pub(crate) fn payload_value(payload: &Payload) -> Result<Value, Failure> {
    payload
        .value()
        .map_err(|error| Failure::Named("Unknown", error.to_string()))
}
