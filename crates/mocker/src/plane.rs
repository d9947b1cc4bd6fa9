//! A mock engine in a fleet: it takes requests from the request plane and tells of itself on the event plane.
//!
//! Answers one question: how is a mock engine joined to a [`Membership`](kvasir_worker::Membership)? [`PlaneReporter`] hears what
//! the engine does and reports it; [`PlaneEngine`] gives it the requests, struck by the same faults that strike requests over
//! HTTP; [`CacheFaults`] loses, repeats and reorders its events on command.

mod engine;
mod faults;
mod reporter;

pub use engine::PlaneEngine;
pub use faults::CacheFaults;
pub use reporter::PlaneReporter;
