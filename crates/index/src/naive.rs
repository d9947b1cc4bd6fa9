//! The obvious index: each rank's blocks in a map, each lookup a walk per rank. The truth for tests.

use std::collections::{HashMap, HashSet};

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerId, WorkerRank};

use crate::{ApplyError, Match, Matches};

/// One block in a rank's cache.
#[derive(Clone, Copy, Debug)]
struct Block {
    parent: Option<EngineHash>,
    local: LocalHash,
    /// Times announced less times taken back.
    count: u32,
}

/// The obvious implementation.
#[derive(Clone, Debug, Default)]
pub struct NaiveIndex {
    ranks: HashMap<WorkerRank, HashMap<EngineHash, Block>>,
}

impl NaiveIndex {
    /// See [`crate::Index::apply`].
    pub fn apply(&mut self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        match event {
            KvEvent::Stored {
                tier: Tier::Device,
                parent,
                blocks,
            } => self.store(rank, *parent, blocks),
            KvEvent::Removed {
                tier: Tier::Device,
                blocks,
            } => self.remove(rank, blocks),
            KvEvent::Cleared { .. } => {
                self.remove_rank(rank);
                Ok(())
            }
            KvEvent::Stored { .. } | KvEvent::Removed { .. } => Ok(()),
        }
    }

    fn store(
        &mut self,
        rank: WorkerRank,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Result<(), ApplyError> {
        let held = self.ranks.entry(rank).or_default();
        let mut seen = HashSet::new();
        seen.extend(parent);
        if let Some(twice) = blocks.iter().find(|b| !seen.insert(b.engine)) {
            return Err(ApplyError::InvalidBlockSequence(twice.engine));
        }
        if let Some(parent) = parent.filter(|p| !held.contains_key(p)) {
            return Err(ApplyError::ParentBlockNotFound(parent));
        }
        let mut parent = parent;
        for block in blocks {
            let entry = Block {
                parent,
                local: block.local,
                count: 0,
            };
            held.entry(block.engine).or_insert(entry).count += 1;
            parent = Some(block.engine);
        }
        Ok(())
    }

    fn remove(&mut self, rank: WorkerRank, blocks: &[EngineHash]) -> Result<(), ApplyError> {
        let held = self.ranks.entry(rank).or_default();
        let mut first_unknown = None;
        for &name in blocks {
            match held.get_mut(&name) {
                None => first_unknown = first_unknown.or(Some(name)),
                Some(block) if block.count > 1 => block.count -= 1,
                Some(_) => drop(held.remove(&name)),
            }
        }
        first_unknown.map_or(Ok(()), |name| Err(ApplyError::BlockNotFound(name)))
    }

    /// See [`crate::Index::remove_rank`].
    pub fn remove_rank(&mut self, rank: WorkerRank) {
        self.ranks.remove(&rank);
    }

    /// See [`crate::Index::remove_worker`].
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.ranks.retain(|rank, _| rank.worker != worker);
    }

    /// See [`crate::Index::find`].
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        out.clear();
        for (&rank, held) in &self.ranks {
            let mut at: HashSet<Option<EngineHash>> = HashSet::from([None]);
            let mut device = 0;
            for local in prompt {
                at = held
                    .iter()
                    .filter(|(_, block)| block.local == *local && at.contains(&block.parent))
                    .map(|(name, _)| Some(*name))
                    .collect();
                if at.is_empty() {
                    break;
                }
                device += 1;
            }
            if device > 0 {
                out.push(Match {
                    rank,
                    device,
                    ..Match::default()
                });
            }
        }
    }
}
