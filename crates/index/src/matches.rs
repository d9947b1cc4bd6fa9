//! What a lookup answers.

use std::iter;
use std::sync::Arc;

use kvasir_types::{LocalHash, WorkerRank};
use sdd::Guard;

use crate::ranks::RankTable;
use crate::view::View;

/// How many leading blocks of a prompt one rank holds, tier by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    /// The rank.
    pub rank: WorkerRank,
    /// Blocks from the start of the prompt in device memory.
    pub device: u32,
    /// Blocks that follow those in host memory.
    pub host: u32,
    /// Blocks that follow those on disk or further away.
    pub disk: u32,
}

impl Match {
    /// Blocks from the start of the prompt in host memory or nearer.
    #[must_use]
    pub const fn host_cumulative(&self) -> u32 {
        self.device.saturating_add(self.host)
    }

    /// Blocks from the start of the prompt anywhere.
    #[must_use]
    pub const fn disk_cumulative(&self) -> u32 {
        self.host_cumulative().saturating_add(self.disk)
    }
}

/// The answer of a lookup; a buffer to be used again. Ranks that hold nothing are absent.
///
/// Kept as the lookup makes it: depths by slot number, to which the ranks are put when it is read.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    ranks: Arc<[WorkerRank]>,
    /// Blocks in device memory, by slot.
    device: Vec<u32>,
    /// Blocks in host memory and on disk, by slot; empty if nothing lies there.
    lower: Vec<[u32; 2]>,
    /// What a side index says about device memory, by slot.
    side: Vec<u32>,
    live: Vec<u64>,
    pushed: Vec<Match>,
}

impl Matches {
    /// An empty answer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the last answer and keeps its memory.
    pub fn clear(&mut self) {
        self.device.clear();
        self.lower.clear();
        self.pushed.clear();
    }

    /// Adds a rank that is not there yet.
    pub fn push(&mut self, found: Match) {
        self.pushed.push(found);
    }

    /// Ranks that hold something, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Match> + '_ {
        let lower = self.lower.iter().copied().chain(iter::repeat([0, 0]));
        let by_slot = self.ranks.iter().zip(&self.device).zip(lower);
        let found = by_slot
            .filter(|((_, device), lower)| **device != 0 || *lower != [0, 0])
            .map(|((rank, device), [host, disk])| Match {
                rank: *rank,
                device: *device,
                host,
                disk,
            });
        found.chain(self.pushed.iter().copied())
    }

    /// What one rank holds; `None` if nothing.
    #[must_use]
    pub fn get(&self, rank: WorkerRank) -> Option<Match> {
        self.iter().find(|m| m.rank == rank)
    }

    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Ranks that hold something, sorted by rank: for comparing and printing.
    #[must_use]
    pub fn sorted(&self) -> Vec<Match> {
        let mut list: Vec<Match> = self.iter().collect();
        list.sort_unstable();
        list
    }

    /// Looks a prompt up in a tree and, if there is one, a side tree.
    #[inline]
    pub(crate) fn look_up(
        &mut self,
        events: &View,
        side: Option<&View>,
        ranks: &RankTable,
        prompt: &[LocalHash],
        winner: bool,
    ) {
        self.clear();
        let guard = &Guard::new();
        if let Some(current) = ranks.get(guard).filter(|r| !Arc::ptr_eq(r, &self.ranks)) {
            self.ranks = Arc::clone(current);
        }
        self.device.resize(self.ranks.len(), 0);
        if events.has_lower_tiers() {
            self.lower.resize(self.ranks.len(), [0, 0]);
            events.walk_tiers(guard, prompt, &mut self.device, &mut self.lower);
        } else {
            events.walk(guard, prompt, winner, &mut self.live, &mut self.device);
        }
        if let Some(side) = side {
            self.side.clear();
            self.side.resize(self.ranks.len(), 0);
            side.walk(guard, prompt, winner, &mut self.live, &mut self.side);
            self.merge_side();
        }
    }

    /// Takes over what the side tree knows better about device memory.
    ///
    /// A rank's lower tiers go on where its device memory ends, so blocks that are added there are taken
    /// off them: the cumulative counts never shrink and never count a block twice.
    fn merge_side(&mut self) {
        for (slot, &side) in self.side.iter().enumerate() {
            let device = &mut self.device[slot];
            let raised = side.saturating_sub(*device);
            *device += raised;
            if let Some([host, disk]) = self.lower.get_mut(slot) {
                let from_host = raised.min(*host);
                *host -= from_host;
                *disk -= (raised - from_host).min(*disk);
            }
        }
    }
}
