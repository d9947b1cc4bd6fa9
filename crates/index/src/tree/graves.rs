//! Runs that went with their rank, and their names, which go later.
//!
//! The removal of a rank takes its runs from the readers and gives back all they hold but their names: to
//! find a hundred thousand of these in the table takes longer than everything else. Later events forget
//! them, [`NAMES_AT_ONCE`] each; if nothing is left in the tree they go at once. Until then a run's slot
//! stays taken, so that no name points to a block that it does not mean.

use super::{Alone, Node, Runs};
use crate::names::Place;

/// Names that an event forgets beside what it is for: two or three microseconds. Few in tests, whose
/// histories are short and shall meet graves that last.
pub(crate) const NAMES_AT_ONCE: usize = if cfg!(any(test, feature = "oracle")) {
    3
} else {
    128
};

#[derive(Debug, Default)]
pub(super) struct Graves {
    /// Slots with the names that were of their runs.
    runs: Vec<(u32, Vec<u64>)>,
    /// Bytes of those names.
    bytes: usize,
    /// Whether runs that are freed now leave their names here.
    pub(super) open: bool,
}

impl Graves {
    pub(super) fn bytes(&self) -> usize {
        self.bytes + self.runs.capacity() * size_of::<(u32, Vec<u64>)>()
    }
}

impl Runs {
    /// Leaves the names of a run that nobody sees any more to be forgotten later.
    pub(super) fn bury(&mut self, run: u32) {
        let Some(Node { names, .. }) = self.nodes[run as usize].take() else {
            return;
        };
        self.blocks -= names.len();
        self.graves.bytes += names.capacity() * 8;
        self.graves.runs.push((run, names));
    }

    /// Takes a grave into one's hands, to forget some of its names.
    pub(super) fn take_grave(&mut self) -> Option<(u32, Vec<u64>)> {
        let grave = self.graves.runs.pop()?;
        self.graves.bytes -= grave.1.capacity() * 8;
        Some(grave)
    }

    /// Puts it back, or gives up its slot if all its names are forgotten.
    pub(super) fn put_back_grave(&mut self, run: u32, names: Vec<u64>) {
        if names.is_empty() {
            self.release(run);
        } else {
            self.graves.bytes += names.capacity() * 8;
            self.graves.runs.push((run, names));
        }
    }
}

impl Alone<'_> {
    /// Forgets up to `most` names of runs that are gone.
    #[inline]
    pub(crate) fn tidy(&mut self, most: usize) {
        if !self.graves.runs.is_empty() {
            self.forget_some(most);
        }
    }

    #[cold]
    fn forget_some(&mut self, most: usize) {
        let mut left = most;
        while left > 0
            && let Some((run, names)) = self.runs.graves.runs.last_mut()
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
                self.runs.graves.bytes -= names.capacity() * 8;
                self.graves.runs.pop();
                self.vacate(run);
            }
        }
        if self.graves.runs.is_empty() {
            self.graves.runs = Vec::new();
        }
    }

    /// Forgets all graves of a tree that is empty but for them.
    pub(super) fn forget_graves(&mut self) {
        self.graves.bytes = 0;
        for (run, _) in std::mem::take(&mut self.graves.runs) {
            self.vacate(run);
        }
    }
}
