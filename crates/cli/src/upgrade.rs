//! Upgrading without a dropped request: another process takes over the listening sockets, the index and the load, and this one ends.
//!
//! Answers: how does a running frontend become another binary, or the same with other settings? On SIGUSR2, or when an operator asks
//! ([`Upgrades`]), it starts the command that it was started with anew. The two share a pair of Unix sockets, the new one's standard
//! input ([`channel`]). The old one hands over its listeners, a copy of its index and what is booked; the new one ([`TakeOver`]) reads
//! its settings, waits until the workers that are served are served by it, opens its doors and says so. Then the old one stops
//! accepting, ends what it has, tells the other how its load shrinks, and exits.
//!
//! What always holds: at every moment somebody accepts connections at the sockets; no connection is closed for the upgrade's sake; a
//! process that does not come as far as to serve changes nothing, and one that dies while the old one is still there is replaced by it.
//!
//! Why it is so: docs/decisions/0175.

mod channel;
mod child;
mod load;
mod message;
mod new;
mod old;

pub(crate) use new::TakeOver;
pub(crate) use old::{Handed, Upgrades};

/// Set for a process that is to take over from the one at the other end of its standard input.
const TAKE_OVER: &str = "KVASIR_TAKE_OVER";
