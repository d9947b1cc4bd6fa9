//! Hashes of single blocks, and the chain over them.

use kvasir_types::{LocalHash, SequenceHash, Token};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::short::{SHORT_TOKENS, ShortBlocks};
use crate::{BASE_SEED, Scope, ScopeSeed};

/// Tokens of a block that are serialised on the stack; longer blocks are fed in pieces of this size.
const STACK_TOKENS: usize = 128;

/// Names the blocks of a prompt, one scope and block size at a time.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    seed: ScopeSeed,
    block_size: usize,
    /// Tokens that a block covers: `block_size`, or one more with Eagle.
    window: usize,
}

impl BlockHasher {
    /// A hasher for blocks of `block_size` tokens in `scope`.
    #[must_use]
    pub fn new(block_size: usize, scope: &Scope<'_>) -> Self {
        let window = block_size.saturating_add(usize::from(scope.eagle));
        Self {
            seed: scope.seed(),
            block_size,
            window,
        }
    }

    /// How many complete blocks `tokens` tokens have.
    ///
    /// ```
    /// # use kvasir_hash::{BlockHasher, Scope};
    /// let plain = BlockHasher::new(4, &Scope::default());
    /// assert_eq!([3, 4, 8].map(|n| plain.complete_blocks(n)), [0, 1, 2]);
    /// let eagle = BlockHasher::new(4, &Scope { eagle: true, ..Scope::default() });
    /// assert_eq!([4, 5, 8, 9].map(|n| eagle.complete_blocks(n)), [0, 1, 1, 2]);
    /// ```
    #[must_use]
    pub fn complete_blocks(&self, tokens: usize) -> usize {
        let shared = self.window - self.block_size;
        tokens
            .saturating_sub(shared)
            .checked_div(self.block_size)
            .unwrap_or(0)
    }

    /// Appends the local hash of every complete block of `tokens` to `out`.
    pub fn extend(&self, tokens: &[Token], out: &mut Vec<LocalHash>) {
        let blocks = self.complete_blocks(tokens.len());
        out.reserve(blocks);
        if self.window == SHORT_TOKENS && self.block_size == SHORT_TOKENS {
            let short = ShortBlocks::new(self.seed.0);
            let (blocks, _) = tokens.as_chunks::<SHORT_TOKENS>();
            out.extend(blocks.iter().map(|block| LocalHash(short.hash(block))));
            return;
        }
        for window in self.windows(tokens) {
            out.push(self.hash(window, &[]));
        }
    }

    /// Like [`Self::extend`], for a prompt with multimodal objects: `media(i)` gives the hashes of the
    /// objects in block `i`, in any order.
    pub fn extend_with_media<'m>(
        &self,
        tokens: &[Token],
        mut media: impl FnMut(usize) -> &'m [u64],
        out: &mut Vec<LocalHash>,
    ) {
        for (i, window) in self.windows(tokens).enumerate() {
            out.push(self.hash(window, media(i)));
        }
    }

    fn windows<'t>(&self, tokens: &'t [Token]) -> impl Iterator<Item = &'t [Token]> {
        let (window, stride) = (self.window.max(1), self.block_size.max(1));
        tokens
            .windows(window)
            .step_by(stride)
            .take(self.complete_blocks(tokens.len()))
    }

    fn hash(&self, window: &[Token], media: &[u64]) -> LocalHash {
        if media.is_empty() && window.len() <= STACK_TOKENS {
            return LocalHash(hash_short(window, self.seed.0));
        }
        let mut state = Xxh3::with_seed(self.seed.0);
        let mut bytes = [0u8; STACK_TOKENS * 4];
        for piece in window.chunks(STACK_TOKENS) {
            state.update(to_bytes(piece, &mut bytes));
        }
        let mut media = media.to_vec();
        media.sort_unstable();
        for hash in media {
            state.update(&hash.to_le_bytes());
        }
        LocalHash(state.digest())
    }
}

