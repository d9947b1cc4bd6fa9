//! Workers that a store announces.
//!
//! Answers one question: who are the workers, where discovery says so? Follows a store, joins its records into workers
//! (`kvasir_discovery`: `FleetJoin`), loads the text of each model that is new, and brings the workers whose text is there as one
//! source of membership.
//!
//! What always holds: a store that is lost changes nothing, is said once, and shows on the health page and in a metric; a worker is
//! brought once its model can be served; what stands in the way of a worker is said once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvasir_discovery::{
    Bucket, Change, FleetJoin, FleetNote, FoundWorker, Namespaces, RESTORE_GRACE, Store, Watch,
};
use kvasir_text::TextModel;
use kvasir_types::{ModelCard, Role};
use serde_json::Value;

use super::Fleet;
use super::card_text::CardTexts;
use crate::fleet::members::{SourceName, SourceState, WorkerSource};

/// What changes in so long after workers were brought is gathered and brought at once: it is work for each worker that is there,
/// and a fleet that starts changes with every one of them.
const GATHER: Duration = Duration::from_millis(10);

/// Where a card says how its worker names what it keeps in a Mooncake store.
const HICACHE_DATA: &str = "sglang_hicache_mooncake";

/// How a store is followed.
#[derive(Clone, Debug)]
pub struct DiscoveryOptions {
    /// Which workers count.
    pub namespaces: Namespaces,
    /// A model is served when so many of its workers are there for the first time (`--router-min-initial-workers`).
    pub min_initial_workers: u32,
    /// What an operator changes if the store is not where it was looked for, such as `--etcd-endpoints`.
    pub flag: &'static str,
    /// Whether an operator asked for this store, or it is looked for by default.
    pub is_asked: bool,
    /// How long workers go on that a store no longer has when it is back.
    pub restore_grace: Duration,
}

impl Default for DiscoveryOptions {
    fn default() -> Self {
        Self {
            namespaces: Namespaces::All,
            min_initial_workers: 0,
            flag: "--discovery-backend",
            is_asked: true,
            restore_grace: RESTORE_GRACE,
        }
    }
}

/// What the card of a discovered model gives its requests.
#[derive(Clone)]
pub(super) struct CardText {
    /// Tokenizer and template.
    pub(super) text: Arc<TextModel>,
    /// Names the card.
    pub(super) sum: Arc<str>,
    /// How its workers write calls of tools, and reasoning.
    pub(super) parsers: (Option<Arc<str>>, Option<Arc<str>>),
}

/// Follows one store.
struct Follower {
    fleet: Fleet,
    store: Arc<dyn Store>,
    options: DiscoveryOptions,
    source: WorkerSource,
    join: FleetJoin,
    texts: CardTexts,
    /// All that the store held at first is known.
    is_synced: bool,
    /// Models that had enough workers once.
    opened: BTreeSet<String>,
    /// What was said of workers that are not served.
    said: BTreeSet<FleetNote>,
    /// The list of members refused some, which was said.
    was_refused: bool,
}

impl Fleet {
    /// Brings the workers that a store announces, from now on.
    pub fn discover(&self, store: Arc<dyn Store>, options: DiscoveryOptions) {
        let instance = format!("{} {}", store.backend(), store.address());
        let source = self
            .members()
            .source(SourceName::new("discovery", instance));
        source.report(SourceState::Starting);
        let tasks = self.tasks();
        let mut follower = Follower {
            join: FleetJoin::new(options.namespaces.clone()),
            texts: CardTexts::new(tasks, &self.tls),
            fleet: self.clone(),
            source,
            options,
            is_synced: false,
            opened: BTreeSet::new(),
            said: BTreeSet::new(),
            was_refused: false,
            store,
        };
        follower.measure(true);
        let ending = tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = ending.draining() => {}
                () = follower.run() => {}
            }
            follower.source.detach();
        });
    }

    /// The text of a model that was discovered.
    pub(super) fn card_text(&self, model: &str, parent: Option<&str>) -> Option<CardText> {
        let texts = self.card_texts();
        let found = texts.get(model).or_else(|| texts.get(parent?));
        found.cloned()
    }
}

impl Follower {
    async fn run(&mut self) {
        let watch = self.store.watch(&[Bucket::Instances, Bucket::Models]);
        let mut watch = watch.with_grace(self.options.restore_grace);
        loop {
            tokio::select! {
                change = watch.next() => self.follow(change, &mut watch),
                () = self.texts.next_loaded() => {}
            }
            if self.is_synced {
                self.bring();
                tokio::time::sleep(GATHER).await;
            }
        }
    }

    /// Takes note of a change, and of all that wait behind it.
    fn follow(&mut self, first: Change, watch: &mut Watch) {
        let mut next = Some(first);
        while let Some(change) = next {
            match &change {
                Change::Synced => self.is_synced = true,
                Change::Lost(why) => self.lost(why),
                Change::Restored => self.restored(),
                _ => drop(self.join.apply(&change)),
            }
            next = watch.try_next();
        }
    }

    fn lost(&self, why: &str) {
        let (backend, address) = (self.store.backend(), self.store.address());
        let flag = self.options.flag;
        self.measure(false);
        self.source.report(SourceState::Lost(why.into()));
        match (self.is_synced, self.options.is_asked) {
            (true, _) => tracing::error!(
                backend,
                address,
                why,
                "discovery is lost: the workers that were known go on serving; it is tried until it is back"
            ),
            (false, true) => tracing::error!(
                backend,
                address,
                why,
                "discovery cannot be reached: start it, or set {flag} or --discovery-backend; it is tried until it comes"
            ),
            (false, false) => tracing::warn!(
                backend,
                address,
                why,
                "nothing is discovered there, which is the default; it is tried until it comes: --discovery-backend static \
                 if it never will"
            ),
        }
    }

