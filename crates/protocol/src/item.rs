//! One frame of an answer: an item, or the mark that none follows.

use std::collections::HashMap;

use bytes::Bytes;
use kvasir_msgpack::{DecodeError, Reader};
use kvasir_types::Codec;
use serde_json::value::RawValue;

use crate::read::{map, raw};
use crate::{Payload, PayloadWriter, ProtocolError};

/// The member that says whether all has been sent.
pub const FINAL_NAME: &str = "complete_final";

const ITEM: &str = "an item of an answer";

/// The body of one frame of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What the endpoint answers; for `generate` an [`crate::Annotated`].
    pub data: Option<Payload>,
    /// All has been sent: without this mark an answer is not complete.
    pub complete_final: bool,
}

impl Item {
    /// Reads it.
    pub fn decode(codec: Codec, bytes: &Bytes) -> Result<Self, ProtocolError> {
        match codec {
            Codec::MessagePack => Self::from_msgpack(bytes),
            Codec::Json => Self::from_json(bytes),
        }
        .map_err(ProtocolError::decode(ITEM))
    }

    fn from_msgpack(bytes: &Bytes) -> Result<Self, DecodeError> {
        let (mut reader, mut item) = (Reader::new(bytes), Self::end(false));
        map(&mut reader, |reader, name| {
            match name {
                b"data" if !reader.nil()? => item.data = Some(raw(reader, bytes)?),
                b"data" => {}
                b"complete_final" => item.complete_final = reader.bool()?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        reader.finish()?;
        Ok(item)
    }

    fn from_json(bytes: &Bytes) -> Result<Self, DecodeError> {
        let members: HashMap<String, &RawValue> =
            serde_json::from_slice(bytes).map_err(|error| DecodeError::Json {
                line: error.line(),
                column: error.column(),
            })?;
        let text = |name: &str| members.get(name).map(|raw| raw.get());
        let data = text("data").filter(|data| *data != "null");
        Ok(Self {
            data: data.map(|data| Payload::new(Codec::Json, bytes.slice_ref(data.as_bytes()))),
            complete_final: text(FINAL_NAME) == Some("true"),
        })
    }

    /// The mark that all has been sent, or an item without data.
    #[must_use]
    pub const fn end(complete_final: bool) -> Self {
        Self {
            data: None,
            complete_final,
        }
    }

    /// Writes it. An item without data is the mark alone.
    #[must_use]
    pub fn encode(&self, codec: Codec) -> Bytes {
        let data = self.data.as_ref();
        let data = data.map(|data| |writer: &mut PayloadWriter| writer.payload(data));
        encode(codec, self.complete_final, data)
    }

    /// Writes an item whose data `write` writes.
    #[must_use]
    pub fn encode_data(codec: Codec, write: impl FnOnce(&mut PayloadWriter)) -> Bytes {
        encode(codec, false, Some(write))
    }
}

fn encode(
    codec: Codec,
    complete_final: bool,
    data: Option<impl FnOnce(&mut PayloadWriter)>,
) -> Bytes {
    let mut writer = PayloadWriter::new(codec);
    writer.map(1 + usize::from(data.is_some()));
    if let Some(write) = data {
        writer.key("data");
        write(&mut writer);
    }
    writer.key(FINAL_NAME);
    writer.bool(complete_final);
    writer.end_map();
    writer.finish().bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_the_same_in_both() {
        for codec in [Codec::Json, Codec::MessagePack] {
            let end = Item::end(true);
            assert_eq!(Item::decode(codec, &end.encode(codec)), Ok(end));
            let bytes = Item::encode_data(codec, |w| w.tokens(&[7]));
            let item = Item::decode(codec, &bytes).unwrap();
            assert!(!item.complete_final);
            assert_eq!(
                item.data
                    .clone()
                    .unwrap()
                    .value()
                    .unwrap()
                    .list()
                    .unwrap()
                    .len(),
                1
            );
            assert_eq!(item.encode(codec), bytes);
            assert!(Item::decode(codec, &bytes.slice(..bytes.len() - 1)).is_err());
        }
        assert_eq!(Item::end(true).encode(Codec::MessagePack).len(), 17);
        assert_eq!(
            Item::end(true).encode(Codec::Json),
            r#"{"complete_final":true}"#
        );
    }
}
