//! Subscribing to engines' cache events.
//!
//! Answers one question: which event sockets of this worker are read, for which router? One stream per
//! router and rank, however many models the worker serves there, from when it joins until it leaves or its sockets move.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_host::{EventStream, Subscriptions};
use kvasir_kv_events::StreamOptions;
use kvasir_transport::zmq::{EndpointError, ZmqSource, ZmqSourceOptions};
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use kvasir_upstream::EventSource;

use super::Fleet;
use crate::models::ServedModel;

/// The event streams of one worker, by the router's name and the rank.
#[derive(Default)]
pub(super) struct EngineSubscriptions(Subscriptions<(Arc<str>, u32), EventSource>);

impl EngineSubscriptions {
    /// Subscribes to `sources` for the router of `model`, and no longer to what they were before. Call
    /// [`Self::settle`] first.
    pub(super) fn subscribe(
        &mut self,
        fleet: &Fleet,
        model: &ServedModel,
        worker: WorkerId,
        sources: &BTreeMap<u32, EventSource>,
    ) {
        let router = model.host.name();
        self.0
            .close(|(name, rank), source| name == router && sources.get(rank) != Some(source));
        if self.0.is_closing() {
            // The next probe opens them again, when the old ones are gone.
            return;
        }
        for (&rank, source) in sources {
            let key = (Arc::clone(router), rank);
            if self.0.origin(&key).is_some() {
                continue;
            }
            let rank = WorkerRank {
                worker,
                rank: DpRank(rank),
            };
            let threads = fleet.event_threads.as_deref();
            let open = || open(fleet, model, rank, source);
            self.0.open(key, source.clone(), threads, open);
        }
    }

    /// Ends the streams of one router.
    pub(super) fn unsubscribe(&mut self, router: &str) {
        self.0.close(|(name, _), _| **name == *router);
    }

    /// Waits until what was ended is forgotten, so that nothing new is forgotten with it.
    pub(super) async fn settle(&mut self) {
        self.0.settle().await;
    }
}

/// Opens the stream of one rank; `None` if its sockets cannot be used or its worker has left.
fn open(
    fleet: &Fleet,
    model: &ServedModel,
    rank: WorkerRank,
    source: &EventSource,
) -> Option<EventStream> {
    let sockets = match sockets(source) {
        Ok(sockets) => sockets,
        Err(error) => {
            tracing::warn!(%rank, events = %source.events, %error, "event socket cannot be used");
            return None;
        }
    };
    let host = &model.host;
    // A worker that has left leaves its checkpoint where it is.
    host.views().get(rank)?;
    let mut options = StreamOptions::new(model.block_size);
    options.replay = sockets.replay.is_some();
    let checkpoint = fleet.snapshot().resume(host.name(), rank);
    let (address, checkpoint) = (&source.events, checkpoint.as_ref());
    host.subscribe(rank, address, options, checkpoint, |tasks| {
        tracing::info!(%rank, model = %host.name(), events = %source.events, replay = source.replay,
            "subscribed to cache events");
        ZmqSource::start(tasks, sockets)
    })
}

fn sockets(source: &EventSource) -> Result<ZmqSourceOptions, EndpointError> {
    let events = source.events.parse()?;
    let replay = source.replay.as_deref().map(str::parse).transpose()?;
    let mut sockets = ZmqSourceOptions::new(events, replay);
    sockets.topic.clone_from(&source.topic);
    Ok(sockets)
}
