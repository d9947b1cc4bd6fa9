//! What an engine's `/server_info` says: the settings that it was started with.
//!
//! SGLang has the page always (older ones as `/get_server_info`), vLLM only in its development mode.

use std::collections::BTreeMap;

use kvasir_types::Device;
use serde_json::Value;

use super::{EventSource, ROWS_MAX};
use crate::sources::shifted;

/// Where SGLang publishes when it is not told where, as vLLM does.
const EVENTS: &str = "tcp://*:5557";
/// Where SGLang lets others meet it when it is not told where.
const BOOTSTRAP_PORT: u16 = 8998;

/// What the page says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerInfo {
    /// Whether it need not be read again: it was read, or the engine has no such page.
    pub is_read: bool,
    /// Times in a row that the engine failed to tell it.
    pub(crate) failures: u32,
    /// Probes that go by before it is asked again.
    pub(crate) pause: u32,
    /// It is SGLang's.
    pub(crate) sglang: bool,
    pub(crate) version: Option<String>,
    /// Tokens in the unit in which the cache is kept.
    pub(crate) page_size: Option<u32>,
    /// KV tokens of one rank.
    pub(crate) kv_tokens: Option<u64>,
    pub(crate) ranks: Option<u32>,
    pub(crate) max_batched_tokens: Option<u64>,
    /// Sequences that run at once.
    pub(crate) max_num_seqs: Option<u64>,
    /// What it computes on.
    pub(crate) device: Option<Device>,
    pub(crate) prefix_caching: Option<bool>,
    /// SGLang was told to take the smaller priority first.
    pub(crate) smaller_first: bool,
    pub(crate) events: BTreeMap<u32, EventSource>,
    /// Which part of requests it was started for, if for one.
    pub part: Option<ServerPart>,
    /// How it hands caches to others: the name of vLLM's connector, or SGLang's backend.
    pub transfer: Option<String>,
}

/// Connectors of vLLM that hand a prompt over only by words which the router makes itself: addresses, or an id of its own.
const MADE_BY_ROUTER: [&str; 4] = [
    "MooncakeConnector",
    "MoRIIOConnector",
    "NixlPushConnector",
    "P2pNcclConnector",
];

impl ServerInfo {
    /// The connector by which it hands prompts over, if we cannot speak for it.
    ///
    /// ```
    /// # use kvasir_upstream::ServerInfo;
    /// let mut info = ServerInfo::default();
    /// info.transfer = Some("MooncakeConnector".into());
    /// assert_eq!(info.unsupported_connector(), Some("MooncakeConnector"));
    /// info.transfer = Some("NixlConnector".into());
    /// assert_eq!(info.unsupported_connector(), None);
    /// ```
    #[must_use]
    pub fn unsupported_connector(&self) -> Option<&str> {
        let connector = self.transfer.as_deref()?;
        MADE_BY_ROUTER.contains(&connector).then_some(connector)
    }
}

/// The part of requests that a server was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerPart {
    /// The prompt; those who answer meet it at this port (SGLang).
    Prefill(u16),
    /// The answer, and never the prompt (SGLang).
    Decode,
}

impl ServerInfo {
    /// Most probes that go by before a page that failed is asked for again: about ten minutes.
    const PAUSE_MAX: u32 = 64;

    /// The same, one probe later; `None` if the page is to be asked for now.
    pub(crate) fn left_alone(&self) -> Option<Self> {
        match (self.is_read, self.pause) {
            (true, _) => Some(self.clone()),
            (false, 0) => None,
            (false, pause) => Some(Self {
                pause: pause - 1,
                ..self.clone()
            }),
        }
    }

    /// The same after the engine failed to tell it: some write a traceback into their log each time, so it is asked
    /// less and less often.
    pub(crate) fn failed(&self) -> Self {
        let failures = self.failures.saturating_add(1);
        let pause = 1u32.checked_shl(failures - 1).unwrap_or(u32::MAX);
        Self {
            failures,
            pause: pause.min(Self::PAUSE_MAX),
            ..self.clone()
        }
    }

