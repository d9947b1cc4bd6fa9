//! Which header fields are passed on, in both directions (RFC 9110, section 7.6).

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use kvasir_openai::is_override_header;
use kvasir_types::DpRank;

use crate::http::via::Via;
use crate::observe::outcomes::REQUEST_ID;

/// The rank that an engine with several is to use.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The client's fields as any engine gets them: without those of its connection, with our name and the
/// request's.
pub(super) fn to_engine(mut client: HeaderMap, via: &Via, name: &HeaderValue) -> HeaderMap {
    leave_connection(&mut client);
    leave_overrides(&mut client);
    // What we look into must not be compressed.
    let ours = [
        header::HOST,
        header::CONTENT_LENGTH,
        header::EXPECT,
        header::ACCEPT_ENCODING,
    ];
    for ours in ours {
        client.remove(ours);
    }
    client.append(header::VIA, via.field().clone());
    client.insert(REQUEST_ID, name.clone());
    join_cookies(&mut client);
    client
}

/// HTTP/2 may cut a cookie into several fields; before HTTP/1.1 they are one again (RFC 9113, section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs = || headers.get_all(header::COOKIE).iter();
    if crumbs().nth(1).is_none() {
        return;
    }
    let crumbs: Vec<&[u8]> = crumbs().map(HeaderValue::as_bytes).collect();
    if let Ok(whole) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        headers.insert(header::COOKIE, whole);
    }
}

/// The field that tells an engine which of its ranks is to answer.
pub(super) fn rank_field(rank: DpRank) -> (HeaderName, HeaderValue) {
    (RANK, HeaderValue::from(rank.0))
}

/// The engine's fields as the client gets them.
pub(super) fn to_client(mut engine: HeaderMap) -> HeaderMap {
    leave_connection(&mut engine);
    leave_overrides(&mut engine);
    engine
}

/// Takes out the fields that belong to one connection and not to the message.
fn leave_connection(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let connection = headers.get_all(header::CONNECTION);
        let listed: Vec<HeaderName> = connection
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in &listed {
            headers.remove(name);
        }
    }
    // Most messages have none of them: looking through the few fields is cheaper than asking for each by name.
    while let Some(name) = headers
        .keys()
        .find(|name| OF_CONNECTION.contains(name))
        .cloned()
    {
        headers.remove(name);
    }
}

/// Takes out the fields by which SGLang lets a router say what no client may.
fn leave_overrides(headers: &mut HeaderMap) {
    while let Some(name) = headers
        .keys()
        .find(|name| is_override_header(name.as_str()))
        .cloned()
    {
        headers.remove(name);
    }
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

/// Whether the body is text, in which an engine may say something of other engines: what says nothing of itself may be.
pub(super) fn is_text(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE);
    value.is_none_or(|value| {
        let value = value.as_bytes().to_ascii_lowercase();
        let has = |part: &[u8]| memchr::memmem::find(&value, part).is_some();
        value.trim_ascii_start().starts_with(b"text/") || has(b"json")
    })
}

/// Whether the length of the body is said before it comes.
pub(super) fn is_sized(headers: &HeaderMap) -> bool {
    headers.contains_key(header::CONTENT_LENGTH)
}

/// Whether the body ends only with its connection, so that its end cannot be told from a death.
pub(super) fn is_until_close(headers: &HeaderMap) -> bool {
    !headers.contains_key(header::TRANSFER_ENCODING) && !is_sized(headers)
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

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: HeaderValue = HeaderValue::from_static("ours");

    fn via() -> Via {
        Via::new(kvasir_types::RequestId(1))
    }

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
        let to_engine = to_engine(headers.clone(), &via(), &NAME);
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
            ("x-request-id", ""),
            ("x-request-id", "theirs"),
            ("via", "1.0 before"),
            ("x-override-bootstrap-host", "h"),
            ("x-override-rid", "1"),
        ]);
        let out = to_engine(headers, &via(), &NAME);
        assert_eq!(names(&out), ["via", "x-request-id"]);
        let called: Vec<_> = out.get_all("x-request-id").iter().collect();
        assert_eq!(called, ["ours"], "once, and as everybody calls it");
        let via: Vec<&HeaderValue> = out.get_all("via").iter().collect();
        assert_eq!(via, ["1.0 before", "1.1 kvasir-00000001"]);
    }

    #[test]
    fn a_cookie_in_crumbs_is_one_again() {
        let crumbs = map(&[("cookie", "a=1"), ("x", "1"), ("cookie", "b=2; c=3")]);
        let out = to_engine(crumbs, &via(), &NAME);
        let cookies: Vec<_> = out.get_all("cookie").iter().collect();
        assert_eq!(cookies, ["a=1; b=2; c=3"]);
        assert_eq!(
            to_engine(map(&[("cookie", "a=1")]), &via(), &NAME)["cookie"],
            "a=1"
        );
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
