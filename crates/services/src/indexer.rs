//! Which worker holds how much of a prompt, for programs that choose by themselves.
//!
//! Engines are registered with the socket of their cache events; each model and group has an index of its own. Counts are tokens.
//! What always holds: a listener that ended has left nothing in the index before another of its rank begins.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_host::{EventStream, HostContext, LoadedSnapshot, RouterHost, RouterSetup};
use kvasir_index::Matches;
use kvasir_tasks::RuntimeThreads;
use kvasir_types::{LocalHash, WorkerId, WorkerRank};
use serde::{Deserialize, Serialize};

use crate::api::{Answer, Api, Ask, Verb, query_value, read, read_tokens};
use crate::event_listener::EventAddress;
use crate::group::{
    BLOCK_SIZE_MAX, Group, GroupKey, Groups, NAME_BYTES_MAX, Naming, WORKERS_MAX, is_name,
    locals_of,
};
use crate::reading::{AsksOfTokens, Hashes, TokenIds};
use crate::takeover::{self, Takeover};

/// Other indexers that are known.
const PEERS_MAX: usize = 256;
/// What is said of a salt beside hashes.
const SALTED: &str = "cache_salt is not accepted by /query_by_hash; block_hashes must already include the intended cache salt";

/// The service.
pub struct Indexer {
    context: HostContext,
    threads: Option<RuntimeThreads>,
    groups: Arc<Groups<IndexGroup>>,
    takeover: Takeover,
    peers: Mutex<BTreeSet<String>>,
    /// Held while listeners begin and end.
    changing: tokio::sync::Mutex<()>,
}

/// One index, and who fills it.
struct IndexGroup {
    host: Arc<RouterHost>,
    instances: Mutex<BTreeMap<u64, BTreeMap<u32, Listener>>>,
}

impl Group for IndexGroup {
    fn host(&self) -> &Arc<RouterHost> {
        &self.host
    }
}

struct Listener {
    address: EventAddress,
    stream: EventStream,
}

#[derive(Deserialize)]
struct Register {
    instance_id: u64,
    endpoint: String,
    model_name: String,
    block_size: u32,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    #[serde(default)]
    dp_rank: u32,
    replay_endpoint: Option<String>,
}

#[derive(Deserialize)]
struct Unregister {
    instance_id: u64,
    #[serde(flatten)]
    key: GroupKey,
    dp_rank: Option<u32>,
}

#[derive(Deserialize)]
struct Query {
    token_ids: TokenIds,
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    lora_name: Option<String>,
    cache_salt: Option<String>,
}

impl AsksOfTokens for Query {
    fn put(&mut self, tokens: TokenIds) {
        self.token_ids = tokens;
    }
}

#[derive(Deserialize)]
struct QueryByHash {
    block_hashes: Hashes,
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
struct Peer {
    url: String,
}

/// What a worker holds of a prompt, in tokens.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct HeldTokens {
    longest_matched: u64,
    gpu: u64,
    dp: BTreeMap<u32, u64>,
    cpu: u64,
    disk: u64,
}

impl HeldTokens {
    /// Of what a lookup found, for each worker.
    pub(crate) fn by_worker(found: &Matches, block_size: u32) -> BTreeMap<u64, Self> {
        let mut workers: BTreeMap<u64, Self> = BTreeMap::new();
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_size);
        for rank in found.iter() {
            let held = workers.entry(rank.rank.worker.0).or_default();
            let device = tokens(rank.device);
            held.dp.insert(rank.rank.rank.0, device);
            held.gpu = held.gpu.max(device);
            held.cpu = held.cpu.max(tokens(rank.host_cumulative()));
            held.disk = held.disk.max(tokens(rank.disk_cumulative()));
            held.longest_matched = held.disk;
        }
        workers
    }

    /// Of a rank of which nothing was found.
    pub(crate) fn nothing(rank: u32) -> Self {
        Self {
            dp: BTreeMap::from([(rank, 0)]),
            ..Self::default()
        }
    }
}

#[derive(Serialize)]
struct Scores<'w> {
    scores: BTreeMap<u64, &'w BTreeMap<u32, u64>>,
    frequencies: [u64; 0],
    instances: &'w BTreeMap<u64, HeldTokens>,
}

#[derive(Serialize)]
struct InstanceRow<'g> {
    instance_id: u64,
    source: &'static str,
    status: &'static str,
    model_name: &'g str,
    routing_group: &'g str,
    block_size: u32,
    endpoints: BTreeMap<u32, String>,
    listeners: BTreeMap<u32, ListenerRow>,
}

