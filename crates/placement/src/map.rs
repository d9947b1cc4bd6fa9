//! Hash maps for keys that are already random: request ids, worker ids, block hashes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map whose iteration order is never used for a decision.
pub type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<FoldHasher>>;

/// Folds each word in with one wide multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub struct FoldHasher(u64);

const ODD: u64 = 0x9E37_79B9_7F4A_7C15;

impl Hasher for FoldHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(chunk) {
                *to = *from;
            }
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let wide = u128::from(self.0 ^ value ^ ODD) * u128::from(ODD.rotate_left(23));
        self.0 = (wide as u64) ^ (wide >> 64) as u64;
    }

    fn write_u128(&mut self, value: u128) {
        self.write_u64(value as u64);
        self.write_u64((value >> 64) as u64);
    }
}
