//! The obvious index: each rank's blocks in a map from name to path. The truth that tests compare with.
//!
//! It is slow on purpose: nothing here is shared between ranks, compressed or kept beside its definition.

mod concurrent;
mod gaps;
mod history;

pub use concurrent::{HistoryKind, check_concurrent_histories};
pub use gaps::check_gap_history;
pub use history::{check_event_history, check_routing_history};

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use kvasir_types::{
    EngineHash, KvEvent, LocalHash, SequenceHash, StoredBlock, Tier, Time, WorkerId, WorkerRank,
};

use crate::{ApplyError, Approximate, Match, Matches};

/// The local hashes from the start of the sequence up to a block: what the block *is*.
type Path = Vec<LocalHash>;

const TIERS: [Tier; 4] = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];

/// The obvious implementation of an index that learns from events.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Per cache: a name's path, and how often it was announced less how often it was taken back.
    held: HashMap<(WorkerRank, Tier), HashMap<EngineHash, (Path, u32)>>,
}

impl Oracle {
    /// See [`crate::Index::apply`].
    pub fn apply(&mut self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        match event {
            KvEvent::Stored {
                tier,
                parent,
                blocks,
            } => self.store(rank, *tier, *parent, blocks),
            KvEvent::Removed { tier, blocks } => self.remove(rank, *tier, blocks),
            KvEvent::Cleared { tier } => {
                self.held
                    .retain(|held, _| held.0 != rank || tier.is_some_and(|t| held.1 != t));
                Ok(())
            }
        }
    }

    fn store(
        &mut self,
        rank: WorkerRank,
        tier: Tier,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Result<(), ApplyError> {
        let mut seen: HashSet<EngineHash> = parent.into_iter().collect();
        if let Some(twice) = blocks.iter().find(|b| !seen.insert(b.engine)) {
            return Err(ApplyError::InvalidBlockSequence(twice.engine));
        }
        let mut path = match parent {
            None => Path::new(),
            Some(name) => self
                .path_of(rank, tier, name)
                .ok_or(ApplyError::ParentBlockNotFound(name))?,
        };
        let cache = self.held.entry((rank, tier)).or_default();
        for block in blocks {
            path.push(block.local);
            match cache.get_mut(&block.engine) {
                Some((known, count)) if *known == path => *count = count.saturating_add(1),
                // A name used for another place: the old block is gone, only the newest counts.
                _ => drop(cache.insert(block.engine, (path.clone(), 1))),
            }
        }
        Ok(())
    }

    /// Where a rank's name points: in the same tier first, then from the nearest tier on.
    fn path_of(&self, rank: WorkerRank, tier: Tier, name: EngineHash) -> Option<Path> {
        std::iter::once(tier)
            .chain(TIERS)
            .find_map(|t| self.held.get(&(rank, t))?.get(&name))
            .map(|(path, _)| path.clone())
    }

    fn remove(
        &mut self,
        rank: WorkerRank,
        tier: Tier,
        names: &[EngineHash],
    ) -> Result<(), ApplyError> {
        let cache = self.held.entry((rank, tier)).or_default();
        let mut first_unknown = None;
        for &name in names {
            match cache.get_mut(&name) {
                None => first_unknown = first_unknown.or(Some(name)),
                Some((_, count)) if *count > 1 => *count -= 1,
                Some(_) => drop(cache.remove(&name)),
            }
        }
        first_unknown.map_or(Ok(()), |name| Err(ApplyError::BlockNotFound(name)))
    }

    /// See [`crate::Index::remove_rank`].
    pub fn remove_rank(&mut self, rank: WorkerRank) {
        self.held.retain(|held, _| held.0 != rank);
    }

    /// See [`crate::Index::remove_worker`].
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.held.retain(|held, _| held.0.worker != worker);
    }

