//! What a client's connection sent since its last answer ended: the head of the request that comes next.
//!
//! Answers one question that the HTTP library cannot: did a request in chunks come with a length, too? The library
//! takes the length out of such a head before anybody sees it, so the bytes are kept until the request is there, and
//! looked at only if it is in chunks.
//!
//! What always holds: a head is believed only if it is the one that was asked about, from its first byte to the empty
//! line: the same method and target, as many fields. Bytes that came before the last answer ended (a pipelined
//! request) are not here, so such a head is not found, and what is not found is in doubt. A head that began earlier
//! cannot pass for one that is here: its first lines would be among the fields of the request and not here, and a
//! request line is no field.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use http::Request;
use http::header::CONTENT_LENGTH;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Room that is kept for the next head while a request runs; more is given back.
const ROOM_KEPT: usize = 1024;

/// The bytes of one connection.
#[derive(Debug)]
pub(crate) struct Heads {
    /// Whether what comes is kept.
    keeping: AtomicBool,
    bytes: Mutex<Vec<u8>>,
    bytes_max: usize,
}

impl Heads {
    /// Keeps at most `bytes_max`, the longest head that is taken.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            keeping: AtomicBool::new(true),
            bytes: Mutex::default(),
            bytes_max,
        }
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn came(&self, read: &[u8]) {
        if !self.keeping.load(Ordering::Relaxed) {
            return;
        }
        let mut bytes = self.bytes();
        let begun = bytes.iter().any(|byte| !is_line_end(*byte));
        let head = match head_end(read, begun) {
            // What follows is the body.
            Some(end) => {
                self.keeping.store(false, Ordering::Relaxed);
                &read[..end]
            }
            None => read,
        };
        let room = self.bytes_max.saturating_sub(bytes.len());
        bytes.extend_from_slice(&head[..head.len().min(room)]);
    }

    /// A request is there: what follows is its body.
    pub(crate) fn ended(&self) {
        self.keeping.store(false, Ordering::Relaxed);
        let mut bytes = self.bytes();
        match bytes.capacity() > ROOM_KEPT {
            true => *bytes = Vec::new(),
            false => bytes.clear(),
        }
    }

    /// Its answer is complete: what follows is the next head.
    pub(crate) fn next(&self) {
        self.keeping.store(true, Ordering::Relaxed);
    }

    /// Whether the head of this request is here and names no length.
    pub(crate) fn names_no_length<B>(&self, request: &Request<B>) -> bool {
        names_no_length(&self.bytes(), request).unwrap_or(false)
    }
}

fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n')
}

/// Where the first empty line of `read` ends, which ends a head. Before a head has `begun`, empty lines are skipped. One that
/// is cut between two reads is not found: then more is kept than the head.
fn head_end(read: &[u8], begun: bool) -> Option<usize> {
    let first = if begun {
        0
    } else {
        read.iter().position(|byte| !is_line_end(*byte))?
    };
    let mut from = first;
    loop {
        let line = read.get(from..)?;
        from += memchr::memchr(b'\n', line)? + 1;
        match read.get(from..)? {
            [b'\n', ..] => return Some(from + 1),
            [b'\r', b'\n', ..] => return Some(from + 2),
            _ => {}
        }
    }
}

/// The same of bytes; none if they are not the head of this request.
fn names_no_length<B>(bytes: &[u8], request: &Request<B>) -> Option<bool> {
    let trimmed = |line: &mut &[u8]| *line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut lines = bytes.split(|byte| *byte == b'\n').map(|mut line| {
        trimmed(&mut line);
        line
    });
    // Empty lines before a request are ignored (RFC 9112, section 2.2).
    let first = lines.find(|line| !line.is_empty())?;
    let mut words = first.split(|byte| *byte == b' ');
    let target = request.uri().to_string();
    if words.next()? != request.method().as_str().as_bytes() || words.next()? != target.as_bytes() {
        return None;
    }
    let mut fields = 0;
    let mut has_length = false;
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        let name = line.split(|byte| *byte == b':').next()?;
        has_length |= name.eq_ignore_ascii_case(CONTENT_LENGTH.as_str().as_bytes());
        fields += 1;
    }
    // What follows the empty line, be it nothing: without it the head is not whole.
    lines.next()?;
    Some(!has_length && fields == request.headers().len())
}

