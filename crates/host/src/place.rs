//! From tokens to a booking: name the blocks, ask the index, ask the router.

use std::sync::Arc;
use std::time::Duration;

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_index::{Match, Matches};
use kvasir_router::{Arrival, Lookup, Overlap, Placement, PotentialLoad, RouteError};
use kvasir_telemetry::observe_ms;
use kvasir_types::{LocalHash, SequenceHash, Token, WorkerRank};

use crate::Model;
use crate::booking::Booking;
use crate::meters::Stage;
use crate::router_host::{Needs, RouterHost};
use crate::shared_cache::{POOL_TOKENS_MAX, PoolAnswer, PoolPrompt, PooledPrompt, SharedCache};
use crate::view::{PendingPrediction, Prediction};

/// Blocks of a prompt that are looked up and recorded: what follows them changes no choice, and a prompt of any length must
/// not hold up a serving thread.
const BLOCKS_MAX: usize = 1 << 17;

/// The names of a prompt's blocks, as far as the router mode asks for them.
#[derive(Clone, Debug)]
pub struct PromptBlocks {
    lookup: Lookup,
    /// Tokens of the prompt as the engine must count them; `None` where it may count others.
    pub certain_tokens: Option<u32>,
    /// What a cache is asked that all workers share.
    pooled: Option<Arc<PooledPrompt>>,
}

impl PromptBlocks {
    /// Of a prompt that nobody has read.
    #[must_use]
    pub fn none() -> Self {
        let lookup = Lookup {
            locals: Arc::default(),
            sequence: Arc::default(),
            predict_all: false,
            shared: Arc::default(),
        };
        Self {
            lookup,
            certain_tokens: None,
            pooled: None,
        }
    }

    /// If `guessed`, they are made of the text and not of tokens: no event of an engine will ever name them, and only
    /// our own routing decisions say where they are. No pool is asked for them either.
    pub fn set_guessed(&mut self, guessed: bool) {
        self.lookup.predict_all |= guessed;
        if guessed {
            self.pooled = None;
        }
    }
}

impl RouterHost {
    /// What of a prompt counts as cached, and where.
    #[must_use]
    pub fn overlap(&self, blocks: &PromptBlocks) -> Overlap {
        self.find(&blocks.lookup, &mut Matches::new())
    }

    /// A prompt whose blocks have names already.
    #[must_use]
    pub fn named_blocks(
        &self,
        locals: Arc<[LocalHash]>,
        sequence: Arc<[SequenceHash]>,
    ) -> PromptBlocks {
        let lookup = Lookup {
            locals: if self.needs().index {
                locals
            } else {
                Arc::default()
            },
            sequence,
            predict_all: self.predicts_all(),
            shared: Arc::default(),
        };
        PromptBlocks {
            lookup,
            certain_tokens: None,
            pooled: None,
        }
    }
}

impl Model {
    /// Names the blocks of `tokens` under a cache salt; empty means none. Of a very long prompt the first ones.
    #[must_use]
    pub fn name_blocks(&self, tokens: &[Token], salt: &str) -> PromptBlocks {
        let scope = Scope {
            salt,
            lora: self.lora.as_deref().unwrap_or_default(),
            ..Scope::default()
        };
        self.name_blocks_in(tokens, &scope)
    }

    /// The same, for callers who say themselves what the prompt shares a cache with.
    #[must_use]
    pub fn name_blocks_in(&self, tokens: &[Token], scope: &Scope<'_>) -> PromptBlocks {
        let Needs { index, sequence } = self.host.needs();
        if !index && !sequence {
            return PromptBlocks::none();
        }
        let context = self.host.context();
        let clock = context.clock;
        let start = clock.now();
        let mut locals = Vec::new();
        let tokens_max = (self.block_size as usize).saturating_mul(BLOCKS_MAX);
        let tokens = tokens.get(..tokens_max).unwrap_or(tokens);
        BlockHasher::new(self.block_size as usize, scope).extend(tokens, &mut locals);
        let hashed = clock.now();
        let sequence = if sequence {
            sequence_hashes(&locals).into()
        } else {
            Arc::default()
        };
        let metrics = &context.metrics;
        observe_ms(&metrics.overhead_block_hashing_ms, hashed - start);
        observe_ms(&metrics.overhead_seq_hashing_ms, clock.now() - hashed);
        let lookup = Lookup {
            locals: if index { locals.into() } else { Arc::default() },
            sequence,
            predict_all: self.host.predicts_all(),
            shared: Arc::default(),
        };
        let pooled = self.host.shared_cache().map(|_| {
            let some = tokens.get(..POOL_TOKENS_MAX).unwrap_or(tokens);
            PooledPrompt::new(PoolPrompt {
                model: Arc::clone(&self.name),
                tokens: some.into(),
                block_size: self.block_size,
                salt: scope.salt.into(),
                lora: scope.lora.into(),
            })
        });
        PromptBlocks {
            lookup,
            certain_tokens: None,
            pooled,
        }
    }

