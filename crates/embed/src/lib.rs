//! A router inside a program.
//!
//! Answers one question: what does a program need that has the router and the planes in itself, whatever language it is written in?
//! [`ProcessPlanes`] is its store, its request planes and its lease, as its environment names them; [`ProcessFleet`] follows the workers
//! of one endpoint behind one router; [`ChannelListener`] hears a topic of it; [`Sharing`] is what it shares with other routers; [`HeldBookings`] are bookings that the program frees by name; [`runtime`] is where tasks
//! run in a program that has no runtime of its own.
//!
//! What always holds: nothing is connected, bound or announced before something needs it, and all of it ends with its owner; a process
//! that was forked from one that had a runtime is refused; several routers share nothing but the planes.
//!
//! Elsewhere: what a language sees (`bindings`), routers from options (`kvasir-setup`), the router in the real world (`kvasir-host`).

mod channel_listener;
mod error;
mod fleet;
mod held;
mod index_server;
mod planes;
mod runtime;
mod sharing;

pub use channel_listener::ChannelListener;
pub use error::EmbedError;
pub use fleet::ProcessFleet;
pub use held::HeldBookings;
pub use index_server::{IndexServer, codec};
pub use planes::{ProcessPlanes, say_log_lines, settings_of};
pub use runtime::{EndingRuntime, end_runtime, runtime, task_count};
pub use sharing::{LogReading, Sharing, event_log, replica_carrier};
