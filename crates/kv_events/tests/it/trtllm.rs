//! TensorRT-LLM's JSON, after its documentation.

use kvasir_hash::{Scope, local_hashes};
use kvasir_kv_events::Skip;
use kvasir_kv_events::trtllm::TrtTranslator;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier};
use kvasir_wire::trtllm::decode;

fn block(name: u64, tokens: std::ops::Range<u32>, level: u32) -> String {
    let tokens =
        tokens.map(|t| format!(r#"{{"type":"unique_token","token_id":{t},"token_extra_id":0}}"#));
    let tokens = tokens.collect::<Vec<_>>().join(",");
    format!(
        r#"{{"type":"stored_block","block_hash":{name},"tokens":[{tokens}],"cache_level":{level},"priority":35,"mm_keys":[]}}"#
    )
}

fn event(id: u64, window: u64, data: &str) -> String {
    format!(r#"{{"event_id":{id},"data":{data},"window_size":{window}}}"#)
}

fn run(translator: &mut TrtTranslator, events: &[String]) -> (Vec<KvEvent>, Vec<Skip>) {
    let json = format!("[{}]", events.join(","));
    let (mut out, mut skipped) = (Vec::new(), Vec::new());
    for event in decode(json.as_bytes()).unwrap() {
        skipped.extend(translator.translate(&event, &mut out).err());
    }
    (out, skipped)
}

fn local(tokens: std::ops::Range<u32>) -> LocalHash {
    local_hashes(&tokens.collect::<Vec<_>>(), 4, &Scope::default())[0]
}

#[test]
fn a_session_becomes_index_events() {
    let mut translator = TrtTranslator::new(4);
    let created = event(
        0,
        64,
        r#"{"type":"created","num_blocks_per_cache_level":[8,2]}"#,
    );
    let blocks = [block(11, 1..5, 0), block(12, 5..9, 0), block(13, 9..11, 0)].join(",");
    let stored = format!(r#"{{"type":"stored","parent_hash":null,"blocks":[{blocks}]}}"#);
    let sliding = event(2, 16, r#"{"type":"removed","block_hashes":[11]}"#);
    let (out, skipped) = run(&mut translator, &[created, event(1, 64, &stored), sliding]);
    // The partly filled third block and the sliding window do not count.
    assert_eq!(skipped, [Skip::Shape, Skip::Group]);
    let first = StoredBlock {
        engine: EngineHash(11),
        local: local(1..5),
    };
    let second = StoredBlock {
        engine: EngineHash(12),
        local: local(5..9),
    };
    let expected = [
        KvEvent::Cleared { tier: None },
        KvEvent::Stored {
            tier: Tier::Device,
            parent: None,
            blocks: vec![first, second],
        },
    ];
    assert_eq!(out, expected);

    let moved = r#"{"type":"updated","block_hash":12,"cache_level":{"type":"event_diff","old_value":0,"new_value":1},"priority":null}"#;
    let (out, _) = run(&mut translator, &[event(3, 64, moved)]);
    let parent = Some(EngineHash(11));
    let expected = [
        KvEvent::Removed {
            tier: Tier::Device,
            blocks: vec![EngineHash(12)],
        },
        KvEvent::Stored {
            tier: Tier::HostPinned,
            parent,
            blocks: vec![second],
        },
    ];
    assert_eq!(out, expected);
}
