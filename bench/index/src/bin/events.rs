//! How many blocks a second do event threads take from an engine's frames into the index, and what do lookups see
//! meanwhile? `events recorded|generated [TRACE] [key=value ...]`
//!
//! `generated`: the cache events of a trace (`sim.rs`) as frames in the shape that vLLM 0.32 sends (maps; sixteen
//! tokens a block; a removal per block, before the store that needed the room, in one batch). `recorded`: the
//! recorded vLLM sessions of `testdata`, as the streams of 64 workers, over and over.
//!
//! Each thread has the frames of its own workers in its queue and drains it through the real state machine: decode,
//! translate and hash, order, apply. A further thread looks prompts up, `lookups` a second, and times each call.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use base64::Engine as _;
use bytes::Bytes;
use index_bench::index::{Ev, mix};
use index_bench::sim::{self, Config, Item};
use index_bench::stats::Lat;
use index_bench::trace;
use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{EventFormat, Sequencer, SourceEvent, StreamOptions};
use kvasir_types::{LocalHash, Time, WorkerRank};
use kvasir_wire::frame::Frame;
use kvasir_msgpack::Writer;

/// Prompts that are looked up.
const PROMPTS: usize = 512;

struct Load {
    block: u32,
    workers: u64,
    /// In the order of the trace.
    frames: Vec<(u64, Bytes)>,
    blocks: u64,
    prompts: Vec<Vec<LocalHash>>,
    passes: u64,
}

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let options: Vec<(&str, &str)> = a.iter().filter_map(|s| s.split_once('=')).collect();
    let get = |k: &str, d: u64| {
        let found = options.iter().find(|(key, _)| *key == k);
        found.map_or(d, |(_, v)| v.parse().expect("a number"))
    };
    let load = match a.first().map(String::as_str) {
        Some("generated") => generated(
            &a[1],
            get("workers", 8) as u32,
            get("capacity", 16_384) as u32,
            get("limit", 3_000) as usize,
            get("speed", 1) as f64,
        ),
        Some("recorded") => recorded(get("workers", 64), get("passes", 40)),
        _ => {
            eprintln!("usage: events recorded|generated [TRACE] [workers= capacity= limit= speed= passes= rounds= lookups=]");
            std::process::exit(2);
        }
    };
    let bytes: usize = load.frames.iter().map(|(_, f)| f.len()).sum();
    println!(
        "{} workers, {} frames, {} blocks, {:.1} MB, {} passes",
        load.workers,
        load.frames.len(),
        load.blocks,
        bytes as f64 / 1e6,
        load.passes
    );
    for round in 0..get("rounds", 3) {
        for threads in [1, 2] {
            measure(&load, threads, get("lookups", 0), round);
        }
    }
}

/// The sixteen tokens of a block, most of them below 65,536 as in prose.
fn tokens(local: u64) -> [u32; 16] {
    std::array::from_fn(|i| {
        let word = mix(local ^ (i as u64) << 56);
        (word as u32 % 150_000) >> (word >> 61)
    })
}

