//! What readers and a writer meet at, under every interleaving: loom runs the real edges and runs.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kvasir-index --lib model`. Slots are numbers of prepared versions
//! here, so that reclaiming memory, which is `sdd`'s part, is left out.

mod writers;

use std::sync::Arc;

use kvasir_types::LocalHash;
use loom::sync::atomic::AtomicUsize;
use loom::thread as interleaved;

use crate::bits::Bits;
use crate::edges::Edges;
use crate::run::Run;
use crate::sync::Ordering;
use crate::view::{ROOT_END, follow};

/// Versions of runs, and which one each slot shows; version 0 stands for none.
struct Published {
    edges: Edges,
    versions: Vec<Run>,
    slots: Vec<AtomicUsize>,
}

impl Published {
    fn new(versions: Vec<Run>, slots: &[usize]) -> Self {
        Self {
            edges: Edges::with_room(0),
            versions,
            slots: slots.iter().map(|v| AtomicUsize::new(*v)).collect(),
        }
    }

    fn show(&self, slot: usize, version: usize) {
        self.slots[slot].store(version, Ordering::Release);
    }

    fn load(&self, slot: u32) -> Option<&Run> {
        let version = self.slots.get(slot as usize)?.load(Ordering::Acquire);
        self.versions.get(version.checked_sub(1)?)
    }

    /// How deep the tree goes along a prompt.
    fn depth(&self, prompt: &[u64]) -> usize {
        let prompt: Vec<LocalHash> = prompt.iter().map(|l| LocalHash(*l)).collect();
        let (mut end, mut depth) = (ROOT_END, 0);
        while depth < prompt.len() {
            let load = |slot| self.load(slot);
            let Some(run) = follow(&self.edges, load, end, prompt[depth].0, depth) else {
                break;
            };
            let len = run.len();
            let matched = run.common(&prompt[depth..], len);
            depth += matched;
            if matched < len as usize {
                break;
            }
            end = run.end;
        }
        depth
    }
}

fn run(end: u64, follows: u64, start: u32, locals: &[u64]) -> Run {
    Run::new(end, follows, start, locals.into())
}

/// A run is cut in two while a reader passes: all blocks stay held, so all are found.
#[test]
fn a_cut_hides_nothing() {
    loom::model(|| {
        let whole = run(10, ROOT_END, 0, &[1, 2, 3]);
        let child = run(20, 10, 3, &[4]);
        let (tail, head) = (run(10, 11, 2, &[3]), run(11, ROOT_END, 0, &[1, 2]));
        let shown = Published::new(vec![whole, child, tail, head], &[0, 1, 2, 0]);
        shown.edges.insert(ROOT_END, 1, 1);
        shown.edges.insert(10, 4, 2);
        let shown = Arc::new(shown);
        let writer = interleaved::spawn({
            let shown = Arc::clone(&shown);
            move || {
                shown.show(3, 3);
                shown.edges.insert(11, 3, 3);
                shown.show(1, 4);
            }
        });
        assert_eq!(shown.depth(&[1, 2, 3, 4]), 4);
        writer.join().unwrap();
        assert_eq!(shown.depth(&[1, 2, 3, 4]), 4);
    });
}

/// Blocks are added to and taken off a leaf in place: a reader sees a number of them that was there.
#[test]
fn a_leaf_grows_and_shrinks_in_place() {
    loom::model(|| {
        let mut leaf = run(10, ROOT_END, 0, &[1, 2]);
        assert!(leaf.open_tail());
        let shown = Published::new(vec![leaf], &[0, 1]);
        shown.edges.insert(ROOT_END, 1, 1);
        let shown = Arc::new(shown);
        let writer = interleaved::spawn({
            let shown = Arc::clone(&shown);
            move || {
                assert!(shown.versions[0].push([3, 4].into_iter()));
                shown.versions[0].shorten(1);
            }
        });
        let depth = shown.depth(&[1, 2, 3, 4]);
        assert!([1, 2, 4].contains(&depth), "{depth}");
        writer.join().unwrap();
        assert_eq!(shown.depth(&[1, 2, 3, 4]), 1);
    });
}

/// Other blocks come in the place of some that were taken off, and a run after them: a reader that stands
/// at the old end never goes on with it.
#[test]
fn an_old_end_leads_nowhere() {
    loom::model(|| {
        let old = run(10, ROOT_END, 0, &[1, 2]);
        let new = run(12, ROOT_END, 0, &[1, 9]);
        let child = run(20, 12, 2, &[7]);
        let shown = Published::new(vec![old, new, child], &[0, 1, 0]);
        shown.edges.insert(ROOT_END, 1, 1);
        let shown = Arc::new(shown);
        let writer = interleaved::spawn({
            let shown = Arc::clone(&shown);
            move || {
                shown.versions[0].shorten(1);
                shown.show(1, 2);
                shown.show(2, 3);
                shown.edges.insert(12, 7, 2);
            }
        });
        let depth = shown.depth(&[1, 2, 7]);
        assert!([1, 2].contains(&depth), "{depth}");
        writer.join().unwrap();
        assert_eq!(shown.depth(&[1, 9, 7]), 3);
    });
}

/// A gap is filled and another opened in place: a reader sees each block as it was at some moment, and those
/// that stayed held, as far as the first that did not, always.
#[test]
fn gaps_open_and_close_in_place() {
    loom::model(|| {
        let mut run = run(10, ROOT_END, 0, &[1; 80]);
        let bits = Bits::with_room(80);
        bits.write(0, 80, true);
        bits.write(3, 4, false);
        run.device.set_bits(0, bits.clone(), 80);
        let run = Arc::new(run);
        let writer = interleaved::spawn(move || {
            bits.write(70, 71, false);
            bits.write(3, 4, true);
        });
        let seen = run.held(0, 0).until(0, 80);
        assert!([3, 70, 80].contains(&seen), "{seen}");
        writer.join().unwrap();
        assert_eq!(run.held(0, 0).until(0, 80), 70);
    });
}
