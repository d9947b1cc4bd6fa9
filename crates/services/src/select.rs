//! Which worker is best for a prompt, and booking it: the router for programs that forward requests themselves.
//!
//! Workers are told by whoever runs them ([`workers`]); a worker about which enough is known is schedulable. A selection books nothing and
//! can be turned into a reservation once; a reservation is a booking in the router's ledger until it is freed, or nobody speaks of it for
//! `router-active-request-expiry-secs`.

mod choose;
mod reserve;
mod selections;
mod workers;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use kvasir_host::{HostContext, LoadedSnapshot, Model, RouterHost, RouterSetup};
use kvasir_router::PeerChange;
use kvasir_tasks::RuntimeThreads;
use kvasir_types::WorkerRank;
use serde::Serialize;

use crate::api::{Answer, Api, Ask, Verb, percent_decoded, read, read_tokens};
use crate::group::{Group, GroupKey, Groups};
use crate::slots::PotentialRow;
use crate::sync::{ReplicaSync, SyncedService, Told};
use crate::takeover::{self, Takeover};
use reserve::Reservation;
use selections::Selections;
use workers::WorkerEntry;

/// What selections may hold.
#[derive(Clone, Copy, Debug)]
pub struct SelectOptions {
    /// How long a selection may be turned into a reservation.
    pub ttl: Duration,
    /// Selections that are kept.
    pub entries_max: usize,
    /// Bytes of the hashes that they hold.
    pub bytes_max: usize,
}

impl Default for SelectOptions {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(120),
            entries_max: 4096,
            bytes_max: 256 << 20,
        }
    }
}

/// The service.
pub struct Selector {
    context: HostContext,
    threads: Option<RuntimeThreads>,
    groups: Arc<Groups<SelectGroup>>,
    takeover: Takeover,
    sync: SyncedService,
    workers: tokio::sync::Mutex<BTreeMap<u64, WorkerEntry>>,
    selections: Mutex<Selections>,
    reservations: Mutex<HashMap<String, Reservation>>,
    last_id: AtomicU64,
}

/// One router, and where the requests for its workers go.
struct SelectGroup {
    key: GroupKey,
    model: Model,
    endpoints: RwLock<BTreeMap<u64, String>>,
    /// Whether a block's name covers a token of the next.
    is_eagle: AtomicBool,
}

impl Group for SelectGroup {
    fn host(&self) -> &Arc<RouterHost> {
        &self.model.host
    }
}

#[derive(Serialize)]
struct GroupLoads<'k> {
    model_name: &'k str,
    routing_group: &'k str,
    loads: Vec<PotentialRow>,
    pending_count: u64,
    pending_isl_tokens: u64,
}

