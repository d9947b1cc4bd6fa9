//! What a placement costs, in seconds. Lower is better.
//!
//! ```text
//! own   = work(new, cached) + steps · over                    steps = ceil(new / M), over = chunk + stream · decoding + attend · context
//! more  = own − steps · a step of those that decode           what its steps take more than they would without it
//! wait  = what is booked there and not computed yet + planned + waiting for room
//! n     = decoding + pending + planned                        D = a decode step with this request added
//! evict = token · ρ · pressure · tokens that leave the cache for those of this prompt and its answer
//! cost  = wait + own · (1 + κ) + λ · n · more + λ · O · (D + n/2 · slow) + evict
//! ```
//!
//! The request waits, then is computed; its prompt delays each of the `n` others by what it makes their steps longer (each
//! gets a token of these steps, too), and its tokens slow their steps for as long as both run. `λ` is what a second of somebody's decoding is worth in seconds to a first token:
//! an answer of `O` tokens may take 25 ms for each, a first token 2 s. `κ` counts the prompt a second time: it also
//! delays whoever comes next.
//!
//! What is written where the cache is full takes the place of something that somebody may want again and that must then be
//! computed: `ρ` is the share of prompt tokens that were found cached of late, and `pressure` how much was written there of late
//! beside the other ranks, because a cache that is written fast forgets what is young. A second copy of what another rank holds costs
//! that, too.
//!
//! Where all that is equal, as for a new prompt on idle ranks, the rank goes first into whose cache least was written:
//! [`TIE`] seconds for each time that its cache was filled, less than any real difference.
//!
//! What always holds: every term is finite and not negative for finite loads; without weights there is nothing to set.

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
    /// What the prompt costs others: those that decode there, and those that come next.
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
        }
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

    /// The cost without taints: the same operations in the same order as [`TimedPrompt::terms`].
    #[inline(always)]
    pub(crate) fn cost(&self, rank: &RankTime, plan: &RankPlan, held: f64, active: f64) -> f64 {
        let cached = self.cached(held.max(active));
        let (own, more) = self.own_and_more(rank, cached);
        let room = self.room(rank, plan, active);
        let wait = rank.waiting(self.now_ns) + plan.own + room;
        let n = rank.running + plan.requests;
        let delay = KAPPA * own + self.lambda * n * more;
        wait + own + delay + self.decode(rank, plan, n) + self.evict(rank, cached) + rank.tie
    }

    /// Seconds to compute again what leaves the cache for this prompt and its answer.
    #[inline(always)]
    fn evict(&self, rank: &RankTime, cached: f64) -> f64 {
        rank.evict * (self.isl - cached + self.output - rank.free).max(0.0)
    }

    #[inline(always)]
    fn decode(&self, rank: &RankTime, plan: &RankPlan, n: f64) -> f64 {
        let half = 0.5 * self.output;
        let slow = rank.law.stream + rank.law.attend * (self.isl + half);
        let step = rank.step + rank.law.stream * plan.requests + rank.law.attend * n * half;
        self.lambda * self.output * (step + slow * (1.0 + 0.5 * n))
    }

    /// The cost, part by part.
    pub(crate) fn terms(
        &self,
        rank: &RankTime,
        plan: &RankPlan,
        (held, active): (f64, f64),
        taint_factor: f64,
    ) -> CostParts {
        let cached = self.cached(held.max(active));
        let (own, more) = self.own_and_more(rank, cached);
        let room = self.room(rank, plan, active);
        let wait = rank.waiting(self.now_ns) + plan.own + room;
        let n = rank.running + plan.requests;
        let delay = KAPPA * own + self.lambda * n * more;
        let decode = self.decode(rank, plan, n);
        let evict = self.evict(rank, cached);
        CostParts {
            new_tokens: self.isl - cached,
            wait,
            room,
            own,
            delay,
            decode,
            evict,
            cost: (wait + own + delay + decode + evict + rank.tie) * taint_factor,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::Time;

    use super::*;

    const LAW: StepLaw = StepLaw {
        chunk: 0.010,
        token: 1e-4,
        pair: 0.0,
        step: 0.005,
        stream: 1e-4,
        attend: 1e-8,
    };

    fn rank(load: TimedLoad) -> RankTime {
        RankTime::new(LAW, 1.0, &load, 8192, &cache(Some(1000), 0.0))
    }

    fn cache(blocks: Option<u64>, written: f64) -> CacheUse {
        CacheUse {
            block: 16.0,
            blocks,
            written,
            pressure: 0.0,
        }
    }

    fn prompt(isl: u32, output: f64) -> TimedPrompt {
        TimedPrompt::new(1_000_000_000, isl, 16, output, LAW, (true, true))
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
    }

    /// 1,000 tokens at 0.1 ms and one step; nobody else there; an answer of 100 tokens at 5.1 ms and what it reads.
    #[test]
    fn an_empty_rank_costs_the_prompt_twice_and_the_answer() {
        let terms = prompt(1000, 100.0).terms(
            &rank(TimedLoad::default()),
            &RankPlan::default(),
            (0.0, 0.0),
            1.0,
        );
        near(terms.own, 0.110);
        near(terms.wait, 0.0);
        near(terms.delay, 0.110);
        let lambda = LAMBDA_MAX * 2.0 / (0.025 * 100.0);
        near(
            terms.decode,
            lambda * 100.0 * (0.005 + 1e-4 + 1e-8 * 1050.0),
        );
        near(terms.cost, terms.own + terms.delay + terms.decode);
    }

    #[test]
    fn what_is_cached_is_not_computed_but_the_last_token_always_is() {
        let rank = rank(TimedLoad::default());
        let new = |held, active| {
            let plan = RankPlan::default();
            prompt(1024, 10.0)
                .terms(&rank, &plan, (held, active), 1.0)
                .new_tokens
        };
        assert_eq!(new(0.0, 0.0), 1024.0);
        assert_eq!(new(10.0, 0.0), 1024.0 - 160.0);
        assert_eq!(new(10.0, 20.0), 1024.0 - 320.0);
        assert_eq!(new(64.0, 0.0), 16.0);
        assert_eq!(new(1000.0, 0.0), 16.0);
    }

    /// Three prompts of 0.1 s wait and the oldest has been computed for 60 ms.
    #[test]
    fn prompts_that_wait_count_less_as_the_oldest_is_computed() {
        let load = TimedLoad {
            pending: 3,
            prefill: 0.3,
            oldest: 0.1,
            oldest_since: Time::from_millis(940),
            ..TimedLoad::default()
        };
        let wait = |ms: u64| {
            let mut prompt = prompt(160, 1.0);
            prompt.now_ns = ms * 1_000_000;
            prompt
                .terms(&rank(load), &RankPlan::default(), (0.0, 0.0), 1.0)
                .wait
        };
        near(wait(1000), 0.24);
        near(wait(1040), 0.2);
        near(wait(2000), 0.2);
        let planned = RankPlan {
            requests: 2.0,
            own: 0.5,
            tokens: 0.0,
        };
        near(
            prompt(160, 1.0)
                .terms(&rank(load), &planned, (0.0, 0.0), 1.0)
                .wait,
            0.74,
        );
    }

    /// Ten decode there: the prompt delays each by what its step takes longer than theirs, and each step gets longer for all.
    #[test]
    fn others_that_decode_are_delayed_and_slowed() {
        let load = TimedLoad {
            decoding: 10,
            context: 20_000,
            ..TimedLoad::default()
        };
        let terms = prompt(1000, 100.0).terms(&rank(load), &RankPlan::default(), (0.0, 0.0), 1.0);
        let lambda = LAMBDA_MAX * 0.8;
        near(terms.own, 0.1 + 0.010 + 10.0 * 1e-4 + 20_000.0 * 1e-8);
        let plain = 0.005 + 10.0 * 1e-4 + 20_000.0 * 1e-8;
        near(terms.delay, terms.own + lambda * 10.0 * (terms.own - plain));
        let slow = 1e-4 + 1e-8 * 1050.0;
        let step = 0.005 + 10.0 * 1e-4 + 1e-8 * (20_000.0 + 10.0 * 50.0);
        near(terms.decode, lambda * 100.0 * (step + slow + 5.0 * slow));
    }

    /// 16,000 tokens of cache: 1,000 blocks active leave no room.
    #[test]
    fn a_full_cache_must_be_waited_for_unless_the_prompt_is_active_there() {
        let load = TimedLoad {
            decoding: 10,
            active_blocks: 1000,
            ..TimedLoad::default()
        };
        let room = |active| {
            let plan = RankPlan::default();
            prompt(1600, 100.0)
                .terms(&rank(load), &plan, (0.0, active), 1.0)
                .room
        };
        let mine = 16_000.0 + 10.0 * 50.0;
        let short: f64 = mine + 1600.0 - 16_000.0;
        near(room(0.0), short / mine * 200.0 * (0.005 + 1e-3));
        assert!(room(99.0) < room(0.0));
        let unknown = RankTime::new(LAW, 1.0, &load, 8192, &cache(None, 0.0));
        let plan = RankPlan::default();
        assert_eq!(prompt(1600, 100.0).room(&unknown, &plan, 0.0), 0.0);
    }

    /// 16,000 tokens of cache, 15,500 written: 1,000 new tokens and an answer of 100 push 600 out.
    #[test]
    fn what_leaves_a_full_cache_has_a_price() {
        let evict = |written, pressure, held| {
            let used = CacheUse {
                pressure,
                ..cache(Some(1000), written)
            };
            let rank = RankTime::new(LAW, 2.0, &TimedLoad::default(), 8192, &used);
            let plan = RankPlan::default();
            prompt(1000, 100.0)
                .terms(&rank, &plan, (held, 0.0), 1.0)
                .evict
        };
        assert_eq!(evict(14_900.0, 0.6, 0.0), 0.0);
        near(evict(15_500.0, 0.6, 0.0), 0.6 * 1e-4 * 600.0);
        near(evict(99_000.0, 0.6, 0.0), 0.6 * 1e-4 * 1100.0);
        near(evict(99_000.0, 0.6, 50.0), 0.6 * 1e-4 * 300.0);
        assert_eq!(evict(99_000.0, 0.0, 0.0), 0.0);
    }

    /// Both ways to the cost agree to the last bit.
    #[test]
    fn the_sum_is_the_sum_of_its_parts() {
        for decoding in [0, 1, 7, 300] {
            let load = TimedLoad {
                decoding,
                pending: decoding / 3,
                context: u64::from(decoding) * 1777,
                prefill: 0.137 * f64::from(decoding),
                active_blocks: u64::from(decoding) * 9,
                ..TimedLoad::default()
            };
            for isl in [1, 16, 17, 4000, 40_000] {
                let (prompt, rank) = (prompt(isl, 77.0), rank(load));
                let plan = RankPlan {
                    requests: 1.0,
                    own: 0.01,
                    tokens: 100.0,
                };
                let cost = prompt.cost(&rank, &plan, 3.0, 2.0);
                assert_eq!(cost, prompt.terms(&rank, &plan, (3.0, 2.0), 1.0).cost);
                assert!(cost.is_finite() && cost > 0.0);
            }
        }
    }

    /// A quarter of a full step of 8,192 tokens is 0.2048 s.
    #[test]
    fn a_rank_opens_when_little_waits_and_time_alone_may_open_it() {
        let load = |prefill, oldest| TimedLoad {
            pending: 1,
            prefill,
            oldest,
            ..TimedLoad::default()
        };
        let second = 1_000_000_000;
        assert!(rank(load(0.2, 0.2)).is_open(0));
        let closed = rank(load(0.5, 0.5));
        assert!(!closed.is_open(0));
        let opens = closed.opens_at(0).unwrap();
        assert!(!closed.is_open(opens - 3) && closed.is_open(opens));
        near(opens as f64 * 1e-9, 0.5 - 0.010 - 0.2048 + 2e-9);
        let never = rank(load(5.0, 0.5));
        assert!(!never.is_open(100 * second) && never.opens_at(0).is_none());
        assert_eq!(rank(load(0.1, 0.1)).opens_at(0), None);
    }

    /// A step has a fixed cost of 10 ms here. One prompt is under way, and one or more wait for it to end.
    #[test]
    fn prompts_share_a_step_only_if_that_costs_less_than_it_saves() {
        let rank = |pending| {
            rank(TimedLoad {
                pending,
                ..TimedLoad::default()
            })
        };
        assert!(!rank(0).is_crowded_by(5.0, 0.0) && !rank(1).is_crowded_by(5.0, 0.0));
        // 19 ms of work delay the one that waits by 19 ms; a step of its own delays this one and the next by 10 ms each.
        assert!(!rank(2).is_crowded_by(0.029, 0.0));
        assert!(rank(2).is_crowded_by(0.031, 0.0));
        // Two that wait are delayed; two that are held gain a step each.
        assert!(rank(3).is_crowded_by(0.029, 0.0));
        assert!(!rank(3).is_crowded_by(0.029, 2.0));
        let load = TimedLoad {
            pending: 3,
            silent: 2,
            ..TimedLoad::default()
        };
        let unknown = RankTime::new(LAW, 1.0, &load, 8192, &cache(None, 0.0));
        assert!(!unknown.is_crowded_by(5.0, 0.0));
    }

    /// Prompts too fast to be told apart: all of their time is the fixed cost.
    #[test]
    fn an_idle_rank_is_open_whatever_the_law_says() {
        let law = StepLaw { token: 0.0, ..LAW };
        let idle = TimedLoad::default();
        let rank = RankTime::new(law, 1.0, &idle, 8192, &cache(None, 0.0));
        assert!(rank.is_open(0) && rank.is_open(1_000_000_000));
    }

    #[test]
    fn only_what_happens_there_counts_in_a_split_role() {
        let rank = rank(TimedLoad {
            decoding: 5,
            ..TimedLoad::default()
        });
        let terms = |roles| {
            let prompt = TimedPrompt::new(0, 1000, 16, 100.0, LAW, roles);
            prompt.terms(&rank, &RankPlan::default(), (0.0, 0.0), 1.0)
        };
        assert_eq!(terms((true, false)).decode, 0.0);
        assert!(terms((true, false)).own > 0.0);
        assert_eq!(terms((false, true)).own, 0.0);
        assert!(terms((false, true)).decode > 0.0);
    }
}
