//! What a router shares with other routers, and how options say it.
//!
//! Answers one question: which part of what a router knows do others hear, and what does it hear of theirs? Bookings go to other replicas
//! ([`replica_carrier`]), the index is asked elsewhere or answers others, cache events are read from a stream that keeps them
//! ([`event_log`]). `kvasir frontend`, `kvasir router` and the bindings ask here, so that an option means the same everywhere.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{EventPlane, Settings, keys};
use kvasir_discovery::Coordination;
use kvasir_host::{EventLogOptions, ReplicaCarrier};
use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::NatsEvents;
use kvasir_transport::local_address;
use kvasir_transport::nats::NatsLink;

/// What one router shares with others; nothing, unless it is said.
#[derive(Clone, Debug, Default)]
pub struct Sharing {
    /// Replicas tell each other what they book.
    pub replicas: bool,
    /// They tell each other which worker a session stays with, too.
    pub sessions: bool,
    /// The index of another router is asked, and none is kept here.
    pub remote_index: bool,
    /// Other routers may ask this one's index.
    pub serves_index: bool,
    /// Cache events are read from the stream that keeps them, if they are.
    pub log: Option<LogReading>,
}

/// How a stream of cache events is read.
#[derive(Clone, Copy, Debug)]
pub struct LogReading {
    /// Messages past which a snapshot is taken.
    pub snapshot_threshold: u64,
    /// Begin with an empty stream and no snapshot.
    pub reset: bool,
}

impl Sharing {
    /// What the options of a process say of its routers.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        let sessions = settings.get(keys::ROUTER_SESSION_AFFINITY_TTL_SECS);
        let log = LogReading {
            snapshot_threshold: settings.get(keys::ROUTER_SNAPSHOT_THRESHOLD).into(),
            reset: settings.get(keys::ROUTER_RESET_STATES),
        };
        Self {
            replicas: settings.get(keys::ROUTER_REPLICA_SYNC),
            sessions: sessions.is_some(),
            remote_index: settings.get(keys::USE_REMOTE_INDEXER),
            serves_index: settings.get(keys::SERVE_INDEXER),
            log: settings.get(keys::ROUTER_DURABLE_KV_EVENTS).then_some(log),
        }
    }

    /// Whether anything is announced that has to be taken back.
    pub(crate) const fn announces(&self) -> bool {
        self.replicas || self.serves_index
    }
}

/// A random number; the standard library seeds its hashers from the system.
pub(crate) fn chance() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// How cache events are read that JetStream keeps for `max_age`.
#[must_use]
pub fn event_log(
    reading: LogReading,
    max_age: Duration,
    coordination: Option<Arc<dyn Coordination>>,
) -> EventLogOptions {
    if coordination.is_none() {
        tracing::info!(
            "this discovery backend has no locks: routers find out from JetStream who is first"
        );
    }
    EventLogOptions {
        router: format!("{:016x}{:016x}", chance(), chance()),
        snapshot_threshold: reading.snapshot_threshold,
        max_age,
        reset: reading.reset,
        coordination,
        hook: None,
    }
}

/// How other replicas are told what is booked here.
#[must_use]
pub fn replica_carrier(settings: &Settings, link: &NatsLink, tasks: &Tasks) -> ReplicaCarrier {
    match settings.get(keys::EVENT_PLANE) {
        EventPlane::Zmq => {
            let own = settings.get(keys::EVENT_PLANE_HOST);
            let host = own.or_else(|| settings.get(keys::TCP_RPC_HOST));
            let host = host.unwrap_or_else(|| local_address().to_string());
            ReplicaCarrier::Zmq { host }
        }
        EventPlane::Nats => ReplicaCarrier::Nats(NatsEvents::new(link, tasks)),
    }
}
