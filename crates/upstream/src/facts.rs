//! What an engine server tells about itself, read from its answers.
//!
//! Every reader takes bytes from outside: what is missing or odd is simply not known.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Rows of an engine's own lists that are read; the rest is ignored.
const ROWS_MAX: usize = 4096;

/// What is known about an engine server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Its version, as it says.
    pub version: Option<String>,
    /// Models that it serves.
    pub models: Vec<EngineModel>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// KV blocks of one rank.
    pub kv_blocks: Option<u64>,
    /// Data-parallel ranks.
    pub ranks: Option<u32>,
    /// Whether it is SGLang, by the names of its metrics.
    pub sglang: bool,
    /// Whether it caches prefixes.
    pub prefix_caching: Option<bool>,
    /// Where each rank publishes its cache events.
    pub events: BTreeMap<u32, EventSource>,
}

/// A model that an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineModel {
    /// The name that requests use.
    pub name: String,
    /// Where the engine took it from: a folder, or a name on a hub.
    pub root: Option<String>,
    /// Longest prompt and answer together.
    pub max_model_len: Option<u32>,
    /// The model that it is an adapter of.
    pub parent: Option<String>,
}

/// Where a rank publishes its cache events; a `*` stands for the engine's own host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// The socket that publishes.
    pub events: String,
    /// The socket that repeats.
    pub replay: Option<String>,
    /// First part of every message.
    pub topic: String,
}

/// How busy one rank says it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankLoad {
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Share of the KV blocks that running requests hold.
    pub kv_usage: Option<f64>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelRow>,
}

#[derive(Deserialize)]
struct ModelRow {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
    #[serde(default)]
    parent: Option<String>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct EventRow {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: Option<String>,
}

impl Facts {
    /// Takes over what `before` knew from the metrics page.
    pub fn keep_metrics(&mut self, before: &Self) {
        self.block_size = before.block_size;
        self.kv_blocks = before.kv_blocks;
        self.ranks = before.ranks;
        self.sglang = before.sglang;
        self.prefix_caching = before.prefix_caching;
    }

    /// Reads `/v1/models`.
    pub fn read_models(&mut self, body: &[u8]) {
        let Ok(list) = serde_json::from_slice::<ModelList>(body) else {
            return;
        };
        let rows = list.data.into_iter().take(ROWS_MAX);
        self.models = rows
            .map(|row| EngineModel {
                name: row.id,
                root: row.root,
                max_model_len: row.max_model_len,
                parent: row.parent,
            })
            .collect();
    }

    /// What the engine loaded a model's tokenizer from: an adapter has that of its parent.
    pub fn root_of<'f>(&'f self, model: &'f EngineModel) -> Option<&'f str> {
        self.base_of(model)?.root.as_deref()
    }

    /// Longest prompt and answer of a model together: an adapter has its parent's, where it says nothing.
    pub fn max_model_len_of(&self, model: &EngineModel) -> Option<u32> {
        let base = || self.base_of(model)?.max_model_len;
        model.max_model_len.or_else(base)
    }

    fn base_of<'f>(&'f self, model: &'f EngineModel) -> Option<&'f EngineModel> {
        match &model.parent {
            Some(parent) => self.models.iter().find(|other| other.name == *parent),
            None => Some(model),
        }
    }

    /// Reads `/version`.
    pub fn read_version(&mut self, body: &[u8]) {
        self.version = serde_json::from_slice::<Version>(body)
            .ok()
            .map(|v| v.version);
    }

    /// Reads vLLM's list of event sources.
    pub fn read_event_sources(&mut self, body: &[u8]) {
        let Ok(rows) = serde_json::from_slice::<BTreeMap<u32, EventRow>>(body) else {
            return;
        };
        for (rank, row) in rows.into_iter().take(ROWS_MAX) {
            let zmq = row.publisher.as_deref() == Some("zmq") && row.enable_kv_cache_events;
            if let Some(events) = row.endpoint.filter(|_| zmq) {
                let (replay, topic) = (row.replay_endpoint, row.topic.unwrap_or_default());
                self.events.insert(
                    rank,
                    EventSource {
                        events,
                        replay,
                        topic,
                    },
                );
            }
        }
    }