impl Api for Selector {
    async fn answer(&self, ask: Ask) -> Answer {
        let path = ask.path.trim_start_matches('/');
        let parts: Vec<&str> = path.split('/').collect();
        let body = &ask.body;
        let answered = match (ask.verb, parts.as_slice()) {
            (Verb::Post, ["select"]) => match read_tokens(body) {
                Ok(asked) => self.select(&asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Post, ["select_and_reserve"]) => match read_tokens(body) {
                Ok(asked) => self.select_and_reserve(&asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Post, ["reservations"]) => read(body).and_then(|asked| self.reserve(&asked)),
            (Verb::Post, ["reservations", id, "prefill_complete"]) => {
                self.prefill_complete(&percent_decoded(id))
            }
            (Verb::Post, ["reservations", id, "output_block"]) => {
                let asked = match body.is_empty() {
                    true => Ok(reserve::OutputBlock::default()),
                    false => read(body),
                };
                asked.and_then(|asked| self.output_block(&percent_decoded(id), &asked))
            }
            (Verb::Delete, ["reservations", id]) => self.free(&percent_decoded(id)),
            (Verb::Get, ["workers"]) => Ok(self.list_workers().await),
            (Verb::Post, ["workers"]) => match read(body) {
                Ok(asked) => self.upsert(asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Patch, ["workers", id]) => match read(body) {
                Ok(asked) => self.patch(id, asked).await,
                Err(bad) => Err(bad),
            },
            (Verb::Delete, ["workers", id]) => self.delete(id).await,
            (Verb::Get, ["loads"]) => Ok(self.loads()),
            (Verb::Post, ["potential_loads"]) => {
                read_tokens(body).and_then(|asked| self.potential(&asked))
            }
            (Verb::Post, ["overlap_scores"]) => {
                read_tokens(body).and_then(|asked| self.overlap(&asked))
            }
            (Verb::Get, ["dump"]) => Ok(takeover::dump(&self.groups)),
            (Verb::Get, ["snapshot"]) => Ok(self.takeover.snapshot().await),
            (Verb::Get, ["ready"]) => Ok(self.ready().await),
            (Verb::Get, ["health"]) => Ok(Answer::done(200)),
            (Verb::Get, ["replica_sync", "peers"]) => Ok(self.sync.list()),
            (Verb::Post, ["replica_sync", "register_peer"]) => {
                read(&ask.body).and_then(|peer| self.sync.register(&peer, &self.groups))
            }
            (Verb::Post, ["replica_sync", "deregister_peer"]) => {
                read(&ask.body).and_then(|peer| self.sync.deregister(&peer))
            }
            (_, [first, ..]) => {
                const ROUTES: [&str; 12] = [
                    "select",
                    "select_and_reserve",
                    "reservations",
                    "workers",
                    "loads",
                    "potential_loads",
                    "overlap_scores",
                    "dump",
                    "snapshot",
                    "ready",
                    "health",
                    "replica_sync",
                ];
                Err(Answer::no_route(ROUTES.contains(first)))
            }
            (_, []) => Err(Answer::no_route(false)),
        };
        answered.unwrap_or_else(|refusal| refusal)
    }
}

impl Selector {
    /// One without workers. `setup` says how they are chosen; events are applied on `threads`.
    #[must_use]
    pub fn new(
        setup: RouterSetup,
        options: SelectOptions,
        context: HostContext,
        threads: Option<RuntimeThreads>,
    ) -> Self {
        let groups = Arc::new(Groups::new(setup, context.clone()));
        Self {
            takeover: Takeover::new(&groups, &context, LoadedSnapshot::default()),
            groups,
            sync: SyncedService::default(),
            context,
            threads,
            workers: tokio::sync::Mutex::default(),
            selections: Mutex::new(Selections::new(options)),
            reservations: Mutex::default(),
            last_id: AtomicU64::new(0),
        }
    }

    /// The same, in step with other services of its kind.
    #[must_use]
    pub fn with_sync(mut self, sync: Option<ReplicaSync>) -> Self {
        self.sync = SyncedService::new(sync);
        self
    }

    /// The same, beginning with the index of another service. Before it is told of workers.
    #[must_use]
    pub fn with_snapshot(mut self, loaded: LoadedSnapshot) -> Self {
        self.takeover = Takeover::new(&self.groups, &self.context, loaded);
        self
    }

    /// Listens to another service at `tcp://host:port`; an error says why not.
    pub fn listen_to(&self, endpoint: &str) -> Result<(), String> {
        self.sync.listen(endpoint, &self.groups)
    }

    /// Peers are told of a request.
    fn tell_peers(&self, group: &SelectGroup, request: (&str, WorkerRank), change: &PeerChange) {
        let told = Told {
            key: &group.key,
            block_size: group.model.block_size,
            request: request.0,
            target: request.1,
        };
        self.sync.tell(&told, change);
    }

    fn loads(&self) -> Answer {
        let groups = self.groups();
        let rows = groups.values().map(|group| {
            let host = &group.model.host;
            let (count, stats) = host.ask(|router| router.queued());
            GroupLoads {
                model_name: &group.key.model_name,
                routing_group: &group.key.routing_group,
                loads: PotentialRow::all(host, 0, &kvasir_router::Overlap::none(), &[]),
                pending_count: count as u64,
                pending_isl_tokens: stats.raw_isl_tokens,
            }
        });
        Answer::json(200, &rows.collect::<Vec<_>>())
    }
}
