//! What a lookup answers.

use std::collections::BTreeMap;
use std::iter;
use std::sync::Arc;

use kvasir_types::{LocalHash, WorkerRank};
use sdd::Guard;

use crate::ranks::{NOBODY, RankTable};
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

/// What is known of one rank, by where it is known from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchSources {
    /// What events say.
    pub events: Match,
    /// Blocks from the start of the prompt in device memory, by our own routing decisions.
    pub routed: u32,
}

impl MatchSources {
    /// Both together: of what they say about device memory the larger counts.
    ///
    /// A rank's lower tiers go on where its device memory ends, so blocks that are added there are taken
    /// off them: the cumulative counts never shrink and never count a block twice.
    #[must_use]
    pub fn merged(self) -> Match {
        let mut merged = self.events;
        let raised = self.routed.saturating_sub(merged.device);
        let from_host = raised.min(merged.host);
        merged.device += raised;
        merged.host -= from_host;
        merged.disk -= (raised - from_host).min(merged.disk);
        merged
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
    /// What routing decisions say about device memory, by slot; empty if nobody asked them.
    routed: Vec<u32>,
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
        self.routed.clear();
        self.pushed.clear();
    }

    /// Adds a rank that is not there yet.
    pub fn push(&mut self, found: Match) {
        self.pushed.push(found);
    }

    /// Replaces what events say by what another index found; what routing decisions say stays.
    pub fn set_events(&mut self, found: &[Match]) {
        self.pushed.clear();
        self.device.fill(0);
        self.lower.clear();
        if self.routed.iter().all(|routed| *routed == 0) {
            self.pushed.extend_from_slice(found);
            return;
        }
        let slots = self.ranks.iter().zip(0..);
        let slots: BTreeMap<WorkerRank, usize> = slots.map(|(rank, at)| (*rank, at)).collect();
        self.lower.resize(self.device.len(), [0, 0]);
        for one in found {
            let at = slots.get(&one.rank).copied();
            let parts = at.and_then(|at| self.device.get_mut(at).zip(self.lower.get_mut(at)));
            match parts {
                Some((device, lower)) => {
                    *device = one.device;
                    *lower = [one.host, one.disk];
                }
                None => self.pushed.push(*one),
            }
        }
    }

    /// Ranks that hold something, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Match> + '_ {
        self.sources().map(MatchSources::merged)
    }

    /// As [`Self::iter`], with events and routing decisions told apart.
    pub fn sources(&self) -> impl Iterator<Item = MatchSources> + '_ {
        let lower = self.lower.iter().copied().chain(iter::repeat([0, 0]));
        let routed = self.routed.iter().copied().chain(iter::repeat(0));
        let by_slot = self.ranks.iter().zip(&self.device).zip(lower).zip(routed);
        let found = by_slot
            .filter(|(((_, device), lower), routed)| **device | *routed != 0 || *lower != [0, 0])
            .filter(|(((rank, _), _), _)| **rank != NOBODY)
            .map(|(((rank, device), [host, disk]), routed)| MatchSources {
                events: Match {
                    rank: *rank,
                    device: *device,
                    host,
                    disk,
                },
                routed,
            });
        let pushed = self
            .pushed
            .iter()
            .map(|&events| MatchSources { events, routed: 0 });
        found.chain(pushed)
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

    /// Looks a prompt up in the tree of events and, if there is one, of routing decisions.
    #[inline]
    pub(crate) fn look_up(
        &mut self,
        events: &View,
        routed: Option<&View>,
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
        if let Some(routed) = routed {
            self.routed.resize(self.ranks.len(), 0);
            routed.walk(guard, prompt, winner, &mut self.live, &mut self.routed);
        }
    }
}
