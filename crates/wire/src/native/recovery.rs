//! What a router asks of a worker's own index, and the six things that it may be told.
//!
//! A dump of a large cache is read in one pass, without a tree: it is the largest message of all.

use kvasir_msgpack::{DecodeError, Int, Kind, Reader, Value, Writer};
use kvasir_types::WorkerRank;

use super::read::{read_events, read_text};
use super::write::encode_router_events;
use super::{Encoding, RouterEvent, decode, encode, map, missing, number, rank_fields, rank_of};

/// What a router asks of a worker's own index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryRequest {
    /// Whose events.
    pub rank: WorkerRank,
    /// First id wanted; `None` or 0 for the whole state.
    pub start: Option<u64>,
    /// Last id wanted. It is only checked: an answer goes up to the newest.
    pub end: Option<u64>,
    /// Whether the asker understands [`RecoveryReply::TreeDumpFailed`].
    pub takes_dump_failed: bool,
}

impl RecoveryRequest {
    /// Asks for everything from `start` on, or for the whole state.
    #[must_use]
    pub const fn new(rank: WorkerRank, start: Option<u64>) -> Self {
        Self {
            rank,
            start,
            end: None,
            takes_dump_failed: true,
        }
    }

    /// Reads a question. Only worker and rank must be there.
    pub fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::from_value(&decode(encoding, bytes)?)
    }

    /// Reads a question from a tree.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        if value.get("dp_rank").is_none() {
            return Err(missing("dp_rank"));
        }
        let id = |field| match value.get(field) {
            None | Some(Value::Nil) => Ok(None),
            Some(id) => id.uint().map(Some).ok_or(DecodeError::Range { field }),
        };
        let takes = value.get("supports_tree_dump_failed");
        Ok(Self {
            rank: rank_of(value)?,
            start: id("start_event_id")?,
            end: id("end_event_id")?,
            takes_dump_failed: takes == Some(&Value::Bool(true)),
        })
    }

    /// The question as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let [worker, rank] = rank_fields(self.rank);
        map([
            worker,
            rank,
            ("start_event_id", number(self.start)),
            ("end_event_id", number(self.end)),
            (
                "supports_tree_dump_failed",
                Value::Bool(self.takes_dump_failed),
            ),
            ("kind", Value::Text("recovery".to_owned())),
        ])
    }

    /// Appends the question.
    pub fn encode(&self, encoding: Encoding, out: &mut Vec<u8>) {
        encode(&self.to_value(), encoding, out);
    }
}

/// What a worker's own index answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecoveryReply {
    /// The events from the asked id to the newest; it may begin later, with the last clear of everything.
    Events {
        /// In order.
        events: Vec<RouterEvent>,
        /// The newest id.
        last: u64,
    },
    /// The whole state, under made-up ids: replaces what was known.
    TreeDump {
        /// Parents before children.
        events: Vec<RouterEvent>,
        /// The newest real id; 0 if there was none.
        last: u64,
    },
    /// No dump could be made; go on with live events after this id.
    TreeDumpFailed {
        /// The newest real id.
        last: u64,
        /// In the worker's words.
        message: String,
    },
    /// The asked id does not exist yet: nothing is missing, or the publisher began again.
    TooNew {
        /// What was asked for.
        start: u64,
        /// Up to which.
        end: u64,
        /// The newest id that it has.
        newest: u64,
    },
    /// The asked range ends before it begins.
    InvalidRange {
        /// What was asked for.
        start: u64,
        /// Up to which.
        end: u64,
    },
    /// Anything else, e.g. the question was put to the wrong worker.
    Error(String),
}

impl RecoveryReply {
    /// Reads an answer.
    pub fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Self, DecodeError> {
        match encoding {
            Encoding::Json => Self::from_value(&Value::from_json(bytes)?),
            Encoding::MessagePack => {
                let mut reader = Reader::new(bytes);
                let reply = read_reply(&mut reader)?;
                reader.finish()?;
                Ok(reply)
            }
        }
    }

