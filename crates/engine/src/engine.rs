//! The engine as a value: requests in, steps out.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use kvasir_profile::{Chunk, StepWork};
use kvasir_types::RequestId;

use crate::cache::Cache;
use crate::pool::BlockId;
use crate::sequence::Sequence;
use crate::{
    AdmitError, ConfigError, Counters, EngineConfig, EngineRequest, Load, Output, OutputTokens,
    SchedulingPolicy, Step,
};

/// A sequence's part in the step that is being made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShare {
    pub(crate) id: RequestId,
    /// Tokens computed.
    pub(crate) new: u32,
    /// Tokens there before.
    before: u32,
    decodes: bool,
}

impl StepShare {
    pub(crate) fn of(sequence: &Sequence, new: u32) -> Self {
        let (before, decodes) = (sequence.computed, sequence.decodes());
        Self {
            id: sequence.id,
            new,
            before,
            decodes,
        }
    }
}

/// One rank of an engine.
///
/// A host admits and cancels at any time; while [`Engine::is_idle`] is false it calls [`Engine::step`],
/// waits for the step's duration, and delivers its outputs and events. Requests admitted meanwhile enter
/// with the next step, as in a real engine.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) cache: Cache,
    /// The batch, in order of entry.
    #[expect(
        clippy::vec_box,
        reason = "order is kept by moving them, and they are large"
    )]
    pub(crate) running: Vec<Box<Sequence>>,
    pub(crate) waiting: VecDeque<Box<Sequence>>,
    ids: HashSet<RequestId>,
    pub(crate) counters: Counters,
    pub(crate) shares: Vec<StepShare>,
    chunks: Vec<Chunk>,
    pub(crate) found: Vec<BlockId>,
}

