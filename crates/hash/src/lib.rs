//! Tokens to block and prefix hashes.
//!
//! Answers one question: which names do the complete blocks of this prompt have? The same tokens, salt,
//! adapter and multimodal keys give the same names on every machine, and the same names that NVIDIA
//! Dynamo's router gives, so that both can share events and snapshots.
//!
//! Only complete blocks have names: a tail shorter than a block is left out, and a block size of 0 names
//! nothing. Elsewhere: who holds a block (`index`), engines' own opaque names (they come with events).

mod block;
mod media;
mod scope;
mod short;

pub use block::{BlockHasher, local_hashes, next_sequence_hash, sequence_hashes};
pub use media::{MediaRun, media_pad_token, normalize_media_runs};
pub use scope::{Scope, ScopeSeed};

/// Seed of every chain, and of a block outside any salt or adapter.
pub const BASE_SEED: u64 = 1337;
