//! How many blocks a second go from an engine's messages into the index, on one core?
//!
//! Workload: three recorded vLLM sessions (prefill, decode, eviction, resets; blocks of 32 tokens), one after
//! the other, as the streams of 64 workers in turn, message by message. Stages are nested, so their difference is
//! a share: reading the payload, then hashing its blocks, then order and index. The answer is checked first:
//! after one pass the index must foretell what a single listener foretells. Counted until everything is
//! applied. `EVENTS_PASSES` sets the passes (default 40; 1 under callgrind). Wall time is what a machine with
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
use kvasir_kv_events::{EventFormat, Sequencer, SourceEvent, StreamOptions};
use kvasir_types::{Time, WorkerRank};
use kvasir_wire::engine::{Batch, Event};
use kvasir_wire::frame::Frame;
use kvasir_wire::{TranslateOptions, Translation, Translator};

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

/// When a stage began.
struct Watch {
    wall: Instant,
    cpu: Option<u64>,
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
        }
    }

    /// Prints a row; nanoseconds of a block, by CPU time if it is known.
    fn report(&self, name: &str, blocks: u64) -> f64 {
        let per_block = |nanos: f64| nanos / blocks as f64;
        let wall = per_block(self.wall.elapsed().as_nanos() as f64);
        let cpu = cpu_nanos().zip(self.cpu).map(|(now, then)| now - then);
        let cpu = cpu.map_or(wall, |nanos| per_block(nanos as f64));
        println!(
            "{name:<28} wall {:>6.2} M blocks/s {wall:>7.1} ns/block   cpu {:>6.2} M blocks/s {cpu:>7.1} ns/block",
            1e3 / wall,
            1e3 / cpu
        );
        cpu
    }
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
        let mut options = StreamOptions::new(BLOCK);
        options.replay = false;
        let worker = |id| {
            let rank = WorkerRank::new(id, 0);
            Sequencer::new(EventFormat::EngineBatches { rank }, options.clone())
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
}
