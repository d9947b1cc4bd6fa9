//! Reads members of MessagePack maps by name.

use bytes::Bytes;
use kvasir_msgpack::{DecodeError, Kind, Reader};
use kvasir_types::{Codec, Token};

use crate::Payload;

pub(crate) type Result<T> = std::result::Result<T, DecodeError>;

/// Reads a map: `member` gets each name and must read its value.
pub(crate) fn map<'a>(
    reader: &mut Reader<'a>,
    mut member: impl FnMut(&mut Reader<'a>, &'a [u8]) -> Result<()>,
) -> Result<()> {
    for _ in 0..reader.map()? {
        let name = reader.text_bytes()?;
        member(reader, name)?;
    }
    Ok(())
}

/// Reads a map, or nil as an empty one.
pub(crate) fn map_or_nil<'a>(
    reader: &mut Reader<'a>,
    member: impl FnMut(&mut Reader<'a>, &'a [u8]) -> Result<()>,
) -> Result<()> {
    match reader.nil()? {
        true => Ok(()),
        false => map(reader, member),
    }
}

/// Reads a value, or nil as nothing.
pub(crate) fn option<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T>,
) -> Result<Option<T>> {
    match reader.nil()? {
        true => Ok(None),
        false => read(reader).map(Some),
    }
}

/// Reads text, or nil as nothing.
pub(crate) fn text(reader: &mut Reader<'_>) -> Result<Option<String>> {
    option(reader, |reader| reader.str().map(str::to_owned))
}

/// Reads an integer of 32 bits, or nil as nothing.
pub(crate) fn u32(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<u32>> {
    option(reader, |reader| reader.u32(field))
}

/// Reads an integer of 64 bits, or nil as nothing.
pub(crate) fn u64(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<u64>> {
    option(reader, |reader| reader.u64(field))
}

/// Reads a signed integer of 32 bits, or nil as nothing.
pub(crate) fn i32(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<i32>> {
    let value = option(reader, Reader::int)?;
    let value = value.map(|int| i32::try_from(int.bits().cast_signed()));
    value.transpose().map_err(|_| DecodeError::Range { field })
}

/// Reads a float as one of 32 bits, or nil as nothing.
pub(crate) fn f32(reader: &mut Reader<'_>) -> Result<Option<f32>> {
    Ok(option(reader, Reader::float)?.map(|value| value as f32))
}

/// Reads a boolean, or nil as nothing.
pub(crate) fn bool(reader: &mut Reader<'_>) -> Result<Option<bool>> {
    option(reader, Reader::bool)
}

/// Reads token ids, at most `max`.
pub(crate) fn tokens(
    reader: &mut Reader<'_>,
    max: usize,
    field: &'static str,
) -> Result<Vec<Token>> {
    let len = reader.array()?;
    if len > max {
        return Err(DecodeError::Range { field });
    }
    let mut tokens = Vec::new();
    reader.u32s(len, field, &mut tokens)?;
    Ok(tokens)
}

/// Reads a list of texts.
pub(crate) fn texts(reader: &mut Reader<'_>) -> Result<Vec<String>> {
    (0..reader.array()?)
        .map(|_| reader.str().map(str::to_owned))
        .collect()
}

/// Reads past a value and keeps its bytes. `all` is what `reader` reads from.
pub(crate) fn raw(reader: &mut Reader<'_>, all: &Bytes) -> Result<Payload> {
    let start = reader.position();
    reader.skip()?;
    let bytes = all.slice(start..reader.position());
    Ok(Payload::new(Codec::MessagePack, bytes))
}

/// Whether nil comes next; it is not read.
pub(crate) fn is_nil(reader: &Reader<'_>) -> Result<bool> {
    Ok(reader.peek()? == Kind::Nil)
}
