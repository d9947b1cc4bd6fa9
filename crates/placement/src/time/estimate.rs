//! What the router's own bookings say about how long engines take.
//!
//! Answers one question: which [`StepLaw`] do the first tokens and the gaps between tokens of this fleet follow, and
//! which ranks differ? One law for all ranks, one factor for each rank's prompts and one for its steps; a factor counts
//! only where it surely differs from 1, for otherwise the luckiest rank draws the large prompts.
//!
//! *Prompts*: as long as some prompt of a rank is pending, the rank computes prompts. Such a run, from when the first
//! became pending to the first token of the last, is one sample: what is computed of one prompt in another's step is
//! then nobody's error. Long runs are cut. *Steps*: the time between two tokens of one stream that are at least
//! [`GAP_TOKENS`] apart, less the runs between them, with nothing pending at either end. Windows of a rank do not
//! overlap and the first to end counts, so that a client that reads slowly is heard only if it is alone.
//!
//! What always holds: a prompt of which nobody saw the first token (an answer in one piece, a client that left) spoils
//! its run and the gaps across it, and teaches nothing; no sample makes a number negative or infinite.

use kvasir_types::{RequestId, Time};

use super::fit::{Fit, RankFactor};
use super::law::StepLaw;
use crate::ledger::{LedgerNote, RankState};
use crate::map::FastMap;

/// Tokens of a stream over which a step is measured.
pub const GAP_TOKENS: u32 = 16;
/// Of those, so many must come from steps without a prompt.
const PLAIN_TOKENS_MIN: f64 = 8.0;
/// A run of which less is the prompts' own says too little about them.
const OWN_SHARE_MIN: f64 = 0.4;
/// The same until so many steps were measured: what decodes added is only guessed before.
const OWN_SHARE_FIRST: f64 = 0.9;
const STEPS_KNOWN: u64 = 16;
/// Prompts after which a run is cut.
const RUN_PROMPTS: u32 = 8;
/// Samples of the fleet before its ranks are compared with the law.
const LAW_KNOWN: u64 = 32;
/// What is left of a sample after one more.
const PROMPT_MEMORY: f64 = 0.995;
const STEP_MEMORY: f64 = 0.999;
/// Length of answers before any was seen, and what is left of a length after one more.
const OUTPUT_PRIOR: f64 = 256.0;
const OUTPUT_MEMORY: f64 = 0.995;
const OUTPUT_PRIOR_SAMPLES: f64 = 4.0;
/// Tokens of a step where the engine does not say.
pub(super) const BATCH_UNKNOWN: f64 = 8192.0;

/// Units that bring the features near 1.
const TOKENS: f64 = 1e3;
const PAIRS: f64 = 1e7;
const STREAMS: f64 = 10.0;
const CONTEXT: f64 = 1e5;

/// Prompts of one rank computed one after the other.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: Time,
    last: Time,
    /// Waited for a step that had begun before.
    before: f64,
    /// Of decodes in the same steps.
    ride: f64,
    steps: f64,
    tokens: f64,
    pairs: f64,
    /// Tokens whose first tokens came in the last step.
    step_tokens: f64,
    prompts: u32,
    spoiled: bool,
}

impl Run {
    fn new(start: Time, before: f64) -> Self {
        Self {
            start,
            last: start,
            before,
            ride: 0.0,
            steps: 0.0,
            tokens: 0.0,
            pairs: 0.0,
            step_tokens: 0.0,
            prompts: 0,
            spoiled: false,
        }
    }
}

/// Where a gap of a stream begins.
#[derive(Clone, Copy, Debug)]
struct GapStart {
    at: Time,
    generated: u32,
    runs: f64,
    run_steps: f64,
    unseen: u32,
    state: RankState,
    slot: u32,
}

/// What is known of one rank.
#[derive(Clone, Copy, Debug)]
struct RankEstimate {
    run: Option<Run>,
    /// Seconds of all runs, and their steps.
    runs: f64,
    run_steps: f64,
    /// Runs of unknown length.
    unseen: u32,
    /// End of the last window that counted.
    measured: Time,
    batch: f64,
    prompts: RankFactor,
    steps: RankFactor,
}

impl Default for RankEstimate {
    fn default() -> Self {
        Self {
            run: None,
            runs: 0.0,
            run_steps: 0.0,
            unseen: 0,
            measured: Time::ZERO,
            batch: BATCH_UNKNOWN,
            prompts: RankFactor::default(),
            steps: RankFactor::default(),
        }
    }
}

