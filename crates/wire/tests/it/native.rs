//! Dynamo's event plane, byte for byte.

use std::collections::BTreeMap;

use proptest::prelude::*;

use kvasir_msgpack::{DecodeError, Value};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use kvasir_wire::native::{
    ActiveLoad, Encoding, Envelope, ForwardPass, RecoveryReply, RecoveryRequest, ReplicaMessage,
    Residency, RouterEvent, SequenceChange, SequenceEvent, SessionBinding, Topic,
    decode_router_events, encode_router_events,
};

use crate::captures::{bytes, lines, messages};

/// Without a tree.
fn direct(payload: &[u8]) -> Result<Vec<RouterEvent>, DecodeError> {
    let mut events = Vec::new();
    decode_router_events(Encoding::MessagePack, payload, &mut events)?;
    Ok(events)
}

/// A payload of the event plane as what it says, written again.
fn again(envelope: &Envelope) -> (Topic, Vec<u8>) {
    let topic = Topic::named(&envelope.topic).unwrap();
    let payload = Value::from_msgpack(&envelope.payload).unwrap();
    let mut again = Vec::new();
    match topic {
        Topic::KvEvents => {
            let list = RouterEvent::list_from_value(&payload).unwrap();
            assert_eq!(direct(&envelope.payload).as_ref(), Ok(&list));
            let consecutive = |pair: &[RouterEvent]| pair[1].id == pair[0].id + 1;
            assert!(list.windows(2).all(consecutive), "{list:?}");
            encode_router_events(Encoding::MessagePack, &list, &mut again);
        }
        Topic::KvMetrics => {
            let load = ActiveLoad::from_value(&payload).unwrap();
            load.to_value().to_msgpack(&mut again);
        }
        Topic::ActiveSequences => {
            let list = SequenceEvent::list_from_value(&payload).unwrap();
            let value = match payload.get("events") {
                Some(_) => SequenceEvent::batch_to_value(&list),
                None => list[0].to_value(),
            };
            value.to_msgpack(&mut again);
        }
        Topic::SessionAffinity => {
            let binding = SessionBinding::from_value(&payload).unwrap();
            binding.to_value().to_msgpack(&mut again);
        }
        Topic::ForwardPass => {
            let step = ForwardPass::from_value(&payload).unwrap();
            step.to_value().to_msgpack(&mut again);
        }
        Topic::Replicas => panic!("ours alone"),
    }
    (topic, again)
}

#[test]
fn every_recorded_message_decodes_and_encodes_back_to_its_bytes() {
    let mut topics = BTreeMap::new();
    for parts in messages("dynamo-events/zmq.jsonl") {
        let envelope = Envelope::decode_prefixed(&parts[3]).unwrap();
        assert_eq!(envelope.topic.as_bytes(), parts[0]);
        assert_eq!(envelope.publisher.to_be_bytes(), parts[1][..]);
        assert_eq!(envelope.sequence.to_be_bytes(), parts[2][..]);
        let mut written = Vec::new();
        envelope.encode_prefixed(&mut written);
        assert_eq!(written, parts[3]);
        let (topic, payload) = again(&envelope);
        assert_eq!(payload, envelope.payload, "{topic}");
        *topics.entry(topic).or_insert(0) += 1;
    }
    assert_eq!(topics.len(), 5, "{topics:?}");
    assert!(topics.values().all(|count| *count >= 2), "{topics:?}");
}

#[test]
fn every_recorded_nats_message_decodes_and_encodes_back_to_its_bytes() {
    let mut topics = BTreeMap::new();
    for line in lines("dynamo-events/nats-event-plane.jsonl") {
        let Some(body) = line.get("b64") else {
            continue;
        };
        let (body, mut written) = (bytes(body), Vec::new());
        let envelope = Envelope::decode(&body).unwrap();
        envelope.encode(&mut written);
        assert_eq!(written, body);
        let (topic, payload) = again(&envelope);
        assert_eq!(payload, envelope.payload, "{topic}");
        *topics.entry(topic).or_insert(0) += 1;
    }
    assert_eq!(topics.len(), 5, "{topics:?}");
}

