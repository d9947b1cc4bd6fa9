//! Which header fields go on, in both directions (RFC 9110, section 7.6).

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use kvasir_types::{DpRank, RequestId};

use crate::outcomes::REQUEST_ID;

/// The rank that an engine with several is to use.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
/// How we name ourselves to engines; a gateway must (RFC 9110, section 7.6.3).
const VIA: HeaderValue = HeaderValue::from_static("1.1 kvasir");
/// Fields that are added to a request.
const ADDED: usize = 4;

/// The client's fields as any engine gets them: without those of its connection, with our name and the
/// request's.
pub(super) fn to_engine(client: &HeaderMap, id: RequestId) -> HeaderMap {
    let mut out = HeaderMap::with_capacity(client.len() + ADDED);
    let listed = Listed::of(client);
    for (name, value) in client {
        let ours = *name == header::HOST
            || *name == header::CONTENT_LENGTH
            || *name == header::EXPECT
            || is_of_connection(name)
            || listed.names(name);
        if !ours {
            out.append(name.clone(), value.clone());
        }
    }
    out.append(header::VIA, VIA);
    if !out.contains_key(REQUEST_ID)
        && let Ok(value) = HeaderValue::try_from(id.to_string())
    {
        out.insert(REQUEST_ID, value);
    }
    out
}

/// Those fields as one worker gets them.
pub(super) fn to_worker(engine: &HeaderMap, authority: HeaderValue, rank: DpRank) -> HeaderMap {
    let mut out = engine.clone();
    out.insert(header::HOST, authority);
    if rank.0 > 0 {
        out.insert(RANK, HeaderValue::from(rank.0));
    }
    out
}

/// The engine's fields as the client gets them.
pub(super) fn to_client(mut engine: HeaderMap) -> HeaderMap {
    let listed: Vec<HeaderName> = Listed::of(&engine).collect();
    for name in OF_CONNECTION.iter().chain(&listed) {
        engine.remove(name);
    }
    engine
}

/// Whether the body is a stream of events.
pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE);
    let expected = b"text/event-stream";
    value.is_some_and(|value| {
        let value = value.as_bytes().trim_ascii_start();
        value
            .get(..expected.len())
            .is_some_and(|begin| begin.eq_ignore_ascii_case(expected))
    })
}

/// Whether the body ends only with its connection, so that its end cannot be told from a death.
pub(super) fn is_until_close(headers: &HeaderMap) -> bool {
    !headers.contains_key(header::TRANSFER_ENCODING)
        && !headers.contains_key(header::CONTENT_LENGTH)
}

/// Fields that belong to one connection and not to the message.
const OF_CONNECTION: [HeaderName; 9] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

fn is_of_connection(name: &HeaderName) -> bool {
    OF_CONNECTION.contains(name)
}

/// Fields that `connection` lists: they belong to the connection too.
struct Listed<'h> {
    values: header::GetAll<'h, HeaderValue>,
}

impl<'h> Listed<'h> {
    fn of(headers: &'h HeaderMap) -> Self {
        Self {
            values: headers.get_all(header::CONNECTION),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &'h str> {
        self.values
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(str::trim)
    }

    fn names(&self, name: &HeaderName) -> bool {
        self.iter()
            .any(|listed| listed.eq_ignore_ascii_case(name.as_str()))
    }

    fn collect(&self) -> Vec<HeaderName> {
        self.iter().filter_map(|name| name.parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: RequestId = RequestId(1);

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        pairs.collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn fields_of_one_connection_stay_behind_both_ways() {
        let headers = map(&[
            ("connection", "keep-alive, X-Mine"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("x-mine", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("traceparent", "00-1-2-01"),
            ("authorization", "Bearer k"),
        ]);
        let to_engine = to_engine(&headers, ID);
        let added = ["authorization", "traceparent", "via", "x-request-id"];
        assert_eq!(names(&to_engine), added);
        assert_eq!(names(&to_client(headers)), ["authorization", "traceparent"]);
    }

    #[test]
    fn what_we_write_ourselves_is_not_copied() {
        let headers = map(&[
            ("host", "us"),
            ("content-length", "3"),
            ("expect", "100-continue"),
            ("x-request-id", "theirs"),
            ("via", "1.0 before"),
        ]);
        let out = to_worker(
            &to_engine(&headers, ID),
            HeaderValue::from_static("e:1"),
            DpRank(3),
        );
        assert_eq!(
            names(&out),
            ["host", "via", "x-data-parallel-rank", "x-request-id"]
        );
        assert_eq!(
            (&out["host"], &out["x-request-id"]),
            (&"e:1".parse().unwrap(), &"theirs".parse().unwrap())
        );
        let via: Vec<&HeaderValue> = out.get_all("via").iter().collect();
        assert_eq!(via, ["1.0 before", "1.1 kvasir"]);
    }

    #[test]
    fn a_stream_is_known_by_its_type() {
        assert!(is_event_stream(&map(&[(
            "content-type",
            "text/event-stream; charset=utf-8"
        )])));
        assert!(is_event_stream(&map(&[(
            "content-type",
            "Text/Event-Stream"
        )])));
        assert!(!is_event_stream(&map(&[(
            "content-type",
            "application/json"
        )])));
        assert!(!is_event_stream(&HeaderMap::new()));
    }
}
