//! The heads of HTTP/1.1 messages: a request's as bytes, an answer's out of bytes.

use std::io;
use std::mem::MaybeUninit;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue,
    TRANSFER_ENCODING,
};
use http::{Method, StatusCode};

/// Longest head of an answer.
const HEAD_BYTES_MAX: usize = 256 << 10;
/// Most fields of one.
const FIELDS_MAX: usize = 128;
/// Room for what a request's head holds beside its fields.
const REQUEST_LINE_BYTES: usize = 256;

/// A request to a worker.
#[derive(Clone, Copy, Debug)]
pub struct UpstreamRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// Path and query below the worker's address.
    pub path: &'a str,
    /// The fields, but for those that belong to the connection or the worker.
    pub headers: &'a HeaderMap,
    /// One more field, in place of any of its name.
    pub also: Option<(&'a HeaderName, &'a HeaderValue)>,
    /// The body.
    pub body: &'a Bytes,
    /// It is sent on a new connection. A kept one may be closed at any moment, and then it is unknown whether the worker
    /// has begun to run the request.
    pub fresh: bool,
}

/// The worker that a request is sent to.
pub(crate) struct Destination<'a> {
    /// Prefix of every path.
    pub(crate) prefix: &'a str,
    /// What the `host` header says.
    pub(crate) authority: &'a HeaderValue,
    /// The worker's key, in place of the client's.
    pub(crate) key: Option<&'a HeaderValue>,
}

impl UpstreamRequest<'_> {
    /// The bytes of its head.
    pub(crate) fn head(&self, destination: &Destination<'_>) -> BytesMut {
        let mut out = BytesMut::with_capacity(REQUEST_LINE_BYTES + self.fields_len());
        for part in [self.method.as_str(), " ", destination.prefix, self.path] {
            out.put_slice(part.as_bytes());
        }
        out.put_slice(b" HTTP/1.1\r\n");
        put_field(&mut out, &HOST, destination.authority);
        for (name, value) in self.headers {
            let ours = *name == HOST
                || *name == CONTENT_LENGTH
                || *name == TRANSFER_ENCODING
                || *name == AUTHORIZATION && destination.key.is_some()
                || self.also.is_some_and(|(also, _)| also == name);
            if !ours {
                put_field(&mut out, name, value);
            }
        }
        if let Some(key) = destination.key {
            put_field(&mut out, &AUTHORIZATION, key);
        }
        if let Some((name, value)) = self.also {
            put_field(&mut out, name, value);
        }
        if !self.body.is_empty() || *self.method == Method::POST {
            put_field(&mut out, &CONTENT_LENGTH, &self.body.len().into());
        }
        out.put_slice(b"\r\n");
        out
    }

    fn fields_len(&self) -> usize {
        let len =
            |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + 4;
        self.headers.iter().map(len).sum()
    }
}

fn put_field(out: &mut BytesMut, name: &HeaderName, value: &HeaderValue) {
    out.put_slice(name.as_str().as_bytes());
    out.put_slice(b": ");
    out.put_slice(value.as_bytes());
    out.put_slice(b"\r\n");
}

/// The head of an answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// The connection stays open after the body.
    pub(crate) keep_alive: bool,
}

impl Head {
    /// Takes a head off the front of `inbox`, if it is all there.
    pub(crate) fn take(inbox: &mut BytesMut) -> io::Result<Option<Self>> {
        let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut parsed = httparse::Response::new(&mut []);
        let end = httparse::ParserConfig::default()
            .parse_response_with_uninit_headers(&mut parsed, inbox, &mut fields)
            .map_err(|error| invalid(&format!("not an HTTP response ({error})")))?;
        let httparse::Status::Complete(end) = end else {
            return match inbox.len() > HEAD_BYTES_MAX {
                true => Err(invalid("its head is too long")),
                false => Ok(None),
            };
        };
        let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.ok_or_else(|| invalid("its status code is invalid"))?;
        let is_new = parsed.version == Some(1);
        // Values are slices of one copy of the head; the inbox is free for the body.
        let bytes = Bytes::copy_from_slice(inbox.get(..end).unwrap_or_default());
        let start = inbox.as_ptr().addr();
        let mut headers = HeaderMap::with_capacity(parsed.headers.len());
        for field in parsed.headers.iter() {
            let name = HeaderName::from_bytes(field.name.as_bytes())
                .map_err(|_| invalid("a header name is invalid"))?;
            let at = field.value.as_ptr().addr().wrapping_sub(start);
            let value = match field.value {
                [] => Bytes::new(),
                value => bytes.slice(at..at + value.len()),
            };
            let value = HeaderValue::from_maybe_shared(value)
                .map_err(|_| invalid("a header value is invalid"))?;
            headers.append(name, value);
        }
        inbox.advance(end);
        if headers.contains_key(TRANSFER_ENCODING) {
            // RFC 9112, section 6.3: chunks give the length of the body; `content-length` must not be passed on.
            headers.remove(CONTENT_LENGTH);
        }
        Ok(Some(Self {
            keep_alive: is_keep_alive(&headers, is_new),
            status,
            headers,
        }))
    }
}

