//! Router events: numbered per rank, several workers over one source, and the recorded bytes of real ones.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{
    Encoding, EventFormat, Notice, Output, RANKS_MAX, Resync, Sequencer, SourceEvent, SourceFault,
    StreamOptions,
};
use kvasir_msgpack::Value;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, Time, WorkerId, WorkerRank};
use kvasir_wire::frame::Frame;
use kvasir_wire::native::{Envelope, RouterEvent};
use serde_json::Value as Json;

const TIER: Tier = Tier::Device;

struct Stream {
    sequencer: Sequencer,
    index: Index,
}

impl Stream {
    fn new(encoding: Encoding, workers: &[u64]) -> Self {
        let format = EventFormat::RouterEvents(encoding);
        let mut sequencer = Sequencer::new(format, StreamOptions::unanswered(16));
        for worker in workers {
            sequencer.add_worker(WorkerId(*worker));
        }
        Self {
            sequencer,
            index: Index::new(),
        }
    }

    fn step(&mut self, event: SourceEvent) -> Vec<Notice> {
        let mut out = Vec::new();
        self.sequencer
            .step(Time::ZERO, event, &self.index, &mut out);
        let notice = |output| match output {
            Output::Notice(notice) => notice,
            other => panic!("nothing can be asked: {other:?}"),
        };
        out.into_iter().map(notice).collect()
    }

    fn events(&mut self, events: &[RouterEvent]) -> Vec<Notice> {
        self.step(SourceEvent::Events(events.to_vec()))
    }

    /// How many of the blocks `1..=depth` this rank holds from the first on.
    fn depth(&self, rank: WorkerRank) -> u32 {
        let locals: Vec<LocalHash> = (1..=100).map(LocalHash).collect();
        let mut matches = Matches::new();
        self.index.find(&locals, &mut matches);
        matches.get(rank).map_or(0, |m| m.device)
    }

    fn is_exact(&self) -> bool {
        self.sequencer.status().exact
    }
}

fn event(rank: WorkerRank, id: u64, event: KvEvent) -> RouterEvent {
    RouterEvent {
        rank,
        id,
        residency: None,
        position: None,
        event,
    }
}

/// Block `number` of the one sequence that all tests use; block 1 is its first.
fn stored(rank: WorkerRank, id: u64, number: u64) -> RouterEvent {
    let block = StoredBlock {
        engine: EngineHash(number),
        local: LocalHash(number),
    };
    let stored = KvEvent::Stored {
        tier: TIER,
        parent: (number > 1).then(|| EngineHash(number - 1)),
        blocks: vec![block],
    };
    event(rank, id, stored)
}

const A: WorkerRank = rank(1, 0);
const B: WorkerRank = rank(1, 1);
const C: WorkerRank = rank(2, 0);

const fn rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: kvasir_types::DpRank(rank),
    }
}

/// Numbers are the rank's own: what the events of one rank are between is no gap.
#[test]
fn one_source_carries_several_workers_and_ranks() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1, 2]);
    let mixed = [
        stored(A, 1, 1),
        stored(C, 1, 1),
        stored(A, 2, 2),
        stored(B, 1, 1),
        stored(C, 2, 2),
        stored(C, 3, 3),
    ];
    assert_eq!(stream.events(&mixed), []);
    assert_eq!([A, B, C].map(|r| stream.depth(r)), [2, 1, 3]);
    assert!(stream.is_exact());
    assert_eq!(stream.sequencer.ranks(), [A, B, C]);
}

#[test]
fn a_gap_empties_its_rank_and_no_other() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1, 2]);
    stream.events(&[stored(A, 1, 1), stored(A, 2, 2), stored(C, 1, 1)]);
    let notices = stream.events(&[stored(A, 5, 1), stored(C, 2, 2)]);
    let gap = Notice::RankGap {
        rank: A,
        expected: 3,
        found: 5,
    };
    assert_eq!(notices, [gap]);
    assert_eq!([A, C].map(|r| stream.depth(r)), [1, 2]);
    let status = stream.sequencer.status();
    assert!(!status.exact);
    assert_eq!(status.counts.missed, 2);
    // A clear says what the cache holds: nothing. From there on all is known again.
    stream.events(&[event(A, 6, KvEvent::Cleared { tier: None })]);
    assert!(stream.is_exact());
}

