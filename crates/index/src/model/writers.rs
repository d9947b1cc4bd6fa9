//! Two writers at once, under every interleaving of their locks: loom runs the whole index.
//!
//! Each model ends with what both ranks hold, which does not depend on the order, and with a tree that does
//! not contradict itself. Interleavings with more than [`SWITCHES`] forced switches are left out.

use std::sync::Arc;

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use loom::thread as interleaved;

use crate::{Index, Matches};

const SWITCHES: usize = 3;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank::new(worker, 0)
}

/// Blocks by their contents; a block's name says its whole path.
fn stored(path: &[u64], from: usize) -> KvEvent {
    let block = |i: usize| StoredBlock {
        engine: name(&path[..=i]),
        local: LocalHash(path[i]),
    };
    KvEvent::Stored {
        tier: Tier::Device,
        parent: from.checked_sub(1).map(|i| name(&path[..=i])),
        blocks: (from..path.len()).map(block).collect(),
    }
}

fn removed(path: &[u64], from: usize) -> KvEvent {
    KvEvent::Removed {
        tier: Tier::Device,
        blocks: (from..path.len())
            .rev()
            .map(|i| name(&path[..=i]))
            .collect(),
    }
}

fn name(path: &[u64]) -> EngineHash {
    EngineHash(path.iter().fold(7, |name, local| name * 100 + local))
}

/// What is applied before, then each rank's events at once, and how deep each rank must then hold `prompt`.
#[derive(Clone)]
struct Model {
    before: Vec<(u64, KvEvent)>,
    concurrent: [Vec<KvEvent>; 2],
    prompt: Vec<u64>,
    depths: [u32; 2],
}

impl Model {
    fn check(self) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(SWITCHES);
        builder.check(move || {
            let model = self.clone();
            spawn(move || model.run()).join().unwrap();
        });
    }

    fn run(self) {
        let index = Arc::new(Index::new());
        for (worker, event) in &self.before {
            assert_eq!(index.apply(rank(*worker), event), Ok(()));
        }
        let [first, second] = self.concurrent;
        let other = spawn({
            let index = Arc::clone(&index);
            move || apply(&index, 1, &second)
        });
        apply(&index, 0, &first);
        other.join().unwrap();
        index.check_invariants();
        let prompt: Vec<LocalHash> = self.prompt.iter().map(|l| LocalHash(*l)).collect();
        let mut found = Matches::new();
        index.find(&prompt, &mut found);
        let depth = |worker| found.get(rank(worker)).map_or(0, |m| m.device);
        assert_eq!([depth(0), depth(1)], self.depths);
    }
}

fn apply(index: &Index, worker: u64, events: &[KvEvent]) {
    for event in events {
        assert_eq!(index.apply(rank(worker), event), Ok(()), "{event:?}");
    }
}

/// With a stack that an index fits on.
fn spawn(f: impl FnOnce() + Send + 'static) -> interleaved::JoinHandle<()> {
    let builder = interleaved::Builder::new().stack_size(1 << 17);
    builder.spawn(f).unwrap()
}

fn model(
    before: &[(u64, KvEvent)],
    concurrent: [Vec<KvEvent>; 2],
    prompt: &[u64],
    depths: [u32; 2],
) {
    let (before, prompt) = (before.to_vec(), prompt.to_vec());
    let model = Model {
        before,
        concurrent,
        prompt,
        depths,
    };
    model.check();
}

/// What makes a rank known, away from what the models are about.
fn known() -> Vec<(u64, KvEvent)> {
    vec![(0, stored(&[9], 0)), (1, stored(&[9], 0))]
}

#[test]
fn the_same_new_chain() {
    let events = || vec![stored(&[1, 2], 0)];
    model(&known(), [events(), events()], &[1, 2], [2, 2]);
}

#[test]
fn a_cut_and_a_removal_in_one_run() {
    let mut before = known();
    before.extend([(0, stored(&[1, 2, 3], 0)), (1, stored(&[1, 2, 3], 0))]);
    let branch = vec![stored(&[1, 4], 1)];
    model(
        &before,
        [branch, vec![removed(&[1, 2, 3], 2)]],
        &[1, 2, 3],
        [3, 2],
    );
}

#[test]
fn two_cuts_of_one_run() {
    let mut before = known();
    before.extend([(0, stored(&[1, 2, 3], 0)), (1, stored(&[1, 2, 3], 0))]);
    let (first, second) = (stored(&[1, 4], 1), stored(&[1, 2, 5], 2));
    model(&before, [vec![first], vec![second]], &[1, 2, 5], [2, 3]);
}

#[test]
fn a_leaf_grows_while_another_rank_comes_to_hold_it() {
    let mut before = known();
    before.push((0, stored(&[1], 0)));
    let (grows, follows) = (stored(&[1, 2], 1), stored(&[1], 0));
    model(&before, [vec![grows], vec![follows]], &[1, 2], [2, 1]);
}

#[test]
fn a_run_goes_while_another_rank_stores_it() {
    let mut before = known();
    before.push((0, stored(&[1, 2], 0)));
    let (goes, comes) = (removed(&[1, 2], 0), stored(&[1, 2], 0));
    model(&before, [vec![goes], vec![comes]], &[1, 2], [0, 2]);
}

#[test]
fn a_run_goes_and_comes_back() {
    let mut before = known();
    before.extend([(0, stored(&[1, 2], 0)), (1, stored(&[1, 2], 0))]);
    let back = vec![removed(&[1, 2], 0), stored(&[1, 2], 0)];
    model(&before, [back, vec![removed(&[1, 2], 1)]], &[1, 2], [2, 1]);
}