    /// How many leading blocks of a prompt each rank holds.
    #[must_use]
    pub fn overlaps(&self, blocks: &PromptBlocks) -> Matches {
        let mut matches = Matches::new();
        self.host.index().find(&blocks.lookup.locals, &mut matches);
        matches
    }

    /// What each rank would have to do if a prompt of so many tokens went there, one row per rank.
    #[must_use]
    pub fn potential_loads(&self, isl_tokens: u32, blocks: &PromptBlocks) -> Vec<PotentialLoad> {
        let overlap = self.host.find(&blocks.lookup, &mut Matches::new());
        let mut loads = Vec::new();
        self.host
            .potential_loads(isl_tokens, &overlap, &blocks.lookup.sequence, &mut loads);
        loads
    }

    /// Which rank a prompt would go to now. Nothing is booked, and nothing waits.
    pub async fn peek(
        &self,
        mut arrival: Box<Arrival>,
        blocks: &PromptBlocks,
    ) -> Result<Placement, RouteError> {
        arrival.query_only = true;
        let overlap = self.host.overlap(blocks);
        blocks.lookup.arrive(&mut arrival, overlap);
        let asked = self.host.route(arrival, &blocks.lookup).await?;
        Ok(asked.placement().clone())
    }

    /// Chooses a worker and books it; waits while the router holds the request back. `arrival` is in a box: as a value
    /// it would have its room several times in the future of each request.
    pub async fn book(
        &self,
        mut arrival: Box<Arrival>,
        blocks: &PromptBlocks,
    ) -> Result<Booking, RouteError> {
        let (host, meters) = (&self.host, &self.placements);
        let clock = host.context().clock;
        let _inside = meters.enter(Stage::Route);
        let start = clock.now();
        let mut matches = Matches::new();
        let (shared, pooled) = (host.shared_cache(), blocks.pooled.as_ref());
        let pooled = match shared.zip(pooled) {
            None => {
                let overlap = match host.remote_index() {
                    None => host.find(&blocks.lookup, &mut matches),
                    // In a box: most routers have an index.
                    Some(_) => {
                        let asking = self.find_remote(&mut arrival, &blocks.lookup, &mut matches);
                        Box::pin(asking).await
                    }
                };
                blocks.lookup.arrive(&mut arrival, overlap);
                None
            }
            // In a box: most requests have none.
            Some((cache, prompt)) => {
                let find = self.find_pooled(cache, prompt, &blocks.lookup, &mut matches);
                let (overlap, found) = Box::pin(find).await;
                found.lookup.arrive(&mut arrival, overlap);
                Some(found)
            }
        };
        let lookup = pooled
            .as_ref()
            .map_or(&blocks.lookup, |found| &found.lookup);
        let found = match meters.by_cache() {
            true => clock.now(),
            false => start,
        };
        let routed = host.route(arrival, lookup).await;
        let mut booking = routed.inspect_err(|error| host.meters().refused(error))?;
        host.open_session(booking.placement()).await;
        meters.chosen(booking.placement());
        let end = clock.now();
        host.record(end, booking.placement(), lookup);
        if !booking.placement().queued.is_zero() {
            // What was found has aged.
            host.index().find(&lookup.locals, &mut matches);
        }
        let answer = pooled.as_ref().map(|found| &found.answer);
        if let Some(pending) = self.predict(booking.target(), blocks, &matches, answer) {
            booking.predict(pending);
        }
        if let Some(PoolAnswer::Holds(_)) = answer {
            let own = device_blocks(&matches, booking.target());
            let overlap = Overlap {
                shared: lookup.shared.to_vec(),
                ..Overlap::none()
            };
            let beyond = &host.context().metrics.router_shared_cache_beyond_blocks;
            beyond.observe(overlap.shared_beyond(own).into());
        }
        meters.stage_took(Stage::Route, end - start);
        if meters.by_cache() {
            let metrics = &host.context().metrics;
            let asked_index = pooled.map_or(found - start, |found| found.asked_index);
            observe_ms(&metrics.overhead_indexer_find_matches_ms, asked_index);
            observe_ms(&metrics.overhead_scheduling_ms, end - found);
            observe_ms(&metrics.overhead_total_ms, end - start);
        }
        Ok(booking)
    }

