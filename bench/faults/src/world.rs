//! What engines and clients of one run share: the seed, what was seen of each request, and what went wrong.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Kinds of violations that are told apart; more are counted together.
const KINDS_MAX: usize = 20;

/// State of a run.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) started: Instant,
    /// Whether faults happen now.
    pub(crate) faults: AtomicBool,
    next: AtomicU64,
    limit: AtomicU64,
    /// Attempts that engines saw, by request.
    attempts: Vec<AtomicU8>,
    /// Lines of the router's log that end a request.
    ends: Vec<AtomicU8>,
    /// Requests whose client had a whole answer with status 200, and did not send it twice.
    answered: Vec<AtomicBool>,
    counts: Mutex<BTreeMap<String, u64>>,
    violations: Mutex<BTreeMap<String, (u64, String)>>,
    /// When descriptors were last scarce, in milliseconds after the start, plus one.
    scarce: AtomicU64,
    /// The router's memory in KiB, by seconds after the start.
    memory: Mutex<Vec<(u64, u64)>>,
}

impl World {
    pub(crate) fn new(seed: u64, requests: u64, started: Instant) -> Self {
        let bytes = || (0..requests).map(|_| AtomicU8::new(0)).collect();
        Self {
            seed,
            started,
            faults: AtomicBool::new(true),
            next: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            attempts: bytes(),
            ends: bytes(),
            answered: (0..requests).map(|_| AtomicBool::new(false)).collect(),
            counts: Mutex::default(),
            violations: Mutex::default(),
            scarce: AtomicU64::new(0),
            memory: Mutex::default(),
        }
    }

    /// The router has so much memory now.
    pub(crate) fn saw_memory(&self, kib: u64) {
        let at = self.started.elapsed().as_secs();
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.push((at, kib));
    }

    /// The router's memory in KiB, by seconds after the start.
    pub(crate) fn memory(&self) -> Vec<(u64, u64)> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.clone()
    }

    /// Lets clients take requests up to this one.
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::SeqCst);
    }

    /// The next request, if there is one.
    pub(crate) fn take(&self) -> Option<u64> {
        let limit = self.limit.load(Ordering::SeqCst);
        let next = |n| (n < limit).then_some(n + 1);
        self.next
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next)
            .ok()
    }

    pub(crate) fn has_faults(&self) -> bool {
        self.faults.load(Ordering::SeqCst)
    }

    /// An engine sees request `n`: which attempt this is, from 0.
    pub(crate) fn attempt(&self, n: u64) -> Option<u8> {
        let seen = self.attempts.get(n as usize)?;
        Some(seen.fetch_add(1, Ordering::SeqCst))
    }

    pub(crate) fn attempts_max(&self) -> u8 {
        let seen = self.attempts.iter().map(|seen| seen.load(Ordering::SeqCst));
        seen.max().unwrap_or(0)
    }

    /// The log says that request `n` ended.
    pub(crate) fn ended(&self, n: u64) {
        if let Some(ends) = self.ends.get(n as usize) {
            ends.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The client of request `n` has its whole answer.
    pub(crate) fn answered(&self, n: u64) {
        if let Some(answered) = self.answered.get(n as usize) {
            answered.store(true, Ordering::SeqCst);
        }
    }

    /// Requests that were answered and did not end once by the log: `(n, times)`.
    pub(crate) fn wrong_ends(&self) -> Vec<(u64, u8)> {
        let rows = self.ends.iter().zip(&self.answered).zip(0u64..);
        let rows = rows.map(|((ends, answered), n)| {
            (
                n,
                ends.load(Ordering::SeqCst),
                answered.load(Ordering::SeqCst),
            )
        });
        rows.filter(|(_, ends, answered)| *answered && *ends != 1)
            .map(|(n, ends, _)| (n, ends))
            .collect()
    }

    /// Counts something by name.
    pub(crate) fn count(&self, what: impl Into<String>) {
        *locked(&self.counts).entry(what.into()).or_default() += 1;
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        locked(&self.counts).clone()
    }

    /// Something that must not happen: what, and more about this case.
    pub(crate) fn violation(&self, what: &str, more: impl Into<String>) {
        let mut violations = locked(&self.violations);
        // Numbers and quotations differ from case to case.
        let plain = what.split(": ").next().unwrap_or(what);
        let kind: String = plain.chars().filter(|c| !c.is_ascii_digit()).collect();
        let is_new = violations.len() >= KINDS_MAX && !violations.contains_key(&kind);
        let kind = if is_new { "others".into() } else { kind };
        let more = || format!("{what}; {}", more.into());
        violations.entry(kind).or_insert_with(|| (0, more())).0 += 1;
    }

    /// Violations by kind: how many, and the first.
    pub(crate) fn violations(&self) -> Vec<(u64, String)> {
        locked(&self.violations).values().cloned().collect()
    }

    /// Descriptors are scarce now.
    pub(crate) fn mark_scarce(&self) {
        let now = self.started.elapsed().as_millis() as u64 + 1;
        self.scarce.store(now, Ordering::SeqCst);
    }

    /// Whether descriptors were scarce within the last seconds.
    pub(crate) fn was_scarce(&self, within: Duration) -> bool {
        let at = self.scarce.load(Ordering::SeqCst);
        at > 0 && self.started.elapsed() < Duration::from_millis(at) + within
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