    /// Reads an answer from a tree.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let Value::Map(pairs) = value else {
            return Err(missing("Events"));
        };
        let (kind, body) = pairs.first().ok_or(missing("Events"))?;
        let mut parts = ReplyParts::default();
        match body {
            Value::Map(pairs) => {
                for (name, value) in pairs {
                    match name.as_bytes() {
                        b"events" => parts.events = Some(RouterEvent::list_from_value(value)?),
                        b"message" => parts.message = value.text().map(str::to_owned),
                        name => parts.set(name, value.uint()),
                    }
                }
            }
            body => parts.message = body.text().map(str::to_owned),
        }
        parts.into_reply(kind.as_bytes())
    }

    /// The answer as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let listed = |events: &[RouterEvent], last: &u64| {
            let events = events.iter().map(RouterEvent::to_value).collect();
            [
                ("events", Value::List(events)),
                ("last_event_id", Value::Uint(*last)),
            ]
        };
        match self {
            Self::Events { events, last } => map([("Events", map(listed(events, last)))]),
            Self::TreeDump { events, last } => {
                let scope = ("reset_scope", Value::Text("all".to_owned()));
                let body = listed(events, last).into_iter().chain([scope]);
                map([("TreeDump", map(body))])
            }
            Self::TreeDumpFailed { last, message } => {
                let body = [
                    ("last_event_id", Value::Uint(*last)),
                    ("message", Value::Text(message.clone())),
                ];
                map([("TreeDumpFailed", map(body))])
            }
            Self::TooNew { start, end, newest } => {
                let body = [
                    ("requested_start", Value::Uint(*start)),
                    ("requested_end", Value::Uint(*end)),
                    ("newest_available", Value::Uint(*newest)),
                ];
                map([("TooNew", map(body))])
            }
            Self::InvalidRange { start, end } => {
                let body = [
                    ("start_id", Value::Uint(*start)),
                    ("end_id", Value::Uint(*end)),
                ];
                map([("InvalidRange", map(body))])
            }
            Self::Error(message) => map([("Error", Value::Text(message.clone()))]),
        }
    }

    /// Appends the answer; events without a tree of them.
    pub fn encode(&self, encoding: Encoding, out: &mut Vec<u8>) {
        let (kind, fields, events, last) = match self {
            Self::Events { events, last } => ("Events", 2, events, *last),
            Self::TreeDump { events, last } => ("TreeDump", 3, events, *last),
            _ => return encode(&self.to_value(), encoding, out),
        };
        if encoding == Encoding::Json {
            return encode(&self.to_value(), encoding, out);
        }
        let mut w = Writer::new(out);
        w.map(1);
        w.str(kind);
        w.map(fields);
        w.str("events");
        encode_router_events(encoding, events, out);
        let mut w = Writer::new(out);
        w.str("last_event_id");
        w.uint(last);
        if fields == 3 {
            w.str("reset_scope");
            w.str("all");
        }
    }
}

/// The fields of an answer of any kind.
#[derive(Default)]
struct ReplyParts {
    events: Option<Vec<RouterEvent>>,
    last: Option<u64>,
    start: Option<u64>,
    end: Option<u64>,
    newest: Option<u64>,
    message: Option<String>,
}

impl ReplyParts {
    fn set(&mut self, name: &[u8], id: Option<u64>) {
        match name {
            b"last_event_id" => self.last = id,
            b"requested_start" | b"start_id" => self.start = id,
            b"requested_end" | b"end_id" => self.end = id,
            b"newest_available" => self.newest = id,
            _ => {}
        }
    }

    fn into_reply(self, kind: &[u8]) -> Result<RecoveryReply, DecodeError> {
        let last = self.last.ok_or(missing("last_event_id"));
        Ok(match kind {
            b"Events" => RecoveryReply::Events {
                events: self.events.ok_or(missing("events"))?,
                last: last?,
            },
            b"TreeDump" => RecoveryReply::TreeDump {
                events: self.events.ok_or(missing("events"))?,
                last: last?,
            },
            b"TreeDumpFailed" => RecoveryReply::TreeDumpFailed {
                last: last?,
                message: self.message.unwrap_or_default(),
            },
            b"TooNew" => RecoveryReply::TooNew {
                start: self.start.unwrap_or(0),
                end: self.end.unwrap_or(0),
                newest: self.newest.ok_or(missing("newest_available"))?,
            },
            b"InvalidRange" => RecoveryReply::InvalidRange {
                start: self.start.unwrap_or(0),
                end: self.end.unwrap_or(0),
            },
            b"Error" => RecoveryReply::Error(self.message.unwrap_or_default()),
            _ => return Err(missing("Events")),
        })
    }
}

fn read_reply(reader: &mut Reader<'_>) -> Result<RecoveryReply, DecodeError> {
    let mut reply = None;
    for _ in 0..reader.map()? {
        let kind = reader.text_bytes()?;
        match reply {
            None => reply = Some(read_parts(reader)?.into_reply(kind)?),
            Some(_) => reader.skip()?,
        }
    }
    reply.ok_or(missing("Events"))
}

fn read_parts(reader: &mut Reader<'_>) -> Result<ReplyParts, DecodeError> {
    let mut parts = ReplyParts::default();
    if reader.peek()? != Kind::Map {
        parts.message = read_text(reader)?;
        return Ok(parts);
    }
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"events" => {
                let mut events = Vec::new();
                read_events(reader, &mut events)?;
                parts.events = Some(events);
            }
            b"message" => parts.message = read_text(reader)?,
            name => parts.set(name, read_id(reader)?),
        }
    }
    Ok(parts)
}

/// An id; what is none counts as absent, as in a tree.
fn read_id(reader: &mut Reader<'_>) -> Result<Option<u64>, DecodeError> {
    if reader.peek()? != Kind::Int {
        reader.skip()?;
        return Ok(None);
    }
    Ok(match reader.int()? {
        Int::Unsigned(id) => Some(id),
        Int::Negative(_) => None,
    })
}