    /// See [`crate::Index::find`]. The answer is sorted by rank.
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        out.clear();
        let ranks: BTreeSet<WorkerRank> = self.held.keys().map(|held| held.0).collect();
        for rank in ranks {
            let mut depth = 0;
            let mut extension = TIERS.map(|tier| {
                let more = self.contiguous(rank, tier, prompt, depth);
                depth += more;
                more as u32
            });
            extension[2] += extension[3];
            if depth > 0 {
                out.push(Match {
                    rank,
                    device: extension[0],
                    host: extension[1],
                    disk: extension[2],
                });
            }
        }
    }

    /// How many blocks from position `from` on a rank holds in one tier without a gap.
    fn contiguous(&self, rank: WorkerRank, tier: Tier, prompt: &[LocalHash], from: usize) -> usize {
        let Some(cache) = self.held.get(&(rank, tier)) else {
            return 0;
        };
        let paths: HashSet<&[LocalHash]> = cache.values().map(|(p, _)| p.as_slice()).collect();
        (from..prompt.len())
            .take_while(|&i| paths.contains(&prompt[..=i]))
            .count()
    }

    /// (rank, tier, block) triples held, names that share a path counted once.
    #[must_use]
    pub fn entries(&self) -> usize {
        let distinct = |cache: &HashMap<EngineHash, (Path, u32)>| {
            cache.values().map(|(p, _)| p).collect::<HashSet<_>>().len()
        };
        self.held.values().map(distinct).sum()
    }
}

/// The obvious implementation of an index that learns from routing decisions.
#[derive(Clone, Debug)]
pub struct RoutingOracle {
    options: Approximate,
    /// When each rank's block goes, in ticks, and its name.
    expiry: HashMap<(WorkerRank, Path), (u64, SequenceHash)>,
}

impl RoutingOracle {
    /// An empty one.
    #[must_use]
    pub fn new(options: Approximate) -> Self {
        Self {
            options,
            expiry: HashMap::new(),
        }
    }

    /// See [`crate::Index::record_routing`].
    pub fn record(
        &mut self,
        now: Time,
        rank: WorkerRank,
        locals: &[LocalHash],
        sequence: &[SequenceHash],
    ) {
        let tick = Approximate::EXPIRY_TICK.as_nanos() as u64;
        let expiry = (now + self.options.ttl).as_nanos().div_ceil(tick);
        for (last, &name) in sequence.iter().enumerate().take(locals.len()) {
            let key = (rank, locals[..=last].to_vec());
            self.expiry.insert(key, (expiry, name));
        }
        if self.expiry.len() > self.options.max_blocks {
            self.prune();
        }
    }

    /// The next to expire first; of those the deepest; of those by rank and name, to be definite.
    fn prune(&mut self) {
        let mut order: Vec<_> = self
            .expiry
            .iter()
            .map(|((rank, path), (expiry, name))| {
                (*expiry, Reverse(path.len()), *rank, *name, path.clone())
            })
            .collect();
        order.sort();
        let excess = self.expiry.len() - self.options.prune_target();
        for (_, _, rank, _, path) in order.into_iter().take(excess) {
            self.expiry.remove(&(rank, path));
        }
    }

    /// See [`crate::Index::expire`].
    pub fn expire(&mut self, now: Time) {
        let tick = Approximate::EXPIRY_TICK.as_nanos() as u64;
        self.expiry
            .retain(|_, (expiry, _)| *expiry > now.as_nanos() / tick);
    }

    /// See [`crate::Index::remove_rank`].
    pub fn remove_rank(&mut self, rank: WorkerRank) {
        self.expiry.retain(|key, _| key.0 != rank);
    }

    /// See [`crate::Index::remove_worker`].
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.expiry.retain(|key, _| key.0.worker != worker);
    }

    /// See [`crate::Index::find`]. The answer is sorted by rank.
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        out.clear();
        let ranks: BTreeSet<WorkerRank> = self.expiry.keys().map(|key| key.0).collect();
        for rank in ranks {
            let device = (1..=prompt.len())
                .take_while(|&end| self.expiry.contains_key(&(rank, prompt[..end].to_vec())))
                .count() as u32;
            if device > 0 {
                out.push(Match {
                    rank,
                    device,
                    ..Match::default()
                });
            }
        }
    }

    /// (rank, block) pairs believed in.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.expiry.len()
    }
}
