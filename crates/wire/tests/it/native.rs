//! Dynamo's event plane, byte for byte.

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use kvasir_wire::DecodeError;
use kvasir_wire::native::{ActiveLoad, Envelope, RecoveryReply, RecoveryRequest, RouterEvent};
use kvasir_wire::value::Value;

use crate::captures::{bytes, lines, messages};

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
            let payload = Value::from_msgpack(&envelope.payload).unwrap();
            events += RouterEvent::list_from_value(&payload).unwrap().len();
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
