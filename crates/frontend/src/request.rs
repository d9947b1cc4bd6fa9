//! What does a client's request ask for, whichever kind of worker will answer it?
//!
//! Extensions and headers, the prompt and its tokens, what the response is to carry beside the answer, whether
//! the answer may move to another worker.

pub(crate) mod ask;
pub(crate) mod bypass;
pub(crate) mod client_request;
pub(crate) mod migrate;
pub(crate) mod query;
pub(crate) mod response_extras;
pub(crate) mod route_error;
pub(crate) mod speculative_prefill;
pub(crate) mod two_step;
