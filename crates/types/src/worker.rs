//! A worker as a source of membership announces it.
//!
//! Answers one question: who is this worker, what does it serve, and how is it reached? A record says only what its
//! source knows. What is left out is asked of the worker, where it can be asked, or assumed. Who announced a record, and
//! for how long it holds, is kept beside it by whoever collects records.

use std::fmt;
use std::sync::Arc;

use crate::{BootstrapAddress, DpRank, WorkerId};

/// What a source of membership says about one worker. A later record of the same id from the same source replaces the
/// earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRecord {
    /// Who it is.
    pub id: WorkerId,
    /// How requests reach it.
    pub transport: Transport,
    /// Where its cache events come from.
    pub events: EventFeed,
    /// Which part of a request it computes.
    pub role: Role,
    /// The models that it serves; if empty, those that it lists itself.
    pub models: Vec<ModelCard>,
    /// Its first data-parallel rank (`data_parallel_start_rank`).
    pub first_rank: DpRank,
    /// How many data-parallel ranks it has.
    pub ranks: Option<u32>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// How much it can take.
    pub capacity: Capacity,
    /// Labels that requests may require or prefer (`nvext.routing_constraints`); in order, each once.
    pub taints: Vec<Arc<str>>,
    /// What it computes on.
    pub device: Option<Device>,
    /// Where decode workers meet it, if it computes prompts for others and says so.
    pub bootstrap: Option<BootstrapAddress>,
    /// How near it those are to be that take its prompts over, if it says so.
    pub transfer: Option<TransferRule>,
    /// It answers prompts that others have computed, and cannot compute one itself.
    pub needs_prefill: bool,
    /// How workers are chosen that compute prompts for others, if its card says so: a name of `--router-mode`.
    pub prefill_mode: Option<Arc<str>>,
}

/// Which workers a prompt that another has computed may be handed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferRule {
    /// What kind of place they are to share, such as `zone`.
    pub domain: Arc<str>,
    /// The label that workers of the same place carry; none if the worker does not say where it is.
    pub taint: Option<Arc<str>>,
    /// By how much workers with it are preferred, in thousandths, 1000 at most; none: others are not asked at all.
    pub preferred: Option<u16>,
}

/// The label of workers that are in a place.
#[must_use]
pub fn topology_taint(domain: &str, name: &str) -> String {
    format!("dynamo.topology/{domain}={name}")
}

impl WorkerRecord {
    /// A worker about which nothing else is known.
    #[must_use]
    pub fn new(id: WorkerId, transport: Transport) -> Self {
        Self {
            id,
            transport,
            events: EventFeed::default(),
            role: Role::default(),
            models: Vec::new(),
            first_rank: DpRank(0),
            ranks: None,
            block_size: None,
            capacity: Capacity::default(),
            taints: Vec::new(),
            device: None,
            bootstrap: None,
            transfer: None,
            needs_prefill: false,
            prefill_mode: None,
        }
    }
}

/// How requests reach a worker. It decides what a worker is sent: an HTTP server gets the client's body, a worker on a
/// request plane gets token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// An engine server with OpenAI's API.
    Http(HttpEndpoint),
    /// A token worker on a request plane.
    Plane(PlaneEndpoint),
}

/// Which of the two a transport is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// [`Transport::Http`].
    #[default]
    Http,
    /// [`Transport::Plane`].
    Plane,
}

impl Transport {
    /// Which of the two it is.
    #[must_use]
    pub const fn kind(&self) -> TransportKind {
        match self {
            Self::Http(_) => TransportKind::Http,
            Self::Plane(_) => TransportKind::Plane,
        }
    }

    /// The HTTP server, if it is one.
    #[must_use]
    pub fn http(&self) -> Option<&HttpEndpoint> {
        match self {
            Self::Http(endpoint) => Some(endpoint),
            Self::Plane(_) => None,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(endpoint) => endpoint.fmt(f),
            Self::Plane(endpoint) => endpoint.fmt(f),
        }
    }
}

/// Where an HTTP server is, and the key that it wants. Printed as its URL, without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpEndpoint {
    /// Whether it is reached by `https`.
    pub tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What stands before every path, without a slash at its end; usually empty.
    pub prefix: String,
    /// The key that it wants to see, if it wants one.
    pub api_key: Option<ApiKey>,
}

impl HttpEndpoint {
    /// `host:port`, as the `host` header names it.
    #[must_use]
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for HttpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.prefix)
    }
}

/// A worker's place on a request plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneEndpoint {
    /// Which plane, by the name that it has in this process: `memory`, `tcp`, `nats`.
    pub plane: Arc<str>,
    /// Where on it, as the plane writes it; empty where the worker's id says it.
    pub address: Arc<str>,
    /// How payloads for it are written.
    pub codec: Codec,
}

/// How payloads on a request plane are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Codec {
    /// JSON; also what an endpoint that names no codec reads.
    #[default]
    Json,
    /// MessagePack with field names.
    MessagePack,
}

impl Codec {
    /// Its name on the wire and in discovery.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::MessagePack => "msgpack",
        }
    }

    /// The codec of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Json, Self::MessagePack]
            .into_iter()
            .find(|codec| codec.name() == name)
    }
}

impl fmt::Display for PlaneEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.plane, self.address)
    }
}

/// A secret that a server wants to see. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(Arc<str>);

impl ApiKey {
    /// Takes the key as it is.
    #[must_use]
    pub fn new(key: &str) -> Self {
        Self(key.into())
    }

