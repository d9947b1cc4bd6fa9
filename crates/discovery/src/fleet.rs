//! Records joined into workers.
//!
//! Answers one question: which workers does a frontend serve, given all records? A worker is an endpoint with a card under the same
//! name and id. Workers of one endpoint that serve the same model in the same role are a *set*, and must have the same card: a set
//! has the card that it began with, and who brings another is refused until the last of the others has gone. A pure function of the
//! records and of which card each set has.
//!
//! What always holds: a worker has one record, however many models it serves; workers of a model have one tokenizer; a worker whose
//! role needs others is there when they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use kvasir_types::{
    BootstrapAddress, Capacity, Codec, Device, DpRank, ModelCard, PlaneEndpoint, Role,
    TransferRule, Transport, WorkerId, WorkerRecord, topology_taint,
};

use crate::card::{Card, ModelInput, WorkerType};
use crate::mirror::Change;
use crate::record::{Bucket, EndpointName, Instance, Record, RecordKey, RequestTransport};

/// Which namespaces count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Namespaces {
    /// All of them.
    #[default]
    All,
    /// This one.
    One(String),
    /// Those that begin with this.
    Prefix(String),
}

impl Namespaces {
    /// Whether a namespace counts.
    ///
    /// ```
    /// # use kvasir_discovery::fleet::Namespaces;
    /// assert!(Namespaces::One("ns".into()).holds("ns") && !Namespaces::One("ns".into()).holds("ns2"));
    /// assert!(Namespaces::Prefix("ns".into()).holds("ns2"));
    /// ```
    #[must_use]
    pub fn holds(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::One(name) => name == namespace,
            Self::Prefix(prefix) => namespace.starts_with(prefix.as_str()),
        }
    }
}

/// Workers of one endpoint that serve the same model in the same role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SetName {
    /// The endpoint.
    pub endpoint: EndpointName,
    /// The model.
    pub model: String,
    /// The role.
    pub role: WorkerType,
}

/// A worker that can be served.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundWorker {
    /// What a frontend is to know of it.
    pub record: WorkerRecord,
    /// The endpoint that it serves.
    pub endpoint: EndpointName,
    /// The card of the model that it serves.
    pub card: Arc<Card>,
    /// Names that card.
    pub sum: String,
    /// Names the tokenizer and the template of that model.
    pub text: String,
}

/// Something that whoever runs the fleet has to know. Printed as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FleetNote {
    /// A card cannot be read.
    BadCard(RecordKey, String),
    /// A worker has another card than the set that it belongs to.
    OtherCard(RecordKey, SetName),
    /// A worker of another set has another tokenizer or template for the same model.
    OtherText(RecordKey, SetName),
    /// A worker cannot be served by this frontend, and why.
    Unserved(RecordKey, &'static str),
    /// A set waits for workers of other roles.
    Waiting(SetName),
    /// A card says nothing of its worker's role: it is taken for one that computes all.
    Compatibility(RecordKey),
    /// Two endpoints with cards have the same id.
    SameId(RecordKey, u64),
}

impl fmt::Display for FleetNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadCard(key, error) => write!(f, "{key}: {error}; the worker is not served"),
            Self::OtherCard(key, set) => write!(
                f,
                "{key}: its card differs from that of the workers that serve {} at {} already; it is not served until \
                 they have gone: start all workers of a model with the same files and settings, or in another namespace",
                set.model, set.endpoint
            ),
            Self::OtherText(key, set) => write!(
                f,
                "{key}: its tokenizer or template is not that of {} at {}, which serves the model already; it is not \
                 served: start all workers of a model from the same files",
                set.model, set.endpoint
            ),
            Self::Unserved(key, why) => write!(f, "{key}: not served: {why}"),
            Self::Waiting(set) => write!(
                f,
                "{} workers of {} at {} wait for workers of the roles that they need",
                set.role.name(),
                set.model,
                set.endpoint
            ),
            Self::Compatibility(key) => write!(
                f,
                "{key}: the card is of an older shape (compatibility mode): its worker is taken for one that computes \
                 whole requests"
            ),
            Self::SameId(key, id) => write!(
                f,
                "{key}: worker {id:x} serves another endpoint already; it is not served twice"
            ),
        }
    }
}

impl FleetNote {
    /// Whether something is not served because of it.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        !matches!(self, Self::Compatibility(_) | Self::Waiting(_))
    }
}

