//! A client's request for a completion, read and not yet judged.

use bytes::Bytes;
use http::request::Parts;
use kvasir_openai::Endpoint;

use crate::observe::outcomes::RequestIdentity;

/// A request whose body has been read.
#[derive(Clone)]
pub(crate) struct ClientRequest {
    /// What it is called, and when it came.
    pub(crate) arrived: RequestIdentity,
    /// Where it came in.
    pub(crate) endpoint: Endpoint,
    /// Its head.
    pub(crate) parts: Parts,
    /// Its body.
    pub(crate) body: Bytes,
}
