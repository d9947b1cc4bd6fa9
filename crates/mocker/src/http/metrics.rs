//! The page that Prometheus reads, under vLLM's names.

use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::choice::{Choice, Piece};
use super::server::Mock;

const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const GAP: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const WHOLE: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: vec![0; bounds.len() + 1],
            sum: 0.0,
        }
    }

    fn record(&mut self, span: Duration, times: u64) {
        let seconds = span.as_secs_f64();
        let at = self.bounds.partition_point(|bound| *bound < seconds);
        if let Some(count) = self.counts.get_mut(at) {
            *count += times;
        }
        self.sum += seconds * times as f64;
    }

    fn write(&self, page: &mut String, name: &str, help: &str, labels: &str) {
        let _ = write!(
            page,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} histogram\n"
        );
        let mut sum = 0;
        for (at, count) in self.counts.iter().enumerate() {
            sum += count;
            let bound = self
                .bounds
                .get(at)
                .map_or_else(|| "+Inf".to_owned(), |b| format!("{b:?}"));
            let _ = writeln!(page, "vllm:{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let _ = writeln!(page, "vllm:{name}_count{{{labels}}} {sum}");
        let _ = writeln!(page, "vllm:{name}_sum{{{labels}}} {:?}", self.sum);
    }
}

#[derive(Debug)]
struct Inner {
    ended: [u64; REASONS.len()],
    first_token: Histogram,
    gap: Histogram,
    whole: Histogram,
}

/// What the HTTP side has seen.
#[derive(Debug)]
pub(crate) struct Stats {
    inner: Mutex<Inner>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                ended: [0; REASONS.len()],
                first_token: Histogram::new(&FIRST_TOKEN),
                gap: Histogram::new(&GAP),
                whole: Histogram::new(&WHOLE),
            }),
        }
    }
}

impl Stats {
    /// A piece of an answer came.
    pub(crate) fn saw(&self, choice: &mut Choice, piece: &Piece) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let count = piece.tokens.len() as u64;
        match choice.last {
            None if count > 0 => inner.first_token.record(now - choice.began, 1),
            Some(last) if count > 0 => inner.gap.record((now - last) / count as u32, count),
            _ => {}
        }
        if count > 0 {
            choice.last = Some(now);
        }
        if let Some(end) = &piece.end {
            inner.whole.record(now - choice.began, 1);
            if let Some(at) = REASONS.iter().position(|reason| *reason == end.reason) {
                inner.ended[at] += 1;
            }
        }
    }
}

/// The whole page.
pub(crate) fn page(mock: &Mock) -> String {
    let mut page = String::new();
    let model = mock
        .model
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    let labels = |rank: usize| format!("engine=\"{rank}\",model_name=\"{model}\"");
    gauges_and_counters(mock, &mut page, &labels);
    let stats = mock
        .stats
        .inner
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let _ = write!(
        page,
        "# HELP vllm:request_success_total Count of successfully processed requests.\n# TYPE vllm:request_success_total counter\n"
    );
    for (reason, count) in REASONS.iter().zip(stats.ended) {
        let _ = writeln!(
            page,
            "vllm:request_success_total{{{},finished_reason=\"{reason}\"}} {count}",
            labels(0)
        );
    }
    stats.first_token.write(
        &mut page,
        "time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        &labels(0),
    );
    stats.gap.write(
        &mut page,
        "inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        &labels(0),
    );
    stats.whole.write(
        &mut page,
        "e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        &labels(0),
    );
    page
}

fn gauges_and_counters(mock: &Mock, page: &mut String, labels: &dyn Fn(usize) -> String) {
    let ranks: Vec<crate::Status> = mock.worker.status().collect();
    // What is kept for others is taken for shared by all ranks.
    let side = mock.part.side();
    let kept = side.map_or(0, |side| side.kept_blocks());
    let kept_each = kept.div_ceil(ranks.len().max(1) as u64);
    let mut rows = |name: &str, kind: &str, help: &str, of: &dyn Fn(&crate::Status) -> f64| {
        let _ = write!(
            page,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}\n"
        );
        for (rank, status) in ranks.iter().enumerate() {
            let _ = writeln!(page, "vllm:{name}{{{}}} {:?}", labels(rank), of(status));
        }
    };
    let count = |n: u64| n as f64;
    if let Some(side) = side {
        rows(
            "nixl_num_kv_expired_reqs_total",
            "counter",
            "Number of requests whose KV blocks expired before they were fetched.",
            &|_| count(side.expired()),
        );
        rows(
            "nixl_num_failed_transfers_total",
            "counter",
            "Number of failed NIXL KV cache transfers.",
            &|_| count(side.failed()),
        );
    }
    rows(
        "num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        &|s| f64::from(s.load.running),
    );
    rows(
        "num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        &|s| f64::from(s.load.waiting),
    );
    rows(
        "kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        &|s| {
            let used = u64::from(s.load.used_blocks) + kept_each;
            used as f64 / f64::from(s.load.total_blocks.max(1))
        },
    );
    rows(
        "prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        &|s| count(s.counters.queried_tokens),
    );
    rows(
        "prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        &|s| count(s.counters.hit_tokens),
    );
    rows(
        "num_preemptions_total",
        "counter",
        "Cumulative number of preemption from the engine.",
        &|s| count(s.counters.preemptions),
    );
    rows(
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        &|s| count(s.counters.prompt_tokens),
    );
    rows(
        "prompt_tokens_cached_total",
        "counter",
        "Number of cached prompt tokens.",
        &|s| count(s.counters.cached_tokens),
    );
    rows(
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        &|s| count(s.counters.output_tokens),
    );
    let engine = &mock.worker.options().engine;
    let _ = write!(
        page,
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n"
    );
    for rank in 0..ranks.len() {
        let _ = writeln!(
            page,
            "vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"{}\",engine=\"{rank}\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{}\"}} 1.0",
            engine.block_size,
            if engine.prefix_caching {
                "True"
            } else {
                "False"
            },
            u64::from(engine.num_blocks) * u64::from(engine.block_size),
            engine.num_blocks
        );
    }
}
