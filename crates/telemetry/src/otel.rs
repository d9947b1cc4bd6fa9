//! Spans to an OpenTelemetry collector: OTLP over HTTP with protobuf bodies.
//!
//! How a request reaches the collector is the caller's ([`Carry`]). Batches leave from a thread of the SDK's own, at most every few seconds; its queue is bounded and drops what
//! does not fit. A collector that is away costs nobody a request.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Request, Response};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind as OtelKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SpanData, SpanProcessor};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::trace::{Attribute, Span, SpanKind, SpanSink};

/// A collector has this long to take a batch.
pub const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Starts exporting through `carry`. To be called on a tokio runtime, which then carries the batches.
    ///
    /// # Errors
    /// In words, if the endpoint is no address that can be used.
    pub fn start(options: &OtelOptions, carry: Arc<Carry>) -> Result<Arc<Self>, String> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Courier {
                runtime: Handle::current(),
                carry,
            })
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&options.endpoint)
            .with_timeout(EXPORT_TIMEOUT)
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
        if let Err(error) = self.processor.shutdown_with_timeout(EXPORT_TIMEOUT) {
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

/// Brings one request to the collector and its answer back, within [`EXPORT_TIMEOUT`]; an error says why not.
pub type Carry = dyn Fn(Request<Bytes>) -> Carried + Send + Sync;
/// What [`Carry`] is waited for with.
pub type Carried = Pin<Box<dyn Future<Output = Result<Response<Bytes>, String>> + Send>>;

/// Carries a batch to the collector on the runtime, whichever thread asks.
struct Courier {
    runtime: Handle,
    carry: Arc<Carry>,
}

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Courier")
    }
}

#[async_trait::async_trait]
impl HttpClient for Courier {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (answer, answered) = oneshot::channel();
        let sending = (self.carry)(request);
        // Ends by itself: it has a deadline.
        self.runtime.spawn(async move {
            let _ = answer.send(sending.await);
        });
        let sent = answered.await.map_err(|_| "the runtime is gone")?;
        Ok(sent?)
    }
}
