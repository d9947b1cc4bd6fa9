//! What engines say of transfers between them, taken out of their answers.
//!
//! Answers one question: which bytes does the client get of these? Wherever such a field stands, in an answer, in the events of a stream or in
//! the client's own body that an error repeats, its value becomes `null`, which engines write there themselves for who did not ask.
//!
//! What always holds: all other bytes go on as they are and in their order, however the answer is cut into pieces; at most [`HELD_MAX`] bytes
//! wait for the next piece. A quote inside a JSON text is escaped, so a field's name in quotes and a colon behind it is a field, whatever stands around it;
//! that is why nothing has to be parsed, and why events need not be cut out.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use super::{FIELDS, PREFIX, is_transfer};

/// Most bytes that may be the beginning of a field and are kept back until it is known: a name, its quotes, and some space.
const HELD_MAX: usize = 128;

/// What each of these fields has in it.
static PARTS: LazyLock<[Finder<'static>; 3]> = LazyLock::new(|| {
    [
        Finder::new(b"_params\""),
        Finder::new(b"\"bootstrap_"),
        Finder::new(b"\"disagg_prefill_dp_rank\""),
    ]
});

/// An engine's answer, or an event of it, with `null` where it speaks of a transfer; none if it goes on as it is.
///
/// ```
/// # use kvasir_openai::without_transfer;
/// let answer = br#"{"choices":[],"kv_transfer_params":{"remote_block_ids":[[1]]}}"#;
/// assert_eq!(without_transfer(answer).unwrap(), r#"{"choices":[],"kv_transfer_params":null}"#);
/// ```
#[must_use]
pub fn without_transfer(answer: &[u8]) -> Option<Bytes> {
    // Most answers have no such field, or one that is null, and cost three searches.
    if !may_tell(answer) {
        return None;
    }
    let mut filter = TransferFilter::default();
    let mut out = BytesMut::with_capacity(answer.len());
    filter.write(answer, &mut out);
    out.extend_from_slice(&filter.finish());
    (out != answer).then(|| out.freeze())
}

/// Whether an answer speaks of a transfer in any way, so in the text of an error that repeats what its engine was sent.
#[must_use]
pub fn names_transfer(answer: &[u8]) -> bool {
    let names = FIELDS.iter().chain([&PREFIX]);
    names
        .into_iter()
        .any(|name| memchr::memmem::find(answer, name.as_bytes()).is_some())
}

/// Whether one of the fields may be there with a value.
fn may_tell(answer: &[u8]) -> bool {
    let [params, rest @ ..] = &*PARTS;
    let tells = params.find_iter(answer).any(|at| {
        let after = answer.get(at + params.needle().len()..).unwrap_or_default();
        let value = after.trim_ascii_start().strip_prefix(b":");
        value.is_some_and(|value| !value.trim_ascii_start().starts_with(b"null"))
    });
    tells || rest.iter().any(|part| part.find(answer).is_some())
}

/// Takes these fields out of an answer that comes in pieces.
#[derive(Debug, Default)]
pub struct TransferFilter {
    /// What may be the beginning of a field.
    held: BytesMut,
    /// The value that is left out, if one is.
    value: Option<Value>,
    /// The last byte that went on: a quote behind a backslash begins no name.
    last: u8,
}

/// How far a value is that is left out.
#[derive(Clone, Copy, Debug, Default)]
struct Value {
    kind: Kind,
    /// Objects and lists that are open.
    depth: u32,
    is_escaped: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// Its first byte has not come.
    #[default]
    Unknown,
    /// A number or a word.
    Word,
    /// Between quotes.
    Text,
    /// In an object or a list, and not between quotes.
    Open,
}

/// What was found where a name might begin.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// A field whose colon ends there.
    Field(usize),
    /// It may be one: more has to come.
    Maybe,
    Other,
}

impl TransferFilter {
    /// The next piece, as the client gets it; may be empty.
    pub fn push(&mut self, piece: Bytes) -> Bytes {
        let is_plain = self.value.is_none()
            && self.held.is_empty()
            && !PARTS.iter().any(|part| part.find(&piece).is_some())
            && beginning(&piece, self.last).is_none();
        if is_plain {
            self.last = piece.last().copied().unwrap_or(self.last);
            return piece;
        }
        let mut out = BytesMut::with_capacity(self.held.len() + piece.len());
        let mut input = std::mem::take(&mut self.held);
        input.extend_from_slice(&piece);
        self.write(&input, &mut out);
        out.freeze()
    }

