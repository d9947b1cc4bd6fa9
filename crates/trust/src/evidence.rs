//! What speaks for or against a worker's picture, and what follows from it.

use std::time::Duration;

/// Bounds of the judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct TrustOptions {
    /// Tokens per block: predictions within one block of the report count as right.
    pub block_size: u32,
    /// Answers remembered.
    pub samples_max: usize,
    /// How long they are remembered.
    pub window: Duration,
    /// Right answers before a worker is believed; doubles with each demotion.
    pub right_min: usize,
    /// Wrong answers before anything is done.
    pub wrong_min: usize,
    /// Share of wrong answers, by tokens, past which something is done.
    pub wrong_share_max: f64,
    /// Share of answers with more cached than foretold past which something is done. Higher: siblings
    /// that run at once fill the cache after the prediction was made.
    pub under_share_max: f64,
    /// Demotions that are remembered at most.
    pub flaps_max: u32,
    /// Time at full trust after which one demotion is forgotten.
    pub calm: Duration,
}

impl TrustOptions {
    /// The defaults, for blocks of `block_size` tokens.
    #[must_use]
    pub const fn new(block_size: u32) -> Self {
        Self {
            block_size,
            samples_max: 64,
            window: Duration::from_secs(300),
            right_min: 3,
            wrong_min: 4,
            wrong_share_max: 0.2,
            under_share_max: 0.5,
            flaps_max: 4,
            calm: Duration::from_secs(600),
        }
    }
}

/// How far a worker is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Predictions come from our own routing decisions, with their time to live.
    Approximate,
    /// Predictions come from events, at half their worth.
    Shrunk,
    /// Predictions come from events.
    Exact,
}

/// The likeliest reason for not believing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Doubt {
    /// Too little evidence yet.
    Starting,
    /// The engine publishes no events, or we were not told where.
    NoEvents,
    /// The operator wants it so (`--no-router-kv-events`).
    Forced,
    /// The event socket cannot be reached.
    Unreachable,
    /// The engine holds more than its events told.
    EventsMissing,
    /// The engine holds less than foretold, while events were late or being asked for again.
    EventsLate,
    /// The engine counts other tokens, or stores other blocks, for the same prompt: its tokenizer or
    /// template differs from ours.
    Tokenization,
    /// The engine's blocks have another size.
    BlockSize,
    /// The engine holds less than its events told: it evicts or clears without saying.
    SilentEviction,
}

impl Doubt {
    /// A short name for labels and listings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::NoEvents => "no_events",
            Self::Forced => "forced",
            Self::Unreachable => "events_unreachable",
            Self::EventsMissing => "events_missing",
            Self::EventsLate => "events_late",
            Self::Tokenization => "tokenization_differs",
            Self::BlockSize => "block_size_differs",
            Self::SilentEviction => "silent_eviction",
        }
    }
}

/// How far a worker is believed, and why not more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opinion {
    /// How far.
    pub level: Level,
    /// Why not more; `None` at [`Level::Exact`].
    pub doubt: Option<Doubt>,
}

impl Opinion {
    /// What a block that events foretell is worth.
    #[must_use]
    pub const fn credit(self) -> f64 {
        match self.level {
            Level::Exact => 1.0,
            Level::Shrunk => 0.5,
            Level::Approximate => 0.0,
        }
    }
}

/// What one answer showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Prompt tokens as we counted them.
    pub prompt: u32,
    /// Prompt tokens as the engine counted them, where it says so.
    pub prompt_reported: Option<u32>,
    /// Cached tokens as the events foretold them when the request was sent, whatever was then believed. An
    /// engine that always computes the last token has at most the blocks before it.
    pub cached: u32,
    /// Cached tokens as the engine reported them, where it says so.
    pub cached_reported: Option<u32>,
}

/// What a piece of evidence says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing, e.g. nothing was foretold and nothing found.
    Nothing,
    Right,
    Wrong(Doubt),
}

impl Answer {
    pub(crate) fn verdict(&self, block_size: u32, recovering: bool) -> Verdict {
        if !self.counted_alike() {
            return Verdict::Wrong(Doubt::Tokenization);
        }
        let Some(reported) = self.cached_reported else {
            return Verdict::Nothing;
        };
        if self.cached.abs_diff(reported) < block_size {
            return match self.cached.max(reported) {
                0 => Verdict::Nothing,
                _ => Verdict::Right,
            };
        }
        Verdict::Wrong(match self.cached > reported {
            true if recovering => Doubt::EventsLate,
            true => Doubt::SilentEviction,
            false => Doubt::EventsMissing,
        })
    }

    /// Tokens that the answer speaks about.
    pub(crate) fn weight(&self) -> u32 {
        let cached = self.cached.max(self.cached_reported.unwrap_or(0));
        match self.counted_alike() {
            true => cached.max(1),
            false => self.prompt.max(1),
        }
    }

    pub(crate) fn wrong_tokens(&self) -> u32 {
        match (self.counted_alike(), self.cached_reported) {
            (true, Some(reported)) => self.cached.abs_diff(reported),
            (true, None) => 0,
            (false, _) => self.prompt,
        }
    }

    fn counted_alike(&self) -> bool {
        self.prompt_reported
            .is_none_or(|reported| reported == self.prompt)
    }
}

/// Something that speaks for or against a worker's picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// An answer came, with what the engine says about it.
    Answer(Answer),
    /// Some time after an answer: of the prompt's complete blocks, how many the events show by now.
    /// Evidence for engines that report no cached tokens.
    Appeared {
        /// Complete blocks of the prompt.
        expected: u32,
        /// Of those, how many lead the worker's match.
        found: u32,
    },
    /// Events are being asked for again (or no longer).
    Recovering(bool),
    /// What makes events unusable whatever answers say; `None` when it is gone.
    Barred(Option<Doubt>),
    /// The engine began again.
    Restarted,
}

/// What the host is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the engine for its events again and replace the picture.
    Resync,
    /// Forget the picture and learn anew.
    Forget,
    /// Say so, once: log, metric, listing; and predict accordingly.
    Changed(Opinion),
}
