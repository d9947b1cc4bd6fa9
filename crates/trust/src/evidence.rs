//! What speaks for or against what we know of a rank's cache, and what follows from it.

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
    /// Right answers before a rank is trusted; doubles with each demotion.
    pub right_min: usize,
    /// Wrong answers before anything is done.
    pub wrong_min: usize,
    /// Share of wrong answers, by tokens, past which something is done.
    pub wrong_share_max: f64,
    /// Share of answers with more cached than predicted past which something is done. Higher: siblings
    /// that run at once fill the cache after the prediction was made.
    pub under_share_max: f64,
    /// Demotions that are remembered at most.
    pub demotions_max: u32,
    /// Time at full trust after which one demotion is forgotten.
    pub calm: Duration,
    /// How long the event socket may be away before its events count as gone.
    pub unreachable_after: Duration,
    /// Shortest time between two questions whether something was missed.
    pub verify_pause: Duration,
    /// Shortest time between two full replays; doubles while they follow one another.
    pub resync_pause: Duration,
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
            demotions_max: 4,
            calm: Duration::from_secs(600),
            unreachable_after: Duration::from_secs(5),
            verify_pause: Duration::from_secs(2),
            resync_pause: Duration::from_secs(10),
        }
    }
}

/// What predictions for a rank come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CacheState {
    /// Predictions come from our own routing decisions, with their time to live.
    Approximate,
    /// Predictions come from events, at half their worth: they were wrong of late.
    Discounted,
    /// Predictions come from events.
    Exact,
}

/// The likeliest reason for not trusting a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Too little evidence yet.
    Starting,
    /// The engine publishes no events, or we were not told where.
    NoEvents,
    /// The operator wants it so (`--no-router-kv-events`).
    Forced,
    /// The event socket cannot be reached.
    Unreachable,
    /// The engine holds more than its events said.
    EventsMissing,
    /// The engine holds less than predicted, while events were late or being asked for again.
    EventsLate,
    /// The engine counts other tokens, or stores other blocks, for the same prompt: its tokenizer or
    /// template differs from ours.
    Tokenization,
    /// The events are about requests that went to another worker.
    OtherEngine,
    /// The engine's blocks have another size.
    BlockSize,
    /// The engine holds less than its events said: it evicts or clears without saying.
    SilentEviction,
    /// The engine holds less than its events said, and has layers that keep no whole prefixes: a hit is at most
    /// what the others have.
    Hybrid,
}

impl CacheState {
    /// A short name for labels and listings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Approximate => "approximate",
            Self::Discounted => "discounted",
            Self::Exact => "exact",
        }
    }
}

impl Cause {
    /// Every one of them.
    pub const ALL: [Self; 11] = [
        Self::Starting,
        Self::NoEvents,
        Self::Forced,
        Self::Unreachable,
        Self::EventsMissing,
        Self::EventsLate,
        Self::Tokenization,
        Self::OtherEngine,
        Self::BlockSize,
        Self::SilentEviction,
        Self::Hybrid,
    ];

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
            Self::OtherEngine => "other_engine",
            Self::BlockSize => "block_size_differs",
            Self::SilentEviction => "silent_eviction",
            Self::Hybrid => "hybrid_cache",
        }
    }

    /// What to do about it, for a log line.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Starting => "it is trusted when its events prove right",
            Self::NoEvents => {
                "start the engine with --kv-events-config, or name its sockets: --worker URL,events=...,replay=..."
            }
            Self::Forced => "--no-router-kv-events says so, or the router goes by load alone",
            Self::Unreachable => "check the address and port of the engine's event socket",
            Self::EventsMissing => {
                "the socket says nothing of what the engine computes, or events get lost; check that events= is this \
                 engine's own socket, and the engine's replay_endpoint and buffer_steps"
            }
            Self::EventsLate => "events lag behind; the engine or this process is overloaded",
            Self::Tokenization => {
                "the engine stores other tokens for the same prompt; check that --model-path is the engine's own model, \
                 and its chat template; kvasir doctor shows the first token that differs"
            }
            Self::OtherEngine => {
                "the events are about requests of another worker; give each worker the event socket of its own engine: \
                 --worker URL,events=...,replay=..., or none where the engine announces it"
            }
            Self::BlockSize => {
                "one model has one block size: set --kv-cache-block-size to that of its engines or leave it out, and \
                 start all its engines with the same --block-size"
            }
            Self::Hybrid => {
                "layers with a sliding window keep less than whole prefixes; nothing is wrong, predictions count half"
            }
            Self::SilentEviction => {
                "the engine drops blocks without an event; a newer release may mend it"
            }
        }
    }
}

/// How far a rank is trusted, and why not more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustLevel {
    /// How far.
    pub state: CacheState,
    /// Why not more; `None` at [`CacheState::Exact`].
    pub cause: Option<Cause>,
}

impl TrustLevel {
    /// What a block that events predict is worth. Of a rank that has only begun, events are unproven and
    /// not wrong: they count half, beside our own routing decisions.
    #[must_use]
    pub const fn credit(self) -> f64 {
        match (self.state, self.cause) {
            (CacheState::Exact, _) => 1.0,
            (CacheState::Discounted, _) | (CacheState::Approximate, Some(Cause::Starting)) => 0.5,
            (CacheState::Approximate, _) => 0.0,
        }
    }
}

/// What outlives a restart of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustRecord {
    /// How far the rank was trusted.
    pub state: CacheState,
    /// Demotions not yet forgotten.
    pub demotions: u32,
}

