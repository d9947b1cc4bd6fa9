//! How answers come back: workers connect to us.
//!
//! Every request names an address and a subject. The worker that answers it connects to that address, names the subject and
//! sends the answer there ([`CallStream`]). One listener takes all of them ([`ResponseServer`]).

mod server;
mod stream;

pub use server::{HomeCounts, ResponseOptions, ResponseServer, local_address};
pub use stream::CallStream;

#[cfg(feature = "nats")]
pub(crate) use server::Expected;
pub(crate) use stream::AnswerLimits;
