//! What the replay does not ask. `own restore [BLOCKS]`: how long does a snapshot of so many blocks take to
//! write and to restore? `own writers TRACE [kvasir|crtc|hashed] [THREADS]`: how much do 1, 2 and 4 threads
//! that write at once get done? `own decisions [SECONDS]`: how long does a request wait to note where it was sent, while
//! what was noted before expires or is too much?
//!
//! `writers` hands each thread the events of its own workers (8 workers with 131,072 blocks each): to our index;
//! to the peer's, run as its own pool of event threads does, with the events in the threads' queues already;
//! or to ours with the work that comes before: the 16 tokens of each stored block are hashed.
use index_bench::index::{Ev, Index as _};
use index_bench::ours::{Event, Kvasir};
use index_bench::peers::Crtc;
use index_bench::sim::{self, Config, Item};
use index_bench::trace;
use kvasir_index::{Approximate, Index, IndexOptions};
use kvasir_types::{EngineHash, KvEvent, LocalHash, SequenceHash, StoredBlock, Tier, Time, WorkerRank};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const CHAIN: u64 = 500;
const WORKERS: u64 = 8;

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    match a.first().map(String::as_str) {
        Some("restore") => restore(a.get(1).and_then(|n| n.parse().ok()).unwrap_or(2_000_000)),
        Some("writers") => {
            let what = a.get(2).map_or("kvasir", String::as_str);
            let threads: Vec<usize> = a[3.min(a.len())..].iter().filter_map(|n| n.parse().ok()).collect();
            writers(&a[1], what, if threads.is_empty() { &[1, 2, 4] } else { &threads })
        }
        Some("decisions") => decisions(a.get(1).and_then(|n| n.parse().ok()).unwrap_or(10)),
        _ => {
            eprintln!(
                "usage: own restore [BLOCKS] | own writers TRACE [kvasir|crtc|hashed] [THREADS...] | own decisions [SECONDS]"
            );
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
    let bytes = index.snapshot().unwrap();
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

/// 12,000 decisions a second of virtual time, as fast as they go: prompts of 250 blocks, of which 8 heads of 219 are
/// shared. With a TTL of 2 s 740,000 blocks are believed in and as many expire as are added; with one of 120 s there are
/// too many, and as many are pruned. A second thread sweeps ten times a virtual second, as the router's timer does.
fn decisions(seconds: u64) {
    const EACH: Duration = Duration::from_nanos(1_000_000_000 / 12_000);
    for ttl in [2, 120] {
        let approximate = Approximate { ttl: Duration::from_secs(ttl), ..Approximate::default() };
        let index = Index::with_options(&IndexOptions { approximate: Some(approximate), ..IndexOptions::default() });
        let (clock, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let mut took = Vec::new();
        let sweeps = std::thread::scope(|s| {
            let sweeper = s.spawn(|| {
                let (mut next, mut sweeps) = (0, 0u64);
                while !over.load(Relaxed) {
                    let now = clock.load(Relaxed);
                    if now < next {
                        std::thread::sleep(Duration::from_micros(50));
                        continue;
                    }
                    next = now + 100_000_000;
                    while index.expire_some(Time::from_nanos(now)) {
                        sweeps += 1;
                        std::thread::yield_now();
                    }
                }
                sweeps
            });
            for n in 0..seconds * 12_000 {
                let name = |i: u64| match i {
                    0..219 => (n % 8) << 32 | i,
                    _ => (n + 8) << 32 | i,
                };
                let locals: Vec<LocalHash> = (0..250).map(|i| LocalHash(index_bench::index::mix(name(i)))).collect();
                let names: Vec<SequenceHash> = locals.iter().map(|l| SequenceHash(index_bench::index::mix(l.0))).collect();
                let now = Time::ZERO + EACH * n as u32;
                clock.store(now.as_nanos(), Relaxed);
                let t = Instant::now();
                index.record_routing(now, WorkerRank::new(n % 8 % 2, 0), &locals, &names);
                took.push(t.elapsed());
            }
            over.store(true, Relaxed);
            sweeper.join().unwrap_or(0)
        });
        // What came when there was nothing to forget yet is left out.
        let mut took = took.split_off(took.len() / 3);
        took.sort_unstable();
        let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
        let mean = took.iter().sum::<Duration>().as_secs_f64() * 1e6 / took.len() as f64;
        let stats = index.stats();
        println!(
            "decisions: ttl {ttl} s: mean {mean:.1}, p50 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1} us; {} entries, {:.0} bytes each, {} pruned, {sweeps} sweeps",
            at(0.5), at(0.99), at(0.999), at(1.0), stats.entries, stats.bytes as f64 / stats.entries as f64, stats.pruned
        );
    }
}

fn writers(path: &str, what: &str, threads: &[usize]) {
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
    for &threads in threads {
        let (cpu, wall) = match what {
            "crtc" => {
                let shares = shares(&w, threads, |e| Some(Crtc::event(e)));
                let index = Crtc::new(8);
                at_once(shares, |share| index.take(std::mem::take(share)))
            }
            _ => {
                let shares = shares(&w, threads, |e| match Kvasir::event(e) {
                    Event::Kv(rank, event) => Some((rank, event)),
                    _ => None,
                });
                let (index, hashed) = (Index::new(), what == "hashed");
                at_once(shares, |share| share.iter().for_each(|(rank, e)| apply(&index, *rank, e, hashed)))
            }
        };
        println!(
            "writers: {what}, {threads} threads: {:.1} ns of CPU a block in all, {:.1} M blocks/s of wall time",
            cpu * 1e9 / blocks,
            blocks / wall / 1e6
        );
    }
}

/// The events of each thread's workers.
fn shares<E>(w: &sim::Workload, threads: usize, event: impl Fn(Ev<'_>) -> Option<E>) -> Vec<Vec<E>> {
    let mut shares: Vec<Vec<E>> = (0..threads).map(|_| Vec::new()).collect();
    for item in w.items() {
        let Item::Event(e) = item else { continue };
        let (Ev::Store { worker, .. } | Ev::Remove { worker, .. } | Ev::RemoveWorker { worker }) = e;
        shares[worker as usize % threads].extend(event(e));
    }
    shares
}

/// CPU and wall seconds until every thread has done its share. What it leaves of its events is freed later.
fn at_once<E: Send>(mut shares: Vec<Vec<E>>, work: impl Fn(&mut Vec<E>) + Sync) -> (f64, f64) {
    let (t, cpu, work) = (Instant::now(), cpu_now(), &work);
    std::thread::scope(|s| {
        for share in &mut shares {
            s.spawn(move || work(share));
        }
    });
    (cpu_now() - cpu, t.elapsed().as_secs_f64())
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
    let _refused = index.apply(rank, event);
}
