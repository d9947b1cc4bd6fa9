//! Our hashes against those that a real Dynamo 1.6.1 computed.

use kvasir_hash::{BlockHasher, Scope};
use serde_json::Value;

const VECTORS: &str = include_str!("../../../../testdata/dynamo-hash/vectors.jsonl");

fn numbers(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect()
}

fn media_of_block(block: &Value) -> Vec<u64> {
    let objects = block["mm_objects"].as_array().into_iter().flatten();
    objects
        .filter_map(|object| object["mm_hash"].as_u64())
        .collect()
}

#[test]
fn hashes_equal_those_of_dynamo() {
    let mut compared = 0;
    for line in VECTORS.lines() {
        let case: Value = serde_json::from_str(line).expect("a JSON line");
        if case.get("hashes").is_none() {
            continue; // block size 0: an error there, an empty list here
        }
        let tokens: Vec<u32> = numbers(&case["tokens"])
            .into_iter()
            .map(|t| t as u32)
            .collect();
        let scope = Scope {
            lora: case["lora_name"].as_str().unwrap_or(""),
            salt: case["cache_namespace"].as_str().unwrap_or(""),
            eagle: case["is_eagle"].as_bool().unwrap_or(false),
        };
        let block_size = case["kv_block_size"].as_u64().expect("a block size") as usize;
        let media: Vec<Vec<u64>> = case["block_mm_infos"]
            .as_array()
            .into_iter()
            .flatten()
            .map(media_of_block)
            .collect();
        let mut ours = Vec::new();
        BlockHasher::new(block_size, &scope).extend_with_media(
            &tokens,
            |i| media.get(i).map_or(&[], Vec::as_slice),
            &mut ours,
        );
        let ours: Vec<u64> = ours.into_iter().map(|hash| hash.0).collect();
        assert_eq!(ours, numbers(&case["hashes"]), "{}", case["note"]);
        compared += 1;
    }
    assert_eq!(compared, 22);
}
