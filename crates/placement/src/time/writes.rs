//! What prompts write into caches, and what that pushes out.
//!
//! Answers two questions: how much of a rank's cache was never written to, and how dear is a token that leaves it? Nothing says
//! which token leaves. But a cache that is written fast forgets what is young, and of all tokens a known share is wanted again.
//!
//! What always holds: every answer is finite and not negative; nothing is dear while no size of a cache is known.

/// Of all caches together, the share over which writes count as recent.
const RECENT_SHARE: f64 = 0.25;
/// What is left of a prompt's part in the share of cached tokens after one more.
const CACHED_MEMORY: f64 = 0.998;
/// Recent writes are kept in growing units; before they grow out of reach they are scaled back.
const UNIT_MAX: f64 = 1e100;

/// Tokens written, by slot.
#[derive(Clone, Debug)]
pub(super) struct CacheWrites {
    written: Vec<f64>,
    /// Recent ones, in units that grow with each write: old ones fade.
    recent: Vec<f64>,
    recent_total: f64,
    unit: f64,
    /// Tokens that all caches hold, where that is known.
    capacity: f64,
    /// Tokens found cached, and tokens of prompts; old ones fade.
    cached: f64,
    prompts: f64,
}

impl Default for CacheWrites {
    fn default() -> Self {
        Self {
            written: Vec::new(),
            recent: Vec::new(),
            recent_total: 0.0,
            unit: 1.0,
            capacity: 0.0,
            cached: 0.0,
            prompts: 0.0,
        }
    }
}

impl CacheWrites {
    /// There are slots below `end`.
    pub(super) fn grow(&mut self, end: usize) {
        if self.written.len() < end {
            self.written.resize(end, 0.0);
            self.recent.resize(end, 0.0);
        }
    }

    /// A slot has another rank, whose cache is empty.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(written) = self.written.get_mut(slot as usize) {
            *written = 0.0;
        }
        if let Some(recent) = self.recent.get_mut(slot as usize) {
            self.recent_total = (self.recent_total - *recent).max(0.0);
            *recent = 0.0;
        }
    }

    /// Ranks have other slots now.
    pub(super) fn moved(&mut self, moves: &[(u32, u32)]) {
        for tokens in [&mut self.written, &mut self.recent] {
            let old = std::mem::replace(tokens, vec![0.0; tokens.len()]);
            for &(from, to) in moves {
                let place = tokens.get_mut(to as usize);
                if let (Some(place), Some(was)) = (place, old.get(from as usize)) {
                    *place = *was;
                }
            }
        }
    }

    /// All caches together hold so many tokens; 0 for unknown.
    pub(super) fn set_capacity(&mut self, tokens: f64) {
        self.capacity = tokens;
    }

    /// A prompt was computed, and so much of it found.
    pub(super) fn prompt(&mut self, slot: u32, new: f64, cached: f64) {
        self.cached = self.cached * CACHED_MEMORY + cached;
        self.prompts = self.prompts * CACHED_MEMORY + cached + new;
        let at = slot as usize;
        let (Some(written), Some(recent)) = (self.written.get_mut(at), self.recent.get_mut(at))
        else {
            return;
        };
        *written += new;
        if self.capacity <= 0.0 {
            return;
        }
        self.unit *= 1.0 + new / (RECENT_SHARE * self.capacity);
        *recent += new * self.unit;
        self.recent_total += new * self.unit;
        if self.unit > UNIT_MAX {
            self.recent
                .iter_mut()
                .for_each(|recent| *recent /= self.unit);
            self.recent_total /= self.unit;
            self.unit = 1.0;
        }
    }

    /// Tokens written to a rank's cache since it came.
    pub(super) fn written(&self, slot: u32) -> f64 {
        self.written.get(slot as usize).copied().unwrap_or(0.0)
    }

    /// How likely a token that leaves a rank's cache is wanted again: the share of tokens that were found cached, more where
    /// more was written of late than elsewhere.
    pub(super) fn pressure(&self, slot: u32) -> f64 {
        let recent = self.recent.get(slot as usize).copied().unwrap_or(0.0);
        if self.recent_total <= 0.0 || self.prompts <= 0.0 {
            return 0.0;
        }
        let beside = recent * self.recent.len() as f64 / self.recent_total;
        beside * self.cached / self.prompts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(capacity: f64) -> CacheWrites {
        let mut writes = CacheWrites::default();
        writes.grow(2);
        writes.set_capacity(capacity);
        writes
    }

    #[test]
    fn where_more_is_written_less_of_what_leaves_is_old() {
        let mut writes = writes(4000.0);
        for _ in 0..100 {
            writes.prompt(0, 90.0, 300.0);
            writes.prompt(1, 10.0, 0.0);
        }
        assert_eq!((writes.written(0), writes.written(1)), (9000.0, 1000.0));
        // Three of four tokens were found; nine of ten new ones were written to the first.
        let (first, second) = (writes.pressure(0), writes.pressure(1));
        assert!((first - 2.0 * 0.9 * 0.75).abs() < 0.08, "{first}");
        assert!((second - 2.0 * 0.1 * 0.75).abs() < 0.08, "{second}");
    }

    #[test]
    fn only_recent_writes_count() {
        let mut writes = writes(4000.0);
        for _ in 0..50 {
            writes.prompt(0, 100.0, 100.0);
        }
        for _ in 0..100 {
            writes.prompt(1, 100.0, 100.0);
        }
        assert!(writes.pressure(0) < 0.01 && writes.pressure(1) > 0.9);
        writes.forget(1);
        assert_eq!((writes.written(1), writes.pressure(1)), (0.0, 0.0));
    }

    #[test]
    fn nothing_is_dear_while_no_size_is_known_and_nothing_overflows() {
        let mut unknown = writes(0.0);
        unknown.prompt(0, 100.0, 100.0);
        assert_eq!(unknown.pressure(0), 0.0);
        let mut tiny = writes(16.0);
        for _ in 0..10_000 {
            tiny.prompt(0, 1e6, 1e6);
            tiny.prompt(1, 1e6, 1e6);
        }
        assert!(tiny.pressure(0).is_finite() && tiny.pressure(1) > 0.0);
    }
}
