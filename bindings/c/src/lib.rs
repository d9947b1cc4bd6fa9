//! Kvasir from C: `libkvasir`.
//!
//! Answers one question: what does a program see that calls C functions? An engine tells of its cache (the publisher), a gateway asks
//! which worker a request should go to (the routers). Names, arguments and result codes are those of Dynamo's C library; the header is
//! `include/kvasir.h`, which `cargo xtask docs` writes from [`ffi`]. Nothing is decided here: planes, index, brain and the reading of bodies
//! are the server's own.
//!
//! What always holds: any function may be called from any thread at any time; a handle that is stale or was never given out is an error
//! code, and so is a null pointer; no panic leaves a function; what is lent to a caller is freed once, however often it is asked for;
//! `unsafe` is in [`ffi`] and nowhere else.
//!
//! Elsewhere: planes, fleets and bookings inside a program (`kvasir-embed`), bodies and prompts (`kvasir-frontend`).

pub mod ffi;

mod handles;
mod loans;
mod publisher;
mod routers;
mod said;
