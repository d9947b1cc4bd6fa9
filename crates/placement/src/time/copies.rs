//! Prefixes that are waited for: when is a second copy worth its price?
//!
//! Whoever asks for a prefix that one rank holds goes there, and waits behind others that ask for it, though ranks beside it
//! are free. No single request has a reason to compute the prefix again elsewhere. All of them together may have.
//!
//! So what is waited is put on account of the prefix: how much sooner a request's turn would come at a rank that lacks the
//! prefix, on average over these ranks. Once as much was waited as a copy takes, the next request for which another rank
//! is better makes the copy there, and the account begins anew. Waiting and computing are both seconds until
//! somebody's first token, so there is nothing to weigh, nothing to foresee and nothing to set.
//!
//! A prefix is what ranks have of a prompt, known by its last block. Those of conversations are another at each turn, so nothing
//! adds up for them; system prompts and documents stay the same. Waiting while a prefix is computed for the first time counts,
//! too, but only for those who come when it is in a cache: a burst of requests that is never seen again is copied nowhere.
//!
//! What always holds: memory is bounded; an account is finite and not negative.

use kvasir_types::SequenceHash;

use crate::Overlap;

/// Prefixes with an account; of two in one place the later one stays.
const PREFIXES_MAX: usize = 4096;

/// Most that an account holds, in seconds: more than any prompt takes.
const WAITED_MAX: f64 = 3600.0;

/// The first blocks of a prompt, known by the last of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prefix {
    pub(super) blocks: f64,
    pub(super) last: SequenceHash,
}

impl Prefix {
    /// The longest part of a prompt that a rank's cache has, or `blocks` if they are more. What all caches share needs no copy.
    pub(super) fn of(overlap: &Overlap, sequence: &[SequenceHash], blocks: f64) -> Option<Self> {
        let found = overlap.ranks.iter();
        let most = found.map(|found| found.device).fold(blocks, f64::max);
        let last = sequence.get((most as usize).checked_sub(1)?);
        Some(Self {
            blocks: most.floor(),
            last: *last?,
        })
    }
}

/// What was waited for prefixes, in seconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    /// By the hash of the last block; empty until somebody waits.
    accounts: Vec<(SequenceHash, f64)>,
}

impl Copies {
    /// Seconds waited for a prefix since it was last copied.
    pub(super) fn waited(&self, prefix: &Prefix) -> f64 {
        match self.accounts.get(place(prefix)) {
            Some((last, seconds)) if *last == prefix.last => *seconds,
            _ => 0.0,
        }
    }

    /// A request waits longer for a prefix than it would elsewhere.
    pub(super) fn add(&mut self, prefix: &Prefix, seconds: f64) {
        // A sum of differences may be off by its last digits.
        if seconds.is_nan() || seconds < 1e-9 {
            return;
        }
        if self.accounts.is_empty() {
            self.accounts.resize(PREFIXES_MAX, (SequenceHash(0), 0.0));
        }
        if let Some(account) = self.accounts.get_mut(place(prefix)) {
            if account.0 != prefix.last {
                *account = (prefix.last, 0.0);
            }
            account.1 = (account.1 + seconds).min(WAITED_MAX);
        }
    }

    /// A request computes the prefix once more.
    pub(super) fn copied(&mut self, prefix: &Prefix) {
        let account = self.accounts.get_mut(place(prefix));
        if let Some(account) = account.filter(|account| account.0 == prefix.last) {
            account.1 = 0.0;
        }
    }
}

fn place(prefix: &Prefix) -> usize {
    (prefix.last.0 % PREFIXES_MAX as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(last: u64) -> Prefix {
        Prefix {
            blocks: 3.0,
            last: SequenceHash(last),
        }
    }

    #[test]
    fn waits_add_up_until_a_copy_is_made() {
        let mut copies = Copies::default();
        assert_eq!(copies.waited(&prefix(7)), 0.0);
        copies.copied(&prefix(7));
        copies.add(&prefix(7), 0.25);
        copies.add(&prefix(7), 0.5);
        assert_eq!(copies.waited(&prefix(7)), 0.75);
        assert_eq!(copies.waited(&prefix(8)), 0.0);
        copies.copied(&prefix(8));
        assert_eq!(copies.waited(&prefix(7)), 0.75);
        copies.copied(&prefix(7));
        assert_eq!(copies.waited(&prefix(7)), 0.0);
    }

    #[test]
    fn an_account_is_finite_and_not_negative() {
        let mut copies = Copies::default();
        for seconds in [-9.0, 0.0, f64::NAN, f64::NEG_INFINITY] {
            copies.add(&prefix(7), seconds);
        }
        assert!(copies.accounts.is_empty());
        copies.add(&prefix(7), f64::INFINITY);
        copies.add(&prefix(7), 1e300);
        assert_eq!(copies.waited(&prefix(7)), WAITED_MAX);
    }

    /// However many prefixes are waited for, no more than so many have an account.
    #[test]
    fn of_two_prefixes_in_one_place_the_later_one_stays() {
        let mut copies = Copies::default();
        for last in 0..3 * PREFIXES_MAX as u64 {
            copies.add(&prefix(last), 0.5);
        }
        assert_eq!(copies.accounts.len(), PREFIXES_MAX);
        let (first, later) = (prefix(7), prefix(7 + 2 * PREFIXES_MAX as u64));
        assert_eq!((copies.waited(&first), copies.waited(&later)), (0.0, 0.5));
        copies.add(&first, 0.25);
        assert_eq!((copies.waited(&first), copies.waited(&later)), (0.25, 0.0));
    }
}
