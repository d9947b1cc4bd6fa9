//! The spans of one request: its stay here, and its stay at the engine.

use http::{HeaderMap, HeaderName, HeaderValue};
use kvasir_telemetry::{Attribute, Clock, RequestSpans, Span, SpanKind, Tracer};
use kvasir_types::Time;

use crate::observe::outcomes::RequestOutcome;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// A request that is traced.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    tracer: Tracer,
    spans: RequestSpans,
}

/// When what a span is about happened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) received: Time,
    /// It was first sent to a worker then.
    pub(crate) placed: Option<Time>,
    pub(crate) ended: Time,
}

impl RequestTrace {
    /// A request came with these headers.
    pub(crate) fn begin(tracer: Option<&Tracer>, headers: &HeaderMap) -> Option<Box<Self>> {
        let tracer = tracer?.clone();
        let parent = headers
            .get(TRACEPARENT)
            .and_then(|value| value.to_str().ok());
        let spans = tracer.begin(parent);
        Some(Box::new(Self { tracer, spans }))
    }

    /// Tells the engine whose child its work is.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::try_from(self.spans.client.to_string()) {
            headers.insert(TRACEPARENT, value);
        }
    }

    /// The request has ended.
    pub(crate) fn finish(
        &self,
        clock: Clock,
        times: Times,
        endpoint: &'static str,
        model: &str,
        ended: &RequestOutcome,
    ) {
        let RequestSpans {
            parent,
            server,
            client,
        } = self.spans;
        let failed = ended.status >= 500 || ended.status == 499;
        let end_unix_nanos = clock.unix_nanos(times.ended);
        if let Some(placed) = times.placed {
            self.tracer.finish(Span {
                context: client,
                parent_id: server.span_id,
                parent_is_remote: false,
                kind: SpanKind::Client,
                name: "engine",
                start_unix_nanos: clock.unix_nanos(placed),
                end_unix_nanos,
                failed,
                attributes: of_worker(ended),
            });
        }
        self.tracer.finish(Span {
            context: server,
            parent_id: parent.map_or(0, |parent| parent.span_id),
            parent_is_remote: parent.is_some(),
            kind: SpanKind::Server,
            name: endpoint,
            start_unix_nanos: clock.unix_nanos(times.received),
            end_unix_nanos,
            failed,
            attributes: of_request(model, ended),
        });
    }
}

fn of_request(model: &str, ended: &RequestOutcome) -> Vec<(&'static str, Attribute)> {
    let text = |text: &str| Some(Attribute::Text(text.to_owned()));
    let count = |tokens: Option<u32>| tokens.map(|tokens| Attribute::Number(tokens.into()));
    let ttft = ended.first_token.map(|span| span.as_millis() as i64);
    let all = [
        ("kvasir.request.id", text(&ended.id.to_string())),
        (
            "kvasir.client_request.id",
            ended.given.as_deref().and_then(text),
        ),
        ("gen_ai.request.model", text(model)),
        (
            "http.response.status_code",
            Some(Attribute::Number(ended.status.into())),
        ),
        ("gen_ai.usage.input_tokens", count(ended.prompt_tokens)),
        ("gen_ai.usage.output_tokens", count(ended.output_tokens)),
        ("kvasir.ttft_ms", ttft.map(Attribute::Number)),
    ];
    let known = all
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)));
    known.chain(of_worker(ended)).collect()
}

fn of_worker(ended: &RequestOutcome) -> Vec<(&'static str, Attribute)> {
    let count = |tokens: Option<u32>| tokens.map(|tokens| Attribute::Number(tokens.into()));
    let target = ended.target;
    let all = [
        // An id has 64 bits; numbers of traces have a sign.
        (
            "kvasir.worker.id",
            target.map(|t| Attribute::Text(t.worker.to_string())),
        ),
        ("kvasir.worker.rank", count(target.map(|t| t.rank.0))),
        (
            "kvasir.cached_tokens.predicted",
            count(ended.predicted_tokens),
        ),
        ("kvasir.cached_tokens.reported", count(ended.cached_tokens)),
    ];
    all.into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}