    /// Reads `/metrics`: the cache's shape.
    pub fn read_metrics(&mut self, page: &str) {
        self.sglang |= page.lines().any(|line| line.starts_with("sglang:"));
        for sample in samples(page).filter(|s| s.name == "vllm:cache_config_info") {
            self.block_size = sample.number("block_size").or(self.block_size);
            self.kv_blocks = sample.number("num_gpu_blocks").or(self.kv_blocks);
            self.prefix_caching = sample.label("enable_prefix_caching").map(|v| v == "True");
            let rank: u32 = sample.number("engine").unwrap_or(0);
            self.ranks = self.ranks.max(Some(rank.saturating_add(1)));
        }
    }
}

/// Reads `/metrics`: how busy each rank is.
pub fn read_load(page: &str) -> BTreeMap<u32, RankLoad> {
    let mut ranks: BTreeMap<u32, RankLoad> = BTreeMap::new();
    for sample in samples(page) {
        let rank = || sample.number("engine").unwrap_or(0);
        match sample.name {
            "vllm:num_requests_running" => {
                ranks.entry(rank()).or_default().running += sample.value as u64;
            }
            "vllm:num_requests_waiting" => {
                ranks.entry(rank()).or_default().waiting += sample.value as u64;
            }
            "vllm:kv_cache_usage_perc" => {
                ranks.entry(rank()).or_default().kv_usage = Some(sample.value.clamp(0.0, 1.0));
            }
            _ => {}
        }
    }
    ranks
}

/// One line of a Prometheus page.
struct Sample<'p> {
    name: &'p str,
    labels: &'p str,
    value: f64,
}

impl<'p> Sample<'p> {
    /// A label's value, where it holds no escapes.
    fn label(&self, name: &str) -> Option<&'p str> {
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

    fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.label(name)?.parse().ok()
    }
}

/// The samples that are read at all. A page has a thousand others, and it is looked at every few seconds for
/// every worker, so names are compared before anything is parsed.
const READ: [&str; 4] = [
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
];

fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines()
        .filter(|line| READ.iter().any(|name| line.starts_with(name)))
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let value = value.parse::<f64>().ok().filter(|v| v.is_finite())?;
            match series.split_once('{') {
                None => Some(Sample {
                    name: series,
                    labels: "",
                    value,
                }),
                Some((name, labels)) => Some(Sample {
                    name,
                    labels: labels.strip_suffix('}')?,
                    value,
                }),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! recorded {
        ($name:literal) => {
            include_bytes!(concat!("../../../testdata/vllm-facts/", $name))
        };
    }

    #[test]
    fn a_real_vllm_is_understood() {
        let mut facts = Facts::default();
        facts.read_models(recorded!("models.json"));
        facts.read_version(recorded!("version.json"));
        facts.read_event_sources(recorded!("kv_event_sources.json"));
        facts.read_metrics(std::str::from_utf8(recorded!("metrics.txt")).unwrap());
        let source = EventSource {
            events: "tcp://*:5557".into(),
            replay: Some("tcp://*:5558".into()),
            topic: "kv-events".into(),
        };
        assert_eq!(
            facts,
            Facts {
                version: Some("0.32.0".into()),
                models: vec![EngineModel {
                    name: "tiny-qwen".into(),
                    max_model_len: Some(2048),
                    root: Some("model".into()),
                    parent: None,
                }],
                block_size: Some(32),
                kv_blocks: Some(150),
                ranks: Some(1),
                prefix_caching: Some(true),
                sglang: false,
                events: BTreeMap::from([(0, source)]),
            }
        );
    }

    #[test]
    fn sglang_is_known_by_the_names_of_its_metrics() {
        let mut facts = Facts::default();
        facts.read_metrics("# HELP sglang:x\nvllm:num_requests_running 0\n");
        assert!(!facts.sglang);
        facts.read_metrics("# HELP x\nsglang:num_running_reqs{model_name=\"m\"} 0.0\n");
        assert!(facts.sglang);
    }

    #[test]
    fn an_adapter_has_what_its_base_says() {
        let mut facts = Facts::default();
        facts.read_models(
            br#"{"data":[{"id":"base","root":"/models/base","max_model_len":4096,"parent":null},
                {"id":"sql","root":"/loras/sql","max_model_len":null,"parent":"base"},
                {"id":"lost","root":"/loras/lost","parent":"elsewhere"}]}"#,
        );
        let of = |name: &str| facts.models.iter().find(|m| m.name == name).unwrap();
        let said = ["base", "sql", "lost"].map(|name| {
            let model = of(name);
            (facts.root_of(model), facts.max_model_len_of(model))
        });
        let base = (Some("/models/base"), Some(4096));
        assert_eq!(said, [base, base, (None, None)]);
    }

    #[test]
    fn load_under_load() {
        let page = std::str::from_utf8(recorded!("metrics_under_load.txt")).unwrap();
        let load = read_load(page);
        assert_eq!((load[&0].running, load[&0].waiting), (8, 4));
        assert!(load[&0].kv_usage.unwrap() > 0.0);
    }

    #[test]
    fn rubbish_is_not_known_and_not_a_panic() {
        let mut facts = Facts::default();
        for rubbish in [&b""[..], b"{}", b"[1]", b"{\"data\":[{}]}", b"\xff\xff"] {
            facts.read_models(rubbish);
            facts.read_version(rubbish);
            facts.read_event_sources(rubbish);
        }
        for page in [
            "",
            "x",
            "a{b 1",
            "a{=\"} 1",
            "vllm:cache_config_info{block_size=\"x\"} NaN",
        ] {
            facts.read_metrics(page);
            read_load(page);
        }
        assert_eq!(facts, Facts::default());
    }
}
