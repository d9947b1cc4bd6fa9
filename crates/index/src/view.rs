//! What readers of a tree see, and the walk along a prompt.
//!
//! Readers take no lock and write nothing that another thread waits for. What they reach is kept alive by
//! epochs (`sdd`): a version that was replaced is freed after every lookup that could see it has ended.
//!
//! What a lookup promises while writers work: every block it credits was held at some moment during the
//! call, and every block that was held during the whole call, together with all before it, is credited.
//! Without a writer at work the answer is exact. Why it holds:
//!
//! - A run's locals, length and owners are read from one version, and (`end`, depth) names one path for
//!   ever (see `run`): what is credited lay on the prompt's path.
//! - A writer publishes before it links: a run's slot is filled before its edge appears, the tail of a cut
//!   run is reachable before the run is replaced by its head. So no step of a writer hides a run whose
//!   blocks stay held; each step is one store.
//! - A replaced edge table or slot directory is announced by `version`; a reader that misses an edge looks
//!   whether it has the newest one before it believes the miss.

use std::sync::Arc;

use kvasir_types::LocalHash;
use sdd::{AtomicShared, Guard, Ptr, Shared, Tag};

use crate::edges::Edges;
use crate::owners::Owners;
use crate::run::{LOWER, Run};
use crate::sync::{AtomicU64, Ordering};

/// The identity of the root's end: the start of every path.
pub(crate) const ROOT_END: u64 = 0;

/// Slots for runs that are made and dropped together.
pub(crate) const CHUNK: usize = 256;
pub(crate) type Chunk = [AtomicShared<Run>; CHUNK];

/// Where runs are found; replaced as a whole when it grows.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) edges: Arc<Edges>,
    pub(crate) chunks: Vec<Arc<Chunk>>,
}

/// The readers' side of a tree.
#[derive(Debug)]
pub(crate) struct View {
    directory: AtomicShared<Directory>,
    /// Counts directories.
    version: AtomicU64,
    /// How many (rank, tier) pairs below the device hold something.
    pub(crate) lower_holders: AtomicU64,
}

impl View {
    pub(crate) fn new(directory: Directory) -> Self {
        Self {
            directory: AtomicShared::new(directory),
            version: AtomicU64::new(0),
            lower_holders: AtomicU64::new(0),
        }
    }

    /// Whether anything lies below the device.
    #[inline]
    pub(crate) fn has_lower_tiers(&self) -> bool {
        self.lower_holders.load(Ordering::Acquire) > 0
    }

    /// Replaces the directory.
    pub(crate) fn publish(&self, directory: Directory) {
        let new = (Some(Shared::new(directory)), Tag::None);
        drop(self.directory.swap(new, Ordering::AcqRel));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Sets in `depths`, by slot, how many leading blocks each rank holds in device memory. With `winner`,
    /// stops once one rank is left.
    #[inline]
    pub(crate) fn walk(
        &self,
        guard: &Guard,
        prompt: &[LocalHash],
        winner: bool,
        live: &mut Vec<u64>,
        depths: &mut [u32],
    ) {
        live.clear();
        let mut step = Step::new(self, guard);
        let mut depth = 0;
        while let Some(run) = step.next(prompt, depth) {
            let len = run.len();
            let matched = run.common(&prompt[depth..], len);
            if depth == 0 {
                enter(&run.device, matched as u32, live, depths);
            } else {
                pass(&run.device, depth as u32, matched as u32, live, depths);
            }
            depth += matched;
            if matched < len as usize || settled(live, winner) {
                break;
            }
        }
        for (i, word) in live.iter().enumerate() {
            mark(depths, i, *word, depth as u32);
        }
    }

    /// Sets by slot how many leading blocks of the prompt each rank holds, tier by tier.
    pub(crate) fn walk_tiers(
        &self,
        guard: &Guard,
        prompt: &[LocalHash],
        device: &mut [u32],
        lower: &mut [[u32; 2]],
    ) {
        let mut step = Step::new(self, guard);
        let mut path: Vec<(&Run, u32)> = Vec::new();
        let mut depth = 0;
        while let Some(run) = step.next(prompt, depth) {
            let len = run.len();
            let matched = run.common(&prompt[depth..], len) as u32;
            path.push((run, matched));
            depth += matched as usize;
            if matched < len {
                break;
            }
        }
        for (slot, (device, lower)) in (0u32..).zip(device.iter_mut().zip(lower)) {
            let mut depth = 0;
            let tiers: [u32; 1 + LOWER] = std::array::from_fn(|tier| {
                let from = depth;
                depth = extend(&path, tier, slot, from);
                depth - from
            });
            *device = tiers[0];
            *lower = [tiers[1], tiers[2] + tiers[3]];
        }
    }
}

/// How deep a rank's blocks in one tier go on from depth `from` without a gap.
fn extend(path: &[(&Run, u32)], tier: usize, slot: u32, from: u32) -> u32 {
    let mut depth = from;
    for (run, matched) in path {
        if run.start + matched <= depth {
            continue;
        }
        let held = run.held(tier, slot);
        let end = run.start + held.until(depth - run.start, *matched);
        if end <= depth {
            break;
        }
        depth = end;
        if end < run.start + matched {
            break;
        }
    }
    depth
}

/// A reader on its way down.
struct Step<'g> {
    view: &'g View,
    guard: &'g Guard,
    version: u64,
    directory: Option<&'g Directory>,
    /// The end it stands at.
    end: u64,
}

