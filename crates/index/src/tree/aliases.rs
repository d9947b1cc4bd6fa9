//! Holdings that are not plain: a block announced more than once, or under another name than its own.
//!
//! Rare where engines hash alike, so this part is small and simple rather than fast: two ordered maps.

use std::collections::BTreeMap;

use super::Holder;
use crate::names::Place;

/// The names a holder has for blocks it does not hold plainly, with how often each is announced.
#[derive(Debug, Default)]
pub(super) struct Aliases {
    by_place: BTreeMap<(Place, Holder, u64), u32>,
    by_name: BTreeMap<(Holder, u64), Place>,
}

impl Aliases {
    /// The block that a holder holds under this name.
    pub(super) fn place(&self, h: Holder, name: u64) -> Option<Place> {
        self.by_name.get(&(h, name)).copied()
    }

    /// Whether a holder's names for a block are listed here.
    pub(super) fn lists(&self, h: Holder, place: Place) -> bool {
        self.names(h, place).next().is_some()
    }

    /// A holder's names for a block, with their counts.
    pub(super) fn names(&self, h: Holder, place: Place) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.by_place
            .range((place, h, 0)..=(place, h, u64::MAX))
            .map(|(key, count)| (key.2, *count))
    }

    /// Every name here that belongs to one holder.
    pub(super) fn of(&self, h: Holder) -> impl Iterator<Item = (u64, Place)> + '_ {
        let all = self.by_name.range((h, 0)..=(h, u64::MAX));
        all.map(|(key, place)| (key.1, *place))
    }

    /// Every name here of a block of one run.
    pub(super) fn in_run(&self, run: u32) -> Vec<(Holder, u64, Place)> {
        let low = Holder { slot: 0, tier: 0 };
        let from = (Place { run, pos: 0 }, low, 0);
        let to = (
            Place {
                run: run + 1,
                pos: 0,
            },
            low,
            0,
        );
        let all = self.by_place.range(from..to);
        all.map(|((place, h, name), _)| (*h, *name, *place))
            .collect()
    }

    /// Sets how often a name was announced; 0 takes it off the list. Says by how much the list grew.
    pub(super) fn set(&mut self, h: Holder, place: Place, name: u64, count: u32) -> isize {
        let before = self.by_name.len() as isize;
        if count == 0 {
            self.by_place.remove(&(place, h, name));
            self.by_name.remove(&(h, name));
        } else {
            self.by_place.insert((place, h, name), count);
            self.by_name.insert((h, name), place);
        }
        self.by_name.len() as isize - before
    }

    /// How often a name of this block was announced.
    pub(super) fn count(&self, h: Holder, place: Place, name: u64) -> u32 {
        self.by_place.get(&(place, h, name)).copied().unwrap_or(0)
    }

    /// Follows a run that is cut before position `at`, its tail going to `tail`.
    pub(super) fn split(&mut self, run: u32, at: u32, tail: u32) {
        if self.by_place.is_empty() {
            return;
        }
        let low = Holder { slot: 0, tier: 0 };
        let from = (Place { run, pos: at }, low, 0);
        let to = (
            Place {
                run: run + 1,
                pos: 0,
            },
            low,
            0,
        );
        let moved: Vec<_> = self
            .by_place
            .range(from..to)
            .map(|(k, c)| (*k, *c))
            .collect();
        for (key, count) in moved {
            self.by_place.remove(&key);
            let (place, h, name) = key;
            let place = Place {
                run: tail,
                pos: place.pos - at,
            };
            self.by_place.insert((place, h, name), count);
            self.by_name.insert((h, name), place);
        }
    }

    /// Bytes, near enough: ordered maps keep their nodes about three quarters full.
    pub(super) fn bytes(&self) -> usize {
        let entry = size_of::<((Place, Holder, u64), u32)>() + size_of::<((Holder, u64), Place)>();
        self.by_name.len() * entry * 4 / 3
    }
}