fn generated(path: &str, workers: u32, capacity: u32, limit: usize, speed: f64) -> Load {
    let mut trace = trace::load(path, false, limit);
    trace.iter_mut().for_each(|r| r.at_ms /= speed);
    let config = Config {
        workers,
        capacity,
        id_tokens: 512,
        block_tokens: 16,
        copies: 1,
        chunk: 512,
        ms_per_token: 20.0,
        random_eviction: false,
    };
    let w = sim::build(&trace, &config);
    let mut frames: Vec<(u64, Bytes)> = Vec::new();
    let mut open: Option<(u32, Vec<Ev<'_>>)> = None;
    for item in w.items() {
        let Item::Event(event) = item else { continue };
        let (Ev::Store { worker, .. } | Ev::Remove { worker, .. } | Ev::RemoveWorker { worker }) = event;
        match &mut open {
            // A batch is removals and what they made room for.
            Some((of, batch)) if *of == worker && !(matches!(event, Ev::Remove { .. })) => batch.push(event),
            _ => {
                frames.extend(open.replace((worker, vec![event])).map(encode));
            }
        }
    }
    frames.extend(open.map(encode));
    let last = w.lookups().saturating_sub(PROMPTS);
    let prompts = (last..w.lookups())
        .map(|i| {
            let all: Vec<u32> = w.query(i).0.iter().flat_map(|local| tokens(*local)).collect();
            local_hashes(&all, 16, &Scope::default())
        })
        .collect();
    Load {
        block: 16,
        workers: workers.into(),
        frames,
        blocks: w.stored_blocks() + w.removed_blocks(),
        prompts,
        passes: 1,
    }
}

/// A batch as vLLM 0.32 writes it.
fn encode((worker, events): (u32, Vec<Ev<'_>>)) -> (u64, Bytes) {
    let mut out = Vec::new();
    let mut w = Writer::new(&mut out);
    let count: usize = events.iter().map(|e| if let Ev::Remove { seqs, .. } = e { seqs.len() } else { 1 }).sum();
    w.array(3);
    w.float(1_794_709_178.25);
    w.array(count);
    for event in events {
        match event {
            Ev::Remove { seqs, .. } => {
                for seq in seqs {
                    w.map(4);
                    w.str("type");
                    w.str("BlockRemoved");
                    w.str("block_hashes");
                    w.array(1);
                    w.uint(*seq);
                    w.str("medium");
                    w.str("GPU");
                    w.str("group_idx");
                    w.uint(0);
                }
            }
            Ev::Store { parent, blocks, .. } => {
                w.map(10);
                w.str("type");
                w.str("BlockStored");
                w.str("block_hashes");
                w.array(blocks.len());
                blocks.iter().for_each(|b| w.uint(b.seq));
                w.str("parent_block_hash");
                match parent {
                    Some(parent) => w.uint(parent),
                    None => w.nil(),
                }
                w.str("token_ids");
                w.array(blocks.len() * 16);
                blocks.iter().flat_map(|b| tokens(b.local)).for_each(|t| w.uint(t.into()));
                w.str("block_size");
                w.uint(16);
                w.str("lora_id");
                w.nil();
                w.str("medium");
                w.str("GPU");
                w.str("lora_name");
                w.nil();
                w.str("group_idx");
                w.uint(0);
                w.str("kv_cache_spec_kind");
                w.str("full_attention");
            }
            Ev::RemoveWorker { .. } => {}
        }
    }
    w.uint(0);
    (worker.into(), Bytes::from(out))
}

fn recorded(workers: u64, passes: u64) -> Load {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/vllm-kv-events");
    let mut frames = Vec::new();
    let mut prompts = Vec::new();
    let mut blocks = 0;
    let mut batch = kvasir_wire::engine::Batch::new();
    for session in ["int-sha256", "int-sha256-duplicates", "int-sha256-aligned"] {
        let text = std::fs::read_to_string(format!("{root}/{session}/pub_frames.jsonl")).expect("testdata");
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("a line");
            let payload = line["frames_b64"][2].as_str().expect("three frames");
            let payload = Bytes::from(base64::engine::general_purpose::STANDARD.decode(payload).expect("base64"));
            batch.decode(&payload).expect("a batch");
            for event in batch.events() {
                match event {
                    kvasir_wire::engine::Event::Stored(s) => {
                        blocks += s.hashes.len() as u64;
                        prompts.push(local_hashes(s.tokens, 32, &Scope::default()));
                    }
                    kvasir_wire::engine::Event::Removed(r) => blocks += r.hashes.len() as u64,
                    _ => {}
                }
            }
            frames.extend((0..workers).map(|worker| (worker, payload.clone())));
        }
    }
    Load { block: 32, workers, frames, blocks: blocks * workers, prompts, passes }
}

fn measure(load: &Load, threads: usize, lookups: u64, round: u64) {
    let index = Index::new();
    let mut queues: Vec<Vec<(usize, Bytes)>> = vec![Vec::new(); threads];
    for (worker, frame) in &load.frames {
        let worker = *worker as usize;
        queues[worker % threads].push((worker / threads, frame.clone()));
    }
    let done = AtomicBool::new(false);
    let (mut wall, mut cpu, mut lat) = (0.0, 0.0, Lat(Vec::new()));
    std::thread::scope(|s| {
        let reader = s.spawn(|| look_up(&index, &load.prompts, lookups, &done));
        let (t, c) = (Instant::now(), cpu_now(libc::CLOCK_PROCESS_CPUTIME_ID));
        let drains: Vec<_> = queues
            .iter()
            .enumerate()
            .map(|(i, queue)| {
                let index = &index;
                s.spawn(move || drain(load, queue, i, threads, index))
            })
            .collect();
        drains.into_iter().for_each(|d| d.join().expect("a drain"));
        (wall, cpu) = (t.elapsed().as_secs_f64(), cpu_now(libc::CLOCK_PROCESS_CPUTIME_ID) - c);
        done.store(true, Relaxed);
        lat = reader.join().expect("a reader");
    });
    let blocks = (load.blocks * load.passes) as f64;
    let mean = lat.mean();
    lat.sort();
    let us = |p| f64::from(lat.pct(p)) / 1e3;
    println!(
        "round {round} {threads} threads: {:6.2} M blocks/s, {:6.1} ns of CPU a block | {} lookups: mean {:.2} p50 {:.2} p99 {:.2} p99.9 {:.2} max {:.1} us | entries {}",
        blocks / wall / 1e6,
        cpu * 1e9 / blocks,
        lat.0.len(),
        mean / 1e3,
        us(0.5),
        us(0.99),
        us(0.999),
        us(1.0),
        index.stats().entries,
    );
}

fn drain(load: &Load, queue: &[(usize, Bytes)], first: usize, step: usize, index: &Index) {
    let mut options = StreamOptions::new(load.block);
    options.replay = false;
    let ids = (first as u64..load.workers).step_by(step);
    let stream = |id| {
        let rank = WorkerRank::new(id, 0);
        (Sequencer::new(EventFormat::EngineBatches { rank }, options.clone()), 0)
    };
    let mut streams: Vec<(Sequencer, u64)> = ids.map(stream).collect();
    let mut out = Vec::new();
    for _ in 0..load.passes {
        for (stream, payload) in queue {
            let (sequencer, sequence) = &mut streams[*stream];
            let frame = Frame { sequence: *sequence, payload: payload.clone() };
            *sequence += 1;
            sequencer.step(Time::ZERO, SourceEvent::Live(frame), index, &mut out);
            out.clear();
        }
    }
    for (sequencer, sequence) in &streams {
        let counts = sequencer.status().counts;
        assert_eq!((counts.batches, counts.refused), (*sequence, 0), "every frame counts: {counts:?}");
    }
}

/// Looks a prompt up so often a second, and says how long each call took.
fn look_up(index: &Index, prompts: &[Vec<LocalHash>], rate: u64, done: &AtomicBool) -> Lat {
    let (mut lat, mut found, mut x) = (Vec::new(), Matches::new(), 1);
    if rate == 0 {
        return Lat(lat);
    }
    let every = Duration::from_nanos(1_000_000_000 / rate);
    while !done.load(Relaxed) {
        std::thread::sleep(every);
        x = mix(x + 1);
        let t = Instant::now();
        index.find(&prompts[x as usize % prompts.len()], &mut found);
        lat.push(t.elapsed().as_nanos() as u32);
    }
    Lat(lat)
}

fn cpu_now(clock: i32) -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}
