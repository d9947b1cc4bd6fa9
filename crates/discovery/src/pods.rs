//! Engine servers in pods, as whoever follows them knows them.
//!
//! Answers one question: where are the engine servers that a cluster runs, now? Nothing here knows how that was found out. What is
//! told is always the whole: a reader that is late misses steps on the way and nothing else.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvasir_types::Role;
use tokio::sync::watch;

/// An engine server in a pod, ready for requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodEngine {
    /// The pod's name; empty if nobody says which pod it is.
    pub pod: String,
    /// Tells a pod from an earlier one of the same name or address; empty if nobody says it.
    pub uid: String,
    /// Its address, without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether it is reached by `https`.
    pub tls: bool,
    /// Which part of requests it computes, as its labels say.
    pub role: Role,
}

/// All that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    /// Who is ready.
    pub engines: BTreeSet<PodEngine>,
    /// All that the cluster held at first is known.
    pub is_listed: bool,
    /// Why the cluster cannot be asked, if it cannot: `engines` are those that were known.
    pub lost: Option<String>,
    /// What keeps pods from being used, in words for operators.
    pub notes: BTreeSet<String>,
}

/// The reading end. Following ends when it is dropped.
#[derive(Debug)]
pub struct PodWatch {
    views: watch::Receiver<Arc<PodView>>,
    address: String,
}

impl PodWatch {
    /// Who is followed, and what is known at first.
    #[must_use]
    pub fn new(views: watch::Receiver<Arc<PodView>>, address: String) -> Self {
        Self { views, address }
    }

    /// Where pods are looked for, for messages.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// All that is known, once it differs from what was read last. Nothing when nobody follows any more.
    pub async fn next(&mut self) -> Option<Arc<PodView>> {
        self.views.changed().await.ok()?;
        Some(Arc::clone(&self.views.borrow_and_update()))
    }
}
