//! How many blocks a second go from an engine's messages into the index, on one core?
//!
//! Workload: three recorded vLLM sessions (prefill, decode, eviction, resets; blocks of 32 tokens), one after
//! the other, as the streams of 64 workers in turn, message by message. Stages are nested, so their difference is
//! a share: reading the payload, then hashing its blocks, then order and index. The answer is checked first:
//! after one pass the index must foretell what a single listener foretells. Counted until everything is
//! applied. The same blocks again as router events, from MessagePack and as values, as a worker in this process
//! hands them over: their answers must be the same. `EVENTS_PASSES` sets the passes (default 40; 1 under callgrind). Wall time is what a machine with
//! nothing else to do shows; CPU time (Linux) is what counts on one that is shared.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot read its data ends"
)]
#![expect(clippy::print_stdout, reason = "its result")]
#![expect(
    clippy::disallowed_methods,
    reason = "it measures time and is set by the environment"
)]

use std::hint::black_box;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{
    Encoding, EventFormat, Sequencer, SourceEvent, StreamOptions, TranslateOptions, Translation,
    Translator,
};
use kvasir_msgpack::Value;
use kvasir_types::{KvEvent, Time, WorkerRank};
use kvasir_wire::engine::{Batch, Event};
use kvasir_wire::frame::Frame;
use kvasir_wire::native::RouterEvent;

const BLOCK: u32 = 32;
const WORKERS: u64 = 64;

fn payloads() -> Vec<Bytes> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/vllm-kv-events");
    let mut all = Vec::new();
    for session in ["int-sha256", "int-sha256-duplicates", "int-sha256-aligned"] {
        let text = std::fs::read_to_string(format!("{root}/{session}/pub_frames.jsonl")).unwrap();
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let payload = line["frames_b64"][2].as_str().unwrap();
            all.push(Bytes::from(STANDARD.decode(payload).unwrap()));
        }
    }
    all
}

fn blocks(payloads: &[Bytes]) -> u64 {
    let mut batch = Batch::new();
    let mut blocks = 0;
    for payload in payloads {
        batch.decode(payload).unwrap();
        for event in batch.events() {
            blocks += match event {
                Event::Stored(stored) => stored.hashes.len() as u64,
                Event::Removed(removed) => removed.hashes.len() as u64,
                Event::Cleared | Event::Ignored | Event::Unknown => 0,
            };
        }
    }
    blocks
}

/// The same events as Dynamo's workers publish them, message by message, without a worker's name.
fn router_events(payloads: &[Bytes]) -> Vec<Vec<KvEvent>> {
    let options = TranslateOptions {
        block_size: BLOCK,
        image_token: None,
    };
    let (mut batch, mut translator) = (Batch::new(), Translator::new(options));
    let events = |payload: &Bytes| {
        batch.decode(payload).unwrap();
        let mut events = Vec::new();
        translator.translate(&batch, |translation| {
            if let Translation::Event(event) = translation {
                events.push(event.clone());
            }
        });
        events
    };
    payloads.iter().map(events).collect()
}

/// How long a stage ran: since it began, or the parts between `resume` and `pause`.
struct Watch {
    wall: Instant,
    cpu: Option<u64>,
    /// Nanoseconds of earlier parts: wall, CPU.
    spent: (u64, u64),
}

/// Nanoseconds that this thread has run, where the system says it.
fn cpu_nanos() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok()
}

impl Watch {
    fn start() -> Self {
        Self {
            wall: Instant::now(),
            cpu: cpu_nanos(),
            spent: (0, 0),
        }
    }

    fn resume(&mut self) {
        self.wall = Instant::now();
        self.cpu = cpu_nanos();
    }

    fn pause(&mut self) {
        let (wall, cpu) = self.part();
        self.spent.0 += wall;
        self.spent.1 += cpu;
    }

