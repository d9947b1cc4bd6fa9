//! What stands behind a handle.
//!
//! A handle is a number that looks like a pointer and is none: it is looked up and never followed, so that one that was destroyed, or
//! never was, is found out. Numbers begin at random and none comes twice.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// Between two handles; odd, so that it takes 2^64 of them until one comes again.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

struct Held<T> {
    by_number: BTreeMap<u64, Arc<T>>,
    last: u64,
}

/// Things by their handles.
pub(crate) struct Handles<T>(OnceLock<RwLock<Held<T>>>);

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn held(&self) -> &RwLock<Held<T>> {
        self.0.get_or_init(|| {
            // The standard library seeds its hashers from the system; nothing more is needed here.
            let last = RandomState::new().build_hasher().finish();
            let by_number = BTreeMap::new();
            RwLock::new(Held { by_number, last })
        })
    }

    /// Keeps something; its handle, which is not 0.
    pub(crate) fn put(&self, value: T) -> u64 {
        let mut held = self.held().write().unwrap_or_else(PoisonError::into_inner);
        held.last = held.last.wrapping_add(STEP);
        if held.last == 0 {
            held.last = STEP;
        }
        let number = held.last;
        held.by_number.insert(number, Arc::new(value));
        number
    }

    /// What a handle stands for, if for anything.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<T>> {
        let held = self.held().read().unwrap_or_else(PoisonError::into_inner);
        held.by_number.get(&number).cloned()
    }

    /// Forgets a handle; who uses what it stood for goes on.
    pub(crate) fn take(&self, number: u64) -> Option<Arc<T>> {
        let mut held = self.held().write().unwrap_or_else(PoisonError::into_inner);
        held.by_number.remove(&number)
    }
}
