//! JSON out, straight into a buffer.
//!
//! Answers one question: how does a value become JSON without a tree of values between? A streamed token
//! costs one escaped copy of its text and nothing else.

use bytes::{BufMut, BytesMut};

/// JSON text that is already well formed, carried as it is: schemas, tool lists, error details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonText(Box<str>);

impl JsonText {
    pub(crate) fn from_checked(text: &str) -> Self {
        Self(text.into())
    }

    /// Takes `text` if it is one JSON value.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        serde_json::from_str::<&serde_json::value::RawValue>(text)
            .ok()
            .map(|raw| Self::from_checked(raw.get()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

const fn escapes() -> [u8; 256] {
    let mut table = [0u8; 256];
    let mut i = 0;
    while i < 0x20 {
        table[i] = b'u';
        i += 1;
    }
    table[0x08] = b'b';
    table[0x09] = b't';
    table[0x0a] = b'n';
    table[0x0c] = b'f';
    table[0x0d] = b'r';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table
}

/// For each byte the letter after the backslash, 0 for bytes that need none, `u` for `\u00XX`.
static ESCAPE: [u8; 256] = escapes();

/// Appends `text` as a JSON string, quotes included.
pub fn write_json_str(out: &mut BytesMut, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.reserve(text.len() + 2);
    out.put_u8(b'"');
    let bytes = text.as_bytes();
    let mut done = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        let escape = ESCAPE[usize::from(byte)];
        if escape == 0 {
            continue;
        }
        out.extend_from_slice(&bytes[done..at]);
        done = at + 1;
        if escape == b'u' {
            out.extend_from_slice(b"\\u00");
            out.put_u8(HEX[usize::from(byte >> 4)]);
            out.put_u8(HEX[usize::from(byte & 15)]);
        } else {
            out.extend_from_slice(&[b'\\', escape]);
        }
    }
    out.extend_from_slice(&bytes[done..]);
    out.put_u8(b'"');
}

/// Appends an integer.
pub(crate) fn write_int(out: &mut BytesMut, value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = value;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends a number; what JSON cannot say (NaN, infinities) is `null`.
pub(crate) fn write_float(out: &mut BytesMut, value: f64) {
    if value.is_finite() {
        let text = serde_json::Number::from_f64(value).map(|n| n.to_string());
        out.extend_from_slice(text.as_deref().unwrap_or("null").as_bytes());
    } else {
        out.extend_from_slice(b"null");
    }
}

/// Appends `[1,2,3]`.
pub(crate) fn write_ints(out: &mut BytesMut, values: &[u32]) {
    out.put_u8(b'[');
    for (i, value) in values.iter().enumerate() {
        if i > 0 {
            out.put_u8(b',');
        }
        write_int(out, u64::from(*value));
    }
    out.put_u8(b']');
}

/// Writes the fields of one object: commas and keys are its business, values the caller's.
pub(crate) struct Fields<'o> {
    out: &'o mut BytesMut,
    empty: bool,
}

impl<'o> Fields<'o> {
    pub(crate) fn open(out: &'o mut BytesMut) -> Self {
        out.put_u8(b'{');
        Self { out, empty: true }
    }

    /// Starts the field `key` (plain ASCII) and gives the buffer for its value.
    pub(crate) fn key(&mut self, key: &str) -> &mut BytesMut {
        self.out
            .extend_from_slice(if self.empty { b"\"" } else { b",\"" });
        self.empty = false;
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\":");
        self.out
    }

    pub(crate) fn str(&mut self, key: &str, value: &str) {
        write_json_str(self.key(key), value);
    }

    pub(crate) fn int(&mut self, key: &str, value: impl Into<u64>) {
        write_int(self.key(key), value.into());
    }

    pub(crate) fn raw(&mut self, key: &str, value: &str) {
        self.key(key).extend_from_slice(value.as_bytes());
    }

    pub(crate) fn opt_int(&mut self, key: &str, value: Option<impl Into<u64>>) {
        if let Some(value) = value {
            self.int(key, value);
        }
    }

    pub(crate) fn opt_float(&mut self, key: &str, value: Option<f64>) {
        if let Some(value) = value {
            write_float(self.key(key), value);
        }
    }

    pub(crate) fn close(self) {
        self.out.put_u8(b'}');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the text, the string reads back as itself.
        #[test]
        fn a_string_reads_back(text in any::<String>()) {
            let mut out = BytesMut::new();
            write_json_str(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }

        #[test]
        fn numbers_read_back(int in any::<u64>(), float in any::<f64>()) {
            let mut out = BytesMut::new();
            write_int(&mut out, int);
            prop_assert_eq!(serde_json::from_slice::<u64>(&out).unwrap(), int);
            out.clear();
            write_float(&mut out, float);
            let back = std::str::from_utf8(&out).unwrap().parse::<f64>().ok();
            prop_assert_eq!(back, Some(float).filter(|f| f.is_finite()));
        }
    }
}
