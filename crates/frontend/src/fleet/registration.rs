//! What a worker serves: from what it says of itself to routers, models and event streams, and back.
//!
//! Answers one question: whose member is this worker, and as what? It is a member of each router once, however many
//! models it serves there, and names them to it; each of those models knows it as one of its workers.
//!
//! What always holds: a request finds the way to a worker before a router may choose it, and a router stops choosing it
//! before the way is gone.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvasir_host::{ModelSpec, PlaneWorker, RouterHost};
use kvasir_router::{Input, LoadReport, RouterMode, WorkerSpec};
use kvasir_trust::Cause;
use kvasir_types::{
    DpRank, EventFeed, ModelCard, Time, TransportKind, WorkerId, WorkerRank, WorkerRecord,
};
use kvasir_upstream::{EventSource, Facts, RankLoad, event_sources};
use tokio::sync::Notify;

use super::event_addresses::contradiction;
use super::roster::Pool;
use super::subscribe::EngineSubscriptions;
use super::{BATCH_ASSUMED, BLOCK_SIZE, CONTEXT_LENGTH, Fleet};
use crate::models::links::WorkerLink;
use crate::models::tokenize;
use crate::models::{Models, ServedModel};

/// A router that a worker is a member of.
struct Membership {
    /// One of the models that it serves there.
    model: Arc<ServedModel>,
    /// As what; with the names of all of them.
    spec: WorkerSpec,
}

impl Membership {
    fn host(&self) -> &Arc<RouterHost> {
        &self.model.host
    }
}

/// One worker, as its routers and models know it.
pub(super) struct Registration {
    pub(super) id: WorkerId,
    /// What counts about it.
    pub(super) record: Arc<WorkerRecord>,
    /// How it is reached.
    link: WorkerLink,
    pub(super) fleet: Fleet,
    /// The routers that it is a member of.
    routers: Vec<Membership>,
    /// The models that it serves there, by name.
    serves: BTreeMap<Arc<str>, Arc<ServedModel>>,
    /// The models that it said last it serves.
    claimed: BTreeSet<Arc<str>>,
    /// How many that it listed are not served.
    refused: usize,
    /// The streams of its cache events.
    subscriptions: EngineSubscriptions,
    /// A router has ejected it.
    pub(super) faulted: Arc<Notify>,
    /// What was last said about it.
    pub(super) described: String,
    /// The event address that it was given and the one that it announces, if they differ.
    contradiction: Option<(String, String)>,
}

impl Registration {
    /// A worker that serves nothing yet.
    pub(super) fn new(record: &Arc<WorkerRecord>, link: WorkerLink, fleet: &Fleet) -> Self {
        Self {
            id: record.id,
            record: Arc::clone(record),
            link,
            fleet: fleet.clone(),
            routers: Vec::new(),
            serves: BTreeMap::new(),
            claimed: BTreeSet::new(),
            refused: 0,
            subscriptions: EngineSubscriptions::default(),
            faulted: Arc::default(),
            described: String::new(),
            contradiction: None,
        }
    }

    /// Where it is listed.
    fn pool(&self) -> Pool {
        Pool::of(self.record.role)
    }

    /// Whether it serves any model.
    pub(super) fn is_serving(&self) -> bool {
        !self.serves.is_empty()
    }

    /// Another record counts, or another way leads to the worker.
    pub(super) fn update(&mut self, record: &Arc<WorkerRecord>, link: WorkerLink) {
        if self.pool() != Pool::of(record.role) {
            self.leave();
            self.disclaim(|_| true);
        }
        self.record = Arc::clone(record);
        for model in self.serves.values() {
            model.links().insert(self.id, link.clone());
            model.links().set_part(record);
        }
        self.link = link;
    }

    /// A worker that was on its way out is back.
    pub(super) fn rejoin(&self) {
        for membership in &self.routers {
            let draining = |router: &kvasir_router::Router| {
                let member = router.fleet().member(self.id);
                member.is_some_and(|member| member.is_draining())
            };
            if membership.host().ask(draining) {
                tracing::info!(worker = %self.record.transport, "worker is a member again");
                let spec = membership.spec.clone();
                membership.host().tell(Input::Joined(spec));
            }
        }
    }

