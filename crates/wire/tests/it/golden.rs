//! Every recorded payload decodes to what the decoded copy beside it says, and (where our encoder speaks
//! that release) encodes back to the same bytes.

use kvasir_types::EngineHash;
use kvasir_wire::engine::{Adapter, Attention, Batch, Dialect, Event, Medium, encode_batch};
use kvasir_wire::frame::{ReplayPart, parse_live, parse_replay};
use serde_json::Value as Json;

use crate::captures::{SESSIONS, bytes, lines, messages};

/// Names of the positional form, as the recordings' README lists them.
const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

fn field<'j>(event: &'j Json, name: &str) -> &'j Json {
    const NULL: &Json = &Json::Null;
    match event {
        Json::Array(items) => {
            let names: &[&str] = match items[0].as_str() {
                Some("BlockStored") => &STORED,
                _ => &REMOVED,
            };
            let at = names.iter().position(|n| *n == name);
            at.and_then(|at| items.get(at + 1)).unwrap_or(NULL)
        }
        map if name == "type" => map.get("type").unwrap_or(NULL),
        map => map.get(name).unwrap_or(NULL),
    }
}

fn kind(event: &Json) -> &str {
    let kind = event.get(0).or(event.get("type"));
    kind.and_then(Json::as_str).unwrap()
}

fn hash(json: &Json) -> EngineHash {
    if let Some(hex) = json.get("$bin_hex").and_then(Json::as_str) {
        return EngineHash(u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap());
    }
    let signed = || json.as_i64().map(|n| n as u64);
    EngineHash(json.as_u64().or_else(signed).unwrap())
}

fn hashes(json: &Json) -> Vec<EngineHash> {
    json.as_array().unwrap().iter().map(hash).collect()
}

fn group(event: &Json) -> Option<u32> {
    field(event, "group_idx").as_u64().map(|g| g as u32)
}

fn medium(event: &Json) -> Medium {
    let name = field(event, "medium").as_str();
    name.map_or(Medium::Unsaid, Medium::from_name)
}

fn assert_stored(event: &kvasir_wire::engine::Stored<'_>, json: &Json) {
    assert_eq!(event.hashes, hashes(field(json, "block_hashes")));
    let parent = field(json, "parent_block_hash");
    assert_eq!(event.parent, (!parent.is_null()).then(|| hash(parent)));
    let tokens = field(json, "token_ids").as_array().unwrap();
    let tokens: Vec<u32> = tokens.iter().map(|t| t.as_u64().unwrap() as u32).collect();
    assert_eq!(event.tokens, tokens);
    let size = field(json, "block_size").as_u64();
    assert_eq!(Some(u64::from(event.block_size)), size);
    assert_eq!(event.group, group(json));
    assert_eq!(event.medium, medium(json));
    let kind = field(json, "kv_cache_spec_kind").as_str();
    assert_eq!(
        event.attention,
        kind.map_or(Attention::Unsaid, Attention::from_name)
    );
    let adapter = match field(json, "lora_name").as_str() {
        Some(name) => Adapter::Named(name),
        None => match field(json, "lora_id").as_u64() {
            Some(id) => Adapter::Numbered(id),
            None => Adapter::Base,
        },
    };
    assert_eq!(event.adapter, adapter);
    let explicit = field(json, "cache_salt").as_str();
    let first = field(json, "extra_keys").pointer("/0/0");
    let named = field(json, "lora_name").as_str();
    let keyed = first.and_then(Json::as_str).filter(|k| Some(*k) != named);
    assert_eq!(event.salt, explicit.or(keyed));
    assert!(event.media.is_empty() && !event.pairs && !event.remote);
}

fn assert_batch(batch: &Batch, json: &Json) {
    // JSON readers may be off by the last bit.
    assert!((batch.at() - json[0].as_f64().unwrap()).abs() < 1e-6);
    assert_eq!(batch.rank().map(u64::from), json[2].as_u64());
    let expected = json[1].as_array().unwrap();
    assert_eq!(batch.len(), expected.len());
    for (event, json) in batch.events().zip(expected) {
        match event {
            Event::Stored(event) => {
                assert_eq!(kind(json), "BlockStored");
                assert_stored(&event, json);
            }
            Event::Removed(event) => {
                assert_eq!(kind(json), "BlockRemoved");
                assert_eq!(event.hashes, hashes(field(json, "block_hashes")));
                assert_eq!((event.group, event.medium), (group(json), medium(json)));
            }
            Event::Cleared => assert_eq!(kind(json), "AllBlocksCleared"),
            Event::Ignored | Event::Unknown => panic!("{json} was not understood"),
        }
    }
}

