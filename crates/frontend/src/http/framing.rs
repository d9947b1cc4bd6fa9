//! What may be wrong with a request's framing that the HTTP library lets pass.
//!
//! A request that two servers on its way could read differently is how one client's bytes become another's
//! request. The library refuses most of it (lengths that disagree, codings that do not end in `chunked`, folded
//! and malformed fields); of a length beside chunks it says nothing, so that is looked for in the bytes themselves.

use http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use http::{HeaderValue, Request, Response, Version};
use kvasir_openai::ApiError;

use crate::http::heads::Heads;

/// What a request of HTTP/1.1 that does not name one host is told (RFC 9112, section 3.2).
const ONE_HOST: &str = "A request of HTTP/1.1 has one `host` field, no more and no less";

/// What a request in another coding than chunks is told (RFC 9112, section 6.1).
const ONLY_CHUNKED: &str = "The only transfer coding of a request that is understood is `chunked`";
/// What a request is told that names its coding twice (RFC 9112, section 7).
const CHUNKED_ONCE: &str =
    "A request has one `transfer-encoding` field, which names `chunked` once";

/// What a request in chunks is told that also names a length, or came before the answer to the one before it.
const ONE_LENGTH: &str = "A request in chunks has no `content-length`, and is not sent before the answer to the request before it";

/// A request whose body may have two lengths.
#[derive(Clone, Copy, Debug)]
struct InDoubt;

/// Refuses what names no host or several, and what is in chunks in any way but the plain one.
pub(crate) fn check<B>(request: &Request<B>) -> Result<(), ApiError> {
    if request.version() != Version::HTTP_11 {
        return Ok(());
    }
    check_coding(request)?;
    let mut hosts = request.headers().get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(_), None) => Ok(()),
        _ => Err(ApiError::bad_request(ONE_HOST)),
    }
}

/// The library takes whatever ends in `chunked` for chunks, once or twice, and whatever was coded before.
fn check_coding<B>(request: &Request<B>) -> Result<(), ApiError> {
    let mut fields = request.headers().get_all(TRANSFER_ENCODING).iter();
    let Some(first) = fields.next() else {
        return Ok(());
    };
    if fields.next().is_some() {
        return Err(ApiError::bad_request(CHUNKED_ONCE));
    }
    if request.extensions().get::<InDoubt>().is_some() {
        return Err(ApiError::bad_request(ONE_LENGTH));
    }
    let codings = || first.as_bytes().split(|byte| *byte == b',');
    let chunked = |coding: &[u8]| coding.trim_ascii().eq_ignore_ascii_case(b"chunked");
    match (codings().count(), codings().filter(|c| chunked(c)).count()) {
        (1, 1) => Ok(()),
        (_, 1) => Err(ApiError::not_implemented(ONLY_CHUNKED)),
        _ => Err(ApiError::bad_request(CHUNKED_ONCE)),
    }
}

/// Notes on a request in chunks that it may have come with a length, too; [`check`] refuses it then. Somebody before us
/// may have gone by that length (RFC 9112, section 6.1).
pub(crate) fn note_doubt<B>(request: &mut Request<B>, heads: &Heads) {
    let is_coded =
        request.version() == Version::HTTP_11 && request.headers().contains_key(TRANSFER_ENCODING);
    if is_coded && !heads.names_no_length(request) {
        request.extensions_mut().insert(InDoubt);
    }
}

/// Lets the connection end with this answer.
pub(crate) fn close_after<B>(reply: &mut Response<B>) {
    let close = HeaderValue::from_static("close");
    reply.headers_mut().insert(CONNECTION, close);
}
