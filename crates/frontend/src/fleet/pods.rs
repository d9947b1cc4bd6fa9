//! Engine servers in the pods of a cluster.
//!
//! Answers one question: who are the workers, where labels of pods say so? Follows what a cluster says of them (`kvasir_discovery`:
//! `PodWatch`) and brings every engine server that is ready as one source of membership. A pod that ends, or is no longer ready,
//! drains as any worker does that its source has no more.
//!
//! What always holds: a cluster that cannot be asked changes nothing, is said once, and shows on the health page and in a metric; what
//! keeps a pod from being used is said once.

use std::collections::BTreeSet;

use kvasir_discovery::{PodEngine, PodView, PodWatch};
use kvasir_types::{ApiKey, HttpEndpoint, WorkerRecord};
use kvasir_upstream::worker_in_pod;

use super::Fleet;
use crate::fleet::members::{SourceName, SourceState, WorkerSource};

/// What operators see of where these workers come from.
const KIND: &str = "kubernetes";
/// What its metric is called: a store in the same cluster can be lost on its own.
const BACKEND: &str = "worker-selector";

/// Follows the pods of one cluster.
struct PodFollower {
    fleet: Fleet,
    address: String,
    source: WorkerSource,
    /// The key of workers.
    key: Option<ApiKey>,
    is_listed: bool,
    is_lost: bool,
    /// No pod was there, which was said.
    was_empty: bool,
    /// The list of members refused some, which was said.
    was_refused: bool,
    /// What was said of pods that are not used.
    said: BTreeSet<String>,
}

impl Fleet {
    /// Brings the engine servers in pods, from now on. They are shown `key`.
    pub fn follow_pods(&self, mut pods: PodWatch, key: Option<ApiKey>) {
        let address = pods.address().to_owned();
        let source = self.members().source(SourceName::new(KIND, &address));
        source.report(SourceState::Starting);
        tracing::info!(
            address,
            "workers are pods with the labels of --worker-selector"
        );
        let mut follower = PodFollower {
            fleet: self.clone(),
            address,
            source,
            key,
            is_listed: false,
            is_lost: false,
            was_empty: false,
            was_refused: false,
            said: BTreeSet::new(),
        };
        follower.measure(true);
        let tasks = self.tasks();
        let ending = tasks.clone();
        tasks.spawn(async move {
            let following = async {
                while let Some(view) = pods.next().await {
                    follower.follow(&view);
                }
            };
            tokio::select! {
                biased;
                () = ending.draining() => {}
                () = following => {}
            }
            follower.source.detach();
        });
    }
}

impl PodFollower {
    fn follow(&mut self, view: &PodView) {
        if view.is_listed {
            self.is_listed = true;
            self.bring(view);
        }
        let was_lost = std::mem::replace(&mut self.is_lost, view.lost.is_some());
        match (&view.lost, was_lost) {
            (Some(why), false) => self.lost(why),
            (None, true) => self.restored(),
            _ => {}
        }
        if self.is_listed && self.source.state() == SourceState::Starting {
            self.source.report(SourceState::Ready);
        }
    }

    /// Brings all that are ready.
    fn bring(&mut self, view: &PodView) {
        for note in view.notes.difference(&self.said) {
            tracing::warn!(address = self.address, "an engine is not used: {note}");
        }
        self.said.clone_from(&view.notes);
        let is_empty = view.engines.is_empty();
        if is_empty && !self.was_empty {
            tracing::warn!(
                address = self.address,
                "no pod is ready that has the labels of --worker-selector, or whose Service has them"
            );
        }
        self.was_empty = is_empty;
        let records = view.engines.iter().map(|engine| self.record(engine));
        let refused = self.source.replace(records).err();
        if let Some(refused) = refused
            && !self.was_refused
        {
            tracing::error!(%refused, "pods are left out");
        }
        self.was_refused = refused.is_some();
    }

    fn record(&self, engine: &PodEngine) -> WorkerRecord {
        let endpoint = HttpEndpoint {
            tls: engine.tls,
            host: engine.host.clone(),
            port: engine.port,
            prefix: String::new(),
            api_key: self.key.clone(),
        };
        let mut record = worker_in_pod(endpoint, &engine.uid);
        record.role = engine.role;
        record
    }

    fn lost(&self, why: &str) {
        let address = &self.address;
        self.measure(false);
        self.source.report(SourceState::Lost(why.into()));
        match self.is_listed {
            true => tracing::error!(
                address,
                why,
                "the cluster cannot be asked: the workers that were known go on serving; it is tried until it can"
            ),
            false => tracing::error!(
                address,
                why,
                "the cluster cannot be asked for workers: see --kubeconfig, --kube-namespace and what our service account \
                 may read; it is tried until it can"
            ),
        }
    }

    fn restored(&self) {
        self.measure(true);
        tracing::info!(address = self.address, "the cluster can be asked again");
        self.source.report(SourceState::Starting);
    }

    fn measure(&self, up: bool) {
        let gauge = &self.fleet.context.host.metrics.discovery_up;
        let gauge = gauge.with_label_values(&[BACKEND]);
        gauge.set(f64::from(u8::from(up)));
    }
}
