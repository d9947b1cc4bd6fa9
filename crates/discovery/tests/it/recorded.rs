//! Every value that workers of Dynamo 1.6.1 were recorded to write is read, stands under the key that it was recorded under, and
//! is written as it was.

use kvasir_discovery::{Bucket, Card, ModelInput, Record, WorkerType};
use serde_json::Value;

fn read(name: &str) -> String {
    let root = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/dynamo-discovery/"
    );
    std::fs::read_to_string(format!("{root}{name}")).unwrap()
}

/// Key and value of each record.
fn records() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for name in ["file-agg.json", "file-disagg.json", "file-dp2.json"] {
        let all: Value = serde_json::from_str(&read(name)).unwrap();
        for (path, value) in all.as_object().unwrap() {
            // Some were recorded with the file's name, some with the key.
            match value.get("key") {
                Some(key) => found.push((key.as_str().unwrap().into(), value["value"].clone())),
                None => found.push((path.clone(), value.clone())),
            }
        }
    }
    for line in read("etcd-watch.jsonl").lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if line["op"] == "PUT" {
            found.push((line["key"].as_str().unwrap().into(), line["value"].clone()));
        }
    }
    found
}

#[test]
fn every_recorded_value_round_trips_under_its_key() {
    let records = records();
    assert!(records.len() > 40, "{}", records.len());
    for (path, value) in records {
        let (bucket, key) = Bucket::split(&path).unwrap();
        let record = Record::parse(bucket, value.to_string().as_bytes()).unwrap();
        assert_eq!(record.key().key, key);
        assert_eq!(record.namespace(), "dynamo");
        let written: Value = serde_json::from_slice(&record.to_bytes()).unwrap();
        assert_eq!(written, value, "{path}");
        if let Record::EventSource(source) = &record {
            let kv = source.kv().unwrap();
            assert_eq!(kv.publisher_id, source.publisher_id);
            assert_eq!(serde_json::to_value(&kv).unwrap(), value["metadata"]);
            let target = kv.recovery_target.unwrap();
            assert_eq!(target.instance_id, kv.worker.worker_id);
        }
    }
}

#[test]
fn every_recorded_card_is_read() {
    let mut roles = Vec::new();
    for (path, value) in records() {
        if !path.starts_with("v1/mdc/") {
            continue;
        }
        let card = Card::parse(&value["card_json"]).unwrap();
        assert_eq!(card.name, "m");
        assert_eq!(
            card.kv_cache_block_size,
            value["card_json"]["kv_cache_block_size"]
        );
        assert_eq!(card.to_json(), value["card_json"]);
        assert_eq!(card.model_input, ModelInput::Tokens);
        assert_eq!(card.context_length, Some(32768));
        assert!(card.runtime.total_kv_blocks.is_some_and(
            |blocks| value["card_json"]["runtime_config"]["total_kv_blocks"] == blocks
        ));
        let files: Vec<String> = card
            .artefacts()
            .iter()
            .map(|a| a.file_name().into())
            .collect();
        let all = [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ];
        assert_eq!(files, all);
        assert_eq!(
            card.model_type.to_string(),
            value["card_json"]["model_type"]
        );
        if card.runtime.data_parallel_size == 1 && path.contains("52156b15ad6774b") {
            let sum = "658b146f0e4383cc7281b37586ef9915dfd8153428c45767d8b0dada845184b2";
            assert_eq!(card.checksum(), sum);
        }
        roles.push((
            card.role(),
            card.needs.clone(),
            card.runtime.data_parallel_size,
        ));
    }
    assert!(roles.contains(&(WorkerType::Aggregated, vec![], 1)));
    assert!(roles.contains(&(WorkerType::Aggregated, vec![], 2)));
    assert!(
        roles.iter().any(
            |(role, needs, _)| *role == WorkerType::Decode && *needs == [[WorkerType::Prefill]]
        )
    );
    assert!(
        roles.iter().any(
            |(role, needs, _)| *role == WorkerType::Prefill && *needs == [[WorkerType::Decode]]
        )
    );
}
