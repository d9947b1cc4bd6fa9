//! Tests of stream framing: any cut of the bytes gives the same events.

use proptest::prelude::*;

use super::*;

fn all(pieces: &[&[u8]]) -> (Vec<Event>, Bytes) {
    let mut parser = EventParser::new(1 << 20);
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(Bytes::copy_from_slice(piece));
        while let Some(event) = parser.next_event().unwrap() {
            events.push(event);
        }
    }
    (events, parser.take_rest())
}

const STREAM: &[u8] = b"event: note\n: hi\n\ndata: {\"a\":\"\xc3\xa9\"}\r\n\r\ndata:one\ndata: two\n\n: keep\n\ndata: [DONE]\n\nrest";

/// Every split into two and three pieces gives the same events and the same bytes.
#[test]
fn events_do_not_depend_on_where_the_stream_is_cut() {
    let (whole, rest) = all(&[STREAM]);
    assert_eq!(whole.len(), 5);
    assert_eq!(&rest[..], b"rest");
    let one_by_one: Vec<&[u8]> = STREAM.chunks(1).collect();
    assert_data(&all(&one_by_one).0);
    for i in 0..=STREAM.len() {
        for j in i..=STREAM.len() {
            let (events, rest) = all(&[&STREAM[..i], &STREAM[i..j], &STREAM[j..]]);
            assert_eq!(&rest[..], b"rest", "{i} {j}");
            assert_data(&events);
            let joined: Vec<u8> = events.iter().flat_map(|e| e.raw.to_vec()).collect();
            assert_eq!([&joined[..], b"rest"].concat(), STREAM);
        }
    }
}

fn assert_data(events: &[Event]) {
    let data: Vec<_> = events
        .iter()
        .map(|e| e.data().map(|d| String::from_utf8(d.into_owned()).unwrap()))
        .collect();
    let want = [
        None,
        Some("{\"a\":\"é\"}"),
        Some("one\ntwo"),
        None,
        Some("[DONE]"),
    ];
    assert_eq!(data, want.map(|w| w.map(str::to_owned)));
    assert_eq!(events[0].name(), Some("note"));
    assert!(events[4].is_done());
}

/// The limit is the longest event that passes.
#[test]
fn an_event_at_the_limit_passes_and_one_byte_more_does_not() {
    let event = b"data: 123\n\n";
    let mut exact = EventParser::new(event.len());
    exact.push(Bytes::from_static(event));
    assert!(exact.next_event().unwrap().is_some());
    let mut small = EventParser::new(event.len() - 1);
    small.push(Bytes::from_static(event));
    assert_eq!(small.next_event(), Err(SseError { limit: 10 }));
    let mut endless = EventParser::new(10);
    for _ in 0..3 {
        endless.push(Bytes::from_static(b"datad"));
        let _ = endless.next_event();
    }
    assert!(endless.next_event().is_err(), "an event without an end");
}

#[test]
fn written_frames_read_back() {
    let mut out = BytesMut::new();
    write_annotation(&mut out, "token_ids", "[1,2]");
    write_comment(&mut out, "still\nhere");
    write_done(&mut out);
    assert_eq!(
        &out[..],
        b"event: token_ids\n: \"[1,2]\"\n\n: still here\n\ndata: [DONE]\n\n"
    );
    assert_eq!(all(&[&out]).0.len(), 3);
}

proptest! {
    /// Hostile mixes of line ends: no byte is lost and the data are those of the unsplit stream.
    #[test]
    fn any_line_ends_any_cuts(
        text in proptest::collection::vec(prop_oneof![
            Just("\n"), Just("\r"), Just("\r\n"), Just("data: x"), Just("event: e"), Just(":c"), Just("data"),
        ], 0..30),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = text.concat().into_bytes();
        let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&[u8]> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let (events, rest) = all(&pieces);
        let joined: Vec<u8> = events.iter().flat_map(|e| e.raw.to_vec()).chain(rest).collect();
        prop_assert_eq!(&joined, &text);
        let data = |events: &[Event]| -> Vec<_> {
            events.iter().filter_map(|e| e.data().map(Cow::into_owned)).collect()
        };
        prop_assert_eq!(data(&events), data(&all(&[&text]).0));
    }
}
