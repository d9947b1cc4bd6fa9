//! The index of another router, asked over the request plane; and the answers to those who ask ours.
//!
//! Answers one question: how much of this prompt does each rank hold, where this process keeps no index of its own
//! (`--use-remote-indexer`)? [`RemoteIndex`] knows who serves one (`kv_indexer_query` in a store) and asks them in turn;
//! [`IndexEndpoints`] answers such questions from the routers of this process (`--serve-indexer`).
//!
//! What always holds: a question takes [`ANSWER_TIMEOUT`] at most and fails no request: without an answer nothing counts as cached,
//! which is counted and stands in the decision; at most `ASKING_MAX` questions are under way; what finds no room in the queue of
//! routing decisions is dropped and counted.

mod served;

pub use served::{IndexEndpoints, QUERY_ENDPOINT, RECORD_ENDPOINT};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvasir_discovery::{Bucket, Change, Instance, Record, RecordKey, Store};
use kvasir_index::Match;
use kvasir_protocol::Payload;
use kvasir_router::{Lookup, Placement};
use kvasir_transport::{CallContext, EndpointClient};
use kvasir_types::{Codec, PlaneEndpoint, RequestId, Time, WorkerId};
use kvasir_wire::native::{Encoding, IndexQuery, IndexReply, RoutingRecord, TierScore};
use tokio::sync::mpsc;

use crate::context::HostContext;
use crate::lookaside::{Lookaside, LookasideWords, NoAnswer};
use crate::plane::endpoint_of;

/// How long an index has to answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// Questions that are under way at once; the next prompt is placed without an answer.
const ASKING_MAX: usize = 1024;
/// Servers that are asked for a prompt until one answers.
const SERVERS_MAX: usize = 8;
/// Servers of one component among those.
const REPLICAS_MAX: usize = 2;
/// How long one that failed is asked after the others.
const FAILED_LATELY: Duration = Duration::from_secs(30);
/// Routing decisions that wait to be told; more are dropped and counted.
const RECORDS_MAX: usize = 4096;

/// By the name of a request plane: who calls endpoints there.
type Clients = BTreeMap<&'static str, Arc<dyn EndpointClient>>;

/// Namespace and component.
type Component = (String, String);

/// A process that serves an index.
#[derive(Clone, Debug)]
struct IndexServer {
    component: Component,
    id: u64,
    /// `kv_indexer_query`, or the endpoint that takes decisions.
    endpoint: PlaneEndpoint,
}

#[derive(Debug, Default)]
struct Servers {
    queries: BTreeMap<RecordKey, IndexServer>,
    records: BTreeMap<RecordKey, IndexServer>,
    /// Whose index knows a model.
    by_model: BTreeMap<Arc<str>, Component>,
    /// Who failed last, and when: others are asked first for a while.
    failed: BTreeMap<u64, Time>,
}

/// Indexes of other routers. Clones are one.
#[derive(Clone)]
pub struct RemoteIndex {
    shared: Arc<Shared>,
}

struct Shared {
    context: HostContext,
    clients: OnceLock<Clients>,
    servers: Mutex<Servers>,
    lookaside: Lookaside,
    turn: AtomicUsize,
    /// What calls are named by: the first half of their ids, and how many there were.
    name: u64,
    calls: AtomicU64,
    decisions: mpsc::Sender<RoutingRecord>,
}

impl fmt::Debug for RemoteIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteIndex")
            .field("servers", &self.lock().queries.len())
            .finish_non_exhaustive()
    }
}

/// What the log says of it.
const WORDS: LookasideWords = LookasideWords {
    failed: "the index of another router failed several times in a row: prompts are placed by load and it is asked again from time to time; \
             see --use-remote-indexer",
    again: "the index of another router answers again",
};

impl RemoteIndex {
    /// Nobody is known yet. `seed` tells the calls of one process from those of another.
    #[must_use]
    pub fn new(context: &HostContext, seed: u64) -> Self {
        let (decisions, waiting) = mpsc::channel(RECORDS_MAX);
        let remote = Self {
            shared: Arc::new(Shared {
                context: context.clone(),
                clients: OnceLock::new(),
                servers: Mutex::default(),
                lookaside: Lookaside::new(WORDS, ANSWER_TIMEOUT, ASKING_MAX),
                turn: AtomicUsize::new(0),
                name: seed,
                calls: AtomicU64::new(0),
                decisions,
            }),
        };
        let told = remote.clone().tell_decisions(waiting);
        context.tasks.background().spawn(told);
        remote
    }

