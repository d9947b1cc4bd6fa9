//! Messages of request planes: what is read is written back the same, pieces do not matter, limits are kept.

use bytes::{Bytes, BytesMut};
use kvasir_protocol::control::{ControlMessage, Handshake, Prologue, Word};
use kvasir_protocol::frame::{Ack, RequestFrame, TwoPart};
use kvasir_protocol::{
    Annotated, GenerateRequest, Item, Output, Payload, PayloadWriter, TokenFrame,
};
use kvasir_types::{Codec, RequestId};

pub(crate) const WORDS: &[&str] = &[
    "\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{1}",
    "complete_final",
    "data",
    "token_ids",
    "finish_reason",
    "stop_conditions",
    "max_tokens",
    "\"sentinel\"",
    "{\"error\":null}",
    "{\"subject\":\"00000000-0000-0000-0000-000000000007\"}",
    "Server overloaded: ",
];

/// Largest frame here.
const FRAME_MAX: usize = 2048;

pub(crate) fn check(input: &[u8]) -> bool {
    let bytes = Bytes::copy_from_slice(input);
    let framed = two_parts(input);
    requests(input);
    let mut acks = BytesMut::from(input);
    while let Ok(Some(ack)) = Ack::take(&mut acks) {
        assert_eq!(Ack::of_text(ack.text().as_bytes()), ack);
    }
    headers(input);
    let mut read = framed;
    for codec in [Codec::Json, Codec::MessagePack] {
        read |= payload(&Payload::new(codec, bytes.clone()));
    }
    read
}

/// Frames are the same whether their bytes come at once or one by one.
fn two_parts(input: &[u8]) -> bool {
    let mut whole = BytesMut::from(input);
    let mut found = Vec::new();
    let end = loop {
        match TwoPart::take(&mut whole, FRAME_MAX) {
            Ok(Some(frame)) => found.push(frame),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    for frame in &found {
        assert!(frame.wire_len() <= FRAME_MAX + 24);
        assert_eq!(TwoPart::decode(&frame.to_bytes()).as_ref(), Ok(frame));
        headers(&frame.header);
        payload(&Payload::new(Codec::MessagePack, frame.body.clone()));
    }
    let mut pieces = BytesMut::new();
    let mut again = Vec::new();
    for byte in input {
        pieces.extend_from_slice(&[*byte]);
        match TwoPart::take(&mut pieces, FRAME_MAX) {
            Ok(Some(frame)) => again.push(frame),
            Ok(None) => {}
            Err(error) => {
                assert_eq!(end, Err(error));
                break;
            }
        }
    }
    assert_eq!(again, found);
    !found.is_empty() && end.is_ok()
}

fn requests(input: &[u8]) {
    let mut buffer = BytesMut::from(input);
    while let Ok(Some(frame)) = RequestFrame::take(&mut buffer, FRAME_MAX) {
        let (Ok(path), Ok(payload)) = (
            std::str::from_utf8(&frame.path),
            TwoPart::decode(&frame.payload),
        ) else {
            continue;
        };
        let mut again = BytesMut::new();
        assert!(RequestFrame::encode(
            path,
            &frame.headers,
            &payload,
            &mut again
        ));
        let again = RequestFrame::take(&mut again, FRAME_MAX).ok().flatten();
        assert_eq!(again.map(|again| again.headers), Some(frame.headers));
    }
}

fn headers(input: &[u8]) {
    if let Ok(control) = ControlMessage::decode(input) {
        assert_eq!(ControlMessage::decode(&control.encode()), Ok(control));
    }
    if let Ok(handshake) = Handshake::decode(input) {
        assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
    }
    if let Ok(prologue) = Prologue::decode(input) {
        assert_eq!(Prologue::decode(&prologue.encode()), Ok(prologue));
    }
    if let Some(word) = Word::decode(input) {
        assert_eq!(word.encode(), input);
    }
}

fn payload(payload: &Payload) -> bool {
    let codec = payload.codec;
    let mut read = false;
    if let Ok(item) = Item::decode(codec, &payload.bytes) {
        assert_eq!(Item::decode(codec, &item.encode(codec)), Ok(item.clone()));
        if let Some(data) = &item.data {
            annotated(data);
            one_token(payload, data);
        }
        read = true;
    }
    annotated(payload);
    if let Ok(request) = GenerateRequest::decode(payload) {
        let again = request.encode(Codec::MessagePack);
        let read = GenerateRequest::decode(&again).map(|read| read.encode(Codec::MessagePack));
        assert_eq!(read, Ok(again));
        let ours = request.into_token_request(RequestId(1), &[]);
        let _ = GenerateRequest::of_as(&ours, codec).encode(codec);
    }
    read
}

/// A frame that is known by its bytes says what it says when it is read.
fn one_token(body: &Payload, data: &Payload) {
    let Ok(item) = Annotated::decode(data) else {
        return;
    };
    let said = item.data.as_ref().map(|output| output.token_ids.clone());
    if let Some(known) = TokenFrame::of(body.codec, &body.bytes, &item) {
        assert_eq!(known.token(&body.bytes).map(|token| vec![token]), said);
    }
    let plain = Annotated::of_output(Output {
        token_ids: vec![7],
        ..Output::default()
    });
    let usual = Item::encode_data(Codec::MessagePack, |writer| plain.write(writer));
    let usual = TokenFrame::of(Codec::MessagePack, &usual, &plain);
    if let Some(token) = usual.and_then(|usual| usual.token(&body.bytes)) {
        assert_eq!(Some(vec![token]), said);
    }
}

fn annotated(payload: &Payload) {
    let Ok(item) = Annotated::decode(payload) else {
        return;
    };
    let mut writer = PayloadWriter::new(Codec::MessagePack);
    item.write(&mut writer);
    let mut again = PayloadWriter::new(Codec::MessagePack);
    let written = writer.finish();
    match Annotated::decode(&written) {
        Ok(read) => read.write(&mut again),
        Err(error) => panic!("what was written cannot be read: {error}"),
    }
    assert_eq!(again.finish(), written);
    if let Some(output) = item.data {
        let _ = output.into_item();
    }
}
