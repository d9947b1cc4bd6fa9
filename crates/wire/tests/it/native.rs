//! Dynamo's event plane, byte for byte.

use proptest::prelude::*;

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use kvasir_wire::DecodeError;
use kvasir_wire::native::{
    ActiveLoad, Encoding, Envelope, RecoveryReply, RecoveryRequest, Residency, RouterEvent,
    decode_router_events,
};
use kvasir_wire::value::Value;

use crate::captures::{bytes, lines, messages};

/// Without a tree.
fn direct(payload: &[u8]) -> Result<Vec<RouterEvent>, DecodeError> {
    let mut events = Vec::new();
    decode_router_events(Encoding::MessagePack, payload, &mut events)?;
    Ok(events)
}

#[test]
fn every_recorded_message_decodes_and_encodes_back_to_its_bytes() {
    let (mut events, mut loads) = (0, 0);
    for parts in messages("dynamo-events/zmq.jsonl") {
        let envelope = Envelope::decode_prefixed(&parts[3]).unwrap();
        assert_eq!(envelope.topic.as_bytes(), parts[0]);
        assert_eq!(envelope.publisher.to_be_bytes(), parts[1][..]);
        assert_eq!(envelope.sequence.to_be_bytes(), parts[2][..]);
        let mut again = Vec::new();
        envelope.encode_prefixed(&mut again);
        assert_eq!(again, parts[3]);
        let payload = Value::from_msgpack(&envelope.payload).unwrap();
        let mut again = Vec::new();
        match envelope.topic.as_str() {
            "kv-events" => {
                let list = RouterEvent::list_from_value(&payload).unwrap();
                assert_eq!(direct(&envelope.payload).as_ref(), Ok(&list));
                events += list.len();
                Value::List(list.iter().map(RouterEvent::to_value).collect())
                    .to_msgpack(&mut again);
            }
            "kv_metrics" => {
                loads += 1;
                ActiveLoad::from_value(&payload)
                    .unwrap()
                    .to_value()
                    .to_msgpack(&mut again);
            }
            _ => continue,
        }
        assert_eq!(again, envelope.payload);
    }
    assert!(
        events > 50 && loads > 10,
        "{events} events, {loads} load reports"
    );
}

#[test]
fn every_recorded_nats_message_decodes() {
    let mut events = 0;
    for line in lines("dynamo-events/nats-event-plane.jsonl") {
        let Some(body) = line.get("b64") else {
            continue;
        };
        let envelope = Envelope::decode(&bytes(body)).unwrap();
        if envelope.topic == "kv-events" {
            let list = direct(&envelope.payload).unwrap();
            let consecutive = |pair: &[RouterEvent]| pair[1].id == pair[0].id + 1;
            assert!(list.windows(2).all(consecutive), "{list:?}");
            events += list.len();
        }
    }
    assert!(events > 5, "{events}");
}