/// Hashes at most [`STACK_TOKENS`] tokens. The usual sizes have a buffer of their own, which need not be
/// cleared first.
fn hash_short(window: &[Token], seed: u64) -> u64 {
    let exact = match window.len() {
        16 => hash_exact::<16, 64>(window, seed),
        32 => hash_exact::<32, 128>(window, seed),
        64 => hash_exact::<64, 256>(window, seed),
        128 => hash_exact::<128, 512>(window, seed),
        _ => None,
    };
    exact.unwrap_or_else(|| {
        let mut bytes = [0u8; STACK_TOKENS * 4];
        xxh3_64_with_seed(to_bytes(window, &mut bytes), seed)
    })
}

/// `BYTES` is four times `TOKENS`; `None` for a window of another length.
#[inline]
fn hash_exact<const TOKENS: usize, const BYTES: usize>(window: &[Token], seed: u64) -> Option<u64> {
    const { assert!(BYTES == 4 * TOKENS) };
    let tokens: &[Token; TOKENS] = window.try_into().ok()?;
    let mut bytes = [0u8; BYTES];
    let (slots, _) = bytes.as_chunks_mut::<4>();
    for (slot, token) in slots.iter_mut().zip(tokens) {
        *slot = token.to_le_bytes();
    }
    Some(xxh3_64_with_seed(&bytes, seed))
}

fn to_bytes<'b>(tokens: &[Token], bytes: &'b mut [u8; STACK_TOKENS * 4]) -> &'b [u8] {
    for (slot, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        slot.copy_from_slice(&token.to_le_bytes());
    }
    &bytes[..tokens.len() * 4]
}

/// The local hashes of all complete blocks of `tokens`.
///
/// ```
/// # use kvasir_hash::{Scope, local_hashes};
/// let hashes = local_hashes(&[1, 2, 3, 4, 5], 4, &Scope::default());
/// assert_eq!(hashes[0].0, 14643705804678351452);
/// assert_eq!(hashes.len(), 1);
/// ```
#[must_use]
pub fn local_hashes(tokens: &[Token], block_size: usize, scope: &Scope<'_>) -> Vec<LocalHash> {
    let mut out = Vec::new();
    BlockHasher::new(block_size, scope).extend(tokens, &mut out);
    out
}

/// The chain over `locals`: one name per block for the whole prefix that ends with it.
#[must_use]
pub fn sequence_hashes(locals: &[LocalHash]) -> Vec<SequenceHash> {
    let mut out = Vec::with_capacity(locals.len());
    let mut parent = None;
    for local in locals {
        let hash = next_sequence_hash(parent, *local);
        out.push(hash);
        parent = Some(hash);
    }
    out
}

