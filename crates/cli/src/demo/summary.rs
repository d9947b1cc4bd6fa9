//! The live summary of the demo's traffic: what a person watches.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// Latencies kept per worker for the percentiles; older ones make room.
const KEPT: usize = 512;

/// One answered turn of a conversation, as its client saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// Who served it.
    pub(crate) worker: u64,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u64,
    /// Those that the worker had cached.
    pub(crate) cached_tokens: u64,
    /// From sending to the first piece of text.
    pub(crate) ttft: Duration,
}

/// What came of all turns until now.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    workers: BTreeMap<u64, Share>,
    failed: u64,
}

#[derive(Debug, Default)]
struct Share {
    requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttft: Vec<Duration>,
}

impl Share {
    fn add(&mut self, turn: &Turn) {
        let slot = (self.requests as usize) % KEPT;
        match self.ttft.get_mut(slot) {
            Some(old) => *old = turn.ttft,
            None => self.ttft.push(turn.ttft),
        }
        self.requests += 1;
        self.prompt_tokens += turn.prompt_tokens;
        self.cached_tokens += turn.cached_tokens;
    }

    fn hit_share(&self) -> f64 {
        100.0 * self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    fn row(&self, out: &mut String, name: &str) {
        let mut sorted = self.ttft.clone();
        sorted.sort_unstable();
        let ms = |share: f64| {
            let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
            sorted.get(at).map_or(0.0, |d| d.as_secs_f64() * 1e3)
        };
        let _ = writeln!(
            out,
            "{name:<10} {:>8} {:>8.1} % {:>9.1} ms {:>8.1} ms",
            self.requests,
            self.hit_share(),
            ms(0.5),
            ms(0.99)
        );
    }
}

impl Summary {
    /// Counts an answered turn.
    pub(crate) fn add(&mut self, turn: &Turn) {
        self.workers.entry(turn.worker).or_default().add(turn);
    }

    /// Counts a turn that got no answer.
    pub(crate) fn add_failure(&mut self) {
        self.failed += 1;
    }

    /// The table: a line per worker, then all together.
    pub(crate) fn table(&self) -> String {
        let mut out = String::from("worker     requests  hit share     TTFT p50    TTFT p99\n");
        let mut all = Share::default();
        for (worker, share) in &self.workers {
            share.row(&mut out, &worker.to_string());
            all.requests += share.requests;
            all.prompt_tokens += share.prompt_tokens;
            all.cached_tokens += share.cached_tokens;
            all.ttft.extend_from_slice(&share.ttft);
        }
        all.row(&mut out, "all");
        if self.failed > 0 {
            let _ = writeln!(out, "{} requests failed; the log says why", self.failed);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn turn(worker: u64, cached_tokens: u64, ttft_ms: u64) -> Turn {
        Turn {
            worker,
            prompt_tokens: 200,
            cached_tokens,
            ttft: Duration::from_millis(ttft_ms),
        }
    }

    #[test]
    fn the_table_shows_each_worker_and_all_together() {
        let mut summary = Summary::default();
        for t in [turn(1, 0, 40), turn(1, 150, 10), turn(2, 100, 20)] {
            summary.add(&t);
        }
        summary.add_failure();
        expect![[r#"
            worker     requests  hit share     TTFT p50    TTFT p99
            1                 2     37.5 %      40.0 ms     40.0 ms
            2                 1     50.0 %      20.0 ms     20.0 ms
            all               3     41.7 %      20.0 ms     40.0 ms
            1 requests failed; the log says why
        "#]]
        .assert_eq(&summary.table());
    }

    #[test]
    fn nothing_yet_is_no_division_by_zero() {
        assert!(Summary::default().table().contains("0.0 %"));
    }

    #[test]
    fn old_latencies_make_room() {
        let mut summary = Summary::default();
        for _ in 0..KEPT {
            summary.add(&turn(1, 0, 1000));
        }
        for _ in 0..KEPT {
            summary.add(&turn(1, 0, 1));
        }
        assert!(summary.table().contains(" 1.0 ms"), "{}", summary.table());
        assert!(
            !summary.table().contains("1000.0 ms"),
            "{}",
            summary.table()
        );
    }
}
