//! An engine's answer: the bytes of a body and where it ends are the same however they come, and as a second reader finds them.

use http::Method;
use kvasir_upstream::{ReadAnswer, read_answer};

use crate::pieces::ways;

pub(crate) const WORDS: &[&str] = &[
    "HTTP/1.1 200 OK\r\n",
    "HTTP/1.0 200 OK\r\n",
    "HTTP/1.1 100 Continue\r\n\r\n",
    "HTTP/1.1 204 No\r\n",
    "content-length: 5\r\n",
    "content-length: 18446744073709551616\r\n",
    "transfer-encoding: chunked\r\n",
    "transfer-encoding: identity\r\n",
    "connection: close\r\n",
    "\r\n",
    "\r\n\r\n",
    "0\r\n\r\n",
    "5\r\nhello\r\n",
    ";ext=\"a\"\r\n",
    "fffffffffffffff\r\n",
    "data: [DONE]\n\n",
];

/// The first byte chooses the method.
pub(crate) fn check(bytes: &[u8]) -> bool {
    let Some((first, bytes)) = bytes.split_first() else {
        return false;
    };
    let method = if first % 8 == 7 {
        Method::HEAD
    } else {
        Method::POST
    };
    let [whole, single, random] = ways(bytes).map(|pieces| read_answer(&method, pieces));
    for other in [&single, &random] {
        match (&whole, other) {
            (Ok(whole), Ok(other)) => assert_eq!(whole, other, "other pieces, another answer"),
            (Err(_), Err(_)) => {}
            _ => panic!("an error in one piece only: {whole:?}, {other:?}"),
        }
    }
    let Ok(Some(answer)) = whole else {
        return false;
    };
    assert!(answer.body.len() + answer.rest <= bytes.len());
    compare(&method, bytes, &answer);
    answer.ended
}

/// What a reader finds that knows all bytes at once and is written for nothing but that.
fn compare(method: &Method, bytes: &[u8], answer: &ReadAnswer) {
    let Some((status, fields, body)) = last_head(bytes) else {
        panic!("a head that is none: {answer:?}");
    };
    assert_eq!(status, answer.status.as_u16());
    let coding = fields
        .iter()
        .filter(|(name, _)| name == "transfer-encoding");
    let codings: Vec<_> = coding
        .map(|(_, value)| value.to_ascii_lowercase())
        .collect();
    let length = fields.iter().find(|(name, _)| name == "content-length");
    if *method == Method::HEAD || matches!(status, 204 | 304) {
        assert!(answer.ended && answer.body.is_empty());
    } else if codings == ["chunked"] {
        let (data, rest) = chunks(body);
        assert_eq!(answer.body, data);
        assert_eq!(answer.ended.then_some(answer.rest), rest.map(<[u8]>::len));
    } else if let (Some((_, length)), []) = (length, codings.as_slice()) {
        let first = length.split(',').next().unwrap_or_default();
        let length = first.trim().parse::<usize>().unwrap_or(usize::MAX);
        let data = body.get(..length.min(body.len())).unwrap_or_default();
        assert_eq!(answer.body, data);
        assert_eq!(answer.ended, body.len() >= length);
    } else {
        assert_eq!(answer.body, body);
        assert!(answer.ended, "it ends with the connection");
    }
}

/// The first head that is not informational, and what follows it.
#[expect(clippy::type_complexity, reason = "read in one place")]
fn last_head(mut bytes: &[u8]) -> Option<(u16, Vec<(String, String)>, &[u8])> {
    loop {
        let mut fields = [httparse::EMPTY_HEADER; 128];
        let mut head = httparse::Response::new(&mut fields);
        let httparse::Status::Complete(end) = head.parse(bytes).ok()? else {
            return None;
        };
        let status = head.code?;
        if !(100..200).contains(&status) {
            let text = |value: &[u8]| String::from_utf8_lossy(value).trim().to_owned();
            let fields = head.headers.iter();
            let fields = fields.map(|f| (f.name.to_ascii_lowercase(), text(f.value)));
            return Some((status, fields.collect(), &bytes[end..]));
        }
        bytes = &bytes[end..];
    }
}

/// The data of whole and begun chunks, and what follows the last if that came.
fn chunks(mut bytes: &[u8]) -> (Vec<u8>, Option<&[u8]>) {
    let mut data = Vec::new();
    let line = |bytes: &[u8]| bytes.windows(2).position(|pair| pair == b"\r\n");
    loop {
        let Some(end) = line(bytes) else {
            return (data, None);
        };
        let digits: String = bytes[..end]
            .iter()
            .take_while(|byte| byte.is_ascii_hexdigit())
            .map(|byte| char::from(*byte))
            .collect();
        let size = u64::from_str_radix(&digits, 16).unwrap_or(u64::MAX);
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        bytes = &bytes[end + 2..];
        if size == 0 {
            // Fields, up to an empty line.
            while let Some(end) = line(bytes) {
                bytes = &bytes[end + 2..];
                if end == 0 {
                    return (data, Some(bytes));
                }
            }
            return (data, None);
        }
        let here = size.min(bytes.len());
        data.extend_from_slice(&bytes[..here]);
        if bytes.len() < size.saturating_add(2) {
            return (data, None);
        }
        bytes = &bytes[size + 2..];
    }
}
