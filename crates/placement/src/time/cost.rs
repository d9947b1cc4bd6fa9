//! What a placement costs, in seconds. Lower is better.
//!
//! ```text
//! own   = work(new, cached) + steps · over                    steps = ceil(new / M), over = chunk + stream · decoding + attend · context
//! more  = own − steps · a step of those that decode           what its steps take more than they would without it
//! wait  = what is booked there and not computed yet + planned + waiting for room
//! n     = decoding + pending + planned + expected back        D = a decode step with this request added
//! evict = token · ρ · pressure · tokens that leave the cache for those of this prompt and its answer
//! cost  = wait + own · (1 + κ) + λ · n · more + λ · O · (D + n/2 · slow) + evict
//! ```
//!
//! The request waits, then is computed; its prompt delays each of the `n` others by what it makes their steps longer (each
//! gets a token of these steps, too), and its tokens slow their steps for as long as both run. `λ` is what a second of somebody's decoding is worth in seconds to a first token:
//! an answer of `O` tokens may take 25 ms for each, a first token 2 s. `κ` counts the prompt a second time: it also
//! delays whoever comes next. Clients that read an answer of this rank come back to it: they count by how likely they are there
//! while this request is (`returns`).
//!
//! What is written where the cache is full takes the place of something that somebody may want again and that must then be
//! computed: `ρ` is the share of prompt tokens that were found cached of late, and `pressure` how much was written there of late
//! beside the other ranks, because a cache that is written fast forgets what is young. A second copy of what another rank holds costs
//! that, too.
//!
//! A prefix for which requests have waited as long as a copy takes is copied (`copies`): where it is missing, the prompt costs
//! nothing, if `own · (1 + κ) + evict` is no more than what was waited for the part that is missing. Both are seconds until a first token.
//!
//! Where all that is equal, as for a new prompt on idle ranks, the rank goes first into whose cache least was written:
//! [`TIE`] seconds for each time that its cache was filled, less than any real difference.
//!
//! What always holds: every term is finite for finite loads, and the cost and all terms but `delay` are not negative; without
//! weights there is nothing to set.

#[cfg(test)]
mod tests;

use super::estimate::BATCH_UNKNOWN;
use super::law::StepLaw;
use crate::ledger::TimedLoad;

/// What a prompt costs those that come after it, in units of its own length.
const KAPPA: f64 = 1.0;
/// Most that a second of decoding counts.
const LAMBDA_MAX: f64 = 0.4;
/// Seconds that a first token may take, and a gap between tokens.
const TTFT_GOAL: f64 = 2.0;
const ITL_GOAL: f64 = 0.025;
/// A rank is open while less than this share of a full step of prompt waits there.
const OPEN_SHARE: f64 = 0.25;

/// What a full cache costs more than an empty one.
const TIE: f64 = 1e-9;

/// The parts of one candidate's cost, in seconds, for the record.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TimeTerms {
    /// Until the prompt's turn comes.
    pub wait: f32,
    /// Of that, until the cache has room.
    pub room: f32,
    /// Until the prompt is computed, once it is its turn.
    pub own: f32,
    /// What the prompt costs others: those that decode there, and those that come next. Where a copy of its
    /// prefix has been paid for by waiting, the whole prompt is taken off, so that this is below 0.
    pub delay: f32,
    /// What its tokens cost, and how far they slow the others'.
    pub decode: f32,
    /// What it costs to compute again what leaves the cache for it.
    pub evict: f32,
    /// Prompt tokens to compute there.
    pub new_tokens: u32,
}

/// The same as they are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CostParts {
    pub(crate) new_tokens: f64,
    pub(crate) wait: f64,
    pub(crate) room: f64,
    pub(crate) own: f64,
    pub(crate) delay: f64,
    pub(crate) decode: f64,
    pub(crate) evict: f64,
    /// The sum, multiplied by what preferred taints say.
    pub(crate) cost: f64,
}

