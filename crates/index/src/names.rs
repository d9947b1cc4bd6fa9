//! Which block has this name? One table for all ranks, from engine hash to (run, position).
//!
//! An entry takes eight bytes: the highest 22 bits of the name's hash, the run, the position. The name itself stays
//! with its run; the caller compares it where the 22 bits agree. An entry knows its home from those bits
//! alone, so that growing touches no run.
//!
//! Entries live in buckets of eight words, seven to a bucket. The first word has a byte with seven more
//! bits of the hash for each, compared all at once, and counts the entries that found the bucket full and
//! went on to the next. A search ends at the first bucket that nobody passed, so a removal leaves no
//! tombstone and moves nothing.
//!
//! The table is cut into [`PARTS`] parts that grow and shrink on their own: no insertion moves more than
//! one part's entries. A part grows when a bucket is full and the part is too; one that has become sparse is
//! noticed by [`Names::shrink_sparse_parts`], so that neither is asked for each name.

mod part;

use part::Part;

/// Longest run: what the position field can count.
pub(crate) const RUN_MAX: usize = 1 << POSITION_BITS;

const PARTS: usize = 256;
const POSITION_BITS: u32 = 10;
/// What of an entry is the highest bits of its name's hash.
const PRINT: u64 = !(u64::MAX >> 22);

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) run: u32,
    pub(crate) pos: u32,
}

impl Place {
    /// As the low bits of an entry; those of the next block are one more.
    #[inline]
    fn pack(self) -> u64 {
        u64::from(self.run) << POSITION_BITS | u64::from(self.pos)
    }

    #[inline]
    fn unpack(entry: u64) -> Self {
        Self {
            run: (entry >> POSITION_BITS) as u32,
            pos: entry as u32 & (RUN_MAX as u32 - 1),
        }
    }
}

/// Names that are forgotten before a part is looked at that may have become sparse.
const FORGOTTEN_PER_CHECK: usize = 8;

/// The table.
#[derive(Debug)]
pub(crate) struct Names {
    parts: Box<[Part; PARTS]>,
    /// The part to be looked at next, and how many names were forgotten since the last.
    next_part: u8,
    forgotten: usize,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            parts: Box::new([const { Part::EMPTY }; PARTS]),
            next_part: 0,
            forgotten: 0,
        }
    }
}

/// A name's hash: the highest bits say which bucket of a part, others which part, the lowest are the tag.
#[derive(Clone, Copy)]
struct Key(u64);

impl Key {
    #[inline(always)]
    fn of(name: u64) -> Self {
        // Names may be small numbers: every bit of the product's halves depends on all of the name's.
        let wide = u128::from(name) * u128::from(0x9E37_79B9_7F4A_7C15_u64);
        Self((wide >> 64) as u64 ^ wide as u64)
    }

    #[inline(always)]
    fn part(self) -> usize {
        (self.0 >> 32) as usize % PARTS
    }

    /// Seven bits, and one that is always set.
    #[inline(always)]
    fn tag(self) -> u64 {
        self.0 & 0xFF | 1
    }

    /// The entry of a block with this name.
    #[inline(always)]
    fn entry(self, place: u64) -> u64 {
        self.0 & PRINT | place
    }

    /// Whether an entry can be of this name.
    #[inline(always)]
    fn agrees(self, entry: u64) -> bool {
        (self.0 ^ entry) & PRINT == 0
    }
}

impl Names {
    /// The block called `name`; `is` says whether a block has that name.
    #[inline]
    pub(crate) fn find(&self, name: u64, is: impl Fn(Place) -> bool) -> Option<Place> {
        let key = Key::of(name);
        self.parts[key.part()].find(key, is)
    }

    /// The block that most likely is called `name`, if there is one.
    #[inline]
    pub(crate) fn guess(&self, name: u64) -> Option<Place> {
        let key = Key::of(name);
        self.parts[key.part()].guess(key)
    }

