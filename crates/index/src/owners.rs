//! Who holds how much of a run: a set of ranks that hold all of it, a list of those that hold its head, and
//! bits for those that hold something behind a gap.

use crate::bits::Bits;

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

/// A rank that holds some blocks of a run, with gaps before some of them.
#[derive(Clone, Debug)]
pub(crate) struct Patch {
    pub(crate) slot: u32,
    pub(crate) bits: Bits,
}

/// What one rank holds of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coverage<'a> {
    /// The first blocks, of which there may be none.
    Head(u32),
    /// Those whose bits are set.
    Bits(&'a Bits),
}

impl Coverage<'_> {
    #[inline]
    pub(crate) fn has(self, pos: u32) -> bool {
        match self {
            Self::Head(extent) => pos < extent,
            Self::Bits(bits) => bits.has(pos),
        }
    }

    /// How far the blocks from `pos` on, below `len`, are held without a gap; `pos` if that one is not.
    #[inline]
    pub(crate) fn until(self, pos: u32, len: u32) -> u32 {
        match self {
            Self::Head(extent) => extent.clamp(pos, len.max(pos)),
            Self::Bits(bits) => bits.first_clear(pos, len),
        }
    }

    /// From where on the blocks before `pos`, which is held, are held without a gap.
    #[inline]
    pub(crate) fn since(self, pos: u32) -> u32 {
        match self {
            Self::Head(_) => 0,
            Self::Bits(bits) => bits.run_down(pos),
        }
    }

    /// How many of the blocks in `from..to` are held.
    pub(crate) fn count(self, from: u32, to: u32) -> u32 {
        match self {
            Self::Head(extent) => extent.min(to).saturating_sub(from),
            Self::Bits(bits) => bits.count(from, to),
        }
    }

    /// One more than the position of the last block below `below` that is held; 0 if there is none.
    pub(crate) fn reach(self, below: u32) -> u32 {
        match self {
            Self::Head(extent) => extent.min(below),
            Self::Bits(bits) => bits.reach(below),
        }
    }

    #[inline]
    pub(crate) fn is_nothing(self) -> bool {
        // A set without bits is never kept.
        matches!(self, Self::Head(0))
    }

    /// The same as bits, to be changed. For a run of `len` blocks.
    pub(crate) fn to_bits(self, len: u32) -> Bits {
        match self {
            Self::Head(extent) => {
                let bits = Bits::with_room(len);
                bits.write(0, extent, true);
                bits
            }
            Self::Bits(bits) => bits.part(0, len, len),
        }
    }
}

/// Who holds how much of a run in one tier. A rank is listed in one way at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    pub(crate) full: RankSet,
    pub(crate) cuts: Box<[Cut]>,
    /// By slot. Each holds some and not all of the run.
    pub(crate) patches: Box<[Patch]>,
}

