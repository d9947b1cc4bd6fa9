//! How far what we know of a rank's cache can be trusted, and why not.
//!
//! Answers one question: the index says that this rank holds so much of a prompt; does it? For each request
//! the host says what the events predicted and what the engine then reported; [`Trust`] keeps a window of
//! that per rank, names the likeliest cause of what went wrong, and says what to do: resynchronise, give less
//! credit, or predict from routing decisions until the events prove right again.
//!
//! Invariants: a rank begins approximate and is trusted only on evidence: its worker's word for all that it holds, or
//! predictions that came true; no single answer changes
//! anything by itself, except what is certain (no events, another block size, forced); every change is an
//! [`Action::Changed`], given once; a rank that goes back and forth has to prove itself longer each time.
//!
//! Elsewhere: order and loss of events (`kvasir-kv-events`), what credit is worth in a cost (`kvasir-placement`).

mod evidence;
mod levels;
mod window;

pub use evidence::{
    Action, Answer, CacheState, Cause, Evidence, Finding, StoredCheck, TrustLevel, TrustOptions,
    TrustRecord,
};
pub use levels::TrustLevels;

use kvasir_types::Time;

use window::Window;

/// Fruitless questions in a row after which the pause between them no longer doubles.
const FRUITLESS_MAX: u32 = 6;

/// What is being done about a view that was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing: it is right, or not yet judged.
    Calm,
    /// It was resynchronised; the next answers tell whether that helped.
    Resynced,
}

/// The trust in one rank.
#[derive(Clone, Debug)]
pub struct Trust {
    options: TrustOptions,
    level: TrustLevel,
    stage: Stage,
    window: Window,
    /// What makes events unusable whatever answers say.
    unusable: Option<Cause>,
    /// The state that a lost connection took; given back with it, unless the engine began again.
    suspended: Option<CacheState>,
    recovering: bool,
    /// The event socket is away since then.
    unlinked: Option<Time>,
    /// The engine has reported cached tokens: where it says nothing, it found none.
    reports: bool,
    /// When the engine was last asked whether something was missed, and how often in a row that was not so.
    asked: Option<(Time, u32)>,
    /// When all events were last asked for again, and how often that followed another time closely.
    resynced: Option<(Time, u32)>,
    /// What stored blocks last showed to be wrong with their content.
    content: Option<Cause>,
    /// Demotions not yet forgotten.
    demotions: u32,
    calm_since: Time,
}

impl Trust {
    /// A rank of which nothing is known yet.
    #[must_use]
    pub fn new(options: TrustOptions) -> Self {
        Self {
            window: Window::new(options.samples_max),
            options,
            level: TrustLevel {
                state: CacheState::Approximate,
                cause: Some(Cause::Starting),
            },
            stage: Stage::Calm,
            unusable: None,
            suspended: None,
            recovering: false,
            unlinked: None,
            reports: false,
            asked: None,
            resynced: None,
            content: None,
            demotions: 0,
            calm_since: Time::ZERO,
        }
    }

    /// A rank that was known before the router was restarted, and whose blocks were kept.
    #[must_use]
    pub fn resume(options: TrustOptions, record: TrustRecord) -> Self {
        let mut trust = Self::new(options);
        trust.demotions = record.demotions.min(trust.options.demotions_max);
        if record.state == CacheState::Exact {
            trust.level = TrustLevel {
                state: CacheState::Exact,
                cause: None,
            };
        }
        trust
    }

    /// What is worth keeping over a restart of the router.
    #[must_use]
    pub fn record(&self) -> TrustRecord {
        TrustRecord {
            state: self.suspended.unwrap_or(self.level.state),
            demotions: self.demotions,
        }
    }

    /// How far the rank is trusted now.
    #[must_use]
    pub const fn level(&self) -> TrustLevel {
        self.level
    }

