//! New request ids.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Mutex, PoisonError};

use kvasir_types::{RequestId, Rng};

/// Gives out request ids: UUIDs of version 4, unique over processes and restarts.
#[derive(Debug)]
pub(crate) struct RequestIds {
    halves: Mutex<(Rng, Rng)>,
}

impl RequestIds {
    /// A source seeded by the operating system.
    #[must_use]
    pub(crate) fn new() -> Self {
        let random = || Rng::new(RandomState::new().build_hasher().finish());
        Self {
            halves: Mutex::new((random(), random())),
        }
    }

    /// The next id.
    pub(crate) fn next(&self) -> RequestId {
        let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
        let high = halves.0.next_u64() & !0xF000 | 0x4000;
        let low = halves.1.next_u64() & !(0b11 << 62) | 0b10 << 62;
        RequestId(u128::from(high) << 64 | u128::from(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_uuids_of_version_4_and_differ() {
        let ids = RequestIds::new();
        let (a, b) = (ids.next(), ids.next());
        assert_ne!(a, b);
        let text = a.to_string();
        assert_eq!(text.as_bytes()[14], b'4', "{text}");
        assert!(b"89ab".contains(&text.as_bytes()[19]), "{text}");
        assert_ne!(RequestIds::new().next(), RequestIds::new().next());
    }
}
