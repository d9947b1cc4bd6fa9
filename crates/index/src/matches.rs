//! What a lookup answers.

use kvasir_types::WorkerRank;

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
#[derive(Clone, Debug, Default)]
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

    /// Ranks that hold something, sorted by rank: for comparing and printing.
    #[must_use]
    pub fn sorted(&self) -> Vec<Match> {
        let mut list = self.list.clone();
        list.sort_unstable();
        list
    }

    /// Takes over what `side` knows better about device memory.
    ///
    /// A rank's lower tiers go on where its device memory ends, so blocks that the side index adds are
    /// taken off them: the cumulative counts never shrink and never count a block twice.
    pub fn raise_device(&mut self, side: &Self) {
        for more in &side.list {
            match self.list.iter_mut().find(|m| m.rank == more.rank) {
                None => self.list.push(*more),
                Some(known) => known.raise_device(more.device),
            }
        }
    }
}

impl Match {
    /// Counts `device` blocks as lying in device memory, if that is more than known.
    fn raise_device(&mut self, device: u32) {
        let raised = device.saturating_sub(self.device);
        let from_host = raised.min(self.host);
        self.device += raised;
        self.host -= from_host;
        self.disk -= (raised - from_host).min(self.disk);
    }
}
