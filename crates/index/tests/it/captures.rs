//! What a real vLLM announced: the index equals the oracle after every batch, and foretells the engine's
//! own hits wherever the recordings' README says that events can.

use std::path::Path;

use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches, Oracle};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, Token, WorkerRank};
use serde_json::Value;

const BLOCK: usize = 32;
const RANK: WorkerRank = WorkerRank::new(1, 0);

fn lines(session: &str, file: &str) -> Vec<Value> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vllm-kv-events");
    let text = std::fs::read_to_string(root.join(session).join(file)).unwrap();
    text.lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

/// An integer, or the last eight bytes of a digest.
fn hash(value: &Value) -> EngineHash {
    EngineHash(match value["$bin_hex"].as_str() {
        Some(hex) => u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap(),
        None => value.as_u64().unwrap(),
    })
}

fn tokens(value: &Value) -> Vec<Token> {
    let list = value.as_array().unwrap();
    list.iter().map(|t| t.as_u64().unwrap() as Token).collect()
}

/// Groups of a hybrid model that attend to everything; the others' events are passed over.
fn full_attention(batches: &[Value]) -> Vec<u64> {
    let events = batches
        .iter()
        .flat_map(|b| b["batch"][1].as_array().unwrap());
    let full = events.filter(|e| e["kv_cache_spec_kind"] == "full_attention");
    full.filter_map(|e| e["group_idx"].as_u64()).collect()
}

/// One event. The salt of a chain comes with its first block only, so it is looked up by the parent.
fn event(event: &Value, salts: &mut Vec<(EngineHash, String)>) -> KvEvent {
    let names = || event["block_hashes"].as_array().unwrap().iter().map(hash);
    match event["type"].as_str().unwrap() {
        "BlockStored" => {
            let parent = Some(&event["parent_block_hash"])
                .filter(|p| !p.is_null())
                .map(hash);
            let own = event["extra_keys"][0][0].as_str().map(str::to_owned);
            let above = || {
                salts
                    .iter()
                    .find(|s| Some(s.0) == parent)
                    .map(|s| s.1.clone())
            };
            let salt = own.or_else(above).unwrap_or_default();
            let scope = Scope {
                salt: &salt,
                ..Scope::default()
            };
            let locals = local_hashes(&tokens(&event["token_ids"]), BLOCK, &scope);
            if !salt.is_empty() {
                salts.extend(names().map(|n| (n, salt.clone())));
            }
            let blocks = names()
                .zip(locals)
                .map(|(engine, local)| StoredBlock { engine, local });
            KvEvent::Stored {
                tier: Tier::Device,
                parent,
                blocks: blocks.collect(),
            }
        }
        "BlockRemoved" => KvEvent::Removed {
            tier: Tier::Device,
            blocks: names().collect(),
        },
        _ => KvEvent::Cleared { tier: None },
    }
}

fn prompt(request: &Value) -> Vec<LocalHash> {
    let tokens = tokens(&request["prompt_token_ids"]);
    let salt = request["body"]["cache_salt"].as_str().unwrap_or_default();
    let mut locals = local_hashes(
        &tokens,
        BLOCK,
        &Scope {
            salt,
            ..Scope::default()
        },
    );
    // vLLM always computes the last token, so it never takes the block that holds it from the cache.
    locals.truncate(tokens.len().saturating_sub(1) / BLOCK);
    locals
}

/// (requests whose hits were foretold, requests asked about).
fn replay(session: &str) -> (u32, u32) {
    let (index, mut oracle) = (Index::new(), Oracle::default());
    let requests = lines(session, "requests.jsonl");
    let batches = lines(session, "decoded.jsonl");
    let full = full_attention(&batches);
    let mut batches = batches.iter().map(|b| &b["batch"]).peekable();
    let (mut salts, mut right, mut asked) = (Vec::new(), 0, 0);
    let (mut got, mut truth) = (Matches::new(), Matches::new());
    for request in &requests {
        let sent = request["t_sent"].as_f64().unwrap_or(0.0);
        while let Some(batch) = batches.next_if(|b| b[0].as_f64().unwrap() < sent) {
            for e in batch[1].as_array().unwrap() {
                if e["group_idx"]
                    .as_u64()
                    .is_some_and(|group| !full.contains(&group))
                {
                    continue;
                }
                let event = event(e, &mut salts);
                assert_eq!(index.apply(RANK, &event), oracle.apply(RANK, &event));
            }
            index.check_invariants();
            for other in &requests {
                index.find(&prompt(other), &mut got);
                oracle.find(&prompt(other), &mut truth);
                assert_eq!(got.sorted(), truth.sorted());
            }
        }
        let note = request["note"].as_str().unwrap();
        let cached = request["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        if let (Some(cached), false) = (
            cached,
            note.starts_with("concurrent") || note.starts_with("identical"),
        ) {
            index.find(&prompt(request), &mut got);
            let blocks = got.get(RANK).map_or(0, |m| m.device as usize);
            asked += 1;
            right += u32::from((blocks * BLOCK) as u64 == cached);
        }
    }
    (right, asked)
}

/// The figures are those of the recordings' own check with counting. What cannot be known from events: the
/// reset that is announced late, the hit that is announced as a store, the sliding window of a hybrid; two
/// requests of the last session have no time of sending.
#[test]
fn recorded_sessions() {
    assert_eq!(replay("int-sha256"), (20, 22));
    assert_eq!(replay("bytes-sha256_cbor"), (20, 22));
    assert_eq!(replay("int-sha256-duplicates"), (10, 10));
    assert_eq!(replay("int-sha256-hybrid-swa"), (15, 22));
    assert_eq!(replay("int-sha256-aligned"), (31, 33));
}
