//! Requests for OpenAI workers: the client's body goes to the chosen engine, the engine's answer comes back.
//!
//! We read only what routing needs and refuse only what no engine could read. The engine judges the rest, and
//! its answers pass unchanged, errors included.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::Full;
use kvasir_openai::{
    ApiError, Endpoint, HeaderHints, Nvext, ResponseNvext, Scan, Timing, WorkerIds,
};
use kvasir_router::{Arrival, Outcome};
use kvasir_types::{Time, Token, WorkerRank};

use crate::generate::Asked;
use crate::host::Booking;
use crate::models::ServedModel;
use crate::place::{self, Blocks};
use crate::relay::{Extras, Relay};
use crate::reply::{Reply, ReplyBody};
use crate::upstream::{UpstreamBody, UpstreamError, Upstreams};
use crate::watch::Watch;
use crate::{App, ask, prompt};

/// Bytes of text that count as one token where no tokenizer is at hand.
const BYTES_PER_TOKEN: usize = 4;
/// The rank that an engine with several is to use.
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Headers that belong to one connection and not to the request (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// A request on its way to an OpenAI worker.
struct Forward<'a> {
    app: &'a Arc<App>,
    model: &'a Arc<ServedModel>,
    workers: &'a Upstreams,
    parts: &'a Parts,
    nvext: Nvext,
    /// What the engine gets.
    body: Bytes,
    stream: bool,
    /// Usage is our wish and not the client's.
    hide_usage: bool,
    received: Time,
}

/// Answers a request by one of the model's OpenAI workers.
pub(crate) async fn handle(
    app: &Arc<App>,
    asked: &Asked,
    scan: &Scan<'_>,
    model: &Arc<ServedModel>,
    workers: &Upstreams,
) -> Result<Reply, ApiError> {
    let Asked {
        id,
        endpoint,
        parts,
        body,
    } = asked;
    let name = Some(&model.name);
    let watch = Watch::start(
        app.metrics(),
        app.clock(),
        *id,
        name,
        *endpoint,
        scan.stream(),
    );
    let (nvext, headers) = match extension(app, scan, &parts.headers) {
        Ok(extension) => extension,
        Err(error) => return Err(watch.fail(error)),
    };
    let tokens = routing_tokens(app, model, *endpoint, scan, &nvext);
    let salt = nvext
        .cache_salt
        .clone()
        .or_else(|| scan.cache_salt().map(Into::into));
    let blocks = place::name_blocks(app, model, &tokens, salt.as_deref().unwrap_or_default());
    let arrival = ask::arrival(*id, tokens.len().max(1), &nvext, &headers);
    let hide_usage = scan.stream() && !scan.include_usage();
    let forward = Forward {
        app,
        model,
        workers,
        parts,
        body: outgoing(scan, body, &nvext, hide_usage),
        nvext,
        stream: scan.stream(),
        hide_usage,
        received: watch.received(),
    };
    forward.run(arrival, &blocks, watch).await
}

/// What the client says to the router, headers laid over the body.
fn extension(
    app: &App,
    scan: &Scan<'_>,
    headers: &HeaderMap,
) -> Result<(Nvext, HeaderHints), ApiError> {
    if !app.options().nvext_enabled {
        return Ok(Default::default());
    }
    let mut nvext = scan.nvext().map_or(Ok(Nvext::default()), Nvext::parse)?;
    let hints = HeaderHints::read(ask::header_pairs(headers));
    hints.apply(&mut nvext);
    Ok((nvext, hints))
}

/// The prompt's tokens as the engine will see them, or a stand-in that is the same for the same text.
fn routing_tokens(
    app: &App,
    model: &ServedModel,
    endpoint: Endpoint,
    scan: &Scan<'_>,
    nvext: &Nvext,
) -> Vec<Token> {
    if let Some(tokens) = &nvext.token_data {
        return tokens.clone();
    }
    let now = app.clock().unix_secs(app.clock().now());
    let chat = endpoint == Endpoint::Chat;
    let exact = model
        .text()
        .and_then(|text| prompt::of_scan(text, scan, chat, now));
    exact.unwrap_or_else(|| {
        let text = match endpoint {
            Endpoint::Chat => scan.messages(),
            Endpoint::Completions => scan.raw("prompt"),
        };
        stand_in(text.unwrap_or_default())
    })
}

/// Tokens made of the text's bytes: no engine knows them, but equal beginnings give equal blocks.
fn stand_in(text: &str) -> Vec<Token> {
    let word = |bytes: &[u8]| bytes.iter().fold(0u32, |sum, b| sum << 8 | u32::from(*b));
    text.as_bytes().chunks(BYTES_PER_TOKEN).map(word).collect()
}

/// The body that the engine gets: the client's, less what is ours and plus what we need to learn.
fn outgoing(scan: &Scan<'_>, body: &Bytes, nvext: &Nvext, ask_usage: bool) -> Bytes {
    let mut edits = scan.edit();
    edits.remove("nvext");
    if ask_usage {
        edits.ask_usage();
    }
    if let Some(salt) = &nvext.cache_salt {
        edits.set(
            "cache_salt",
            &serde_json::Value::from(salt.as_str()).to_string(),
        );
    }
    if let Some(priority) = nvext.hints.priority {
        edits.set("priority", &priority.to_string());
    }
    edits.apply(body)
}