    /// Nanoseconds since it was last resumed; CPU time is wall time where the system does not say it.
    fn part(&self) -> (u64, u64) {
        let wall = self.wall.elapsed().as_nanos() as u64;
        let cpu = cpu_nanos().zip(self.cpu).map(|(now, then)| now - then);
        (wall, cpu.unwrap_or(wall))
    }

    /// Prints a row of a stage that ran since it began; nanoseconds of a block, by CPU time if it is known.
    fn report(&self, name: &str, blocks: u64) -> f64 {
        report(name, blocks, self.part())
    }

    /// The same for a stage that ran in parts.
    fn report_parts(&self, name: &str, blocks: u64) -> f64 {
        report(name, blocks, self.spent)
    }
}

fn report(name: &str, blocks: u64, (wall, cpu): (u64, u64)) -> f64 {
    let per_block = |nanos: u64| nanos as f64 / blocks as f64;
    let (wall, cpu) = (per_block(wall), per_block(cpu));
    println!(
        "{name:<28} wall {:>6.2} M blocks/s {wall:>7.1} ns/block   cpu {:>6.2} M blocks/s {cpu:>7.1} ns/block",
        1e3 / wall,
        1e3 / cpu
    );
    cpu
}

fn decode(payloads: &[Bytes], passes: u64) {
    let mut batch = Batch::new();
    for payload in (0..passes * WORKERS).flat_map(|_| payloads) {
        batch.decode(payload).unwrap();
        black_box(batch.len());
    }
}

fn hash(payloads: &[Bytes], passes: u64) {
    let options = TranslateOptions {
        block_size: BLOCK,
        image_token: None,
    };
    let (mut batch, mut translator) = (Batch::new(), Translator::new(options));
    for payload in (0..passes * WORKERS).flat_map(|_| payloads) {
        batch.decode(payload).unwrap();
        translator.translate(&batch, |event| {
            if let Translation::Event(event) = event {
                black_box(event);
            }
        });
    }
}

struct Fleet {
    index: Index,
    workers: Vec<Sequencer>,
    next: u64,
}

impl Fleet {
    fn new(workers: u64) -> Self {
        Self::of(workers, |rank| EventFormat::EngineBatches { rank })
    }

    fn of(workers: u64, format: impl Fn(WorkerRank) -> EventFormat) -> Self {
        let mut options = StreamOptions::new(BLOCK);
        options.replay = false;
        let worker = |id| {
            let rank = WorkerRank::new(id, 0);
            let mut sequencer = Sequencer::new(format(rank), options.clone());
            sequencer.add_worker(rank.worker);
            sequencer
        };
        Self {
            index: Index::new(),
            workers: (0..workers).map(worker).collect(),
            next: 0,
        }
    }

    fn pass(&mut self, payloads: &[Bytes]) {
        let mut out = Vec::new();
        for payload in payloads {
            for worker in &mut self.workers {
                let frame = Frame {
                    sequence: self.next,
                    payload: payload.clone(),
                };
                worker.step(Time::ZERO, SourceEvent::Live(frame), &self.index, &mut out);
            }
            self.next += 1;
            out.clear();
        }
    }

    /// As [`Self::pass`], of router events; each message is made by `message`, which is not counted.
    fn pass_router_events(
        &mut self,
        steps: &[Vec<KvEvent>],
        message: impl Fn(Vec<RouterEvent>) -> SourceEvent,
        watch: &mut Watch,
    ) {
        let mut out = Vec::new();
        for step in steps {
            let number = |rank: WorkerRank| {
                let numbered = (self.next + 1..).zip(step);
                let events = numbered.map(|(id, event)| RouterEvent {
                    rank,
                    id,
                    residency: None,
                    position: None,
                    event: event.clone(),
                });
                message(events.collect())
            };
            let ids = (0..self.workers.len() as u64).map(|id| WorkerRank::new(id, 0));
            let messages: Vec<SourceEvent> = ids.map(number).collect();
            watch.resume();
            for (worker, message) in self.workers.iter_mut().zip(messages) {
                worker.step(Time::ZERO, message, &self.index, &mut out);
            }
            watch.pause();
            self.next += step.len() as u64;
            out.clear();
        }
    }