/// The chain's next name: that of `local` after the prefix called `parent`.
///
/// ```
/// # use kvasir_hash::{Scope, local_hashes, next_sequence_hash, sequence_hashes};
/// let locals = local_hashes(&[1, 2, 3, 4], 2, &Scope::default());
/// let first = next_sequence_hash(None, locals[0]);
/// let second = next_sequence_hash(Some(first), locals[1]);
/// assert_eq!(sequence_hashes(&locals), [first, second]);
/// ```
#[must_use]
pub fn next_sequence_hash(parent: Option<SequenceHash>, local: LocalHash) -> SequenceHash {
    let Some(parent) = parent else {
        return SequenceHash(local.0);
    };
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    bytes[8..].copy_from_slice(&local.0.to_le_bytes());
    SequenceHash(xxh3_64_with_seed(&bytes, BASE_SEED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locals(tokens: &[Token], block_size: usize, scope: &Scope<'_>) -> Vec<u64> {
        local_hashes(tokens, block_size, scope)
            .into_iter()
            .map(|h| h.0)
            .collect()
    }

    fn sequence(tokens: &[Token], block_size: usize) -> Vec<u64> {
        let locals = local_hashes(tokens, block_size, &Scope::default());
        sequence_hashes(&locals).into_iter().map(|h| h.0).collect()
    }

    fn range(from: Token, to: Token) -> Vec<Token> {
        (from..=to).collect()
    }

    #[test]
    fn plain_blocks_equal_the_published_vectors() {
        let scope = Scope::default();
        assert_eq!(locals(&range(1, 4), 4, &scope), [14643705804678351452]);
        assert_eq!(
            locals(&range(1, 8), 4, &scope),
            [14643705804678351452, 16777012769546811212]
        );
        assert_eq!(
            sequence(&range(1, 8), 4),
            [14643705804678351452, 4945711292740353085]
        );
        assert_eq!(
            locals(&range(0, 15), 4, &scope),
            [
                9143094415614847814,
                12124091508212882195,
                1088361764653601668,
                16024980976528976948
            ]
        );
        assert_eq!(
            sequence(&range(0, 15), 4),
            [
                9143094415614847814,
                9510318385840434533,
                16998148715716822651,
                16790386768269814709
            ]
        );
    }

    #[test]
    fn scope_enters_the_block_seed() {
        let lora = Scope {
            lora: "my-lora",
            ..Scope::default()
        };
        let salt = Scope {
            salt: "tenant-a",
            ..Scope::default()
        };
        let both = Scope {
            lora: "my-lora",
            salt: "tenant-a",
            eagle: false,
        };
        assert_eq!(
            [lora, salt, both].map(|s| s.seed().get()),
            [
                12827409268353072861,
                1948188790972764086,
                14775598059325835610
            ]
        );
        assert_eq!(
            [lora, salt, both].map(|s| locals(&range(1, 4), 4, &s)[0]),
            [
                15671544057904749233,
                5738685477468498325,
                6157910915076630503
            ]
        );
    }

    #[test]
    fn eagle_windows_share_a_token() {
        let eagle = Scope {
            eagle: true,
            ..Scope::default()
        };
        assert_eq!(
            locals(&range(1, 9), 4, &eagle),
            [1914873892905420881, 1929047464662796003]
        );
        assert_eq!(locals(&range(1, 8), 4, &eagle).len(), 1);
        assert!(locals(&range(1, 4), 4, &eagle).is_empty());
    }

    #[test]
    fn media_hashes_follow_the_tokens_in_ascending_order() {
        let hasher = BlockHasher::new(4, &Scope::default());
        let hash = |media: &[u64]| hasher.hash(&[1, 2, 3, 4], media).0;
        assert_eq!(hash(&[0xDEAD_BEEF]), 15207512089340001072);
        assert_eq!(hash(&[]), 14643705804678351452);
        assert_eq!(hash(&[7, 3]), hash(&[3, 7]));
        assert_ne!(hash(&[7, 3]), hash(&[7]));

        let mut out = Vec::new();
        let per_block: [&[u64]; 2] = [&[], &[0xDEAD_BEEF]];
        hasher.extend_with_media(&[1, 2, 3, 4, 1, 2, 3, 4, 9], |i| per_block[i], &mut out);
        let out: Vec<u64> = out.into_iter().map(|h| h.0).collect();
        assert_eq!(out, [14643705804678351452, 15207512089340001072]);
    }

    #[test]
    fn incomplete_and_empty_blocks_have_no_name() {
        let scope = Scope::default();
        assert!(locals(&[], 4, &scope).is_empty());
        assert!(locals(&range(1, 3), 4, &scope).is_empty());
        assert!(locals(&range(1, 8), 0, &scope).is_empty());
        assert!(
            locals(
                &range(1, 8),
                0,
                &Scope {
                    eagle: true,
                    ..scope
                }
            )
            .is_empty()
        );
        assert!(
            locals(
                &range(1, 8),
                usize::MAX,
                &Scope {
                    eagle: true,
                    ..scope
                }
            )
            .is_empty()
        );
        assert!(sequence_hashes(&[]).is_empty());
    }

    /// Blocks longer than the stack buffer take the streaming path; both must give one answer.
    #[test]
    fn long_blocks_hash_as_one_run_of_bytes() {
        for size in [
            1,
            15,
            16,
            17,
            32,
            64,
            STACK_TOKENS - 1,
            STACK_TOKENS,
            STACK_TOKENS + 1,
            3 * STACK_TOKENS + 5,
        ] {
            let tokens = range(1, size as Token);
            let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            assert_eq!(
                locals(&tokens, size, &Scope::default()),
                [xxh3_64_with_seed(&bytes, BASE_SEED)]
            );
        }
    }
}
