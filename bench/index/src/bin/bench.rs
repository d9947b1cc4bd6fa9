//! See README.md. Usage: index-bench MODE INDEX TRACE [key=value ...]
use index_bench::alloc;
use index_bench::index::{Index, Step, digest_one, mix};
use index_bench::peers::*;
use index_bench::sim::{self, Config, Item, Workload};
use index_bench::stats::Lat;
use index_bench::trace;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

#[global_allocator]
static A: alloc::Counting = alloc::Counting;

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    if a.len() < 3 {
        eprintln!(
            "usage: index-bench replay|conc|mem|count|remove-worker|stats INDEX TRACE [workers=8 capacity=16384 copies=1 speed=1 limit=0 id_tokens=512 block_tokens=16 chunk=512 random=0 seconds=0]"
        );
        std::process::exit(2);
    }
    let o: HashMap<&str, f64> = a[3..]
        .iter()
        .map(|s| s.split_once('=').expect("key=value"))
        .map(|(k, v)| (k, v.parse().expect("number")))
        .collect();
    let get = |k: &str, d: f64| o.get(k).copied().unwrap_or(d);
    let mut trace =
        trace::load(&a[2], get("seconds", 0.0) != 0.0, get("limit", 0.0) as usize);
    trace.iter_mut().for_each(|r| r.at_ms /= get("speed", 1.0));
    let c = Config {
        workers: get("workers", 8.0) as u32,
        capacity: get("capacity", 16384.0) as u32,
        id_tokens: get("id_tokens", 512.0) as u32,
        block_tokens: get("block_tokens", 16.0) as u32,
        copies: get("copies", 1.0) as u32,
        chunk: get("chunk", 512.0) as usize,
        ms_per_token: get("ms_per_token", 20.0),
        random_eviction: get("random", 0.0) != 0.0,
    };
    let w = sim::build(&trace, &c);
    drop(trace);
    let n = w.lookups() as f64;
    eprintln!(
        "workload: W={} C={} copies={} lookups={} blocks/lookup={:.0} best depth={:.0} matched workers/lookup={:.1} routed hit={:.3} store events={} blocks={} remove events={} blocks={} live entries={} live unique={}",
        c.workers, c.capacity, c.copies, w.lookups(), w.prompt_blocks as f64 / n,
        w.best_blocks as f64 / n, w.matched_workers as f64 / n,
        w.hit_blocks as f64 / w.prompt_blocks as f64,
        w.store_events, w.stored_blocks(), w.remove_events, w.removed_blocks(),
        w.live_entries, w.live_blocks
    );
    match a[1].as_str() {
        "radix" => single::<Radix>(&a[0], &w, &c),
        "crtc" => both::<Crtc>(&a[0], &w, &c),
        "positional" => both::<Positional>(&a[0], &w, &c),
        "positional-binary" => both::<PositionalBinary>(&a[0], &w, &c),
        "kvindexer-actor" => both::<Actor>(&a[0], &w, &c),
        "threadpool-crtc" => both::<PoolCrtc>(&a[0], &w, &c),
        "branch-sharded-crtc" => both::<Branch>(&a[0], &w, &c),
        "kvasir" => both::<index_bench::ours::Kvasir>(&a[0], &w, &c),
        "none" => {}
        other => panic!("no index {other}"),
    }
}

fn both<I: Index>(mode: &str, w: &Workload, c: &Config)
where
    I::Reader: Send + Sync,
{
    if mode == "conc" { conc::<I>(w, c) } else { single::<I>(mode, w, c) }
}

fn single<I: Index>(mode: &str, w: &Workload, c: &Config) {
    match mode {
        "replay" => replay::<I>(w, c),
        "count" => count::<I>(w, c),
        "mem" => mem::<I>(w, c),
        "remove-worker" => remove_worker::<I>(w, c),
        "stats" => {}
        "conc" => eprintln!("{}: one thread only", I::NAME),
        m => panic!("no mode {m}"),
    }
}

