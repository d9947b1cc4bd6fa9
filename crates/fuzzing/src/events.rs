//! Messages of engines' event sockets: what is refused leaves nothing behind, and the quick reader agrees with the plain one.

use kvasir_kv_events::{TranslateOptions, Translator};
use kvasir_msgpack::{Reader, Value};
use kvasir_wire::engine::{self, Batch};
use kvasir_wire::frame::{parse_live, parse_replay, parse_replay_request};
use kvasir_wire::native::{Encoding, Envelope, RouterEvent, decode_router_events};
use kvasir_wire::trtllm;

/// A message has at most so many parts here.
const PARTS_MAX: usize = 6;

pub(crate) fn check(input: &[u8]) -> bool {
    let mut batch = Batch::new();
    let decoded = batch.decode(input).is_ok();
    if decoded {
        let options = TranslateOptions {
            block_size: 32,
            image_token: Some(9),
        };
        Translator::new(options).translate(&batch, |_| {});
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
        && parts.len() < PARTS_MAX
    {
        let (part, after) = after.split_at(usize::from(len % 16).min(after.len()));
        parts.push(part);
        rest = after;
    }
    let _ = parse_live(&parts);
    let _ = parse_replay(&parts);
    let _ = parse_replay_request(input);
}
