//! Server-sent events, in and out.
//!
//! Answers one question: where does an event end? The parser takes bytes as they come from a socket, split
//! anywhere, and gives whole events with their exact bytes, so that a proxy can pass them on unchanged.
//!
//! Invariants: the bytes of all events and the rest, joined, are the bytes that came in; the data of the events is the
//! same however the input was split, and so are their bytes where no line ends in CR (an event ends with that CR if its
//! LF comes later; the LF then belongs to the next event's bytes); an event never exceeds the limit.

use std::borrow::Cow;

use bytes::{Buf, Bytes, BytesMut};

use crate::json::{Fields, write_json_str};
use crate::usage::Usage;

/// An event grew past the parser's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event of more than {limit} bytes")]
pub struct SseError {
    /// The limit.
    pub limit: usize,
}

/// One event with the bytes it came in, blank line included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Exactly what was received.
    pub raw: Bytes,
}

/// Finds events in a stream of bytes.
#[derive(Debug)]
pub struct EventParser {
    limit: usize,
    /// The beginning of an event whose end has not come.
    carry: BytesMut,
    /// Received and not looked at.
    input: Bytes,
    line_is_empty: bool,
    after_cr: bool,
}

impl EventParser {
    /// A parser that refuses events of more than `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            carry: BytesMut::new(),
            input: Bytes::new(),
            line_is_empty: true,
            after_cr: false,
        }
    }

    /// Takes the next bytes of the stream. Call [`EventParser::next_event`] until it gives none.
    pub fn push(&mut self, bytes: Bytes) {
        if self.input.is_empty() {
            self.input = bytes;
        } else {
            let mut joined = BytesMut::with_capacity(self.input.len() + bytes.len());
            joined.extend_from_slice(&self.input);
            joined.extend_from_slice(&bytes);
            self.input = joined.freeze();
        }
    }

    /// The next whole event. An event inside one pushed piece is a slice of it, not a copy.
    ///
    /// # Errors
    /// The event is longer than the limit; the stream can only be passed on as bytes from here
    /// ([`EventParser::take_rest`]).
    pub fn next_event(&mut self) -> Result<Option<Event>, SseError> {
        let end = self.scan();
        let whole = self.carry.len() + end.unwrap_or(self.input.len());
        if whole > self.limit {
            return Err(SseError { limit: self.limit });
        }
        let Some(end) = end else {
            self.carry.extend_from_slice(&self.input);
            self.input.clear();
            return Ok(None);
        };
        let raw = if self.carry.is_empty() {
            self.input.split_to(end)
        } else {
            self.carry.extend_from_slice(&self.input[..end]);
            self.input.advance(end);
            self.carry.split().freeze()
        };
        Ok(Some(Event { raw }))
    }

    /// What has come and is no whole event; the parser is as new afterwards.
    pub fn take_rest(&mut self) -> Bytes {
        self.carry.extend_from_slice(&self.input);
        let rest = self.carry.split().freeze();
        *self = Self::new(self.limit);
        rest
    }

    /// Where in the input the current event ends. Remembers the state of the line at the input's end.
    fn scan(&mut self) -> Option<usize> {
        let input = &self.input[..];
        let mut at = 0;
        while at < input.len() {
            if std::mem::take(&mut self.after_cr) && input[at] == b'\n' {
                at += 1;
                continue;
            }
            let Some(found) = memchr::memchr2(b'\n', b'\r', &input[at..]) else {
                self.line_is_empty = false;
                return None;
            };
            let blank = self.line_is_empty && found == 0;
            self.line_is_empty = true;
            let end = at + found + 1;
            if input[end - 1] == b'\r' {
                if blank && input.get(end) == Some(&b'\n') {
                    return Some(end + 1);
                }
                self.after_cr = true;
            }
            if blank {
                return Some(end);
            }
            at = end;
        }
        None
    }
}

impl Event {
    /// The data lines joined with newlines; none for comments and blank lines.
    #[must_use]
    pub fn data(&self) -> Option<Cow<'_, [u8]>> {
        let mut lines = self.values(b"data");
        let mut found = Cow::Borrowed(lines.next()?);
        for line in lines {
            let joined = found.to_mut();
            joined.push(b'\n');
            joined.extend_from_slice(line);
        }
        Some(found)
    }

    /// Whether it is only the end of a line: nothing was said.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        matches!(&self.raw[..], b"\n" | b"\r" | b"\r\n")
    }

    /// The event's name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        std::str::from_utf8(self.values(b"event").last()?).ok()
    }

    /// Whether this is the `[DONE]` that ends an answer.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.data().is_some_and(|d| d.trim_ascii() == b"[DONE]")
    }

    /// Appends an event of the same name with other data.
    pub(crate) fn write_with(&self, data: &[u8], out: &mut BytesMut) {
        if let Some(name) = self.name() {
            out.extend_from_slice(b"event: ");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\n");
        }
        for line in data.split(|b| matches!(b, b'\n' | b'\r')) {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(line);
            out.extend_from_slice(b"\n");
        }
        out.extend_from_slice(b"\n");
    }

    fn values<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let lines = self.raw.split(|b| matches!(b, b'\n' | b'\r'));
        lines.filter_map(move |line| {
            let rest = line.strip_prefix(key)?;
            match rest.split_first() {
                None => Some(rest),
                Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
                Some(_) => None,
            }
        })
    }
}

/// Appends the frame that ends an answer.
pub fn write_done(out: &mut BytesMut) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// Appends a comment that clients ignore and proxies pass on: a sign of life. Line ends in it become spaces.
pub fn write_comment(out: &mut BytesMut, text: &str) {
    out.extend_from_slice(b": ");
    for byte in text.bytes() {
        let byte = if matches!(byte, b'\r' | b'\n') {
            b' '
        } else {
            byte
        };
        out.extend_from_slice(&[byte]);
    }
    out.extend_from_slice(b"\n\n");
}

/// Appends an annotation: an event whose value is a JSON string in a comment, which comes before the answer.
pub fn write_annotation(out: &mut BytesMut, name: &str, value: &str) {
    out.extend_from_slice(b"event: ");
    out.extend(name.bytes().filter(|b| !matches!(b, b'\r' | b'\n')));
    out.extend_from_slice(b"\n: ");
    write_json_str(out, value);
    out.extend_from_slice(b"\n\n");
}

/// Appends the annotation `llm_metrics`: what an answer amounted to. It comes before `[DONE]` and brings no tokens of
/// its own.
pub fn write_llm_metrics(out: &mut BytesMut, usage: &Usage) {
    let mut value = BytesMut::new();
    let mut fields = Fields::open(&mut value);
    fields.int("input_tokens", usage.prompt_tokens);
    fields.int("output_tokens", usage.completion_tokens);
    fields.int("chunk_tokens", 0u64);
    fields.opt_int("cached_tokens", usage.cached_tokens);
    fields.close();
    let value = std::str::from_utf8(&value).unwrap_or_default();
    write_annotation(out, "llm_metrics", value);
}

#[cfg(test)]
mod tests;