/// What can be served, and what stands in the way of the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetView {
    /// Workers by id.
    pub workers: BTreeMap<u64, FoundWorker>,
    /// In order, each once.
    pub notes: BTreeSet<FleetNote>,
}

/// All records, and which card each set has.
#[derive(Debug, Default)]
pub struct FleetJoin {
    namespaces: Namespaces,
    instances: BTreeMap<String, Arc<Record>>,
    cards: BTreeMap<String, KnownCard>,
    sets: BTreeMap<SetName, String>,
    /// The tokenizer that each model began with, and whose.
    texts: BTreeMap<String, (String, SetName)>,
}

#[derive(Debug)]
struct KnownCard {
    /// The key of its instance.
    instance: String,
    is_adapter: bool,
    endpoint: EndpointName,
    card: Result<CardRead, String>,
}

/// A card, and what is worked out from it once.
#[derive(Debug)]
struct CardRead {
    card: Arc<Card>,
    sum: String,
    text: String,
}

/// A card whose instance is there.
struct Candidate<'a> {
    key: &'a str,
    known: &'a KnownCard,
    card: &'a Arc<Card>,
    sum: &'a str,
    text: &'a str,
    set: SetName,
    instance: &'a Instance,
}

impl FleetJoin {
    /// No records yet.
    #[must_use]
    pub fn new(namespaces: Namespaces) -> Self {
        Self {
            namespaces,
            ..Self::default()
        }
    }

    /// Takes note of a change; says whether it may matter.
    pub fn apply(&mut self, change: &Change) -> bool {
        match change {
            Change::Added(key, record) | Change::Updated(key, record) => {
                self.namespaces.holds(record.namespace()) && self.put(key, record)
            }
            Change::Removed(key) => match key.bucket {
                Bucket::Instances => self.instances.remove(&key.key).is_some(),
                Bucket::Models => self.cards.remove(&key.key).is_some(),
                Bucket::EventChannels | Bucket::EventSources => false,
            },
            Change::Synced | Change::Lost(_) | Change::Restored => false,
        }
    }

    fn put(&mut self, key: &RecordKey, record: &Arc<Record>) -> bool {
        match &**record {
            Record::Endpoint(_) => {
                self.instances.insert(key.key.clone(), Arc::clone(record));
                true
            }
            Record::Model(model) => {
                let read = Card::parse(&model.card_json).map_err(|error| error.to_string());
                let known = KnownCard {
                    instance: format!("{}/{:x}", model.name(), model.instance_id),
                    is_adapter: model.model_suffix.is_some(),
                    endpoint: model.name(),
                    card: read.map(|card| CardRead {
                        sum: card.checksum(),
                        text: card.text_key(),
                        card: Arc::new(card),
                    }),
                };
                self.cards.insert(key.key.clone(), known);
                true
            }
            Record::EventChannel(_) | Record::EventSource(_) => false,
        }
    }

    /// What can be served now.
    #[must_use = "sets keep the cards that a view has found"]
    pub fn view(&mut self) -> FleetView {
        let mut notes = BTreeSet::new();
        let (sets, texts) = (
            std::mem::take(&mut self.sets),
            std::mem::take(&mut self.texts),
        );
        let mut candidates = self.candidates(&mut notes);
        let sets = settle_sets(&candidates, &sets);
        candidates.retain(|one| {
            let is_ours = sets.get(&one.set).is_none_or(|sum| sum == one.sum);
            if !is_ours {
                notes.insert(FleetNote::OtherCard(one.record_key(), one.set.clone()));
            }
            is_ours
        });
        let texts = settle_texts(&candidates, &texts);
        candidates.retain(|one| {
            let of_model = texts.get(&one.set.model);
            let other = of_model.filter(|(text, _)| text != one.text);
            if let Some((_, set)) = other {
                notes.insert(FleetNote::OtherText(one.record_key(), set.clone()));
            }
            other.is_none()
        });
        let roles = roles(&candidates);
        let is_met = |one: &Candidate<'_>| one.needs_are_met(&roles);
        let waiting = candidates.iter().filter(|one| !is_met(one));
        notes.extend(waiting.map(|one| FleetNote::Waiting(one.set.clone())));
        let served = candidates
            .iter()
            .filter(|one| is_met(one))
            .collect::<Vec<_>>();
        let workers = workers(&served, &mut notes);
        (self.sets, self.texts) = (sets, texts);
        FleetView { workers, notes }
    }

