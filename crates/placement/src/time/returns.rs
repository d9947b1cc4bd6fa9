//! Who comes back: conversations between two turns.
//!
//! Answers one question: how many of those that a rank has answered will be there again while a new request runs? A client
//! that reads an answer is nowhere in the ledger, but its next turn goes where the last one is cached: a rank whose clients
//! happen to read is not free.
//!
//! A prompt that begins with all of an earlier one is that one's return. From these it is learned which share of requests
//! comes back and after what pause. What a rank expects fades with the mean pause. And whoever comes back once may do so
//! again, as may the new request: both are there for `1/(1 − share²)` turns, if each turn is the last by chance.
//!
//! What always holds: memory is bounded; what is expected is finite and not negative; nothing is until something came back.

use kvasir_types::{SequenceHash, Time};

/// Ends of prompts that are remembered; of two in one place the later one stays.
const TAILS: usize = 8192;
/// Blocks of an answer that may be cached beyond the end of its prompt.
const ANSWER_BLOCKS: usize = 64;
/// What is left of a request's part in the share of those that came back after one more.
const SHARE_MEMORY: f64 = 0.998;
/// The same of a pause.
const PAUSE_MEMORY: f64 = 0.98;
/// A pause is at least this long, in seconds.
const PAUSE_MIN: f64 = 1e-3;
/// Turns that two conversations are expected to share, at most: one that is in the way can move, too.
const TURNS_MAX: f64 = 4.0;
/// What is expected is kept as of one moment, at most so many mean pauses ago.
const PAUSES_MAX: f64 = 8.0;
/// The mean pause by which it fades is at most by this share another than the one learned.
const PAUSE_SHARE: f64 = 0.1;

/// The end of a prompt that was answered.
#[derive(Clone, Copy, Debug)]
struct PromptTail {
    hash: SequenceHash,
    slot: u32,
    at: Time,
    /// How much it was expected to come back then.
    share: f64,
}

/// What is expected back.
#[derive(Clone, Debug, Default)]
pub(super) struct Returns {
    tails: Vec<Option<PromptTail>>,
    /// By slot, as of `since`: what came later is larger.
    expected: Vec<f64>,
    since: Time,
    /// The mean pause by which it fades; 0 until something came back.
    pause: f64,
    /// All of `expected` changed.
    is_renewed: bool,
    /// Requests that ended and that came back; old ones fade.
    ended: f64,
    returned: f64,
    /// Pauses, their sum and number; old ones fade.
    pause_sum: f64,
    pauses: f64,
}

impl Returns {
    /// There are slots below `end`.
    pub(super) fn grow(&mut self, end: usize) {
        if self.expected.len() < end {
            self.expected.resize(end, 0.0);
        }
    }

    /// A slot has another rank.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(expected) = self.expected.get_mut(slot as usize) {
            *expected = 0.0;
        }
    }

    /// Ranks have other slots now: nobody is expected anywhere.
    pub(super) fn moved(&mut self) {
        self.tails.clear();
        self.expected.fill(0.0);
    }

    /// A request is over, whose prompt ends so.
    pub(super) fn ended(&mut self, slot: u32, at: Time, tail: SequenceHash) {
        self.ended = self.ended * SHARE_MEMORY + 1.0;
        self.returned *= SHARE_MEMORY;
        self.renew(at);
        let share = self.share();
        let more = share * self.grown(at);
        if let Some(expected) = self.expected.get_mut(slot as usize) {
            *expected += more;
        }
        if self.tails.is_empty() {
            self.tails.resize(TAILS, None);
        }
        if let Some(place) = self.tails.get_mut(place(tail)) {
            *place = Some(PromptTail {
                hash: tail,
                slot,
                at,
                share,
            });
        }
    }

    /// A prompt came of which so many blocks are cached somewhere. The slot where it is no longer expected, if it was.
    pub(super) fn arrived(
        &mut self,
        now: Time,
        sequence: &[SequenceHash],
        blocks: u32,
    ) -> Option<u32> {
        let cached = sequence.get(..blocks as usize).unwrap_or(sequence);
        let tail = cached.iter().rev().take(ANSWER_BLOCKS).find_map(|hash| {
            let place = self.tails.get_mut(place(*hash))?;
            place.take_if(|tail| tail.hash == *hash)
        })?;
        self.returned += 1.0;
        self.pause_sum = self.pause_sum * PAUSE_MEMORY + (now - tail.at).as_secs_f64();
        self.pauses = self.pauses * PAUSE_MEMORY + 1.0;
        let was = tail.share * self.grown(tail.at);
        let expected = self.expected.get_mut(tail.slot as usize)?;
        *expected = (*expected - was).max(0.0);
        Some(tail.slot)
    }

    /// What is expected at a rank, in a measure that [`Returns::present`] turns into requests.
    pub(super) fn expected(&self, slot: u32) -> f64 {
        self.expected.get(slot as usize).copied().unwrap_or(0.0)
    }

    /// For how many requests each that is expected counts to one that runs for so many seconds from now.
    pub(super) fn present(&self, now: Time, seconds: f64) -> f64 {
        if self.pause <= 0.0 {
            return 0.0;
        }
        let share = self.share();
        let turns = (1.0 / (1.0 - share * share)).min(TURNS_MAX);
        let in_time = 1.0 - (-seconds / self.pause).exp();
        turns * in_time / self.grown(now)
    }

    /// Whether what is expected is measured otherwise than when this was last asked.
    pub(super) fn take_renewed(&mut self) -> bool {
        std::mem::take(&mut self.is_renewed)
    }

    /// The share of requests that come back.
    fn share(&self) -> f64 {
        (self.returned / self.ended.max(1.0)).min(1.0)
    }

    /// How much larger the measure is at a moment.
    fn grown(&self, at: Time) -> f64 {
        if self.pause <= 0.0 {
            return 1.0;
        }
        let pauses = match at >= self.since {
            true => (at - self.since).as_secs_f64() / self.pause,
            false => -(self.since - at).as_secs_f64() / self.pause,
        };
        pauses.exp()
    }

    /// Measures as of now, with the pause as it is known now, once that is another or the measure has grown far.
    fn renew(&mut self, now: Time) {
        if self.pauses <= 0.0 {
            return;
        }
        let pause = (self.pause_sum / self.pauses).max(PAUSE_MIN);
        let is_old = (now - self.since).as_secs_f64() > PAUSES_MAX * self.pause;
        if !is_old && (pause - self.pause).abs() <= PAUSE_SHARE * self.pause {
            return;
        }
        let faded = 1.0 / self.grown(now);
        for expected in &mut self.expected {
            *expected *= faded;
        }
        self.since = now;
        self.pause = pause;
        self.is_renewed = true;
    }
}