    /// Takes over what is known of the worker: what its record says, else what it says of itself.
    pub(super) fn join(&mut self, facts: &Facts) {
        let facts = match self.record.models.is_empty() {
            true => Cow::Borrowed(facts),
            false => Cow::Owned(Facts {
                models: self.record.models.clone(),
                ..facts.clone()
            }),
        };
        let served = self.claim(&facts);
        let mut by_router: Vec<Vec<Arc<ServedModel>>> = Vec::new();
        for model in served.values() {
            let same = |group: &&mut Vec<Arc<ServedModel>>| {
                let first = group.first();
                first.is_some_and(|first| Arc::ptr_eq(&first.host, &model.host))
            };
            match by_router.iter_mut().find(same) {
                Some(group) => group.push(Arc::clone(model)),
                None => by_router.push(vec![Arc::clone(model)]),
            }
        }
        for models in &by_router {
            self.join_router(models, &facts);
        }
        let keeps = |host: &Arc<RouterHost>| {
            let mut groups = by_router.iter().flatten();
            groups.any(|model| Arc::ptr_eq(&model.host, host))
        };
        self.leave_routers(|host| !keeps(host));
        self.leave_models(|name| !served.contains_key(name));
        self.disclaim(|name| !served.contains_key(name));
    }

    /// The worker is out of reach: it serves nothing. What it claims stays claimed.
    pub(super) fn leave(&mut self) {
        self.leave_routers(|_| true);
        self.leave_models(|_| true);
    }

    /// The worker is gone.
    pub(super) async fn end(&mut self) {
        self.leave();
        self.disclaim(|_| true);
        let addresses = &self.fleet.event_addresses;
        addresses.listen(self.id, "", &BTreeMap::new());
        self.settle_events().await;
    }

    /// Waits until event streams that were closed have ended.
    pub(super) async fn settle_events(&mut self) {
        self.subscriptions.settle().await;
    }

    /// The worker serves these models no more.
    fn disclaim(&mut self, gone: impl Fn(&Arc<str>) -> bool) {
        let names = self.claimed.extract_if(.., |name| gone(name));
        self.fleet
            .disclaim(self.id, Pool::of(self.record.role), names);
    }

    /// The models that the worker lists, by name.
    fn claim(&mut self, facts: &Facts) -> BTreeMap<Arc<str>, Arc<ServedModel>> {
        let mut served = BTreeMap::new();
        let mut refused = 0;
        for mut family in families(facts) {
            family.retain(|model| {
                let is_name = ModelCard::is_name(&model.name);
                refused += usize::from(!is_name);
                is_name
            });
            let new: Vec<ModelSpec> = family.iter().map(|m| self.new_model(m, facts)).collect();
            let place = (self.pool(), self.link.kind(), self.prefill_mode());
            let claimed = self.fleet.claim(self.id, place, &new);
            for ((model, new), claimed) in family.iter().zip(new).zip(claimed) {
                let Some(ours) = claimed else {
                    refused += 1;
                    continue;
                };
                self.claimed.insert(Arc::clone(&new.name));
                if let Some(root) = facts.root_of(model).filter(|_| self.pool() == Pool::Answer) {
                    tokenize::announce(self.fleet.tasks(), &ours, root);
                }
                served.insert(new.name, ours);
            }
        }
        if refused > self.refused {
            tracing::error!(worker = %self.record.transport, refused, models_max = Models::MAX,
                name_bytes_max = ModelCard::NAME_BYTES_MAX, "models of this worker are not served: there are too many, \
                or their names are empty, too long or have control characters");
        }
        self.refused = refused;
        served
    }

    /// How workers that compute prompts are chosen, if its card says so in a word that we know.
    fn prefill_mode(&self) -> Option<RouterMode> {
        RouterMode::find(self.record.prefill_mode.as_deref()?)
    }

    fn new_model(&self, model: &ModelCard, facts: &Facts) -> ModelSpec {
        ModelSpec {
            name: self.pool().name(&model.name),
            block_size: self.block_size(facts),
            context_length: facts.max_model_len_of(model).unwrap_or(CONTEXT_LENGTH),
            parent: model
                .parent
                .as_deref()
                .map(|parent| self.pool().name(parent)),
            migration_limit: model.migration_limit,
        }
    }

    fn block_size(&self, facts: &Facts) -> u32 {
        let told = self.record.block_size;
        told.or(facts.block_size).unwrap_or(BLOCK_SIZE)
    }

    /// What an engine server that does not say how many tokens it computes in a step is taken to compute. Who serves
    /// tokens announces it.
    fn batch_assumed(&self) -> Option<u64> {
        (self.link.kind() == TransportKind::Http).then_some(BATCH_ASSUMED)
    }