/// What one answer showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Prompt tokens as we counted them.
    pub prompt: u32,
    /// Prompt tokens as the engine counted them, where it says so.
    pub prompt_reported: Option<u32>,
    /// Cached tokens as the events predicted them when the request was sent, whatever was then trusted. An
    /// engine that always computes the last token has at most the blocks before it.
    pub cached: u32,
    /// Cached tokens as the engine reported them, where it says so.
    pub cached_reported: Option<u32>,
    /// Tokens of blocks that events took away between the prediction and the answer. The engine may have
    /// missed as many without any event being wrong.
    pub removed_since: u32,
    /// The engine has groups of layers that keep no whole prefixes.
    pub hybrid: bool,
    /// What events show of the prompt after they had their time; `None` before.
    pub shown: Option<StoredCheck>,
}

/// What a piece of evidence showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// The prediction was right.
    Right,
    /// It was not, and events that came after the prediction say why.
    Late,
    /// It was not, probably for this reason.
    Wrong(Cause),
}

impl Finding {
    /// A short name for labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::Late => "late",
            Self::Wrong(cause) => cause.name(),
        }
    }
}

impl Answer {
    /// Whether it differs from the prediction by a block or more, while the tokens are the same.
    pub(crate) fn is_off(&self, block_size: u32) -> bool {
        let off = |reported: u32| self.cached.abs_diff(reported) >= block_size;
        self.counted_alike() && self.cached_reported.is_some_and(off)
    }

    /// `None` if it says nothing, e.g. nothing was predicted and nothing found. `content` is what the stored blocks
    /// of earlier prompts showed.
    pub(crate) fn finding(
        &self,
        block_size: u32,
        recovering: bool,
        content: Option<Cause>,
    ) -> Option<Finding> {
        if !self.counted_alike() {
            return Some(Finding::Wrong(Cause::Tokenization));
        }
        let reported = self.cached_reported?;
        if self.cached.abs_diff(reported) < block_size {
            return (self.cached.max(reported) > 0).then_some(Finding::Right);
        }
        let shown = self.shown.unwrap_or_default();
        let unexplained = match self.cached > reported {
            true => self.cached - reported,
            false => {
                let known = shown.found.saturating_mul(block_size).max(self.cached);
                reported.saturating_sub(known)
            }
        };
        if unexplained.saturating_sub(self.removed_since) < block_size {
            return Some(Finding::Late);
        }
        let over = self.cached > reported;
        Some(match over {
            true if recovering => Finding::Wrong(Cause::EventsLate),
            // What is missing is being asked for: says nothing, and must not outweigh what does.
            false if recovering => return None,
            _ if shown.others => Finding::Wrong(Cause::OtherEngine),
            true if self.hybrid => Finding::Wrong(Cause::Hybrid),
            true => Finding::Wrong(Cause::SilentEviction),
            false if shown.orphans => Finding::Wrong(Cause::EventsMissing),
            // It computed some of the prompt, and what it stored then is something else.
            false if reported / block_size.max(1) < shown.expected && shown.stored > 0 => {
                Finding::Wrong(Cause::Tokenization)
            }
            false => Finding::Wrong(content.unwrap_or(Cause::EventsMissing)),
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

/// Some time after an answer: which of the prompt's blocks the events show by now. Evidence for engines that
/// report no cached tokens, and for prompts that nobody had cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredCheck {
    /// Complete blocks of the prompt.
    pub expected: u32,
    /// Of those, how many lead the rank's match.
    pub found: u32,
    /// Blocks that events added since the request was sent, whosever.
    pub stored: u32,
    /// Blocks that events took away since.
    pub removed: u32,
    /// Some blocks hang on others that were never announced.
    pub orphans: bool,
    /// The prompt appeared at a rank that was not asked, or prompts of other ranks appear at this one.
    pub others: bool,
}

impl StoredCheck {
    pub(crate) fn finding(&self, recovering: bool) -> Option<Finding> {
        let missing = self.expected.saturating_sub(self.found);
        Some(match missing {
            _ if self.expected == 0 => return None,
            0 => Finding::Right,
            // Stored and evicted again, or not asked for yet: says nothing.
            _ if recovering || self.removed >= missing => return None,
            _ if self.others => Finding::Wrong(Cause::OtherEngine),
            _ if self.stored == 0 || self.orphans => Finding::Wrong(Cause::EventsMissing),
            _ => Finding::Wrong(Cause::Tokenization),
        })
    }
}

/// Something that speaks for or against what we know of a rank's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// An answer came, with what the engine says about it.
    Answer(Answer),
    /// Some time after an answer, what the events show of it.
    Stored(StoredCheck),
    /// Events are being asked for again (or no longer).
    Recovering(bool),
    /// What makes events unusable whatever answers say; `None` when it is gone.
    Unusable(Option<Cause>),
    /// The engine began again.
    Restarted,
    /// Something was missing and has been filled in: what went wrong before says nothing any more.
    Mended,
    /// The worker itself said all that the rank holds, and numbers what it tells from there: nothing is left to be proven.
    Whole,
    /// The event socket was reached, or was lost.
    Link(bool),
    /// This machine could not try to reach the event socket: it has no descriptor, port or memory left. That is not held against
    /// the engine.
    LocalFault,
    /// Time has passed.
    Tick,
}

/// What the host is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the engine whether anything was missed. Costs next to nothing.
    Verify,
    /// Ask the engine for its events again and replace what is known of the rank, for this reason.
    Resync(Cause),
    /// Forget what is known of the rank and learn anew.
    Forget,
    /// Say so, once: log, metric, listing; and predict accordingly.
    Changed(TrustLevel),
    /// One piece of evidence was judged: count it.
    Judged(Finding),
}