fn place(tail: SequenceHash) -> usize {
    tail.0 as usize % TAILS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    /// Conversations of two turns, half a second apart, on slot 0: each first turn comes back.
    fn taught() -> Returns {
        let mut returns = Returns::default();
        returns.grow(2);
        for turn in 0..400u64 {
            let now = turn as f64;
            let first = SequenceHash(turn + 1_000);
            returns.ended(0, at(now), first);
            let next = [first, SequenceHash(turn + 500_000)];
            assert_eq!(returns.arrived(at(now + 0.5), &next, 1), Some(0));
            returns.ended(0, at(now + 0.7), next[1]);
        }
        returns
    }

    #[test]
    fn nothing_is_expected_until_something_came_back() {
        let mut returns = Returns::default();
        returns.grow(1);
        for end in 1..100u64 {
            returns.ended(0, at(end as f64), SequenceHash(end));
        }
        assert_eq!(returns.expected(0) * returns.present(at(100.0), 9.0), 0.0);
    }

    #[test]
    fn who_reads_is_expected_and_no_longer_once_it_is_back() {
        let mut returns = taught();
        let count = |returns: &Returns, slot, now: f64| {
            returns.expected(slot) * returns.present(at(now), 1e9)
        };
        let before = count(&returns, 1, 1000.0);
        assert_eq!(before, 0.0);
        returns.ended(1, at(1000.0), SequenceHash(7));
        // Half of all come back; two such conversations share 1/(1 - 1/4) turns.
        let expected = count(&returns, 1, 1000.0);
        assert!((expected - 0.5 / 0.75).abs() < 0.02, "{expected}");
        // The mean pause is half a second.
        let later = count(&returns, 1, 1000.5);
        assert!((later / expected - (-1.0f64).exp()).abs() < 0.01, "{later}");
        // It is there only with the end of its prompt cached, however much of the answer is.
        let next = [SequenceHash(6), SequenceHash(7), SequenceHash(8)];
        assert_eq!(returns.arrived(at(1000.5), &next, 1), None);
        assert_eq!(returns.arrived(at(1000.5), &next, 3), Some(1));
        assert!(count(&returns, 1, 1000.5) < 1e-9);
        assert_eq!(returns.arrived(at(1000.6), &next, 3), None);
    }

    /// A request of a millisecond meets nobody who reads for half a second; a long one does.
    #[test]
    fn only_who_comes_in_time_counts() {
        let mut returns = taught();
        returns.ended(1, at(1000.0), SequenceHash(7));
        let present = |seconds| returns.present(at(1000.0), seconds);
        assert!(present(0.001) < 0.003 * present(1e9));
        assert!((present(0.5) / present(1e9) - (1.0 - (-1.0f64).exp())).abs() < 0.01);
    }

    #[test]
    fn measures_stay_finite_and_memory_bounded() {
        let mut returns = taught();
        for end in 0..20_000u64 {
            returns.ended(0, at(2000.0 + 1000.0 * end as f64), SequenceHash(end));
        }
        let far = at(1e9);
        assert!((returns.expected(0) * returns.present(far, 1.0)).is_finite());
        assert!(returns.expected(0).is_finite() && returns.tails.len() == TAILS);
        assert!(returns.take_renewed() && !returns.take_renewed());
        returns.forget(0);
        assert_eq!(returns.expected(0), 0.0);
        returns.moved();
        assert_eq!(returns.arrived(far, &[SequenceHash(19_999)], 1), None);
    }
}