impl Engine {
    /// An empty engine.
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            cache: Cache::new(&config),
            config,
            running: Vec::new(),
            waiting: VecDeque::new(),
            ids: HashSet::new(),
            counters: Counters::default(),
            shares: Vec::new(),
            chunks: Vec::new(),
            found: Vec::new(),
        })
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// From the next step on, steps take this many times less than measured. Not a positive number: no change.
    pub fn set_speedup(&mut self, speedup: f64) {
        if speedup.is_finite() && speedup > 0.0 {
            self.config.speedup = speedup;
        }
    }

    /// Totals since the start.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether there is nothing to compute.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Its load now.
    #[must_use]
    pub fn load(&self) -> Load {
        let pool = &self.cache.pool;
        let sequences = self.running.iter().chain(&self.waiting);
        let pending = |s: &Sequence| u64::from(s.prompt_len().saturating_sub(s.computed));
        Load {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            used_blocks: pool.total() - pool.free(),
            cached_blocks: pool.cached(),
            total_blocks: pool.total(),
            pending_prefill_tokens: sequences.map(|s| pending(s)).sum(),
        }
    }

    /// Takes a request; it enters the batch with a later step.
    pub fn admit(&mut self, request: EngineRequest) -> Result<(), AdmitError> {
        let max_tokens = self.check(&request)?;
        self.ids.insert(request.id);
        let sequence = Box::new(Sequence::new(request, self.counters.admitted, max_tokens));
        self.counters.admitted += 1;
        let at = match self.config.scheduling {
            SchedulingPolicy::Fcfs => self.waiting.len(),
            SchedulingPolicy::Priority => self.waiting_place(&sequence),
        };
        self.waiting.insert(at, sequence);
        Ok(())
    }

    /// Where a sequence stands among those that wait by urgency.
    pub(crate) fn waiting_place(&self, sequence: &Sequence) -> usize {
        let key = urgency(sequence);
        self.waiting.partition_point(|s| urgency(s) <= key)
    }

    /// Why a request is refused, or how many tokens it may get.
    fn check(&self, request: &EngineRequest) -> Result<u32, AdmitError> {
        let prompt = &request.prompt;
        if prompt.is_empty() {
            return Err(AdmitError::EmptyPrompt);
        }
        let nothing = match &request.output {
            OutputTokens::Given(tokens) | OutputTokens::Repeated(tokens) => tokens.is_empty(),
            OutputTokens::Seeded { .. } => false,
        };
        if request.max_tokens == 0 || nothing {
            return Err(AdmitError::NoTokens);
        }
        if prompt.block_size != self.config.block_size {
            let engine = self.config.block_size;
            return Err(AdmitError::BlockSize {
                prompt: prompt.block_size,
                engine,
            });
        }
        let unchunked = self.config.max_num_batched_tokens;
        let max = match self.config.chunked_prefill {
            true => self.config.max_model_len - 1,
            false => unchunked.min(self.config.max_model_len - 1),
        };
        if prompt.len > max {
            return Err(AdmitError::TooLong {
                prompt: prompt.len,
                max,
            });
        }
        if self.ids.contains(&request.id) {
            return Err(AdmitError::Duplicate(request.id));
        }
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(AdmitError::QueueFull(self.config.max_waiting));
        }
        Ok(request
            .max_tokens
            .min(self.config.max_model_len - prompt.len))
    }

    /// Takes a request out, wherever it is; its blocks stay findable. False if it is not here.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if !self.ids.remove(&id) {
            return false;
        }
        self.counters.cancelled += 1;
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            let mut sequence = self.running.remove(at);
            self.cache.release_blocks(&mut sequence);
        } else if let Some(at) = self.waiting.iter().position(|s| s.id == id) {
            self.waiting.remove(at);
        }
        true
    }

    /// Empties the cache; false, and nothing happens, while a request holds blocks. As with vLLM, the
    /// event comes with the next step.
    pub fn clear_cache(&mut self) -> bool {
        self.cache.clear()
    }

    /// Makes one step: fills `out` with what it does. Does nothing if [`Engine::is_idle`].
    pub fn step(&mut self, out: &mut Step) {
        out.clear();
        if self.is_idle() {
            return;
        }
        self.counters.steps += 1;
        self.schedule(out);
        out.duration = self.duration(out);
        self.finish_step(out);
        out.events.append(&mut self.cache.events);
    }

    fn duration(&mut self, out: &mut Step) -> Duration {
        self.chunks.clear();
        let mut decode_context = 0;
        for share in &self.shares {
            if share.decodes {
                out.decodes += 1;
                decode_context += u64::from(share.before);
            } else {
                out.prefill_tokens += share.new;
                self.chunks.push(Chunk {
                    new: share.new,
                    cached: share.before,
                });
            }
        }
        let work = StepWork {
            chunks: &self.chunks,
            decodes: out.decodes,
            decode_context,
        };
        let ms = self.config.times.step_ms(&work) / self.config.speedup;
        Duration::from_nanos((ms * 1e6) as u64)
    }

    /// The forward pass is over: each sequence that is computed up to its last token gets one more.
    fn finish_step(&mut self, out: &mut Step) {
        let mut shares = std::mem::take(&mut self.shares);
        let mut running = std::mem::take(&mut self.running);
        let mut parts = shares.iter().peekable();
        for sequence in &mut running {
            let Some(share) = parts.next_if(|share| share.id == sequence.id) else {
                continue;
            };
            sequence.computed += share.new;
            if sequence.computed == sequence.known() {
                let first = sequence.outputs == 0;
                let (token, finish) = sequence.next_token();
                self.counters.output_tokens += 1;
                let cached_tokens = sequence.cached_tokens.filter(|_| first);
                out.outputs.push(Output {
                    id: sequence.id,
                    token,
                    cached_tokens,
                    finish,
                });
            }
            self.cache.store_computed(sequence);
        }
        debug_assert!(parts.next().is_none(), "shares follow the batch's order");
        if out.outputs.iter().any(|o| o.finish.is_some()) {
            let mut ended = out.outputs.iter().filter(|o| o.finish.is_some()).peekable();
            running.retain_mut(|sequence| {
                let done = ended.next_if(|o| o.id == sequence.id).is_some();
                if done {
                    self.cache.end(sequence);
                    self.ids.remove(&sequence.id);
                    self.counters.finished += 1;
                }
                !done
            });
        }
        shares.clear();
        (self.running, self.shares) = (running, shares);
    }

    /// Panics if an invariant is broken. For tests: it walks the whole pool.
    pub fn verify(&self) {
        assert!(
            self.waiting.iter().all(|s| s.blocks.is_empty()),
            "a waiting request holds blocks"
        );
        let held = self.running.iter().flat_map(|s| s.blocks.iter().copied());
        self.cache.pool.verify(held);
        assert_eq!(self.ids.len(), self.running.len() + self.waiting.len());
        let Counters {
            admitted,
            finished,
            cancelled,
            ..
        } = self.counters;
        assert_eq!(admitted - finished - cancelled, self.ids.len() as u64);
    }
}

/// Sorts the most urgent first, then the first come.
pub(crate) fn urgency(sequence: &Sequence) -> (i64, u64) {
    (-i64::from(sequence.priority), sequence.arrival)
}
