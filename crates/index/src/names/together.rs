//! Names while several writers are at work: by stripe, each behind its lock, in any order of writers.
//!
//! Nobody here knows the blocks' own names (they are with the tree, behind another lock), so an entry that
//! agrees with a name in the bits that entries have *may* be of it. [`Names::claim_together`] therefore takes
//! no name of which there is such an entry, whoever's it is: of a block, of a claim that is not committed
//! yet, or of a block that is gone and not forgotten yet. So two entries never agree unless a writer that was
//! alone saw that their names differ, and nothing that is forgotten here is anybody else's.
//!
//! An entry of a named block is in the table at every moment: a cut changes it in one step.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::part::Part;
use super::{Key, Names, PARTS, Place, TEND_EVERY};
use crate::sync::{Apart, Mutex, MutexGuard, lock_soon};

/// Parts in a stripe.
const ROWS: usize = 16;
const STRIPES: usize = PARTS / ROWS;

/// The parts, each stripe behind a lock; empty ones while a writer is alone.
#[derive(Debug)]
pub(super) struct Stripes {
    all: Box<[Apart<Mutex<Stripe>>; STRIPES]>,
    /// Whether the parts are here.
    spread: bool,
    /// Bytes of the parts' buckets.
    bytes: Apart<AtomicUsize>,
}

/// Parts behind one lock. What changes with every name is next to the lock, and not in the parts: a processor
/// that takes the lock from another one takes over two lines with it, and reads the rest from its own cache.
#[derive(Debug)]
#[repr(C)]
struct Stripe {
    /// By how much more than `used` each part is.
    more: [i32; ROWS],
    /// As in [`Names`], of these parts.
    tended: u32,
    forgotten: u32,
    rows: [Part; ROWS],
}

impl Default for Stripes {
    fn default() -> Self {
        let stripe = |_| {
            Apart(Mutex::new(Stripe {
                more: [0; ROWS],
                tended: 0,
                forgotten: 0,
                rows: [const { Part::EMPTY }; ROWS],
            }))
        };
        Self {
            all: Box::new(std::array::from_fn(stripe)),
            spread: false,
            bytes: Apart::default(),
        }
    }
}

impl Stripes {
    /// Of the stripes themselves.
    pub(super) const BYTES: usize = size_of::<[Apart<Mutex<Stripe>>; STRIPES]>();

    fn lock(&self, stripe: usize) -> MutexGuard<'_, Stripe> {
        lock_soon(&self.all[stripe].0)
    }

    /// Moves the parts here, or back.
    fn swap(&mut self, parts: &mut [Part; PARTS]) {
        for (stripe, parts) in self.all.iter_mut().zip(parts.chunks_exact_mut(ROWS)) {
            let stripe = stripe.0.get_mut().unwrap_or_else(PoisonError::into_inner);
            for row in 0..ROWS {
                stripe.count(row);
            }
            stripe.rows.swap_with_slice(parts);
        }
        self.spread = !self.spread;
    }
}

/// What a name may stand for, before it is compared with the name of the block there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Guess {
    /// For no block.
    #[default]
    Nothing,
    /// For this one or none.
    Perhaps(Place),
    /// For one of several or none.
    OneOf,
}

/// Ends a list.
const END: u32 = u32::MAX;

/// Names by stripe: for each a list of indices, in their order.
struct Grouped {
    heads: [u32; STRIPES],
    keys: Vec<(Key, u32)>,
}

impl Grouped {
    fn new(names: impl DoubleEndedIterator<Item = u64> + ExactSizeIterator) -> Self {
        let mut keys: Vec<(Key, u32)> = names.map(|name| (Key::of(name), END)).collect();
        let mut heads = [END; STRIPES];
        for (i, (key, next)) in keys.iter_mut().enumerate().rev() {
            let head = &mut heads[key.stripe()];
            *next = std::mem::replace(head, i as u32);
        }
        Self { heads, keys }
    }

    /// The stripes that have keys, beginning anywhere, so that writers do not follow each other through them.
    fn stripes(&self) -> impl Iterator<Item = usize> + Clone {
        let first = self.keys.first().map_or(0, |(key, _)| key.stripe());
        let all = (first..STRIPES).chain(0..first);
        all.filter(|s| self.heads[*s] != END)
    }

    /// The keys of one stripe with their indices.
    #[inline]
    fn of(&self, stripe: usize) -> impl Iterator<Item = (Key, u32)> {
        let mut at = self.heads[stripe];
        std::iter::from_fn(move || {
            let &(key, next) = self.keys.get(at as usize)?;
            Some((key, std::mem::replace(&mut at, next)))
        })
    }
}

impl Key {
    #[inline]
    fn stripe(self) -> usize {
        self.part() / ROWS
    }

    /// Which part of its stripe.
    #[inline]
    fn row(self) -> usize {
        self.part() % ROWS
    }
}

impl Names {
    /// Whether several writers can use the table.
    #[inline]
    pub(crate) fn is_spread(&self) -> bool {
        self.stripes.spread
    }

    /// Makes the table one for several writers at once.
    pub(crate) fn spread(&mut self) {
        if !self.stripes.spread {
            let bytes = self.parts.iter().map(Part::bytes).sum();
            *self.stripes.bytes.0.get_mut() = bytes;
            self.stripes.swap(&mut self.parts);
        }
    }

