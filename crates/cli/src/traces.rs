//! Where the spans of requests go: to a collector, in a build that has OpenTelemetry.

use kvasir_config::{Settings, keys};
use kvasir_frontend::App;
use kvasir_telemetry::Tracer;

use crate::wiring::Failure;

/// What makes spans, if `--otel-export-enabled` asks for them.
pub(crate) fn tracer(settings: &Settings) -> Result<Option<Tracer>, Failure> {
    if !settings.get(keys::OTEL_EXPORT_ENABLED) {
        return Ok(None);
    }
    start(settings)
}

#[cfg(feature = "otel")]
fn start(settings: &Settings) -> Result<Option<Tracer>, Failure> {
    use std::hash::{BuildHasher, Hasher, RandomState};

    let options = kvasir_telemetry::OtelOptions {
        endpoint: settings.get(keys::OTEL_EXPORTER_OTLP_TRACES_ENDPOINT),
        service_name: settings.get(keys::OTEL_SERVICE_NAME),
    };
    let bad = |error: &dyn std::fmt::Display| {
        crate::wiring::BadConfig(format!("--otel-exporter-otlp-traces-endpoint: {error}"))
    };
    let carry = carry(&options.endpoint).map_err(|error| bad(&error))?;
    let sink = kvasir_telemetry::Otel::start(&options, carry).map_err(|error| bad(&error))?;
    tracing::info!(endpoint = %options.endpoint, "spans go to a collector");
    let share = settings.get(keys::OTEL_TRACES_SAMPLER_ARG);
    // Ids must differ between processes, whatever --seed says.
    let seed = RandomState::new().build_hasher().finish();
    Ok(Some(Tracer::new(sink, share, seed)))
}

/// Brings batches to the collector at `endpoint`, over a connection for each.
#[cfg(feature = "otel")]
fn carry(
    endpoint: &str,
) -> Result<std::sync::Arc<kvasir_telemetry::Carry>, kvasir_upstream::AddressError> {
    use kvasir_upstream::{Bounds, Client, WorkerTls, parse_url};

    /// Longest answer of a collector that is read.
    const ANSWER_BYTES_MAX: usize = 1 << 20;
    // The path comes with each request.
    let mut collector = parse_url(endpoint)?;
    collector.prefix.clear();
    let bounds = Bounds {
        timeout: kvasir_telemetry::EXPORT_TIMEOUT,
        answer_bytes_max: ANSWER_BYTES_MAX,
    };
    let client = Client::new(WorkerTls::default(), bounds);
    Ok(std::sync::Arc::new(move |request| {
        let (client, collector) = (client.clone(), collector.clone());
        Box::pin(async move {
            let answer = client.fetch(&collector, request).await;
            answer.map_err(|error| error.to_string())
        })
    }))
}

#[cfg(not(feature = "otel"))]
fn start(settings: &Settings) -> Result<Option<Tracer>, Failure> {
    tracing::warn!(
        endpoint = %settings.get(keys::OTEL_EXPORTER_OTLP_TRACES_ENDPOINT),
        service = %settings.get(keys::OTEL_SERVICE_NAME),
        share = settings.get(keys::OTEL_TRACES_SAMPLER_ARG),
        "--otel-export-enabled: this build has no OpenTelemetry; build with --features otel"
    );
    Ok(None)
}

/// Sends what is left, at the end.
pub(crate) async fn flush(app: &App) {
    if let Some(tracer) = app.options().tracer.clone() {
        let _ = tokio::task::spawn_blocking(move || tracer.flush()).await;
    }
}
