//! What the README beside the recordings says about them, read off by our decoder.

use std::collections::BTreeMap;

use expect_test::expect;
use kvasir_types::EngineHash;
use kvasir_wire::engine::{Attention, Batch, Event, Medium, Removed, Stored};
use kvasir_wire::frame::{Frame, ReplayPart, parse_live, parse_replay};

use crate::captures::{SESSIONS, lines, messages};

/// What one session's live messages hold.
#[derive(Default)]
struct Seen {
    sequences: Vec<u64>,
    stored: usize,
    removed: usize,
    cleared: usize,
    /// How often each name was stored, and removed.
    names: BTreeMap<EngineHash, (u32, u32)>,
    /// Stored with fewer names than blocks, and with none at all.
    short: usize,
    empty: usize,
    salts: Vec<String>,
    groups: BTreeMap<(u32, bool), usize>,
}

impl Seen {
    fn stored(&mut self, event: &Stored<'_>) {
        self.stored += 1;
        assert_eq!(event.block_size, 32);
        assert_eq!(event.medium, Medium::from_name("GPU"));
        let whole = event.hashes.len() * 32 == event.tokens.len();
        let full = event.attention == Attention::Full;
        assert!(whole || !full, "only sliding windows leave names out");
        self.short += usize::from(!whole);
        self.empty += usize::from(event.hashes.is_empty());
        self.salts.extend(event.salt.map(str::to_owned));
        *self.groups.entry((event.group.unwrap(), full)).or_default() += 1;
        for name in event.hashes {
            self.names.entry(*name).or_default().0 += 1;
        }
    }

    fn removed(&mut self, event: &Removed<'_>) {
        self.removed += 1;
        let [name] = event.hashes else {
            panic!("one name in each removal: {event:?}")
        };
        self.names.entry(*name).or_default().1 += 1;
    }

    fn row(&self) -> String {
        let (first, last) = (
            self.sequences.first().unwrap(),
            self.sequences.last().unwrap(),
        );
        let groups: Vec<String> = self
            .groups
            .iter()
            .map(|((group, full), count)| {
                let kind = if *full { "full" } else { "window" };
                format!("{group} {kind} {count}")
            })
            .collect();
        let blocks: u32 = self.names.values().map(|(stored, _)| stored).sum();
        let high = self.names.keys().filter(|name| name.0 >> 63 == 1).count();
        format!(
            "{first}..={last}: {} stored, {blocks} blocks, {} names ({high} high), {} removed, {} cleared; \
             short {}, empty {}; salts {:?}; groups {}",
            self.stored,
            self.names.len(),
            self.removed,
            self.cleared,
            self.short,
            self.empty,
            self.salts,
            groups.join(", ")
        )
    }
}

fn frames(session: &str) -> Vec<Frame<Vec<u8>>> {
    let live = messages(&format!("vllm-kv-events/{session}/pub_frames.jsonl"));
    assert!(live.iter().all(|parts| parts[0] == b"kv-events"));
    live.iter()
        .map(|parts| parse_live(parts).unwrap())
        .collect()
}

fn seen(session: &str) -> Seen {
    let (mut seen, mut batch) = (Seen::default(), Batch::new());
    for frame in frames(session) {
        seen.sequences.push(frame.sequence);
        batch.decode(&frame.payload).unwrap();
        assert_eq!(batch.rank(), Some(0));
        for event in batch.events() {
            match event {
                Event::Stored(stored) => seen.stored(&stored),
                Event::Removed(removed) => seen.removed(&removed),
                Event::Cleared => seen.cleared += 1,
                Event::Ignored | Event::Unknown => panic!("{event:?}"),
            }
        }
    }
    let consecutive = |pair: &[u64]| pair[1] == pair[0] + 1;
    assert!(seen.sequences.windows(2).all(consecutive), "{session}");
    seen
}

