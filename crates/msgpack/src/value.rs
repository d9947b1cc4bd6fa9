//! A small tree of values, read from JSON or MessagePack: for the dialects that come in both.
//!
//! Not on the hot path of engines' events. Depth is bounded by [`crate::DEPTH_MAX`], size by the
//! input's own.

use serde_json::Value as Json;

use crate::{DEPTH_MAX, DecodeError, Int, Kind, Reader, Writer};

/// A value of either format.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Nil,
    /// true or false
    Bool(bool),
    /// An integer, zero or above.
    Uint(u64),
    /// An integer below zero.
    Sint(i64),
    /// A float.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes (MessagePack only).
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// Pairs in the order in which they came.
    Map(Vec<(String, Value)>),
}

impl Value {
    /// Reads one MessagePack value that is all of `bytes`.
    pub fn from_msgpack(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let value = read(&mut reader, 0)?;
        reader.finish()?;
        Ok(value)
    }

    /// Reads one JSON value that is all of `bytes`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, DecodeError> {
        let json: Json = serde_json::from_slice(bytes).map_err(|error| DecodeError::Json {
            line: error.line(),
            column: error.column(),
        })?;
        from_json(json, 0)
    }

    /// Appends this as MessagePack.
    pub fn to_msgpack(&self, out: &mut Vec<u8>) {
        let mut w = Writer::new(out);
        match self {
            Self::Nil => w.nil(),
            Self::Bool(value) => w.bool(*value),
            Self::Uint(value) => w.uint(*value),
            Self::Sint(value) => w.sint(*value),
            Self::Float(value) => w.float(*value),
            Self::Text(text) => w.str(text),
            Self::Bytes(bytes) => w.bin(bytes),
            Self::List(items) => {
                w.array(items.len());
                items.iter().for_each(|item| item.to_msgpack(out));
            }
            Self::Map(pairs) => {
                w.map(pairs.len());
                for (name, value) in pairs {
                    Writer::new(out).str(name);
                    value.to_msgpack(out);
                }
            }
        }
    }

    /// This as JSON; bytes become a list of numbers.
    #[must_use]
    pub fn to_json(&self) -> Json {
        match self {
            Self::Nil => Json::Null,
            Self::Bool(value) => Json::from(*value),
            Self::Uint(value) => Json::from(*value),
            Self::Sint(value) => Json::from(*value),
            Self::Float(value) => Json::from(*value),
            Self::Text(text) => Json::from(text.as_str()),
            Self::Bytes(bytes) => Json::from(bytes.as_slice()),
            Self::List(items) => Json::Array(items.iter().map(Self::to_json).collect()),
            Self::Map(pairs) => {
                let pairs = pairs.iter().map(|(name, v)| (name.clone(), v.to_json()));
                Json::Object(pairs.collect())
            }
        }
    }

    /// The field `name` of a map; `None` if it is absent or this is no map.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Map(pairs) => pairs.iter().find(|(n, _)| n == name).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The 64 bits of an integer of either sign.
    #[must_use]
    pub const fn bits(&self) -> Option<u64> {
        match self {
            Self::Uint(value) => Some(*value),
            Self::Sint(value) => Some(*value as u64),
            _ => None,
        }
    }

    /// An integer that is not negative.
    #[must_use]
    pub const fn uint(&self) -> Option<u64> {
        match self {
            Self::Uint(value) => Some(*value),
            _ => None,
        }
    }

    /// A text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A list's items.
    #[must_use]
    pub fn list(&self) -> Option<&[Self]> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }
}

fn read(reader: &mut Reader<'_>, depth: usize) -> Result<Value, DecodeError> {
    if depth > DEPTH_MAX {
        return Err(DecodeError::Depth);
    }
    Ok(match reader.peek()? {
        Kind::Nil => {
            reader.skip()?;
            Value::Nil
        }
        Kind::Bool => Value::Bool(reader.bool()?),
        Kind::Int => match reader.int()? {
            Int::Unsigned(value) => Value::Uint(value),
            Int::Negative(value) => Value::Sint(value),
        },
        Kind::Float => Value::Float(reader.float()?),
        Kind::Str => Value::Text(reader.str()?.to_owned()),
        Kind::Bin => Value::Bytes(reader.bin()?.to_vec()),
        Kind::Ext => {
            reader.skip()?;
            Value::Nil
        }
        Kind::Array => {
            let len = reader.array()?;
            let items = (0..len).map(|_| read(reader, depth + 1));
            Value::List(items.collect::<Result<_, _>>()?)
        }
        Kind::Map => {
            let mut pairs = Vec::new();
            for _ in 0..reader.map()? {
                let name = reader.str()?.to_owned();
                pairs.push((name, read(reader, depth + 1)?));
            }
            Value::Map(pairs)
        }
    })
}

fn from_json(json: Json, depth: usize) -> Result<Value, DecodeError> {
    if depth > DEPTH_MAX {
        return Err(DecodeError::Depth);
    }
    Ok(match json {
        Json::Null => Value::Nil,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => Value::Uint(value),
            (None, Some(value)) => Value::Sint(value),
            (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(text),
        Json::Array(items) => {
            let items = items.into_iter().map(|item| from_json(item, depth + 1));
            Value::List(items.collect::<Result<_, _>>()?)
        }
        Json::Object(pairs) => {
            let pairs = pairs.into_iter();
            let pairs = pairs.map(|(name, v)| from_json(v, depth + 1).map(|v| (name, v)));
            Value::Map(pairs.collect::<Result<_, _>>()?)
        }
    })
}
