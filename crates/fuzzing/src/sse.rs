//! Server-sent events: nothing is lost or added, events are the same however their bytes come, and as a second reader finds them.

use bytes::Bytes;
use kvasir_openai::resume::Progress;
use kvasir_openai::{Event, EventParser, find_usage, without_usage};
use serde_json::Value;

use crate::pieces::ways;

pub(crate) const WORDS: &[&str] = &[
    "data: ",
    "data:",
    "event: error\n",
    "\n\n",
    "\r\n\r\n",
    "\r",
    ": comment\n",
    "data: [DONE]\n\n",
    "{\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}",
    "\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}",
    "\"usage\":null",
    "\"error\":{\"code\":500}",
    "{\"usage\":",
];

/// The first byte is the limit of an event, in units of 32 bytes.
pub(crate) fn check(bytes: &[u8]) -> bool {
    let Some((first, bytes)) = bytes.split_first() else {
        return false;
    };
    let limit = 32 * (1 + usize::from(*first));
    let [whole, single, random] = ways(bytes).map(|pieces| run(&pieces, limit));
    let (Some(whole), Some(single), Some(random)) = (whole, single, random) else {
        // An event that is too long is too long however it comes, but where a line ends in a bare CR.
        let too_long = |events: &[Event]| events.iter().any(|event| event.raw.len() > limit);
        let (events, rest) = run(&[bytes], usize::MAX).unwrap_or_default();
        assert!(too_long(&events) || rest.len() > limit || has_bare_cr(bytes));
        return false;
    };
    for (events, rest) in [&whole, &single, &random] {
        let mut joined: Vec<u8> = events.iter().flat_map(|event| event.raw.to_vec()).collect();
        joined.extend_from_slice(rest);
        assert_eq!(joined, bytes, "bytes were lost or added");
        assert!(events.iter().all(|event| event.raw.len() <= limit));
    }
    // Where a CR and its LF come apart the event ends with the CR.
    if !bytes.contains(&b'\r') {
        assert_eq!(whole, single, "other pieces, other events");
        assert_eq!(whole, random, "other pieces, other events");
    }
    let said = |events: &[Event]| -> Vec<Vec<u8>> {
        let data = events.iter().filter_map(|event| event.data());
        data.map(|data| data.into_owned()).collect()
    };
    assert_eq!(said(&whole.0), said(&single.0));
    assert_eq!(
        said(&whole.0),
        plain(bytes),
        "a plain reader finds other data"
    );
    let mut progress = Progress::default();
    for event in &whole.0 {
        read(event, &mut progress);
    }
    !whole.0.is_empty()
}

/// All events and the rest; none if one is too long.
fn run(pieces: &[&[u8]], limit: usize) -> Option<(Vec<Event>, Bytes)> {
    let mut parser = EventParser::new(limit);
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(Bytes::copy_from_slice(piece));
        while let Some(event) = parser.next_event().ok()? {
            events.push(event);
        }
    }
    Some((events, parser.take_rest()))
}

fn has_bare_cr(bytes: &[u8]) -> bool {
    let followed = bytes.iter().skip(1).chain([&0]);
    let mut pairs = bytes.iter().zip(followed);
    pairs.any(|(byte, next)| *byte == b'\r' && *next != b'\n')
}

/// The data of whole events, by the letter of the standard.
fn plain(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut lines = Vec::new();
    let (mut line, mut at) = (Vec::new(), 0);
    while let Some(byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'\r' | b'\n' => {
                if *byte == b'\r' && bytes.get(at) == Some(&b'\n') {
                    at += 1;
                }
                lines.push(std::mem::take(&mut line));
            }
            byte => line.push(*byte),
        }
    }
    let mut found = Vec::new();
    let mut data: Option<Vec<u8>> = None;
    for line in lines {
        if line.is_empty() {
            found.extend(data.take());
            continue;
        }
        let value = match line.strip_prefix(b"data") {
            Some([]) => Vec::new(),
            Some([b':', b' ', value @ ..]) | Some([b':', value @ ..]) => value.to_vec(),
            _ => continue,
        };
        match &mut data {
            None => data = Some(value),
            Some(data) => {
                data.push(b'\n');
                data.extend(value);
            }
        }
    }
    found
}

/// What the router makes of one event.
fn read(event: &Event, progress: &mut Progress) {
    let Some(data) = event.data() else {
        return;
    };
    if let Some(found) = find_usage(&data)
        && let Ok(value) = serde_json::from_slice::<Value>(&data)
    {
        let said = value["usage"]["prompt_tokens"].as_u64();
        assert_eq!(found.usage.prompt_tokens, said.unwrap_or(0));
    }
    if let Some(bytes) = without_usage(event) {
        let (events, rest) = run(&[&bytes], usize::MAX).unwrap_or_default();
        assert!(
            events.len() == 1 && rest.is_empty(),
            "not one event: {bytes:?}"
        );
        let data = events.first().and_then(|event| event.data());
        let left = data.and_then(|data| serde_json::from_slice::<Value>(&data).ok());
        assert!(left.is_none_or(|left| left.get("usage").is_none()));
    }
    progress.add_chunk(&data);
}