fn steps<I: Index>(w: &Workload, marks: bool) -> Vec<Step<I::Event>> {
    w.items()
        .filter_map(|i| match i {
            Item::Event(e) => Some(Step::Apply(I::event(e))),
            Item::Lookup(i) => marks.then_some(Step::Mark(i)),
        })
        .collect()
}

/// Lookups before this one warm the index up and are left out of the latencies.
fn warm(w: &Workload) -> usize {
    w.lookups() / 4
}

/// A lookup that took longer than this was interrupted by other work on the machine; it is
/// counted apart. (The slowest undisturbed lookups seen take about a tenth of it.)
const PREEMPTED: Duration = Duration::from_micros(1000);

/// CPU seconds of this thread.
fn cpu_now() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

#[inline(never)]
fn timed_find<I: Index>(r: &I::Reader, q: I::Query, out: &mut I::Scores) -> Duration {
    let t = Instant::now();
    I::find_matches(r, q, out);
    t.elapsed()
}

fn replay<I: Index>(w: &Workload, c: &Config) {
    let steps = steps::<I>(w, true);
    let mut idx = I::new(c.workers);
    let r = idx.reader();
    let mut out = I::Scores::default();
    let mut lat = Vec::with_capacity(w.lookups());
    let mut wrong = 0u64;
    let mut preempted = 0u64;
    let mut blocks = 0u64;
    let mut events = 0.0;
    let mut left = None;
    idx.drive(steps, &mut |i| {
        // The driver may queue the steps before it starts on them: the clock runs from the
        // first mark (which precedes every event) to the last, and stands during marks. It is
        // this thread's CPU time, so that other work on the machine does not count.
        let t = cpu_now();
        if let Some(l) = left {
            events += t - l;
        }
        let (local, seq) = w.query(i as usize);
        let d = timed_find::<I>(&r, I::query(local, seq), &mut out);
        if i as usize >= warm(w) {
            if d > PREEMPTED {
                preempted += 1;
            } else {
                lat.push(d.as_nanos() as u32);
                blocks += local.len() as u64;
            }
        }
        let mut digest = 0u64;
        I::each(&out, &mut |wk, d| digest = digest.wrapping_add(digest_one(wk, d)));
        if digest != w.truth[i as usize] {
            wrong += 1;
        }
        left = Some(cpu_now());
    });
    let ev_blocks = (w.stored_blocks() + w.removed_blocks()) as f64;
    let ev = (w.store_events + w.remove_events) as f64;
    let mut lat = Lat(lat);
    let mean = lat.mean();
    lat.sort();
    println!(
        "replay {:<20} W={:<4} events: {:.2} M blocks/s, {:.3} M events/s, {:.1} ns/block | lookup: {:.1} k/s, mean {:.2} us, p50 {:.2} p99 {:.2} p999 {:.2} max {:.1} us, {:.2} ns/query block | wrong answers {}/{}, preempted {}",
        I::NAME, c.workers, ev_blocks / events / 1e6, ev / events / 1e6, events * 1e9 / ev_blocks,
        1e6 / mean, mean / 1e3, lat.pct(0.5) as f64 / 1e3, lat.pct(0.99) as f64 / 1e3,
        lat.pct(0.999) as f64 / 1e3, lat.pct(1.0) as f64 / 1e3,
        mean * lat.0.len() as f64 / blocks as f64, wrong, w.lookups(), preempted
    );
}

/// Lookups of the reader after the writer has ended.
const ALONE: usize = 200_000;

