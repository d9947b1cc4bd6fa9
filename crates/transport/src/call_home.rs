//! How answers come back: workers connect to us.
//!
//! Every request names an address and a subject. The worker that answers it connects to that address, names the subject and
//! sends the answer there ([`CallStream`]). Each runtime has a listener of its own for them ([`ResponseServer`]), so that an answer comes to the thread
//! that asked.

mod neighbours;
mod server;
mod socket;
mod stream;

pub use server::{HomeCounts, ResponseOptions, ResponseServer, SharedHome, local_address};
pub use stream::CallStream;

pub(crate) use server::Expected;
pub(crate) use stream::AnswerLimits;