impl<'g> Step<'g> {
    #[inline]
    fn new(view: &'g View, guard: &'g Guard) -> Self {
        let version = view.version.load(Ordering::Acquire);
        Self {
            view,
            guard,
            version,
            directory: view.directory.load(Ordering::Acquire, guard).as_ref(),
            end: ROOT_END,
        }
    }

    /// The run that goes on from here with the prompt's block at `depth`.
    #[inline]
    fn next(&mut self, prompt: &[LocalHash], depth: usize) -> Option<&'g Run> {
        let local = prompt.get(depth)?.0;
        loop {
            let directory = self.directory?;
            let load = |slot: u32| {
                let chunk = directory.chunks.get(slot as usize / CHUNK)?;
                let run = chunk[slot as usize % CHUNK].load(Ordering::Acquire, self.guard);
                Ptr::as_ref(&run)
            };
            let found = follow(&directory.edges, load, self.end, local, depth);
            if let Some(run) = found {
                self.end = run.end;
                return found;
            }
            let newest = self.view.version.load(Ordering::Acquire);
            if newest == self.version {
                return None;
            }
            self.version = newest;
            self.directory = self
                .view
                .directory
                .load(Ordering::Acquire, self.guard)
                .as_ref();
        }
    }
}

/// The run that goes on from `end` at `depth` with the block `local`, if `load` shows one.
#[inline]
pub(crate) fn follow<'a>(
    edges: &Edges,
    load: impl Fn(u32) -> Option<&'a Run>,
    end: u64,
    local: u64,
    depth: usize,
) -> Option<&'a Run> {
    edges.find(end, local, |slot| {
        let run = load(slot)?;
        let fits = run.follows == end && run.start as usize == depth;
        (fits && run.first() == local).then_some(run)
    })
}

/// Passes the first run, of which `matched` blocks are the prompt's.
#[inline]
fn enter(owners: &Owners, matched: u32, live: &mut Vec<u64>, depths: &mut [u32]) {
    live.extend((0..owners.full.words()).map(|i| owners.full.word(i)));
    for cut in &owners.cuts {
        if let Some(depth) = depths.get_mut(cut.slot as usize) {
            *depth = cut.len.min(matched);
        }
    }
    for patch in &owners.patches {
        if let Some(depth) = depths.get_mut(patch.slot as usize) {
            *depth = patch.bits.first_clear(0, matched);
        }
    }
}

/// Passes a later run: who of `live` does not hold all of it is left behind.
#[inline]
fn pass(owners: &Owners, depth: u32, matched: u32, live: &mut [u64], depths: &mut [u32]) {
    for cut in &owners.cuts {
        leave(cut.slot, || depth + cut.len.min(matched), live, depths);
    }
    for patch in &owners.patches {
        let held = || depth + patch.bits.first_clear(0, matched);
        leave(patch.slot, held, live, depths);
    }
    for (i, word) in live.iter_mut().enumerate() {
        let kept = *word & owners.full.word(i);
        mark(depths, i, *word & !kept, depth);
        *word = kept;
    }
}

/// Takes a rank out of `live`, if it is there, with the depth that it reached.
#[inline]
fn leave(slot: u32, depth: impl Fn() -> u32, live: &mut [u64], depths: &mut [u32]) {
    let (index, bit) = (slot as usize / 64, 1 << (slot % 64));
    if let Some(word) = live.get_mut(index).filter(|w| **w & bit != 0) {
        *word &= !bit;
        mark(depths, index, bit, depth());
    }
}

/// Whether going on cannot change the answer: nobody is left, or `winner` and only one.
#[inline]
fn settled(live: &[u64], winner: bool) -> bool {
    if winner {
        return live.iter().map(|w| w.count_ones()).sum::<u32>() <= 1;
    }
    live.iter().all(|w| *w == 0)
}

/// Sets the depth of the slots that a word of a set stands for. A slot that is not there yet belongs to a
/// rank that came after the lookup began.
#[inline]
fn mark(depths: &mut [u32], index: usize, mut word: u64, depth: u32) {
    let Some(depths) = depths.get_mut(index * 64..) else {
        return;
    };
    while word != 0 {
        if let Some(slot) = depths.get_mut(word.trailing_zeros() as usize) {
            *slot = depth;
        }
        word &= word - 1;
    }
}
