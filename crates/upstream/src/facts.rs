//! What an engine server tells about itself, read from its answers.
//!
//! Every reader takes bytes from outside: what is missing or odd is simply not known.

mod info;
mod iterations;
mod loads;
mod metrics;

use std::collections::BTreeMap;

use kvasir_types::{Device, ModelCard};
use serde::Deserialize;

pub use info::{ServerInfo, ServerPart};
pub use loads::read_loads;
use metrics::samples;

/// Rows of an engine's own lists that are read; the rest is ignored.
const ROWS_MAX: usize = 4096;

/// Longest place of a model that is believed: the longest path that systems have.
const ROOT_BYTES_MAX: usize = 4096;
/// Longest version that is shown.
const VERSION_BYTES_MAX: usize = 128;

/// What is known about an engine server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Its version, as it says.
    pub version: Option<String>,
    /// Models that it serves.
    pub models: Vec<ModelCard>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// KV blocks of one rank.
    pub kv_blocks: Option<u64>,
    /// Data-parallel ranks.
    pub ranks: Option<u32>,
    /// KV tokens of one rank, where it counts them so.
    pub kv_tokens: Option<u64>,
    /// Tokens computed in one step.
    pub max_batched_tokens: Option<u64>,
    /// Sequences that run at once.
    pub max_num_seqs: Option<u64>,
    /// What it computes on.
    pub device: Option<Device>,
    /// What it is, by its own pages.
    pub kind: EngineKind,
    /// What its page of settings says.
    pub info: ServerInfo,
    /// Whether it caches prefixes.
    pub prefix_caching: Option<bool>,
    /// Where each rank publishes its cache events.
    pub events: BTreeMap<u32, EventSource>,
}

/// Which engine a server runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Not known.
    #[default]
    Unknown,
    /// vLLM, or one that speaks like it.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM's `trtllm-serve`.
    TensorRt,
}

impl EngineKind {
    /// Its name for operators.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "engine of unknown kind",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::TensorRt => "TensorRT-LLM",
        }
    }
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
        self.kind = before.kind;
        self.kv_tokens = before.kv_tokens;
        self.max_batched_tokens = before.max_batched_tokens;
        self.prefix_caching = before.prefix_caching;
    }

    /// Reads `/v1/models`.
    pub fn read_models(&mut self, body: &[u8]) {
        let Ok(list) = serde_json::from_slice::<ModelList>(body) else {
            return;
        };
        let rows = list.data.into_iter().take(ROWS_MAX);
        self.models = rows
            .map(|row| ModelCard {
                name: row.id,
                root: row.root.filter(|root| root.len() <= ROOT_BYTES_MAX),
                max_model_len: row.max_model_len,
                parent: row.parent.filter(|parent| ModelCard::is_name(parent)),
                migration_limit: 0,
            })
            .collect();
    }

    /// What the engine loaded a model's tokenizer from: an adapter has that of its parent.
    pub fn root_of<'f>(&'f self, model: &'f ModelCard) -> Option<&'f str> {
        self.base_of(model)?.root.as_deref()
    }

    /// Longest prompt and answer of a model together: an adapter has its parent's, where it says nothing.
    pub fn max_model_len_of(&self, model: &ModelCard) -> Option<u32> {
        let base = || self.base_of(model)?.max_model_len;
        model.max_model_len.or_else(base)
    }

    fn base_of<'f>(&'f self, model: &'f ModelCard) -> Option<&'f ModelCard> {
        match &model.parent {
            Some(parent) => self.models.iter().find(|other| other.name == *parent),
            None => Some(model),
        }
    }

    /// Reads `/version`.
    pub fn read_version(&mut self, body: &[u8]) {
        self.version = serde_json::from_slice::<Version>(body)
            .ok()
            .map(|v| v.version)
            .filter(|version| version.len() <= VERSION_BYTES_MAX);
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

    /// Reads `/metrics`: the cache's shape. What a page leaves out that tells only what is new stays as it was `before`.
    pub fn read_metrics(&mut self, page: &str, before: &Self) {
        if iterations::is_list(page) {
            let step = iterations::last(page).unwrap_or_default();
            self.kind = EngineKind::TensorRt;
            self.block_size = step.block_size().or(before.block_size);
            self.kv_blocks = step.kv_blocks().or(before.kv_blocks);
            self.max_batched_tokens = step.max_batched_tokens().or(before.max_batched_tokens);
            return;
        }
        let begins = |prefix| page.lines().any(|line| line.starts_with(prefix));
        if begins("sglang:") {
            self.kind = EngineKind::Sglang;
            return self.read_sglang(page);
        }
        if begins("vllm:") {
            self.kind = EngineKind::Vllm;
        }
        for sample in samples(page).filter(|s| s.name == "vllm:cache_config_info") {
            self.block_size = sample.number("block_size").or(self.block_size);
            self.kv_blocks = sample.number("num_gpu_blocks").or(self.kv_blocks);
            self.prefix_caching = sample.label("enable_prefix_caching").map(|v| v == "True");
            let rank: u32 = sample.number("engine").unwrap_or(0);
            self.ranks = self.ranks.max(Some(rank.saturating_add(1)));
        }
    }

    /// The shape of SGLang's cache, where its metrics tell it.
    fn read_sglang(&mut self, page: &str) {
        for sample in samples(page).filter(|s| s.value >= 1.0) {
            match sample.name {
                "sglang:page_size" => self.block_size = block_of_page(sample.value as u32, false),
                "sglang:max_total_num_tokens" => self.kv_tokens = Some(sample.value as u64),
                _ => {}
            }
        }
    }

    /// Fills in from the page of settings what no other page said. `heard`: the operator gave an address for its events.
    pub fn merge_info(&mut self, heard: bool) {
        let info = &self.info;
        let heard = heard || !info.events.is_empty();
        if info.sglang {
            self.kind = EngineKind::Sglang;
        }
        let block = info.page_size.and_then(|size| match self.kind {
            EngineKind::Sglang => block_of_page(size, heard),
            _ => Some(size),
        });
        self.version = self.version.take().or_else(|| info.version.clone());
        self.block_size = block.or(self.block_size);
        self.kv_tokens = info.kv_tokens.or(self.kv_tokens);
        self.ranks = self.ranks.max(info.ranks);
        self.max_batched_tokens = info.max_batched_tokens.or(self.max_batched_tokens);
        self.max_num_seqs = info.max_num_seqs;
        self.device = info.device;
        self.prefix_caching = self.prefix_caching.or(info.prefix_caching);
        if self.events.is_empty() {
            self.events.clone_from(&info.events);
        }
    }

    /// KV blocks of one rank, in blocks of this size.
    #[must_use]
    pub fn kv_blocks_of(&self, block_size: u32) -> Option<u64> {
        let by_tokens = || Some(self.kv_tokens? / u64::from(block_size.max(1)));
        self.kv_blocks.or_else(by_tokens)
    }

    /// Whether it takes the larger priority first: SGLang does, unless told otherwise; vLLM takes the smaller.
    #[must_use]
    pub fn larger_first(&self) -> bool {
        self.kind == EngineKind::Sglang && !self.info.smaller_first
    }
}