    /// Calls the block at `place` `name`, unless another has that name already, which is returned.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        name: u64,
        place: Place,
        is: impl Fn(Place) -> bool,
    ) -> Result<(), Place> {
        let (key, place) = (Key::of(name), place.pack());
        let part = &mut self.parts[key.part()];
        if part.insert_fast(key, place) {
            return Ok(());
        }
        part.insert_slow(key, place, is)
    }

    /// Calls blocks from `first` on by their names, unless another block has one of them already: then
    /// nothing changes and false is returned.
    ///
    /// One loop, slow cases within: left and entered again at each of them it took half as long again, as
    /// the processor then waited for each cache miss by itself.
    #[inline(never)]
    pub(crate) fn claim<B>(
        &mut self,
        blocks: &[B],
        name: impl Fn(&B) -> u64 + Copy,
        first: Place,
        is: impl Fn(Place, u64) -> bool,
    ) -> bool {
        for (place, block) in (first.pack()..).zip(blocks) {
            let n = name(block);
            let key = Key::of(n);
            let part = &mut self.parts[key.part()];
            if !part.insert_fast(key, place) && part.insert_slow(key, place, |p| is(p, n)).is_err()
            {
                let done = (place - first.pack()) as usize;
                let claimed: Vec<u64> = blocks[..done].iter().map(name).collect();
                self.forget(&claimed, first);
                return false;
            }
        }
        true
    }

    /// Points the names of blocks from `from` on to those from `to` on, where they did point there.
    pub(crate) fn relocate(&mut self, names: &[u64], from: Place, to: Place) {
        for ((from, to), &name) in (from.pack()..).zip(to.pack()..).zip(names) {
            let key = Key::of(name);
            self.parts[key.part()].replace(key, key.entry(from), key.entry(to));
        }
    }

    /// Forgets these names where they point to the blocks from `first` on.
    #[inline(never)]
    pub(crate) fn forget(&mut self, names: &[u64], first: Place) {
        for (place, &name) in (first.pack()..).zip(names) {
            let key = Key::of(name);
            let part = &mut self.parts[key.part()];
            if !part.forget_fast(key, key.entry(place)) {
                part.forget_slow(key, key.entry(place));
            }
        }
        self.forgotten += names.len();
        if self.forgotten >= FORGOTTEN_PER_CHECK {
            self.shrink_sparse_parts();
        }
    }

    /// Gives back memory of parts that have become sparse: one part for each [`FORGOTTEN_PER_CHECK`] names that were
    /// forgotten, in turn.
    #[inline(never)]
    fn shrink_sparse_parts(&mut self) {
        let parts = (self.forgotten / FORGOTTEN_PER_CHECK).min(PARTS);
        self.forgotten %= FORGOTTEN_PER_CHECK;
        for _ in 0..parts {
            self.next_part = self.next_part.wrapping_add(1);
            self.parts[usize::from(self.next_part)].shrink();
        }
    }

    /// Forgets all names.
    pub(crate) fn clear(&mut self) {
        for part in self.parts.iter_mut() {
            *part = Part::EMPTY;
        }
    }

    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> usize {
        let parts: usize = self.parts.iter().map(Part::bytes).sum();
        parts + size_of::<[Part; PARTS]>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::Rng;
    use std::collections::HashMap;

    /// Random inserts, removals, moves and lookups against a plain map, over few names.
    #[test]
    fn agrees_with_a_map_and_gives_its_memory_back() {
        let mut rng = Rng::new(5);
        let mut names = Names::default();
        let mut truth: HashMap<u64, Place> = HashMap::new();
        for step in 0..200_000_u32 {
            let name = rng.below(20_000);
            let place = Place {
                run: 1 + step,
                pos: step % RUN_MAX as u32,
            };
            let known = truth.get(&name).copied();
            let is = |p: Place| known == Some(p);
            assert_eq!(names.find(name, is), known);
            match (rng.below(3), known) {
                (0, None) => {
                    assert_eq!(names.insert(name, place, is), Ok(()));
                    truth.insert(name, place);
                }
                (0, Some(old)) => assert_eq!(names.insert(name, place, is), Err(old)),
                (1, Some(old)) => {
                    names.relocate(&[name], old, place);
                    truth.insert(name, place);
                }
                (2, Some(old)) => {
                    names.forget(&[name], place);
                    assert_eq!(names.find(name, is), known);
                    names.forget(&[name], old);
                    truth.remove(&name);
                }
                _ => {}
            }
        }
        for (name, place) in truth.drain() {
            names.forget(&[name], place);
        }
        assert!(names.parts.iter().all(|part| part.used == 0));
        // Every part is looked at once more.
        let others: Vec<u64> = (0..(PARTS * FORGOTTEN_PER_CHECK) as u64)
            .map(|i| i + 20_000)
            .collect();
        names.forget(&others, Place { run: 1, pos: 0 });
        assert_eq!(names.bytes(), Names::default().bytes());
    }
}
