//! What a router asks of the index of another, and what it is told.
//!
//! `kv_indexer_query` says how much of a prompt each rank holds; `kv_indexer_record_routing_decision` tells an index that learns from
//! routing decisions of one. Messages are those of Dynamo 1.6.1.

use std::collections::BTreeMap;

use kvasir_msgpack::{DecodeError, Value};
use kvasir_types::{LocalHash, SequenceHash, Tier, WorkerRank};

use super::{Encoding, decode, encode, map, missing, rank_fields, rank_of, text, tier, tier_name};

/// Blocks of a prompt in one question; far above any prompt's.
pub const QUERY_BLOCKS_MAX: usize = 1 << 20;
/// Ranks in one answer.
pub const QUERY_RANKS_MAX: usize = 1 << 16;

/// How much of a prompt does each rank hold?
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexQuery {
    /// Whose workers.
    pub model: String,
    /// The prompt's blocks, from its start.
    pub blocks: Vec<LocalHash>,
    /// Only what lies in device memory is asked for.
    pub device_only: bool,
}

/// What one rank holds: blocks from the start of the prompt in device memory, then those that follow in lower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierScore {
    /// Whose.
    pub rank: WorkerRank,
    /// In device memory.
    pub device: u32,
    /// After those, in host memory.
    pub host: u32,
    /// After those, on disk or further away.
    pub disk: u32,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexReply {
    /// What each rank holds that holds something.
    Scores(Vec<TierScore>),
    /// Why that is not said.
    Error(String),
}

/// A prompt went to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingRecord {
    /// Whose worker.
    pub model: String,
    /// Where it went.
    pub rank: WorkerRank,
    /// Its blocks.
    pub blocks: Vec<LocalHash>,
    /// Its prefixes.
    pub sequence: Vec<SequenceHash>,
}

impl IndexQuery {
    /// Reads a question.
    pub fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = decode(encoding, bytes)?;
        Ok(Self {
            model: name(&value)?,
            blocks: hashes(&value, "block_hashes", LocalHash)?,
            device_only: value.get("device_only") == Some(&Value::Bool(true)),
        })
    }

    /// Appends the question.
    pub fn encode(&self, encoding: Encoding, out: &mut Vec<u8>) {
        let blocks = self.blocks.iter().map(|hash| Value::Uint(hash.0));
        let value = map([
            ("model_name", text(&self.model)),
            ("block_hashes", Value::List(blocks.collect())),
            ("device_only", Value::Bool(self.device_only)),
        ]);
        encode(&value, encoding, out);
    }
}

impl IndexReply {
    /// Reads an answer.
    pub fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = decode(encoding, bytes)?;
        if let Some(why) = value.get("Error") {
            return Ok(Self::Error(why.text().unwrap_or_default().to_owned()));
        }
        let scores = value.get("TieredScores").ok_or(missing("TieredScores"))?;
        let device = scores.get("device").ok_or(missing("device"))?;
        let mut ranks = BTreeMap::new();
        for (rank, blocks) in pairs(device.get("scores"))? {
            score(&mut ranks, rank).device = blocks;
        }
        let lower = scores.get("lower_tier").and_then(Value::list);
        for entry in lower.unwrap_or_default() {
            let entry = entry.list().unwrap_or_default();
            let [of, found] = entry else {
                return Err(DecodeError::Range {
                    field: "lower_tier",
                });
            };
            let of = tier(Some(of))?;
            for (rank, blocks) in pairs(found.get("hits"))? {
                let score = score(&mut ranks, rank);
                let part = match of {
                    Tier::Device => &mut score.device,
                    Tier::HostPinned => &mut score.host,
                    Tier::Disk | Tier::External => &mut score.disk,
                };
                *part = part.saturating_add(blocks);
            }
        }
        Ok(Self::Scores(ranks.into_values().collect()))
    }

    /// Appends the answer.
    pub fn encode(&self, encoding: Encoding, out: &mut Vec<u8>) {
        let value = match self {
            Self::Error(why) => map([("Error", text(why))]),
            Self::Scores(ranks) => map([("TieredScores", tiered(ranks))]),
        };
        encode(&value, encoding, out);
    }
}

fn tiered(ranks: &[TierScore]) -> Value {
    let hits = |of: &dyn Fn(&TierScore) -> u32| {
        let some = ranks.iter().filter(|score| of(score) > 0);
        let pair = |score: &TierScore| {
            let blocks = Value::Uint(of(score).into());
            Value::List(vec![map(rank_fields(score.rank)), blocks])
        };
        Value::List(some.map(pair).collect())
    };
    let device = map([
        ("scores", hits(&|score| score.device)),
        ("frequencies", Value::List(Vec::new())),
    ]);
    let mut lower = Vec::new();
    let mut tier = |of: Tier, found: Value| {
        if found.list().is_some_and(|found| !found.is_empty()) {
            let entry = vec![text(tier_name(of)), map([("hits", found)])];
            lower.push(Value::List(entry));
        }
    };
    tier(Tier::HostPinned, hits(&|score| score.host));
    tier(Tier::Disk, hits(&|score| score.disk));
    map([("device", device), ("lower_tier", Value::List(lower))])
}

impl RoutingRecord {
    /// What is answered to a record that was taken.
    pub const RECORDED: &str = "Recorded";

    /// Reads a record.
    pub fn decode(encoding: Encoding, bytes: &[u8]) -> Result<Self, DecodeError> {
        let value = decode(encoding, bytes)?;
        Ok(Self {
            model: name(&value)?,
            rank: rank_of(value.get("worker").ok_or(missing("worker"))?)?,
            blocks: hashes(&value, "local_hashes", LocalHash)?,
            sequence: hashes(&value, "sequence_hashes", SequenceHash)?,
        })
    }

