//! Which sequences are in the next step.
//!
//! The batch first: each of its sequences gets the tokens it lacks (one when it decodes) while the step's
//! tokens last; when the pool is full a sequence is preempted. Then, unless one was, waiting
//! requests enter: what the cache holds of them counts as computed, and so does what another engine hands over. The order of all of this is vLLM's.

use crate::engine::{Engine, StepShare, urgency};
use crate::{PreemptionMode, RequestStart, SchedulingPolicy, Step};

impl Engine {
    pub(crate) fn schedule(&mut self, out: &mut Step) {
        self.shares.clear();
        let mut budget = self.config.max_num_batched_tokens;
        self.schedule_running(&mut budget, out);
        if out.preempted == 0 {
            self.schedule_waiting(&mut budget, out);
        }
    }

    fn schedule_running(&mut self, budget: &mut u32, out: &mut Step) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[at];
            let lacking = sequence.known() - sequence.computed;
            let new = self.config.most_new(lacking, *budget);
            if self.cache.grow(sequence, new, &[]) {
                self.shares.push(StepShare::of(sequence, new));
                *budget -= new;
                at += 1;
                continue;
            }
            let victim = self.victim();
            self.preempt(victim, budget, out);
            match victim.cmp(&at) {
                std::cmp::Ordering::Less => at -= 1,
                std::cmp::Ordering::Equal => break,
                std::cmp::Ordering::Greater => {}
            }
        }
    }

    /// Which sequence of the batch is preempted.
    fn victim(&self) -> usize {
        let all = self.running.iter().enumerate();
        match (self.config.scheduling, self.config.preemption) {
            (SchedulingPolicy::Fcfs, PreemptionMode::Lifo) => self.running.len() - 1,
            (SchedulingPolicy::Fcfs, PreemptionMode::Fifo) => 0,
            (SchedulingPolicy::Priority, _) => all
                .max_by_key(|(_, sequence)| urgency(sequence))
                .map_or(0, |(at, _)| at),
        }
    }

    /// Preempts a sequence; it is computed again from its first token.
    fn preempt(&mut self, at: usize, budget: &mut u32, out: &mut Step) {
        let mut sequence = self.running.remove(at);
        if let Some(share) = self.shares.iter().position(|s| s.id == sequence.id) {
            *budget += self.shares.remove(share).new;
        }
        self.cache.release_blocks(&mut sequence);
        sequence.reset();
        out.preempted += 1;
        self.counters.preemptions += 1;
        let place = match self.config.scheduling {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => self.waiting_place(&sequence),
        };
        self.waiting.insert(place, sequence);
    }

    fn schedule_waiting(&mut self, budget: &mut u32, out: &mut Step) {
        let mut found = std::mem::take(&mut self.found);
        while *budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(sequence) = self.waiting.front_mut() else {
                break;
            };
            self.cache.find(sequence, &mut found);
            let hit = found.len() as u32 * self.config.block_size;
            let lacking = sequence.known() - hit;
            let transferred = sequence.is_transferred();
            if !self.config.chunked_prefill && lacking > *budget && !transferred {
                break;
            }
            // What another engine hands over takes room, and no computing.
            let new = match transferred {
                true => lacking,
                false => self.config.most_new(lacking, *budget),
            };
            let turns = self.config.preemption == PreemptionMode::Fifo;
            if turns && !self.cache.fits_whole(sequence, &found, &self.running) {
                break;
            }
            if !self.cache.grow(sequence, new, &found) {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else {
                break;
            };
            let (computed, new) = match transferred {
                true => (sequence.known() - 1, 1),
                false => (hit, new),
            };
            sequence.computed = computed;
            sequence.take_transfer();
            self.counters.queried_tokens += u64::from(sequence.known());
            self.counters.hit_tokens += u64::from(hit);
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(hit);
                self.counters.prompt_tokens += u64::from(sequence.prompt_len());
                self.counters.cached_tokens += u64::from(hit);
                out.started.push(RequestStart {
                    id: sequence.id,
                    cached_tokens: hit,
                });
            }
            self.shares.push(StepShare::of(&sequence, new));
            *budget -= new;
            self.running.push(sequence);
        }
        self.found = found;
    }
}
