//! XXH3-64 of blocks of 16 tokens, which is what most engines use.
//!
//! Answers one question: what is the hash of exactly 64 bytes, many times under one seed? The general function looks at the
//! length and mixes the seed into its secret for every block; here both are done once. A third of the instructions.
//!
//! What always holds: the hash is that of `xxh3_64_with_seed` over the tokens' little-endian bytes.

use kvasir_types::Token;

/// Tokens of a short block.
pub(crate) const SHORT_TOKENS: usize = 16;

/// The first 64 bytes of the algorithm's default secret, as little-endian words.
const SECRET: [u64; 8] = [
    0xBE4B_A423_396C_FEB8,
    0x1CAD_21F7_2C81_017C,
    0xDB97_9083_E96D_D4DE,
    0x1F67_B3B7_A4A4_4072,
    0x78E5_C0CC_4EE6_79CB,
    0x2172_FFCC_7DD0_5A82,
    0x8E24_43F7_7446_08B8,
    0x4C26_3A81_E690_35E0,
];
/// Where each 16 bytes of a block find their 16 bytes of the secret: the two ends come first in the secret.
const ORDER: [usize; 4] = [0, 2, 3, 1];
const PRIME_1: u64 = 0x9E37_79B1_85EB_CA87;
const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

/// Hashes blocks of [`SHORT_TOKENS`] tokens under one seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShortBlocks {
    /// The secret with the seed in it, for each 16 bytes.
    keys: [(u64, u64); 4],
}

impl ShortBlocks {
    pub(crate) fn new(seed: u64) -> Self {
        let key = |at: usize| {
            let (low, high) = (SECRET[2 * at], SECRET[2 * at + 1]);
            (low.wrapping_add(seed), high.wrapping_sub(seed))
        };
        Self {
            keys: ORDER.map(key),
        }
    }

    #[inline]
    pub(crate) fn hash(&self, block: &[Token; SHORT_TOKENS]) -> u64 {
        let bytes = (SHORT_TOKENS * size_of::<Token>()) as u64;
        let mut sum = bytes.wrapping_mul(PRIME_1);
        let (quarters, _) = block.as_chunks::<4>();
        for ([a, b, c, d], (low, high)) in quarters.iter().zip(self.keys) {
            let (first, second) = (word(*a, *b) ^ low, word(*c, *d) ^ high);
            let wide = u128::from(first) * u128::from(second);
            sum = sum.wrapping_add(wide as u64 ^ (wide >> 64) as u64);
        }
        sum ^= sum >> 37;
        sum = sum.wrapping_mul(AVALANCHE);
        sum ^ sum >> 32
    }
}

/// Two tokens as eight little-endian bytes are read.
#[inline]
fn word(first: Token, second: Token) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

#[cfg(test)]
mod tests {
    use kvasir_types::Rng;
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;

    #[test]
    fn a_short_block_has_the_hash_of_its_bytes() {
        let mut rng = Rng::new(7);
        for seed in [0, 1337, u64::MAX, rng.next_u64()] {
            let short = ShortBlocks::new(seed);
            for _ in 0..1000 {
                let block: [Token; SHORT_TOKENS] = std::array::from_fn(|_| rng.next_u64() as Token);
                let bytes: Vec<u8> = block.iter().flat_map(|t| t.to_le_bytes()).collect();
                assert_eq!(short.hash(&block), xxh3_64_with_seed(&bytes, seed));
            }
        }
    }
}