    /// Makes it one for a writer that is alone.
    #[inline]
    pub(crate) fn gather(&mut self) {
        if self.stripes.spread {
            self.stripes.swap(&mut self.parts);
        }
    }

    /// As [`Names::bytes`].
    pub(crate) fn bytes_together(&self) -> usize {
        let parts = self.stripes.bytes.0.load(Ordering::Relaxed);
        parts + size_of::<[Part; PARTS]>() + Stripes::BYTES
    }

    /// As [`Names::find`].
    pub(crate) fn find_together(&self, name: u64, is: impl Fn(Place) -> bool) -> Option<Place> {
        let key = Key::of(name);
        self.stripes.lock(key.stripe()).rows[key.row()].find(key, is)
    }

    /// What each of these names may stand for.
    pub(crate) fn guess_together(
        &self,
        names: impl DoubleEndedIterator<Item = u64> + ExactSizeIterator,
        guesses: &mut [Guess],
    ) {
        let grouped = Grouped::new(names);
        for s in grouped.stripes() {
            let stripe = self.stripes.lock(s);
            for (key, i) in grouped.of(s) {
                if let Some(guess) = guesses.get_mut(i as usize) {
                    *guess = stripe.guess(key);
                }
            }
        }
    }

    /// What a name may stand for.
    pub(crate) fn guess_one_together(&self, name: u64) -> Guess {
        let key = Key::of(name);
        self.stripes.lock(key.stripe()).guess(key)
    }

    /// Calls blocks from `first` on by their names, unless there is an entry that agrees with one of them:
    /// then nothing changes and false is returned.
    pub(crate) fn claim_together(&self, names: &[u64], first: Place) -> bool {
        let grouped = Grouped::new(names.iter().copied());
        for s in grouped.stripes() {
            let mut stripe = self.stripes.lock(s);
            for (key, i) in grouped.of(s) {
                let row = key.row();
                let place = first.pack() + u64::from(i);
                if stripe.rows[row].put_easily(key, place) {
                    stripe.more[row] += 1;
                    continue;
                }
                let part = stripe.count(row);
                let before = part.bytes();
                if part.insert_slowly(key, place, |_| true).is_err() {
                    stripe.forget(grouped.of(s).take_while(|(_, at)| *at != i), first);
                    drop(stripe);
                    for s in grouped.stripes().take_while(|done| *done != s) {
                        self.stripes.lock(s).forget(grouped.of(s), first);
                    }
                    return false;
                }
                let grown = part.bytes() - before;
                if grown > 0 {
                    self.stripes.bytes.0.fetch_add(grown, Ordering::Relaxed);
                }
            }
        }
        true
    }

    /// As [`Names::forget`].
    pub(crate) fn forget_together(&self, names: &[u64], first: Place) {
        if names.is_empty() {
            return;
        }
        let grouped = Grouped::new(names.iter().copied());
        for s in grouped.stripes() {
            let mut stripe = self.stripes.lock(s);
            stripe.forget(grouped.of(s), first);
            let freed = stripe.tend();
            drop(stripe);
            if freed > 0 {
                self.stripes.bytes.0.fetch_sub(freed, Ordering::Relaxed);
            }
        }
    }

    /// As [`Names::relocate`].
    pub(crate) fn relocate_together(&self, names: &[u64], from: Place, to: Place) {
        let grouped = Grouped::new(names.iter().copied());
        for s in grouped.stripes() {
            let mut stripe = self.stripes.lock(s);
            for (key, i) in grouped.of(s) {
                let (from, to) = (from.pack() + u64::from(i), to.pack() + u64::from(i));
                stripe.rows[key.row()].replace(key, key.entry(from), key.entry(to));
            }
        }
    }
}

impl Stripe {
    /// A part that knows how many entries it has.
    fn count(&mut self, row: usize) -> &mut Part {
        let more = std::mem::take(&mut self.more[row]);
        let part = &mut self.rows[row];
        part.used = part.used.saturating_add_signed(more as isize);
        part
    }

    fn guess(&self, key: Key) -> Guess {
        let part = &self.rows[key.row()];
        let Some(place) = part.find(key, |_| true) else {
            return Guess::Nothing;
        };
        match part.find(key, |other| other != place) {
            None => Guess::Perhaps(place),
            Some(_) => Guess::OneOf,
        }
    }

    fn forget(&mut self, keys: impl Iterator<Item = (Key, u32)>, first: Place) {
        for (key, i) in keys {
            let row = key.row();
            let entry = key.entry(first.pack() + u64::from(i));
            if self.rows[row].take_easily(key, entry) {
                self.more[row] -= 1;
            } else {
                self.count(row).forget_slowly(key, entry);
            }
            self.forgotten += 1;
        }
    }

    /// As [`Names::tend`]. Returns how many bytes were given back.
    fn tend(&mut self) -> usize {
        let mut freed = 0;
        while self.forgotten >= TEND_EVERY as u32 {
            self.forgotten -= TEND_EVERY as u32;
            self.tended = (self.tended + 1) % ROWS as u32;
            let part = self.count(self.tended as usize);
            let before = part.bytes();
            part.shrink();
            freed += before - part.bytes();
        }
        freed
    }
}
