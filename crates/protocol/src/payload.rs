//! A value as it travels: its bytes and how they are written.

use bytes::Bytes;
use kvasir_msgpack::Value;
use kvasir_types::Codec;
use serde_json::Value as Json;

use crate::{PayloadWriter, ProtocolError};

const PAYLOAD: &str = "a payload";

/// One value in JSON or MessagePack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// How it is written.
    pub codec: Codec,
    /// The whole value.
    pub bytes: Bytes,
}

impl Payload {
    /// These bytes, written so.
    #[must_use]
    pub const fn new(codec: Codec, bytes: Bytes) -> Self {
        Self { codec, bytes }
    }

    /// Writes a tree.
    #[must_use]
    pub fn of_value(codec: Codec, value: &Value) -> Self {
        let mut writer = PayloadWriter::new(codec);
        writer.value(value);
        writer.finish()
    }

    /// Reads it into a tree, for messages that are rare and small.
    pub fn value(&self) -> Result<Value, ProtocolError> {
        match self.codec {
            Codec::Json => Value::from_json(&self.bytes),
            Codec::MessagePack => Value::from_msgpack(&self.bytes),
        }
        .map_err(ProtocolError::decode(PAYLOAD))
    }

    /// The same value in MessagePack, which is what the readers of this crate read.
    pub fn to_msgpack(&self) -> Result<Bytes, ProtocolError> {
        match self.codec {
            Codec::MessagePack => Ok(self.bytes.clone()),
            Codec::Json => {
                let json = json(&self.bytes)?;
                let mut writer = PayloadWriter::new(Codec::MessagePack);
                writer.json(&json);
                Ok(writer.finish().bytes)
            }
        }
    }
}

/// Reads JSON of at most 128 levels.
pub(crate) fn json(bytes: &[u8]) -> Result<Json, ProtocolError> {
    serde_json::from_slice(bytes).map_err(|error| ProtocolError::Decode {
        what: PAYLOAD,
        cause: kvasir_msgpack::DecodeError::Json {
            line: error.line(),
            column: error.column(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_the_same_in_both() {
        let text = br#"{"a":[1,-2,1.5,null,true,"x"],"b":{"c":18446744073709551615}}"#;
        let json = Payload::new(Codec::Json, Bytes::from_static(text));
        let msgpack = Payload::new(Codec::MessagePack, json.to_msgpack().unwrap());
        assert_eq!(json.value().unwrap(), msgpack.value().unwrap());
        let again = Payload::of_value(Codec::Json, &msgpack.value().unwrap());
        assert_eq!(again, json);
        let broken = Payload::new(Codec::Json, Bytes::from_static(b"{"));
        assert!(broken.to_msgpack().is_err() && broken.value().is_err());
    }

    /// A schema may be nested deeper than any message of the protocol.
    #[test]
    fn deep_json_is_carried() {
        let text = [b"[".repeat(100), b"]".repeat(100)].concat();
        let json = Payload::new(Codec::Json, text.into());
        assert_eq!(json.to_msgpack().unwrap().len(), 100);
    }
}
