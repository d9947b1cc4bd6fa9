//! Cache events that JetStream keeps: read by every router, shortened by one of them, and never lost on the way.
//!
//! Answers one question: how does a router know what the caches of a component hold, if all that it has is the component's stream and a
//! snapshot beside it? It reads the snapshot and what the stream holds since (`catch_up`), then what is written from then on (`reader`), through a consumer of its
//! own whose name says who it is. Now and then one of the routers writes a snapshot of what it knows, and takes from the stream what that tells and everybody
//! has read (`upkeep`). Each rank is a stream of events like any other (`source`), with the log to ask instead of the worker.
//!
//! What always holds, whatever dies between two [`LogStep`]s: every event that the stream was given is in the stored snapshot or in the stream;
//! a snapshot is replaced in one step, by one that tells more; what a router holds of a rank is what its events make of an empty cache, or less and
//! said so.
//!
//! Elsewhere: requests to JetStream (`kvasir-transport`), order and gaps within a rank (`kvasir-kv-events`), locks (`kvasir-discovery`). Decisions 0210 to 0213.

mod catch_up;
mod reader;
mod shared;
mod snapshot;
mod source;
mod steps;
mod upkeep;

pub use steps::{LogStep, StepFuture, StepHook};

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvasir_discovery::Coordination;
use kvasir_index::Index;
use kvasir_transport::jetstream::{JetStream, ObjectStore};
use kvasir_types::WorkerRank;
use kvasir_wire::native::LogNames;

use crate::context::HostContext;
use crate::events::EventStreamHandle;
use reader::Reader;
use shared::LogShared;
use source::LogSource;
use steps::Steps;
use upkeep::Upkeep;

/// How cache events are read that JetStream keeps.
#[derive(Clone)]
pub struct EventLogOptions {
    /// This router's name among those that read: its consumer's. Another one for every process.
    pub router: String,
    /// Messages in a stream past which a snapshot is taken.
    pub snapshot_threshold: u64,
    /// How long a stream keeps messages.
    pub max_age: Duration,
    /// Begin with an empty stream and no snapshot.
    pub reset: bool,
    /// Where routers take locks and say that they are there; without it they find out from JetStream alone.
    pub coordination: Option<Arc<dyn Coordination>>,
    /// Is told of each step; for tests, which let a router die there.
    pub hook: Option<Arc<dyn StepHook>>,
}

impl fmt::Debug for EventLogOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLogOptions")
            .field("router", &self.router)
            .field("snapshot_threshold", &self.snapshot_threshold)
            .field("max_age", &self.max_age)
            .field("reset", &self.reset)
            .finish_non_exhaustive()
    }
}

/// Where the log of a component is, and how it is read.
#[derive(Clone)]
struct LogPlace {
    jetstream: JetStream,
    snapshots: ObjectStore,
    names: LogNames,
    options: EventLogOptions,
    steps: Steps,
}

/// The log of one component, being read. Clones are one; it ends with the last of them and of its sources.
#[derive(Clone)]
pub(crate) struct EventLog {
    shared: Arc<LogShared>,
}

impl EventLog {
    /// Reads the log as soon as somebody listens to a rank of it.
    pub(crate) fn start(
        jetstream: JetStream,
        names: LogNames,
        options: EventLogOptions,
        context: &HostContext,
    ) -> Self {
        let shared = Arc::new(LogShared::default());
        let place = LogPlace {
            snapshots: ObjectStore::new(&jetstream, &names.bucket),
            steps: Steps::new(options.hook.clone()),
            jetstream,
            names,
            options,
        };
        let tasks = context.tasks.background();
        let upkeep = Upkeep::new(place.clone(), &shared, context.clock);
        tasks.spawn(Reader::new(place, &shared).run());
        tasks.spawn(upkeep.run());
        Self { shared }
    }

    /// The events of a rank, from what is kept of them on.
    pub(crate) fn listen(&self, rank: WorkerRank) -> LogSource {
        LogSource::new(rank, &self.shared)
    }

    /// The stream of a rank runs, and writes to this index.
    pub(crate) fn opened(&self, rank: WorkerRank, index: Arc<Index>, stream: EventStreamHandle) {
        self.shared.opened(rank, index, stream);
    }
}
