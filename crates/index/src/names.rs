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
//! noticed by [`Names::tend`], so that neither is asked for each name.

/// Longest run: what the position field can count.
pub(crate) const RUN_MAX: usize = 1 << POSITION_BITS;

const PARTS: usize = 256;
const POSITION_BITS: u32 = 10;
/// What of an entry is the highest bits of its name's hash.
const PRINT: u64 = !(u64::MAX >> 22);
/// Words of a bucket: one that tells about the entries, and the entries.
const WORDS: usize = 8;
/// Entries in a bucket.
const WIDE: usize = WORDS - 1;
/// The lowest bit of each entry's byte in a bucket's first word: whether there is an entry.
const LOW: u64 = 0x0101_0101_0101_0100;
/// The highest one.
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

/// Buckets of a part that has any.
const SIZE_MIN: usize = 2;
/// Names that are forgotten before a part is looked at that may have become sparse.
const TEND_EVERY: usize = 8;

/// The table.
#[derive(Debug)]
pub(crate) struct Names {
    parts: Box<[Part; PARTS]>,
    /// The part to be looked at next, and how many names were forgotten since the last.
    tended: u8,
    forgotten: usize,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            parts: Box::new([const { Part::EMPTY }; PARTS]),
            tended: 0,
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
        let part = &self.parts[key.part()];
        let bucket = part.buckets.get(part.home(key.0))?;
        match candidates(bucket, key.tag()) {
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
        self.parts[key.part()].insert(key, place.pack(), is)
    }