#[derive(Serialize)]
struct ListenerRow {
    endpoint: String,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

/// How a listener can be, as its series say it.
const STATUSES: [&str; 4] = ["pending", "active", "paused", "failed"];
/// What is answered; series are labelled with nothing else.
const ROUTES: [&str; 11] = [
    "/query",
    "/query_by_hash",
    "/register",
    "/unregister",
    "/workers",
    "/dump",
    "/snapshot",
    "/peers",
    "/register_peer",
    "/deregister_peer",
    "/health",
];

impl Api for Indexer {
    async fn answer(&self, ask: Ask) -> Answer {
        let route = ROUTES.into_iter().find(|route| *route == ask.path);
        let (verb, clock) = (ask.verb, self.context.clock);
        let start = clock.now();
        let answer = self.dispatch(ask).await;
        if let Some(route) = route {
            self.count(route, verb, answer.status, clock.now() - start);
        }
        answer
    }

    fn measure(&self) {
        let metrics = &self.context.metrics;
        let groups = self.groups.all();
        metrics.kvindexer_models.set(groups.len() as f64);
        let (mut workers, mut by_status) = (0, BTreeMap::from(STATUSES.map(|name| (name, 0))));
        for (key, group) in groups.iter() {
            for row in group.rows(key) {
                workers += 1;
                for listener in row.listeners.values() {
                    *by_status.entry(listener.status).or_default() += 1;
                }
            }
        }
        metrics.kvindexer_workers.set(f64::from(workers));
        for (status, count) in by_status {
            let gauge = metrics.kvindexer_listeners.with_label_values(&[status]);
            gauge.set(f64::from(count));
        }
    }
}

impl Indexer {
    async fn dispatch(&self, ask: Ask) -> Answer {
        let answered = match (ask.verb, ask.path.as_str()) {
            (Verb::Post, "/query") => read_tokens(&ask.body).and_then(|query| self.query(&query)),
            (Verb::Post, "/query_by_hash") => {
                read(&ask.body).and_then(|query| self.query_by_hash(&query))
            }
            (Verb::Post, "/register") => match read(&ask.body) {
                Ok(asked) => self.register(asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Post, "/unregister") => match read(&ask.body) {
                Ok(asked) => self.unregister(&asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Get, "/workers") => Ok(self.workers(ask.query.as_deref())),
            (Verb::Get, "/dump") => Ok(takeover::dump(&self.groups)),
            (Verb::Get, "/snapshot") => Ok(self.takeover.snapshot().await),
            (Verb::Get, "/peers") => Ok(Answer::json(200, &*self.peers())),
            (Verb::Post, "/register_peer") => read(&ask.body).and_then(|peer| self.add_peer(peer)),
            (Verb::Post, "/deregister_peer") => {
                read(&ask.body).and_then(|peer| self.remove_peer(&peer))
            }
            (Verb::Get, "/health") => Ok(Answer::empty(200)),
            (_, path) => Err(Answer::no_route(ROUTES.contains(&path))),
        };
        answered.unwrap_or_else(|refusal| refusal)
    }

    fn count(&self, route: &str, verb: Verb, status: u16, took: Duration) {
        let metrics = &self.context.metrics;
        let method = match verb {
            Verb::Get => "GET",
            Verb::Post => "POST",
            Verb::Patch => "PATCH",
            Verb::Delete => "DELETE",
        };
        let requests = &metrics.kvindexer_requests_total;
        requests.with_label_values(&[route, method]).inc();
        let took_seconds = &metrics.kvindexer_request_duration_seconds;
        let took_seconds = took_seconds.with_label_values(&[route]);
        took_seconds.observe(took.as_secs_f64());
        let class = match status {
            400..500 => "4xx",
            500.. => "5xx",
            _ => return,
        };
        let errors = &metrics.kvindexer_errors_total;
        errors.with_label_values(&[route, class]).inc();
    }

    /// An empty one. `setup` says what its indexes remember; events are applied on `threads`.
    #[must_use]
    pub fn new(setup: RouterSetup, context: HostContext, threads: Option<RuntimeThreads>) -> Self {
        let groups = Arc::new(Groups::new(setup, context.clone()));
        Self {
            takeover: Takeover::new(&groups, &context, LoadedSnapshot::default()),
            groups,
            context,
            threads,
            peers: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    /// The same, beginning with the index of another. Before anything is listened to.
    #[must_use]
    pub fn with_snapshot(mut self, loaded: LoadedSnapshot) -> Self {
        self.takeover = Takeover::new(&self.groups, &self.context, loaded);
        self
    }

    /// Other indexers, as `POST /register_peer` adds one; an error says why not.
    pub fn know_peer(&self, url: &str) -> Result<(), String> {
        let added = self.add_peer(Peer {
            url: url.to_owned(),
        });
        added.map(|_| ()).map_err(|refused| refused.why())
    }

    /// Listens to an engine, as `POST /register` does; an error says why not.
    pub async fn listen(
        &self,
        instance_id: u64,
        dp_rank: u32,
        endpoint: &str,
        (model_name, routing_group, block_size): (&str, &str, u32),
    ) -> Result<(), String> {
        let asked = Register {
            instance_id,
            endpoint: endpoint.to_owned(),
            model_name: model_name.to_owned(),
            block_size,
            routing_group: routing_group.to_owned(),
            dp_rank,
            replay_endpoint: None,
        };
        let listening = self.register(asked).await;
        listening.map(|_| ()).map_err(|refused| refused.why())
    }

    fn group(&self, key: &GroupKey) -> Result<Arc<IndexGroup>, Answer> {
        let found = self.groups.get(key);
        found.ok_or_else(|| Answer::error(404, format_args!("no indexer for {key}")))
    }

    fn query(&self, query: &Query) -> Result<Answer, Answer> {
        let group = self.group(&GroupKey {
            model_name: query.model_name.clone(),
            routing_group: query.routing_group.clone(),
        })?;
        let naming = Naming {
            lora: query.lora_name.as_deref(),
            salt: query.cache_salt.as_deref(),
            ..Naming::default()
        };
        let block_size = group.host.block_size();
        Ok(group.scores(&locals_of(&query.token_ids.0, block_size, naming)))
    }

    fn query_by_hash(&self, query: &QueryByHash) -> Result<Answer, Answer> {
        if query.cache_salt.is_some() {
            return Err(Answer::error(400, SALTED));
        }
        let group = self.group(&GroupKey {
            model_name: query.model_name.clone(),
            routing_group: query.routing_group.clone(),
        })?;
        Ok(group.scores(&query.block_hashes.named(LocalHash)))
    }

    async fn register(&self, asked: Register) -> Result<Answer, Answer> {
        let key = GroupKey {
            model_name: asked.model_name,
            routing_group: asked.routing_group,
        };
        let (id, rank, block_size) = (asked.instance_id, asked.dp_rank, asked.block_size);
        if !key.is_sound() || !(1..=BLOCK_SIZE_MAX).contains(&block_size) {
            let text = "model_name and routing_group must be names of 1 to 256 bytes, block_size from 1 to 1048576";
            return Err(Answer::error(400, text));
        }
        let address = EventAddress {
            events: asked.endpoint,
            replay: asked.replay_endpoint,
        };
        address
            .sockets()
            .map_err(|error| Answer::error(400, error))?;
        let _turn = self.changing.lock().await;
        let group = self
            .groups
            .get_or_make(&key, block_size, |model| IndexGroup {
                host: model.host,
                instances: Mutex::default(),
            })?;
        self.takeover.restore(&group.host);
        let mut instances = group.instances();
        if instances
            .get(&id)
            .is_some_and(|ranks| ranks.contains_key(&rank))
        {
            let text = format!("instance {id} dp_rank {rank} already registered");
            return Err(Answer::error(409, text));
        }
        if instances.values().map(BTreeMap::len).sum::<usize>() >= WORKERS_MAX {
            return Err(Answer::error(
                409,
                format_args!("there are {WORKERS_MAX} listeners already"),
            ));
        }
        let opened = address.open(
            &group.host,
            WorkerRank::new(id, rank),
            self.takeover.loaded(),
            self.threads.as_ref(),
        );
        let opened = opened.map_err(|error| Answer::error(400, error))?;
        let Some(stream) = opened else {
            return Err(Answer::error(409, format_args!("instance {id} is leaving")));
        };
        let listener = Listener { address, stream };
        instances.entry(id).or_default().insert(rank, listener);
        Ok(Answer::done(201))
    }

    async fn unregister(&self, asked: &Unregister) -> Result<Answer, Answer> {
        let _turn = self.changing.lock().await;
        let id = asked.instance_id;
        let gone = || Answer::error(404, format_args!("instance {id} not found"));
        let group = self.group(&asked.key).map_err(|_| gone())?;
        let (ended, is_last) = group.take_out(id, asked.dp_rank).ok_or_else(gone)?;
        for listener in ended {
            let _ = listener.stream.stop().await;
        }
        if is_last {
            group.host.leave(WorkerId(id));
        }
        if group.instances().is_empty() {
            self.groups.remove(&asked.key);
            self.takeover.loaded().router_gone(group.host.name());
        }
        Ok(Answer::done(200))
    }

    fn workers(&self, query: Option<&str>) -> Answer {
        let (model, group) = (
            query_value(query, "model_name"),
            query_value(query, "routing_group"),
        );
        let groups = self.groups.all();
        let wanted = groups.iter().filter(|(key, _)| {
            model.as_ref().is_none_or(|model| *model == key.model_name)
                && group
                    .as_ref()
                    .is_none_or(|group| *group == key.routing_group)
        });
        let rows: Vec<InstanceRow<'_>> = wanted.flat_map(|(key, group)| group.rows(key)).collect();
        Answer::json(200, &rows)
    }

    fn peers(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_peer(&self, peer: Peer) -> Result<Answer, Answer> {
        let mut peers = self.peers();
        let is_url = peer.url.starts_with("http://") || peer.url.starts_with("https://");
        if !is_url || !is_name(&peer.url) {
            let text =
                format!("url must begin with http:// and have at most {NAME_BYTES_MAX} bytes");
            return Err(Answer::error(400, text));
        }
        if peers.len() >= PEERS_MAX && !peers.contains(&peer.url) {
            return Err(Answer::error(
                409,
                format_args!("there are {PEERS_MAX} peers already"),
            ));
        }
        peers.insert(peer.url);
        Ok(Answer::done(201))
    }

    fn remove_peer(&self, peer: &Peer) -> Result<Answer, Answer> {
        match self.peers().remove(&peer.url) {
            true => Ok(Answer::done(200)),
            false => Err(Answer::error(404, "peer not found")),
        }
    }
}

impl IndexGroup {
    fn instances(&self) -> MutexGuard<'_, BTreeMap<u64, BTreeMap<u32, Listener>>> {
        self.instances
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The listeners of an instance, or of one rank, and whether none is left of it.
    fn take_out(&self, id: u64, rank: Option<u32>) -> Option<(Vec<Listener>, bool)> {
        let mut instances = self.instances();
        let ranks = instances.get_mut(&id)?;
        let ended: Vec<Listener> = match rank {
            Some(rank) => vec![ranks.remove(&rank)?],
            None => std::mem::take(ranks).into_values().collect(),
        };
        let is_last = ranks.is_empty();
        if is_last {
            instances.remove(&id);
        }
        Some((ended, is_last))
    }

    fn scores(&self, locals: &[LocalHash]) -> Answer {
        let mut found = Matches::new();
        self.host.index().find(locals, &mut found);
        let instances = HeldTokens::by_worker(&found, self.host.block_size());
        let by_rank = instances.iter().map(|(worker, held)| (*worker, &held.dp));
        Answer::json(
            200,
            &Scores {
                scores: by_rank.collect(),
                frequencies: [],
                instances: &instances,
            },
        )
    }

    fn rows<'g>(&self, key: &'g GroupKey) -> Vec<InstanceRow<'g>> {
        let instances = self.instances();
        let rows = instances.iter().map(|(id, ranks)| {
            let listeners: BTreeMap<u32, ListenerRow> =
                ranks.iter().map(|(rank, l)| (*rank, l.row())).collect();
            let is_active = listeners.values().all(|row| row.status == "active");
            InstanceRow {
                instance_id: *id,
                source: "zmq",
                status: if is_active { "active" } else { "pending" },
                model_name: &key.model_name,
                routing_group: &key.routing_group,
                block_size: self.host.block_size(),
                endpoints: ranks
                    .iter()
                    .map(|(rank, l)| (*rank, l.address.events.clone()))
                    .collect(),
                listeners,
            }
        });
        rows.collect()
    }
}

impl Listener {
    fn row(&self) -> ListenerRow {
        let state = self.stream.snapshot();
        ListenerRow {
            endpoint: self.address.events.clone(),
            status: if state.status.connected {
                "active"
            } else {
                "pending"
            },
            last_error: state.fault.map(|fault| fault.to_string()),
        }
    }
}