/// The estimates of one fleet.
#[derive(Clone, Debug)]
pub struct Estimator {
    pub(super) prompts: Fit,
    pub(super) steps: Fit,
    ranks: Vec<RankEstimate>,
    streams: FastMap<RequestId, GapStart>,
    pub(super) output: f64,
    pub(super) outputs: f64,
    /// Counts changes of what is known of all ranks.
    version: u64,
    /// Ranks of which something else is known since they were last asked for, and of no other.
    changed: Vec<u32>,
    /// A buffer.
    ratios: Vec<f64>,
}

impl Estimator {
    /// Estimates that begin at `prior`.
    #[must_use]
    pub fn new(prior: &StepLaw) -> Self {
        let prompts = [prior.chunk, prior.token * TOKENS, prior.pair * PAIRS];
        let steps = [prior.step, prior.stream * STREAMS, prior.attend * CONTEXT];
        Self {
            prompts: Fit::new(prompts, PROMPT_MEMORY),
            steps: Fit::new(steps, STEP_MEMORY),
            ranks: Vec::new(),
            streams: FastMap::default(),
            output: OUTPUT_PRIOR,
            outputs: OUTPUT_PRIOR_SAMPLES,
            version: 0,
            changed: Vec::new(),
            ratios: Vec::new(),
        }
    }

    /// The law of the fleet.
    #[must_use]
    pub fn law(&self) -> StepLaw {
        let [chunk, token, pair] = self.prompts.coefficients();
        let [step, stream, attend] = self.steps.coefficients();
        StepLaw {
            chunk,
            token: token / TOKENS,
            pair: pair / PAIRS,
            step,
            stream: stream / STREAMS,
            attend: attend / CONTEXT,
        }
    }

    /// How many times as long a rank's prompts and steps take as the law says.
    #[must_use]
    pub fn factors(&self, slot: u32) -> (f64, f64) {
        let rank = self.ranks.get(slot as usize);
        rank.map_or((1.0, 1.0), |r| (r.prompts.get(), r.steps.get()))
    }

    /// The law of one rank.
    #[must_use]
    pub fn law_of(&self, slot: u32) -> StepLaw {
        let (prompts, steps) = self.factors(slot);
        self.law().scaled(prompts, steps)
    }

    /// Runs of prompts and windows of steps that were counted.
    #[must_use]
    pub fn samples(&self) -> (u64, u64) {
        (self.prompts.samples(), self.steps.samples())
    }

    /// The same of one rank.
    #[must_use]
    pub fn rank_samples(&self, slot: u32) -> (u64, u64) {
        let rank = self.ranks.get(slot as usize);
        rank.map_or((0, 0), |r| (r.prompts.samples(), r.steps.samples()))
    }

    /// Tokens of a usual answer.
    #[must_use]
    pub fn output(&self) -> f64 {
        self.output
    }

    /// Changes with every change of what is known of all ranks.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// A rank whose factors alone changed since it was last named here.
    pub(super) fn next_changed(&mut self) -> Option<u32> {
        self.changed.pop()
    }

    fn note_change(&mut self, slot: u32, law: bool, rank: bool) {
        if law {
            self.version += 1;
        } else if rank && !self.changed.contains(&slot) {
            self.changed.push(slot);
        }
    }

    /// A prompt alone in its step took so long.
    pub(super) fn learn_prompt(&mut self, new: f64, cached: f64, seconds: f64) {
        let pairs = new * (cached + 0.5 * new);
        self.prompts
            .learn(&[1.0, new / TOKENS, pairs / PAIRS], seconds);
    }

    /// A step of decodes took so long.
    pub(super) fn learn_step(&mut self, sequences: f64, context: f64, seconds: f64) {
        self.steps
            .learn(&[1.0, sequences / STREAMS, context / CONTEXT], seconds);
    }

    /// How a rank differs from the fleet: in prompts, in steps.
    pub(super) fn rank_factors(&self, slot: u32) -> (RankFactor, RankFactor) {
        let rank = self.ranks.get(slot as usize);
        rank.map_or_else(Default::default, |rank| (rank.prompts, rank.steps))
    }

