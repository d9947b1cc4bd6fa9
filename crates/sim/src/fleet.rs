//! What a trace meets: engines, routers, the ways between them, and what befalls them.

use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_types::Time;

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ArrivalMode {
    /// At their times, played this many times faster.
    Open {
        /// 1 is as recorded.
        speed: f64,
    },
    /// From so many clients, each of which sends its next request when it has the answer and thought.
    Closed {
        /// Clients.
        clients: u32,
        /// Between an answer and the next request.
        think: Duration,
    },
}

/// What befalls a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetChange {
    /// Its process dies: requests go elsewhere, its cache is gone.
    Leaves {
        /// When.
        at: Time,
        /// Who, from 0.
        worker: u32,
    },
    /// It comes (back), with an empty cache.
    Joins {
        /// When.
        at: Time,
        /// Who; one that was never there is new.
        worker: u32,
    },
    /// Its steps take longer, or less long, from now on.
    Slows {
        /// When.
        at: Time,
        /// Who, from 0.
        worker: u32,
        /// Its speed in percent of what its engine is configured for.
        percent: u32,
    },
}

impl FleetChange {
    /// When.
    #[must_use]
    pub const fn at(&self) -> Time {
        match self {
            Self::Leaves { at, .. } | Self::Joins { at, .. } | Self::Slows { at, .. } => *at,
        }
    }

    pub(crate) const fn worker(&self) -> u32 {
        match self {
            Self::Leaves { worker, .. }
            | Self::Joins { worker, .. }
            | Self::Slows { worker, .. } => *worker,
        }
    }
}

/// What a good answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// The first token comes within this.
    pub ttft: Duration,
    /// Tokens of one answer follow each other, on average, within this.
    pub itl: Duration,
}

impl Default for Slo {
    fn default() -> Self {
        Self {
            ttft: Duration::from_secs(2),
            itl: Duration::from_millis(25),
        }
    }
}

/// Workers that compute prompts for those that answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillPool {
    /// How many, beside those that answer.
    pub workers: u32,
    /// Which prompts are computed where they are answered; `None`: none.
    pub bypass: Option<BypassRule>,
    /// The way of a prompt from one to the other.
    pub link: TransferLink,
}

/// A prompt is computed where it is answered if little of it is left to compute there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BypassRule {
    /// Fewer tokens than this are left,
    pub below_tokens: u64,
    /// and a smaller share of the prompt than this.
    pub below_share: f64,
}

impl BypassRule {
    /// Whether a prompt of which so many tokens are cached where it would be answered is computed there.
    ///
    /// ```
    /// let rule = kvasir_sim::BypassRule { below_tokens: 2048, below_share: 0.7 };
    /// assert!(rule.holds(6000, 5000) && !rule.holds(6000, 3000) && !rule.holds(1000, 200));
    /// ```
    #[must_use]
    pub fn holds(&self, prompt: u32, cached: u32) -> bool {
        let left = prompt.saturating_sub(cached);
        u64::from(left) < self.below_tokens
            && f64::from(left) < self.below_share * f64::from(prompt)
    }
}

/// How keys and values get from one worker to another. A worker sends, and receives, one prompt after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferLink {
    /// Bytes of a token.
    pub bytes_per_token: u64,
    /// Bytes a second; 0 takes no time.
    pub bytes_per_s: f64,
}

impl TransferLink {
    pub(crate) fn duration(&self, tokens: u32) -> Duration {
        let bytes = u64::from(tokens).saturating_mul(self.bytes_per_token);
        match self.bytes_per_s > 0.0 {
            true => Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s)
                .unwrap_or(Duration::MAX),
            false => Duration::ZERO,
        }
    }
}

/// Everything but the traffic and the policy.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Each rank.
    pub engine: EngineConfig,
    /// Workers at the start; those that answer, if others compute prompts.
    pub workers: u32,
    /// Workers that compute prompts, where not every worker does both.
    pub prefill: Option<PrefillPool>,
    /// Ranks of a worker.
    pub ranks: u32,
    /// Router replicas; requests are dealt to them in turn.
    pub replicas: u32,
    /// Replicas tell each other what they booked.
    pub replica_sync: bool,
    /// From a change of a cache, or a booking of another replica, to a router's knowing it.
    pub event_latency: Duration,
    /// Share of cache events that a replica never gets.
    pub event_loss: f64,
    /// Attempts at another worker after a failed one.
    pub retries: u32,
    /// What befalls workers.
    pub changes: Vec<FleetChange>,
    /// How requests come.
    pub arrivals: ArrivalMode,
    /// What a good answer is.
    pub slo: Slo,
    /// What every draw follows from.
    pub seed: u64,
}

impl Fleet {
    /// `workers` of one rank, one router, a millisecond to learn of events, nothing lost.
    #[must_use]
    pub fn new(engine: EngineConfig, workers: u32) -> Self {
        Self {
            engine,
            workers,
            prefill: None,
            ranks: 1,
            replicas: 1,
            replica_sync: false,
            event_latency: Duration::from_millis(1),
            event_loss: 0.0,
            retries: 2,
            changes: Vec::new(),
            arrivals: ArrivalMode::Open { speed: 1.0 },
            slo: Slo::default(),
            seed: 0,
        }
    }
}
