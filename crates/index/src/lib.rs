//! Which worker holds which prefix.
//!
//! Answers one question: for this chain of block hashes, how many leading blocks does each rank hold?
//!
//! A block is its *path*: the local hashes from the start of the sequence up to it. Engine hashes are names
//! that one rank gives to blocks; they mean nothing in another rank, and a name may be used again.
//!
//! Invariants: a match of `k` means that the rank announced blocks `0..k` and has taken back none since;
//! a refused event changes nothing; what a rank announced `n` times is there until it was taken back `n`
//! times; a lookup changes nothing and waits for nobody.
//!
//! Elsewhere: hashing (`kvasir-hash`), load and cost (`kvasir-placement`), what silence or a lost event
//! means and events that came before their parents (`kvasir-kv-events`).

mod bits;
mod edges;
mod error;
mod index;
mod matches;
mod mix;
#[cfg(all(test, loom))]
mod model;
mod names;
mod options;
#[cfg(any(test, feature = "oracle"))]
mod oracle;
mod owners;
mod ranks;
mod replace;
mod routing;
mod run;
mod shared_ranges;
mod snapshot;
mod stats;
mod sync;
mod tree;
mod view;

pub use error::{ApplyError, RestoreError, SnapshotError};
pub use index::Index;
pub use matches::{Match, MatchSources, Matches};
pub use options::{Approximate, IndexOptions};
#[cfg(any(test, feature = "oracle"))]
pub use oracle::{
    HistoryKind, Oracle, RoutingOracle, check_concurrent_histories, check_event_history,
    check_gap_history, check_routing_history,
};
pub use shared_ranges::SharedRanges;
pub use stats::Stats;
