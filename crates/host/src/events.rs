//! Event streams, running: from a source of events to the index.
//!
//! Answers one question: who applies a rank's events, in which order, and until when? One [`EventStream`] per source,
//! each a task on one thread: streams of different ranks run in parallel, and a rank's events stay in order. Engines
//! behind sockets and workers in this process take the same way.
//!
//! What always holds: nobody waits for a full queue within the process, the events are dropped and their numbers show
//! it; a rank is forgotten by the stream that filled it, after the last event that it applied; a rank is subscribed
//! again only when its earlier stream has ended.
//!
//! Elsewhere: what orders events (`kvasir-kv-events`), where they come from (`kvasir-transport`), how far what they
//! say is trusted (`view`).

mod handle;
mod local;
mod stream;
mod subscriptions;

pub use handle::{EventStreamHandle, PauseGuard};
pub use local::LocalEvents;
pub use stream::{EventStream, Now, StreamObserver, StreamState};
pub use subscriptions::Subscriptions;

pub(crate) use local::LocalStreams;

use std::sync::Arc;

use kvasir_kv_events::{Encoding, EventFormat, Sequencer, StreamCheckpoint, StreamOptions};
use kvasir_tasks::{RuntimeThreads, Tasks};
use kvasir_transport::EventSource;
use kvasir_types::WorkerRank;

use crate::counted::CountedIndex;
use crate::router_host::RouterHost;

impl RouterHost {
    /// Applies an engine's events of a rank from now on. `open` opens the source, which comes from `address`; with a
    /// `checkpoint` the stream goes on where an earlier process stood. `None` if the rank's worker has left.
    pub fn subscribe<S: EventSource + 'static>(
        &self,
        rank: WorkerRank,
        address: &str,
        options: StreamOptions,
        checkpoint: Option<&StreamCheckpoint>,
        open: impl FnOnce(&Tasks) -> S,
    ) -> Option<EventStream> {
        let view = self.views().get(rank)?;
        let sequencer = match checkpoint {
            Some(checkpoint) => Sequencer::restore(rank, options, checkpoint),
            None => Sequencer::new(EventFormat::EngineBatches { rank }, options),
        };
        let observer = Arc::clone(&view);
        let start = || self.run_stream(sequencer, observer, open);
        Some(view.subscribe(address, start))
    }

    /// Applies the router events of a rank from now on, as [`Self::subscribe`] does an engine's. `None` if the rank is not
    /// judged.
    pub(crate) fn subscribe_router_events<S: EventSource + 'static>(
        &self,
        rank: WorkerRank,
        address: &str,
        options: StreamOptions,
        open: impl FnOnce(&Tasks) -> S,
    ) -> Option<EventStream> {
        let view = self.views().get(rank)?;
        let format = EventFormat::RouterEvents(Encoding::MessagePack);
        let mut sequencer = Sequencer::new(format, options);
        sequencer.add_rank(rank);
        let observer = Arc::clone(&view);
        let start = || self.run_stream(sequencer, observer, open);
        Some(view.subscribe(address, start))
    }

    /// Applies the events of a rank in this process from now on, on one of `threads`: where its worker puts them. The
    /// rank is not judged: its events cannot be lost unnoticed.
    pub async fn subscribe_local(
        &self,
        rank: WorkerRank,
        threads: Option<&RuntimeThreads>,
    ) -> LocalEvents {
        let local = self.local_streams();
        local.settle().await;
        let (events, source) = LocalEvents::new(rank, self.name(), &self.context().metrics);
        let (sequencer, observer) = local::sequencer(rank, self.block_size());
        local.open(rank, threads, || {
            self.run_stream(sequencer, observer, |_| source)
        });
        events
    }

    fn run_stream<S: EventSource + 'static>(
        &self,
        sequencer: Sequencer,
        observer: Arc<dyn StreamObserver>,
        open: impl FnOnce(&Tasks) -> S,
    ) -> EventStream {
        let context = self.context();
        let (clock, tasks) = (context.clock, context.tasks.background());
        let cache = Arc::new(CountedIndex::new(self.index(), &context.metrics));
        let now = Arc::new(move || clock.now());
        EventStream::spawn(&tasks, open(&tasks), sequencer, cache, now, observer)
    }
}
