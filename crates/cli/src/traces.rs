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
    let sink = kvasir_telemetry::Otel::start(&options).map_err(|error| {
        let endpoint = &options.endpoint;
        crate::wiring::BadConfig(format!(
            "--otel-exporter-otlp-traces-endpoint {endpoint}: {error}"
        ))
    })?;
    tracing::info!(endpoint = %options.endpoint, "spans go to a collector");
    let share = settings.get(keys::OTEL_TRACES_SAMPLER_ARG);
    // Ids must differ between processes, whatever --seed says.
    let seed = RandomState::new().build_hasher().finish();
    Ok(Some(Tracer::new(sink, share, seed)))
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
