//! How many instructions does one decision cost, and how does that grow with the fleet?
//!
//! Both routers carry the same fleet: `workers` workers of one rank, each with 200 active requests of 64
//! blocks (32 of a system prompt that one worker in eight runs, 32 of their own), the last tenth of them
//! before their first token. A decision places one more prompt of `blocks` blocks of 16 tokens that begins with
//! one of 32 system prompts; a quarter of the workers hold its first 32 blocks, one in 64 holds half of it.
//! The lookup is not measured: both are handed its answer.
//!
//! *decide* is scoring all workers, choosing and booking; *end* is first token and freeing. The peer's figure
//! is its synchronous core (load projection, selector, booking); the channel and task around it are left out.
//! `linear` and `time` are our two costs on a fleet where no prompt waits, so that both send each request at once.
//! Answers are compared first (`check`): load and cost of every worker, and that each chose a cheapest one.

mod kvasir;
#[cfg(feature = "peer")]
mod peer;

#[cfg(feature = "peer")]
use std::collections::BTreeSet;
use std::hint::black_box;
use std::time::Instant;

/// Tokens per block.
const BLOCK: u32 = 16;
/// Active requests per worker, unless the last argument says otherwise.
const ACTIVE: u64 = 200;
/// Blocks of each of those.
const ACTIVE_BLOCKS: u64 = 64;
/// Leading blocks that requests of one group share.
const SHARED_BLOCKS: u64 = 32;
/// Groups that share them.
const GROUPS: u64 = 32;

/// Decisions before any is measured: buffers and our ring of records ([`RING`]) are then in use.
const WARM_UP: u64 = 300;
/// Records that our router keeps here; with the default of 4,096 the warm-up would take hours under callgrind.
const RING: u32 = 256;

/// A prompt to place, and what the index knows of it.
#[derive(Clone)]
struct Ask {
    id: u64,
    sequence: Vec<u64>,
    /// (worker, blocks held).
    held: Vec<(u64, u32)>,
}

