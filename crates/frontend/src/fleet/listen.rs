//! Listening to engines' cache events.
//!
//! Answers one question: which event sockets of this worker are listened to, for which router? One stream per
//! router and rank, however many models the worker serves there, from when it joins until it leaves or its sockets move.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_host::CountedIndex;
use kvasir_intake::EventStream;
use kvasir_kv_events::{EventFormat, Sequencer, StreamOptions};
use kvasir_transport::zmq::{EndpointError, ZmqSource, ZmqSourceOptions};
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use kvasir_upstream::EventSource;
use tokio::task::JoinHandle;

use super::Fleet;
use crate::http::cores::{Cores, Seat};
use crate::models::ServedModel;

/// One stream, and where it listens.
struct Ear {
    source: EventSource,
    stream: EventStream,
    /// On which thread.
    _seat: Option<Seat>,
}

/// Who listens to one worker.
#[derive(Default)]
pub(super) struct Ears {
    /// By the router's name and the rank.
    open: BTreeMap<(Arc<str>, u32), Ear>,
    /// Streams that are ending.
    closing: Vec<JoinHandle<Option<()>>>,
}

impl Ears {
    /// Listens to `sources` for the router of `model`, and no longer to what they were before. Call
    /// [`Self::settle`] first.
    pub(super) fn attend(
        &mut self,
        fleet: &Fleet,
        model: &ServedModel,
        worker: WorkerId,
        sources: &BTreeMap<u32, EventSource>,
    ) {
        self.close(|name, rank, ear| {
            name == model.host.name() && sources.get(&rank) != Some(&ear.source)
        });
        if !self.closing.is_empty() {
            // The next probe opens them again, when the old ones are gone.
            return;
        }
        for (&rank, source) in sources {
            let key = (Arc::clone(model.host.name()), rank);
            if self.open.contains_key(&key) {
                continue;
            }
            let name = WorkerRank {
                worker,
                rank: DpRank(rank),
            };
            let seat = fleet.event_threads.as_deref().and_then(Cores::seat);
            let listened = {
                let _there = seat.as_ref().map(|seat| seat.handle.enter());
                listen(fleet, model, name, source)
            };
            match listened {
                Ok(Some(stream)) => {
                    let source = source.clone();
                    let ear = Ear {
                        source,
                        stream,
                        _seat: seat,
                    };
                    self.open.insert(key, ear);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(rank = %name, %error, "event socket cannot be used");
                }
            }
        }
    }

    /// Stops listening for one router.
    pub(super) fn turn_away(&mut self, router: &str) {
        self.close(|name, _, _| **name == *router);
    }

    fn close(&mut self, gone: impl Fn(&Arc<str>, u32, &Ear) -> bool) {
        let closed = self
            .open
            .extract_if(.., |(name, rank), ear| gone(name, *rank, ear));
        let closed = closed.map(|(_, ear)| ear.stream.stop());
        self.closing.extend(closed);
    }

    /// Waits until what was closed is forgotten, so that nothing new is forgotten with it.
    pub(super) async fn settle(&mut self) {
        for ended in self.closing.drain(..) {
            let _ = ended.await;
        }
    }
}

fn listen(
    fleet: &Fleet,
    model: &ServedModel,
    rank: WorkerRank,
    source: &EventSource,
) -> Result<Option<EventStream>, EndpointError> {
    let events = source.events.parse()?;
    let replay = source.replay.as_deref().map(str::parse).transpose()?;
    let mut options = StreamOptions::new(model.block_size);
    options.replay = replay.is_some();
    let mut sockets = ZmqSourceOptions::new(events, replay);
    sockets.topic.clone_from(&source.topic);
    let context = &fleet.context.host;
    let clock = context.clock;
    let Some(view) = model.host.views().get(rank) else {
        return Ok(None);
    };
    tracing::info!(%rank, model = %model.host.name(), events = %source.events, replay = source.replay,
        "listening to cache events");
    let cache = CountedIndex::new(model.host.index(), &context.metrics);
    let sequencer = match fleet.snapshot().resume(model.host.name(), rank) {
        Some(checkpoint) => Sequencer::restore(rank, options, &checkpoint),
        None => Sequencer::new(EventFormat::EngineBatches { rank }, options),
    };
    let tasks = context.tasks.background();
    let stream = view.subscribe(&source.events, || {
        EventStream::spawn(
            &tasks,
            ZmqSource::start(&tasks, sockets),
            sequencer,
            Arc::new(cache),
            Arc::new(move || clock.now()),
            Arc::clone(&view) as _,
        )
    });
    Ok(Some(stream))
}