    /// Appends the record.
    pub fn encode(&self, encoding: Encoding, out: &mut Vec<u8>) {
        let locals = self.blocks.iter().map(|hash| Value::Uint(hash.0));
        let sequence = self.sequence.iter().map(|hash| Value::Uint(hash.0));
        let value = map([
            ("model_name", text(&self.model)),
            ("worker", map(rank_fields(self.rank))),
            ("local_hashes", Value::List(locals.collect())),
            ("sequence_hashes", Value::List(sequence.collect())),
        ]);
        encode(&value, encoding, out);
    }
}

fn name(value: &Value) -> Result<String, DecodeError> {
    let name = value.get("model_name").and_then(Value::text);
    name.map(ToOwned::to_owned).ok_or(missing("model_name"))
}

fn hashes<N>(
    value: &Value,
    field: &'static str,
    named: impl Fn(u64) -> N,
) -> Result<Vec<N>, DecodeError> {
    let list = value.get(field).and_then(Value::list);
    let list = list.ok_or(missing(field))?;
    if list.len() > QUERY_BLOCKS_MAX {
        return Err(DecodeError::Range { field });
    }
    let hash = |value: &Value| value.bits().map(&named);
    let read: Option<Vec<N>> = list.iter().map(hash).collect();
    read.ok_or(DecodeError::Range { field })
}

/// Ranks with their numbers: `[[{"worker_id": 1, "dp_rank": 0}, 8], ...]`.
fn pairs(value: Option<&Value>) -> Result<Vec<(WorkerRank, u32)>, DecodeError> {
    const FIELD: DecodeError = DecodeError::Range { field: "scores" };
    let list = value.and_then(Value::list).unwrap_or_default();
    if list.len() > QUERY_RANKS_MAX {
        return Err(FIELD);
    }
    let pair = |value: &Value| match value.list() {
        Some([rank, blocks]) => {
            let blocks = blocks.uint().and_then(|blocks| u32::try_from(blocks).ok());
            Ok((rank_of(rank)?, blocks.ok_or(FIELD)?))
        }
        _ => Err(FIELD),
    };
    list.iter().map(pair).collect()
}

/// The score of a rank, which may be new.
fn score(ranks: &mut BTreeMap<WorkerRank, TierScore>, rank: WorkerRank) -> &mut TierScore {
    ranks.entry(rank).or_insert(TierScore {
        rank,
        ..TierScore::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a real router answered, and what it is asked.
    #[test]
    fn messages_are_those_of_dynamo() {
        let asked =
            br#"{"model_name":"m","block_hashes":[17863182269597592868,2],"device_only":false}"#;
        let query = IndexQuery {
            model: "m".into(),
            blocks: vec![LocalHash(17_863_182_269_597_592_868), LocalHash(2)],
            device_only: false,
        };
        assert_eq!(IndexQuery::decode(Encoding::Json, asked), Ok(query.clone()));
        let said = br#"{"TieredScores":{"device":{"scores":[[{"worker_id":8686983518756931329,"dp_rank":0},8]],"frequencies":[]},"lower_tier":[]}}"#;
        let reply = IndexReply::Scores(vec![TierScore {
            rank: WorkerRank::new(8_686_983_518_756_931_329, 0),
            device: 8,
            ..TierScore::default()
        }]);
        assert_eq!(IndexReply::decode(Encoding::Json, said), Ok(reply.clone()));
        let written = |write: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            write(&mut out);
            Value::from_json(&out).unwrap()
        };
        let same = |ours: Value, theirs: &[u8]| {
            assert_eq!(ours.to_json(), Value::from_json(theirs).unwrap().to_json());
        };
        same(written(&|out| query.encode(Encoding::Json, out)), asked);
        same(written(&|out| reply.encode(Encoding::Json, out)), said);
        let error = br#"{"Error":"served indexer model nobody is not registered"}"#;
        let refused = IndexReply::decode(Encoding::Json, error).unwrap();
        assert!(matches!(refused, IndexReply::Error(why) if why.contains("nobody")));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let score = |worker, device, host, disk| TierScore {
            rank: WorkerRank::new(worker, 1),
            device,
            host,
            disk,
        };
        let replies = [
            IndexReply::Scores(Vec::new()),
            IndexReply::Scores(vec![
                score(1, 3, 2, 1),
                score(2, 1, 0, 4),
                score(3, 0, 5, 0),
            ]),
            IndexReply::Error("no".into()),
        ];
        let record = RoutingRecord {
            model: "m".into(),
            rank: WorkerRank::new(9, 2),
            blocks: vec![LocalHash(1)],
            sequence: vec![SequenceHash(u64::MAX)],
        };
        for encoding in [Encoding::Json, Encoding::MessagePack] {
            for reply in &replies {
                let mut out = Vec::new();
                reply.encode(encoding, &mut out);
                assert_eq!(IndexReply::decode(encoding, &out).as_ref(), Ok(reply));
            }
            let mut out = Vec::new();
            record.encode(encoding, &mut out);
            assert_eq!(RoutingRecord::decode(encoding, &out).as_ref(), Ok(&record));
        }
        for wrong in [
            "{}",
            "7",
            r#"{"TieredScores":{}}"#,
            r#"{"TieredScores":{"device":{"scores":[[1,2]]}}}"#,
            r#"{"TieredScores":{"device":{"scores":[]},"lower_tier":[["cloud",{"hits":[]}]]}}"#,
        ] {
            let read = IndexReply::decode(Encoding::Json, wrong.as_bytes());
            assert!(read.is_err(), "{wrong}");
        }
    }
}