    /// What was kept back, when nothing more comes.
    pub fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    fn write(&mut self, mut input: &[u8], out: &mut BytesMut) {
        while !input.is_empty() {
            if let Some(mut value) = self.value.take() {
                if value.kind == Kind::Unknown {
                    let rest = input.trim_ascii_start();
                    self.pass(&input[..input.len() - rest.len()], out);
                    input = rest;
                }
                let (end, is_over) = value.skip(input);
                input = &input[end..];
                match is_over {
                    true => self.pass(b"null", out),
                    false => self.value = Some(value),
                }
                continue;
            }
            let Some(quote) = memchr::memchr(b'"', input) else {
                return self.pass(input, out);
            };
            let before = match quote.checked_sub(1) {
                Some(at) => input.get(at).copied().unwrap_or_default(),
                None => self.last,
            };
            let (head, rest) = input.split_at(quote);
            match field_at(rest, before) {
                Found::Field(end) => {
                    let (field, rest) = rest.split_at(end);
                    self.pass(head, out);
                    self.pass(field, out);
                    self.value = Some(Value::default());
                    input = rest;
                }
                Found::Maybe => {
                    self.pass(head, out);
                    self.held.extend_from_slice(rest);
                    return;
                }
                Found::Other => {
                    let (passed, rest) = input.split_at(quote + 1);
                    self.pass(passed, out);
                    input = rest;
                }
            }
        }
    }

    fn pass(&mut self, bytes: &[u8], out: &mut BytesMut) {
        self.last = bytes.last().copied().unwrap_or(self.last);
        out.extend_from_slice(bytes);
    }
}

/// Where the end of a piece may be the beginning of a field.
fn beginning(piece: &[u8], last: u8) -> Option<usize> {
    let from = piece.len().saturating_sub(HELD_MAX);
    let tail = piece.get(from..).unwrap_or_default();
    // The quotes of a name, or only the first of them.
    let quotes = memchr::memrchr_iter(b'"', tail).take(2);
    let before = |at: usize| at.checked_sub(1).map_or(last, |at| piece[at]);
    quotes
        .map(|at| from + at)
        .find(|&at| field_at(&piece[at..], before(at)) == Found::Maybe)
}

/// What begins with this quote.
fn field_at(input: &[u8], before: u8) -> Found {
    if before == b'\\' || input.len() > 1 && !is_first(input[1]) {
        return Found::Other;
    }
    let name = input.get(1..).unwrap_or_default();
    let length = name.iter().position(|byte| !is_of_name(*byte));
    let is_short = input.len() <= HELD_MAX;
    let Some(length) = length else {
        return match is_short && may_begin(name) {
            true => Found::Maybe,
            false => Found::Other,
        };
    };
    let (name, after) = name.split_at(length);
    let is_field = std::str::from_utf8(name).is_ok_and(is_transfer);
    if !is_field || after.first() != Some(&b'"') {
        return Found::Other;
    }
    let space = after.iter().skip(1).take_while(|b| b.is_ascii_whitespace());
    let colon = 1 + space.count();
    match after.get(colon) {
        Some(b':') => Found::Field(1 + length + colon + 1),
        None if is_short => Found::Maybe,
        _ => Found::Other,
    }
}

/// Whether the name of a field may begin with this byte.
fn is_first(byte: u8) -> bool {
    matches!(byte, b'k' | b'e' | b'd' | b'b')
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte == b'_'
}

/// Whether a field's name begins so.
fn may_begin(name: &[u8]) -> bool {
    name.starts_with(PREFIX.as_bytes())
        || FIELDS
            .iter()
            .chain([&PREFIX])
            .any(|field| field.as_bytes().starts_with(name))
}

impl Value {
    /// How many bytes are of the value, and whether it ends with them.
    fn skip(&mut self, input: &[u8]) -> (usize, bool) {
        for (at, byte) in input.iter().copied().enumerate() {
            match (self.kind, byte) {
                (Kind::Unknown, b'"') => self.kind = Kind::Text,
                (Kind::Unknown, b'{' | b'[') => (self.kind, self.depth) = (Kind::Open, 1),
                (Kind::Unknown | Kind::Word, b',' | b'}' | b']') => return (at, true),
                (Kind::Word, byte) if byte.is_ascii_whitespace() => return (at, true),
                (Kind::Unknown, _) => self.kind = Kind::Word,
                (Kind::Word, _) => {}
                (Kind::Text, _) if self.is_escaped => self.is_escaped = false,
                (Kind::Text, b'\\') => self.is_escaped = true,
                (Kind::Text, b'"') if self.depth == 0 => return (at + 1, true),
                (Kind::Text, b'"') => self.kind = Kind::Open,
                (Kind::Text, _) => {}
                (Kind::Open, b'"') => self.kind = Kind::Text,
                (Kind::Open, b'{' | b'[') => {
                    self.depth = self.depth.saturating_add(1);
                }
                (Kind::Open, b'}' | b']') => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                (Kind::Open, _) => {}
            }
        }
        (input.len(), false)
    }
}

#[cfg(test)]
mod tests;