impl CostParts {
    pub(crate) fn terms(&self) -> TimeTerms {
        TimeTerms {
            wait: self.wait as f32,
            room: self.room as f32,
            own: self.own as f32,
            delay: self.delay as f32,
            decode: self.decode as f32,
            evict: self.evict as f32,
            new_tokens: self.new_tokens as u32,
        }
    }
}

/// Requests that will go to a rank but have not yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RankPlan {
    pub(crate) requests: f64,
    pub(crate) own: f64,
    pub(crate) tokens: f64,
}

/// A rank's load in the form that the cost reads, made when the load or the law changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankTime {
    law: StepLaw,
    /// How many times as long prompts take as the fleet's law says.
    prompt_factor: f64,
    batch: f64,
    capacity: f64,
    over: f64,
    /// A step as it would be without a prompt.
    plain: f64,
    prefill: f64,
    oldest: f64,
    oldest_since_ns: u64,
    pending: f64,
    /// Prompts that surely wait for the one under way.
    behind: f64,
    decoding: f64,
    /// Decoding and pending.
    running: f64,
    /// A step of all of them, their answers not counted.
    step: f64,
    active_tokens: f64,
    /// A step as it is now.
    step_now: f64,
    open_below: f64,
    /// [`TIE`] times how often its cache was filled.
    tie: f64,
    /// Tokens of its cache that nothing was written to yet.
    free: f64,
    /// Seconds for each token that leaves its cache.
    evict: f64,
    /// Those that are expected back, in the measure of `returns`.
    returns: f64,
}

/// A rank's cache as the cost reads it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheUse {
    /// Tokens of a block.
    pub(crate) block: f64,
    /// Blocks it has, where that is known.
    pub(crate) blocks: Option<u64>,
    /// Tokens that prompts wrote there.
    pub(crate) written: f64,
    /// What was written there of late over the mean of all ranks, times the share of tokens that are wanted again.
    pub(crate) pressure: f64,
    /// Those whose cache is here and who are expected back, in the measure of `returns`.
    pub(crate) returns: f64,
}

impl RankTime {
    pub(crate) fn new(
        law: StepLaw,
        prompt_factor: f64,
        load: &TimedLoad,
        batch: u64,
        cache: &CacheUse,
    ) -> Self {
        let batch = known_batch(batch);
        let size = cache.blocks.map(|blocks| blocks as f64 * cache.block);
        let capacity = size.unwrap_or(f64::INFINITY);
        let (decoding, pending) = (f64::from(load.decoding), f64::from(load.pending));
        let (context, running) = (load.context as f64, decoding + pending);
        Self {
            law,
            prompt_factor,
            batch,
            capacity,
            over: law.chunk + law.ride(decoding, context),
            plain: law.decode(decoding, context),
            prefill: load.prefill,
            oldest: load.oldest,
            oldest_since_ns: load.oldest_since.as_nanos(),
            pending,
            behind: (pending - f64::from(load.silent) - 1.0).max(0.0),
            decoding,
            running,
            step: law.decode(running, context + load.pending_tokens as f64),
            active_tokens: load.active_blocks as f64 * cache.block,
            step_now: law.decode(decoding.max(1.0), context),
            open_below: OPEN_SHARE * law.work(batch, 0.0),
            tie: TIE * cache.written / size.unwrap_or(1e6),
            free: (capacity - cache.written).max(0.0),
            evict: law.token * cache.pressure,
            returns: cache.returns,
        }
    }

    /// Seconds of prompts booked here and not computed by `now`.
    #[inline(always)]
    fn waiting(&self, now_ns: u64) -> f64 {
        let since = now_ns.saturating_sub(self.oldest_since_ns) as f64 * 1e-9;
        self.prefill - since.min(self.oldest)
    }

    /// Whether a held request may go here. A rank with no prompt to compute always is, even where prompts take no time
    /// that could be measured.
    pub(crate) fn is_open(&self, now_ns: u64) -> bool {
        self.pending == 0.0 || self.waiting(now_ns) - self.pending * self.over < self.open_below
    }

    /// Prompts here that wait for the one under way. Of those whose answers come in one piece nobody knows: they do not
    /// count.
    pub(crate) fn prompts_behind(&self) -> f64 {
        self.behind
    }