    /// Points `name` from one place to another; does nothing if it did not point there.
    #[inline]
    pub(crate) fn relocate(&mut self, name: u64, from: Place, to: Place) {
        let key = Key::of(name);
        let part = &mut self.parts[key.part()];
        if let Some((at, i)) = part.position(key, key.entry(from.pack())) {
            part.buckets[at][i] = key.entry(to.pack());
        }
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
            if !part.insert_easily(key, place)
                && part.insert_slowly(key, place, |p| is(p, n)).is_err()
            {
                let done = (place - first.pack()) as usize;
                let claimed: Vec<u64> = blocks[..done].iter().map(name).collect();
                self.forget(&claimed, first);
                return false;
            }
        }
        true
    }

    /// Forgets these names where they point to the blocks from `first` on.
    #[inline(never)]
    pub(crate) fn forget(&mut self, names: &[u64], first: Place) {
        for (place, &name) in (first.pack()..).zip(names) {
            let key = Key::of(name);
            let part = &mut self.parts[key.part()];
            if !part.forget_easily(key, key.entry(place)) {
                part.forget_slowly(key, key.entry(place));
            }
        }
        self.forgotten += names.len();
        if self.forgotten >= TEND_EVERY {
            self.tend();
        }
    }

    /// Gives back memory of parts that have become sparse: one part for each [`TEND_EVERY`] names that were
    /// forgotten, in turn.
    #[inline(never)]
    fn tend(&mut self) {
        let parts = (self.forgotten / TEND_EVERY).min(PARTS);
        self.forgotten %= TEND_EVERY;
        for _ in 0..parts {
            self.tended = self.tended.wrapping_add(1);
            self.parts[usize::from(self.tended)].shrink();
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
    let free = !bucket[0] & LOW;
    if free != 0 {
        bucket[word_of(free)] = entry;
        bucket[0] |= tag << free.trailing_zeros();
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
#[repr(align(64))]
struct Part {
    buckets: Vec<Bucket>,
    used: usize,
    /// `used` at which to grow.
    full: usize,
    /// How many bits of a hash are not the number of its home. There are a power of two of buckets, from
    /// two on.
    shift: u32,
}

impl Part {
    const EMPTY: Self = Self {
        buckets: Vec::new(),
        used: 0,
        full: 0,
        shift: 63,
    };

    /// The home of a name with this hash, or of an entry: the highest bits are the same.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (hash >> self.shift) as usize
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
        self.find_from(self.home(key.0), key, is)
    }

    #[inline]
    fn find_from(&self, mut at: usize, key: Key, is: impl Fn(Place) -> bool) -> Option<Place> {
        loop {
            let bucket = self.buckets.get(at)?;
            let wanted = |entry: u64| key.agrees(entry) && is(Place::unpack(entry));
            if let Some(i) = position(bucket, key.tag(), wanted) {
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
        let mut at = self.home(key.0);
        loop {
            let bucket = self.buckets.get(at)?;
            if let Some(i) = position(bucket, key.tag(), |entry| entry == wanted) {
                return Some((at, i));
            }
            if !was_passed(bucket) {
                return None;
            }
            at = self.next(at);
        }
    }

    fn insert(&mut self, key: Key, place: u64, is: impl Fn(Place) -> bool) -> Result<(), Place> {
        if self.insert_easily(key, place) {
            return Ok(());
        }
        self.insert_slowly(key, place, is)
    }

    /// Inserts a name if it is certainly not there and its home has room for it.
    #[inline(always)]
    fn insert_easily(&mut self, key: Key, place: u64) -> bool {
        let home = self.home(key.0);
        if let Some(bucket) = self.buckets.get_mut(home)
            && candidates(bucket, key.tag()) | bucket[0] & PASSED == 0
            && push(bucket, key.tag(), key.entry(place))
        {
            self.used += 1;
            return true;
        }
        false
    }

    /// As [`Part::insert`], where the name may be there already or the bucket is full.
    #[inline(never)]
    fn insert_slowly(
        &mut self,
        key: Key,
        place: u64,
        is: impl Fn(Place) -> bool,
    ) -> Result<(), Place> {
        if let Some(taken) = self.find(key, is) {
            return Err(taken);
        }
        if self.used >= self.full {
            self.grow();
        }
        self.used += 1;
        self.put(self.home(key.0), key.tag(), key.entry(place));
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

    /// Takes an entry out if it is where it most likely is.
    #[inline(always)]
    fn forget_easily(&mut self, key: Key, entry: u64) -> bool {
        let home = self.home(key.0);
        if let Some(bucket) = self.buckets.get_mut(home)
            && let candidates = candidates(bucket, key.tag())
            && candidates != 0
            && let i = word_of(candidates)
            && bucket[i] == entry
        {
            take_out(bucket, i);
            self.used -= 1;
            return true;
        }
        false
    }

    /// Takes an entry out, if it is there.
    #[inline(never)]
    fn forget_slowly(&mut self, key: Key, entry: u64) {
        let Some((at, i)) = self.position(key, entry) else {
            return;
        };
        let mut passed = self.home(key.0);
        while passed != at {
            unpass(&mut self.buckets[passed]);
            passed = self.next(passed);
        }
        take_out(&mut self.buckets[at], i);
        self.used -= 1;
    }

    /// Doubles the buckets: what was in one goes to two neighbours, next to each other in the new list, which
    /// is therefore written once and in order. Both are copies in which only the entries count that belong
    /// there.
    #[cold]
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.buckets);
        let size = (old.len() * 2).max(SIZE_MIN);
        self.set_size(size);
        let mut new: Vec<Bucket> = Vec::with_capacity(size);
        let mut strays: Vec<(u64, u64)> = Vec::new();
        let mut passed = old.last().is_some_and(was_passed);
        for (i, bucket) in old.iter().enumerate() {
            let mut kept = *bucket;
            if passed {
                self.take_strays(i, &mut kept, &mut strays);
            }
            passed = was_passed(bucket);
            let upper = (1..WORDS).fold(0, |upper, at| {
                upper | (kept[at] >> self.shift & 1) << (at * 8)
            });
            let upper = upper * 0xFF;
            let (mut first, mut second) = (kept, kept);
            first[0] = kept[0] & !upper & !PASSED;
            second[0] = kept[0] & upper;
            new.extend([first, second]);
        }
        new.resize(size, [0; WORDS]);
        self.buckets = new;
        for (tag, entry) in strays {
            self.put(self.home(entry), tag, entry);
        }
    }

    /// Takes those entries out of what was bucket `i` that had only found room there.
    fn take_strays(&self, i: usize, bucket: &mut Bucket, strays: &mut Vec<(u64, u64)>) {
        let mut left = bucket[0] & LOW;
        while left != 0 {
            let at = word_of(left);
            if self.home(bucket[at]) / 2 != i {
                let tag = bucket[0] >> left.trailing_zeros() & 0xFF;
                strays.push((tag, bucket[at]));
                take_out(bucket, at);
            }
            left &= left - 1;
        }
    }

    /// Halves the buckets as often as there are few entries in them.
    fn shrink(&mut self) {
        let mut size = self.buckets.len();
        while size > SIZE_MIN && self.used < Self::room(size) / 4 {
            size /= 2;
        }
        if self.used == 0 {
            size = 0;
        }
        if size < self.buckets.len() {
            self.resize(size);
        }
    }

    #[cold]
    fn resize(&mut self, size: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![[0; WORDS]; size]);
        self.set_size(size);
        for bucket in &old {
            let mut left = bucket[0] & LOW;
            while left != 0 {
                let at = word_of(left);
                let (tag, entry) = (bucket[0] >> left.trailing_zeros() & 0xFF, bucket[at]);
                self.put(self.home(entry), tag, entry);
                left &= left - 1;
            }
        }
    }

    /// Entries at which so many buckets are full: two places in five stay free, so that few entries pass a
    /// bucket.
    fn room(buckets: usize) -> usize {
        buckets * WIDE * 3 / 5
    }

    fn set_size(&mut self, buckets: usize) {
        self.full = Self::room(buckets);
        self.shift = 64 - buckets.max(SIZE_MIN).ilog2();
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
        for part in names.parts.iter() {
            assert_eq!(part.used, 0);
        }
        // Every part is looked at once more.
        let others: Vec<u64> = (0..(PARTS * TEND_EVERY) as u64)
            .map(|i| i + 20_000)
            .collect();
        names.forget(&others, Place { run: 1, pos: 0 });
        assert_eq!(names.bytes(), Names::default().bytes());
    }
}
