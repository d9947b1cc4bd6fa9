//! What carries everything on the event plane: the envelope; and the smallest thing that it carries, load reports.

use kvasir_msgpack::{DecodeError, Reader, Value};
use kvasir_types::WorkerRank;

use super::{map, missing, number, rank_fields, rank_of};

/// First byte of an envelope on ZeroMQ.
pub const ENVELOPE_VERSION: u8 = 1;
/// Bytes before the envelope on ZeroMQ: version and length.
const PREFIX_LEN: usize = 5;

/// A message of the event plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Who sent it.
    pub publisher: u64,
    /// Consecutive per publisher, from 0.
    pub sequence: u64,
    /// When, in milliseconds of the publisher's Unix clock.
    pub published_ms: u64,
    /// What it is about, e.g. `kv-events`.
    pub topic: String,
    /// MessagePack of the topic's own kind.
    pub payload: Vec<u8>,
}

impl Envelope {
    /// Reads an envelope as NATS carries it.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let (mut publisher, mut sequence, mut published_ms) = (None, None, None);
        let (mut topic, mut payload) = (None, None);
        for _ in 0..reader.map()? {
            match reader.text_bytes()? {
                b"publisher_id" => publisher = Some(reader.u64("publisher_id")?),
                b"sequence" => sequence = Some(reader.u64("sequence")?),
                b"published_at" => published_ms = Some(reader.u64("published_at")?),
                b"topic" => topic = Some(reader.str()?.to_owned()),
                b"payload" => payload = Some(reader.bin()?.to_vec()),
                _ => reader.skip()?,
            }
        }
        reader.finish()?;
        Ok(Self {
            publisher: publisher.ok_or(missing("publisher_id"))?,
            sequence: sequence.ok_or(missing("sequence"))?,
            published_ms: published_ms.ok_or(missing("published_at"))?,
            topic: topic.ok_or(missing("topic"))?,
            payload: payload.ok_or(missing("payload"))?,
        })
    }

    /// Reads the last part of a ZeroMQ message: version, length, envelope.
    pub fn decode_prefixed(bytes: &[u8]) -> Result<Self, DecodeError> {
        let head = bytes.first_chunk::<PREFIX_LEN>();
        let [version, length @ ..] = *head.ok_or(DecodeError::Truncated { at: bytes.len() })?;
        if version != ENVELOPE_VERSION {
            return Err(DecodeError::Version { found: version });
        }
        let body = bytes.get(PREFIX_LEN..).unwrap_or_default();
        let length = u32::from_be_bytes(length) as usize;
        match body.len().checked_sub(length) {
            None => Err(DecodeError::Truncated { at: bytes.len() }),
            Some(0) => Self::decode(body),
            Some(extra) => Err(DecodeError::Trailing { extra }),
        }
    }

    /// Appends the envelope as NATS carries it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        map([
            ("publisher_id", Value::Uint(self.publisher)),
            ("sequence", Value::Uint(self.sequence)),
            ("published_at", Value::Uint(self.published_ms)),
            ("topic", Value::Text(self.topic.clone())),
            ("payload", Value::Bytes(self.payload.clone())),
        ])
        .to_msgpack(out);
    }

    /// Appends the envelope as the last part of a ZeroMQ message.
    pub fn encode_prefixed(&self, out: &mut Vec<u8>) {
        let mut body = Vec::new();
        self.encode(&mut body);
        out.push(ENVELOPE_VERSION);
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&body);
    }
}

/// A worker's load report (`kv_metrics`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveLoad {
    /// Whose load.
    pub rank: WorkerRank,
    /// Blocks of running requests.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens that wait or are being computed.
    pub active_prefill_tokens: Option<u64>,
    /// Blocks in use, cached ones included.
    pub used_blocks: Option<u64>,
}

impl ActiveLoad {
    /// Reads a report.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let number = |field| value.get(field).and_then(Value::uint);
        Ok(Self {
            rank: rank_of(value)?,
            active_decode_blocks: number("active_decode_blocks"),
            active_prefill_tokens: number("active_prefill_tokens"),
            used_blocks: number("kv_used_blocks"),
        })
    }

    /// The report as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let [worker, rank] = rank_fields(self.rank);
        map([
            worker,
            rank,
            ("active_decode_blocks", number(self.active_decode_blocks)),
            ("active_prefill_tokens", number(self.active_prefill_tokens)),
            ("kv_used_blocks", number(self.used_blocks)),
        ])
    }
}
