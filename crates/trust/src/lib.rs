//! How far a worker's cache picture can be believed, and why not.
//!
//! Answers one question: the index says that this worker holds so much of a prompt; does it? For each request
//! the host tells what the events foretold and what the engine then reported; [`Trust`] keeps a window of
//! that per worker, names the likeliest cause of what went wrong, and says what to do: resynchronise, give less
//! credit, or predict from routing decisions until the events prove right again.
//!
//! Invariants: a worker begins approximate and is believed only on evidence; no single answer changes
//! anything by itself, except what is certain (no events, another block size, forced); every change is an
//! [`Action::Changed`], told once; a worker that goes back and forth has to prove itself longer each time.
//!
//! Elsewhere: order and loss of events (`kvasir-ingest`), what credit is worth in a cost (`kvasir-placement`).

mod evidence;
mod levels;
mod window;

pub use evidence::{
    Action, Answer, Appeared, Doubt, Evidence, Finding, Level, Opinion, Standing, TrustOptions,
};
pub use levels::TrustLevels;

use kvasir_types::Time;

use window::Window;

/// Fruitless questions in a row after which the pause between them no longer doubles.
const FRUITLESS_MAX: u32 = 6;

/// What is being done about a picture that was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing: it is right, or not yet judged.
    Calm,
    /// It was resynchronised; the next answers tell whether that helped.
    Resynced,
}

/// One worker's standing.
#[derive(Clone, Debug)]
pub struct Trust {
    options: TrustOptions,
    opinion: Opinion,
    stage: Stage,
    window: Window,
    /// What makes events unusable whatever answers say.
    bar: Option<Doubt>,
    /// The level that a lost connection took; given back with it, unless the engine began again.
    suspended: Option<Level>,
    recovering: bool,
    /// The event socket is away since then.
    unlinked: Option<Time>,
    /// The engine has reported cached tokens: where it says nothing, it found none.
    reports: bool,
    /// When the engine was last asked whether something was missed, and how often in a row that was not so.
    asked: Option<(Time, u32)>,
    /// Demotions not yet lived down.
    flaps: u32,
    calm_since: Time,
}

impl Trust {
    /// A worker of which nothing is known yet.
    #[must_use]
    pub fn new(options: TrustOptions) -> Self {
        Self {
            window: Window::new(options.samples_max),
            options,
            opinion: Opinion {
                level: Level::Approximate,
                doubt: Some(Doubt::Starting),
            },
            stage: Stage::Calm,
            bar: None,
            suspended: None,
            recovering: false,
            unlinked: None,
            reports: false,
            asked: None,
            flaps: 0,
            calm_since: Time::ZERO,
        }
    }

    /// A worker that was known before the router was restarted, and whose picture was kept.
    #[must_use]
    pub fn resume(options: TrustOptions, standing: Standing) -> Self {
        let mut trust = Self::new(options);
        trust.flaps = standing.flaps.min(trust.options.flaps_max);
        if standing.level == Level::Exact {
            trust.opinion = Opinion {
                level: Level::Exact,
                doubt: None,
            };
        }
        trust
    }

    /// What is worth keeping over a restart of the router.
    #[must_use]
    pub fn standing(&self) -> Standing {
        Standing {
            level: self.suspended.unwrap_or(self.opinion.level),
            flaps: self.flaps,
        }
    }

    /// How far the worker is believed now.
    #[must_use]
    pub const fn opinion(&self) -> Opinion {
        self.opinion
    }