    pub(super) fn set_factors(&mut self, slot: u32, prompts: RankFactor, steps: RankFactor) {
        let rank = self.rank(slot);
        (rank.prompts, rank.steps) = (prompts, steps);
    }

    /// Something is known that was not before.
    pub(super) fn changed(&mut self) {
        self.version += 1;
    }

    /// A slot has another rank now, with steps of `batch` tokens.
    pub fn set_rank(&mut self, slot: u32, batch: f64, new: bool) {
        let rank = self.rank(slot);
        if new {
            *rank = RankEstimate::default();
        }
        rank.batch = batch.max(1.0);
        self.version += 1;
    }

    /// Ranks have other slots now: what is known of each goes along.
    pub(super) fn moved(&mut self, moves: &[(u32, u32)]) {
        let old = std::mem::take(&mut self.ranks);
        for &(from, to) in moves {
            if let Some(rank) = old.get(from as usize) {
                *self.rank(to) = *rank;
            }
        }
        self.version += 1;
    }

    /// An answer was this long.
    pub fn answered(&mut self, output_tokens: u32) {
        let length = f64::from(output_tokens.max(1));
        self.outputs = (self.outputs * OUTPUT_MEMORY) + 1.0;
        self.output += (length - self.output) / self.outputs;
    }

    fn rank(&mut self, slot: u32) -> &mut RankEstimate {
        let at = slot as usize;
        if self.ranks.len() <= at {
            self.ranks.resize(at + 1, RankEstimate::default());
        }
        &mut self.ranks[at]
    }

    /// Takes note of what happened to a booking.
    pub fn observe(&mut self, note: &LedgerNote) {
        match *note {
            LedgerNote::Booked { slot, at, state } => self.booked(slot, at, state),
            LedgerNote::FirstToken {
                slot,
                at,
                id,
                new,
                cached,
                state,
            } => {
                self.first_token(slot, at, (new, cached), state);
                self.begin_gap(id, slot, at, 1, state);
            }
            LedgerNote::Unseen {
                slot, at, pending, ..
            } => self.unseen(slot, at, pending),
            LedgerNote::Tokens {
                slot,
                at,
                id,
                generated,
                state,
            } => self.tokens(slot, at, id, generated, state),
            LedgerNote::Freed { id, .. } => {
                self.streams.remove(&id);
            }
            LedgerNote::Lost => self.lost(),
        }
    }

    fn lost(&mut self) {
        self.streams.clear();
        for rank in &mut self.ranks {
            rank.run = None;
            rank.unseen = rank.unseen.wrapping_add(1);
        }
    }

    fn booked(&mut self, slot: u32, at: Time, state: RankState) {
        if state.pending != 1 {
            return;
        }
        // It waits for half a step on average, where one has begun.
        let before = match state.decoding {
            0 => 0.0,
            n => 0.5 * self.law_of(slot).decode(f64::from(n), state.context as f64),
        };
        self.rank(slot).run = Some(Run::new(at, before));
    }

    fn first_token(&mut self, slot: u32, at: Time, (new, cached): (u32, u32), state: RankState) {
        let law = self.law_of(slot);
        let (decoding, context) = (f64::from(state.decoding), state.context as f64);
        let half_step = 0.5 * law.decode(decoding, context);
        let batch = self.rank(slot).batch;
        let Some(mut run) = self.rank(slot).run else {
            return;
        };
        let next_step = run.prompts > 0 && (at - run.last).as_secs_f64() > half_step;
        if next_step && run.prompts >= RUN_PROMPTS {
            let end = run.last;
            self.end_run(slot, run);
            run = Run::new(end, 0.0);
        }
        if next_step || run.prompts == 0 {
            run.step_tokens = 0.0;
        }
        let (new, cached) = (f64::from(new), f64::from(cached));
        let before = (run.step_tokens / batch).ceil();
        run.step_tokens += new;
        let steps = ((run.step_tokens / batch).ceil() - before).max(0.0);
        run.steps += steps;
        run.ride += steps * law.ride(decoding, context);
        run.tokens += new;
        run.pairs += new * (cached + 0.5 * new);
        run.prompts += 1;
        run.last = at;
        self.rank(slot).run = Some(run);
        if state.pending == 0 {
            self.rank(slot).run = None;
            self.end_run(slot, run);
        }
    }