    fn candidates(&self, notes: &mut BTreeSet<FleetNote>) -> Vec<Candidate<'_>> {
        let mut found = Vec::new();
        for (key, known) in &self.cards {
            let Some(Record::Endpoint(instance)) =
                self.instances.get(&known.instance).map(|r| &**r)
            else {
                continue;
            };
            let record_key = || RecordKey::new(Bucket::Models, key.clone());
            let CardRead { card, sum, text } = match &known.card {
                Ok(read) => read,
                Err(error) => {
                    notes.insert(FleetNote::BadCard(record_key(), error.clone()));
                    continue;
                }
            };
            if let Some(why) = unserved(card) {
                notes.insert(FleetNote::Unserved(record_key(), why));
                continue;
            }
            if card.is_old() {
                notes.insert(FleetNote::Compatibility(record_key()));
            }
            let set = SetName {
                endpoint: known.endpoint.clone(),
                model: card.name.clone(),
                role: card.role(),
            };
            found.push(Candidate {
                key,
                known,
                card,
                sum,
                text,
                set,
                instance,
            });
        }
        found
    }
}

impl Candidate<'_> {
    fn record_key(&self) -> RecordKey {
        RecordKey::new(Bucket::Models, self.key)
    }

    /// Whether workers of the roles that it needs are in its namespace, for its model. Who answers can compute prompts, too: it
    /// does not wait for others who would.
    fn needs_are_met(&self, roles: &BTreeMap<(&str, &str), BTreeSet<WorkerType>>) -> bool {
        let needs = &self.card.needs;
        let here = roles.get(&(&*self.set.endpoint.namespace, &*self.set.model));
        let has = |role: &WorkerType| {
            let alone = self.set.role == WorkerType::Decode && *role == WorkerType::Prefill;
            alone || here.is_some_and(|here| here.contains(role))
        };
        needs.is_empty() || needs.iter().any(|all| all.iter().all(has))
    }
}

/// Why a model cannot be served, if so.
fn unserved(card: &Card) -> Option<&'static str> {
    let answers = card.model_type.is_chat() || card.model_type.is_completions();
    match (card.model_input, card.role()) {
        (ModelInput::Text, _) => {
            Some("it takes text, and only workers that take tokens are served")
        }
        (ModelInput::Tensor, _) => {
            Some("it takes tensors, and only workers that take tokens are served")
        }
        (_, WorkerType::Encode) => Some("encode workers are not served"),
        (_, WorkerType::Aggregated | WorkerType::Decode) if !answers => {
            Some("it offers neither conversations nor completions")
        }
        _ => None,
    }
}