/// A connection whose heads are kept.
pub(crate) struct TappedIo<S> {
    stream: S,
    heads: Arc<Heads>,
}

impl<S> TappedIo<S> {
    pub(crate) fn new(stream: S, heads: Arc<Heads>) -> Self {
        Self { stream, heads }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TappedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.heads.came(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TappedIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::post("/x?y=%0a");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    /// What is said of a request with `fields` of whose connection `bytes` were kept.
    fn judged(bytes: &str, fields: &[(&str, &str)]) -> Option<bool> {
        names_no_length(bytes.as_bytes(), &request(fields))
    }

    #[test]
    fn a_length_is_found_however_it_is_written() {
        let fields = [("host", "x"), ("transfer-encoding", "chunked")];
        let head = |length: &str| {
            format!(
                "POST /x?y=%0a HTTP/1.1\r\nhost: x\r\n{length}transfer-encoding: chunked\r\n\r\n0"
            )
        };
        assert_eq!(judged(&head(""), &fields), Some(true));
        assert_eq!(judged(&format!("\r\n\n{}", head("")), &fields), Some(true));
        assert_eq!(judged(&head("").replace('\r', ""), &fields), Some(true));
        for length in [
            "Content-Length: 5\r\n",
            "CONTENT-LENGTH:5\n",
            "content-length:\r\n",
        ] {
            assert_eq!(judged(&head(length), &fields), Some(false), "{length:?}");
        }
    }

    #[test]
    fn what_is_not_the_head_of_the_request_is_not_believed() {
        let fields = [("host", "x"), ("transfer-encoding", "chunked")];
        let head = "POST /x?y=%0a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
        for cut in 0..head.len() {
            assert_eq!(judged(&head[..cut], &fields), None, "not whole: {cut}");
        }
        for cut in 1..head.len() {
            let late = judged(&head[cut..], &fields);
            assert_ne!(late, Some(true), "began earlier: {cut}");
        }
        let more = [fields[0], fields[1], ("x", "POST /x?y=%0a HTTP/1.1")];
        assert_eq!(judged(head, &more), Some(false), "some fields came before");
        assert_eq!(judged(&head.replace("/x", "/z"), &fields), None);
        assert_eq!(judged(&head.replace("POST", "PUT"), &fields), None);
    }

    #[test]
    fn what_follows_a_head_in_one_read_is_not_kept() {
        for (read, kept) in [
            ("GET / HTTP/1.1\r\nhost: x\r\n\r\nbody\r\n\r\n", 27),
            ("\r\n\nGET / HTTP/1.1\n\nbody", 19),
            ("\r\n\r\n", 4),
            ("GET / HTTP/1.1\r\nhost: x\r\n", 25),
        ] {
            for cut in 0..read.len() {
                let heads = Heads::new(1024);
                heads.came(&read.as_bytes()[..cut]);
                heads.came(&read.as_bytes()[cut..]);
                let bytes = heads.bytes();
                assert!(read.as_bytes().starts_with(&bytes), "{read:?} {cut}");
                assert!(bytes.len() >= kept, "{read:?} {cut}: the head is whole");
                assert!(cut > 0 || bytes.len() == kept, "{read:?}: not more");
            }
        }
    }

    #[test]
    fn bodies_are_not_kept_and_heads_have_a_bound() {
        let heads = Heads::new(8);
        heads.came(b"GET");
        heads.came(b" / HTTP/1.1");
        assert_eq!(*heads.bytes(), b"GET / HT");
        heads.ended();
        heads.came(b"body");
        assert!(heads.bytes().is_empty());
        heads.next();
        heads.came(b"POST");
        assert_eq!(*heads.bytes(), b"POST");
    }
}