    fn unseen(&mut self, slot: u32, at: Time, pending: u32) {
        let rank = self.rank(slot);
        rank.unseen = rank.unseen.wrapping_add(1);
        match (&mut rank.run, pending) {
            (run, 0) => *run = None,
            (Some(run), _) => run.spoiled = true,
            (None, _) => {
                let mut run = Run::new(at, 0.0);
                run.spoiled = true;
                rank.run = Some(run);
            }
        }
    }

    fn end_run(&mut self, slot: u32, run: Run) {
        let took = (run.last - run.start).as_secs_f64();
        let rank = self.rank(slot);
        rank.runs += (took - run.before).max(0.0);
        rank.run_steps += run.steps;
        if run.spoiled || took <= 0.0 {
            return;
        }
        let own = took - run.before - run.ride;
        let least = match self.steps.samples() {
            0..STEPS_KNOWN => OWN_SHARE_FIRST,
            _ => OWN_SHARE_MIN,
        };
        if own < least * took {
            return;
        }
        let features = [run.steps, run.tokens / TOKENS, run.pairs / PAIRS];
        let expected = self.prompts.predict(&features);
        let known = self.prompts.samples() >= LAW_KNOWN;
        let changed = known && self.compare(slot, |rank| &mut rank.prompts, own, expected);
        let alike = own / self.factors(slot).0;
        let law = self.prompts.learn(&features, alike);
        self.note_change(slot, law, changed);
    }

    /// A rank's sample against the law, and the rank against the others: where all took longer than the law says, the
    /// law is wrong and not the ranks.
    fn compare(
        &mut self,
        slot: u32,
        of: impl Fn(&mut RankEstimate) -> &mut RankFactor,
        took: f64,
        expected: f64,
    ) -> bool {
        of(self.rank(slot)).learn(took, expected);
        self.ratios.clear();
        for rank in &mut self.ranks {
            self.ratios.extend(of(rank).ratio());
        }
        // The lower of the two in the middle: where half of the ranks slow down, the law stays.
        let middle = self.ratios.len().saturating_sub(1) / 2;
        let usual = match self.ratios.is_empty() {
            true => return false,
            false => *self.ratios.select_nth_unstable_by(middle, f64::total_cmp).1,
        };
        of(self.rank(slot)).compare(usual)
    }

    fn begin_gap(&mut self, id: RequestId, slot: u32, at: Time, generated: u32, state: RankState) {
        let rank = self.rank(slot);
        let start = GapStart {
            at,
            generated,
            runs: rank.runs,
            run_steps: rank.run_steps,
            unseen: rank.unseen,
            state,
            slot,
        };
        self.streams.insert(id, start);
    }

    fn tokens(&mut self, slot: u32, at: Time, id: RequestId, generated: u32, state: RankState) {
        if state.pending > 0 {
            return;
        }
        let Some(start) = self.streams.get(&id).copied() else {
            return self.begin_gap(id, slot, at, generated, state);
        };
        let idle_start = start.state.pending == 0 && start.slot == slot;
        if idle_start && generated.saturating_sub(start.generated) < GAP_TOKENS {
            return;
        }
        if idle_start {
            self.gap(&start, at, generated, state);
        }
        self.begin_gap(id, slot, at, generated, state);
    }

    fn gap(&mut self, start: &GapStart, at: Time, generated: u32, state: RankState) {
        let rank = self.rank(start.slot);
        if rank.unseen != start.unseen || start.at < rank.measured {
            return;
        }
        let steps = f64::from(generated - start.generated) - (rank.run_steps - start.run_steps);
        let seconds = (at - start.at).as_secs_f64() - (rank.runs - start.runs);
        let (first, last) = (f64::from(start.state.decoding), f64::from(state.decoding));
        let steady = (first - last).abs() <= (0.5 * first).max(4.0);
        if steps < PLAIN_TOKENS_MIN || seconds <= 0.0 || !steady {
            return;
        }
        rank.measured = at;
        let context = 0.5 * (start.state.context as f64 + state.context as f64);
        let features = [1.0, 0.5 * (first + last) / STREAMS, context / CONTEXT];
        let step = seconds / steps;
        let expected = self.steps.predict(&features);
        let known = self.steps.samples() >= LAW_KNOWN;
        let changed = known && self.compare(start.slot, |rank| &mut rank.steps, step, expected);
        let alike = step / self.factors(start.slot).1;
        let law = self.steps.learn(&features, alike);
        self.note_change(start.slot, law, changed);
    }
}