/// Which card each set has: the one that it had, while somebody has that; else the one that most have.
fn settle_sets(
    found: &[Candidate<'_>],
    before: &BTreeMap<SetName, String>,
) -> BTreeMap<SetName, String> {
    let mut counts: BTreeMap<&SetName, BTreeMap<&str, usize>> = BTreeMap::new();
    for one in found {
        *counts
            .entry(&one.set)
            .or_default()
            .entry(one.sum)
            .or_default() += 1;
    }
    let settle = |(set, sums): (&SetName, BTreeMap<&str, usize>)| {
        let kept = before
            .get(set)
            .filter(|sum| sums.contains_key(sum.as_str()));
        let most = || {
            sums.iter()
                .max_by_key(|(sum, count)| (**count, std::cmp::Reverse(**sum)))
        };
        let sum = kept
            .cloned()
            .or_else(|| most().map(|(sum, _)| (*sum).to_owned()))?;
        Some((set.clone(), sum))
    };
    counts.into_iter().filter_map(settle).collect()
}

/// Which tokenizer each model has: the one that it had, while somebody has that.
fn settle_texts(
    found: &[Candidate<'_>],
    before: &BTreeMap<String, (String, SetName)>,
) -> BTreeMap<String, (String, SetName)> {
    let mut texts: BTreeMap<String, (String, SetName)> = BTreeMap::new();
    for one in found {
        let was = before.get(&one.set.model);
        let is_kept = was.is_some_and(|(known, _)| known == one.text);
        let is_new = match texts.get(&one.set.model) {
            Some((text, _)) => is_kept && text != one.text,
            None => true,
        };
        if is_new {
            let entry = (one.text.to_owned(), one.set.clone());
            texts.insert(one.set.model.clone(), entry);
        }
    }
    texts
}

/// Roles by namespace and model.
fn roles<'a>(found: &'a [Candidate<'_>]) -> BTreeMap<(&'a str, &'a str), BTreeSet<WorkerType>> {
    let mut roles: BTreeMap<(&str, &str), BTreeSet<WorkerType>> = BTreeMap::new();
    for one in found {
        let key = (&*one.set.endpoint.namespace, &*one.set.model);
        roles.entry(key).or_default().insert(one.set.role);
    }
    roles
}

fn workers(
    found: &[&Candidate<'_>],
    notes: &mut BTreeSet<FleetNote>,
) -> BTreeMap<u64, FoundWorker> {
    let mut by_instance: BTreeMap<&str, Vec<&Candidate<'_>>> = BTreeMap::new();
    for one in found {
        by_instance
            .entry(&one.known.instance)
            .or_default()
            .push(one);
    }
    let mut workers: BTreeMap<u64, FoundWorker> = BTreeMap::new();
    for mut cards in by_instance.into_values() {
        // The model itself, then what is built on it.
        cards.sort_by_key(|one| one.known.is_adapter);
        let Some(base) = cards.first() else {
            continue;
        };
        let id = base.instance.instance_id;
        if workers.contains_key(&id) {
            notes.insert(FleetNote::SameId(base.record_key(), id));
            continue;
        }
        let found = FoundWorker {
            record: record(base, &cards),
            endpoint: base.set.endpoint.clone(),
            card: Arc::clone(base.card),
            sum: base.sum.to_owned(),
            text: base.text.to_owned(),
        };
        workers.insert(id, found);
    }
    workers
}

/// What a frontend is to know of a worker.
fn record(base: &Candidate<'_>, cards: &[&Candidate<'_>]) -> WorkerRecord {
    let (instance, runtime) = (base.instance, &base.card.runtime);
    let codec = instance.request_plane_codec.as_deref();
    let (plane, address) = match &instance.transport {
        RequestTransport::Tcp(address) => ("tcp", address),
        RequestTransport::NatsTcp(subject) => ("nats", subject),
        RequestTransport::Http(url) => ("http", url),
    };
    let endpoint = PlaneEndpoint {
        plane: plane.into(),
        address: address.as_str().into(),
        codec: codec.and_then(Codec::from_name).unwrap_or_default(),
    };
    let transport = Transport::Plane(endpoint);
    let mut record = WorkerRecord::new(WorkerId(instance.instance_id), transport);
    record.role = match base.card.role() {
        WorkerType::Prefill => Role::Prefill,
        WorkerType::Decode => Role::Decode,
        WorkerType::Aggregated | WorkerType::Encode => Role::Aggregated,
    };
    for one in cards {
        let parent = one.known.is_adapter.then(|| base.card.name.clone());
        let names = std::iter::once(&one.card.name).chain(&one.card.aliases);
        record.models.extend(names.map(|name| ModelCard {
            name: name.clone(),
            root: None,
            max_model_len: one.card.context_length,
            parent: parent.clone().filter(|parent| parent != name),
            migration_limit: one.card.migration_limit,
        }));
    }
    record.first_rank = DpRank(runtime.data_parallel_start_rank);
    record.ranks = Some(runtime.data_parallel_size);
    record.block_size = Some(base.card.kv_cache_block_size).filter(|&size| size > 0);
    record.capacity = Capacity {
        kv_blocks: runtime.total_kv_blocks,
        max_num_batched_tokens: runtime.max_num_batched_tokens,
        max_num_seqs: runtime.max_num_seqs,
    };
    let places = runtime.topology.iter();
    let places = places.map(|(domain, name)| topology_taint(domain, name));
    let taints: BTreeSet<String> = runtime.taints.iter().cloned().chain(places).collect();
    record.taints = taints.into_iter().map(Into::into).collect();
    record.transfer = runtime.transfer.as_ref().map(|transfer| {
        let mut places = runtime.topology.iter();
        let place = places.find(|(domain, _)| *domain == transfer.domain);
        TransferRule {
            domain: transfer.domain.as_str().into(),
            taint: place.map(|(domain, name)| topology_taint(domain, name).into()),
            preferred: transfer.preferred,
        }
    });
    record.bootstrap = runtime
        .bootstrap
        .as_ref()
        .map(|(host, port)| BootstrapAddress {
            host: host.as_str().into(),
            port: *port,
        });
    record.prefill_mode = base
        .card
        .router_mode()
        .filter(|_| record.role == Role::Prefill);
    record.device = instance.device_type.as_deref().and_then(Device::from_name);
    record
}

#[cfg(test)]
mod tests;