    /// Whether a prompt of `own` seconds had better not come yet: those that wait here would be computed in one step with
    /// it, and each would have its first token later by all of its work. What that saves is one step: for itself, for
    /// whoever comes next, and for the `others` that are held.
    pub(crate) fn is_crowded_by(&self, own: f64, others: f64) -> bool {
        self.behind * (own - self.over) > self.over * (1.0 + KAPPA + others)
    }

    /// When it opens if nothing happens; `None` if time alone does not open it, or it is open.
    pub(crate) fn opens_at(&self, now_ns: u64) -> Option<u64> {
        let needed = self.prefill - self.pending * self.over - self.open_below;
        if self.is_open(now_ns) || needed > self.oldest {
            return None;
        }
        // One more nanosecond: at the border itself it is closed.
        Some(
            self.oldest_since_ns
                .saturating_add((needed * 1e9) as u64 + 2),
        )
    }

    /// Seconds of a prompt of which only its size is known.
    pub(crate) fn prompt(&self, new: f64, cached: f64) -> f64 {
        self.law.work(new, cached) + (new / self.batch).ceil() * self.over
    }

    /// Expected seconds until everything booked here is computed.
    pub(crate) fn expected_wait(&self, now_ns: u64) -> f64 {
        self.waiting(now_ns).max(0.0)
    }
}

/// Tokens of a step; an engine that does not say has 8,192.
pub(crate) fn known_batch(batch: u64) -> f64 {
    match batch {
        0 | crate::WorkerSpec::UNKNOWN_BATCH.. => BATCH_UNKNOWN,
        known => known as f64,
    }
}

/// A request in the form that the cost reads: what is the same for every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedPrompt {
    pub(crate) now_ns: u64,
    pub(crate) isl: f64,
    pub(crate) block: f64,
    /// Most tokens that can be cached: never the last one.
    cacheable: f64,
    output: f64,
    lambda: f64,
    /// The fleet's law, for prompts.
    law: StepLaw,
    /// Its work where nothing is cached.
    work_cold: f64,
    /// The prompt is computed where it goes.
    computes: bool,
    /// For how many requests each that a rank expects back counts.
    pub(crate) present: f64,
    /// What was waited for its prefix: seconds for each block that a rank lacks, and the blocks of the prefix.
    waited_block: f64,
    prefix: f64,
}

impl TimedPrompt {
    /// `output`: tokens of the answer. `computes`: the prompt is computed there; `decodes`: the answer is made there.
    pub(crate) fn new(
        now_ns: u64,
        isl_tokens: u32,
        block_size: u32,
        output: f64,
        law: StepLaw,
        (computes, decodes): (bool, bool),
    ) -> Self {
        let (isl, output) = (f64::from(isl_tokens), output.max(1.0));
        let block = f64::from(block_size.max(1));
        let whole = isl_tokens.saturating_sub(1) / block_size.max(1);
        Self {
            now_ns,
            isl,
            block,
            cacheable: f64::from(whole) * block,
            output: if decodes { output } else { 0.0 },
            lambda: LAMBDA_MAX * (TTFT_GOAL / (ITL_GOAL * output)).min(1.0),
            law,
            work_cold: law.work(isl, 0.0),
            computes,
            present: 0.0,
            waited_block: 0.0,
            prefix: 0.0,
        }
    }

    /// Ranks hold its first `blocks`, for which requests have waited so many seconds.
    pub(crate) fn count_copy(&mut self, waited: f64, blocks: f64) {
        self.prefix = blocks;
        self.waited_block = waited / blocks.max(1.0);
    }

    /// Seconds that it takes where nothing is cached and nobody else is.
    pub(crate) fn stay(&self) -> f64 {
        let prompt = match self.computes {
            true => self.work_cold + self.law.chunk,
            false => 0.0,
        };
        prompt + self.output * self.law.decode(1.0, self.isl + 0.5 * self.output)
    }

