//! Slots of runs, the edges between them, and what readers are shown.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use sdd::{AtomicShared, Shared, Tag};

use super::Tree;
use crate::edges::Edges;
use crate::run::Run;
use crate::sync::Ordering;
use crate::view::{CHUNK, Chunk, Directory};

impl Tree {
    /// Takes a free slot for a run.
    pub(super) fn reserve(&mut self) -> u32 {
        let id = loop {
            match self.free.pop() {
                // Slots that were dropped since they came free are still listed.
                Some(Reverse(id)) if id as usize >= self.nodes.len() => {}
                Some(Reverse(id)) => break id,
                None => {
                    self.nodes.push(None);
                    break self.nodes.len() as u32 - 1;
                }
            }
        };
        if id as usize / CHUNK >= self.chunks.len() {
            let chunk: Chunk = std::array::from_fn(|_| AtomicShared::null());
            self.chunks.push(Arc::new(chunk));
            self.in_use.push(0);
            self.publish_directory();
        }
        self.in_use[id as usize / CHUNK] += 1;
        id
    }

    /// Gives a slot back whose run is gone; chunks of free slots at the end are dropped, all but one. Says
    /// whether no slot is in use: all that is left can go then, by who is alone.
    pub(super) fn release(&mut self, id: u32) -> bool {
        self.free.push(Reverse(id));
        self.in_use[id as usize / CHUNK] -= 1;
        let idle = self.in_use.iter().rev().take_while(|n| **n == 0).count();
        if idle > 1 {
            self.shrink(self.in_use.len() - idle + 1);
        }
        idle == self.in_use.len()
    }

    /// Gives a slot back.
    pub(super) fn unreserve(&mut self, id: u32) {
        self.nodes[id as usize] = None;
        self.release_slot(id);
    }

    /// As [`Tree::unreserve`], for a slot whose run is gone already.
    pub(super) fn release_slot(&mut self, id: u32) {
        if self.release(id) {
            self.close();
        }
    }

    /// Gives everything back if there is no run.
    pub(crate) fn close(&mut self) {
        if self.in_use.iter().all(|n| *n == 0) {
            self.shrink(0);
            self.names.clear();
        }
    }

    #[cold]
    pub(super) fn shrink(&mut self, chunks: usize) {
        self.in_use.truncate(chunks);
        self.chunks.truncate(chunks);
        self.nodes.truncate((chunks * CHUNK).max(1));
        if chunks == 0 {
            self.free = BinaryHeap::new();
            self.nodes.shrink_to_fit();
            self.in_use.shrink_to_fit();
            self.chunks.shrink_to_fit();
            self.edges = Arc::new(Edges::with_room(0));
            self.edges_used = 0;
        }
        self.publish_directory();
    }

    pub(super) fn publish_directory(&self) {
        self.view.publish(Directory {
            edges: Arc::clone(&self.edges),
            chunks: self.chunks.clone(),
        });
    }

    /// Shows readers a new version of a run.
    pub(super) fn publish(&mut self, id: u32, run: Run) {
        let run = Shared::new(run);
        let cell = &self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        drop(cell.swap((Some(run.clone()), Tag::None), Ordering::AcqRel));
        self.node_mut(id).run = run;
        self.account(id);
    }

    /// Brings the count of bytes up to date.
    pub(super) fn account(&mut self, id: u32) {
        let node = self.node_mut(id);
        let lists = node.names.capacity() * 8 + node.children.capacity() * 4;
        let bytes = node.run.bytes() + lists;
        let before = std::mem::replace(&mut node.bytes, bytes);
        self.run_bytes = self.run_bytes + bytes - before;
    }

    /// To be called before a run is published, as a new table is built from those that are.
    pub(super) fn make_room_for_edge(&mut self) {
        if self.edges_used + 1 >= self.edges.room() {
            self.renew_edges();
        }
    }

    pub(super) fn link(&mut self, end: u64, local: u64, id: u32) {
        if self.edges.insert(end, local, id) {
            self.edges_used += 1;
        }
    }

    /// Builds the edge table anew, without the edges that are gone.
    #[cold]
    pub(super) fn renew_edges(&mut self) {
        let edges = Edges::with_room(self.live + self.live / 2);
        let mut used = 0;
        for (id, node) in self.nodes.iter().enumerate().skip(1) {
            // A run that is being made is not published yet; its edge comes with it.
            if let Some(node) = node.as_ref().filter(|n| n.run.follows != n.run.end) {
                edges.insert(node.run.follows, node.run.first(), id as u32);
                used += 1;
            }
        }
        self.edges = Arc::new(edges);
        self.edges_used = used;
        self.publish_directory();
    }
}