impl Owners {
    /// What a rank holds of a run of `len` blocks.
    #[inline]
    pub(crate) fn held(&self, slot: u32, len: u32) -> Coverage<'_> {
        if self.full.has(slot) {
            return Coverage::Head(len);
        }
        if let Ok(i) = self.patches.binary_search_by_key(&slot, |p| p.slot) {
            return Coverage::Bits(&self.patches[i].bits);
        }
        let cut = self.cuts.iter().find(|c| c.slot == slot);
        Coverage::Head(cut.map_or(0, |c| c.len))
    }

    /// Makes a rank hold the first `extent` of `len` blocks.
    pub(crate) fn set(&mut self, slot: u32, extent: u32, len: u32) {
        self.take_patch(slot);
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

    /// Makes a rank hold the blocks of a run of `len` whose bits are set.
    pub(crate) fn set_bits(&mut self, slot: u32, bits: Bits, len: u32) {
        let head = bits.first_clear(0, len);
        if head == bits.reach(len) {
            return self.set(slot, head, len);
        }
        self.set(slot, 0, len);
        let mut patches = std::mem::take(&mut self.patches).into_vec();
        let at = patches.partition_point(|p| p.slot < slot);
        patches.reserve_exact(1);
        patches.insert(at, Patch { slot, bits });
        self.patches = patches.into_boxed_slice();
    }

    fn take_patch(&mut self, slot: u32) {
        if let Ok(i) = self.patches.binary_search_by_key(&slot, |p| p.slot) {
            let mut patches = std::mem::take(&mut self.patches).into_vec();
            patches.remove(i);
            self.patches = patches.into_boxed_slice();
        }
    }

    /// Gives a draft bits of its own: what a position of the published ones means is about to change.
    pub(crate) fn own_bits(&mut self, len: u32, room: u32) {
        for patch in &mut self.patches {
            patch.bits = patch.bits.part(0, len, room);
        }
    }

    /// The same holdings after a run of `len` was cut before `at`: those of its head, those of its tail.
    pub(crate) fn split(&self, at: u32, len: u32) -> (Self, Self) {
        let mut head = Self {
            full: self.full.clone(),
            cuts: self.cuts.iter().filter(|c| c.len < at).copied().collect(),
            patches: Box::default(),
        };
        for cut in self.cuts.iter().filter(|c| c.len >= at) {
            head.full.insert(cut.slot);
        }
        let beyond = self.cuts.iter().filter(|c| c.len > at).map(|c| Cut {
            slot: c.slot,
            len: c.len - at,
        });
        let mut tail = Self {
            full: self.full.clone(),
            cuts: beyond.collect(),
            patches: Box::default(),
        };
        for Patch { slot, bits } in &self.patches {
            head.set_bits(*slot, bits.part(0, at, 0), at);
            tail.set_bits(*slot, bits.part(at, len, 0), len - at);
        }
        (head, tail)
    }

    /// The same holdings after a run was made `len` blocks long, beyond which nobody holds any.
    pub(crate) fn shorten(&mut self, len: u32) {
        let cuts = self.cuts.iter().filter(|c| c.len == len);
        let patches = self.patches.iter();
        let patches = patches.filter(|p| p.bits.first_clear(0, len) == len);
        let complete: Vec<u32> = cuts
            .map(|c| c.slot)
            .chain(patches.map(|p| p.slot))
            .collect();
        for slot in complete {
            self.set(slot, len, len);
        }
    }

    /// One more than the last position of a run of `len` that anybody holds.
    pub(crate) fn reach(&self, len: u32) -> u32 {
        if !self.full.is_empty() {
            return len;
        }
        let cuts = self.cuts.iter().map(|c| c.len);
        let patches = self.patches.iter().map(|p| p.bits.reach(len));
        cuts.chain(patches).max().unwrap_or(0)
    }

    /// Whether nobody else holds anything and this rank not only the head.
    pub(crate) fn is_sole(&self, slot: u32) -> bool {
        self.cuts.is_empty()
            && match &*self.patches {
                [] => self.full.has(slot) && self.full.len() == 1,
                [only] => only.slot == slot && self.full.is_empty(),
                _ => false,
            }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.cuts.is_empty() && self.patches.is_empty() && self.full.is_empty()
    }

    /// Every rank that holds something, with what of a run of `len` blocks.
    pub(crate) fn iter(&self, len: u32) -> impl Iterator<Item = (u32, Coverage<'_>)> + '_ {
        let full = self
            .full
            .iter()
            .map(move |slot| (slot, Coverage::Head(len)));
        let cuts = self.cuts.iter().map(|c| (c.slot, Coverage::Head(c.len)));
        let patches = self
            .patches
            .iter()
            .map(|p| (p.slot, Coverage::Bits(&p.bits)));
        full.chain(cuts).chain(patches)
    }

    /// Bytes on the heap.
    pub(crate) fn heap(&self) -> usize {
        let bits: usize = self.patches.iter().map(|p| p.bits.bytes()).sum();
        size_of_val(&*self.full.more)
            + size_of_val(&*self.cuts)
            + size_of_val(&*self.patches)
            + bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::Rng;

    const LEN: u32 = 9;

    fn random(rng: &mut Rng) -> (Owners, Vec<[bool; LEN as usize]>) {
        let (mut owners, mut truth) = (Owners::default(), vec![[false; LEN as usize]; 130]);
        for _ in 0..100 {
            let slot = rng.below(130) as u32;
            let row = &mut truth[slot as usize];
            if rng.below(2) == 0 {
                let extent = rng.below(u64::from(LEN) + 1) as u32;
                owners.set(slot, extent, LEN);
                *row = std::array::from_fn(|i| (i as u32) < extent);
            } else {
                let word = rng.next_u64() & ((1 << LEN) - 1);
                owners.set_bits(slot, Bits::from_words(&[word]), LEN);
                *row = std::array::from_fn(|i| word >> i & 1 != 0);
            }
        }
        (owners, truth)
    }

    /// Holdings of 130 ranks in a run of 9 blocks against arrays, through cuts of the run.
    #[test]
    fn holdings_agree_with_arrays() {
        let mut rng = Rng::new(3);
        for _ in 0..100 {
            let (owners, truth) = random(&mut rng);
            let at = 1 + rng.below(u64::from(LEN) - 1) as u32;
            let (head, tail) = owners.split(at, LEN);
            for (slot, row) in (0u32..).zip(&truth) {
                for (pos, &held) in (0u32..).zip(row) {
                    assert_eq!(owners.held(slot, LEN).has(pos), held);
                    let after = match pos.checked_sub(at) {
                        None => head.held(slot, at).has(pos),
                        Some(pos) => tail.held(slot, LEN - at).has(pos),
                    };
                    assert_eq!(after, held, "block {pos} of {slot} cut before {at}");
                }
                let count = row.iter().filter(|held| **held).count();
                assert_eq!(owners.held(slot, LEN).count(0, LEN) as usize, count);
                assert_eq!(owners.held(slot, LEN).is_nothing(), count == 0);
            }
            let last = |row: &[bool; 9]| row.iter().rposition(|held| *held).map_or(0, |i| i + 1);
            let reach = truth.iter().map(last).max().unwrap_or(0);
            assert_eq!(owners.reach(LEN) as usize, reach);
            let holders = truth.iter().filter(|row| row.contains(&true)).count();
            assert_eq!(owners.iter(LEN).count(), holders);
        }
    }
}
