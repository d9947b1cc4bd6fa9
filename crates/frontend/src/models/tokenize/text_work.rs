//! May a model's template and tokenizer run on a serving thread, and what if they take too long?
//!
//! Both come from a folder that an engine names, so how long they take is not ours to say. Until a few texts have been read
//! quickly, and whenever a text is long, they run on a thread of the pool and have a limit of time. A short text that passes it
//! is evidence against them and makes them rest: the model's prompts are routed as if it had no tokenizer, until the late
//! work has ended and a pause is over. A long one is not, since clients choose their texts: only further long texts
//! are not read, and only while it runs.
//!
//! What always holds: work that never ends takes no more threads of a model than there are slots; no long text changes how
//! short ones are read; the rest is told by one line of the log and by a gauge, at its beginning and at its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kvasir_telemetry::Clock;
use kvasir_text::Effort;
use kvasir_types::Time;

use crate::http::long_work::{LongWork, SHORT_TEXT_BYTES};
use crate::models::ServedModel;
use crate::models::prompt::PromptError;

/// Code that is not optimised takes many times as long.
const SLOWER: u32 = if cfg!(debug_assertions) { 4 } else { 1 };
/// What reading a text may take at least.
const LIMIT: Duration = Duration::from_secs(2 * SLOWER as u64);
/// What it may take more for each mebibyte that is rendered: the slower of the libraries makes some four in that time.
const LIMIT_PER_MIB: Duration = Duration::from_secs(SLOWER as u64);
/// Texts that must have been read quickly in a row before the next may be read on a serving thread.
const QUICK_AFTER: u32 = 4;
/// What is not quick.
const SLOW: Duration = Duration::from_millis(10 * SLOWER as u64);
/// How long a tokenizer rests that was late once; the next time twice as long.
const REST: Duration = Duration::from_secs(60);
/// How often that doubles: to an hour, about.
const DOUBLINGS_MAX: u32 = 6;

/// How one model's template and tokenizer have done so far.
#[derive(Debug, Default)]
pub(crate) struct TextStanding {
    /// Texts in a row that were read quickly.
    quick: AtomicU32,
    /// Work on short texts that was given up and still runs.
    late: AtomicU32,
    /// The same on long texts.
    late_long: AtomicU32,
    /// Times that work on a short text was late.
    lapses: AtomicU32,
    /// Nanoseconds of the clock until which they rest.
    rests_until: AtomicU64,
    resting: AtomicBool,
}

impl TextStanding {
    /// Whether they rest.
    pub(crate) fn is_resting(&self) -> bool {
        self.resting.load(Ordering::Relaxed)
    }

    /// Whether a text of so many bytes is read.
    fn is_usable(&self, now: Time, bytes: usize) -> bool {
        if !is_short(bytes) && self.late_long.load(Ordering::Acquire) > 0 {
            return false;
        }
        !self.is_resting()
            || self.late.load(Ordering::Acquire) == 0
                && now.as_nanos() >= self.rests_until.load(Ordering::Relaxed)
    }

    /// A text of so many bytes took so long; that of a long one says nothing about short ones.
    fn took(&self, bytes: usize, span: Duration) {
        match span <= SLOW {
            _ if !is_short(bytes) => {}
            true => {
                let quick = self.quick.load(Ordering::Relaxed);
                self.quick.store(quick.saturating_add(1), Ordering::Relaxed);
            }
            false => self.quick.store(0, Ordering::Relaxed),
        }
    }

    /// Work is late; true if that begins a rest.
    fn lapse(&self, now: Time) -> bool {
        let lapses = self.lapses.fetch_add(1, Ordering::Relaxed);
        let rest = REST * 2u32.pow(lapses.min(DOUBLINGS_MAX));
        self.rests_until
            .store((now + rest).as_nanos(), Ordering::Relaxed);
        self.quick.store(0, Ordering::Relaxed);
        !self.resting.swap(true, Ordering::Relaxed)
    }
}

fn is_short(bytes: usize) -> bool {
    bytes <= SHORT_TEXT_BYTES
}

/// Stands for late work while it runs.
struct LateWork {
    standing: Arc<TextStanding>,
    short: bool,
}

impl LateWork {
    fn new(standing: &Arc<TextStanding>, bytes: usize) -> Self {
        let late = Self {
            standing: Arc::clone(standing),
            short: is_short(bytes),
        };
        late.count().fetch_add(1, Ordering::AcqRel);
        late
    }

    fn count(&self) -> &AtomicU32 {
        match self.short {
            true => &self.standing.late,
            false => &self.standing.late_long,
        }
    }
}

impl Drop for LateWork {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::AcqRel);
    }
}

/// Reads texts of one model.
pub(crate) struct TextWork<'a> {
    pool: &'a LongWork,
    model: &'a ServedModel,
}

impl<'a> TextWork<'a> {
    /// With this pool.
    pub(crate) fn new(pool: &'a LongWork, model: &'a ServedModel) -> Self {
        Self { pool, model }
    }

    fn standing(&self) -> &Arc<TextStanding> {
        &self.model.tokens().standing
    }

    fn clock(&self) -> Clock {
        self.model.host.context().clock
    }

    /// Whether short texts may be read on this thread.
    pub(crate) fn is_quick(&self) -> bool {
        let quick = self.standing().quick.load(Ordering::Relaxed) >= QUICK_AFTER;
        quick && self.model.text().is_some_and(|text| text.is_linear())
    }