    /// The key itself, for whoever sends it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(hidden)")
    }
}

/// Where a worker's cache events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventFeed {
    /// Sockets of the engine. The first rank's are given, each further rank is one port further; a socket that is not
    /// given is where the worker itself says, if it says.
    Sockets {
        /// The socket that publishes, such as `tcp://gpu-1:5557`.
        publish: Option<String>,
        /// The socket that repeats what was missed.
        replay: Option<String>,
    },
    /// Whoever runs the worker delivers them: no socket is to be opened for it.
    Delivered,
}

impl Default for EventFeed {
    fn default() -> Self {
        Self::Sockets {
            publish: None,
            replay: None,
        }
    }
}

impl EventFeed {
    /// The publishing socket of the first rank, where it is given.
    #[must_use]
    pub fn publish(&self) -> Option<&str> {
        match self {
            Self::Sockets { publish, .. } => publish.as_deref(),
            Self::Delivered => None,
        }
    }

    /// The socket of the first rank that repeats what was missed, where it is given.
    #[must_use]
    pub fn replay(&self) -> Option<&str> {
        match self {
            Self::Sockets { replay, .. } => replay.as_deref(),
            Self::Delivered => None,
        }
    }
}

/// Which part of a request a worker computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// All of it.
    #[default]
    Aggregated,
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
}

impl Role {
    /// Its name for operators.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The role of this name.
    ///
    /// ```
    /// # use kvasir_types::Role;
    /// assert_eq!(Role::from_name("prefill"), Some(Role::Prefill));
    /// assert_eq!(Role::from_name("both"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Aggregated, Self::Prefill, Self::Decode];
        all.into_iter().find(|role| role.name() == name)
    }
}

/// A model that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// The name that requests use.
    pub name: String,
    /// Where the worker took it from: a folder, or a name on a hub.
    pub root: Option<String>,
    /// Longest prompt and answer together.
    pub max_model_len: Option<u32>,
    /// The model that it is an adapter of.
    pub parent: Option<String>,
    /// How often an answer of it may go on at another worker, as its worker says.
    pub migration_limit: u32,
}

impl ModelCard {
    /// Longest name, in bytes: it stands in every series of the model, in log lines and in answers.
    pub const NAME_BYTES_MAX: usize = 256;

    /// Whether requests, labels and log lines can carry this as a model's name.
    ///
    /// ```
    /// # use kvasir_types::ModelCard;
    /// assert!(ModelCard::is_name("org/model-7b:v2") && ModelCard::is_name("模型"));
    /// assert!(!ModelCard::is_name("") && !ModelCard::is_name("a\nb") && !ModelCard::is_name(&"x".repeat(257)));
    /// ```
    #[must_use]
    pub fn is_name(name: &str) -> bool {
        (1..=Self::NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control)
    }
}

/// How much one rank of a worker can take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// KV blocks.
    pub kv_blocks: Option<u64>,
    /// Tokens computed in one step.
    pub max_num_batched_tokens: Option<u64>,
    /// Sequences that run at once.
    pub max_num_seqs: Option<u64>,
}

/// What a worker computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Device {
    /// A GPU or its like; also what a worker that says nothing is taken for.
    #[default]
    Accelerator,
    /// A plain processor.
    Cpu,
}

impl Device {
    /// Its name for operators.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Accelerator => "gpu",
            Self::Cpu => "cpu",
        }
    }

    /// As engines and operators write it: `cpu`, or the name of any accelerator (`gpu`, `cuda`, `cuda:0`, `rocm`, `xpu`).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        const ACCELERATORS: [&str; 8] = ["gpu", "cuda", "rocm", "hip", "xpu", "tpu", "npu", "hpu"];
        let kind = name.split(':').next().unwrap_or_default();
        match kind {
            "cpu" => Some(Self::Cpu),
            kind if ACCELERATORS.contains(&kind) => Some(Self::Accelerator),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(host: &str) -> HttpEndpoint {
        HttpEndpoint {
            tls: false,
            host: host.into(),
            port: 8000,
            prefix: "/base".into(),
            api_key: Some(ApiKey::new("secret")),
        }
    }

    #[test]
    fn a_device_is_named_as_engines_name_it() {
        for (name, device) in [
            ("cpu", Some(Device::Cpu)),
            ("cuda:1", Some(Device::Accelerator)),
            ("gpu", Some(Device::Accelerator)),
            ("CPU", None),
            ("", None),
        ] {
            assert_eq!(Device::from_name(name), device, "{name}");
        }
        for device in [Device::Cpu, Device::Accelerator] {
            assert_eq!(Device::from_name(device.name()), Some(device));
        }
    }

    #[test]
    fn an_endpoint_is_printed_without_its_key() {
        assert_eq!(http("gpu-1").to_string(), "http://gpu-1:8000/base");
        assert_eq!(http("::1").to_string(), "http://[::1]:8000/base");
        let record = WorkerRecord::new(WorkerId(1), Transport::Http(http("gpu-1")));
        assert!(!format!("{record:?}").contains("secret"));
        let plane = Transport::Plane(PlaneEndpoint {
            plane: "tcp".into(),
            address: "gpu-1:9000/1f/dynamo/backend/generate".into(),
            codec: Codec::MessagePack,
        });
        assert_eq!(
            plane.to_string(),
            "tcp:gpu-1:9000/1f/dynamo/backend/generate"
        );
    }
}
