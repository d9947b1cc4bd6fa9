//! One rank's events, applied in order.

use kvasir_index::ApplyError;
use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::engine::Batch;
use kvasir_wire::native::RouterEvent;

use crate::orphans::Orphans;
use crate::{
    Cache, Counts, Notice, Output, Skip, TranslateOptions, Translation, Translator, TranslatorState,
};

/// Batches in a row with blocks of the right size after which a wrong one is forgotten.
const FITTING_BATCHES_MIN: u32 = 3;

/// What is known of one rank beside its cached blocks.
#[derive(Clone, Debug)]
pub(crate) struct RankState {
    pub(crate) rank: WorkerRank,
    /// Whether the cache holds exactly what the engine announced since it was last empty.
    pub(crate) exact: bool,
    /// Whether what was stored twice is to be removed twice.
    copies: bool,
    orphans: Orphans,
    reported: ReportedOnce,
}

/// What was reported about a rank already.
#[derive(Clone, Copy, Debug, Default)]
struct ReportedOnce {
    block_size: bool,
    unknown: bool,
    other: bool,
    pairs: bool,
    orphans: bool,
}

/// Where the effects of an event go.
pub(crate) struct Effects<'a, C> {
    pub(crate) cache: &'a C,
    pub(crate) counts: &'a mut Counts,
    pub(crate) out: &'a mut Vec<Output>,
    pub(crate) orphan_blocks_max: usize,
    /// The events have just happened, as far as is known.
    pub(crate) is_news: bool,
}

impl<C> Effects<'_, C> {
    fn notice(&mut self, notice: Notice) {
        self.out.push(Output::Notice(notice));
    }
}

impl RankState {
    pub(crate) fn new(rank: WorkerRank, exact: bool, copies: bool) -> Self {
        Self {
            rank,
            exact,
            copies,
            orphans: Orphans::default(),
            reported: ReportedOnce::default(),
        }
    }

    /// Forgets the rank's blocks. `exact` says whether it is known to hold none.
    pub(crate) fn forget<C: Cache>(&mut self, cache: &C, exact: bool) {
        cache.remove_rank(self.rank);
        self.orphans.clear();
        self.exact = exact;
        self.reported.orphans = false;
    }

    /// Replaces the rank's blocks by what `events` make of an empty cache; it is exact then if none of them is left over.
    pub(crate) fn replace<C: Cache>(
        &mut self,
        events: &[RouterEvent],
        effects: &mut Effects<'_, C>,
    ) {
        let refused = effects.cache.replace_rank(self.rank, events);
        self.orphans.clear();
        self.exact = true;
        self.reported.orphans = false;
        effects.counts.events += (events.len() - refused.len()) as u64;
        for (at, error) in refused {
            let event = events.get(at).map(|event| &event.event);
            match (event, error) {
                (Some(event), ApplyError::ParentBlockNotFound(_)) => self.park(event, effects),
                (Some(KvEvent::Removed { .. }), _) => effects.counts.unknown_removed += 1,
                _ => {
                    effects.counts.invalid += 1;
                    self.exact = false;
                }
            }
        }
    }

    /// Blocks that wait for their parents.
    pub(crate) const fn orphan_blocks(&self) -> usize {
        self.orphans.blocks()
    }

    /// Applies one event.
    pub(crate) fn apply<C: Cache>(&mut self, event: &KvEvent, effects: &mut Effects<'_, C>) {
        effects.counts.events += 1;
        match event {
            KvEvent::Stored { blocks, .. } => {
                effects.counts.blocks_stored += blocks.len() as u64;
                self.store(event, effects);
            }
            KvEvent::Removed { tier, blocks } => {
                effects.counts.blocks_removed += blocks.len() as u64;
                let parked = match self.orphans.is_empty() {
                    true => 0,
                    false => self.orphans.remove(*tier, blocks),
                };
                let applied = effects.cache.apply(self.rank, event, self.copies);
                if applied.is_err() && parked < blocks.len() {
                    effects.counts.unknown_removed += 1;
                }
            }
            KvEvent::Cleared { tier } => {
                effects.counts.cleared += 1;
                self.orphans.clear();
                let _ = effects.cache.apply(self.rank, event, self.copies);
                self.exact |= tier.is_none();
                if effects.is_news {
                    effects.notice(Notice::Cleared { rank: self.rank });
                }
            }
        }
    }

    fn store<C: Cache>(&mut self, event: &KvEvent, effects: &mut Effects<'_, C>) {
        match effects.cache.apply(self.rank, event, self.copies) {
            Ok(()) => {
                if !self.orphans.is_empty() {
                    self.adopt(event, effects);
                }
            }
            Err(ApplyError::ParentBlockNotFound(_)) => self.park(event, effects),
            Err(_) => effects.counts.invalid += 1,
        }
    }

