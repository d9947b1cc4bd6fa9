//! Load that services tell each other: what is booked at one counts at all.
//!
//! Answers one question: who is told of a request, and what of others' requests counts here? Each service has a PUB socket and listens
//! to those of its peers; messages are those of Dynamo 1.6.1's slot tracker and selection service, which use the same.
//!
//! What always holds: nobody waits here: a peer that is slow misses messages, which is counted; what this process said itself is
//! passed over; a peer that is gone takes its bookings along; there are at most [`PEERS_MAX`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kvasir_host::{HostContext, peer_event};
use kvasir_router::{Input, PeerChange, ReplicaId};
use kvasir_transport::zmq::{
    Endpoint, ZmqFraming, ZmqLimits, ZmqPublisher, ZmqSource, ZmqSourceOptions,
};
use kvasir_transport::{SourceEvent, next_event};
use kvasir_types::WorkerRank;
use kvasir_wire::native::{PrefillHint, SLOT_TOPIC, SequenceChange, SequenceEvent, SlotNews};
use serde::Deserialize;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::api::Answer;
use crate::group::{Group, GroupKey, Groups};

/// Peers that are listened to.
const PEERS_MAX: usize = 256;
/// Messages that wait for a slow peer.
const QUEUE_MESSAGES_MAX: usize = 100_000;
/// What is said of the wish to be told what others track, where there is no socket.
const NO_SYNC: &str = "this service was started without --replica-sync-port";

/// `{"endpoint": "tcp://host:port"}`.
#[derive(Deserialize)]
pub(crate) struct SyncPeer {
    endpoint: String,
}

/// What happens to a request, for peers.
pub(crate) struct Told<'t> {
    pub(crate) key: &'t GroupKey,
    pub(crate) block_size: u32,
    pub(crate) request: &'t str,
    pub(crate) target: WorkerRank,
}

/// What is heard is told to the routers of a service.
trait Audience: Send + Sync {
    fn hear(&self, news: &SlotNews);
    fn gone(&self, replica: ReplicaId);
}

impl<G: Group + Send + Sync> Audience for Groups<G> {
    fn hear(&self, news: &SlotNews) {
        let key = GroupKey {
            model_name: news.model.clone(),
            routing_group: news.group.clone(),
        };
        let group = self.get(&key);
        let alike = group.filter(|group| group.host().block_size() == news.block_size);
        if let Some(group) = alike {
            group.host().tell(Input::Peer {
                from: ReplicaId(news.event.router),
                event: Box::new(peer_event(&news.event)),
                recalled: false,
            });
        }
    }

    fn gone(&self, replica: ReplicaId) {
        for group in self.all().values() {
            group.host().tell(Input::PeerGone(replica));
        }
    }
}

/// The socket of a service for its peers, and those that it listens to. Clones are one.
#[derive(Clone)]
pub struct ReplicaSync {
    shared: Arc<Shared>,
}

struct Shared {
    id: u64,
    publisher: ZmqPublisher,
    context: HostContext,
    /// Nobody listens to a peer once its guard is gone.
    peers: Mutex<BTreeMap<String, DropGuard>>,
}

impl ReplicaSync {
    /// Binds the socket; `id` tells this process from others and is random.
    pub async fn bind(host: &str, port: u16, id: u64, context: &HostContext) -> io::Result<Self> {
        let limits = ZmqLimits {
            queue_messages_max: QUEUE_MESSAGES_MAX,
            ..ZmqLimits::default()
        };
        let tasks = context.tasks.background();
        let publisher = ZmqPublisher::bind(&tasks, &Endpoint::new(host, port), limits).await?;
        Ok(Self {
            shared: Arc::new(Shared {
                id,
                publisher,
                context: context.clone(),
                peers: Mutex::default(),
            }),
        })
    }

    /// Where peers listen to this service.
    #[must_use]
    pub fn address(&self) -> std::net::SocketAddr {
        self.shared.publisher.address()
    }

    fn peers(&self) -> MutexGuard<'_, BTreeMap<String, DropGuard>> {
        let peers = &self.shared.peers;
        peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells peers what happened to a request.
    fn tell(&self, told: &Told<'_>, change: SequenceChange) {
        let news = SlotNews {
            model: told.key.model_name.clone(),
            group: told.key.routing_group.clone(),
            block_size: told.block_size,
            event: SequenceEvent {
                request: told.request.to_owned(),
                rank: told.target,
                router: self.shared.id,
                lora: None,
                change,
            },
        };
        let mut body = Vec::new();
        news.encode(&mut body);
        let parts = [Bytes::from_static(SLOT_TOPIC.as_bytes()), body.into()];
        let missed = self.shared.publisher.publish(&parts);
        let events = &self.shared.context.metrics.replica_events_total;
        events.with_label_values(&["sent"]).inc();
        let dropped = events.with_label_values(&["dropped"]);
        dropped.inc_by(missed as u64);
    }