    /// Depth of every stored chain of the recordings, for one worker.
    fn depths(&self, payloads: &[Bytes], worker: u64) -> Vec<u32> {
        let (mut batch, mut matches, mut depths) = (Batch::new(), Matches::new(), Vec::new());
        for payload in payloads {
            batch.decode(payload).unwrap();
            for event in batch.events() {
                let Event::Stored(stored) = event else {
                    continue;
                };
                let locals = local_hashes(stored.tokens, BLOCK as usize, &Scope::default());
                self.index.find(&locals, &mut matches);
                let found = matches.iter().find(|m| m.rank.worker.0 == worker);
                depths.push(found.map_or(0, |m| m.device));
            }
        }
        depths
    }
}

fn main() {
    let passes = std::env::var("EVENTS_PASSES")
        .ok()
        .and_then(|p| p.parse().ok())
        .unwrap_or(40);
    let payloads = payloads();
    let (mut one, mut many) = (Fleet::new(1), Fleet::new(WORKERS));
    one.pass(&payloads);
    many.pass(&payloads);
    let expected = one.depths(&payloads, 0);
    assert!(expected.iter().any(|d| *d > 0));
    for worker in [0, 17, WORKERS - 1] {
        assert_eq!(many.depths(&payloads, worker), expected);
    }
    let all = blocks(&payloads) * WORKERS * passes;
    let bytes: usize = payloads.iter().map(Bytes::len).sum();
    println!(
        "{} messages, {} blocks, {bytes} bytes per worker and pass; {passes} passes of {WORKERS} workers",
        payloads.len(),
        blocks(&payloads)
    );
    let watch = Watch::start();
    decode(&payloads, passes);
    let decoded = watch.report("decode", all);
    let watch = Watch::start();
    hash(&payloads, passes);
    let hashed = watch.report("decode, hash", all);
    let watch = Watch::start();
    for _ in 0..passes {
        many.pass(&payloads);
    }
    let applied = watch.report("decode, hash, order, index", all);
    println!(
        "shares: decode {:.0} %, hash {:.0} %, order and index {:.0} %",
        decoded / applied * 100.0,
        (hashed - decoded) / applied * 100.0,
        (applied - hashed) / applied * 100.0
    );
    let encoded = |events: Vec<RouterEvent>| {
        let events = events.iter().map(RouterEvent::to_value).collect();
        let mut payload = Vec::new();
        Value::List(events).to_msgpack(&mut payload);
        let (sequence, payload) = (0, payload.into());
        SourceEvent::Live(Frame { sequence, payload })
    };
    let steps = router_events(&payloads);
    measure(
        "router events, MessagePack",
        &payloads,
        &steps,
        encoded,
        passes,
    );
    measure(
        "router events as values",
        &payloads,
        &steps,
        SourceEvent::Events,
        passes,
    );
}

/// Passes of router events: order and index, and whatever `message` leaves to be decoded.
fn measure(
    name: &str,
    payloads: &[Bytes],
    steps: &[Vec<KvEvent>],
    message: impl Fn(Vec<RouterEvent>) -> SourceEvent,
    passes: u64,
) {
    let format = |_| EventFormat::RouterEvents(Encoding::MessagePack);
    let (mut expected, mut many) = (Fleet::new(1), Fleet::of(WORKERS, format));
    expected.pass(payloads);
    let expected = expected.depths(payloads, 0);
    many.pass_router_events(steps, &message, &mut Watch::start());
    for worker in [0, 17, WORKERS - 1] {
        assert_eq!(many.depths(payloads, worker), expected);
    }
    let mut watch = Watch::start();
    for _ in 0..passes {
        many.pass_router_events(steps, &message, &mut watch);
    }
    watch.report_parts(name, blocks(payloads) * WORKERS * passes);
}