impl Forward<'_> {
    async fn run(
        &self,
        mut arrival: Arrival,
        blocks: &Blocks,
        watch: Watch,
    ) -> Result<Reply, ApiError> {
        for attempt in 0.. {
            let booking = match place::book(self.app, self.model, arrival.clone(), blocks).await {
                Ok(booking) => booking,
                Err(error) => return Err(watch.fail(place::refusal(self.app, &error))),
            };
            let target = booking.target();
            let last = attempt >= self.app.options().retry_limit;
            let outcome = match self.send(target).await {
                Ok(response) if last || !try_elsewhere(response.status()) => {
                    return Ok(self.answer(response, booking, watch));
                }
                Ok(_) => Outcome::Overloaded,
                Err(error) => {
                    tracing::warn!(worker = %target, %error, attempt, "no answer");
                    Outcome::Unreachable
                }
            };
            booking.finish(outcome);
            if last {
                break;
            }
            let labels = [&*self.model.name, "new_request"];
            self.app
                .metrics()
                .model_migration_total
                .with_label_values(&labels)
                .inc();
            arrival.failed.push(target.worker);
            arrival.last_failure = Some(outcome);
        }
        Err(watch.fail(ApiError::unavailable()))
    }

    async fn send(&self, target: WorkerRank) -> Result<Response<UpstreamBody>, UpstreamError> {
        let pool = self.workers.get(target.worker).ok_or(UpstreamError::Gone)?;
        let path = self.parts.uri.path_and_query().map_or("/", |p| p.as_str());
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.parts.method.clone();
        *request.uri_mut() = format!("{}{path}", pool.address().prefix)
            .parse()
            .unwrap_or(Uri::from_static("/"));
        *request.headers_mut() = self.request_headers(&pool.authority(), target);
        pool.send(request).await
    }

    fn request_headers(&self, authority: &HeaderValue, target: WorkerRank) -> HeaderMap {
        let mut headers = end_to_end(&self.parts.headers);
        headers.remove(header::CONTENT_LENGTH);
        headers.remove(header::EXPECT);
        headers.insert(header::HOST, authority.clone());
        if target.rank.0 > 0 {
            headers.insert(RANK_HEADER, HeaderValue::from(target.rank.0));
        }
        headers
    }

    fn answer(&self, response: Response<UpstreamBody>, booking: Booking, watch: Watch) -> Reply {
        let (head, body) = response.into_parts();
        let extras = self.extras(&booking);
        let relay = Relay::new(body, booking, watch, self.app.clock());
        let events = self.stream && head.status.is_success() && is_event_stream(&head.headers);
        let relay = if events {
            relay.of_events(self.hide_usage, extras)
        } else {
            relay
        };
        let mut reply = Response::new(ReplyBody::stream(Box::new(relay)));
        *reply.status_mut() = head.status;
        *reply.headers_mut() = end_to_end(&head.headers);
        reply
    }

    fn extras(&self, booking: &Booking) -> Option<Extras> {
        let wanted = &self.nvext.extra;
        if !wanted.worker_id && !wanted.timing {
            return None;
        }
        let target = booking.target();
        let ids = WorkerIds::aggregated(target.worker.0, target.rank.0);
        let each = ResponseNvext {
            worker_id: wanted.worker_id.then_some(ids),
            ..Default::default()
        };
        let timing = wanted.timing.then(|| Timing {
            request_received_ms: self.app.clock().unix_millis(self.received),
            ..Timing::default()
        });
        Some(Extras {
            last: ResponseNvext {
                timing,
                ..each.clone()
            },
            each,
        })
    }
}

/// Whether an engine's refusal says nothing about the request, so that another may take it.
fn try_elsewhere(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    )
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let value = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok());
    value.is_some_and(|v| v.trim_start().starts_with("text/event-stream"))
}

/// The headers that go on: all but those of this connection.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let mut kept = headers.clone();
    for name in HOP_BY_HOP.iter().chain(&named) {
        kept.remove(name);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_connection_stay_behind() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Mine"),
            ("keep-alive", "timeout=5"),
            ("x-mine", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("traceparent", "00-1-2-01"),
            ("authorization", "Bearer k"),
        ] {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let kept = end_to_end(&headers);
        let mut names: Vec<&str> = kept.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "traceparent"]);
    }

    #[test]
    fn a_body_without_extensions_goes_out_byte_for_byte() {
        let body = Bytes::from_static(b"{ \"model\":\"m\",  \"prompt\" : \"a\",\"x\":[1, 2] }");
        let scan = Scan::parse(&body).unwrap();
        assert_eq!(outgoing(&scan, &body, &Nvext::default(), false), body);
    }

    #[test]
    fn only_extensions_change() {
        let body = Bytes::from_static(
            b"{\"model\":\"m\", \"nvext\":{\"agent_hints\":{\"priority\":3}},\"stream\":true, \"x\": 1}",
        );
        let scan = Scan::parse(&body).unwrap();
        let nvext = Nvext::parse(scan.nvext().unwrap()).unwrap();
        let out = outgoing(&scan, &body, &nvext, true);
        let text = std::str::from_utf8(&out).unwrap();
        assert!(
            text.ends_with("\"model\":\"m\", \"stream\":true, \"x\": 1}"),
            "{text}"
        );
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["priority"], 3);
        assert_eq!(value["stream_options"]["include_usage"], true);
        assert!(value.get("nvext").is_none());
    }

    #[test]
    fn equal_beginnings_stand_in_as_equal_tokens() {
        let (a, b) = (
            stand_in("the same beginning, one"),
            stand_in("the same beginning, two"),
        );
        let shared = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        assert_eq!(shared, "the same beginning, ".len() / BYTES_PER_TOKEN);
        assert!(stand_in("").is_empty());
    }
}
