//! One frame of `kvasir top`, from what a look at the frontend brought.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::page::Page;
use super::table::{Align, Table, cut};
use super::text::{self, UNKNOWN, count, number, span, whole};
use super::workers;

/// Everything that one look brought.
#[derive(Debug)]
pub(super) struct Look {
    /// The answer of `/workers`.
    pub(super) workers: Value,
    /// The answer of `/decisions`.
    pub(super) decisions: Value,
    /// The answer of `/shadow`.
    pub(super) shadows: Value,
    /// What the metrics count, if they could be read.
    pub(super) counts: Option<Counts>,
    /// When.
    pub(super) unix_ms: u64,
}

/// What only grows, and what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    in_flight: f64,
    waiting: f64,
    done: f64,
    failed: f64,
    cancelled: f64,
    rejected: f64,
    output_tokens: f64,
}

impl Counts {
    /// Reads a page of metrics.
    pub(super) fn read(page: &str) -> Self {
        let page = Page::read(page);
        let ended = |status: &str| page.sum("_requests_total", &[("status", status)]);
        // Those that asked for nothing that there is: scanners, mistyped paths, heads that are none.
        let astray = page.sum(
            "_requests_total",
            &[("status", "error"), ("endpoint", "unknown")],
        );
        Self {
            in_flight: page.sum("_inflight_requests", &[]),
            waiting: page.sum("dynamo_queued_requests", &[]),
            done: ended("success"),
            failed: ended("error") - astray,
            cancelled: page.sum("_model_cancellation_total", &[]),
            rejected: page.sum("_model_rejection_total", &[]),
            output_tokens: page.sum("_output_tokens_total", &[]),
        }
    }
}

/// What the latest requests were like.
#[derive(Debug, Default)]
struct Latest {
    requests: usize,
    ttft_ms: Vec<f64>,
    total_ms: Vec<f64>,
    prompt: f64,
    predicted: f64,
    cached: f64,
    /// Requests, prompt tokens and cached tokens of each rank.
    by_rank: BTreeMap<(u64, u64), (f64, f64, f64)>,
}

impl Latest {
    fn read(decisions: &Value) -> Self {
        let mut latest = Self::default();
        let rows = decisions.get("decisions").and_then(Value::as_array);
        for ended in rows
            .into_iter()
            .flatten()
            .filter_map(|row| row.get("outcome"))
        {
            let (Some(worker), Some(rank)) = (whole(ended, "worker"), whole(ended, "rank")) else {
                continue;
            };
            latest.requests += 1;
            latest.ttft_ms.extend(number(ended, "ttft_ms"));
            latest.total_ms.extend(number(ended, "total_ms"));
            let share = latest.by_rank.entry((worker, rank)).or_default();
            share.0 += 1.0;
            let tokens = |field: &str| number(ended, field);
            if let Some((prompt, cached)) =
                tokens("prompt_tokens").zip(tokens("reported_cached_tokens"))
            {
                latest.prompt += prompt;
                latest.cached += cached;
                latest.predicted += tokens("predicted_cached_tokens").unwrap_or(0.0);
                share.1 += prompt;
                share.2 += cached;
            }
        }
        latest.ttft_ms.sort_by(f64::total_cmp);
        latest.total_ms.sort_by(f64::total_cmp);
        latest
    }
}

/// The value below which the share `q` of a sorted list lies.
fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let at = (sorted.len().saturating_sub(1) as f64 * q).round() as usize;
    sorted.get(at).copied()
}

impl Look {
    /// The lines of a frame; rates are those since `before`.
    pub(super) fn frame(&self, url: &str, before: Option<&Self>, width: usize) -> Vec<String> {
        let latest = Latest::read(&self.decisions);
        let when = text::moment(self.unix_ms);
        let mut lines = vec![format!("kvasir top  {url}  {when} UTC")];
        lines.extend(self.traffic(before));
        lines.extend(quality(&latest));
        lines.extend(self.shadows());
        lines.push(String::new());
        let mut lines: Vec<String> = lines.iter().map(|line| cut(line, width)).collect();
        lines.extend(self.table(&latest).lines(width));
        lines
    }

