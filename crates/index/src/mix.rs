//! Spreading 64-bit keys over tables. Engine hashes may be small numbers, so they are mixed before use.

use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by ids of ours; not for keys that an attacker chooses.
pub(crate) type IdMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Mixer>>;

/// Every bit of the key reaches every bit of the result.
#[inline]
pub(crate) fn mix(key: u64) -> u64 {
    let wide = u128::from(key ^ 0x2545_F491_4F6C_DD1D) * u128::from(0x9E37_79B9_7F4A_7C15_u64);
    (wide >> 64) as u64 ^ wide as u64
}

/// Hashes the integers of a key one after the other with [`mix`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0.rotate_left(29) ^ value);
    }
}