/// Tokens in a block of an SGLang with pages of `size`. Pages of one token, its default, are named one by one in its
/// events; without a subscription, blocks may be larger than pages.
fn block_of_page(size: u32, heard: bool) -> Option<u32> {
    (size > 1 || heard).then_some(size)
}

/// Reads `/metrics`: how busy each rank is.
pub fn read_load(page: &str) -> BTreeMap<u32, RankLoad> {
    if iterations::is_list(page) {
        // Nothing ran since the last look: nothing is in use.
        let idle = RankLoad {
            kv_usage: Some(0.0),
            ..RankLoad::default()
        };
        let load = iterations::last(page).map_or(idle, |step| step.load());
        return BTreeMap::from([(0, load)]);
    }
    let mut ranks: BTreeMap<u32, RankLoad> = BTreeMap::new();
    for sample in samples(page) {
        let rank = || sample.number("engine").unwrap_or(0);
        let dp_rank = || sample.number("dp_rank").unwrap_or(0);
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
            // Each tensor-parallel process of a rank may say the same.
            "sglang:num_running_reqs" => {
                let load = ranks.entry(dp_rank()).or_default();
                load.running = load.running.max(sample.value as u64);
            }
            "sglang:num_queue_reqs" => {
                let load = ranks.entry(dp_rank()).or_default();
                load.waiting = load.waiting.max(sample.value as u64);
            }
            "sglang:token_usage" => {
                let load = ranks.entry(dp_rank()).or_default();
                let usage = sample.value.clamp(0.0, 1.0);
                load.kv_usage = Some(load.kv_usage.map_or(usage, |other| other.max(usage)));
            }
            _ => {}
        }
    }
    ranks
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
        let page = std::str::from_utf8(recorded!("metrics.txt")).unwrap();
        facts.read_metrics(page, &Facts::default());
        let source = EventSource {
            events: "tcp://*:5557".into(),
            replay: Some("tcp://*:5558".into()),
            topic: "kv-events".into(),
        };
        assert_eq!(
            facts,
            Facts {
                version: Some("0.32.0".into()),
                models: vec![ModelCard {
                    name: "tiny-qwen".into(),
                    max_model_len: Some(2048),
                    root: Some("model".into()),
                    parent: None,
                    migration_limit: 0,
                }],
                block_size: Some(32),
                kv_blocks: Some(150),
                ranks: Some(1),
                prefix_caching: Some(true),
                kind: EngineKind::Vllm,
                events: BTreeMap::from([(0, source)]),
                ..Facts::default()
            }
        );
    }

    #[test]
    fn sglang_is_known_by_the_names_of_its_metrics() {
        let mut facts = Facts::default();
        let before = Facts::default();
        facts.read_metrics("# HELP sglang:x\nvllm:num_requests_running 0\n", &before);
        assert!(facts.kind != EngineKind::Sglang);
        let page = "# HELP x\nsglang:num_running_reqs{model_name=\"m\"} 0.0\n";
        facts.read_metrics(page, &before);
        assert!(facts.kind == EngineKind::Sglang);
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

    /// The fields of an SGLang 0.5.9 that are read, among others, as its page of settings has them.
    const SGLANG_INFO: &str = r#"{"model_path":"qwen/qwen2.5-0.5b-instruct","chunked_prefill_size":8192,
        "max_prefill_tokens":16384,"schedule_low_priority_values_first":false,"page_size":1,"dp_size":2,
        "disable_radix_cache":false,"kv_events_config":null,"status":"ready","max_total_num_tokens":20480,
        "internal_states":[{"page_size":7}],"version":"0.5.9"}"#;

    fn settled(info: &str, heard: bool) -> Facts {
        let mut facts = Facts {
            info: ServerInfo::read(info.as_bytes()),
            ..Facts::default()
        };
        facts.merge_info(heard);
        facts
    }

    #[test]
    fn sglang_tells_its_settings() {
        let facts = settled(SGLANG_INFO, false);
        assert_eq!(facts.kind, EngineKind::Sglang);
        assert_eq!(facts.version.as_deref(), Some("0.5.9"));
        assert_eq!((facts.ranks, facts.prefix_caching), (Some(2), Some(true)));
        assert_eq!(facts.max_batched_tokens, Some(8192));
        assert_eq!(
            facts.block_size, None,
            "nobody hears of its pages of one token"
        );
        assert_eq!(facts.kv_blocks_of(16), Some(1280));
        assert!(facts.larger_first() && facts.events.is_empty());
        assert_eq!(settled(SGLANG_INFO, true).block_size, Some(1));
        let unchunked = SGLANG_INFO
            .replace("8192", "-1")
            .replace("priority_values_first\":false", "x\":0");
        assert_eq!(settled(&unchunked, false).max_batched_tokens, Some(16384));
        let smaller = SGLANG_INFO.replace("values_first\":false", "values_first\":true");
        assert!(!settled(&smaller, false).larger_first());
    }

    #[test]
    fn a_server_tells_which_part_of_requests_it_computes() {
        let with =
            |more: &str| settled(&SGLANG_INFO.replacen('{', &format!("{{{more},"), 1), false);
        let part = |more: &str| with(more).info.part;
        assert_eq!(part(r#""disaggregation_mode":null"#), None);
        assert_eq!(part(r#""disaggregation_mode":"null""#), None);
        let decode = r#""disaggregation_mode":"decode""#;
        assert_eq!(part(decode), Some(ServerPart::Decode));
        let prefill = r#""disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001"#;
        assert_eq!(part(prefill), Some(ServerPart::Prefill(9001)));
        let unsaid = r#""disaggregation_mode":"prefill","disaggregation_transfer_backend":"nixl""#;
        assert_eq!(part(unsaid), Some(ServerPart::Prefill(8998)));
        assert_eq!(with(unsaid).info.transfer.as_deref(), Some("nixl"));
        let vllm = r#"{"vllm_config":{"kv_transfer_config":{"kv_connector":"NixlConnector","kv_role":"kv_producer"}}}"#;
        let vllm = settled(vllm, false).info;
        // Its role is a label: either server computes either part.
        assert_eq!(
            (vllm.part, vllm.transfer.as_deref()),
            (None, Some("NixlConnector"))
        );
    }

    #[test]
    fn sglang_tells_where_its_events_are() {
        let config = r#""{\"publisher\":\"zmq\",\"topic\":\"kv\",\"endpoint\":\"tcp://*:6000\"}""#;
        let facts = settled(
            &SGLANG_INFO.replace("_config\":null", &format!("_config\":{config}")),
            false,
        );
        assert_eq!(facts.block_size, Some(1));
        let events: Vec<_> = facts
            .events
            .values()
            .map(|s| (s.events.as_str(), s.topic.as_str()))
            .collect();
        assert_eq!(events, [("tcp://*:6000", "kv"), ("tcp://*:6001", "kv")]);
        let page16 = SGLANG_INFO.replace("page_size\":1", "page_size\":16");
        assert_eq!(settled(&page16, false).block_size, Some(16));
    }

    #[test]
    fn vllm_tells_its_settings_in_development_mode() {
        let info = r#"{"vllm_config":{"cache_config":{"block_size":32,"enable_prefix_caching":false},
            "scheduler_config":{"max_num_batched_tokens":2048,"max_num_seqs":64},"device_config":{"device_type":"cpu"},
            "parallel_config":{"data_parallel_size":4}}}"#;
        let facts = settled(info, false);
        assert_eq!(facts.max_num_seqs, Some(64));
        assert_eq!(facts.device, Some(Device::Cpu));
        assert_eq!((facts.block_size, facts.ranks), (Some(32), Some(4)));
        assert_eq!(
            (facts.max_batched_tokens, facts.prefix_caching),
            (Some(2048), Some(false))
        );
        assert!(!facts.larger_first());
        let as_text = settled(r#"{"vllm_config":"model='x', max_seq_len=2048"}"#, false);
        assert_eq!(as_text, Facts::default());
    }

    #[test]
    fn sglang_is_known_by_its_metrics_and_says_how_busy_it_is() {
        let page = "# TYPE sglang:num_running_reqs gauge\n\
            sglang:num_running_reqs{engine_type=\"unified\",model_name=\"q\",tp_rank=\"0\",dp_rank=\"0\"} 3.0\n\
            sglang:num_running_reqs{engine_type=\"unified\",model_name=\"q\",tp_rank=\"1\",dp_rank=\"0\"} 3.0\n\
            sglang:num_queue_reqs{model_name=\"q\",dp_rank=\"0\"} 2.0\n\
            sglang:token_usage{model_name=\"q\",dp_rank=\"0\"} 0.28\n\
            sglang:token_usage{model_name=\"q\",dp_rank=\"1\"} 0.5\n\
            sglang:page_size{model_name=\"q\"} 64.0\n\
            sglang:max_total_num_tokens{model_name=\"q\"} 20480.0\n";
        let mut facts = Facts::default();
        facts.read_metrics(page, &Facts::default());
        assert_eq!(
            (facts.kind, facts.block_size),
            (EngineKind::Sglang, Some(64))
        );
        assert_eq!(facts.kv_blocks_of(64), Some(320));
        let load = read_load(page);
        assert_eq!((load[&0].running, load[&0].waiting), (3, 2));
        assert_eq!(
            (load[&0].kv_usage, load[&1].kv_usage),
            (Some(0.28), Some(0.5))
        );
    }

    #[test]
    fn tensorrt_llm_tells_the_steps_that_it_ran() {
        let page = r#"[{"gpuMemUsage":56401920000,"iter":1,"numActiveRequests":9},{"inflightBatchingStats":{"numContextRequests":1},
            "iter":154,"iterLatencyMS":7.0,"kvCacheStats":{"allocNewBlocks":3126,"cacheHitRate":0.1,"freeNumBlocks":75,
            "maxNumBlocks":100,"tokensPerBlock":32,"usedNumBlocks":25},"maxNumTokensRuntime":8192,"numActiveRequests":2,"numQueuedRequests":1}]"#;
        let mut facts = Facts::default();
        facts.read_metrics(page, &Facts::default());
        let shape = |facts: &Facts| {
            let batch = facts.max_batched_tokens;
            (facts.kind, facts.block_size, facts.kv_blocks, batch)
        };
        let known = (EngineKind::TensorRt, Some(32), Some(100), Some(8192));
        facts.merge_info(false);
        assert_eq!(shape(&facts), known);
        assert!(!facts.larger_first());
        let mut later = Facts::default();
        later.read_metrics("[]", &facts);
        assert_eq!(shape(&later), known, "it ran nothing since");
        let loads = [page, "[]", "[{}]", "[1]"].map(|page| {
            let load = read_load(page)[&0];
            (load.running, load.waiting, load.kv_usage)
        });
        let idle = (0, 0, Some(0.0));
        assert_eq!(loads, [(2, 1, Some(0.25)), idle, (0, 0, None), idle]);
    }

    #[test]
    fn rubbish_is_not_known_and_not_a_panic() {
        let mut facts = Facts::default();
        for rubbish in [&b""[..], b"{}", b"[1]", b"{\"data\":[{}]}", b"\xff\xff"] {
            facts.read_models(rubbish);
            facts.read_version(rubbish);
            facts.read_event_sources(rubbish);
            facts.info = ServerInfo::read(rubbish);
            facts.merge_info(true);
        }
        for page in [
            "",
            "x",
            "a{b 1",
            "a{=\"} 1",
            "vllm:cache_config_info{block_size=\"x\"} NaN",
        ] {
            facts.read_metrics(page, &Facts::default());
            read_load(page);
        }
        assert_eq!(facts.kind, EngineKind::Vllm, "that much can be read");
        facts.kind = EngineKind::Unknown;
        assert_eq!(facts, Facts::default());
    }
}