    fn traffic(&self, before: Option<&Self>) -> Vec<String> {
        let Some(now) = &self.counts else {
            return vec!["requests   no metrics at /metrics".to_owned()];
        };
        let rates = before.and_then(|before| {
            let secs = self.unix_ms.saturating_sub(before.unix_ms) as f64 / 1e3;
            let then = before.counts?;
            let rate = |now: f64, then: f64| ((now - then) / secs).max(0.0);
            (secs > 0.0).then(|| {
                (
                    rate(now.done + now.failed, then.done + then.failed),
                    rate(now.output_tokens, then.output_tokens),
                )
            })
        });
        let whole = |number: f64| count(number.max(0.0) as u64);
        let per_sec =
            |rate: Option<f64>| rate.map_or(String::new(), |rate| format!(" ({rate:.1}/s)"));
        vec![
            format!(
                "requests   {} in flight, {} of them without a first token; {} done{}, {} failed, {} cancelled, {} rejected",
                whole(now.in_flight),
                whole(now.waiting),
                whole(now.done),
                per_sec(rates.map(|rates| rates.0)),
                whole(now.failed - now.cancelled - now.rejected),
                whole(now.cancelled),
                whole(now.rejected),
            ),
            format!(
                "tokens     {} written{}",
                whole(now.output_tokens),
                per_sec(rates.map(|rates| rates.1))
            ),
        ]
    }

    /// A line for each shadow policy. Its regret is the time model's and no time to first token.
    fn shadows(&self) -> Vec<String> {
        let rows = self.shadows.get("shadows").and_then(Value::as_array);
        let line = |row: &Value| {
            let of = |field: &str| number(row, field).unwrap_or(0.0);
            let regret = of("mean_regret_s") * 1e3;
            let judged = match regret {
                r if r >= 0.0 => format!("{r:.1} ms cheaper"),
                r => format!("{:.1} ms dearer", -r),
            };
            format!(
                "shadow     {}: {} of {} placements elsewhere, {judged} each on average by the time model",
                text::cell(row.get("policy")),
                text::share(of("disagreed"), of("compared")),
                count(of("compared") as u64),
            )
        };
        rows.into_iter().flatten().map(line).collect()
    }

    /// The workers, with their share of the latest requests.
    fn table(&self, latest: &Latest) -> Table {
        let mut table = workers::table(&self.workers);
        let mut shares = Vec::new();
        let mut hits = Vec::new();
        for (worker, rank) in workers::ranks(&self.workers) {
            let of = latest
                .by_rank
                .get(&(worker, rank))
                .copied()
                .unwrap_or_default();
            shares.push(text::share(of.0, latest.requests as f64));
            hits.push(text::share(of.2, of.1));
        }
        table.column("SHARE", Align::Right, 4, shares);
        table.column("CACHED", Align::Right, 3, hits);
        table
    }

    /// The frame as data.
    pub(super) fn to_json(&self) -> Value {
        let latest = Latest::read(&self.decisions);
        let counts = self.counts.map(|c| {
            json!({
                "in_flight": c.in_flight, "without_first_token": c.waiting, "done": c.done, "failed": c.failed,
                "cancelled": c.cancelled, "rejected": c.rejected, "output_tokens": c.output_tokens,
            })
        });
        json!({
            "unix_ms": self.unix_ms,
            "requests": counts,
            "latest": {
                "requests": latest.requests,
                "ttft_ms_p50": quantile(&latest.ttft_ms, 0.5),
                "ttft_ms_p95": quantile(&latest.ttft_ms, 0.95),
                "total_ms_p50": quantile(&latest.total_ms, 0.5),
                "total_ms_p95": quantile(&latest.total_ms, 0.95),
                "prompt_tokens": latest.prompt,
                "predicted_cached_tokens": latest.predicted,
                "reported_cached_tokens": latest.cached,
            },
            "shadows": self.shadows.get("shadows"),
            "workers": self.workers.get("workers"),
        })
    }
}

