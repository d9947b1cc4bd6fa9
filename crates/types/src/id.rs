//! Identifiers: who a worker is, what a block is called, which request is meant.
//!
//! Three hashes name a block and must never be mixed: the *local* hash covers one block's tokens, the
//! *sequence* hash covers the prefix up to it and is ours, the *engine* hash is the engine's opaque name.

use std::fmt;

/// A token of the model's vocabulary.
pub type Token = u32;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

name! {
    /// One engine process. Survives a restart for workers that are named by a URL.
    WorkerId(u64)
}
name! {
    /// A data-parallel rank inside a worker; 0 where the engine has only one.
    DpRank(u32)
}
name! {
    /// Hash of the tokens of one block alone (with salt, LoRA and multimodal keys).
    LocalHash(u64)
}
name! {
    /// Chained hash of a whole prefix up to and including a block; computed by the router.
    SequenceHash(u64)
}
name! {
    /// An engine's own, opaque name for a block in its sequence. May differ between workers.
    EngineHash(u64)
}

/// The unit of caching, load and choice: one data-parallel rank of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub rank: DpRank,
}

impl WorkerRank {
    /// Rank `rank` of worker `worker`.
    #[must_use]
    pub const fn new(worker: u64, rank: u32) -> Self {
        Self {
            worker: WorkerId(worker),
            rank: DpRank(rank),
        }
    }
}

impl fmt::Display for WorkerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}

/// One request of one client, for its whole life, retries included. Printed as a UUID.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u128);

impl RequestId {
    /// Reads the hyphenated form that [`fmt::Display`] writes; case does not matter.
    ///
    /// ```
    /// # use kvasir_types::RequestId;
    /// let id = RequestId(7);
    /// assert_eq!(id.to_string(), "00000000-0000-0000-0000-000000000007");
    /// assert_eq!(RequestId::parse(&id.to_string()), Some(id));
    /// assert_eq!(RequestId::parse("7"), None);
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if bytes.len() != 36 || [8, 13, 18, 23].iter().any(|&i| bytes.get(i) != Some(&b'-')) {
            return None;
        }
        let mut value = 0u128;
        for (i, byte) in bytes.iter().enumerate() {
            if ![8, 13, 18, 23].contains(&i) {
                value = value << 4 | u128::from(char::from(*byte).to_digit(16)?);
            }
        }
        Some(Self(value))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // By hand: every request's id is written several times, and `{:x}` of a u128 takes 3,000 instructions.
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [b'-'; 36];
        let mut at = 0;
        for byte in self.0.to_be_bytes() {
            if matches!(at, 8 | 13 | 18 | 23) {
                at += 1;
            }
            text[at] = DIGITS[usize::from(byte >> 4)];
            text[at + 1] = DIGITS[usize::from(byte & 15)];
            at += 2;
        }
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}