    /// Listens to a peer from now on; an error says why its address cannot be used.
    fn listen(&self, endpoint: &str, audience: Arc<dyn Audience>) -> Result<(), String> {
        let Some((scheme, _)) = endpoint.split_once("://") else {
            return Err(format!("invalid ZMQ endpoint `{endpoint}`: missing scheme"));
        };
        if scheme != "tcp" {
            return Err(format!(
                "invalid ZMQ endpoint `{endpoint}`: tcp://host:port is expected"
            ));
        }
        let address: Endpoint = endpoint
            .parse()
            .map_err(|error| format!("invalid ZMQ endpoint `{endpoint}`: {error}"))?;
        let mut peers = self.peers();
        if peers.contains_key(endpoint) {
            return Ok(());
        }
        if peers.len() >= PEERS_MAX {
            return Err(format!("there are {PEERS_MAX} peers already"));
        }
        let stop = CancellationToken::new();
        let tasks = self.shared.context.tasks.background();
        let source = ZmqSource::start(
            &tasks,
            ZmqSourceOptions {
                topic: SLOT_TOPIC.to_owned(),
                framing: ZmqFraming::TopicAndPayload,
                ..ZmqSourceOptions::new(address, None)
            },
        );
        let heard = hear(source, self.shared.id, audience);
        tasks.spawn(stop.clone().run_until_cancelled_owned(heard));
        peers.insert(endpoint.to_owned(), stop.drop_guard());
        Ok(())
    }
}

/// Tells the routers what a peer says, for ever.
async fn hear(mut source: ZmqSource, own: u64, audience: Arc<dyn Audience>) {
    let mut heard = BTreeSet::new();
    loop {
        match next_event(&mut source).await {
            SourceEvent::Live(frame) => {
                let Ok(news) = SlotNews::decode(&frame.payload) else {
                    continue;
                };
                if news.event.router != own {
                    heard.insert(news.event.router);
                    audience.hear(&news);
                }
            }
            // What it has under way ends unheard.
            SourceEvent::Disconnected(_) => {
                for replica in std::mem::take(&mut heard) {
                    audience.gone(ReplicaId(replica));
                }
            }
            _ => {}
        }
    }
}

/// What a service says to its peers, if it has any: the same calls with a socket and without.
#[derive(Clone, Default)]
pub(crate) struct SyncedService {
    sync: Option<ReplicaSync>,
}

impl SyncedService {
    pub(crate) const fn new(sync: Option<ReplicaSync>) -> Self {
        Self { sync }
    }

    /// Peers are told of a request.
    pub(crate) fn tell(&self, told: &Told<'_>, change: &PeerChange) {
        if let Some(sync) = &self.sync {
            sync.tell(told, sequence_change(change));
        }
    }

    /// Listens to a peer that is named at the start.
    pub(crate) fn listen<G: Group + Send + Sync + 'static>(
        &self,
        endpoint: &str,
        groups: &Arc<Groups<G>>,
    ) -> Result<(), String> {
        match &self.sync {
            Some(sync) => sync.listen(endpoint, Arc::clone(groups) as _),
            None => Err(NO_SYNC.to_owned()),
        }
    }

    /// `POST /replica_sync/register_peer`.
    pub(crate) fn register<G: Group + Send + Sync + 'static>(
        &self,
        peer: &SyncPeer,
        groups: &Arc<Groups<G>>,
    ) -> Result<Answer, Answer> {
        if self.sync.is_none() {
            return Err(Answer::error(501, NO_SYNC));
        }
        let listening = self.listen(&peer.endpoint, groups);
        listening.map_err(|error| Answer::error(400, error))?;
        Ok(Answer::done(201))
    }

    /// `POST /replica_sync/deregister_peer`.
    pub(crate) fn deregister(&self, peer: &SyncPeer) -> Result<Answer, Answer> {
        let Some(sync) = &self.sync else {
            return Err(Answer::error(501, NO_SYNC));
        };
        match sync.peers().remove(&peer.endpoint) {
            Some(_) => Ok(Answer::done(200)),
            None => Err(Answer::error(404, "peer not found")),
        }
    }

    /// `GET /replica_sync/peers`.
    pub(crate) fn list(&self) -> Answer {
        let peers: Vec<String> = match &self.sync {
            Some(sync) => sync.peers().keys().cloned().collect(),
            None => Vec::new(),
        };
        Answer::json(200, &peers)
    }
}

fn sequence_change(change: &PeerChange) -> SequenceChange {
    match change {
        PeerChange::Add {
            sequence,
            prefill_tokens,
            prefill_duration,
            osl,
        } => SequenceChange::Added {
            blocks: Some(sequence.to_vec()),
            track_prefill: true,
            expected_output_tokens: osl.map(u64::from),
            prefill: Some(PrefillHint {
                tokens: u64::from(*prefill_tokens),
                duration: *prefill_duration,
            }),
        },
        PeerChange::PrefillCompleted => SequenceChange::PrefillCompleted,
        PeerChange::Free => SequenceChange::Freed,
    }
}
