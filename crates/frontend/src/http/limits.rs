//! How long and how much the HTTP side bears.

use std::time::Duration;

/// Fields of a request's head. For HTTP/1 this is the library's own bound, which it checks without allocating; another
/// would cost every request.
pub(crate) const HEADER_FIELDS_MAX: usize = 100;
/// HTTP/2 heads are taken up to so many times `header_bytes_max`, so that one that is over it can be told; of what is
/// beyond, the library says 431 and nobody hears of it.
pub(crate) const HTTP2_HEADER_MARGIN: u32 = 2;

/// Limits of the listener and of answers under way.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A worker has this long to begin its answer; one that is not streamed begins when it is complete.
    pub first_byte: Duration,
    /// A worker that leaves its stream silent for so long is given up (`--http-backend-stream-timeout-secs`).
    pub stream_silence: Option<Duration>,
    /// A client of a silent stream hears a comment so often (`--http-sse-keep-alive-interval-ms`).
    pub keep_alive: Option<Duration>,
    /// Connections that are open at once; the next ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// Requests that are under way at once; the next ones are refused as overload.
    pub requests_max: usize,
    /// Bytes that the bodies of all requests under way take together; at least one of the largest has room.
    pub body_bytes_max: u64,
    /// Bytes of a request's head.
    pub header_bytes_max: usize,
    /// A client that neither sends nor takes anything for so long is left; at most twice as long.
    pub client_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            first_byte: Duration::from_secs(3600),
            stream_silence: None,
            keep_alive: None,
            connections_max: 32_768,
            requests_max: 65_536,
            body_bytes_max: 1 << 30,
            header_bytes_max: 64 * 1024,
            client_stall: Duration::from_secs(30),
        }
    }
}
