//! One router in the real world.
//!
//! Answers one question: what does every program around the brain need, whoever its clients are? [`RouterHost`] runs a
//! router under its lock with its index, timer and counters; [`CacheView`] is what is known of a rank's cache and how far
//! that is trusted; [`EventStream`] applies the events of a rank; [`Model`] names blocks and books requests; [`EndpointFleet`] is the workers of one endpoint with their router; [`SnapshotWriter`] and [`LoadedSnapshot`] carry the index
//! over a restart; [`SharedCache`] asks what workers could fetch from a common pool. All are handed a [`HostContext`]: the clock, the metrics, and where tasks run.
//!
//! Invariants: nothing booked outlives its [`Booking`]; a lookup waits for no event and for no judgement; nothing here
//! knows HTTP, clients or OpenAI.
//!
//! Elsewhere: decisions (`kvasir-router`), how far a rank is trusted (`kvasir-trust`), clients and engines behind HTTP
//! (`kvasir-frontend`).

mod booking;
mod context;
mod counted;
mod dump;
mod endpoint;
#[cfg(feature = "nats")]
mod event_log;
mod events;
mod log_limit;
mod lookaside;
mod meters;
mod model;
mod models;
mod place;
mod plane;
mod policy_file;
mod prefill_times;
mod remote_index;
mod replica;
mod router_host;
mod session_link;
mod setup;
mod shared_cache;
mod snapshot;
#[cfg(test)]
mod testing;
mod view;

pub use booking::Booking;
pub use context::HostContext;
pub use counted::CountedIndex;
pub use dump::dump_index;
pub use endpoint::{
    EndpointAnswer, EndpointError, EndpointFleet, EndpointFleetOptions, EndpointJob,
};
#[cfg(feature = "nats")]
pub use event_log::{EventLogOptions, LogStep, StepFuture, StepHook};
pub use events::{
    EventStream, EventStreamHandle, LocalEvents, Now, PauseGuard, StreamObserver, StreamState,
    Subscriptions,
};
pub use kvasir_index::SharedRanges;
pub use meters::{ENDPOINT, PlacementMeters, RouterMeters, Stage, StageGuard, hit_rate};
pub use model::{Model, ModelSpec};
pub use models::{ModelEntry, Models, Routers};
pub use place::PromptBlocks;
pub use plane::{
    EndpointRecovery, EventPlane, EventPlaneOptions, PlaneChange, PlaneChannel, PlaneSource,
    PlaneWorker, RecoveryClient, RecoveryFuture, endpoint_of, plane_change,
};
pub use policy_file::{PolicyFile, PolicyFileError};
pub use prefill_times::PrefillTimes;
pub use remote_index::{
    ANSWER_TIMEOUT, IndexEndpoints, QUERY_ENDPOINT, RECORD_ENDPOINT, RemoteIndex,
};
pub use replica::{
    PeerLinks, PeerOptions, PeerRow, PeerSecret, PeerStore, ReplicaAnnouncer, ReplicaCarrier,
    ReplicaChannels, ReplicaFleet, Replicas, SnapshotFuture, WorkerNote, peer_event,
};
pub use router_host::{HostOptions, Needs, RouterHost};
pub use session_link::{
    ENDINGS_MAX, SessionFuture, SessionLink, SessionNews, SessionReply, TELL_TIMEOUT,
};
pub use setup::RouterSetup;
pub use shared_cache::{
    ASKING_MAX, CachePool, HicacheLayout, HicachePool, POOL_TOKENS_MAX, PoolFuture, PoolPrompt,
    SharedCache,
};
pub use snapshot::{
    LoadedSnapshot, SnapshotFileError, SnapshotSummary, SnapshotWriter, probe_snapshot,
    rewrite_snapshot,
};
pub use view::{CacheView, CacheViews, EventSockets, UsageReport};
