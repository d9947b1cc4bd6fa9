//! What replicas say on a link, as MessagePack.

use kvasir_msgpack::{DecodeError, Value};
use kvasir_types::WorkerRank;
use kvasir_wire::native::{SequenceEvent, SessionBinding};

/// What a rank's part of an index holds at a place of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankDigest {
    /// The last message that was applied.
    pub(crate) sequence: u64,
    /// Names that message.
    pub(crate) message: u64,
    /// Blocks held.
    pub(crate) blocks: u64,
    /// Of all of them, in no order.
    pub(crate) digest: u64,
}

/// An operator's word about a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerNote {
    /// The worker's URL.
    pub url: String,
    /// What was said to add it, JSON; `None` if it was removed.
    pub added: Option<String>,
    /// When, in nanoseconds of the Unix clock: the later word counts.
    pub at: u64,
}

/// Something that one replica says to another.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum LinkMessage {
    /// What became of requests of a router.
    Requests {
        router: String,
        recalled: bool,
        events: Vec<SequenceEvent>,
    },
    /// Where sessions of a router live.
    Sessions {
        router: String,
        bindings: Vec<SessionBinding>,
    },
    /// What operators said of workers.
    Workers(Vec<WorkerNote>),
    /// What does your index hold?
    AskIndex,
    /// A part of a snapshot; of one that is not there the last and only part is empty.
    Index { last: bool, bytes: Vec<u8> },
    /// What ranks of a router hold.
    Digests {
        router: String,
        ranks: Vec<(WorkerRank, RankDigest)>,
    },
    /// What does a rank of a router hold?
    AskRank { router: String, rank: WorkerRank },
    /// A part of that, router events.
    Rank {
        router: String,
        rank: WorkerRank,
        at: RankDigest,
        last: bool,
        bytes: Vec<u8>,
    },
    /// Still here.
    Ping,
}

const fn bad(field: &'static str) -> DecodeError {
    DecodeError::Missing { field }
}