    /// Share of tokens in the window that were foretold wrongly, `0..=1`; `None` without evidence.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.window.error()
    }

    /// How [`Self::error`] splits into likely causes; those with no part in it are left out.
    pub fn error_by_cause(&self) -> impl Iterator<Item = (Doubt, f64)> + '_ {
        let parts = Doubt::ALL.map(|doubt| (doubt, self.window.error_by(doubt)));
        parts.into_iter().filter(|(_, part)| *part > 0.0)
    }

    /// Answers in the window that told something.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.window.len()
    }

    /// Takes one piece of evidence.
    pub fn step(&mut self, now: Time, evidence: Evidence, out: &mut Vec<Action>) {
        match evidence {
            Evidence::Answer(answer) => self.answer(now, answer, out),
            Evidence::Appeared(appeared) => {
                let tokens = |blocks: u32| blocks.saturating_mul(self.options.block_size);
                let wrong = tokens(appeared.expected.saturating_sub(appeared.found));
                let finding = appeared.finding(self.recovering);
                self.sample(now, finding, tokens(appeared.expected), wrong, out);
            }
            Evidence::Recovering(running) => self.recovering = running,
            // Only the connection itself ends its absence.
            Evidence::Barred(None) if self.bar == Some(Doubt::Unreachable) => {}
            Evidence::Barred(bar) => self.barred(now, bar, out),
            Evidence::Restarted => {
                // Another process: what was learned of the old one does not count, its faults do.
                self.window.clear();
                self.stage = Stage::Calm;
                self.suspended = None;
                self.reports = false;
            }
            Evidence::Mended => {
                self.window.forget_wrong();
                self.asked = self.asked.map(|(at, _)| (at, 0));
            }
            Evidence::Link(true) => self.linked(now, out),
            Evidence::Link(false) => {
                self.unlinked.get_or_insert(now);
            }
            Evidence::Tick => {}
        }
        self.check_link(now, out);
    }

    fn answer(&mut self, now: Time, mut answer: Answer, out: &mut Vec<Action>) {
        match answer.cached_reported {
            Some(_) => self.reports = true,
            // Some engines leave the field out when nothing was cached.
            None if self.reports => answer.cached_reported = Some(0),
            None => {}
        }
        let finding = answer.finding(self.options.block_size, self.recovering);
        self.sample(now, finding, answer.weight(), answer.wrong_tokens(), out);
    }

    fn linked(&mut self, now: Time, out: &mut Vec<Action>) {
        self.unlinked = None;
        if self.bar != Some(Doubt::Unreachable) {
            return;
        }
        if self.suspended.take() == Some(Level::Exact) {
            self.bar = None;
            self.change(now, Level::Exact, None, out);
        } else {
            self.barred(now, None, out);
        }
    }

    fn check_link(&mut self, now: Time, out: &mut Vec<Action>) {
        let away = self.unlinked.map(|since| now - since);
        if self.bar.is_none() && away.is_some_and(|away| away >= self.options.unreachable_after) {
            let before = self.opinion.level;
            self.barred(now, Some(Doubt::Unreachable), out);
            self.suspended = Some(before);
        }
    }

    fn barred(&mut self, now: Time, bar: Option<Doubt>, out: &mut Vec<Action>) {
        if self.bar == bar {
            return;
        }
        self.bar = bar;
        self.suspended = None;
        self.window.clear();
        self.stage = Stage::Calm;
        let doubt = bar.unwrap_or(Doubt::Starting);
        self.change(now, Level::Approximate, Some(doubt), out);
    }

    fn sample(
        &mut self,
        now: Time,
        finding: Option<Finding>,
        weight: u32,
        wrong: u32,
        out: &mut Vec<Action>,
    ) {
        let Some(finding) = finding.filter(|_| self.bar.is_none()) else {
            return;
        };
        out.push(Action::Judged(finding));
        self.window.expire(now, self.options.window);
        self.window.push(now, finding, weight, wrong);
        self.live_down(now);
        if let Some(doubt) = self.window.doubt(&self.options) {
            self.escalate(now, doubt, out);
        } else if let Finding::Wrong(doubt) = finding {
            self.look_closer(now, doubt, out);
        } else if self.proven() {
            self.stage = Stage::Calm;
            self.change(now, Level::Exact, None, out);
        }
    }

    /// One wrong answer changes nothing, but a message that was lost can be had for the asking.
    fn look_closer(&mut self, now: Time, doubt: Doubt, out: &mut Vec<Action>) {
        let pause = self.options.verify_pause;
        let (lately, fruitless) = self.asked.map_or((false, 0), |(at, fruitless)| {
            (now - at < pause * (1 << fruitless), fruitless + 1)
        });
        if is_curable(doubt) && !self.recovering && !lately {
            self.asked = Some((now, fruitless.min(FRUITLESS_MAX)));
            out.push(Action::Verify);
        }
    }

    /// A step further down, with the remedy that fits the cause.
    fn escalate(&mut self, now: Time, doubt: Doubt, out: &mut Vec<Action>) {
        self.window.clear();
        let curable = is_curable(doubt);
        if curable && self.stage == Stage::Calm {
            self.stage = Stage::Resynced;
            out.push(Action::Resync(doubt));
            if self.opinion.level == Level::Approximate {
                self.change(now, Level::Approximate, Some(doubt), out);
            }
            return;
        }
        if doubt == Doubt::SilentEviction {
            // The engine's own events tell the same wrong story: only forgetting helps.
            out.push(Action::Forget);
        }
        let level = match self.opinion.level {
            // The picture is right and says too much: neither forgetting nor guessing would be better.
            Level::Exact if doubt == Doubt::Hybrid => {
                self.flaps = (self.flaps + 1).min(self.options.flaps_max);
                Level::Shrunk
            }
            level if doubt == Doubt::Hybrid => level,
            Level::Exact if curable => Level::Shrunk,
            Level::Exact | Level::Shrunk => {
                self.flaps = (self.flaps + 1).min(self.options.flaps_max);
                Level::Approximate
            }
            Level::Approximate => Level::Approximate,
        };
        self.change(now, level, Some(doubt), out);
    }

    /// Enough right answers in a row of evidence, more of them after each demotion.
    fn proven(&self) -> bool {
        let needed = (self.options.right_min << self.flaps).min(self.options.samples_max);
        self.window.len() >= needed && self.window.all_right_lately(needed)
    }

    /// A demotion is forgotten after a calm while.
    fn live_down(&mut self, now: Time) {
        if self.opinion.level == Level::Exact && now - self.calm_since >= self.options.calm {
            self.flaps = self.flaps.saturating_sub(1);
            self.calm_since = now;
        }
    }

    fn change(&mut self, now: Time, level: Level, doubt: Option<Doubt>, out: &mut Vec<Action>) {
        let opinion = Opinion { level, doubt };
        if self.opinion == opinion {
            return;
        }
        self.opinion = opinion;
        self.calm_since = now;
        out.push(Action::Changed(opinion));
    }
}

/// Whether asking the engine again may help.
const fn is_curable(doubt: Doubt) -> bool {
    matches!(
        doubt,
        Doubt::EventsMissing | Doubt::EventsLate | Doubt::SilentEviction
    )
}
