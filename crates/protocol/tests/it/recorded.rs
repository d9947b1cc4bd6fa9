//! Every recorded message is read and written again, byte for byte.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use kvasir_msgpack::Value;
use kvasir_protocol::control::{ControlMessage, Handshake, Prologue, Word};
use kvasir_protocol::frame::{Ack, FRAME_BYTES_MAX, RequestFrame, TwoPart};
use kvasir_protocol::{Annotated, GenerateRequest, Item, Payload, PayloadWriter};
use kvasir_types::{Codec, RequestId};
use serde_json::Value as Json;

const RECORDED: &str = include_str!("../../../../testdata/dynamo-wire/tcp.jsonl");

/// What was recorded where, by kind.
fn recorded(kind: &str) -> impl Iterator<Item = (String, Bytes)> {
    let lines = RECORDED.lines().map(|line| {
        let line: Json = serde_json::from_str(line).unwrap();
        let text = |name: &str| line[name].as_str().unwrap().to_owned();
        let bytes = STANDARD.decode(text("b64")).unwrap();
        (text("kind"), text("in"), Bytes::from(bytes))
    });
    let lines = lines.filter(move |(found, ..)| found == kind);
    lines.map(|(_, place, bytes)| (place, bytes))
}

fn take_two_part(bytes: &Bytes) -> TwoPart {
    let mut buffer = BytesMut::from(&bytes[..]);
    let frame = TwoPart::take(&mut buffer, FRAME_BYTES_MAX)
        .unwrap()
        .unwrap();
    assert!(buffer.is_empty());
    assert_eq!(frame.to_bytes(), bytes);
    frame
}

/// The control message and the payload of a request.
fn check_request(payload: &TwoPart, kinds: &mut BTreeMap<&'static str, usize>) {
    let control = ControlMessage::decode(&payload.header).unwrap();
    assert_eq!(control.encode(), payload.header);
    assert_eq!(control.home.context, control.id);
    let body = Payload::new(control.codec, payload.body.clone());
    let value = body.value().unwrap();
    if value.get("token_ids").is_none() {
        *kinds.entry("query").or_default() += 1;
        assert_eq!(Payload::of_value(control.codec, &value), body);
        return;
    }
    *kinds.entry("generate").or_default() += 1;
    let request = GenerateRequest::decode(&body).unwrap();
    assert_eq!(request.encode(control.codec), body);
    // What is left out of our own form is only how the frontend chose the worker of an answer whose prompt was computed elsewhere.
    let id = RequestId::parse(&control.id).unwrap();
    let ours = request.clone().into_token_request(id, &control.metadata);
    let again = GenerateRequest::of_as(&ours, control.codec);
    assert_eq!(
        (&again.token_ids, &again.stop),
        (&request.token_ids, &request.stop)
    );
    let chosen = request.rest("router_config_override").unwrap();
    if chosen.value().unwrap() == Value::Nil {
        assert_eq!(again.encode(control.codec), body, "{}", control.id);
    }
    // The same in JSON.
    let json = request.encode(Codec::Json);
    let read = GenerateRequest::decode(&json).unwrap();
    assert_eq!(read.into_token_request(id, &control.metadata), ours);
}

#[test]
fn every_request_is_read_and_written_again() {
    let mut kinds = BTreeMap::new();
    for (place, bytes) in recorded("request") {
        let mut buffer = BytesMut::from(&bytes[..]);
        let frame = RequestFrame::take(&mut buffer, FRAME_BYTES_MAX);
        let frame = frame.unwrap().unwrap();
        let path = std::str::from_utf8(&frame.path).unwrap();
        assert!(buffer.is_empty() && path.contains('/'), "{place}");
        let payload = TwoPart::decode(&frame.payload).unwrap();
        let mut again = BytesMut::new();
        assert!(RequestFrame::encode(
            path,
            &frame.headers,
            &payload,
            &mut again
        ));
        assert_eq!(again, bytes);
        check_request(&payload, &mut kinds);
    }
    for (_, bytes) in recorded("two_part") {
        check_request(&take_two_part(&bytes), &mut kinds);
    }
    assert!(kinds["query"] >= 10 && kinds["generate"] >= 60, "{kinds:?}");
}

#[test]
fn every_ack_is_read_and_written_again() {
    let mut acks = Vec::new();
    for (_, bytes) in recorded("ack") {
        if bytes.is_empty() {
            // NATS: the reply itself is the acknowledgement.
            continue;
        }
        let mut buffer = BytesMut::from(&bytes[..]);
        let ack = Ack::take(&mut buffer).unwrap().unwrap();
        let mut again = BytesMut::new();
        ack.encode(&mut again);
        assert_eq!(again, bytes);
        acks.push(ack);
    }
    assert!(acks.contains(&Ack::Accepted) && acks.contains(&Ack::Overloaded));
}

/// The headers and items of answers.
fn check_frame(place: &str, frame: &TwoPart) -> &'static str {
    // Our own small worker in Python writes spaces into its JSON.
    let is_exact = place != "interop-worker";
    if let Some(word) = Word::decode(&frame.header) {
        assert_eq!(word.encode(), frame.header);
        return "word";
    }
    if let Ok(handshake) = Handshake::decode(&frame.header) {
        assert!(!is_exact || handshake.encode() == frame.header);
        return "handshake";
    }
    if !frame.header.is_empty() {
        let prologue = Prologue::decode(&frame.header).unwrap();
        assert!(!is_exact || prologue.encode() == frame.header);
        return "prologue";
    }
    let item = Item::decode(Codec::MessagePack, &frame.body).unwrap();
    assert_eq!(item.encode(Codec::MessagePack), frame.body);
    let Some(data) = item.data else {
        assert!(item.complete_final);
        return "final";
    };
    if data.value().unwrap().get("TreeDump").is_some() {
        return "dump";
    }
    let annotated = Annotated::decode(&data).unwrap();
    let mut writer = PayloadWriter::new(Codec::MessagePack);
    annotated.write(&mut writer);
    let again = writer.finish();
    if is_exact {
        assert_eq!(again, data);
    }
    assert_eq!(Annotated::decode(&again), Ok(annotated.clone()));
    let mut json = PayloadWriter::new(Codec::Json);
    annotated.write(&mut json);
    let json = Annotated::decode(&json.finish()).unwrap();
    let item = |annotated: Annotated| annotated.data.map(|output| output.into_item());
    assert_eq!(item(json), item(annotated));
    "output"
}

#[test]
fn every_frame_of_an_answer_is_read_and_written_again() {
    let mut kinds = BTreeMap::new();
    for (place, bytes) in recorded("frame") {
        let kind = check_frame(&place, &take_two_part(&bytes));
        *kinds.entry(kind).or_insert(0) += 1;
    }
    for kind in ["word", "handshake", "prologue", "final", "dump", "output"] {
        assert!(kinds.contains_key(kind), "{kind}: {kinds:?}");
    }
}