/// Numbers counted with Python from the recordings' own decoded copies.
#[test]
fn every_session_holds_what_was_recorded() {
    let table: Vec<String> = SESSIONS
        .iter()
        .map(|session| format!("{session} {}\n", seen(session).row()))
        .collect();
    expect![[r#"
        bytes-sha256_cbor 0..=30: 34 stored, 263 blocks, 239 names (133 high), 98 removed, 1 cleared; short 0, empty 0; salts ["tenant-a"]; groups 0 full 34
        int-sha256 0..=30: 34 stored, 263 blocks, 239 names (115 high), 98 removed, 1 cleared; short 0, empty 0; salts ["tenant-a"]; groups 0 full 34
        int-sha256-aligned 21..=53: 33 stored, 158 blocks, 152 names (71 high), 9 removed, 1 cleared; short 0, empty 0; salts []; groups 0 full 33
        int-sha256-duplicates 2..=10: 9 stored, 213 blocks, 213 names (109 high), 77 removed, 0 cleared; short 0, empty 0; salts []; groups 0 full 9
        int-sha256-hybrid-swa 0..=30: 68 stored, 326 blocks, 239 names (118 high), 168 removed, 1 cleared; short 28, empty 11; salts ["tenant-a"]; groups 0 window 34, 1 full 34
    "#]].assert_eq(&table.concat());
}

/// "Separate servers give the same hash for the same tokens, whatever the model."
#[test]
fn names_are_the_same_in_separate_servers() {
    let one = seen("int-sha256");
    let hybrid = seen("int-sha256-hybrid-swa");
    let shared = one
        .names
        .keys()
        .filter(|name| hybrid.names.contains_key(name));
    assert!(shared.count() > 100);
}

/// A prompt of whole blocks has its last one stored again each time, and removed as often; later it came once more.
#[test]
fn what_is_stored_again_is_removed_again() {
    let seen = seen("int-sha256-aligned");
    let thrice: Vec<_> = seen
        .names
        .values()
        .filter(|(_, removed)| *removed == 3)
        .collect();
    assert_eq!(thrice, [&(4, 3)]);
}

/// A REQ socket strips the delimiter and hears one answer: the message that was asked for, as it was sent live.
#[test]
fn a_req_socket_hears_the_first_answer_only() {
    for session in ["bytes-sha256_cbor", "int-sha256", "int-sha256-hybrid-swa"] {
        let answers = messages(&format!(
            "vllm-kv-events/{session}/replay_from_10_req.jsonl"
        ));
        let [answer] = answers.as_slice() else {
            panic!("{} answers", answers.len())
        };
        let frame = parse_live(answer).unwrap();
        assert_eq!(frame.sequence, 10);
        assert_eq!(
            frames(session).iter().find(|f| f.sequence == 10),
            Some(&frame)
        );
    }
}

/// The batches that were sent before the subscriber joined tell the blocks of the first two requests.
#[test]
fn what_only_the_replay_has_is_what_was_asked() {
    let session = "int-sha256-duplicates";
    let answers = messages(&format!(
        "vllm-kv-events/{session}/replay_from_0_dealer.jsonl"
    ));
    let requests = lines(&format!("vllm-kv-events/{session}/requests.jsonl"));
    let prompt = |request: &serde_json::Value| -> Vec<u32> {
        let tokens = request["prompt_token_ids"].as_array().unwrap();
        tokens.iter().map(|t| t.as_u64().unwrap() as u32).collect()
    };
    let prompts: Vec<Vec<u32>> = requests.iter().map(prompt).collect();
    let mut batch = Batch::new();
    for (sequence, answer) in (0..2).zip(&answers) {
        let ReplayPart::Frame(frame) = parse_replay(answer).unwrap() else {
            panic!("an end before its time")
        };
        assert_eq!(frame.sequence, sequence);
        batch.decode(&frame.payload).unwrap();
        let Some(Event::Stored(stored)) = batch.events().next() else {
            panic!("nothing stored")
        };
        assert!(stored.tokens.len() >= 32);
        let asked = prompts
            .iter()
            .any(|prompt| prompt.starts_with(stored.tokens));
        assert!(asked, "nobody asked for what batch {sequence} stores");
    }
    assert_eq!(frames(session)[0].sequence, 2);
}

/// What Dynamo's mock engine repeats is what it sent.
#[test]
fn dynamos_replay_is_its_live_stream_again() {
    let live = lines("dynamo-events/raw-engine-zmq.jsonl");
    let live: Vec<Vec<u8>> = live
        .iter()
        .map(|line| crate::captures::bytes(&line["frames"][2]))
        .collect();
    let mut same = 0;
    for parts in messages("dynamo-events/raw-engine-zmq-replay.jsonl") {
        if let ReplayPart::Frame(frame) = parse_replay(&parts).unwrap() {
            same += usize::from(live.contains(&frame.payload));
        }
    }
    assert!(same > 0, "no repeated message was sent live");
}
