//! What is asked of our index alone. `own restore [BLOCKS]`: how long does a snapshot of so many blocks take
//! to write and to restore? `own writers TRACE`: what do 1, 2 and 4 threads get through the one lock of the
//! writers, and how does that compare with the work that an event takes outside of it?
//!
//! `writers` hands each thread the events of its own workers (8 workers with 131,072 blocks each), once as
//! they are and once with the work that comes before: the 16 tokens of each stored block are hashed.
use index_bench::index::Index as _;
use index_bench::ours::{Event, Kvasir};
use index_bench::sim::{self, Config, Item};
use index_bench::trace;
use kvasir_index::Index;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use std::time::Instant;

const CHAIN: u64 = 500;
const WORKERS: u64 = 8;

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    match a.first().map(String::as_str) {
        Some("restore") => restore(a.get(1).and_then(|n| n.parse().ok()).unwrap_or(2_000_000)),
        Some("writers") => writers(&a[1]),
        _ => {
            eprintln!("usage: own restore [BLOCKS] | own writers TRACE");
            std::process::exit(2);
        }
    }
}

/// Chains of 500 blocks on 8 workers; each is on one worker, and on another up to its half.
fn restore(blocks: u64) {
    let index = Index::new();
    for chain in 0..blocks / CHAIN {
        let block = |i: u64| StoredBlock {
            engine: EngineHash(index_bench::index::mix(chain * CHAIN + i + 1)),
            local: LocalHash(index_bench::index::mix(!(chain * CHAIN + i))),
        };
        let all: Vec<StoredBlock> = (0..CHAIN).map(block).collect();
        for (worker, len) in [(chain % WORKERS, CHAIN), ((chain + 1) % WORKERS, CHAIN / 2)] {
            let blocks = all[..len as usize].to_vec();
            let event = KvEvent::Stored { tier: Tier::Device, parent: None, blocks };
            index.apply(WorkerRank::new(worker, 0), &event).unwrap();
        }
    }
    let before = index.stats();
    let t = Instant::now();
    let bytes = index.snapshot();
    let written = t.elapsed();
    for _ in 0..3 {
        let copy = Index::new();
        let t = Instant::now();
        copy.restore(&bytes).unwrap();
        let restored = t.elapsed();
        let after = copy.stats();
        assert_eq!((after.blocks, after.entries), (before.blocks, before.entries));
        println!(
            "restore: {} blocks, {} entries, {:.1} MB; written in {:.0} ms, restored in {:.0} ms",
            after.blocks,
            after.entries,
            bytes.len() as f64 / 1e6,
            written.as_secs_f64() * 1e3,
            restored.as_secs_f64() * 1e3
        );
    }
}

fn writers(path: &str) {
    let trace = trace::load(path, false, 0);
    let config = Config {
        workers: 8,
        capacity: 131_072,
        id_tokens: 512,
        block_tokens: 16,
        copies: 1,
        chunk: 512,
        ms_per_token: 20.0,
        random_eviction: false,
    };
    let w = sim::build(&trace, &config);
    let blocks = (w.stored_blocks() + w.removed_blocks()) as f64;
    for hashed in [false, true] {
        for threads in [1, 2, 4] {
            let mut shares: Vec<Vec<(WorkerRank, KvEvent)>> = (0..threads).map(|_| Vec::new()).collect();
            for item in w.items() {
                if let Item::Event(e) = item
                    && let Event::Kv(rank, event) = Kvasir::event(e)
                {
                    shares[rank.worker.0 as usize % threads].push((rank, event));
                }
            }
            let index = Index::new();
            let (t, cpu) = (Instant::now(), cpu_now());
            std::thread::scope(|s| {
                for share in &shares {
                    s.spawn(|| share.iter().for_each(|(rank, e)| apply(&index, *rank, e, hashed)));
                }
            });
            println!(
                "writers: {threads} threads{}: {:.1} ns of CPU a block in all, {:.1} M blocks/s of wall time",
                if hashed { ", tokens hashed first" } else { "" },
                (cpu_now() - cpu) * 1e9 / blocks,
                blocks / t.elapsed().as_secs_f64() / 1e6
            );
        }
    }
}

/// CPU seconds of this process: other work on the machine does not count, waiting for the lock does as far as
/// it takes CPU.
fn cpu_now() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn apply(index: &Index, rank: WorkerRank, event: &KvEvent, hashed: bool) {
    if let (true, KvEvent::Stored { blocks, .. }) = (hashed, event) {
        for block in blocks {
            let tokens: [u8; 64] = std::array::from_fn(|i| (block.local.0 >> (i % 8)) as u8);
            std::hint::black_box(xxhash_rust::xxh3::xxh3_64_with_seed(&tokens, 1337));
        }
    }
    // A refused event is an answer; the replay goes on as a router would.
    drop(index.apply(rank, event));
}