#[test]
fn what_comes_again_is_applied_once() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    let removed = KvEvent::Removed {
        tier: TIER,
        blocks: vec![EngineHash(2)],
    };
    let removed = event(A, 3, removed);
    stream.events(&[stored(A, 1, 1), stored(A, 2, 2), removed]);
    assert_eq!(stream.events(&[stored(A, 2, 2)]), []);
    assert_eq!(stream.depth(A), 1, "an old event does not come back");
    assert_eq!(stream.sequencer.status().counts.stale, 1);
    assert!(stream.is_exact());
}

/// A publisher that counts from the start again under the same name has a new cache.
#[test]
fn many_old_numbers_in_a_row_are_a_restart() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    let old: Vec<RouterEvent> = (1..=50).map(|n| stored(A, n, n)).collect();
    stream.events(&old);
    assert_eq!(stream.depth(A), 50);
    let again: Vec<RouterEvent> = (1..=10).map(|n| stored(A, n, n)).collect();
    let notices = stream.events(&again);
    assert!(notices.contains(&Notice::Restarted), "{notices:?}");
    assert_eq!(stream.depth(A), 0, "its first blocks were missed");
    assert!(!stream.is_exact());
}

#[test]
fn a_late_first_event_is_taken_and_known_to_be_late() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    stream.events(&[stored(A, 9, 1)]);
    assert_eq!(stream.depth(A), 1);
    assert!(!stream.is_exact());
}

/// Whoever is no member leaves nothing in the cache, before and after.
#[test]
fn a_worker_counts_from_its_joining_to_its_leaving() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    let strangers = [stored(C, 1, 1), stored(C, 2, 2)];
    assert_eq!(
        stream.events(&strangers),
        [Notice::UnknownWorker(C.worker)],
        "said once"
    );
    assert_eq!(stream.depth(C), 0);
    stream.sequencer.add_worker(C.worker);
    stream.events(&[stored(C, 3, 1), stored(A, 1, 1)]);
    assert_eq!([A, C].map(|r| stream.depth(r)), [1, 1]);
    stream.sequencer.remove_worker(C.worker, &stream.index);
    stream.events(&[stored(C, 4, 2)]);
    assert_eq!([A, C].map(|r| stream.depth(r)), [1, 0]);
    assert_eq!(stream.sequencer.ranks(), [A]);
}

#[test]
fn ranks_past_the_limit_are_ignored() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    for number in 0..=RANKS_MAX {
        stream.events(&[stored(rank(1, number as u32), 1, 1)]);
    }
    assert_eq!(stream.sequencer.ranks().len(), RANKS_MAX);
    assert_eq!(stream.depth(rank(1, RANKS_MAX as u32)), 0);
    assert_eq!(stream.sequencer.status().counts.skipped, 1);
}

/// A dump that says where blocks stand and not what they follow: they are not a sequence's beginning.
#[test]
fn blocks_from_the_middle_without_a_parent_do_not_count() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    let mut rootless = stored(A, 1, 1);
    rootless.position = Some(3);
    stream.events(&[rootless]);
    assert_eq!(stream.depth(A), 0);
    assert!(!stream.is_exact());
    let mut first = stored(A, 2, 1);
    first.position = Some(0);
    stream.events(&[first]);
    assert_eq!(stream.depth(A), 1);
}

#[test]
fn blocks_wait_for_their_parents() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    assert_eq!(
        stream.events(&[stored(A, 1, 2)]),
        [Notice::Orphans { rank: A }]
    );
    stream.events(&[stored(A, 2, 1)]);
    assert_eq!(stream.depth(A), 2);
}

/// A lost connection alone says nothing: the numbers tell.
#[test]
fn a_reconnection_without_a_gap_keeps_everything() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1]);
    stream.step(SourceEvent::Connected);
    stream.events(&[stored(A, 1, 1)]);
    stream.step(SourceEvent::Disconnected(SourceFault::Silent));
    assert!(!stream.sequencer.status().connected);
    stream.step(SourceEvent::Connected);
    stream.events(&[stored(A, 2, 2)]);
    assert_eq!(stream.depth(A), 2);
    assert!(stream.is_exact());
}