/// Whether the connection stays open after a message with these fields.
fn is_keep_alive(headers: &HeaderMap, is_new: bool) -> bool {
    let mut words = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim);
    match is_new {
        true => !words.any(|word| word.eq_ignore_ascii_case("close")),
        false => words.any(|word| word.eq_ignore_ascii_case("keep-alive")),
    }
}

/// The worker sent what is no valid HTTP.
pub(crate) fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head_of(
        method: &Method,
        headers: &HeaderMap,
        key: Option<&HeaderValue>,
        body: &str,
    ) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let request = UpstreamRequest {
            method,
            path: "/v1/x?y=1",
            headers,
            also: None,
            body: &body,
            fresh: false,
        };
        let destination = Destination {
            prefix: "/p",
            authority: &HeaderValue::from_static("e:1"),
            key,
        };
        String::from_utf8(request.head(&destination).to_vec()).unwrap()
    }

    #[test]
    fn a_request_says_its_length_and_shows_the_workers_key() {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("us"));
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("999"));
        headers.insert(AUTHORIZATION, HeaderValue::from_static("Bearer theirs"));
        headers.insert("x-a", HeaderValue::from_static("1"));
        let key = HeaderValue::from_static("Bearer ours");
        assert_eq!(
            head_of(&Method::POST, &headers, Some(&key), "abc"),
            "POST /p/v1/x?y=1 HTTP/1.1\r\nhost: e:1\r\nx-a: 1\r\nauthorization: Bearer ours\r\n\
             content-length: 3\r\n\r\n"
        );
        assert!(head_of(&Method::POST, &headers, None, "").contains("content-length: 0\r\n"));
        let got = head_of(&Method::GET, &HeaderMap::new(), None, "");
        assert_eq!(got, "GET /p/v1/x?y=1 HTTP/1.1\r\nhost: e:1\r\n\r\n");
    }

    fn take(text: &[u8]) -> io::Result<Option<(Head, BytesMut)>> {
        let mut inbox = BytesMut::from(text);
        Ok(Head::take(&mut inbox)?.map(|head| (head, inbox)))
    }

    #[test]
    fn a_head_is_taken_when_it_is_complete_and_no_byte_more() {
        let text = b"HTTP/1.1 200 OK\r\nA: x\r\nb:\r\nA:  y \r\n\r\nbody";
        for cut in 0..text.len() - 4 {
            assert!(take(&text[..cut]).unwrap().is_none(), "{cut}");
        }
        let (head, rest) = take(text).unwrap().unwrap();
        assert_eq!((head.status, &rest[..]), (StatusCode::OK, &b"body"[..]));
        let all: Vec<_> = head.headers.get_all("a").iter().collect();
        assert_eq!(all, ["x", "y"]);
        assert_eq!(head.headers["b"], "");
    }

    #[test]
    fn a_length_beside_chunks_is_not_believed_nor_passed_on() {
        let text = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n";
        let (head, _) = take(text).unwrap().unwrap();
        assert!(!head.headers.contains_key(CONTENT_LENGTH));
        assert!(head.headers.contains_key(TRANSFER_ENCODING));
    }

    #[test]
    fn connection_close_is_read() {
        let keep_alive = |text: &str| {
            let text = format!("HTTP/1.{text}\r\n\r\n");
            take(text.as_bytes()).unwrap().unwrap().0.keep_alive
        };
        assert!(keep_alive("1 200 OK"));
        assert!(!keep_alive("1 200 OK\r\nconnection: x, Close"));
        assert!(!keep_alive("0 200 OK"));
        assert!(keep_alive("0 200 OK\r\nConnection: Keep-Alive"));
    }

    #[test]
    fn what_is_no_head_is_refused() {
        let bad: [&[u8]; 4] = [
            b"SSH-2.0-x\r\n",
            b"HTTP/2 200 OK\r\n\r\n",
            b"HTTP/1.1 2x0 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\na b: c\r\n\r\n",
        ];
        for text in bad {
            assert!(take(text).is_err(), "{text:?}");
        }
        let mut long = b"HTTP/1.1 200 OK\r\na: ".to_vec();
        long.resize(HEAD_BYTES_MAX + 1, b'x');
        assert!(take(&long).is_err());
        let many = format!(
            "HTTP/1.1 200 OK\r\n{}\r\n",
            "a: b\r\n".repeat(FIELDS_MAX + 1)
        );
        assert!(take(many.as_bytes()).is_err());
    }
}