    /// Tokens found in the cache of a rank that holds or runs so many blocks.
    #[inline(always)]
    pub(crate) fn cached(&self, blocks: f64) -> f64 {
        (blocks * self.block).min(self.cacheable)
    }

    /// Seconds of the prompt alone where so many blocks are cached.
    pub(crate) fn alone(&self, cached: f64, batch: f64) -> f64 {
        let new = self.isl - cached;
        self.law.work(new, cached) + (new / batch).ceil() * self.law.chunk
    }

    /// Seconds of the prompt on a rank, other work there not counted.
    pub(crate) fn own(&self, rank: &RankTime, cached: f64) -> f64 {
        self.own_and_more(rank, cached).0
    }

    /// The same, and how much longer its steps are than they would be without it.
    #[inline(always)]
    fn own_and_more(&self, rank: &RankTime, cached: f64) -> (f64, f64) {
        if !self.computes {
            return (0.0, 0.0);
        }
        let new = self.isl - cached;
        let work = if cached > 0.0 {
            self.law.work(new, cached)
        } else {
            self.work_cold
        };
        let steps = if new <= rank.batch {
            1.0
        } else {
            (new / rank.batch).ceil()
        };
        let own = rank.prompt_factor * work + steps * rank.over;
        (own, (own - steps * rank.plain).max(0.0))
    }

    /// Seconds until there is room in the cache.
    #[inline(always)]
    fn room(&self, rank: &RankTime, plan: &RankPlan, active: f64) -> f64 {
        let mine = rank.active_tokens + 0.5 * rank.decoding * self.output;
        let short = mine + plan.tokens + self.isl - active * self.block - rank.capacity;
        if short > 0.0 {
            return short / mine.max(1.0) * 2.0 * self.output.max(1.0) * rank.step_now;
        }
        0.0
    }

    /// The cost without taints.
    #[inline(always)]
    pub(crate) fn cost(&self, rank: &RankTime, plan: &RankPlan, held: f64, active: f64) -> f64 {
        self.parts(rank, plan, held, active).cost
    }

    /// The cost, part by part.
    pub(crate) fn terms(
        &self,
        rank: &RankTime,
        plan: &RankPlan,
        (held, active): (f64, f64),
        taint_factor: f64,
    ) -> CostParts {
        let parts = self.parts(rank, plan, held, active);
        CostParts {
            cost: parts.cost * taint_factor,
            ..parts
        }
    }

    #[inline(always)]
    fn parts(&self, rank: &RankTime, plan: &RankPlan, held: f64, active: f64) -> CostParts {
        let blocks = held.max(active);
        let cached = self.cached(blocks);
        let (own, more) = self.own_and_more(rank, cached);
        let room = self.room(rank, plan, active);
        let wait = rank.waiting(self.now_ns) + plan.own + room;
        let coming = plan.requests + self.present * rank.returns;
        let n = rank.running + coming;
        let delay = KAPPA * own + self.lambda * n * more;
        let decode = self.decode(rank, coming, n);
        let evict = self.evict(rank, cached);
        let mut paid = 0.0;
        if self.waited_block > 0.0
            && self.waited_block * (self.prefix - blocks) >= own * (1.0 + KAPPA) + evict
        {
            paid = own + delay + evict;
        }
        CostParts {
            new_tokens: self.isl - cached,
            wait,
            room,
            own,
            delay: delay - paid,
            decode,
            evict,
            cost: wait + own + delay + decode + evict - paid + rank.tie,
        }
    }

    /// Seconds to compute again what leaves the cache for this prompt and its answer.
    #[inline(always)]
    fn evict(&self, rank: &RankTime, cached: f64) -> f64 {
        rank.evict * (self.isl - cached + self.output - rank.free).max(0.0)
    }

    #[inline(always)]
    fn decode(&self, rank: &RankTime, coming: f64, n: f64) -> f64 {
        let half = 0.5 * self.output;
        let slow = rank.law.stream + rank.law.attend * (self.isl + half);
        let step = rank.step + rank.law.stream * coming + rank.law.attend * n * half;
        self.lambda * self.output * (step + slow * (1.0 + 0.5 * n))
    }
}
