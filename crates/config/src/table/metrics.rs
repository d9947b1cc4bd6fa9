//! Rows: where the buckets of the frontend's histograms lie.
//!
//! Bounds are 0, then spaced evenly by logarithm from the least to the greatest, rounded to two digits.

use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { METRICS_ROWS, Group::Observability, Scope::SERVE;

    /// Buckets for the request duration: lower end of the spacing, in seconds.
    METRICS_REQUEST_DURATION_MIN: f64 = "metrics-request-duration-min" =>
        env(&[var("DYN_METRICS_REQUEST_DURATION_MIN")]).default("1").floats(1e-9, 1e12).effective();

    /// Buckets for the request duration: last bound, in seconds.
    METRICS_REQUEST_DURATION_MAX: f64 = "metrics-request-duration-max" =>
        env(&[var("DYN_METRICS_REQUEST_DURATION_MAX")]).default("512").floats(1e-9, 1e12).effective();

    /// Buckets for the request duration: number of bounds.
    METRICS_REQUEST_DURATION_COUNT: u32 = "metrics-request-duration-count" =>
        env(&[var("DYN_METRICS_REQUEST_DURATION_COUNT")]).default("10").ints(2, 200).effective();

    /// Buckets for the time to first token: lower end of the spacing, in seconds.
    METRICS_TTFT_MIN: f64 = "metrics-ttft-min" =>
        env(&[var("DYN_METRICS_TTFT_MIN")]).default("0.001").floats(1e-9, 1e12).effective();

    /// Buckets for the time to first token: last bound, in seconds.
    METRICS_TTFT_MAX: f64 = "metrics-ttft-max" =>
        env(&[var("DYN_METRICS_TTFT_MAX")]).default("480").floats(1e-9, 1e12).effective();

    /// Buckets for the time to first token: number of bounds.
    METRICS_TTFT_COUNT: u32 = "metrics-ttft-count" =>
        env(&[var("DYN_METRICS_TTFT_COUNT")]).default("18").ints(2, 200).effective();

    /// Buckets for the inter-token latency: lower end of the spacing, in seconds.
    METRICS_ITL_MIN: f64 = "metrics-itl-min" =>
        env(&[var("DYN_METRICS_ITL_MIN")]).default("0.001").floats(1e-9, 1e12).effective();

    /// Buckets for the inter-token latency: last bound, in seconds.
    METRICS_ITL_MAX: f64 = "metrics-itl-max" =>
        env(&[var("DYN_METRICS_ITL_MAX")]).default("80").floats(1e-9, 1e12).effective();

    /// Buckets for the inter-token latency: number of bounds.
    METRICS_ITL_COUNT: u32 = "metrics-itl-count" =>
        env(&[var("DYN_METRICS_ITL_COUNT")]).default("20").ints(2, 200).effective();

    /// Buckets for prompt lengths and cached tokens: lower end of the spacing, in tokens.
    METRICS_INPUT_SEQUENCE_MIN: f64 = "metrics-input-sequence-min" =>
        env(&[var("DYN_METRICS_INPUT_SEQUENCE_MIN")]).default("50").floats(1e-9, 1e12).effective();

    /// Buckets for prompt lengths and cached tokens: last bound, in tokens.
    METRICS_INPUT_SEQUENCE_MAX: f64 = "metrics-input-sequence-max" =>
        env(&[var("DYN_METRICS_INPUT_SEQUENCE_MAX")]).default("128000").floats(1e-9, 1e12).effective();

    /// Buckets for prompt lengths and cached tokens: number of bounds.
    METRICS_INPUT_SEQUENCE_COUNT: u32 = "metrics-input-sequence-count" =>
        env(&[var("DYN_METRICS_INPUT_SEQUENCE_COUNT")]).default("12").ints(2, 200).effective();

    /// Buckets for output lengths: lower end of the spacing, in tokens.
    METRICS_OUTPUT_SEQUENCE_MIN: f64 = "metrics-output-sequence-min" =>
        env(&[var("DYN_METRICS_OUTPUT_SEQUENCE_MIN")]).default("50").floats(1e-9, 1e12).effective();

    /// Buckets for output lengths: last bound, in tokens.
    METRICS_OUTPUT_SEQUENCE_MAX: f64 = "metrics-output-sequence-max" =>
        env(&[var("DYN_METRICS_OUTPUT_SEQUENCE_MAX")]).default("32000").floats(1e-9, 1e12).effective();

    /// Buckets for output lengths: number of bounds.
    METRICS_OUTPUT_SEQUENCE_COUNT: u32 = "metrics-output-sequence-count" =>
        env(&[var("DYN_METRICS_OUTPUT_SEQUENCE_COUNT")]).default("10").ints(2, 200).effective();
}
