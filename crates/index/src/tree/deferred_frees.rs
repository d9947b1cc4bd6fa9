//! Names of freed runs that leave the table later.
//!
//! Removing a rank hides its runs from readers and frees all they own but their names: finding a hundred
//! thousand of those in the table takes longer than everything else. Later events forget them,
//! [`NAMES_PER_EVENT`] each; a tree without runs drops them all at once. Until then the slot of such a run
//! stays taken, so that no name points to a block that it does not mean.

use super::{Node, Tree};
use crate::names::Place;

/// Names that an event forgets beside its own work: two or three microseconds. Few in tests, whose histories
/// are short and shall meet deferred frees that last.
pub(crate) const NAMES_PER_EVENT: usize = if cfg!(any(test, feature = "oracle")) {
    3
} else {
    128
};

#[derive(Debug, Default)]
pub(super) struct DeferredFrees {
    /// Slots with the names that their runs had.
    runs: Vec<(u32, Vec<u64>)>,
    /// Bytes of those names.
    name_bytes: usize,
    /// Whether runs that are freed now leave their names here.
    pub(super) collecting: bool,
}

impl DeferredFrees {
    pub(super) fn bytes(&self) -> usize {
        self.name_bytes + self.runs.capacity() * size_of::<(u32, Vec<u64>)>()
    }
}

impl Tree {
    /// Keeps the names of a run that readers no longer see, to be forgotten later.
    pub(super) fn defer_free(&mut self, run: u32) {
        let Some(Node { names, .. }) = self.nodes[run as usize].take() else {
            return;
        };
        self.blocks -= names.len();
        self.deferred_frees.name_bytes += names.capacity() * 8;
        self.deferred_frees.runs.push((run, names));
    }

    /// Forgets up to `most` names of freed runs.
    #[inline]
    pub(crate) fn free_deferred(&mut self, most: usize) {
        if !self.deferred_frees.runs.is_empty() {
            self.forget_deferred_names(most);
        }
    }

    #[cold]
    fn forget_deferred_names(&mut self, most: usize) {
        let mut left = most;
        while left > 0
            && let Some((run, names)) = self.deferred_frees.runs.last_mut()
        {
            let keep = names.len().saturating_sub(left);
            left -= names.len() - keep;
            let first = Place {
                run: *run,
                pos: keep as u32,
            };
            self.names.forget(&names[keep..], first);
            names.truncate(keep);
            if keep == 0 {
                let run = *run;
                self.deferred_frees.name_bytes -= names.capacity() * 8;
                self.deferred_frees.runs.pop();
                self.release_slot(run);
            }
        }
        if self.deferred_frees.runs.is_empty() {
            self.deferred_frees.runs = Vec::new();
        }
    }

    /// Frees the slots of all deferred runs of a tree that has no others; the caller clears the names.
    pub(super) fn drop_deferred(&mut self) {
        self.deferred_frees.name_bytes = 0;
        for (run, _) in std::mem::take(&mut self.deferred_frees.runs) {
            self.release_slot(run);
        }
    }
}
