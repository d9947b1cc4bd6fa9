//! The protocol against what real frontends and workers sent.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod recorded;
