//! Which block has this name? One table for all ranks, from engine hash to (run, position).
//!
//! An entry takes eight bytes: 22 bits of the name's hash, the run, the position. The name itself stays
//! with its run; the caller compares it where the 22 bits agree. An entry knows its home from those bits
//! alone, so that growing touches no run.
//!
//! Entries live in buckets of eight words, seven to a bucket. The first word has a byte with seven more
//! bits of the hash for each, compared all at once, and counts the entries that found the bucket full and
//! went on to the next. A search ends at the first bucket that nobody passed, so a removal leaves no
//! tombstone and moves nothing.
//!
//! The table is cut into [`PARTS`] parts that grow and shrink on their own: no operation moves more than
//! one part's entries.

use crate::mix::mix;

/// Longest run: what the position field can count.
pub(crate) const RUN_MAX: usize = 1 << POSITION_BITS;

const PARTS: usize = 256;
const POSITION_BITS: u32 = 10;
const PRINT_BITS: u32 = 22;
const PRINT_SHIFT: u32 = 64 - PRINT_BITS;
/// Words of a bucket: one that tells about the entries, and the entries.
const WORDS: usize = 8;
/// Entries in a bucket.
const WIDE: usize = WORDS - 1;
/// The lowest bit of each entry's byte in a bucket's first word.
const LOW: u64 = 0x0101_0101_0101_0100;
/// The highest one: whether there is an entry.
const HIGH: u64 = LOW << 7;
/// How many entries passed the bucket: the lowest byte. A bucket that so many passed that the byte is full
/// counts as passed until its part is resized.
const PASSED: u64 = 0xFF;

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) run: u32,
    pub(crate) pos: u32,
}

impl Place {
    #[inline]
    fn pack(self, print: u64) -> u64 {
        print << PRINT_SHIFT | u64::from(self.run) << POSITION_BITS | u64::from(self.pos)
    }

    #[inline]
    fn unpack(entry: u64) -> Self {
        Self {
            run: (entry >> POSITION_BITS) as u32,
            pos: entry as u32 & (RUN_MAX as u32 - 1),
        }
    }
}

/// The table.
#[derive(Debug)]
pub(crate) struct Names {
    parts: Box<[Part; PARTS]>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            parts: Box::new([const { Part::EMPTY }; PARTS]),
        }
    }
}

/// What of a name's hash says where it goes.
#[derive(Clone, Copy)]
struct Key {
    part: u8,
    print: u64,
    /// Seven bits, and one that is always set.
    tag: u64,
}

impl Key {
    #[inline]
    fn of(name: u64) -> Self {
        let hash = mix(name);
        Self {
            part: (hash >> 32) as u8,
            print: hash >> PRINT_SHIFT,
            tag: hash & 0x7F | 0x80,
        }
    }
}

impl Names {
    /// The block called `name`; `is` says whether a block has that name.
    #[inline]
    pub(crate) fn find(&self, name: u64, is: impl Fn(Place) -> bool) -> Option<Place> {
        let key = Key::of(name);
        self.parts[usize::from(key.part)].find(key, is)
    }

    /// The block that most likely is called `name`, if there is one.
    #[inline]
    pub(crate) fn guess(&self, name: u64) -> Option<Place> {
        let key = Key::of(name);
        let part = &self.parts[usize::from(key.part)];
        let bucket = part.buckets.get(part.home(key.print))?;
        match candidates(bucket, key.tag) {
            0 => None,
            found => Some(Place::unpack(bucket[word_of(found)])),
        }
    }