    /// Reads a short text here; none if it takes more effort than is spent here.
    pub(crate) fn inline<T>(
        &self,
        read: impl FnOnce(Effort) -> Result<T, PromptError>,
    ) -> Option<Result<T, PromptError>> {
        let start = self.clock().now();
        let outcome = read(Effort::Brief);
        let span = self.clock().now() - start;
        if span > SLOW {
            self.standing().took(0, span);
        }
        match outcome {
            Err(PromptError::TooMuch(_)) => None,
            outcome => Some(outcome),
        }
    }

    /// Reads a text of so many bytes on another thread. None if that takes too long, or if the tokenizer rests; the inner one
    /// if it panicked.
    pub(crate) async fn elsewhere<T: Send + 'static>(
        &self,
        bytes: usize,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Option<Option<T>> {
        let (standing, clock) = (self.standing(), self.clock());
        if !standing.is_usable(clock.now(), bytes) {
            return None;
        }
        let slot = self.pool.text_slot(bytes).await?;
        // What it waited for may have been late.
        if !standing.is_usable(clock.now(), bytes) {
            return None;
        }
        let limit = limit_of(bytes);
        let late = {
            let (standing, name) = (Arc::clone(standing), Arc::clone(&self.model.name));
            let gauge = self.model.host.context().metrics.tokenizer_resting.clone();
            move || {
                if !is_short(bytes) {
                    tracing::warn!(model = %name, bytes, limit_secs = limit.as_secs_f64(),
                        "a long text took the chat template or the tokenizer too long: it is done without, and so are \
                         further long texts until that work ends");
                } else if standing.lapse(clock.now()) {
                    gauge.with_label_values(&[&*name]).set(1.0);
                    tracing::warn!(model = %name, limit_secs = limit.as_secs_f64(),
                        "the chat template or the tokenizer took too long: prompts are routed without it for a while; \
                         check the files of the model's folder");
                }
                LateWork::new(&standing, bytes)
            }
        };
        let timed = move || {
            let start = clock.now();
            let output = read();
            (output, clock.now() - start)
        };
        let tasks = &self.model.host.context().tasks;
        let done = slot.run(tasks, limit, timed, late).await.ok()?;
        if let Some((_, span)) = &done {
            standing.took(bytes, *span);
            self.wake();
        }
        Some(done.map(|(output, _)| output))
    }

    /// Ends a rest.
    fn wake(&self) {
        if self.standing().resting.swap(false, Ordering::Relaxed) {
            let gauge = &self.model.host.context().metrics.tokenizer_resting;
            gauge.with_label_values(&[&*self.model.name]).set(0.0);
            tracing::info!(model = %self.model.name, "the tokenizer is used again");
        }
    }
}

fn limit_of(bytes: usize) -> Duration {
    let mebibytes = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    LIMIT + LIMIT_PER_MIB.saturating_mul(mebibytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_rests_until_its_late_work_ended_and_longer_each_time() {
        let standing = Arc::new(TextStanding::default());
        let at = |secs: u64| Time::ZERO + Duration::from_secs(secs);
        let usable = |secs| standing.is_usable(at(secs), 100);
        assert!(usable(0));
        assert!(standing.lapse(at(0)), "it begins");
        let late = LateWork::new(&standing, 100);
        assert!(!standing.lapse(at(0)), "it goes on");
        assert!(!usable(9_999), "the work still runs");
        drop(late);
        assert!(!usable(119) && usable(120));
        for _ in 0..100 {
            standing.lapse(at(120));
        }
        let longest = REST * 2u32.pow(DOUBLINGS_MAX);
        assert!(standing.is_usable(at(120) + longest, 100));
    }

    /// Whoever sends texts that take long is alone with that.
    #[test]
    fn a_long_text_that_is_late_is_no_evidence_against_the_tokenizer() {
        let standing = Arc::new(TextStanding::default());
        let late = LateWork::new(&standing, SHORT_TEXT_BYTES + 1);
        assert!(!standing.is_usable(Time::ZERO, SHORT_TEXT_BYTES + 1));
        assert!(standing.is_usable(Time::ZERO, SHORT_TEXT_BYTES));
        assert!(!standing.is_resting());
        drop(late);
        assert!(
            standing.is_usable(Time::ZERO, SHORT_TEXT_BYTES + 1),
            "at once"
        );
    }

    #[test]
    fn a_slow_text_takes_the_place_on_serving_threads_away() {
        let standing = TextStanding::default();
        let quick = || standing.quick.load(Ordering::Relaxed);
        for _ in 0..QUICK_AFTER {
            standing.took(100, SLOW);
        }
        assert_eq!(quick(), QUICK_AFTER);
        standing.took(SHORT_TEXT_BYTES + 1, 100 * SLOW);
        assert_eq!(quick(), QUICK_AFTER, "unless it is long");
        standing.took(100, SLOW + Duration::from_nanos(1));
        assert_eq!(quick(), 0);
    }

    #[test]
    fn longer_texts_have_more_time() {
        assert_eq!(limit_of(100), LIMIT);
        assert_eq!(limit_of(3 << 20), LIMIT + 3 * LIMIT_PER_MIB);
    }
}
