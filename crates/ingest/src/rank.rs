//! One rank's events, applied in order.

use kvasir_index::ApplyError;
use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::engine::Batch;
use kvasir_wire::{Learned, Skip, TranslateOptions, Translated, Translator};

use crate::orphans::Orphans;
use crate::{Cache, Counts, Notice, Output};

/// Batches in a row with blocks of the right size after which a wrong one is forgotten.
const FITTING_BATCHES_MIN: u32 = 3;

/// What is known of one rank beside its cached blocks.
#[derive(Clone, Debug)]
pub(crate) struct RankState {
    pub(crate) rank: WorkerRank,
    /// Whether the cache holds exactly what the engine announced since it was last empty.
    pub(crate) exact: bool,
    translator: Translator,
    orphans: Orphans,
    said: Said,
    /// Batches in a row that stored blocks of the right size, after a wrong one.
    fitting: u32,
}

/// What was said already about this rank.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    block_size: bool,
    unknown: bool,
    other: bool,
    pairs: bool,
    orphans: bool,
}

/// Where the effects of a batch go.
pub(crate) struct Effects<'a, C> {
    pub(crate) cache: &'a C,
    pub(crate) counts: &'a mut Counts,
    pub(crate) out: &'a mut Vec<Output>,
    pub(crate) orphan_blocks_max: usize,
}

impl RankState {
    pub(crate) fn new(rank: WorkerRank, options: TranslateOptions, exact: bool) -> Self {
        Self {
            rank,
            exact,
            translator: Translator::new(options),
            orphans: Orphans::default(),
            said: Said::default(),
            fitting: 0,
        }
    }

    pub(crate) fn learned(&self) -> Learned {
        self.translator.learned()
    }

    pub(crate) fn relearn(&mut self, learned: &Learned) {
        self.translator.relearn(learned);
    }

    /// Forgets the rank's blocks. `exact` says whether it is known to hold none.
    pub(crate) fn forget<C: Cache>(&mut self, cache: &C, exact: bool) {
        cache.remove_rank(self.rank);
        self.translator.reset();
        self.orphans.clear();
        self.exact = exact;
        self.said.orphans = false;
    }

    /// Blocks that wait for their parents.
    pub(crate) const fn orphan_blocks(&self) -> usize {
        self.orphans.blocks()
    }

    /// Applies all events of a batch.
    pub(crate) fn apply<C: Cache>(&mut self, batch: &Batch, effects: &mut Effects<'_, C>) {
        let Self {
            rank,
            exact,
            translator,
            orphans,
            said,
            fitting,
        } = self;
        let before = (
            effects.counts.blocks_stored,
            effects.counts.block_size_differs,
        );
        let mut applier = Applier {
            rank: *rank,
            exact,
            orphans,
            said,
            effects,
        };
        translator.translate(batch, |translated| match translated {
            Translated::Event(event) => applier.event(event),
            Translated::Skipped(skip) => applier.skipped(skip),
        });
        if said.block_size {
            let counts = &effects.counts;
            *fitting = match (
                counts.blocks_stored > before.0,
                counts.block_size_differs > before.1,
            ) {
                (_, true) => 0,
                (true, false) => *fitting + 1,
                (false, false) => *fitting,
            };
            if *fitting >= FITTING_BATCHES_MIN {
                (*fitting, said.block_size) = (0, false);
                effects.out.push(Output::Notice(Notice::BlockSizeFits));
            }
        }
        if translator.pairs_seen() && !said.pairs {
            said.pairs = true;
            effects.out.push(Output::Notice(Notice::Pairs));
        }
    }
}

struct Applier<'r, 'e, C> {
    rank: WorkerRank,
    exact: &'r mut bool,
    orphans: &'r mut Orphans,
    said: &'r mut Said,
    effects: &'r mut Effects<'e, C>,
}

impl<C: Cache> Applier<'_, '_, C> {
    fn event(&mut self, event: &KvEvent) {
        self.effects.counts.events += 1;
        match event {
            KvEvent::Stored { blocks, .. } => {
                self.effects.counts.blocks_stored += blocks.len() as u64;
                self.stored(event);
            }
            KvEvent::Removed { tier, blocks } => {
                self.effects.counts.blocks_removed += blocks.len() as u64;
                let parked = match self.orphans.is_empty() {
                    true => 0,
                    false => self.orphans.remove(*tier, blocks),
                };
                let applied = self.effects.cache.apply(self.rank, event);
                if applied.is_err() && parked < blocks.len() {
                    self.effects.counts.unknown_removed += 1;
                }
            }
            KvEvent::Cleared { .. } => {
                self.effects.counts.cleared += 1;
                self.orphans.clear();
                let _ = self.effects.cache.apply(self.rank, event);
                *self.exact = true;
                let rank = self.rank.rank;
                self.effects
                    .out
                    .push(Output::Notice(Notice::Cleared { rank }));
            }
        }
    }

    fn stored(&mut self, event: &KvEvent) {
        match self.effects.cache.apply(self.rank, event) {
            Ok(()) => {
                if !self.orphans.is_empty() {
                    self.adopt(event);
                }
            }
            Err(ApplyError::ParentBlockNotFound(_)) => self.park(event),
            Err(_) => self.effects.counts.invalid += 1,
        }
    }

    fn park(&mut self, event: &KvEvent) {
        let KvEvent::Stored {
            tier,
            parent: Some(parent),
            blocks,
        } = event
        else {
            return;
        };
        let max = self.effects.orphan_blocks_max;
        let dropped = self.orphans.park(*tier, *parent, blocks, max);
        self.effects.counts.orphans_parked += blocks.len() as u64;
        self.effects.counts.orphans_dropped += dropped as u64;
        if *self.exact && !self.said.orphans {
            self.said.orphans = true;
            let rank = self.rank.rank;
            self.effects
                .out
                .push(Output::Notice(Notice::Orphans { rank }));
        }
        *self.exact = false;
    }

    /// Places what waited for the blocks of `event`, and what waited for that in turn.
    fn adopt(&mut self, event: &KvEvent) {
        let mut placed = vec![event.clone()];
        while let Some(event) = placed.pop() {
            let KvEvent::Stored { blocks, .. } = &event else {
                continue;
            };
            for block in blocks {
                for child in self.orphans.adopt(block.engine) {
                    let applied = self.effects.cache.apply(self.rank, &child);
                    let KvEvent::Stored { blocks, .. } = &child else {
                        continue;
                    };
                    let count = match applied {
                        Ok(()) => &mut self.effects.counts.orphans_placed,
                        Err(_) => &mut self.effects.counts.orphans_dropped,
                    };
                    *count += blocks.len() as u64;
                    placed.push(child);
                }
            }
        }
    }

    fn skipped(&mut self, skip: Skip) {
        if matches!(skip, Skip::BlockSize { .. }) {
            *self.exact = false;
        }
        let counts = &mut *self.effects.counts;
        counts.group_skipped += u64::from(skip == Skip::Group);
        let (count, said) = match skip {
            Skip::BlockSize { .. } => (&mut counts.block_size_differs, &mut self.said.block_size),
            Skip::Unknown => (&mut counts.unknown_kinds, &mut self.said.unknown),
            // Hybrid models send such events all the time; they are no news.
            Skip::Group => (&mut counts.skipped, &mut true),
            _ => (&mut counts.skipped, &mut self.said.other),
        };
        *count += 1;
        if !std::mem::replace(said, true) {
            self.effects.out.push(Output::Notice(Notice::Skipped(skip)));
        }
    }
}
