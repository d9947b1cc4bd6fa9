//! The index against the oracle, real engines' recordings, several threads.

mod histories;