    /// Calls the block at `place` `name`, unless another has that name already, which is returned.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        name: u64,
        place: Place,
        is: impl Fn(Place) -> bool,
    ) -> Result<(), Place> {
        let key = Key::of(name);
        self.parts[usize::from(key.part)].insert(key, place, is)
    }

    /// Points `name` from one place to another; does nothing if it did not point there.
    #[inline]
    pub(crate) fn relocate(&mut self, name: u64, from: Place, to: Place) {
        let key = Key::of(name);
        let part = &mut self.parts[usize::from(key.part)];
        if let Some((at, i)) = part.position(key, from.pack(key.print)) {
            part.buckets[at][i] = to.pack(key.print);
        }
    }

    /// Calls the blocks from `first` on by these names, unless another block has one of them already: then
    /// nothing changes and false is returned.
    pub(crate) fn claim(
        &mut self,
        names: impl Iterator<Item = u64> + Clone,
        first: Place,
        is: impl Fn(Place, u64) -> bool,
    ) -> bool {
        let mut place = first;
        for name in names.clone() {
            if self.insert(name, place, |p| is(p, name)).is_err() {
                self.forget(names.take((place.pos - first.pos) as usize), first);
                return false;
            }
            place.pos += 1;
        }
        true
    }

    /// Forgets these names where they point to the blocks from `first` on.
    #[inline]
    pub(crate) fn forget(&mut self, names: impl Iterator<Item = u64>, first: Place) {
        let mut place = first;
        for name in names {
            let key = Key::of(name);
            self.parts[usize::from(key.part)].forget(key, place.pack(key.print));
            place.pos += 1;
        }
    }

    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> usize {
        let buckets: usize = self.parts.iter().map(|p| p.buckets.capacity()).sum();
        buckets * size_of::<Bucket>() + size_of::<[Part; PARTS]>()
    }
}

/// The word that tells about the entries, then the entries. Not a type of its own, as a vector of arrays
/// of integers is made from memory that is zero already.
type Bucket = [u64; WORDS];

/// Where the entries with this tag are, and perhaps others: the high bits of their bytes.
#[inline]
fn candidates(bucket: &Bucket, tag: u64) -> u64 {
    let differ = bucket[0] ^ (tag * LOW);
    differ.wrapping_sub(LOW) & !differ & HIGH
}

/// The byte, and so the word of the bucket, of the lowest bit that is set.
#[inline]
fn word_of(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8 % WORDS
}

/// Which word is an entry with this tag that `is` wanted.
#[inline]
fn position(bucket: &Bucket, tag: u64, is: impl Fn(u64) -> bool) -> Option<usize> {
    let mut left = candidates(bucket, tag);
    while left != 0 {
        let i = word_of(left);
        if is(bucket[i]) {
            return Some(i);
        }
        left &= left - 1;
    }
    None
}

/// Adds an entry; false if there is no room.
#[inline]
fn push(bucket: &mut Bucket, tag: u64, entry: u64) -> bool {
    let free = !bucket[0] & HIGH;
    if free != 0 {
        let i = word_of(free);
        bucket[i] = entry;
        bucket[0] |= tag << (i * 8);
    }
    free != 0
}

#[inline]
fn take_out(bucket: &mut Bucket, i: usize) {
    bucket[0] &= !(0xFF << (i * 8));
}

#[inline]
fn was_passed(bucket: &Bucket) -> bool {
    bucket[0] & PASSED != 0
}

fn pass(bucket: &mut Bucket) {
    bucket[0] += u64::from(bucket[0] & PASSED != PASSED);
}

fn unpass(bucket: &mut Bucket) {
    bucket[0] -= u64::from(bucket[0] & PASSED != PASSED);
}

#[derive(Debug)]
struct Part {
    buckets: Vec<Bucket>,
    used: usize,
    /// `used` at which to grow.
    full: usize,
    /// `used` below which to shrink.
    sparse: usize,
    /// What of a print is not the number of its home. There are a power of two of buckets.
    shift: u32,
}

impl Part {
    const EMPTY: Self = Self {
        buckets: Vec::new(),
        used: 0,
        full: 0,
        sparse: 0,
        shift: PRINT_BITS,
    };

    #[inline]
    fn home(&self, print: u64) -> usize {
        (print >> self.shift) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() {
            0
        } else {
            at + 1
        }
    }

    #[inline]
    fn find(&self, key: Key, is: impl Fn(Place) -> bool) -> Option<Place> {
        self.find_from(self.home(key.print), key, is)
    }

    #[inline]
    fn find_from(&self, mut at: usize, key: Key, is: impl Fn(Place) -> bool) -> Option<Place> {
        loop {
            let bucket = self.buckets.get(at)?;
            let wanted = |entry: u64| entry >> PRINT_SHIFT == key.print && is(Place::unpack(entry));
            if let Some(i) = position(bucket, key.tag, wanted) {
                return Some(Place::unpack(bucket[i]));
            }
            if !was_passed(bucket) {
                return None;
            }
            at = self.next(at);
        }
    }