    /// What a router is to know of the worker.
    fn spec(&self, models: &[Arc<ServedModel>], facts: &Facts) -> WorkerSpec {
        let (record, block_size) = (&self.record, self.block_size(facts));
        let told = &record.capacity;
        WorkerSpec {
            first_rank: record.first_rank,
            ranks: record.ranks.or(facts.ranks).unwrap_or(1),
            kv_total_blocks: told.kv_blocks.or(facts.kv_blocks_of(block_size)),
            max_num_batched_tokens: told
                .max_num_batched_tokens
                .or(facts.max_batched_tokens)
                .or(self.batch_assumed()),
            max_num_seqs: told.max_num_seqs.or(facts.max_num_seqs),
            device: record.device.or(facts.device).unwrap_or_default(),
            transport: self.link.kind(),
            taints: record.taints.clone(),
            serves: models.iter().map(|m| Arc::clone(&m.name)).collect(),
            ..WorkerSpec::new(self.id)
        }
    }

    /// Serves these models, which share a router.
    fn join_router(&mut self, models: &[Arc<ServedModel>], facts: &Facts) {
        let Some(first) = models.first() else {
            return;
        };
        let spec = self.spec(models, facts);
        match (&self.record.events, &self.fleet.event_plane) {
            (EventFeed::Delivered, _) => {}
            (_, Some(plane)) if self.link.kind() != TransportKind::Http => {
                plane.join(PlaneWorker {
                    id: self.id,
                    host: Arc::clone(&first.host),
                    ranks: spec.rank_iter().collect(),
                    url: self.record.transport.to_string(),
                    events: self.wants_events_of(first),
                })
            }
            _ => self.subscribe(first, &spec, facts),
        }
        let here = |m: &&mut Membership| Arc::ptr_eq(m.host(), &first.host);
        let known = self.routers.iter_mut().find(here);
        let before = known.map(|membership| {
            membership.model = Arc::clone(first);
            std::mem::replace(&mut membership.spec, spec.clone())
        });
        if before.as_ref() == Some(&spec) {
            return;
        }
        for model in models {
            model.links().set_part(&self.record);
            model.admit(&spec, self.link.clone());
            self.serves
                .insert(Arc::clone(&model.name), Arc::clone(model));
        }
        first.enter_router(spec.clone(), before.as_ref());
        if let Some(replicas) = &self.fleet.replicas {
            replicas.join(self.id, &first.host);
        }
        if before.is_none() {
            first.host.watch(self.id, &self.faulted);
            let model = Arc::clone(first);
            self.routers.push(Membership { model, spec });
        }
    }

    /// Listens to the worker's cache events for the router of `model`, and says what is known about it.
    fn subscribe(&mut self, model: &ServedModel, spec: &WorkerSpec, facts: &Facts) {
        let sources = match self.wants_events_of(model) {
            true => event_sources(&self.record, facts, spec.rank_count()),
            false => BTreeMap::new(),
        };
        self.check_addresses(&sources, facts);
        let block_size = self.block_size(facts);
        self.judge(model, spec, block_size, &sources);
        self.subscriptions
            .subscribe(&self.fleet, model, self.id, &sources);
        self.describe(facts, block_size, model, spec, sources.len());
    }

    /// Says once what speaks against the event addresses that the worker is given.
    fn check_addresses(&mut self, sources: &BTreeMap<u32, EventSource>, facts: &Facts) {
        if sources.is_empty() {
            return;
        }
        let url = self.record.transport.to_string();
        let addresses = &self.fleet.event_addresses;
        addresses.listen(self.id, &url, sources);
        let contradiction = contradiction(&self.record, facts);
        if self.contradiction == contradiction {
            return;
        }
        if let Some((told, announced)) = &contradiction {
            tracing::warn!(worker = %url, %told, %announced,
                "events= is not what the engine announces: if it is another engine's socket, nothing is known of this \
                 worker's cache; leave events= out, or name the announced socket");
        }
        self.contradiction = contradiction;
    }

    /// Whether events are asked for: nobody asks an index of models that are routed by load alone.
    pub(super) fn wants_events_of(&self, model: &ServedModel) -> bool {
        self.fleet.events && model.host.needs().index
    }

    /// Says of each rank whether its events can be used.
    fn judge(
        &self,
        model: &ServedModel,
        spec: &WorkerSpec,
        block_size: u32,
        sources: &BTreeMap<u32, EventSource>,
    ) {
        let (models, snapshot) = (self.fleet.listed(self.pool()), &self.fleet.snapshot);
        let url = self.record.transport.to_string();
        for rank in spec.rank_iter() {
            let unusable = match sources.contains_key(&rank.rank.0) {
                _ if !self.wants_events_of(model) => Some(Cause::Forced),
                _ if model.block_size != block_size => Some(Cause::BlockSize),
                true => None,
                false => Some(Cause::NoEvents),
            };
            let router = model.host.name();
            if unusable.is_some() {
                snapshot.forget(&**models, |name, kept| *name == **router && kept == rank);
            }
            let known = snapshot.trust(router, rank);
            model.host.judge(rank, &url, unusable, known);
        }
    }

