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
mod window;

pub use evidence::{Action, Answer, Doubt, Evidence, Level, Opinion, TrustOptions};

use kvasir_types::Time;

use evidence::Verdict;
use window::Window;

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
    recovering: bool,
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
            recovering: false,
            flaps: 0,
            calm_since: Time::ZERO,
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

    /// Answers in the window that told something.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.window.len()
    }

    /// Takes one piece of evidence.
    pub fn step(&mut self, now: Time, evidence: Evidence, out: &mut Vec<Action>) {
        match evidence {
            Evidence::Answer(answer) => {
                let verdict = answer.verdict(self.options.block_size, self.recovering);
                self.sample(now, verdict, answer.weight(), answer.wrong_tokens(), out);
            }
            Evidence::Appeared { expected, found } => {
                let verdict = match found >= expected {
                    _ if expected == 0 => Verdict::Nothing,
                    true => Verdict::Right,
                    false => Verdict::Wrong(Doubt::Tokenization),
                };
                let wrong = expected.saturating_sub(found) * self.options.block_size;
                self.sample(now, verdict, expected * self.options.block_size, wrong, out);
            }
            Evidence::Recovering(running) => self.recovering = running,
            Evidence::Barred(bar) => self.barred(now, bar, out),
            Evidence::Restarted => {
                // Another process: what was learned of the old one does not count, its faults do.
                self.window.clear();
                self.stage = Stage::Calm;
            }
        }
    }

    fn barred(&mut self, now: Time, bar: Option<Doubt>, out: &mut Vec<Action>) {
        if self.bar == bar {
            return;
        }
        self.bar = bar;
        self.window.clear();
        self.stage = Stage::Calm;
        let doubt = bar.unwrap_or(Doubt::Starting);
        self.change(now, Level::Approximate, Some(doubt), out);
    }

    fn sample(
        &mut self,
        now: Time,
        verdict: Verdict,
        weight: u32,
        wrong: u32,
        out: &mut Vec<Action>,
    ) {
        if verdict == Verdict::Nothing || self.bar.is_some() {
            return;
        }
        self.window.expire(now, self.options.window);
        self.window.push(now, verdict, weight, wrong);
        self.live_down(now);
        if let Some(doubt) = self.window.doubt(&self.options) {
            self.escalate(now, doubt, out);
        } else if self.proven() {
            self.stage = Stage::Calm;
            self.change(now, Level::Exact, None, out);
        }
    }

    /// A step further down, with the remedy that fits the cause.
    fn escalate(&mut self, now: Time, doubt: Doubt, out: &mut Vec<Action>) {
        self.window.clear();
        let curable = matches!(
            doubt,
            Doubt::EventsMissing | Doubt::EventsLate | Doubt::SilentEviction
        );
        match (self.opinion.level, self.stage) {
            (Level::Exact, Stage::Calm) if curable => {
                self.stage = Stage::Resynced;
                out.push(Action::Resync);
            }
            (Level::Exact, _) if curable => {
                // The engine's own events tell the same wrong story: only forgetting helps.
                if doubt == Doubt::SilentEviction {
                    out.push(Action::Forget);
                }
                self.change(now, Level::Shrunk, Some(doubt), out);
            }
            (Level::Approximate, _) => self.change(now, Level::Approximate, Some(doubt), out),
            _ => {
                self.flaps = (self.flaps + 1).min(self.options.flaps_max);
                self.change(now, Level::Approximate, Some(doubt), out);
            }
        }
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
