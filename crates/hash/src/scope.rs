//! What else names a block beside its tokens: adapter, salt, and the speculative-decoding window.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::BASE_SEED;

/// Under what a prompt's blocks are shared: two prompts share blocks only within equal scopes. An empty
/// string means absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope<'a> {
    /// LoRA adapter.
    pub lora: &'a str,
    /// Cache salt, also called cache namespace.
    pub salt: &'a str,
    /// Eagle-style speculative decoding: a block's window reaches one token into the next block.
    pub eagle: bool,
}

/// The seed that a [`Scope`] gives to its blocks. It never enters a chain except through block 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeSeed(pub(crate) u64);

impl ScopeSeed {
    /// The number itself, as test vectors state it.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl Scope<'_> {
    /// The block seed of this scope.
    ///
    /// ```
    /// # use kvasir_hash::Scope;
    /// assert_eq!(Scope::default().seed().get(), 1337);
    /// assert_eq!(Scope { salt: "tenant-a", ..Scope::default() }.seed().get(), 1948188790972764086);
    /// ```
    #[must_use]
    pub fn seed(&self) -> ScopeSeed {
        let mut seed = BASE_SEED;
        if !self.lora.is_empty() {
            seed = seed.wrapping_add(xxh3_64_with_seed(self.lora.as_bytes(), 0));
        }
        if !self.salt.is_empty() {
            seed = seed.wrapping_add(xxh3_64_with_seed(self.salt.as_bytes(), 1));
        }
        ScopeSeed(seed)
    }
}
