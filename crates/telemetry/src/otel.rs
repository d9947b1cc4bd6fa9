//! Spans to an OpenTelemetry collector: OTLP over HTTP with protobuf bodies.
//!
//! Batches leave from a thread of the SDK's own, at most every few seconds; its queue is bounded and drops what
//! does not fit. A collector that is away costs nobody a request.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind as OtelKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SpanData, SpanProcessor};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::trace::{Attribute, Span, SpanKind, SpanSink};

/// A collector has this long to take a batch.
const EXPORT_PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer of a collector that is read.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Where spans go.
#[derive(Clone, Debug)]
pub struct OtelOptions {
    /// The collector's address for traces, such as `http://localhost:4318/v1/traces`.
    pub endpoint: String,
    /// How this process is called.
    pub service_name: String,
}

/// Exports spans in batches.
pub struct Otel {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
}

impl fmt::Debug for Otel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Otel")
    }
}

impl Otel {
    /// Starts exporting. To be called on a tokio runtime, which then carries the batches.
    ///
    /// # Errors
    /// In words, if the endpoint is no address that can be used.
    pub fn start(options: &OtelOptions) -> Result<Arc<Self>, String> {
        let uri: Uri = options
            .endpoint
            .parse()
            .map_err(|_| "not an address".to_owned())?;
        if uri.scheme_str() != Some("http") || uri.authority().is_none() {
            return Err("give an address such as http://localhost:4318/v1/traces; \
                        a collector elsewhere is reached through one on this machine"
                .to_owned());
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Courier {
                runtime: Handle::current(),
            })
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&options.endpoint)
            .with_timeout(EXPORT_PATIENCE)
            .build()
            .map_err(|error| error.to_string())?;
        let mut processor = BatchSpanProcessor::builder(exporter).build();
        let resource = Resource::builder()
            .with_service_name(options.service_name.clone())
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        processor.set_resource(&resource);
        let scope = InstrumentationScope::builder("kvasir")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build();
        Ok(Arc::new(Self { processor, scope }))
    }
}

impl SpanSink for Otel {
    fn finished(&self, span: Span) {
        self.processor.on_end(data(span, &self.scope));
    }

    fn flush(&self) {
        if let Err(error) = self.processor.shutdown_with_timeout(EXPORT_PATIENCE) {
            tracing::warn!(%error, "the last spans did not reach the collector");
        }
    }
}

fn data(span: Span, scope: &InstrumentationScope) -> SpanData {
    let at = |unix_nanos: u64| -> SystemTime { UNIX_EPOCH + Duration::from_nanos(unix_nanos) };
    let flags = match span.context.sampled {
        true => TraceFlags::SAMPLED,
        false => TraceFlags::default(),
    };
    let attribute = |(name, value): (&'static str, Attribute)| {
        let value: Value = match value {
            Attribute::Text(text) => text.into(),
            Attribute::Number(number) => number.into(),
        };
        KeyValue::new(name, value)
    };
    SpanData {
        span_context: SpanContext::new(
            TraceId::from(span.context.trace_id),
            SpanId::from(span.context.span_id),
            flags,
            false,
            TraceState::default(),
        ),
        parent_span_id: SpanId::from(span.parent_id),
        parent_span_is_remote: span.parent_is_remote,
        span_kind: match span.kind {
            SpanKind::Server => OtelKind::Server,
            SpanKind::Client => OtelKind::Client,
        },
        name: span.name.into(),
        start_time: at(span.start_unix_nanos),
        end_time: at(span.end_unix_nanos),
        attributes: span.attributes.into_iter().map(attribute).collect(),
        dropped_attributes_count: 0,
        events: Default::default(),
        links: Default::default(),
        status: match span.failed {
            true => Status::error(""),
            false => Status::Unset,
        },
        instrumentation_scope: scope.clone(),
    }
}

/// Carries a batch to the collector on the runtime, whichever thread asks.
#[derive(Debug)]
struct Courier {
    runtime: Handle,
}

#[async_trait::async_trait]
impl HttpClient for Courier {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (answer, answered) = oneshot::channel();
        // Ends by itself: it has a deadline.
        self.runtime.spawn(async move {
            let sent = tokio::time::timeout(EXPORT_PATIENCE, send(request)).await;
            let sent = sent.unwrap_or_else(|_| Err("the collector did not answer in time".into()));
            let _ = answer.send(sent);
        });
        answered
            .await
            .unwrap_or_else(|_| Err("the runtime is gone".into()))
    }
}

async fn send(mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let authority = request.uri().authority().ok_or("no host")?.clone();
    let port = authority.port_u16().unwrap_or(80);
    let host = authority.host().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, port)).await?;
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", |path| path.as_str());
    let path: Uri = path.parse()?;
    *request.uri_mut() = path;
    let host = HeaderValue::from_str(authority.as_str())?;
    request.headers_mut().insert(header::HOST, host);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let response = sender.send_request(request.map(Full::new)).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await?;
        Ok(Response::from_parts(head, body.to_bytes()))
    };
    // The connection only carries the exchange: how that ends is what counts.
    let carry = async {
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        answered = exchange => answered,
        never = carry => never,
    }
}