#[test]
fn the_end_of_a_stream_and_a_resync_forget_every_rank() {
    let mut stream = Stream::new(Encoding::MessagePack, &[1, 2]);
    stream.events(&[stored(A, 1, 1), stored(C, 1, 1)]);
    let mut out = Vec::new();
    let resync = [Resync::Verify, Resync::Fill];
    for how in resync {
        stream
            .sequencer
            .resync(Time::ZERO, how, &stream.index, &mut out);
    }
    assert_eq!([A, C].map(|r| stream.depth(r)), [1, 1]);
    let forget = Resync::Forget;
    stream
        .sequencer
        .resync(Time::ZERO, forget, &stream.index, &mut out);
    assert_eq!([A, C].map(|r| stream.depth(r)), [0, 0]);
    stream.events(&[stored(A, 2, 1)]);
    assert_eq!(stream.depth(A), 1);
    stream.sequencer.leave(&stream.index);
    assert_eq!(stream.depth(A), 0);
    assert_eq!((out, stream.sequencer.next_deadline()), (vec![], None));
}

/// Payloads of the topic `kv-events`, as a mock worker of Dynamo 1.6.1 published them.
fn recorded(file: &str, envelope: impl Fn(&Json) -> Option<Envelope>) -> Vec<Vec<u8>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/dynamo-events");
    let text = std::fs::read_to_string(format!("{root}/{file}")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let envelopes = lines.filter_map(|line: Json| envelope(&line));
    let events = envelopes.filter(|envelope| envelope.topic == "kv-events");
    events.map(|envelope| envelope.payload).collect()
}

/// Those of the worker on ZeroMQ and of the one on NATS, in turn.
fn recorded_payloads() -> Vec<Vec<u8>> {
    let bytes = |value: &Json| STANDARD.decode(value.as_str().unwrap()).unwrap();
    let zmq = recorded("zmq.jsonl", |line| {
        Some(Envelope::decode_prefixed(&bytes(&line["frames"][3])).unwrap())
    });
    let nats = recorded("nats-event-plane.jsonl", |line| {
        Some(Envelope::decode(&bytes(line.get("b64")?)).unwrap())
    });
    let (mut zmq, mut nats) = (zmq.into_iter(), nats.into_iter());
    let turns = std::iter::from_fn(|| match (zmq.next(), nats.next()) {
        (None, None) => None,
        (zmq, nats) => Some(zmq.into_iter().chain(nats)),
    });
    turns.flatten().collect()
}

/// The recorded events of two workers, over one source, in both encodings: nothing is missing, and each
/// rank holds what it stored less what it removed.
#[test]
fn recorded_events_of_two_workers_are_applied_whole() {
    let payloads = recorded_payloads();
    let all: Vec<RouterEvent> = payloads
        .iter()
        .flat_map(|p| RouterEvent::list_from_value(&Value::from_msgpack(p).unwrap()).unwrap())
        .collect();
    let mut workers: Vec<u64> = all.iter().map(|e| e.rank.worker.0).collect();
    workers.sort_unstable();
    workers.dedup();
    assert_eq!(workers.len(), 2);
    assert!(all.len() > 50);
    let expected = Index::new();
    for event in &all {
        expected.apply(event.rank, &event.event).unwrap();
    }
    for encoding in [Encoding::MessagePack, Encoding::Json] {
        let mut stream = Stream::new(encoding, &workers);
        for payload in &payloads {
            let payload: Bytes = match encoding {
                Encoding::MessagePack => payload.clone().into(),
                Encoding::Json => {
                    let json = Value::from_msgpack(payload).unwrap().to_json();
                    json.to_string().into()
                }
            };
            let sequence = 0;
            assert_eq!(
                stream.step(SourceEvent::Live(Frame { sequence, payload })),
                []
            );
        }
        assert!(stream.is_exact());
        let counts = stream.sequencer.status().counts;
        assert_eq!(counts.events, all.len() as u64);
        assert_eq!((counts.stale, counts.missed, counts.refused), (0, 0, 0));
        assert_eq!(
            stream.index.stats().entries,
            expected.stats().entries,
            "{encoding:?}"
        );
    }
}

#[test]
fn an_unreadable_message_is_reported_and_the_gap_shows() {
    let mut stream = Stream::new(Encoding::Json, &[1]);
    let payload = Bytes::from_static(b"{");
    let notices = stream.step(SourceEvent::Live(Frame {
        sequence: 0,
        payload,
    }));
    assert!(matches!(notices[..], [Notice::Refused(_)]), "{notices:?}");
    assert_eq!(stream.sequencer.status().counts.refused, 1);
}