    fn restored(&self) {
        self.measure(true);
        let (backend, address) = (self.store.backend(), self.store.address());
        tracing::info!(backend, address, "discovery is back");
        self.source.report(SourceState::Starting);
    }

    fn measure(&self, up: bool) {
        let gauge = &self.fleet.context.host.metrics.discovery_up;
        let gauge = gauge.with_label_values(&[self.store.backend()]);
        gauge.set(f64::from(u8::from(up)));
    }

    /// Brings all workers that can be served.
    fn bring(&mut self) {
        let view = self.join.view();
        for note in view.notes.difference(&self.said) {
            match note.is_refusal() {
                true => tracing::error!("{note}"),
                false => tracing::warn!("{note}"),
            }
        }
        self.said = view.notes;
        self.announce_stores(view.workers.values());
        let found = view.workers.values();
        self.texts
            .keep(&found.clone().map(|worker| &*worker.text).collect());
        self.forget_texts(found.clone());
        if let Some(replicas) = &self.fleet.replicas {
            let at = |worker: &FoundWorker| (worker.record.id, worker.endpoint.clone());
            replicas.found(found.clone().map(at).collect());
        }
        let endpoints = found.clone().map(|worker| worker.endpoint.clone());
        let endpoints = endpoints.collect();
        self.fleet.endpoints.send_if_modified(|known| {
            let is_new = *known != endpoints;
            *known = endpoints;
            is_new
        });
        let ready: Vec<&FoundWorker> = found.filter(|worker| self.has_text(worker)).collect();
        self.open(&ready);
        let open = ready.into_iter().filter(|worker| self.is_open(worker));
        let records = open.map(|worker| worker.record.clone());
        let refused = self.source.replace(records).err();
        if let Some(refused) = refused
            && !self.was_refused
        {
            tracing::error!(%refused, "workers that discovery found are left out");
        }
        self.was_refused = refused.is_some();
        if self.source.state() == SourceState::Starting && !self.texts.is_loading() {
            self.source.report(SourceState::Ready);
        }
    }

    /// Says how workers name what they keep in a store that they share.
    fn announce_stores<'a>(&self, found: impl Iterator<Item = &'a FoundWorker>) {
        let Some(pool) = &self.fleet.hicache else {
            return;
        };
        let mut announced: Vec<(Arc<str>, &Value)> = Vec::new();
        for worker in found {
            if let Some(data) = worker.card.runtime_data(HICACHE_DATA) {
                // Adapters are cached under other names.
                let names = worker.record.models.iter();
                let names = names.filter(|model| model.parent.is_none());
                announced.extend(names.map(|model| (model.name.as_str().into(), data)));
            }
        }
        pool.announce(announced.iter().map(|(model, data)| (model, *data)));
    }

    /// Whether a model's prompts can be read; else that is being seen to.
    fn has_text(&mut self, worker: &FoundWorker) -> bool {
        let names = worker.record.models.iter();
        let in_folder = |card: &ModelCard| {
            let parent = card.parent.as_deref();
            self.fleet.folders.of(&card.name, parent)
        };
        let all_in_folders = names.clone().all(|card| in_folder(card).is_some());
        let announced = match all_in_folders {
            true => None,
            false => match self.texts.of(&worker.text, &worker.card) {
                None => return false,
                text => text,
            },
        };
        let runtime = &worker.card.runtime;
        let name = |name: &Option<String>| name.as_deref().map(Into::into);
        for card in names {
            let Some(text) = announced.clone().or_else(|| in_folder(card)) else {
                continue;
            };
            let text = CardText {
                text,
                sum: worker.sum.as_str().into(),
                parsers: (
                    name(&runtime.tool_call_parser),
                    name(&runtime.reasoning_parser),
                ),
            };
            let mut texts = self.fleet.card_texts();
            let name = Arc::<str>::from(card.name.as_str());
            match worker.record.role {
                // Requests name the card of who answers.
                Role::Prefill => {
                    texts.entry(name).or_insert(text);
                }
                Role::Aggregated | Role::Decode => {
                    texts.insert(name, text);
                }
            }
        }
        true
    }

    /// Lets go of the texts of models that are gone.
    fn forget_texts<'a>(&self, found: impl Iterator<Item = &'a FoundWorker>) {
        let models = found.flat_map(|worker| &worker.record.models);
        let names: BTreeSet<&str> = models.map(|card| card.name.as_str()).collect();
        let mut texts = self.fleet.card_texts();
        texts.retain(|name, _| names.contains(&**name));
    }

    /// Takes note of models that have enough workers.
    fn open(&mut self, ready: &[&FoundWorker]) {
        for worker in ready {
            let model = &worker.card.name;
            if self.opened.contains(model) {
                continue;
            }
            let alike = ready.iter().filter(|other| other.card.name == *model);
            if alike.count() >= self.options.min_initial_workers as usize {
                self.opened.insert(model.clone());
            }
        }
    }

    fn is_open(&self, worker: &FoundWorker) -> bool {
        self.opened.contains(&worker.card.name)
    }
}