    fn park<C: Cache>(&mut self, event: &KvEvent, effects: &mut Effects<'_, C>) {
        let KvEvent::Stored {
            tier,
            parent: Some(parent),
            blocks,
        } = event
        else {
            return;
        };
        let max = effects.orphan_blocks_max;
        let dropped = self.orphans.park(*tier, *parent, blocks, max);
        effects.counts.orphans_parked += blocks.len() as u64;
        effects.counts.orphans_dropped += dropped as u64;
        if self.exact && !self.reported.orphans {
            self.reported.orphans = true;
            effects.notice(Notice::Orphans { rank: self.rank });
        }
        self.exact = false;
    }

    /// Places what waited for the blocks of `event`, and what waited for that in turn.
    fn adopt<C: Cache>(&mut self, event: &KvEvent, effects: &mut Effects<'_, C>) {
        let mut placed = vec![event.clone()];
        while let Some(event) = placed.pop() {
            let KvEvent::Stored { blocks, .. } = &event else {
                continue;
            };
            for block in blocks {
                for child in self.orphans.adopt(block.engine) {
                    let applied = effects.cache.apply(self.rank, &child, self.copies);
                    let KvEvent::Stored { blocks, .. } = &child else {
                        continue;
                    };
                    let count = match applied {
                        Ok(()) => &mut effects.counts.orphans_placed,
                        Err(_) => &mut effects.counts.orphans_dropped,
                    };
                    *count += blocks.len() as u64;
                    placed.push(child);
                }
            }
        }
    }

    /// Counts an event that changes nothing, and reports the first of its kind.
    pub(crate) fn skip<C>(&mut self, skip: Skip, effects: &mut Effects<'_, C>) {
        if matches!(skip, Skip::BlockSize { .. }) {
            self.exact = false;
        }
        let counts = &mut *effects.counts;
        counts.group_skipped += u64::from(skip == Skip::Group);
        let (count, reported) = match skip {
            Skip::BlockSize { .. } => {
                let reported = &mut self.reported.block_size;
                (&mut counts.block_size_differs, reported)
            }
            Skip::Unknown => (&mut counts.unknown_kinds, &mut self.reported.unknown),
            // Hybrid models send such events all the time; they are no news.
            Skip::Group => (&mut counts.skipped, &mut true),
            _ => (&mut counts.skipped, &mut self.reported.other),
        };
        *count += 1;
        if !std::mem::replace(reported, true) {
            effects.notice(Notice::Skipped(skip));
        }
    }
}

/// A rank whose events come in an engine's batches: what later batches leave out is kept here.
#[derive(Clone, Debug)]
pub(crate) struct BatchRank {
    pub(crate) state: RankState,
    translator: Translator,
    /// Batches in a row that stored blocks of the right size, after a wrong one.
    fitting: u32,
}

impl BatchRank {
    pub(crate) fn new(rank: WorkerRank, options: TranslateOptions, exact: bool) -> Self {
        Self {
            state: RankState::new(rank, exact, true),
            translator: Translator::new(options),
            fitting: 0,
        }
    }

    pub(crate) fn translator_state(&self) -> TranslatorState {
        self.translator.state()
    }

    pub(crate) fn restore(&mut self, state: &TranslatorState) {
        self.translator.restore(state);
    }

    /// As [`RankState::forget`].
    pub(crate) fn forget<C: Cache>(&mut self, cache: &C, exact: bool) {
        self.state.forget(cache, exact);
        self.translator.reset();
    }

    /// Applies all events of a batch.
    pub(crate) fn apply<C: Cache>(&mut self, batch: &Batch, effects: &mut Effects<'_, C>) {
        let Self {
            state, translator, ..
        } = self;
        let before = (
            effects.counts.blocks_stored,
            effects.counts.block_size_differs,
        );
        translator.translate(batch, |translation| match translation {
            Translation::Event(event) => state.apply(event, effects),
            Translation::Skipped(skip) => state.skip(skip, effects),
        });
        if state.reported.block_size {
            self.look_at_block_size(before, effects);
        }
        let reported = &mut self.state.reported;
        if self.translator.pairs_seen() && !reported.pairs {
            reported.pairs = true;
            effects.notice(Notice::Pairs);
        }
    }

    /// After a wrong block size: whether batches have the right one again. `before` is what was stored and what
    /// had another size before this batch.
    fn look_at_block_size<C>(&mut self, before: (u64, u64), effects: &mut Effects<'_, C>) {
        let counts = &effects.counts;
        self.fitting = match (
            counts.blocks_stored > before.0,
            counts.block_size_differs > before.1,
        ) {
            (_, true) => 0,
            (true, false) => self.fitting + 1,
            (false, false) => self.fitting,
        };
        if self.fitting >= FITTING_BATCHES_MIN {
            (self.fitting, self.state.reported.block_size) = (0, false);
            effects.notice(Notice::BlockSizeFits);
        }
    }
}
