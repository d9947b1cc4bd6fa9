//! What a lookup answers.

use kvasir_types::WorkerRank;

/// How many leading blocks of a prompt one rank holds, tier by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// The answer of a lookup; a buffer to be used again. Ranks that hold nothing are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    list: Vec<Match>,
}

impl Matches {
    /// An empty answer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the last answer and keeps its memory.
    pub fn clear(&mut self) {
        self.list.clear();
    }

    /// Adds a rank.
    pub fn push(&mut self, found: Match) {
        self.list.push(found);
    }

    /// Ranks that hold something, in no order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Match> {
        self.list.iter()
    }

    /// What one rank holds; `None` if nothing.
    #[must_use]
    pub fn get(&self, rank: WorkerRank) -> Option<&Match> {
        self.list.iter().find(|m| m.rank == rank)
    }

    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}