fn map(pairs: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let pairs = pairs.into_iter();
    Value::Map(
        pairs
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn rank_value(rank: WorkerRank) -> Value {
    let parts = [rank.worker.0, u64::from(rank.rank.0)];
    Value::List(parts.map(Value::Uint).into())
}

fn digest_value(digest: &RankDigest) -> Value {
    let RankDigest {
        sequence,
        message,
        blocks,
        digest,
    } = *digest;
    Value::List([sequence, message, blocks, digest].map(Value::Uint).into())
}

fn numbers<const N: usize>(value: &Value, field: &'static str) -> Result<[u64; N], DecodeError> {
    let list = value.list().ok_or(bad(field))?;
    let numbers: Option<Vec<u64>> = list.iter().map(Value::uint).collect();
    let numbers = numbers.and_then(|numbers| numbers.try_into().ok());
    numbers.ok_or(bad(field))
}

fn read_rank(value: &Value) -> Result<WorkerRank, DecodeError> {
    let [worker, rank] = numbers(value, "rank")?;
    let rank = u32::try_from(rank).map_err(|_| DecodeError::Range { field: "rank" })?;
    Ok(WorkerRank::new(worker, rank))
}

fn read_digest(value: &Value) -> Result<RankDigest, DecodeError> {
    let [sequence, message, blocks, digest] = numbers(value, "digest")?;
    Ok(RankDigest {
        sequence,
        message,
        blocks,
        digest,
    })
}

impl LinkMessage {
    /// The message's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.to_value().to_msgpack(&mut bytes);
        bytes
    }

    /// Reads a message.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::from_value(&Value::from_msgpack(bytes)?)
    }

    fn to_value(&self) -> Value {
        let of = |router: &str| ("router", text(router));
        match self {
            Self::Requests {
                router,
                recalled,
                events,
            } => map([
                ("kind", text("requests")),
                of(router),
                ("recalled", Value::Bool(*recalled)),
                (
                    "events",
                    Value::List(events.iter().map(SequenceEvent::to_value).collect()),
                ),
            ]),
            Self::Sessions { router, bindings } => {
                let bindings = bindings.iter().map(SessionBinding::to_value).collect();
                map([
                    ("kind", text("sessions")),
                    of(router),
                    ("bindings", Value::List(bindings)),
                ])
            }
            Self::Workers(notes) => {
                let note = |note: &WorkerNote| {
                    let added = note.added.as_deref().map_or(Value::Nil, text);
                    map([
                        ("url", text(&note.url)),
                        ("added", added),
                        ("at", Value::Uint(note.at)),
                    ])
                };
                let notes = notes.iter().map(note).collect();
                map([("kind", text("workers")), ("notes", Value::List(notes))])
            }
            Self::AskIndex => map([("kind", text("ask_index"))]),
            Self::Index { last, bytes } => map([
                ("kind", text("index")),
                ("last", Value::Bool(*last)),
                ("bytes", Value::Bytes(bytes.clone())),
            ]),
            Self::Digests { router, ranks } => {
                let rank = |(rank, digest): &(WorkerRank, RankDigest)| {
                    Value::List(vec![rank_value(*rank), digest_value(digest)])
                };
                let ranks = ranks.iter().map(rank).collect();
                map([
                    ("kind", text("digests")),
                    of(router),
                    ("ranks", Value::List(ranks)),
                ])
            }
            Self::AskRank { router, rank } => map([
                ("kind", text("ask_rank")),
                of(router),
                ("rank", rank_value(*rank)),
            ]),
            Self::Rank {
                router,
                rank,
                at,
                last,
                bytes,
            } => map([
                ("kind", text("rank")),
                of(router),
                ("rank", rank_value(*rank)),
                ("at", digest_value(at)),
                ("last", Value::Bool(*last)),
                ("bytes", Value::Bytes(bytes.clone())),
            ]),
            Self::Ping => map([("kind", text("ping"))]),
        }
    }

    fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let field = |name: &'static str| value.get(name).ok_or(bad(name));
        let list = |name: &'static str| field(name)?.list().ok_or(bad(name));
        let flag = |name: &'static str| value.get(name) == Some(&Value::Bool(true));
        let router =
            || Ok::<_, DecodeError>(field("router")?.text().ok_or(bad("router"))?.to_owned());
        let bytes = || match field("bytes")? {
            Value::Bytes(bytes) => Ok(bytes.clone()),
            _ => Err(bad("bytes")),
        };
        Ok(match field("kind")?.text().ok_or(bad("kind"))? {
            "requests" => Self::Requests {
                router: router()?,
                recalled: flag("recalled"),
                events: list("events")?
                    .iter()
                    .map(SequenceEvent::from_value)
                    .collect::<Result<_, _>>()?,
            },
            "sessions" => Self::Sessions {
                router: router()?,
                bindings: list("bindings")?
                    .iter()
                    .map(SessionBinding::from_value)
                    .collect::<Result<_, _>>()?,
            },
            "workers" => Self::Workers(
                list("notes")?
                    .iter()
                    .map(read_note)
                    .collect::<Result<_, _>>()?,
            ),
            "ask_index" => Self::AskIndex,
            "index" => Self::Index {
                last: flag("last"),
                bytes: bytes()?,
            },
            "digests" => {
                let rank = |value: &Value| match value.list() {
                    Some([rank, digest]) => Ok((read_rank(rank)?, read_digest(digest)?)),
                    _ => Err(bad("ranks")),
                };
                Self::Digests {
                    router: router()?,
                    ranks: list("ranks")?.iter().map(rank).collect::<Result<_, _>>()?,
                }
            }
            "ask_rank" => Self::AskRank {
                router: router()?,
                rank: read_rank(field("rank")?)?,
            },
            "rank" => Self::Rank {
                router: router()?,
                rank: read_rank(field("rank")?)?,
                at: read_digest(field("at")?)?,
                last: flag("last"),
                bytes: bytes()?,
            },
            // A later release may say more.
            _ => Self::Ping,
        })
    }
}

fn read_note(value: &Value) -> Result<WorkerNote, DecodeError> {
    let added = match value.get("added") {
        None | Some(Value::Nil) => None,
        Some(added) => Some(added.text().ok_or(bad("added"))?.to_owned()),
    };
    let url = value.get("url").and_then(Value::text);
    Ok(WorkerNote {
        url: url.ok_or(bad("url"))?.to_owned(),
        added,
        at: value.get("at").and_then(Value::uint).ok_or(bad("at"))?,
    })
}
