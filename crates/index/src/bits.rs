//! Which blocks of a run does a rank hold, when they are not its first ones? One bit for each block.
//!
//! The writer changes bits of a published set in place, readers look at it meanwhile: a bit that is read as
//! set was set at that moment. A set belongs to one identity of a run's end (see `run`): what a position
//! means never changes under a reader. All accesses are relaxed, as a bit stands for itself: which block it
//! means was published with the run, or by the run's `len`, which a reader reads first.

use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};

/// Bits by position. A clone is the same set; [`Bits::part`] makes another one.
#[derive(Clone, Debug)]
pub(crate) struct Bits {
    words: Arc<[AtomicU64]>,
}

/// The bits of word `index` that lie in `from..to`.
#[inline]
fn mask(index: usize, from: u32, to: u32) -> u64 {
    let base = index as u32 * 64;
    let upto = |end: u32| match end.saturating_sub(base) {
        n @ 0..64 => (1 << n) - 1,
        _ => u64::MAX,
    };
    upto(to) & !upto(from)
}

impl Bits {
    /// No bit set, with room for positions below `room`.
    pub(crate) fn with_room(room: u32) -> Self {
        let words = room.div_ceil(64).max(1);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A copy of its own of the bits in `from..to`, moved to the front.
    pub(crate) fn part(&self, from: u32, to: u32, room: u32) -> Self {
        let part = Self::with_room(room.max(to - from));
        let (skip, shift) = (from as usize / 64, from % 64);
        for (i, word) in part.words.iter().enumerate() {
            let low = self.word(skip + i) >> shift;
            let high = match shift {
                0 => 0,
                _ => self.word(skip + i + 1) << (64 - shift),
            };
            let kept = (low | high) & mask(i, 0, to - from);
            word.store(kept, Ordering::Relaxed);
        }
        part
    }

    /// From words that were written down.
    pub(crate) fn from_words(words: &[u64]) -> Self {
        Self {
            words: words.iter().map(|w| AtomicU64::new(*w)).collect(),
        }
    }

    /// Positions below this have a bit.
    pub(crate) fn room(&self) -> u32 {
        self.words.len() as u32 * 64
    }

    #[inline]
    pub(crate) fn word(&self, index: usize) -> u64 {
        match self.words.get(index) {
            Some(word) => word.load(Ordering::Relaxed),
            None => 0,
        }
    }

    #[inline]
    pub(crate) fn has(&self, pos: u32) -> bool {
        self.word(pos as usize / 64) >> (pos % 64) & 1 != 0
    }

    /// Sets or clears the bits in `from..to`; says how many changed. Only the writer calls this.
    pub(crate) fn write(&self, from: u32, to: u32, on: bool) -> u32 {
        let mut changed = 0;
        let span = from as usize / 64..(to as usize).div_ceil(64).min(self.words.len());
        for i in span {
            let (old, mask) = (self.word(i), mask(i, from, to));
            let new = if on { old | mask } else { old & !mask };
            changed += (old ^ new).count_ones();
            self.words[i].store(new, Ordering::Relaxed);
        }
        changed
    }

    /// Clears one bit, which is set, unless its word would be empty; says whether it did. Only the writer
    /// calls this.
    #[inline]
    pub(crate) fn clear_one(&self, pos: u32) -> bool {
        let Some(word) = self.words.get(pos as usize / 64) else {
            return false;
        };
        let left = word.load(Ordering::Relaxed) & !(1 << (pos % 64));
        if left != 0 {
            word.store(left, Ordering::Relaxed);
        }
        left != 0
    }

    /// The first position from `from` on, below `to`, that is not set; `to` if there is none.
    #[inline]
    pub(crate) fn first_clear(&self, from: u32, to: u32) -> u32 {
        self.first(from, to, |word| !word)
    }

    #[inline]
    fn first(&self, from: u32, to: u32, of: impl Fn(u64) -> u64) -> u32 {
        let mut i = from as usize / 64;
        let mut left = of(self.word(i)) & mask(i, from, u32::MAX);
        while left == 0 && (i as u32 + 1) * 64 < to {
            i += 1;
            left = of(self.word(i));
        }
        (i as u32 * 64 + left.trailing_zeros()).min(to)
    }

    /// The least position from which on all up to `pos` are set; `pos` if the one before it is not.
    pub(crate) fn run_down(&self, pos: u32) -> u32 {
        self.last(pos, |word| !word)
    }

    /// One more than the last position below `below` that is set; 0 if there is none.
    pub(crate) fn reach(&self, below: u32) -> u32 {
        self.last(below, |word| word)
    }

    fn last(&self, below: u32, of: impl Fn(u64) -> u64) -> u32 {
        for i in (0..(below as usize).div_ceil(64)).rev() {
            let left = of(self.word(i)) & mask(i, 0, below);
            if left != 0 {
                return i as u32 * 64 + 64 - left.leading_zeros();
            }
        }
        0
    }

    /// How many of the positions in `from..to` are set.
    pub(crate) fn count(&self, from: u32, to: u32) -> u32 {
        (from as usize / 64..(to as usize).div_ceil(64))
            .map(|i| (self.word(i) & mask(i, from, to)).count_ones())
            .sum()
    }

    /// Bytes, with the counts of the pointer to it.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.words) + 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::Rng;

    /// Every question against an array of booleans, on lengths around those of words.
    #[test]
    fn agrees_with_an_array() {
        let mut rng = Rng::new(11);
        for len in [1, 2, 63, 64, 65, 127, 128, 200] {
            let (bits, mut truth) = (Bits::with_room(len), vec![false; len as usize]);
            for _ in 0..300 {
                let from = rng.below(u64::from(len)) as u32;
                let to = from + 1 + rng.below(u64::from(len - from)) as u32;
                let on = rng.below(2) == 0;
                let span = from as usize..to as usize;
                let changed = truth[span.clone()].iter().filter(|b| **b != on).count();
                truth[span.clone()].fill(on);
                assert_eq!(bits.write(from, to, on) as usize, changed);
                let pos = rng.below(u64::from(len)) as u32;
                assert_eq!(bits.has(pos), truth[pos as usize]);
                let clear = (pos as usize..to.max(pos) as usize).find(|i| !truth[*i]);
                let clear = clear.unwrap_or(to.max(pos) as usize);
                assert_eq!(bits.first_clear(pos, to.max(pos)) as usize, clear);
                let down = (0..pos as usize).rev().find(|i| !truth[*i]);
                assert_eq!(bits.run_down(pos) as usize, down.map_or(0, |i| i + 1));
                let reach = (0..to as usize).rev().find(|i| truth[*i]);
                assert_eq!(bits.reach(to) as usize, reach.map_or(0, |i| i + 1));
                let held = truth[span].iter().filter(|b| **b).count();
                assert_eq!(bits.count(from, to) as usize, held);
                let part = bits.part(from, to, 0);
                for i in 0..to - from {
                    assert_eq!(part.has(i), truth[(from + i) as usize]);
                }
                assert_eq!(part.count(0, part.room()) as usize, held);
            }
        }
    }
}