    fn leave_routers(&mut self, gone: impl Fn(&Arc<RouterHost>) -> bool) {
        for left in self.routers.extract_if(.., |m| gone(m.host())) {
            self.subscriptions.unsubscribe(left.host().name());
            if let Some(plane) = &self.fleet.event_plane {
                plane.leave(self.id);
            }
            if let Some(known) = &self.fleet.replicas {
                known.leave(self.id, left.host());
            }
            left.host().unwatch(self.id);
            left.model.leave_router(&left.spec);
        }
    }

    fn leave_models(&mut self, gone: impl Fn(&Arc<str>) -> bool) {
        for (_, model) in self.serves.extract_if(.., |name, _| gone(name)) {
            model.dismiss(self.id);
        }
    }

    /// Tells each router of the worker something.
    pub(super) fn tell(&self, input: impl Fn(&WorkerSpec) -> Input) {
        for membership in &self.routers {
            membership.host().tell(input(&membership.spec));
        }
    }

    /// Requests that are booked on the worker.
    pub(super) fn booked(&self) -> u64 {
        let of = |membership: &Membership| {
            membership.host().ask(|router| {
                let ranks = membership.spec.rank_iter();
                let loads = ranks.filter_map(|rank| router.load(rank));
                loads.map(|load| u64::from(load.requests)).sum::<u64>()
            })
        };
        self.routers.iter().map(of).sum()
    }

    pub(super) fn report_load(&self, loads: &BTreeMap<u32, RankLoad>, asked: Time) {
        for (&rank, load) in loads {
            let rank = WorkerRank {
                worker: self.id,
                rank: DpRank(rank),
            };
            self.tell(|spec| {
                let used = load.kv_usage.zip(spec.kv_total_blocks);
                Input::Load(LoadReport {
                    rank,
                    kv_used_blocks: used.map(|(share, total)| (share * total as f64) as u64),
                    waiting: Some(load.waiting),
                    asked,
                    ..LoadReport::default()
                })
            });
        }
    }
}

/// What an engine lists, put together by the weights that it serves them from; a model before its adapters.
fn families(facts: &Facts) -> Vec<Vec<&ModelCard>> {
    let mut families: Vec<(Option<&str>, Vec<&ModelCard>)> = Vec::new();
    let mut seen = BTreeSet::new();
    let bases = facts.models.iter().filter(|model| model.parent.is_none());
    let adapters = facts.models.iter().filter(|model| model.parent.is_some());
    for model in bases.chain(adapters) {
        if !seen.insert(&model.name) {
            continue;
        }
        let root = facts.root_of(model);
        match families.iter_mut().find(|(of, _)| *of == root) {
            Some((_, family)) => family.push(model),
            None => families.push((root, vec![model])),
        }
    }
    families.into_iter().map(|(_, family)| family).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(models: &[(&str, Option<&str>, Option<&str>)]) -> Vec<Vec<String>> {
        let model = |(name, root, parent): &(&str, Option<&str>, Option<&str>)| ModelCard {
            name: (*name).into(),
            root: root.map(Into::into),
            max_model_len: None,
            parent: parent.map(Into::into),
            migration_limit: 0,
        };
        let facts = Facts {
            models: models.iter().map(model).collect(),
            ..Facts::default()
        };
        let names = |family: Vec<&ModelCard>| family.iter().map(|m| m.name.clone()).collect();
        families(&facts).into_iter().map(names).collect()
    }

    #[test]
    fn names_of_the_same_weights_are_one_family() {
        let (root, lora) = (Some("/models/base"), Some("/loras/sql"));
        let vllm = listed(&[
            ("sql", lora, Some("a")),
            ("a", root, None),
            ("b", root, None),
            ("a", root, None),
        ]);
        assert_eq!(vllm, [["a", "b", "sql"]]);
        let apart = listed(&[
            ("x", Some("/x"), None),
            ("y", Some("/y"), None),
            ("sql", lora, Some("y")),
        ]);
        assert_eq!(apart, [vec!["x"], vec!["y", "sql"]]);
        let unsaid = listed(&[("x", None, None), ("y", None, None)]);
        assert_eq!(
            unsaid,
            [["x", "y"]],
            "one engine, and nothing speaks against it"
        );
    }
}