    /// Reads the page.
    #[must_use]
    pub fn read(body: &[u8]) -> Self {
        let Ok(page) = serde_json::from_slice::<Value>(body) else {
            return Self::default();
        };
        match page.get("vllm_config") {
            Some(config) => Self::vllm(config),
            None => Self::sglang(&page),
        }
    }

    fn vllm(config: &Value) -> Self {
        let of = |part: &str, name: &str| count(config.get(part)?.get(name)?);
        let caching = config.pointer("/cache_config/enable_prefix_caching");
        Self {
            page_size: of("cache_config", "block_size").and_then(small),
            ranks: of("parallel_config", "data_parallel_size").and_then(small),
            max_batched_tokens: of("scheduler_config", "max_num_batched_tokens"),
            max_num_seqs: of("scheduler_config", "max_num_seqs"),
            device: ["device_type", "device"]
                .iter()
                .find_map(|name| device(config.get("device_config")?.get(name)?)),
            prefix_caching: caching.and_then(Value::as_bool),
            transfer: config
                .pointer("/kv_transfer_config/kv_connector")
                .and_then(Value::as_str)
                .map(Into::into),
            ..Self::default()
        }
    }

    fn sglang(page: &Value) -> Self {
        let of = |name: &str| count(page.get(name)?);
        let ranks = of("dp_size").and_then(small);
        let is_set = |name: &str| page.get(name).and_then(Value::as_bool);
        Self {
            sglang: page.get("internal_states").is_some()
                || page.get("max_total_num_tokens").is_some(),
            version: page.get("version").and_then(Value::as_str).map(Into::into),
            page_size: of("page_size").and_then(small),
            kv_tokens: of("max_total_num_tokens"),
            ranks,
            // A prompt is cut to the one, a batch to the other; -1 switches the first off.
            max_batched_tokens: [of("chunked_prefill_size"), of("max_prefill_tokens")]
                .into_iter()
                .flatten()
                .min(),
            max_num_seqs: of("max_running_requests"),
            device: page.get("device").and_then(device),
            prefix_caching: is_set("disable_radix_cache").map(|off| !off),
            smaller_first: is_set("schedule_low_priority_values_first") == Some(true),
            events: events(page.get("kv_events_config"), ranks.unwrap_or(1)),
            part: part(page),
            transfer: page
                .get("disaggregation_transfer_backend")
                .and_then(Value::as_str)
                .map(Into::into),
            ..Self::default()
        }
    }
}

/// The part of requests that an SGLang server says it computes.
fn part(page: &Value) -> Option<ServerPart> {
    match page.get("disaggregation_mode")?.as_str()? {
        "decode" => Some(ServerPart::Decode),
        "prefill" => {
            let port = page.get("disaggregation_bootstrap_port");
            let port = port.and_then(|port| u16::try_from(port.as_u64()?).ok());
            Some(ServerPart::Prefill(port.unwrap_or(BOOTSTRAP_PORT)))
        }
        _ => None,
    }
}

/// A count above 0.
fn count(value: &Value) -> Option<u64> {
    value.as_u64().filter(|count| *count > 0)
}

fn device(value: &Value) -> Option<Device> {
    Device::from_name(value.as_str()?)
}

fn small(count: u64) -> Option<u32> {
    u32::try_from(count).ok()
}

/// Where each rank publishes its events: the setting is JSON in a string, each further rank is one port further.
fn events(config: Option<&Value>, ranks: u32) -> BTreeMap<u32, EventSource> {
    let config: Option<Value> = match config {
        Some(Value::String(text)) => serde_json::from_str(text).ok(),
        other => other.cloned(),
    };
    let Some(config) = config.filter(|c| c.get("publisher").and_then(Value::as_str) == Some("zmq"))
    else {
        return BTreeMap::new();
    };
    let text = |name: &str| config.get(name).and_then(Value::as_str);
    let ranks = 0..ranks.min(ROWS_MAX as u32);
    let source = |rank| {
        let source = EventSource {
            events: shifted(text("endpoint").unwrap_or(EVENTS), rank)?,
            replay: text("replay_endpoint").and_then(|first| shifted(first, rank)),
            topic: text("topic").unwrap_or_default().to_owned(),
        };
        Some((rank, source))
    };
    ranks.filter_map(source).collect()
}
