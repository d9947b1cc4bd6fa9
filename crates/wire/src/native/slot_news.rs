//! What slot trackers and selection services tell each other: a request of a model and its routing group.

use kvasir_msgpack::{DecodeError, Value};

use super::{SequenceEvent, map, missing, text, uint};

/// The topic on which they tell it.
pub const SLOT_TOPIC: &str = "dynamo.slot-tracker.v1";

/// Something happened to a request that another service tracks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotNews {
    /// The model.
    pub model: String,
    /// Which group of its workers.
    pub group: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// What happened.
    pub event: SequenceEvent,
}

impl SlotNews {
    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = Value::from_msgpack(bytes)?;
        let name = |field: &'static str| {
            let name = value.get(field).and_then(Value::text);
            name.map(ToOwned::to_owned).ok_or(missing(field))
        };
        let block_size = u32::try_from(uint(&value, "block_size")?);
        Ok(Self {
            model: name("model_name")?,
            group: name("routing_group")?,
            block_size: block_size.map_err(|_| DecodeError::Range {
                field: "block_size",
            })?,
            event: SequenceEvent::from_value(value.get("event").ok_or(missing("event"))?)?,
        })
    }

    /// Appends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let value = map([
            ("model_name", text(&self.model)),
            ("routing_group", text(&self.group)),
            ("block_size", Value::Uint(self.block_size.into())),
            ("event", self.event.to_value()),
        ]);
        value.to_msgpack(out);
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::{SequenceHash, WorkerRank};

    use super::super::{PrefillHint, SequenceChange};
    use super::*;

    /// What a real slot tracker published when a request was added.
    const ADDED: &[u8] = b"\x84\xaamodel_name\xa1m\xadrouting_group\xa7default\xaablock_size\x10\xa5event\x85\xaarequest_id\xa2r1\xa6worker\x82\xa9worker_id\x01\xa7dp_rank\x00\xa4data\x81\xaaAddRequest\x84\xaetoken_sequence\x93\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xfe\x03\xb4track_prefill_tokens\xc3\xb6expected_output_tokens\xc0\xb1prefill_load_hint\x82\xd9 initial_effective_prefill_tokens\x14\xb9expected_prefill_duration\xc0\xa9router_id\xcf\xb0K\xc6\xa0\x9bu]\x7f\xa9lora_name\xc0";

    #[test]
    fn messages_are_those_of_dynamo() {
        let news = SlotNews {
            model: "m".into(),
            group: "default".into(),
            block_size: 16,
            event: SequenceEvent {
                request: "r1".into(),
                rank: WorkerRank::new(1, 0),
                router: 12_703_465_567_033_843_071,
                lora: None,
                change: SequenceChange::Added {
                    blocks: Some(vec![
                        SequenceHash(1),
                        SequenceHash(u64::MAX - 1),
                        SequenceHash(3),
                    ]),
                    track_prefill: true,
                    expected_output_tokens: None,
                    prefill: Some(PrefillHint {
                        tokens: 20,
                        duration: None,
                    }),
                },
            },
        };
        assert_eq!(SlotNews::decode(ADDED), Ok(news.clone()));
        let mut out = Vec::new();
        news.encode(&mut out);
        assert_eq!(out, ADDED);
        for cut in 0..ADDED.len() {
            assert!(SlotNews::decode(ADDED.get(..cut).unwrap()).is_err());
        }
    }
}
