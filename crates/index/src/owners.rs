//! Who holds how much of a run: a set of ranks that hold all of it, a list of those that hold its head.

/// Ranks by slot number; as many words as the highest one needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankSet {
    first: u64,
    more: Box<[u64]>,
}

impl RankSet {
    #[inline]
    pub(crate) fn has(&self, slot: u32) -> bool {
        self.word(slot as usize / 64) >> (slot % 64) & 1 != 0
    }

    #[inline]
    pub(crate) fn word(&self, index: usize) -> u64 {
        match index {
            0 => self.first,
            n => self.more.get(n - 1).copied().unwrap_or(0),
        }
    }

    #[inline]
    pub(crate) fn words(&self) -> usize {
        1 + self.more.len()
    }

    pub(crate) fn insert(&mut self, slot: u32) {
        let index = slot as usize / 64;
        if index > self.more.len() {
            let mut more = std::mem::take(&mut self.more).into_vec();
            more.reserve_exact(index - more.len());
            more.resize(index, 0);
            self.more = more.into_boxed_slice();
        }
        *self.word_mut(index) |= 1 << (slot % 64);
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        let index = slot as usize / 64;
        if index < self.words() {
            *self.word_mut(index) &= !(1 << (slot % 64));
        }
        let used = self.more.iter().rposition(|w| *w != 0).map_or(0, |i| i + 1);
        if used < self.more.len() {
            self.more = self.more[..used].into();
        }
    }

    fn word_mut(&mut self, index: usize) -> &mut u64 {
        match index {
            0 => &mut self.first,
            n => &mut self.more[n - 1],
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first == 0 && self.more.iter().all(|w| *w == 0)
    }

    pub(crate) fn len(&self) -> u32 {
        self.first.count_ones() + self.more.iter().map(|w| w.count_ones()).sum::<u32>()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.words()).flat_map(|i| bits(i, self.word(i)))
    }
}

/// The slots that a word of a set stands for.
#[inline]
fn bits(index: usize, mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        (word != 0).then(|| {
            let slot = (index * 64) as u32 + word.trailing_zeros();
            word &= word - 1;
            slot
        })
    })
}

/// A rank that holds the first `len` blocks of a run and no more; neither none nor all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) slot: u32,
    pub(crate) len: u32,
}

/// Who holds how much of a run in one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owners {
    pub(crate) full: RankSet,
    pub(crate) cuts: Box<[Cut]>,
}

impl Owners {
    /// How many leading blocks of a run of `len` blocks a rank holds.
    #[inline]
    pub(crate) fn extent(&self, slot: u32, len: u32) -> u32 {
        if self.full.has(slot) {
            return len;
        }
        self.cuts
            .iter()
            .find(|c| c.slot == slot)
            .map_or(0, |c| c.len)
    }

    /// Makes a rank hold the first `extent` of `len` blocks.
    pub(crate) fn set(&mut self, slot: u32, extent: u32, len: u32) {
        let partial = 0 < extent && extent < len;
        match self.cuts.iter().position(|c| c.slot == slot) {
            Some(i) if partial => self.cuts[i].len = extent,
            Some(i) => {
                let mut cuts = std::mem::take(&mut self.cuts).into_vec();
                cuts.swap_remove(i);
                self.cuts = cuts.into_boxed_slice();
            }
            None if partial => {
                let mut cuts = std::mem::take(&mut self.cuts).into_vec();
                cuts.reserve_exact(1);
                cuts.push(Cut { slot, len: extent });
                self.cuts = cuts.into_boxed_slice();
            }
            None => {}
        }
        if extent == len {
            self.full.insert(slot);
        } else {
            self.full.remove(slot);
        }
    }

    /// The same holdings after the run was cut before `at`: those of its head, those of its tail.
    pub(crate) fn split(&self, at: u32) -> (Self, Self) {
        let mut head = Self {
            full: self.full.clone(),
            cuts: self.cuts.iter().filter(|c| c.len < at).copied().collect(),
        };
        for cut in self.cuts.iter().filter(|c| c.len >= at) {
            head.full.insert(cut.slot);
        }
        let beyond = self.cuts.iter().filter(|c| c.len > at).map(|c| Cut {
            slot: c.slot,
            len: c.len - at,
        });
        let tail = Self {
            full: self.full.clone(),
            cuts: beyond.collect(),
        };
        (head, tail)
    }

    /// How many leading blocks of a run of `len` anybody holds.
    pub(crate) fn reach(&self, len: u32) -> u32 {
        if self.full.is_empty() {
            self.cuts.iter().map(|c| c.len).max().unwrap_or(0)
        } else {
            len
        }
    }

    /// Whether this rank holds all and nobody else anything.
    pub(crate) fn is_sole(&self, slot: u32) -> bool {
        self.cuts.is_empty() && self.full.has(slot) && self.full.len() == 1
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.cuts.is_empty() && self.full.is_empty()
    }

    /// Every rank that holds something, with how much of a run of `len` blocks.
    pub(crate) fn iter(&self, len: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let cuts = self.cuts.iter().map(|c| (c.slot, c.len));
        self.full.iter().map(move |slot| (slot, len)).chain(cuts)
    }

    /// Bytes on the heap.
    pub(crate) fn heap(&self) -> usize {
        size_of_val(&*self.full.more) + size_of_val(&*self.cuts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::Rng;

    /// Extents of 130 ranks in a run of 9 blocks against an array, through cuts of the run.
    #[test]
    fn extents_agree_with_an_array() {
        let mut rng = Rng::new(3);
        for _ in 0..50 {
            let (mut owners, mut truth) = (Owners::default(), [0u32; 130]);
            for _ in 0..100 {
                let (slot, extent) = (rng.below(130) as u32, rng.below(10) as u32);
                owners.set(slot, extent, 9);
                truth[slot as usize] = extent;
            }
            let at = 1 + rng.below(8) as u32;
            let (head, tail) = owners.split(at);
            for (slot, &extent) in (0u32..).zip(&truth) {
                assert_eq!(owners.extent(slot, 9), extent);
                assert_eq!(head.extent(slot, at), extent.min(at));
                assert_eq!(tail.extent(slot, 9 - at), extent.saturating_sub(at));
            }
            assert_eq!(owners.reach(9), truth.into_iter().max().unwrap());
            assert_eq!(
                owners.iter(9).count(),
                truth.iter().filter(|e| **e > 0).count()
            );
        }
    }
}