    /// Asks over these planes, by name.
    pub fn connect(&self, clients: &Clients) {
        let _ = self.shared.clients.set(clients.clone());
    }

    /// Finds those who serve an index in a store, in namespaces that are `wanted`, from now on.
    pub fn follow(&self, store: &Arc<dyn Store>, wanted: impl Fn(&str) -> bool + Send + 'static) {
        let (own, mut watch) = (self.clone(), store.watch(&[Bucket::Instances]));
        let following = async move {
            loop {
                match watch.next().await {
                    Change::Added(key, record) | Change::Updated(key, record) => {
                        if let Record::Endpoint(instance) = &*record
                            && wanted(&instance.namespace)
                        {
                            own.found(key, instance);
                        }
                    }
                    Change::Removed(key) => own.gone(&key),
                    Change::Synced | Change::Lost(_) | Change::Restored => {}
                }
            }
        };
        let tasks = self.shared.context.tasks.background();
        tasks.spawn(following);
    }

    fn lock(&self) -> MutexGuard<'_, Servers> {
        let servers = &self.shared.servers;
        servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self, key: RecordKey, instance: &Instance) {
        let server = IndexServer {
            component: (instance.namespace.clone(), instance.component.clone()),
            id: instance.instance_id,
            endpoint: endpoint_of(instance),
        };
        let mut servers = self.lock();
        let known = match instance.endpoint.as_str() {
            QUERY_ENDPOINT => &mut servers.queries,
            RECORD_ENDPOINT => &mut servers.records,
            _ => return,
        };
        if known.insert(key, server).is_none() {
            tracing::info!(id = instance.instance_id, endpoint = %instance.name(), "an index is served");
        }
    }

    fn gone(&self, key: &RecordKey) {
        let mut servers = self.lock();
        let query = servers.queries.remove(key);
        let gone = query.or_else(|| servers.records.remove(key));
        drop(servers);
        if let Some(gone) = gone {
            tracing::info!(id = gone.id, "an index is served no more");
        }
    }

    /// How many leading blocks of a prompt each rank holds; none if nobody says so.
    pub(crate) async fn find(&self, model: &Arc<str>, lookup: &Lookup) -> Option<Vec<Match>> {
        let servers = self.servers_of(model);
        let (outcome, found) = match servers.first() {
            None => ("nobody", None),
            Some(first) => match self.ask(model, &servers, lookup).await {
                Ok(found) => ("answered", Some(found)),
                Err(none) => {
                    if none == NoAnswer::Late {
                        self.mark_failed(first.id);
                    }
                    (none.name(), None)
                }
            },
        };
        let queries = &self.shared.context.metrics.remote_index_queries_total;
        queries.with_label_values(&[outcome]).inc();
        found
    }

    async fn ask(
        &self,
        model: &Arc<str>,
        servers: &[IndexServer],
        lookup: &Lookup,
    ) -> Result<Vec<Match>, NoAnswer> {
        let question = async {
            let query = IndexQuery {
                model: model.to_string(),
                blocks: lookup.locals.to_vec(),
                device_only: false,
            };
            self.ask_each(model, servers, &query).await
        };
        let Shared {
            lookaside, context, ..
        } = &*self.shared;
        lookaside.ask(context.clock, question).await
    }

    /// Some servers of each component, in turn; those of the component that knew the model first.
    fn servers_of(&self, model: &Arc<str>) -> Vec<IndexServer> {
        let servers = self.lock();
        let mut by_component: BTreeMap<&Component, Vec<&IndexServer>> = BTreeMap::new();
        for server in servers.queries.values() {
            by_component
                .entry(&server.component)
                .or_default()
                .push(server);
        }
        let turn = self.shared.turn.fetch_add(1, Ordering::Relaxed);
        let (known, now) = (servers.by_model.get(model), self.shared.context.clock.now());
        let failed = |server: &&IndexServer| {
            let at = servers.failed.get(&server.id);
            at.is_some_and(|at| now - *at < FAILED_LATELY)
        };
        let mut chosen = Vec::new();
        for mut of in by_component.into_values() {
            let first = turn % of.len().max(1);
            of.rotate_left(first);
            of.sort_by_key(failed);
            chosen.extend(of.into_iter().take(REPLICAS_MAX).cloned());
        }
        chosen.sort_by_key(|server: &IndexServer| Some(&server.component) != known);
        chosen.truncate(SERVERS_MAX);
        chosen
    }

    fn mark_failed(&self, server: u64) {
        let now = self.shared.context.clock.now();
        let mut servers = self.lock();
        servers.failed.retain(|_, at| now - *at < FAILED_LATELY);
        servers.failed.insert(server, now);
    }

    async fn ask_each(
        &self,
        model: &Arc<str>,
        servers: &[IndexServer],
        query: &IndexQuery,
    ) -> Result<Vec<Match>, String> {
        let mut why = String::new();
        for server in servers {
            let write = |encoding, out: &mut Vec<u8>| query.encode(encoding, out);
            let reply = self.call(server, write).await;
            let reply = reply.and_then(|reply| {
                let read = IndexReply::decode(encoding(reply.codec), &reply.bytes);
                read.map_err(|error| error.to_string())
            });
            match reply {
                Err(error) => {
                    self.mark_failed(server.id);
                    why = error;
                }
                Ok(IndexReply::Scores(scores)) => {
                    let mut known = self.lock();
                    if known.by_model.get(model) != Some(&server.component) {
                        let component = server.component.clone();
                        known.by_model.insert(Arc::clone(model), component);
                    }
                    return Ok(scores.into_iter().map(match_of).collect());
                }
                Ok(IndexReply::Error(error)) => why = error,
            }
        }
        Err(why)
    }

    /// Asks one server, and gives the one item of its answer.
    async fn call(
        &self,
        server: &IndexServer,
        write: impl FnOnce(Encoding, &mut Vec<u8>),
    ) -> Result<Payload, String> {
        let endpoint = &server.endpoint;
        let clients = self.shared.clients.get();
        let client = clients.and_then(|clients| clients.get(&*endpoint.plane));
        let client = client
            .ok_or_else(|| format!("request plane `{}` is not served here", endpoint.plane))?;
        let mut question = Vec::new();
        write(encoding(endpoint.codec), &mut question);
        let payload = Payload::new(endpoint.codec, question.into());
        let call = self.shared.calls.fetch_add(1, Ordering::Relaxed);
        let id = RequestId(u128::from(self.shared.name) << 64 | u128::from(call));
        let context = CallContext::new(WorkerId(server.id), id);
        let answer = client.call(endpoint, payload, context).await;
        let mut answer = answer.map_err(|error| error.to_string())?;
        match answer.next().await {
            Some(item) => item.map_err(|error| error.to_string()),
            None => Err("it answered nothing".to_owned()),
        }
    }

    /// Tells an index that learns from routing decisions where a prompt went.
    pub(crate) fn record(&self, model: &Arc<str>, sent: &Placement, lookup: &Lookup) {
        let record = RoutingRecord {
            model: model.to_string(),
            rank: sent.target,
            blocks: lookup.locals.to_vec(),
            sequence: lookup.sequence.to_vec(),
        };
        if self.shared.decisions.try_send(record).is_err() {
            self.count_record("dropped");
        }
    }

    fn count_record(&self, result: &str) {
        let records = &self.shared.context.metrics.remote_index_records_total;
        records.with_label_values(&[result]).inc();
    }

    async fn tell_decisions(self, mut waiting: mpsc::Receiver<RoutingRecord>) {
        while let Some(record) = waiting.recv().await {
            let servers: Vec<IndexServer> = self.lock().records.values().cloned().collect();
            let mut result = "nobody";
            for server in &servers {
                let write = |encoding, out: &mut Vec<u8>| record.encode(encoding, out);
                let told = tokio::time::timeout(ANSWER_TIMEOUT, self.call(server, write)).await;
                result = match told {
                    Ok(Ok(_)) => "recorded",
                    Ok(Err(_)) | Err(_) => "failed",
                };
            }
            self.count_record(result);
        }
    }
}

const fn match_of(score: TierScore) -> Match {
    Match {
        rank: score.rank,
        device: score.device,
        host: score.host,
        disk: score.disk,
    }
}

const fn encoding(codec: Codec) -> Encoding {
    match codec {
        Codec::Json => Encoding::Json,
        Codec::MessagePack => Encoding::MessagePack,
    }
}