    /// Asks another router's index. Without an answer nothing counts as cached but what was sent there lately.
    async fn find_remote(
        &self,
        arrival: &mut Arrival,
        lookup: &Lookup,
        matches: &mut Matches,
    ) -> Overlap {
        let host = &self.host;
        match host.ask_remote(lookup).await {
            Some(found) => host.credit_remote(lookup, &found, matches),
            None => {
                arrival.cache_unknown = !lookup.locals.is_empty();
                host.find(lookup, matches)
            }
        }
    }

    /// Looks a prompt up, and asks the pool at the same time.
    async fn find_pooled(
        &self,
        cache: &SharedCache,
        prompt: &PooledPrompt,
        lookup: &Lookup,
        matches: &mut Matches,
    ) -> (Overlap, PooledLookup) {
        let (host, clock) = (&self.host, self.host.context().clock);
        let look_up = async {
            let start = clock.now();
            let overlap = match host.ask_remote(lookup).await {
                Some(found) => host.credit_remote(lookup, &found, matches),
                None => host.find(lookup, matches),
            };
            (overlap, clock.now() - start)
        };
        // The question is on its way before the index is asked.
        let ask = prompt.answer(cache, host.context());
        let (answer, (mut overlap, asked_index)) = tokio::join!(ask, look_up);
        let lookup = Lookup {
            shared: answer.ranges(),
            ..lookup.clone()
        };
        overlap.shared = lookup.shared.to_vec();
        let found = PooledLookup {
            lookup,
            answer,
            asked_index,
        };
        (overlap, found)
    }

    /// What events predict of a request on its way to `target`; `None` if nobody judges that rank, or if the engine
    /// may see another prompt than we do.
    fn predict(
        &self,
        target: WorkerRank,
        blocks: &PromptBlocks,
        matches: &Matches,
        pool: Option<&PoolAnswer>,
    ) -> Option<PendingPrediction> {
        let locals = &blocks.lookup.locals;
        let prompt = blocks.certain_tokens.filter(|_| !locals.is_empty())?;
        let view = self.host.views().get(target)?;
        let ours = matches.sources().find(|s| s.events.rank == target);
        let own = ours.map_or(0, |s| s.events.disk_cumulative());
        let prediction = Prediction {
            locals: Arc::clone(locals),
            prompt,
            blocks: own,
            blocks_max: pool.map_or(own, |pool| pool.reach(own)),
            had_all: others_with_all(matches, target, locals.len()),
        };
        Some(PendingPrediction::new(view, prediction))
    }
}

/// A prompt that a pool was asked for.
struct PooledLookup {
    /// What is looked up again while the request waits.
    lookup: Lookup,
    answer: PoolAnswer,
    /// How long the index alone took.
    asked_index: Duration,
}

/// Leading blocks of a prompt that a rank has in its device's memory.
fn device_blocks(matches: &Matches, rank: WorkerRank) -> u32 {
    let ours = matches.sources().find(|s| s.events.rank == rank);
    ours.map_or(0, |s| s.events.device)
}

/// Ranks beside `target` that have all `blocks` of a prompt.
fn others_with_all(matches: &Matches, target: WorkerRank, blocks: usize) -> Vec<WorkerRank> {
    let has_all = |m: &Match| m.rank != target && m.disk_cumulative() as usize >= blocks;
    let events = matches.sources().map(|source| source.events);
    events.filter(has_all).map(|m| m.rank).collect()
}
