//! Where does an answer's body end? The framing of HTTP/1.1 (RFC 9112, sections 6 and 7).

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use http::{Method, StatusCode};

use crate::head::invalid;

/// Longest line of a chunk: its size and its extensions.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Bytes of the fields after the last chunk; they are read and left out.
const TRAILER_BYTES_MAX: usize = 64 << 10;

/// What is left of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunks(Chunk),
    /// Everything until the connection ends.
    UntilClose,
    /// The body has ended.
    Ended,
}

/// What comes next of a body in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// The line with its size.
    Size,
    /// So many bytes of it.
    Data(u64),
    /// The line's end behind its bytes.
    End,
    /// Fields; so many bytes of them came.
    Trailers(usize),
}

/// A step through a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A piece, never empty.
    Data(Bytes),
    /// More bytes are needed.
    More,
    /// That was all.
    End,
}

impl Framing {
    /// How the body after this head is framed. Repeated equal lengths become one.
    pub(crate) fn of(
        method: &Method,
        status: StatusCode,
        headers: &mut HeaderMap,
    ) -> io::Result<Self> {
        let length = content_length(headers)?;
        let bodiless = *method == Method::HEAD
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        if bodiless {
            return Ok(Self::Ended);
        }
        if headers.contains_key(TRANSFER_ENCODING) {
            return by_coding(headers);
        }
        match length {
            Some(0) => Ok(Self::Ended),
            Some(length) => Ok(Self::Length(length)),
            None => Ok(Self::UntilClose),
        }
    }

    /// Takes what can be taken off the front of `inbox`.
    pub(crate) fn step(&mut self, inbox: &mut BytesMut) -> io::Result<Step> {
        loop {
            match self {
                Self::Ended => return Ok(Step::End),
                _ if inbox.is_empty() => return Ok(Step::More),
                Self::UntilClose => return Ok(Step::Data(inbox.split().freeze())),
                Self::Length(left) => {
                    let data = take(inbox, left);
                    if *left == 0 {
                        *self = Self::Ended;
                    }
                    return Ok(Step::Data(data));
                }
                Self::Chunks(chunk) => match chunk.step(inbox)? {
                    Some(Step::End) => *self = Self::Ended,
                    Some(step) => return Ok(step),
                    None => {}
                },
            }
        }
    }

    /// Takes the closing chunk without fields, if all of it and nothing before it is there.
    pub(crate) fn close(&mut self, inbox: &mut BytesMut) {
        let end: &[u8] = match self {
            Self::Chunks(Chunk::End) => b"\r\n0\r\n\r\n",
            Self::Chunks(Chunk::Size) => b"0\r\n\r\n",
            _ => return,
        };
        if inbox.starts_with(end) {
            inbox.advance(end.len());
            *self = Self::Ended;
        }
    }

    /// The connection ended: whether the body has too.
    pub(crate) fn ends_with_connection(self) -> bool {
        matches!(self, Self::UntilClose | Self::Ended)
    }
}

impl Chunk {
    /// One step; `None` if there is another at once.
    fn step(&mut self, inbox: &mut BytesMut) -> io::Result<Option<Step>> {
        match self {
            Self::Data(left) => {
                if inbox.is_empty() {
                    return Ok(Some(Step::More));
                }
                let data = take(inbox, left);
                if *left == 0 {
                    *self = Self::End;
                }
                return Ok(Some(Step::Data(data)));
            }
            Self::End => {
                if inbox.len() < 2 {
                    return Ok(Some(Step::More));
                }
                if !inbox.starts_with(b"\r\n") {
                    return Err(invalid("a chunk is longer than its size"));
                }
                inbox.advance(2);
                *self = Self::Size;
            }
            Self::Size => {
                let Some(line) = take_line(inbox, LINE_BYTES_MAX)? else {
                    return Ok(Some(Step::More));
                };
                *self = match chunk_size(&line)? {
                    0 => Self::Trailers(0),
                    size => Self::Data(size),
                };
            }
            Self::Trailers(seen) => {
                let Some(line) = take_line(inbox, TRAILER_BYTES_MAX - *seen)? else {
                    return Ok(Some(Step::More));
                };
                if line.is_empty() {
                    return Ok(Some(Step::End));
                }
                *seen = (*seen + line.len() + 2).min(TRAILER_BYTES_MAX);
            }
        }
        Ok(None)
    }
}

/// Takes as much of what is left as has come.
fn take(inbox: &mut BytesMut, left: &mut u64) -> Bytes {
    let len = usize::try_from(*left)
        .unwrap_or(usize::MAX)
        .min(inbox.len());
    *left -= len as u64;
    inbox.split_to(len).freeze()
}

/// Takes a line without its end, if all of it is there.
fn take_line(inbox: &mut BytesMut, max: usize) -> io::Result<Option<BytesMut>> {
    let end = inbox.iter().take(max).position(|byte| *byte == b'\n');
    let Some(end) = end else {
        return match inbox.len() >= max {
            true => Err(invalid("a chunk line is too long")),
            false => Ok(None),
        };
    };
    let mut line = inbox.split_to(end + 1);
    if !line.ends_with(b"\r\n") {
        return Err(invalid("a chunk line does not end with CRLF"));
    }
    line.truncate(line.len() - 2);
    Ok(Some(line))
}

/// The size that a chunk's line says.
fn chunk_size(line: &[u8]) -> io::Result<u64> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let (digits, rest) = line.split_at(digits.count());
    let rest = rest.trim_ascii_start();
    let fits = (1..=15).contains(&digits.len()) && (rest.is_empty() || rest.starts_with(b";"));
    let size = std::str::from_utf8(digits).ok().filter(|_| fits);
    let size = size.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    size.ok_or_else(|| invalid("a chunk size is invalid"))
}

/// A body with a transfer coding: chunks, or all until the connection closes. Others are refused, as clients could not undo them.
///
/// `identity` is removed from the head: it does not mark the end of the body.
fn by_coding(headers: &mut HeaderMap) -> io::Result<Framing> {
    let fields = headers.get_all(TRANSFER_ENCODING).iter();
    let mut codings = fields.flat_map(|field| field.as_bytes().split(|byte| *byte == b','));
    match (codings.next().map(<[u8]>::trim_ascii), codings.next()) {
        (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
            Ok(Framing::Chunks(Chunk::Size))
        }
        (Some(coding), None) if coding.eq_ignore_ascii_case(b"identity") => {
            headers.remove(TRANSFER_ENCODING);
            Ok(Framing::UntilClose)
        }
        _ => Err(invalid("its body has an unsupported transfer coding")),
    }
}

/// The body's length by the head. Repeated values are accepted if they are equal.
fn content_length(headers: &mut HeaderMap) -> io::Result<Option<u64>> {
    let mut length = None;
    let mut times = 0;
    let values = headers.get_all(CONTENT_LENGTH).iter();
    for part in values.flat_map(|value| value.as_bytes().split(|byte| *byte == b',')) {
        let digits = part.trim_ascii();
        let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(digits).ok().filter(|_| is_number);
        let number: Option<u64> = number.and_then(|digits| digits.parse().ok());
        match (number, length) {
            (None, _) => return Err(invalid("its content-length is not a number")),
            (Some(new), Some(old)) if new != old => {
                return Err(invalid("it has two different content-lengths"));
            }
            _ => length = number,
        }
        times += 1;
    }
    if let Some(length) = length.filter(|_| times > 1) {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    Ok(length)
}

#[cfg(test)]
mod tests;
