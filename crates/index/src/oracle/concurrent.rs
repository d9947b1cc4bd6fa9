//! Histories of several ranks at once, each rank on a thread of its own or with the others of its worker.
//!
//! What a rank's events do, and whether they are refused, depends on that rank's events alone: engine hashes
//! mean nothing between ranks, and nothing here has a budget. So whatever the threads do to each other, every
//! answer to an event is the oracle's, and when all have stopped the index equals an oracle that was told
//! the same, one rank after the other.

use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_types::{KvEvent, WorkerRank};

use super::history::{RANKS, Source, WORKERS, check_copies, check_empty, check_step, event};
use super::{Oracle, gaps};
use crate::{ApplyError, Index};

/// A step of one rank's history, with what must come of it.
enum Step {
    Event(WorkerRank, KvEvent, Result<(), ApplyError>),
    RankGone(WorkerRank),
}

/// Which histories are played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HistoryKind {
    /// Short paths of few contents, names that collide, clears.
    Tangled,
    /// Long chains that ranks share, with gaps, duplicates and removals of what is not there.
    Chains,
    /// The same chains as engines report them: nothing twice, nothing that is not there.
    Orderly,
}

/// Plays the histories that `bytes` stand for, on `threads` threads, while another asks for everything that
/// needs the index to itself.
///
/// # Panics
/// If the index and the oracle disagree, or the index contradicts itself.
pub fn check_concurrent_histories(bytes: &[u8], threads: usize, kind: HistoryKind) {
    let index = Index::new();
    let floor = index.stats().bytes;
    let mut oracle = Oracle::default();
    let ranks = (0..WORKERS).flat_map(|w| (0..RANKS).map(move |r| (w, r)));
    let ranks: Vec<WorkerRank> = ranks
        .map(|(w, r)| WorkerRank::new(w.into(), r.into()))
        .collect();
    let mut shares: Vec<Vec<Step>> = (0..threads.max(1)).map(|_| Vec::new()).collect();
    let each = bytes.len().div_ceil(ranks.len()).max(1);
    for ((i, rank), bytes) in ranks.iter().enumerate().zip(bytes.chunks(each)) {
        let share = &mut shares[i % threads.max(1)];
        let history = history(*rank, bytes, kind, &mut oracle);
        interleave(share, history, i / threads.max(1));
    }
    play(&index, &shares, floor);
    let mut source = Source::new(bytes);
    let prompts: Vec<_> = (0..40).map(|_| source.prompt()).collect();
    check_step(&index, &oracle, prompts.into_iter());
    if kind != HistoryKind::Tangled {
        gaps::check_chains(&index, &oracle);
    }
    check_copies(&index, &oracle, &mut source);
    check_empty(&index, floor);
}

fn history(rank: WorkerRank, bytes: &[u8], kind: HistoryKind, oracle: &mut Oracle) -> Vec<Step> {
    let mut source = Source::new(bytes);
    let mut steps = Vec::new();
    while !source.is_over() {
        if source.below(40) == 0 {
            oracle.remove_rank(rank);
            steps.push(Step::RankGone(rank));
            continue;
        }
        let event = match kind {
            HistoryKind::Tangled => event(&mut source, rank),
            HistoryKind::Chains => gaps::event(&mut source),
            HistoryKind::Orderly => gaps::orderly_event(&mut source, oracle, rank),
        };
        let expected = oracle.apply(rank, &event);
        steps.push(Step::Event(rank, event, expected));
    }
    steps
}

/// Mixes another rank's history into a thread's, each in its own order.
fn interleave(share: &mut Vec<Step>, history: Vec<Step>, others: usize) {
    let before = std::mem::take(share);
    let mut before = before.into_iter();
    for step in history {
        share.extend(before.by_ref().take(others));
        share.push(step);
    }
    share.extend(before);
}

fn play(index: &Index, shares: &[Vec<Step>], floor: u64) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = shares
            .iter()
            .map(|share| scope.spawn(|| share.iter().for_each(|step| step.play(index))))
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                index.check_invariants();
                let (copy, replayed) = (Index::new(), Index::new());
                let kept = index.snapshot().map(|bytes| copy.restore(&bytes));
                assert_eq!(kept, Ok(Ok(())));
                copy.check_invariants();
                for (rank, event) in index.dump() {
                    assert_eq!(replayed.apply(rank, &event), Ok(()), "{event:?} of a dump");
                }
                assert!(index.stats().bytes >= floor);
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|w| w.join()).collect();
        done.store(true, Ordering::Release);
        for outcome in ended {
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

impl Step {
    fn play(&self, index: &Index) {
        match self {
            Self::Event(rank, event, expected) => {
                assert_eq!(index.apply(*rank, event), *expected, "{rank} {event:?}");
            }
            Self::RankGone(rank) => index.remove_rank(*rank),
        }
    }
}