#[test]
fn every_recorded_live_message_says_what_its_decoded_copy_says() {
    let mut batch = Batch::new();
    let mut events = 0;
    for session in SESSIONS {
        let live = messages(&format!("vllm-kv-events/{session}/pub_frames.jsonl"));
        let decoded = lines(&format!("vllm-kv-events/{session}/decoded.jsonl"));
        for parts in live {
            let frame = parse_live(&parts).unwrap();
            batch.decode(&frame.payload).unwrap();
            let copy = decoded.iter().find(|d| d["seq"] == frame.sequence).unwrap();
            assert_batch(&batch, &copy["batch"]);
            events += batch.len();
        }
    }
    assert_eq!(events, 632, "the recordings changed");
}

/// Replays hold the same payloads as the live stream, in order, and end with the end marker.
#[test]
fn every_recorded_replay_is_the_live_stream_again() {
    let mut frames = 0;
    for session in SESSIONS {
        let live = messages(&format!("vllm-kv-events/{session}/pub_frames.jsonl"));
        let live: Vec<_> = live
            .iter()
            .map(|parts| parse_live(parts).unwrap())
            .collect();
        for (name, from) in [
            ("0_dealer", 0),
            ("10_dealer", 10),
            ("future_dealer", u64::MAX),
        ] {
            let path = format!("vllm-kv-events/{session}/replay_from_{name}.jsonl");
            let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/");
            if !std::fs::exists(format!("{file}{path}")).unwrap() {
                continue;
            }
            let answers = messages(&path);
            let (last, answers) = answers.split_last().unwrap();
            assert_eq!(parse_replay(last), Ok(ReplayPart::End));
            for (i, answer) in answers.iter().enumerate() {
                let ReplayPart::Frame(frame) = parse_replay(answer).unwrap() else {
                    panic!("end marker in the middle of {path}");
                };
                assert_eq!(frame.sequence, from + i as u64);
                let same = live.iter().find(|f| f.sequence == frame.sequence);
                assert!(same.is_none_or(|f| f.payload == frame.payload));
                frames += 1;
            }
        }
    }
    assert_eq!(frames, 167, "the recordings changed");
}

#[test]
fn every_release_decodes() {
    let mut batch = Batch::new();
    let payloads = lines("vllm-kv-events/encoded-by-release/payloads.jsonl");
    assert_eq!(payloads.len(), 48);
    for line in payloads {
        batch.decode(&bytes(&line["payload_b64"])).unwrap();
        assert_batch(&batch, &line["decoded"]);
    }
}

#[test]
fn the_mock_engine_of_dynamo_decodes() {
    let mut batch = Batch::new();
    for line in lines("dynamo-events/raw-engine-zmq.jsonl") {
        let payload = bytes(&line["frames"][2]);
        batch.decode(&payload).unwrap();
        assert_batch(&batch, &line["decoded"]["payload"]["msgpack"]);
    }
    for parts in messages("dynamo-events/raw-engine-zmq-replay.jsonl") {
        if let ReplayPart::Frame(frame) = parse_replay(&parts).unwrap() {
            batch.decode(&frame.payload).unwrap();
        }
    }
}

/// Our encoder writes vLLM's own bytes; only fields that we do not keep (session, window) differ.
#[test]
fn what_vllm_sent_encodes_back_to_the_same_bytes() {
    let (mut batch, mut same, mut all) = (Batch::new(), 0, 0);
    for session in ["int-sha256", "int-sha256-aligned", "int-sha256-duplicates"] {
        for parts in messages(&format!("vllm-kv-events/{session}/pub_frames.jsonl")) {
            batch.decode(&parts[2]).unwrap();
            let mut out = Vec::new();
            encode_batch(
                Dialect::Vllm24,
                batch.at(),
                batch.events(),
                batch.rank(),
                &mut out,
            );
            all += 1;
            let session_id = parts[2].windows(10).any(|w| w == b"session_id");
            assert_eq!(out == parts[2], !session_id, "{:?}", batch);
            same += usize::from(!session_id);
        }
    }
    assert_eq!((same, all), (72, 73), "the recordings changed");
}