    /// Share of tokens in the window that were predicted wrongly, `0..=1`; `None` without evidence.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.window.error()
    }

    /// How [`Self::error`] splits into likely causes; those with no part in it are left out.
    pub fn error_by_cause(&self) -> impl Iterator<Item = (Cause, f64)> + '_ {
        let parts = Cause::ALL.map(|cause| (cause, self.window.error_by(cause)));
        parts.into_iter().filter(|(_, part)| *part > 0.0)
    }

    /// Answers in the window that showed something.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.window.len()
    }

    /// Takes one piece of evidence.
    pub fn step(&mut self, now: Time, evidence: Evidence, out: &mut Vec<Action>) {
        match evidence {
            Evidence::Answer(answer) => self.answer(now, answer, out),
            Evidence::Stored(check) => {
                let size = self.options.block_size;
                let tokens = |blocks: u32| blocks.saturating_mul(size);
                let wrong = tokens(check.expected.saturating_sub(check.found));
                let finding = check.finding(self.recovering);
                self.remember_content(finding);
                self.sample(now, finding, tokens(check.expected), wrong, out);
            }
            Evidence::Recovering(running) => self.recovering = running,
            // Only the connection itself ends its absence.
            Evidence::Unusable(None) if self.unusable == Some(Cause::Unreachable) => {}
            Evidence::Unusable(cause) => self.set_unusable(now, cause, out),
            Evidence::Restarted => {
                // Another process: what was learned of the old one does not count, its faults do.
                self.window.clear();
                self.stage = Stage::Calm;
                self.suspended = None;
                self.reports = false;
                self.content = None;
            }
            Evidence::Mended => {
                self.window.forget_wrong();
                self.asked = self.asked.map(|(at, _)| (at, 0));
            }
            Evidence::Whole => {
                let is_new = self.level.cause == Some(Cause::Starting) && self.demotions == 0;
                if is_new && self.unusable.is_none() {
                    self.change(now, CacheState::Exact, None, out);
                }
            }
            Evidence::Link(true) => self.linked(now, out),
            Evidence::Link(false) => {
                self.unlinked.get_or_insert(now);
            }
            Evidence::LocalFault => {
                // We did not look: its absence is counted from when we can again.
                self.unlinked = self.unlinked.map(|_| now);
            }
            Evidence::Tick => {}
        }
        self.check_link(now, out);
    }

    /// Whether an answer is off in a way that events on their way may still explain: it is to be shown when they had
    /// their time, with what they show then.
    #[must_use]
    pub fn is_open(&self, answer: &Answer) -> bool {
        self.completed(*answer).is_off(self.options.block_size)
    }

    /// Some engines leave the field out when nothing was cached.
    fn completed(&self, mut answer: Answer) -> Answer {
        if self.reports {
            answer.cached_reported = answer.cached_reported.or(Some(0));
        }
        answer
    }

    fn answer(&mut self, now: Time, answer: Answer, out: &mut Vec<Action>) {
        self.reports |= answer.cached_reported.is_some();
        let answer = self.completed(answer);
        let finding = answer.finding(self.options.block_size, self.recovering, self.content);
        self.sample(now, finding, answer.weight(), answer.wrong_tokens(), out);
    }

    fn linked(&mut self, now: Time, out: &mut Vec<Action>) {
        self.unlinked = None;
        if self.unusable != Some(Cause::Unreachable) {
            return;
        }
        if self.suspended.take() == Some(CacheState::Exact) {
            self.unusable = None;
            self.change(now, CacheState::Exact, None, out);
        } else {
            self.set_unusable(now, None, out);
        }
    }

    fn check_link(&mut self, now: Time, out: &mut Vec<Action>) {
        let away = self.unlinked.map(|since| now - since);
        if self.unusable.is_none()
            && away.is_some_and(|away| away >= self.options.unreachable_after)
        {
            let before = self.level.state;
            self.set_unusable(now, Some(Cause::Unreachable), out);
            self.suspended = Some(before);
        }
    }

    fn set_unusable(&mut self, now: Time, unusable: Option<Cause>, out: &mut Vec<Action>) {
        if self.unusable == unusable {
            return;
        }
        self.unusable = unusable;
        self.suspended = None;
        self.window.clear();
        self.stage = Stage::Calm;
        let cause = unusable.unwrap_or(Cause::Starting);
        self.change(now, CacheState::Approximate, Some(cause), out);
    }

    fn sample(
        &mut self,
        now: Time,
        finding: Option<Finding>,
        weight: u32,
        wrong: u32,
        out: &mut Vec<Action>,
    ) {
        // While the socket is away its absence explains everything, and has its own name in a while.
        let heard = self.unusable.is_none() && self.unlinked.is_none();
        let Some(finding) = finding.filter(|_| heard) else {
            return;
        };
        out.push(Action::Judged(finding));
        self.window.expire(now, self.options.window);
        self.window.push(now, finding, weight, wrong);
        self.forget_demotion(now);
        if let Some(cause) = self.window.cause(&self.options) {
            self.escalate(now, cause, out);
        } else if let Finding::Wrong(cause) = finding {
            self.look_closer(now, cause, out);
        } else if self.is_proven() {
            self.stage = Stage::Calm;
            self.change(now, CacheState::Exact, None, out);
        }
    }

    /// What blocks that were stored show of their content. An answer that stored nothing is judged by it.
    fn remember_content(&mut self, finding: Option<Finding>) {
        match finding {
            Some(Finding::Right) => self.content = None,
            Some(Finding::Wrong(cause @ (Cause::Tokenization | Cause::OtherEngine))) => {
                self.content = Some(cause);
            }
            _ => {}
        }
    }

    /// Whether all events may be asked for again now. Each time makes the pause to the next one longer.
    fn may_resync(&mut self, now: Time) -> bool {
        let pause = |times: u32| self.options.resync_pause * (1 << times);
        let times = match self.resynced {
            Some((at, times)) if now - at < pause(times) => return false,
            Some((at, times)) if now - at < pause(times) * 4 => (times + 1).min(FRUITLESS_MAX),
            _ => 0,
        };
        self.resynced = Some((now, times));
        true
    }

    /// One wrong answer changes nothing, but a message that was lost can be had for the asking.
    fn look_closer(&mut self, now: Time, cause: Cause, out: &mut Vec<Action>) {
        let pause = self.options.verify_pause;
        let (lately, fruitless) = self.asked.map_or((false, 0), |(at, fruitless)| {
            (now - at < pause * (1 << fruitless), fruitless + 1)
        });
        if is_curable(cause) && !self.recovering && !lately {
            self.asked = Some((now, fruitless.min(FRUITLESS_MAX)));
            out.push(Action::Verify);
        }
    }

    /// A step further down, with the remedy that fits the cause.
    fn escalate(&mut self, now: Time, cause: Cause, out: &mut Vec<Action>) {
        self.window.clear();
        let curable = is_curable(cause);
        if curable && self.stage == Stage::Calm && self.may_resync(now) {
            self.stage = Stage::Resynced;
            out.push(Action::Resync(cause));
            if self.level.state == CacheState::Approximate {
                self.change(now, CacheState::Approximate, Some(cause), out);
            }
            return;
        }
        if cause == Cause::SilentEviction {
            // The engine's own events are wrong: only forgetting helps.
            out.push(Action::Forget);
        }
        let state = match self.level.state {
            // The view is right and says too much: neither forgetting nor guessing would be better.
            CacheState::Exact if cause == Cause::Hybrid => {
                self.demotions = (self.demotions + 1).min(self.options.demotions_max);
                CacheState::Discounted
            }
            state if cause == Cause::Hybrid => state,
            CacheState::Exact if curable => CacheState::Discounted,
            CacheState::Exact | CacheState::Discounted => {
                self.demotions = (self.demotions + 1).min(self.options.demotions_max);
                CacheState::Approximate
            }
            CacheState::Approximate => CacheState::Approximate,
        };
        self.change(now, state, Some(cause), out);
    }

    /// Enough right answers in a row of evidence, more of them after each demotion.
    fn is_proven(&self) -> bool {
        let needed = (self.options.right_min << self.demotions).min(self.options.samples_max);
        self.window.len() >= needed && self.window.all_right_lately(needed)
    }

    /// A demotion is forgotten after a calm while.
    fn forget_demotion(&mut self, now: Time) {
        if self.level.state == CacheState::Exact && now - self.calm_since >= self.options.calm {
            self.demotions = self.demotions.saturating_sub(1);
            self.calm_since = now;
        }
    }

    fn change(
        &mut self,
        now: Time,
        state: CacheState,
        cause: Option<Cause>,
        out: &mut Vec<Action>,
    ) {
        let level = TrustLevel { state, cause };
        if self.level == level {
            return;
        }
        self.level = level;
        self.calm_since = now;
        out.push(Action::Changed(level));
    }
}

/// Whether asking the engine again may help.
const fn is_curable(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::EventsMissing | Cause::EventsLate | Cause::SilentEviction
    )
}
