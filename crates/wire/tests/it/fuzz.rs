//! Bytes that nobody sent: recorded payloads damaged at random, and pure noise. Seeded and bounded, so it
//! runs as an ordinary test; nothing may panic, and a refused payload must leave an empty buffer.

use kvasir_types::Rng;
use kvasir_wire::engine::{self, Batch};
use kvasir_wire::frame::{parse_live, parse_replay, parse_replay_request};
use kvasir_wire::msgpack::Reader;
use kvasir_wire::native::{Encoding, Envelope, RouterEvent, decode_router_events};
use kvasir_wire::value::Value;
use kvasir_wire::{TranslateOptions, Translator, trtllm};

use crate::captures::{SESSIONS, bytes, lines, messages};

fn corpus() -> Vec<Vec<u8>> {
    let mut corpus = Vec::new();
    for session in SESSIONS {
        let live = messages(&format!("vllm-kv-events/{session}/pub_frames.jsonl"));
        corpus.extend(live.into_iter().map(|mut parts| parts.remove(2)));
    }
    let releases = lines("vllm-kv-events/encoded-by-release/payloads.jsonl");
    corpus.extend(releases.iter().map(|line| bytes(&line["payload_b64"])));
    for mut parts in messages("dynamo-events/zmq.jsonl") {
        corpus.push(parts.remove(3));
    }
    corpus
}

fn damage(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..=rng.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = rng.below(bytes.len() as u64) as usize;
        match rng.below(5) {
            0 => bytes[at] = rng.next_u64() as u8,
            1 => bytes[at] ^= 1 << rng.below(8),
            2 => bytes.truncate(at),
            3 => bytes.insert(at, rng.next_u64() as u8),
            _ => drop(bytes.drain(at..bytes.len().min(at + 1 + rng.below(8) as usize))),
        }
    }
}

fn feed(input: &[u8], batch: &mut Batch, translator: &mut Translator) -> bool {
    let decoded = batch.decode(input).is_ok();
    if decoded {
        translator.translate(batch, |_| {});
    } else {
        assert!(batch.is_empty() && batch.rank().is_none());
    }
    let _ = engine::peek_time(input);
    frames(input);
    let _ = Reader::new(input).skip();
    if let Ok(envelope) = Envelope::decode_prefixed(input) {
        router_events(&envelope.payload);
    }
    router_events(input);
    let _ = Value::from_msgpack(input);
    let _ = RouterEvent::from_msgpack(input);
    let _ = RouterEvent::from_json(input);
    let _ = trtllm::decode(input);
    decoded
}

/// What the tree can read is read without it, too, and means the same.
fn router_events(payload: &[u8]) {
    let mut events = Vec::new();
    let read = decode_router_events(Encoding::MessagePack, payload, &mut events);
    let value = Value::from_msgpack(payload);
    match value.and_then(|value| RouterEvent::list_from_value(&value)) {
        Ok(expected) => assert_eq!((read, events), (Ok(()), expected)),
        Err(_) => assert!(read.is_ok() || events.is_empty()),
    }
}

/// The same bytes as the parts of messages, cut where the bytes themselves say.
fn frames(input: &[u8]) {
    let mut parts: Vec<&[u8]> = Vec::new();
    let mut rest = input;
    while let Some((&len, after)) = rest.split_first()
        && parts.len() < 6
    {
        let (part, after) = after.split_at(usize::from(len % 16).min(after.len()));
        parts.push(part);
        rest = after;
    }
    let _ = parse_live(&parts);
    let _ = parse_replay(&parts);
    let _ = parse_replay_request(input);
}

#[test]
fn damaged_and_random_bytes_are_refused_without_panic() {
    let corpus = corpus();
    let mut rng = Rng::new(7);
    let mut batch = Batch::new();
    let options = TranslateOptions {
        block_size: 32,
        image_token: Some(9),
    };
    let mut translator = Translator::new(options);
    let mut refused = 0;
    for round in 0..20_000u64 {
        let mut input = corpus[rng.below(corpus.len() as u64) as usize].clone();
        if round % 10 == 0 {
            input = (0..rng.below(64)).map(|_| rng.next_u64() as u8).collect();
        } else {
            damage(&mut rng, &mut input);
        }
        refused += u64::from(!feed(&input, &mut batch, &mut translator));
    }
    assert!(
        refused > 5_000,
        "only {refused} of 20000 were refused: the damage does nothing"
    );
}

/// Nesting costs no stack: a megabyte of open arrays is refused.
#[test]
fn deep_nesting_is_refused() {
    let deep = vec![0x91; 1 << 20];
    assert!(Reader::new(&deep).skip().is_err());
    assert!(Value::from_msgpack(&deep).is_err());
    assert!(Batch::new().decode(&deep).is_err());
    let json = "[".repeat(1 << 20);
    assert!(Value::from_json(json.as_bytes()).is_err());
}