/// One writer flat out, one reader flat out, on two threads; then the reader alone.
fn conc<I: Index>(w: &Workload, c: &Config)
where
    I::Reader: Send + Sync,
{
    let steps = steps::<I>(w, true);
    let mut idx = I::new(c.workers);
    let r = idx.reader();
    let progress = AtomicU32::new(0);
    let started = AtomicBool::new(false);
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let mut lat = Vec::with_capacity(1 << 22);
            let mut out = I::Scores::default();
            let mut x = 1u64;
            while !started.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let mut preempted = 0u64;
            while !done.load(Ordering::Acquire) {
                // A request that arrived lately.
                x = mix(x.wrapping_add(0x9e37_79b9_7f4a_7c15));
                let p = progress.load(Ordering::Relaxed) as u64;
                let i = p.saturating_sub(x % 64) as usize;
                let (local, seq) = w.query(i);
                let d = timed_find::<I>(&r, I::query(local, seq), &mut out);
                if p as usize >= warm(w) && lat.len() < 1 << 22 {
                    if d > PREEMPTED {
                        preempted += 1;
                    } else {
                        lat.push(d.as_nanos() as u32);
                    }
                }
            }
            // The same kind of requests again, now that nobody writes.
            let p = progress.load(Ordering::Relaxed) as u64;
            let mut alone = Vec::with_capacity(ALONE);
            while alone.len() < ALONE {
                x = mix(x.wrapping_add(0x9e37_79b9_7f4a_7c15));
                let (local, seq) = w.query(p.saturating_sub(x % 64) as usize);
                let d = timed_find::<I>(&r, I::query(local, seq), &mut out);
                if d <= PREEMPTED {
                    alone.push(d.as_nanos() as u32);
                }
            }
            (Lat(lat), preempted, Lat(alone))
        });
        let mut begin = None;
        idx.drive(steps, &mut |i| {
            if begin.is_none() {
                begin = Some((Instant::now(), cpu_now()));
                started.store(true, Ordering::Release);
            }
            progress.store(i, Ordering::Relaxed);
        });
        let (wall, cpu) = begin.unwrap();
        let (wall, cpu) = (wall.elapsed().as_secs_f64(), cpu_now() - cpu);
        done.store(true, Ordering::Release);
        let (mut lat, preempted, mut alone) = reader.join().unwrap();
        let alone_mean = alone.mean();
        alone.sort();
        let mean = lat.mean();
        lat.sort();
        let ev_blocks = (w.stored_blocks() + w.removed_blocks()) as f64;
        println!(
            "conc   {:<20} W={:<4} events: {:.2} M blocks/s (by the writer's CPU time {:.2}) | lookup: {:.1} k/s, mean {:.2} us, p50 {:.2} p99 {:.2} p999 {:.2} us, n={} preempted {} | alone: mean {:.2} us, p50 {:.2}",
            I::NAME, c.workers, ev_blocks / wall / 1e6, ev_blocks / cpu / 1e6, 1e6 / mean, mean / 1e3,
            lat.pct(0.5) as f64 / 1e3, lat.pct(0.99) as f64 / 1e3, lat.pct(0.999) as f64 / 1e3,
            lat.0.len(), preempted, alone_mean / 1e3, alone.pct(0.5) as f64 / 1e3
        );
    });
}

/// Bytes live in the index at the end of the stream.
fn mem<I: Index>(w: &Workload, c: &Config) {
    alloc::ON.store(true, Ordering::SeqCst);
    let mut steps: Vec<Step<I::Event>> = Vec::with_capacity(w.items().count() + 4);
    let before = (alloc::live(), alloc::allocations());
    steps.push(Step::Mark(0));
    for i in w.items() {
        if let Item::Event(e) = i {
            steps.push(Step::Apply(I::event(e)));
        }
    }
    steps.push(Step::Mark(1));
    steps.extend(I::cleanup().map(Step::Apply));
    steps.push(Step::Mark(2));
    // What the queued events own; the index frees it as it goes.
    let payload = (alloc::live() - before.0, alloc::allocations() - before.1);
    let mut idx = I::new(c.workers);
    let mut at = [(0, 0, Instant::now()); 3];
    idx.drive(steps, &mut |i| {
        at[i as usize] = (alloc::live(), alloc::allocations(), Instant::now())
    });
    for (i, what) in [(1, "at the end"), (2, "after a cleanup")] {
        if i == 2 && I::cleanup().is_none() {
            break;
        }
        let bytes = (at[i].0 - at[0].0 + payload.0) as f64;
        let allocs = at[i].1 - at[0].1 + payload.1;
        println!(
            "mem    {:<20} W={:<4} {what}{}: {:.1} MB, {:.1} B per (block,worker) entry, {:.1} B per unique block, {} allocations live ({} entries, {} unique)",
            I::NAME, c.workers,
            if i == 2 { format!(" of {:.1} ms", (at[2].2 - at[1].2).as_secs_f64() * 1e3) } else { String::new() },
            bytes / 1e6, bytes / w.live_entries as f64,
            bytes / w.live_blocks as f64, allocs, w.live_entries, w.live_blocks
        );
    }
}

