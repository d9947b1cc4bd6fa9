//! One part of the table of names: buckets of entries, and how it grows and shrinks.

use super::{Key, Place};

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
/// Buckets of a part that has any.
const SIZE_MIN: usize = 2;

/// The word that tells about the entries, then the entries. Not a type of its own, as a vector of arrays
/// of integers is made from memory that is zero already.
type Bucket = [u64; WORDS];

/// Where the entries with this tag are: the high bits of their bytes. The lowest is always one; a higher one
/// may be a free place, if the tag has no bit but the lowest (the subtraction borrows from the next byte, and
/// only a free one differs from such a tag by just 1).
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
        // What was taken out is still in its word.
        if is(bucket[i]) && bucket[0] >> (i * 8) & 1 != 0 {
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
pub(super) struct Part {
    buckets: Vec<Bucket>,
    pub(super) used: usize,
    /// `used` at which to grow.
    full: usize,
    /// How many bits of a hash are not the number of its home. There are a power of two of buckets, from
    /// two on.
    shift: u32,
}

impl Part {
    pub(super) const EMPTY: Self = Self {
        buckets: Vec::new(),
        used: 0,
        full: 0,
        shift: 63,
    };

    /// Bytes of the buckets.
    pub(super) fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

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

    /// The block that most likely has this name, if there is one.
    #[inline]
    pub(super) fn guess(&self, key: Key) -> Option<Place> {
        let bucket = self.buckets.get(self.home(key.0))?;
        match candidates(bucket, key.tag()) {
            0 => None,
            found => Some(Place::unpack(bucket[word_of(found)])),
        }
    }

    #[inline]
    pub(super) fn find(&self, key: Key, is: impl Fn(Place) -> bool) -> Option<Place> {
        self.find_from(self.home(key.0), key, is)
    }

    /// Ends after one round: in a small part every bucket may have been passed.
    #[inline]
    fn find_from(&self, mut at: usize, key: Key, is: impl Fn(Place) -> bool) -> Option<Place> {
        let first = at;
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
            if at == first {
                return None;
            }
        }
    }

    /// Changes an entry, if it is there.
    #[inline]
    pub(super) fn replace(&mut self, key: Key, old: u64, new: u64) {
        if let Some((at, i)) = self.position(key, old) {
            self.buckets[at][i] = new;
        }
    }

    /// Where exactly this entry is.
    fn position(&self, key: Key, wanted: u64) -> Option<(usize, usize)> {
        let home = self.home(key.0);
        let mut at = home;
        loop {
            let bucket = self.buckets.get(at)?;
            if let Some(i) = position(bucket, key.tag(), |entry| entry == wanted) {
                return Some((at, i));
            }
            if !was_passed(bucket) {
                return None;
            }
            at = self.next(at);
            if at == home {
                return None;
            }
        }
    }

    /// Inserts a name if it is certainly not there and its home has room for it.
    #[inline(always)]
    pub(super) fn insert_fast(&mut self, key: Key, place: u64) -> bool {
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

    /// Inserts a name that may be there already, or whose bucket may be full. A block that has it and of
    /// which `is` says so is returned instead.
    #[inline(never)]
    pub(super) fn insert_slow(
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
    pub(super) fn forget_fast(&mut self, key: Key, entry: u64) -> bool {
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
    pub(super) fn forget_slow(&mut self, key: Key, entry: u64) {
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
    pub(super) fn shrink(&mut self) {
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

    /// Each of two buckets was full once and holds an entry of the other: an absent name is still looked for once, not for ever.
    #[test]
    fn a_search_ends_where_every_bucket_was_passed() {
        let mut part = Part::EMPTY;
        // Highest bit: the bucket; the lowest: different tags.
        let key = |bucket: u64, n: u64| Key(bucket << 63 | (2 * n + 1));
        let insert = |part: &mut Part, key: Key| {
            assert!(part.insert_fast(key, 0) || part.insert_slow(key, 0, |_| true).is_ok());
        };
        for n in 0..8 {
            insert(&mut part, key(0, n));
        }
        assert_eq!(part.buckets.len(), 2);
        for n in 0..7 {
            part.forget_slow(key(0, n), key(0, n).entry(0));
        }
        for n in 0..7 {
            insert(&mut part, key(1, n));
        }
        assert!(part.buckets.iter().all(was_passed), "the case was met");
        let found = |part: &Part, key: Key| part.find(key, |_| true).is_some();
        assert!(found(&part, key(0, 7)) && (0..7).all(|n| found(&part, key(1, n))));
        assert!(!found(&part, key(0, 3)) && !found(&part, key(1, 9)));
        part.forget_slow(key(1, 9), key(1, 9).entry(0));
        insert(&mut part, key(1, 9));
        assert!(found(&part, key(1, 9)) && found(&part, key(0, 7)));
    }

    /// For random buckets and every tag: all entries with the tag are candidates, the lowest candidate is one
    /// of them, and the others that are none are free places, which `position` passes over.
    #[test]
    fn a_free_place_is_never_an_entry() {
        let mut rng = Rng::new(9);
        let mut free_candidates = 0;
        for _ in 0..2_000 {
            let mut bucket: Bucket = std::array::from_fn(|i| i as u64);
            // Few tags, so that they repeat; the lowest byte counts and is no tag.
            let byte = |rng: &mut Rng| [0, 1, 1, 3, 0x81, 0xFF][rng.below(6) as usize];
            bucket[0] = (1..WORDS).fold(rng.below(256), |m, i| m | byte(&mut rng) << (i * 8));
            for tag in (1..256).step_by(2) {
                let mut left = candidates(&bucket, tag);
                let of = |i: usize| bucket[0] >> (i * 8) & 0xFF;
                let truth: Vec<usize> = (1..WORDS).filter(|i| of(*i) == tag).collect();
                assert!(truth.iter().all(|i| left >> (i * 8 + 7) & 1 != 0));
                assert_eq!(truth.first().copied(), (left != 0).then(|| word_of(left)));
                while left != 0 {
                    let i = word_of(left);
                    assert!(of(i) == tag || of(i) == 0 && tag == 1);
                    free_candidates += usize::from(of(i) == 0);
                    let found = position(&bucket, tag, |entry| entry == i as u64);
                    assert_eq!(found, (of(i) == tag).then_some(i));
                    left &= left - 1;
                }
            }
        }
        assert!(free_candidates > 0, "the case was met");
    }
}