    /// Where exactly this entry is.
    fn position(&self, key: Key, wanted: u64) -> Option<(usize, usize)> {
        let mut at = self.home(key.print);
        loop {
            let bucket = self.buckets.get(at)?;
            if let Some(i) = position(bucket, key.tag, |entry| entry == wanted) {
                return Some((at, i));
            }
            if !was_passed(bucket) {
                return None;
            }
            at = self.next(at);
        }
    }

    #[inline(always)]
    fn insert(&mut self, key: Key, place: Place, is: impl Fn(Place) -> bool) -> Result<(), Place> {
        let home = self.home(key.print);
        if self.used < self.full
            && let Some(bucket) = self.buckets.get_mut(home)
            && !was_passed(bucket)
            && candidates(bucket, key.tag) == 0
            && push(bucket, key.tag, place.pack(key.print))
        {
            self.used += 1;
            return Ok(());
        }
        self.insert_slowly(key, place, is)
    }

    /// As [`Part::insert`], where the name may be there already, or the bucket or the part is full.
    #[inline(never)]
    fn insert_slowly(
        &mut self,
        key: Key,
        place: Place,
        is: impl Fn(Place) -> bool,
    ) -> Result<(), Place> {
        if let Some(taken) = self.find(key, is) {
            return Err(taken);
        }
        if self.used == self.full {
            self.resize((self.buckets.len() * 2).max(1));
        }
        self.used += 1;
        self.put(self.home(key.print), key.tag, place.pack(key.print));
        Ok(())
    }

    /// Adds an entry to the first bucket from its home on that has room.
    #[inline]
    fn put(&mut self, mut at: usize, tag: u64, entry: u64) {
        loop {
            let bucket = &mut self.buckets[at];
            if push(bucket, tag, entry) {
                return;
            }
            pass(bucket);
            at = self.next(at);
        }
    }

    /// Takes an entry out, if it is there.
    #[inline(always)]
    fn forget(&mut self, key: Key, entry: u64) {
        let home = self.home(key.print);
        if let Some(bucket) = self.buckets.get_mut(home)
            && let candidates = candidates(bucket, key.tag)
            && candidates != 0
            && let i = word_of(candidates)
            && bucket[i] == entry
            && self.used > self.sparse
        {
            take_out(bucket, i);
            self.used -= 1;
            return;
        }
        self.forget_slowly(key, entry);
    }

    /// As [`Part::forget`], where the entry may be in a later bucket or the part is to shrink.
    #[inline(never)]
    fn forget_slowly(&mut self, key: Key, entry: u64) {
        let Some((at, i)) = self.position(key, entry) else {
            return;
        };
        let mut passed = self.home(key.print);
        while passed != at {
            unpass(&mut self.buckets[passed]);
            passed = self.next(passed);
        }
        take_out(&mut self.buckets[at], i);
        self.used -= 1;
        if self.used < self.sparse {
            self.resize(self.buckets.len() / 2);
        }
    }

    #[cold]
    fn resize(&mut self, buckets: usize) {
        let buckets = if self.used == 0 && self.full > 0 {
            0
        } else {
            buckets.max(1)
        };
        let old = std::mem::replace(&mut self.buckets, vec![[0; WORDS]; buckets]);
        // Two places in five stay free, so that few entries pass a bucket.
        self.full = buckets * WIDE * 3 / 5;
        self.sparse = (self.full / 4).max(1).min(self.full);
        self.shift = PRINT_BITS - buckets.max(1).ilog2();
        for bucket in &old {
            let mut left = bucket[0] & HIGH;
            while left != 0 {
                let i = word_of(left);
                let (tag, entry) = (bucket[0] >> (i * 8) & 0xFF, bucket[i]);
                self.put(self.home(entry >> PRINT_SHIFT), tag, entry);
                left &= left - 1;
            }
        }
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
                    names.relocate(name, old, place);
                    truth.insert(name, place);
                }
                (2, Some(old)) => {
                    names.forget([name].into_iter(), place);
                    assert_eq!(names.find(name, is), known);
                    names.forget([name].into_iter(), old);
                    truth.remove(&name);
                }
                _ => {}
            }
        }
        for (name, place) in truth.drain() {
            names.forget([name].into_iter(), place);
        }
        assert_eq!(names.bytes(), Names::default().bytes());
    }
}