fn remove_worker<I: Index>(w: &Workload, c: &Config) {
    let mut steps = steps::<I>(w, false);
    let victims = 4.min(c.workers);
    for v in 0..victims {
        steps.push(Step::Mark(v));
        steps.push(Step::Apply(I::event(index_bench::index::Ev::RemoveWorker { worker: v })));
    }
    steps.push(Step::Mark(victims));
    let mut idx = I::new(c.workers);
    // This thread's CPU time, so that other work on the machine does not count. Callgrind collects from the
    // first removal to the end of the last.
    let mut t = Vec::new();
    idx.drive(steps, &mut |i| {
        if i == 0 || i == victims {
            toggle_collect();
        }
        t.push(cpu_now());
    });
    let ms: Vec<String> =
        t.windows(2).map(|p| format!("{:.2}", (p[1] - p[0]) * 1e3)).collect();
    println!(
        "rmwork {:<20} W={:<4} CPU ms each: {} ({} entries per worker)",
        I::NAME, c.workers, ms.join(" "), w.live_entries / c.workers as u64
    );
}

// ---------------------------------------------------------------- instruction counts
//
// Run under `valgrind --tool=callgrind --collect-atstart=no`. With COUNT=find the collector is on
// during lookups only, with COUNT=apply during events only; the totals are divided by hand.

#[cfg(target_arch = "x86_64")]
fn toggle_collect() {
    let args: [u64; 6] = [0x4354_0002, 0, 0, 0, 0, 0];
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            inout("rdx") 0u64 => _, in("rax") args.as_ptr(),
        )
    }
}
#[cfg(not(target_arch = "x86_64"))]
fn toggle_collect() {}

fn count<I: Index>(w: &Workload, c: &Config) {
    let find = std::env::var("COUNT").map(|v| v == "find").unwrap_or(true);
    let steps = steps::<I>(w, true);
    let mut idx = I::new(c.workers);
    let r = idx.reader();
    let mut out = I::Scores::default();
    let (mut n, mut blocks, mut on) = (0u64, 0u64, false);
    idx.drive(steps, &mut |i| {
        let (local, seq) = w.query(i as usize);
        if find {
            let q = I::query(local, seq);
            let counted = i as usize >= warm(w);
            if counted {
                n += 1;
                blocks += local.len() as u64;
                toggle_collect();
            }
            I::find_matches(&r, q, &mut out);
            if counted {
                toggle_collect();
            }
        } else {
            // From the first mark to the last: all events, and the (few) marks between them.
            if !on {
                on = true;
                toggle_collect();
            }
            if i as usize == w.lookups() - 1 {
                toggle_collect();
            }
        }
    });
    if find {
        println!("count find {} W={} lookups {} query blocks {}", I::NAME, c.workers, n, blocks);
    } else {
        println!(
            "count apply {} W={} blocks {} events {}",
            I::NAME, c.workers, w.stored_blocks() + w.removed_blocks(),
            w.store_events + w.remove_events
        );
    }
}
