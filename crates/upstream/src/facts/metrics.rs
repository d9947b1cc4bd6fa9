//! The lines of an engine's `/metrics` that are read.

/// vLLM's, without their prefix. A page has a thousand others, and it is looked at every few seconds for every
/// worker, so names are compared before anything is parsed.
const VLLM: [&str; 4] = [
    "cache_config_info",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
];
/// SGLang's.
const SGLANG: [&str; 6] = [
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "page_size",
    "num_pages",
    "max_total_num_tokens",
];

/// One line of a Prometheus page.
pub(super) struct Sample<'p> {
    pub(super) name: &'p str,
    labels: &'p str,
    pub(super) value: f64,
}

impl<'p> Sample<'p> {
    /// A label's value, where it holds no escapes.
    pub(super) fn label(&self, name: &str) -> Option<&'p str> {
        let mut rest = self.labels;
        while let Some((key, after)) = rest.split_once("=\"") {
            let (value, after) = after.split_once('"')?;
            if key.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = after;
        }
        None
    }

    pub(super) fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.label(name)?.parse().ok()
    }
}

/// The samples that are read at all.
pub(super) fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines()
        .filter(|line| is_read(line))
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let value = value.parse::<f64>().ok().filter(|v| v.is_finite())?;
            let (name, labels) = match series.split_once('{') {
                None => (series, ""),
                Some((name, labels)) => (name, labels.strip_suffix('}')?),
            };
            Some(Sample {
                name,
                labels,
                value,
            })
        })
}

fn is_read(line: &str) -> bool {
    let begins = |rest: &str, names: &[&str]| names.iter().any(|name| rest.starts_with(name));
    match line.split_at_checked(5) {
        Some(("vllm:", rest)) => begins(rest, &VLLM),
        Some(("sglan", rest)) => rest
            .strip_prefix("g:")
            .is_some_and(|rest| begins(rest, &SGLANG)),
        _ => false,
    }
}