trait Scheduler {
    /// What one decision takes besides the prompt, made outside the measured part.
    type Prepared;
    fn new(workers: u64) -> Self;
    /// Books a request on a given worker; `started` says whether its first token has come.
    fn seed(&mut self, id: u64, worker: u64, sequence: &[u64], started: bool);
    fn prepare(&mut self, ask: &Ask) -> Self::Prepared;
    fn decide(&mut self, prepared: Self::Prepared) -> u64;
    fn end(&mut self, id: u64);
    /// Per worker: prompt tokens waiting, blocks active with this prompt added.
    fn loads(&mut self, ask: &Ask) -> Vec<(u64, u64, u64)>;
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Chained hashes: the group's prefix, then blocks of this request alone.
fn sequence(group: u64, own: u64, blocks: u64) -> Vec<u64> {
    let mut hash = mix(group);
    (0..blocks)
        .map(|at| {
            let word = if at < SHARED_BLOCKS { group } else { own };
            hash = mix(hash ^ mix(word) ^ at);
            hash
        })
        .collect()
}

fn fleet<S: Scheduler>(workers: u64, active: u64) -> S {
    let mut scheduler = S::new(workers);
    for worker in 0..workers {
        for i in 0..active {
            let id = 1_000_000_000 + worker * active + i;
            let group = (worker % 8 + 8 * (i % 4)) % GROUPS;
            let sequence = sequence(group, id, ACTIVE_BLOCKS);
            scheduler.seed(id, worker, &sequence, i < active * 9 / 10);
        }
    }
    scheduler
}

fn ask(id: u64, workers: u64, blocks: u64) -> Ask {
    let group = mix(id) % GROUPS;
    let first = mix(id + 7) % 4;
    let held = (0..workers).filter(|w| w % 4 == first).map(|w| {
        let deep = w % 64 == first;
        (
            w,
            if deep {
                (blocks / 2) as u32
            } else {
                SHARED_BLOCKS as u32
            },
        )
    });
    Ask {
        id,
        sequence: sequence(group, id, blocks),
        held: held.collect(),
    }
}

#[inline(never)]
fn measured_decide<S: Scheduler>(scheduler: &mut S, prepared: S::Prepared) -> u64 {
    scheduler.decide(prepared)
}

#[inline(never)]
fn measured_end<S: Scheduler>(scheduler: &mut S, id: u64) {
    scheduler.end(id);
}

/// Decides and ends `count` requests; the times of both parts in nanoseconds, sorted.
fn run<S: Scheduler>(workers: u64, blocks: u64, count: u64, active: u64) -> (Vec<u64>, Vec<u64>) {
    let mut scheduler: S = fleet(workers, active);
    for id in 1..=WARM_UP {
        let prepared = scheduler.prepare(&ask(id, workers, blocks));
        scheduler.decide(prepared);
        scheduler.end(id);
    }
    let (mut decide, mut end) = (Vec::new(), Vec::new());
    for id in WARM_UP + 1..=WARM_UP + count {
        let prepared = scheduler.prepare(&ask(id, workers, blocks));
        let begun = Instant::now();
        black_box(measured_decide(&mut scheduler, prepared));
        decide.push(begun.elapsed().as_nanos() as u64);
        let begun = Instant::now();
        measured_end(&mut scheduler, id);
        end.push(begun.elapsed().as_nanos() as u64);
    }
    decide.sort_unstable();
    end.sort_unstable();
    (decide, end)
}

/// Both routers say the same of every worker, and each choice costs the least.
#[cfg(feature = "peer")]
fn check(workers: u64, blocks: u64, active: u64) {
    let mut ours: kvasir::Kvasir<{ kvasir::LOADED }> = fleet(workers, active);
    let mut theirs: peer::Peer = fleet(workers, active);
    for id in 1..=20 {
        let ask = ask(id, workers, blocks);
        let (a, b) = (ours.loads(&ask), theirs.loads(&ask));
        assert_eq!(a, b, "loads of all workers");
        let costs: Vec<f64> = a
            .iter()
            .map(|&(worker, prefill, decode)| {
                let held = ask.held.iter().find(|h| h.0 == worker).map_or(0, |h| h.1);
                let isl = blocks * u64::from(BLOCK);
                let raw = (prefill + isl) as f64 / f64::from(BLOCK);
                (raw - f64::from(held)).max(0.0) + decode as f64
            })
            .collect();
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let cheapest: BTreeSet<u64> = a
            .iter()
            .zip(&costs)
            .filter(|(_, c)| **c == least)
            .map(|(r, _)| r.0)
            .collect();
        let prepared = ours.prepare(&ask);
        let chosen = ours.decide(prepared);
        assert!(
            cheapest.contains(&chosen),
            "ours took {chosen}, cheapest are {cheapest:?}"
        );
        let prepared = theirs.prepare(&ask);
        let chosen = theirs.decide(prepared);
        assert!(
            cheapest.contains(&chosen),
            "theirs took {chosen}, cheapest are {cheapest:?}"
        );
        ours.end(id);
        theirs.end(id);
    }
    println!("checked: {workers} workers, prompts of {blocks} blocks, 20 decisions each");
}

fn report<S: Scheduler>(name: &str, workers: u64, blocks: u64, count: u64, active: u64) {
    let (decide, end) = run::<S>(workers, blocks, count, active);
    let at =
        |list: &[u64], share: f64| list[((list.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    println!(
        "{name:7} {workers:5} workers {blocks:5} blocks  decide p50 {:8.2} µs p99 {:8.2} µs  end p50 {:6.2} µs p99 {:6.2} µs",
        at(&decide, 0.5),
        at(&decide, 0.99),
        at(&end, 0.5),
        at(&end, 0.99)
    );
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number =
        |at: usize, default: u64| args.get(at).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (workers, blocks, count) = (number(2, 64), number(3, 64), number(4, 200));
    let active = number(5, ACTIVE);
    match args.get(1).map(String::as_str) {
        #[cfg(feature = "peer")]
        Some("check") => check(workers, blocks, active),
        #[cfg(feature = "peer")]
        Some("peer") => report::<peer::Peer>("peer", workers, blocks, count, active),
        Some("kvasir") => {
            report::<kvasir::Kvasir<{ kvasir::LOADED }>>("kvasir", workers, blocks, count, active);
        }
        Some("linear") => {
            report::<kvasir::Kvasir<{ kvasir::LINEAR }>>("linear", workers, blocks, count, active);
        }
        Some("time") => {
            report::<kvasir::Kvasir<{ kvasir::SECONDS }>>("time", workers, blocks, count, active);
        }
        _ => println!(
            "placement-bench check|kvasir|peer|linear|time [workers] [blocks] [decisions] [active per worker]"
        ),
    }
}
