//! Parts of the router as services of their own.
//!
//! Answers one question: what do programs get that want one part of the router and not its frontend? [`Indexer`] says which worker
//! holds how much of a prompt, [`SlotTracker`] what runs where, [`Selector`] which worker is best, and books it. Each takes a request
//! whole ([`Ask`]) and gives an [`Answer`]; whose socket that came from is for whoever calls. [`PlaneRouter`] takes calls on the
//! request plane, and sends them on; [`request_arrival`] is how it reads one. Routes, bodies, codes and messages are those of Dynamo's services; where ours differ the guide
//! says so.
//!
//! What always holds: index, cost, ledger and hashes are those of `host`, `router`, `index` and `hash`; nothing from outside panics; every
//! list has a bound.

mod api;
mod event_listener;
mod group;
mod hints;
mod indexer;
mod lift;
mod media;
mod overlap;
mod plane_router;
mod reading;
mod select;
mod slots;
mod sync;
mod takeover;

pub use api::{Answer, AnswerBody, Api, Ask, Verb};
pub use indexer::Indexer;
pub use plane_router::{PlaneRouter, request_arrival};
pub use select::{SelectOptions, Selector};
pub use slots::SlotTracker;
pub use sync::ReplicaSync;
