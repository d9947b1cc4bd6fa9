//! A mock engine in a fleet: it takes requests from the request plane and tells of itself on the event plane.
//!
//! Answers one question: how is a mock engine joined to a [`Membership`](kvasir_worker::Membership)? [`PlaneReporter`] hears what
//! the engine does and reports it; [`PlaneEngine`] gives it the requests, struck by the same faults that strike requests over
//! HTTP; [`CacheFaults`] loses, repeats and reorders its events on command. [`Part`] says which part of requests it computes, and
//! [`MeetingPoint`] is where one that computes prompts is met by those who answer.

mod engine;
mod faults;
mod meeting;
mod part;
mod reporter;

pub use engine::PlaneEngine;
pub use faults::CacheFaults;
pub use meeting::MeetingPoint;
pub(crate) use meeting::{OpenRoom, meet};
pub use part::{Part, PrefillPart};
pub use reporter::PlaneReporter;
