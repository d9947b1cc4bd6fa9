//! Sets of slots as words, so that a set operation over 4,096 ranks is 64 instructions.

/// A growable set of small numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotSet {
    words: Vec<u64>,
}

impl SlotSet {
    /// Whether `at` is in the set.
    #[must_use]
    pub fn has(&self, at: u32) -> bool {
        let word = self.words.get(at as usize / 64).copied().unwrap_or(0);
        word >> (at % 64) & 1 == 1
    }

    /// Adds or removes `at`; returns whether that changed anything.
    pub fn set(&mut self, at: u32, on: bool) -> bool {
        let index = at as usize / 64;
        if index >= self.words.len() {
            if !on {
                return false;
            }
            self.words.resize(index + 1, 0);
        }
        let Some(word) = self.words.get_mut(index) else {
            return false;
        };
        let before = *word;
        *word = before & !(1 << (at % 64)) | u64::from(on) << (at % 64);
        *word != before
    }

    /// Calls `each` with what is in the set, lowest first; the quickest way through it.
    #[inline]
    pub fn for_each(&self, mut each: impl FnMut(u32)) {
        for (i, &word) in self.words.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                each(i as u32 * 64 + rest.trailing_zeros());
                rest &= rest - 1;
            }
        }
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// How many are in the set.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// What is in the set, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(i, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(i as u32 * 64 + bit)
            })
        })
    }

    /// The member that `rank` others precede.
    #[must_use]
    pub fn nth(&self, rank: u32) -> Option<u32> {
        let mut left = rank;
        for (i, &word) in self.words.iter().enumerate() {
            let here = word.count_ones();
            if left >= here {
                left -= here;
                continue;
            }
            let mut rest = word;
            for _ in 0..left {
                rest &= rest - 1;
            }
            return Some(i as u32 * 64 + rest.trailing_zeros());
        }
        None
    }

    /// Becomes a copy of `other`, keeping its memory.
    pub fn copy_from(&mut self, other: &Self) {
        self.words.clear();
        self.words.extend_from_slice(&other.words);
    }

    /// Keeps only those for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        for (i, word) in self.words.iter_mut().enumerate() {
            let mut rest = *word;
            while rest != 0 {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                if !keep(i as u32 * 64 + bit) {
                    *word &= !(1 << bit);
                }
            }
        }
    }

    /// Keeps only what is also in `other`.
    pub fn intersect(&mut self, other: &Self) {
        for (i, word) in self.words.iter_mut().enumerate() {
            *word &= other.words.get(i).copied().unwrap_or(0);
        }
    }

    /// Keeps only what is also in `one` or in `other`.
    pub fn intersect_either(&mut self, one: &Self, other: &Self) {
        let word = |bits: &Self, i: usize| bits.words.get(i).copied().unwrap_or(0);
        for (i, kept) in self.words.iter_mut().enumerate() {
            *kept &= word(one, i) | word(other, i);
        }
    }

    /// Takes out what is in `other`.
    pub fn subtract(&mut self, other: &Self) {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word &= !other;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_a_set_across_word_borders() {
        let mut bits = SlotSet::default();
        for at in [0, 63, 64, 200] {
            assert!(bits.set(at, true));
            assert!(!bits.set(at, true), "{at} was in already");
        }
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 63, 64, 200]);
        assert_eq!(
            (0..5).map(|i| bits.nth(i)).collect::<Vec<_>>(),
            [Some(0), Some(63), Some(64), Some(200), None]
        );
        assert!(!bits.set(9999, false));
        bits.retain(|at| at != 64);
        assert_eq!(
            (bits.count(), bits.has(64), bits.has(200)),
            (3, false, true)
        );
        let mut other = SlotSet::default();
        other.set(63, true);
        let mut both = bits.clone();
        both.intersect(&other);
        assert_eq!(both.iter().collect::<Vec<_>>(), [63]);
        let mut third = SlotSet::default();
        third.set(200, true);
        let mut either = bits.clone();
        either.intersect_either(&other, &third);
        assert_eq!(either.iter().collect::<Vec<_>>(), [63, 200]);
        bits.subtract(&other);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 200]);
    }
}
