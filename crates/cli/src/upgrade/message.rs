//! What two processes tell each other while one takes over from the other.
//!
//! They may be of different releases: what is missing has a default, what is unknown is passed over.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// One message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum Message {
    /// The old process: who it is, and what it hands over.
    Hello(Box<Hello>),
    /// The new one: its workers are there.
    Ready,
    /// The old one: what is booked, or how that has changed.
    Load(LoadNews),
    /// The new one: it accepts connections.
    Serving,
    /// Of a later release.
    #[serde(other)]
    Unknown,
}

/// Who hands over, and what.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Hello {
    pub(super) pid: u32,
    pub(super) version: String,
    /// What the files are that came before, in their order.
    pub(super) files: Vec<FileRole>,
    /// Workers that operators added at run time.
    pub(super) workers: Vec<AddedWorker>,
    /// Which workers serve which model.
    pub(super) served: Vec<ServedBy>,
    /// Busy thresholds that operators changed.
    pub(super) thresholds: Vec<ChangedThresholds>,
    /// Its name among replicas, if it is one: they tell of its load under that name, too.
    pub(super) replica: Option<u64>,
}

/// What a file is for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub(super) enum FileRole {
    /// Listens for clients; `asked` is what the options said.
    Clients { asked: SocketAddr },
    /// Listens for operators.
    Operators { asked: SocketAddr },
    /// A copy of the index.
    Index,
    /// Listens for answers of workers; both processes accept there.
    Answers { asked: SocketAddr },
    /// Over it go answers that came to the wrong one of the two.
    AnswersLink,
    /// Listens for other replicas.
    Peers { asked: SocketAddr },
    /// Of a later release.
    #[serde(other)]
    Unknown,
}

/// A worker as an operator added it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AddedWorker {
    /// Its URL, and what was said about it.
    pub(super) address: String,
    #[serde(default)]
    pub(super) api_key: Option<String>,
}

/// Who serves a model.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ServedBy {
    pub(super) model: String,
    pub(super) workers: Vec<u64>,
}

/// When workers of a model count as busy.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ChangedThresholds {
    pub(super) model: String,
    pub(super) decode_blocks: Option<f64>,
    pub(super) prefill_tokens: Option<u64>,
    pub(super) prefill_tokens_frac: Option<f64>,
}

/// What is booked, by router: the first time all of it, then what changed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct LoadNews {
    pub(super) routers: Vec<RouterNews>,
}

/// What changed at one router.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RouterNews {
    pub(super) name: String,
    pub(super) begun: Vec<BegunRequest>,
    /// Requests whose prompt is computed.
    pub(super) prefilled: Vec<String>,
    /// Requests that are over.
    pub(super) ended: Vec<String>,
    pub(super) sessions: Vec<BoundSession>,
}

/// A request that runs.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BegunRequest {
    pub(super) id: String,
    pub(super) worker: u64,
    pub(super) rank: u32,
    pub(super) sequence: Vec<u64>,
    pub(super) prefill_tokens: u32,
    pub(super) osl: Option<u32>,
}

/// A session that is bound.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BoundSession {
    pub(super) id: String,
    pub(super) worker: u64,
    pub(super) rank: u32,
    pub(super) in_engine: bool,
    pub(super) by_header: bool,
    pub(super) idle_secs: f64,
}