/// The form that the documentation shows, and the defaults of older releases.
#[test]
fn json_events_have_the_old_defaults() {
    let old = br#"{"worker_id":123,"event":{"event_id":7,"data":{"stored":{"parent_hash":null,
        "blocks":[{"block_hash":18446744073709551615,"tokens_hash":222}]}}}}"#;
    let event = RouterEvent::from_json(old).unwrap();
    let block = StoredBlock {
        engine: EngineHash(u64::MAX),
        local: LocalHash(222),
    };
    assert_eq!(event.rank, WorkerRank::new(123, 0));
    assert_eq!(event.id, 7);
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        parent: None,
        blocks: vec![block],
    };
    assert_eq!(event.event, stored);

    let clear = |domain: &str| {
        let json = format!(
            r#"{{"worker_id":1,"storage_tier":"disk",{domain}"event":{{"event_id":1,"dp_rank":2,"data":"cleared"}}}}"#
        );
        RouterEvent::from_json(json.as_bytes()).map(|event| event.event)
    };
    assert_eq!(clear(""), Ok(KvEvent::Cleared { tier: None }));
    let worker = clear(r#""residency_domain":"worker","#);
    assert_eq!(
        worker,
        Ok(KvEvent::Cleared {
            tier: Some(Tier::Disk)
        })
    );
    let null = clear(r#""residency_domain":null,"#);
    assert_eq!(
        null,
        Err(DecodeError::Range {
            field: "residency_domain"
        })
    );
}

#[test]
fn recovery_answers_are_told_apart() {
    let read = |json: &str| RecoveryReply::from_value(&Value::from_json(json.as_bytes()).unwrap());
    let dump = read(r#"{"TreeDump":{"events":[],"last_event_id":9,"reset_scope":"all"}}"#);
    assert_eq!(
        dump,
        Ok(RecoveryReply::TreeDump {
            events: vec![],
            last: 9
        })
    );
    let new = read(r#"{"TooNew":{"requested_start":5,"requested_end":4,"newest_available":4}}"#);
    assert_eq!(new, Ok(RecoveryReply::TooNew { newest: 4 }));
    let wrong = read(r#"{"Error":"worker mismatch"}"#);
    assert_eq!(
        wrong,
        Ok(RecoveryReply::Refused {
            reason: "worker mismatch".to_owned()
        })
    );
    assert!(read(r#"{"Later":{}}"#).is_err());
    let request = RecoveryRequest {
        rank: WorkerRank::new(1, 0),
        start: Some(2),
    };
    assert_eq!(
        request.to_value().get("start_event_id"),
        Some(&Value::Uint(2))
    );
}

fn an_event() -> impl Strategy<Value = RouterEvent> {
    let tiers = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];
    let residencies = [None, Some(Residency::Worker), Some(Residency::CacheOwner)];
    let block = any::<(u64, u64)>().prop_map(|(engine, local)| StoredBlock {
        engine: EngineHash(engine),
        local: LocalHash(local),
    });
    let blocks = prop::collection::vec(block, 0..9);
    let numbers = (any::<u64>(), any::<u32>(), any::<u64>());
    let chain = (
        any::<Option<u64>>(),
        any::<Option<u64>>(),
        blocks,
        0..3usize,
    );
    let places = (
        prop::sample::select(tiers.to_vec()),
        prop::sample::select(residencies.to_vec()),
    );
    (numbers, chain, places).prop_map(
        |((worker, rank, id), (parent, position, blocks, kind), (tier, residency))| {
            let names = blocks.iter().map(|block| block.engine).collect();
            let event = match kind {
                0 => KvEvent::Stored {
                    tier,
                    parent: parent.map(EngineHash),
                    blocks,
                },
                1 => KvEvent::Removed {
                    tier,
                    blocks: names,
                },
                _ => KvEvent::Cleared {
                    tier: residency.map(|_| tier),
                },
            };
            RouterEvent {
                rank: WorkerRank::new(worker, rank),
                id,
                residency,
                position: position.filter(|_| kind == 0),
                event,
            }
        },
    )
}

/// The same value with the fields of its maps turned around by `turn`, and one more that nobody knows.
fn reordered(value: &Value, turn: usize) -> Value {
    match value {
        Value::List(items) => Value::List(items.iter().map(|v| reordered(v, turn)).collect()),
        Value::Map(pairs) => {
            let pairs = pairs
                .iter()
                .map(|(name, v)| (name.clone(), reordered(v, turn)));
            let mut pairs: Vec<_> = pairs.collect();
            pairs.push(("state_source".to_owned(), Value::List(vec![Value::Nil])));
            let by = turn % pairs.len();
            pairs.rotate_left(by);
            Value::Map(pairs)
        }
        other => other.clone(),
    }
}

proptest! {
    /// Both readers, both encodings, any order of fields: one answer.
    #[test]
    fn every_way_of_reading_gives_the_same_events(
        events in prop::collection::vec(an_event(), 0..5),
        turn in 0usize..7,
    ) {
        let list = Value::List(events.iter().map(RouterEvent::to_value).collect());
        let list = reordered(&list, turn);
        let mut payload = Vec::new();
        list.to_msgpack(&mut payload);
        prop_assert_eq!(RouterEvent::list_from_value(&list), Ok(events.clone()));
        prop_assert_eq!(direct(&payload), Ok(events.clone()));
        let (json, mut read) = (list.to_json().to_string(), Vec::new());
        decode_router_events(Encoding::Json, json.as_bytes(), &mut read).unwrap();
        prop_assert_eq!(read, events);
        for end in 0..payload.len() {
            prop_assert!(direct(&payload[..end]).is_err());
        }
    }
}

/// What was read before an error is not there after it; what was there before the call is.
#[test]
fn a_refused_payload_leaves_nothing_behind() {
    let good = br#"{"worker_id":1,"event":{"event_id":1,"data":"cleared"}}"#;
    let mut events = Vec::new();
    decode_router_events(Encoding::Json, good, &mut events).unwrap();
    let good = events[0].to_value();
    let (mut payload, bad) = (Vec::new(), Value::Nil);
    Value::List(vec![good, bad]).to_msgpack(&mut payload);
    assert!(decode_router_events(Encoding::MessagePack, &payload, &mut events).is_err());
    assert_eq!(events.len(), 1);
}