/// The questions and answers of two routers' start, recorded: empty and filled dumps. Bodies of two-part frames.
#[test]
fn recorded_recovery_encodes_back_to_its_bytes() {
    let (mut questions, mut dumped) = (0, 0);
    for line in lines("dynamo-events/recovery.jsonl") {
        let body = bytes(&line["body"]);
        let mut written = Vec::new();
        if line["kind"] == "question" {
            let question = RecoveryRequest::decode(Encoding::MessagePack, &body).unwrap();
            assert_eq!(
                question,
                RecoveryRequest::new(question.rank, question.start)
            );
            question.encode(Encoding::MessagePack, &mut written);
            questions += 1;
        } else {
            let reply = RecoveryReply::decode(Encoding::MessagePack, &body).unwrap();
            let tree = Value::from_msgpack(&body).unwrap();
            assert_eq!(RecoveryReply::from_value(&tree).as_ref(), Ok(&reply));
            reply.encode(Encoding::MessagePack, &mut written);
            match &reply {
                RecoveryReply::TreeDump { events, .. } => dumped += events.len(),
                RecoveryReply::Events { events, .. } => assert!(!events.is_empty()),
                _ => {}
            }
        }
        assert_eq!(written, body, "{line}");
    }
    assert!(questions > 3 && dumped > 10, "{questions} {dumped}");
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
    let read = |json: &str| {
        let reply = RecoveryReply::decode(Encoding::Json, json.as_bytes())?;
        for encoding in [Encoding::Json, Encoding::MessagePack] {
            let mut written = Vec::new();
            reply.encode(encoding, &mut written);
            assert_eq!(
                RecoveryReply::decode(encoding, &written).as_ref(),
                Ok(&reply)
            );
        }
        Ok::<_, DecodeError>(reply)
    };
    let dump = read(r#"{"TreeDump":{"events":[],"last_event_id":9,"reset_scope":"all"}}"#);
    assert_eq!(
        dump,
        Ok(RecoveryReply::TreeDump {
            events: vec![],
            last: 9
        })
    );
    let new = read(r#"{"TooNew":{"requested_start":5,"requested_end":4,"newest_available":4}}"#);
    let (start, end, newest) = (5, 4, 4);
    assert_eq!(new, Ok(RecoveryReply::TooNew { start, end, newest }));
    let range = read(r#"{"InvalidRange":{"start_id":3,"end_id":1}}"#);
    let (start, end) = (3, 1);
    assert_eq!(range, Ok(RecoveryReply::InvalidRange { start, end }));
    let failed = read(r#"{"TreeDumpFailed":{"last_event_id":7,"message":"no room"}}"#);
    let message = "no room".to_owned();
    assert_eq!(
        failed,
        Ok(RecoveryReply::TreeDumpFailed { last: 7, message })
    );
    let wrong = read(r#"{"Error":"worker mismatch"}"#);
    assert_eq!(
        wrong,
        Ok(RecoveryReply::Error("worker mismatch".to_owned()))
    );
    assert!(read(r#"{"Later":{}}"#).is_err());
    assert!(read("[]").is_err());
}

/// Only worker and rank must be there.
#[test]
fn a_question_may_leave_out_all_but_whom_it_is_about() {
    let read = |json: &str| RecoveryRequest::decode(Encoding::Json, json.as_bytes());
    let short = read(r#"{"worker_id":1,"dp_rank":2}"#).unwrap();
    assert_eq!((short.rank, short.start), (WorkerRank::new(1, 2), None));
    assert!(!short.takes_dump_failed);
    assert!(read(r#"{"worker_id":1}"#).is_err());
    assert!(read(r#"{"worker_id":1,"dp_rank":0,"start_event_id":"x"}"#).is_err());
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
        let (mut tree, mut payload) = (Vec::new(), Vec::new());
        list.to_msgpack(&mut tree);
        encode_router_events(Encoding::MessagePack, &events, &mut payload);
        prop_assert_eq!(&tree, &payload);
        for reply in [
            RecoveryReply::Events { events: events.clone(), last: 7 },
            RecoveryReply::TreeDump { events: events.clone(), last: u64::MAX },
        ] {
            let (mut tree, mut direct) = (Vec::new(), Vec::new());
            reply.to_value().to_msgpack(&mut tree);
            reply.encode(Encoding::MessagePack, &mut direct);
            prop_assert_eq!(&tree, &direct);
            prop_assert_eq!(RecoveryReply::decode(Encoding::MessagePack, &tree), Ok(reply));
        }
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

#[test]
fn what_replicas_ask_each_other_reads_as_it_was_written() {
    let request = SequenceEvent {
        request: "r".to_owned(),
        rank: WorkerRank::new(u64::MAX, 3),
        router: 7,
        lora: None,
        change: SequenceChange::Freed,
    };
    let session = SessionBinding {
        session: "s".to_owned(),
        rank: WorkerRank::new(1, 0),
        sequence: u64::MAX,
        writer: 7,
    };
    let state = ReplicaMessage::State {
        from: u64::MAX,
        to: 9,
        scope: "a/b/c".to_owned(),
        last: true,
        requests: vec![request],
        sessions: vec![session],
    };
    for message in [ReplicaMessage::Ask { from: 7 }, state] {
        let mut bytes = Vec::new();
        message.to_value().to_msgpack(&mut bytes);
        let value = Value::from_msgpack(&bytes).unwrap();
        assert_eq!(ReplicaMessage::from_value(&value), Ok(message));
        for end in 0..bytes.len() {
            assert!(Value::from_msgpack(&bytes[..end]).is_err());
        }
    }
    let half = Value::from_json(br#"{"from":1,"to":2,"requests":[]}"#).unwrap();
    assert!(ReplicaMessage::from_value(&half).is_err());
}
