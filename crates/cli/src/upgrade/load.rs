//! What is booked, told by the process that knows it and counted by the one that takes over.
//!
//! What always holds: what is counted for another process is freed when that one says so, or is gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvasir_host::{RouterHost, Routers};
use kvasir_router::{Input, PeerChange, PeerEvent, ReplicaId, SessionEvent};
use kvasir_types::{RequestId, SequenceHash, WorkerRank};

use super::message::{BegunRequest, BoundSession, LoadNews, RouterNews};

/// Names of blocks that one message carries; more go with the next.
const NAMES_MAX: usize = 1 << 20;
/// Sessions that are handed over.
const SESSIONS_MAX: usize = 1 << 17;

/// What another process was told of our load.
#[derive(Debug, Default)]
pub(super) struct ToldLoad {
    /// By router: requests that it counts.
    routers: BTreeMap<Arc<str>, HashMap<RequestId, Told>>,
    /// Sessions are told once.
    told_sessions: bool,
}

/// What it knows of one request.
#[derive(Clone, Copy, Debug)]
struct Told {
    target: WorkerRank,
    is_computed: bool,
}

impl ToldLoad {
    /// What has changed since the last time; empty if nothing has.
    pub(super) fn news(&mut self, routers: &dyn Routers) -> LoadNews {
        let mut room = NAMES_MAX;
        let sessions = !std::mem::replace(&mut self.told_sessions, true);
        let news = routers.all().into_iter().map(|host| {
            let told = self.routers.entry(Arc::clone(host.name())).or_default();
            let mut news = changes(&host, told, &mut room);
            if sessions {
                news.sessions = bound_sessions(&host);
            }
            news
        });
        let changed = |news: &RouterNews| {
            let RouterNews {
                begun,
                prefilled,
                ended,
                sessions,
                ..
            } = news;
            !(begun.is_empty() && prefilled.is_empty() && ended.is_empty() && sessions.is_empty())
        };
        LoadNews {
            routers: news.filter(changed).collect(),
        }
    }
}

fn changes(host: &RouterHost, told: &mut HashMap<RequestId, Told>, room: &mut usize) -> RouterNews {
    let running = host.ask(|router| {
        let rows = router.running(|id| !told.contains_key(&id));
        rows.collect::<Vec<_>>()
    });
    let mut news = RouterNews {
        name: host.name().to_string(),
        ..RouterNews::default()
    };
    let mut still = HashMap::with_capacity(running.len());
    for (target, row) in running {
        let is_computed = row.prefill_tokens == 0;
        match told.remove(&row.id) {
            // It goes on elsewhere: it begins there the next time.
            Some(known) if known.target != target => {
                news.ended.push(row.id.to_string());
                continue;
            }
            Some(known) => {
                if is_computed && !known.is_computed {
                    news.prefilled.push(row.id.to_string());
                }
            }
            None if *room < row.sequence.len() => continue,
            None => {
                *room -= row.sequence.len();
                news.begun.push(BegunRequest {
                    id: row.id.to_string(),
                    worker: target.worker.0,
                    rank: target.rank.0,
                    sequence: row.sequence.iter().map(|name| name.0).collect(),
                    prefill_tokens: row.prefill_tokens,
                    osl: row.osl,
                });
            }
        }
        let known = Told {
            target,
            is_computed,
        };
        still.insert(row.id, known);
    }
    news.ended.extend(told.keys().map(ToString::to_string));
    *told = still;
    news
}

fn bound_sessions(host: &RouterHost) -> Vec<BoundSession> {
    let rows = host.ask(|router| router.session_rows(SESSIONS_MAX));
    let bound = rows.into_iter().map(|row| BoundSession {
        id: row.id.to_string(),
        worker: row.target.worker.0,
        rank: row.target.rank.0,
        in_engine: row.in_engine,
        by_header: row.by_header,
        idle_secs: row.idle.as_secs_f64(),
    });
    bound.collect()
}

/// The process before this one, if it is no replica; replicas have random numbers.
const PREDECESSOR: ReplicaId = ReplicaId(0);

/// What is counted here for another process.
#[derive(Debug)]
pub(super) struct OthersLoad {
    /// Whose it is: a replica tells of it itself, which is counted once.
    from: ReplicaId,
    /// The router of each request, and where it runs.
    counted: HashMap<RequestId, (Arc<RouterHost>, WorkerRank)>,
}

impl OthersLoad {
    /// Nothing yet, of the process of this name among replicas.
    pub(super) fn new(replica: Option<u64>) -> Self {
        Self {
            from: replica.map_or(PREDECESSOR, ReplicaId),
            counted: HashMap::new(),
        }
    }

    /// How many requests are counted.
    pub(super) fn len(&self) -> usize {
        self.counted.len()
    }

    /// Counts what has begun there, and no longer what has ended.
    pub(super) fn apply(&mut self, routers: &dyn Routers, news: LoadNews) {
        for router in news.routers {
            for id in &router.ended {
                if let Some(id) = RequestId::parse(id) {
                    self.change(id, PeerChange::Free);
                    self.counted.remove(&id);
                }
            }
            let Some(host) = routers.named(&router.name) else {
                continue;
            };
            for session in router.sessions {
                host.tell(Input::Session(inherited(session)));
            }
            for begun in router.begun {
                self.begin(&host, begun);
            }
            for id in router
                .prefilled
                .iter()
                .filter_map(|id| RequestId::parse(id))
            {
                self.change(id, PeerChange::PrefillCompleted);
            }
        }
    }

    fn begin(&mut self, host: &Arc<RouterHost>, begun: BegunRequest) {
        let Some(id) = RequestId::parse(&begun.id) else {
            return;
        };
        let target = WorkerRank::new(begun.worker, begun.rank);
        self.counted.insert(id, (Arc::clone(host), target));
        self.change(
            id,
            PeerChange::Add {
                sequence: begun.sequence.into_iter().map(SequenceHash).collect(),
                prefill_tokens: begun.prefill_tokens,
                prefill_duration: None,
                osl: begun.osl,
            },
        );
    }

    fn change(&self, id: RequestId, change: PeerChange) {
        if let Some((host, target)) = self.counted.get(&id) {
            let target = *target;
            host.tell(Input::Peer {
                from: self.from,
                event: Box::new(PeerEvent { id, target, change }),
                recalled: false,
            });
        }
    }

    /// The other process is gone: nothing of it is counted any more.
    pub(super) fn end(self) {
        for id in self.counted.keys() {
            self.change(*id, PeerChange::Free);
        }
    }
}

fn inherited(session: BoundSession) -> SessionEvent {
    let timeout = Duration::try_from_secs_f64(session.idle_secs).unwrap_or_default();
    SessionEvent::Inherited {
        id: session.id.into(),
        target: WorkerRank::new(session.worker, session.rank),
        in_engine: session.in_engine,
        by_header: session.by_header,
        timeout,
    }
}
