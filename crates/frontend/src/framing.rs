//! What may be wrong with a request's framing that the HTTP library lets pass.
//!
//! A request that two servers on its way could read differently is how one client's bytes become another's
//! request. The library refuses most of it (lengths that disagree, codings that do not end in `chunked`, folded
//! and malformed fields) and forgets the rest before we see it, so what is left is answered and the connection
//! closed.

use http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use http::{HeaderValue, Request, Response, Version};
use kvasir_openai::ApiError;

/// What a request of HTTP/1.1 that does not name one host is told (RFC 9112, section 3.2).
const ONE_HOST: &str = "A request of HTTP/1.1 has one `host` field, no more and no less";

/// Refuses what names no host or several.
pub(crate) fn check<B>(request: &Request<B>) -> Result<(), ApiError> {
    if request.version() != Version::HTTP_11 {
        return Ok(());
    }
    let mut hosts = request.headers().get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(_), None) => Ok(()),
        _ => Err(ApiError::bad_request(ONE_HOST)),
    }
}

/// Whether the connection must not be used again: a body in chunks may have come with a length, too, which the
/// library does not tell, and somebody before us may have gone by that length (RFC 9112, section 6.1).
pub(crate) fn is_last<B>(request: &Request<B>) -> bool {
    request.version() == Version::HTTP_11 && request.headers().contains_key(TRANSFER_ENCODING)
}

/// Lets the connection end with this answer.
pub(crate) fn close_after<B>(reply: &mut Response<B>) {
    let close = HeaderValue::from_static("close");
    reply.headers_mut().insert(CONNECTION, close);
}
