//! Writes one value after another, in JSON or in MessagePack.
//!
//! The caller says how many members a map or list has before it writes them, and ends it afterwards: MessagePack needs the
//! first, JSON the second.

use bytes::Bytes;
use kvasir_msgpack::{Value, Writer};
use kvasir_types::{Codec, Token};
use serde_json::Value as Json;

use crate::Payload;

/// Writes one payload.
#[derive(Clone, Debug)]
pub struct PayloadWriter {
    codec: Codec,
    out: Vec<u8>,
}

impl PayloadWriter {
    /// Begins a payload.
    #[must_use]
    pub const fn new(codec: Codec) -> Self {
        Self::reuse(codec, Vec::new())
    }

    /// Appends to a buffer that holds no unfinished value.
    #[must_use]
    pub const fn reuse(codec: Codec, out: Vec<u8>) -> Self {
        Self { codec, out }
    }

    /// What was written.
    #[must_use]
    pub fn finish(self) -> Payload {
        Payload::new(self.codec, Bytes::from(self.out))
    }

    /// What was written, as it was handed to [`Self::reuse`].
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        self.out
    }

    /// In JSON a comma stands before every member but the first.
    fn comma(&mut self) {
        if !matches!(self.out.last(), None | Some(b'{' | b'[' | b':' | b',')) {
            self.out.push(b',');
        }
    }

    fn emit(&mut self, json: &[u8], msgpack: impl FnOnce(&mut Writer<'_>)) {
        match self.codec {
            Codec::MessagePack => msgpack(&mut Writer::new(&mut self.out)),
            Codec::Json => {
                self.comma();
                self.out.extend_from_slice(json);
            }
        }
    }

    /// Begins a map of `len` members.
    pub fn map(&mut self, len: usize) {
        self.emit(b"{", |w| w.map(len));
    }

    /// Ends a map.
    pub fn end_map(&mut self) {
        if self.codec == Codec::Json {
            self.out.push(b'}');
        }
    }

    /// Begins a list of `len` items.
    pub fn list(&mut self, len: usize) {
        self.emit(b"[", |w| w.array(len));
    }

    /// Ends a list.
    pub fn end_list(&mut self) {
        if self.codec == Codec::Json {
            self.out.push(b']');
        }
    }

    /// Writes a member's name; its value follows.
    pub fn key(&mut self, name: &str) {
        self.text(name);
        if self.codec == Codec::Json {
            self.out.push(b':');
        }
    }

    /// Writes nothing, as a value.
    pub fn nil(&mut self) {
        self.emit(b"null", |w| w.nil());
    }

    /// Writes true or false.
    pub fn bool(&mut self, value: bool) {
        let text: &[u8] = if value { b"true" } else { b"false" };
        self.emit(text, |w| w.bool(value));
    }

    /// Writes an integer that is not negative.
    pub fn uint(&mut self, value: u64) {
        match self.codec {
            Codec::MessagePack => Writer::new(&mut self.out).uint(value),
            Codec::Json => self.json_text(&Json::from(value)),
        }
    }

    /// Writes an integer.
    pub fn sint(&mut self, value: i64) {
        match self.codec {
            Codec::MessagePack => Writer::new(&mut self.out).sint(value),
            Codec::Json => self.json_text(&Json::from(value)),
        }
    }

    /// Writes a float of 32 bits; in JSON with as many digits as it has.
    pub fn float32(&mut self, value: f32) {
        match self.codec {
            Codec::MessagePack => Writer::new(&mut self.out).float32(value),
            Codec::Json if value.is_finite() => self.emit(format!("{value:?}").as_bytes(), |_| {}),
            Codec::Json => self.nil(),
        }
    }

    /// Writes a float of 64 bits.
    pub fn float(&mut self, value: f64) {
        match self.codec {
            Codec::MessagePack => Writer::new(&mut self.out).float(value),
            Codec::Json => self.json_text(&Json::from(value)),
        }
    }

    /// Writes text.
    pub fn text(&mut self, text: &str) {
        match self.codec {
            Codec::MessagePack => Writer::new(&mut self.out).str(text),
            Codec::Json => {
                self.comma();
                let written = serde_json::to_writer(&mut self.out, text);
                debug_assert!(written.is_ok(), "text can be written to memory");
            }
        }
    }

    /// Writes token ids.
    pub fn tokens(&mut self, tokens: &[Token]) {
        self.list(tokens.len());
        match self.codec {
            Codec::MessagePack => {
                self.out.reserve(tokens.len() * 3);
                let mut w = Writer::new(&mut self.out);
                for token in tokens {
                    w.uint(u64::from(*token));
                }
            }
            Codec::Json => {
                for token in tokens {
                    self.uint(u64::from(*token));
                }
            }
        }
        self.end_list();
    }

    /// Writes `value`, or nil.
    pub fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    /// Writes a value that is written already. One that cannot be read is written as nil.
    pub fn payload(&mut self, payload: &Payload) {
        if payload.codec == self.codec {
            if self.codec == Codec::Json {
                self.comma();
            }
            return self.out.extend_from_slice(&payload.bytes);
        }
        match payload.codec {
            Codec::Json => match payload.to_msgpack() {
                Ok(bytes) => self.out.extend_from_slice(&bytes),
                Err(_) => self.nil(),
            },
            Codec::MessagePack => match payload.value() {
                Ok(value) => self.value(&value),
                Err(_) => self.nil(),
            },
        }
    }

    /// Writes a tree.
    pub fn value(&mut self, value: &Value) {
        match self.codec {
            Codec::MessagePack => value.to_msgpack(&mut self.out),
            Codec::Json => self.json_text(&value.to_json()),
        }
    }

    /// Writes a tree of JSON. It is as deep as the reader of JSON allows: 128 levels.
    pub(crate) fn json(&mut self, value: &Json) {
        match (self.codec, value) {
            (Codec::Json, _) => self.json_text(value),
            (_, Json::Null) => self.nil(),
            (_, Json::Bool(value)) => self.bool(*value),
            (_, Json::Number(number)) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => self.uint(value),
                (None, Some(value)) => self.sint(value),
                (None, None) => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            (_, Json::String(text)) => self.text(text),
            (_, Json::Array(items)) => {
                self.list(items.len());
                items.iter().for_each(|item| self.json(item));
            }
            (_, Json::Object(members)) => {
                self.map(members.len());
                for (name, value) in members {
                    self.key(name);
                    self.json(value);
                }
            }
        }
    }

    fn json_text(&mut self, value: &Json) {
        self.comma();
        let written = serde_json::to_writer(&mut self.out, value);
        debug_assert!(written.is_ok(), "a tree can be written to memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(codec: Codec) -> Payload {
        let mut w = PayloadWriter::new(codec);
        w.map(6);
        w.key("a,\"");
        w.tokens(&[1, 70_000]);
        w.key("b");
        w.list(0);
        w.end_list();
        w.key("c");
        w.map(2);
        w.key("x");
        w.float32(1.1);
        w.key("y");
        w.float(3.0);
        w.end_map();
        w.key("d");
        w.option(None::<u32>, |w, v| w.uint(u64::from(v)));
        w.key("e");
        w.option(Some("z"), PayloadWriter::text);
        w.key("f");
        w.payload(&Payload::new(Codec::Json, Bytes::from_static(b"[true,{}]")));
        w.end_map();
        w.finish()
    }

    #[test]
    fn both_codecs_say_the_same() {
        let json = sample(Codec::Json);
        assert_eq!(
            json.bytes,
            &br#"{"a,\"":[1,70000],"b":[],"c":{"x":1.1,"y":3.0},"d":null,"e":"z","f":[true,{}]}"#[..]
        );
        let other = sample(Codec::MessagePack).value().unwrap();
        let x = |value: &Value| value.get("c").and_then(|c| c.get("x")).cloned();
        assert_eq!(x(&other), Some(Value::Float(f64::from(1.1f32))));
        assert_eq!(other.get("a,\""), json.value().unwrap().get("a,\""));
        assert_eq!(other.get("f"), json.value().unwrap().get("f"));
    }
}