/// How the latest requests fared: latency and cache.
fn quality(latest: &Latest) -> Vec<String> {
    let at = |sorted: &[f64], q: f64| quantile(sorted, q).map_or_else(|| UNKNOWN.to_owned(), span);
    let predicted = text::share(latest.predicted, latest.prompt);
    let cached = text::share(latest.cached, latest.prompt);
    vec![
        format!(
            "latest {:<4}first token p50 {}, p95 {}; whole answer p50 {}, p95 {}",
            latest.requests,
            at(&latest.ttft_ms, 0.5),
            at(&latest.ttft_ms, 0.95),
            at(&latest.total_ms, 0.5),
            at(&latest.total_ms, 0.95),
        ),
        format!(
            "cache      {cached} of their prompt tokens were cached, {predicted} were predicted"
        ),
    ]
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn look(unix_ms: u64, done: f64) -> Look {
        let ended = |worker: u64, ttft: f64, cached: u64| {
            json!({"outcome": {"worker": worker, "rank": 0, "prompt_tokens": 100, "ttft_ms": ttft, "total_ms": 200.0,
                   "predicted_cached_tokens": 80, "reported_cached_tokens": cached}})
        };
        let rank = json!([{"dp_rank": 0, "active_requests": 1, "active_decode_blocks": 8, "active_prefill_tokens": 0}]);
        let worker = |id: u64, url: &str| json!({"worker_id": id, "model": "tiny", "url": url, "kv_total_blocks": 16, "ranks": rank});
        Look {
            workers: json!({"workers": [worker(1, "http://a:8000"), worker(2, "http://b:8000")]}),
            decisions: json!({"decisions": [ended(1, 30.0, 80), ended(1, 50.0, 60), ended(2, 10.0, 0), {"outcome": null}]}),
            shadows: Value::Null,
            counts: Some(Counts {
                in_flight: 2.0,
                waiting: 1.0,
                done,
                failed: 3.0,
                cancelled: 1.0,
                rejected: 1.0,
                output_tokens: done * 10.0,
            }),
            unix_ms,
        }
    }

    #[test]
    fn a_frame_says_what_happens_and_how_fast() {
        let before = look(1_794_728_410_000, 1200.0);
        let lines =
            look(1_794_728_412_000, 1250.0).frame("http://127.0.0.1:8000", Some(&before), 120);
        expect![[r#"
            kvasir top  http://127.0.0.1:8000  2026-11-15 07:40:12.000 UTC
            requests   2 in flight, 1 of them without a first token; 1,250 done (25.0/s), 1 failed, 1 cancelled, 1 rejected
            tokens     12,500 written (250.0/s)
            latest 3   first token p50 30 ms, p95 50 ms; whole answer p50 200 ms, p95 200 ms
            cache      47% of their prompt tokens were cached, 80% were predicted

            WORKER  RANK  STATE    REQUESTS  DECODE BLOCKS  PREFILL TOKENS  MODEL  URL            SHARE  CACHED
            1          0  serving         1        8 (50%)               0  tiny   http://a:8000    67%     70%
            2          0  serving         1        8 (50%)               0  tiny   http://b:8000    33%      0%"#]]
        .assert_eq(&lines.join("\n"));
    }

    #[test]
    fn a_shadow_policy_has_a_line() {
        let shadow =
            json!({"policy": "time", "compared": 1200, "disagreed": 300, "mean_regret_s": 0.0123});
        let mut look = look(0, 1.0);
        look.shadows = json!({ "shadows": [shadow] });
        let lines = look.frame("http://h", None, 120);
        assert!(
            lines.contains(
                &"shadow     time: 25% of 1,200 placements elsewhere, 12.3 ms cheaper each on average by the time model"
                    .to_owned()
            ),
            "{lines:?}"
        );
    }

    #[test]
    fn a_path_that_there_is_not_is_no_failed_request() {
        let line = |endpoint: &str, status: &str, count: u32| {
            format!(
                "dynamo_frontend_requests_total{{endpoint=\"{endpoint}\",model=\"m\",status=\"{status}\"}} {count}\n"
            )
        };
        let page = line("chat_completions", "success", 5)
            + &line("chat_completions", "error", 2)
            + &line("unknown", "error", 40);
        let counts = Counts::read(&page);
        assert_eq!((counts.done, counts.failed), (5.0, 2.0));
    }

    #[test]
    fn a_narrow_terminal_gets_narrow_lines() {
        for width in [0, 1, 20, 40, 79] {
            let lines = look(0, 1.0).frame("http://127.0.0.1:8000", None, width);
            assert!(lines.iter().all(|line| line.chars().count() <= width));
        }
    }

    #[test]
    fn nothing_yet_is_a_frame_too() {
        let empty = Look {
            workers: json!({"workers": []}),
            decisions: json!({"decisions": []}),
            shadows: Value::Null,
            counts: None,
            unix_ms: 0,
        };
        let lines = empty.frame("http://h", None, 80);
        assert!(lines[1].contains("no metrics"), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("WORKER")));
    }
}
