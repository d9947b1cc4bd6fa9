//! Listening to engines' cache events.
//!
//! Answers one question: which event sockets of this worker are listened to, for which model? One stream per
//! model and rank, from when the worker joins until it leaves or its sockets move.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_ingest::{Ingest, IngestOptions};
use kvasir_intake::Intake;
use kvasir_transport::zmq::{Endpoint, EndpointError, ZmqSource, ZmqSourceOptions};
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use tokio::task::JoinHandle;

use super::facts::{EventSource, Facts};
use super::{Fleet, WorkerAddress};
use crate::counted::CountedIndex;
use crate::models::ServedModel;

/// Where each rank publishes: as the user says, else as the engine says.
#[must_use]
pub fn sources(address: &WorkerAddress, facts: &Facts, ranks: u32) -> BTreeMap<u32, EventSource> {
    let Some(events) = &address.events else {
        let here = |source: &EventSource| EventSource {
            events: on_host(&source.events, &address.host),
            replay: source.replay.as_ref().map(|r| on_host(r, &address.host)),
            topic: source.topic.clone(),
        };
        let known = facts.events.iter();
        return known.map(|(rank, source)| (*rank, here(source))).collect();
    };
    // As vLLM does, each further rank is one port further.
    let shifted = |first: &String, rank: u32| {
        let endpoint: Endpoint = first.parse().ok()?;
        let port = u16::try_from(u32::from(endpoint.port()) + rank).ok()?;
        Some(endpoint.with_port(port).to_string())
    };
    let source = |rank| {
        let source = EventSource {
            events: shifted(events, rank)?,
            replay: address.replay.as_ref().and_then(|r| shifted(r, rank)),
            topic: String::new(),
        };
        Some((rank, source))
    };
    (0..ranks).filter_map(source).collect()
}

/// An engine that binds all interfaces is found at the host that its requests go to.
fn on_host(endpoint: &str, host: &str) -> String {
    match endpoint.parse::<Endpoint>() {
        Ok(parsed) if ["*", "0.0.0.0", "::"].contains(&parsed.host()) => {
            Endpoint::new(host, parsed.port()).to_string()
        }
        _ => endpoint.to_owned(),
    }
}

/// One stream, and where it listens.
struct Ear {
    source: EventSource,
    intake: Intake,
}

/// Who listens to one worker.
#[derive(Default)]
pub(super) struct Ears {
    open: BTreeMap<(Arc<str>, u32), Ear>,
    /// Streams that are ending.
    closing: Vec<JoinHandle<Option<()>>>,
}

impl Ears {
    /// Listens to `sources` for `model`, and no longer to what they were before. Call
    /// [`Self::settle`] first.
    pub(super) fn attend(
        &mut self,
        fleet: &Fleet,
        model: &ServedModel,
        worker: WorkerId,
        sources: &BTreeMap<u32, EventSource>,
    ) {
        self.close(|name, rank, ear| {
            **name == *model.name && sources.get(&rank) != Some(&ear.source)
        });
        if !self.closing.is_empty() {
            // The next probe opens them again, when the old ones are gone.
            return;
        }
        for (&rank, source) in sources {
            let key = (Arc::clone(&model.name), rank);
            if self.open.contains_key(&key) {
                continue;
            }
            let name = WorkerRank {
                worker,
                rank: DpRank(rank),
            };
            match listen(fleet, model, name, source) {
                Ok(Some(intake)) => {
                    let source = source.clone();
                    self.open.insert(key, Ear { source, intake });
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(rank = %name, %error, "event socket cannot be used");
                }
            }
        }
    }

    /// Stops listening for one model.
    pub(super) fn turn_away(&mut self, model: &str) {
        self.close(|name, _, _| **name == *model);
    }

    fn close(&mut self, gone: impl Fn(&Arc<str>, u32, &Ear) -> bool) {
        let closed = self
            .open
            .extract_if(.., |(name, rank), ear| gone(name, *rank, ear));
        let closed = closed.map(|(_, ear)| ear.intake.stop());
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
) -> Result<Option<Intake>, EndpointError> {
    let events = source.events.parse()?;
    let replay = source.replay.as_deref().map(str::parse).transpose()?;
    let mut options = IngestOptions::new(model.block_size);
    options.replay = replay.is_some();
    let mut sockets = ZmqSourceOptions::new(events, replay);
    sockets.topic.clone_from(&source.topic);
    let (app, clock) = (fleet.app(), fleet.app().clock());
    let Some(picture) = model.host.pictures().get(rank) else {
        return Ok(None);
    };
    tracing::info!(%rank, model = %model.name, events = %source.events, replay = source.replay,
        "listening to cache events");
    let cache = CountedIndex::new(model.host.index(), app.metrics());
    let ingest = match fleet.warm().resume(&model.name, rank) {
        Some(kept) => Ingest::resume_kept(rank.worker, rank.rank, options, &kept),
        None => Ingest::new(rank.worker, rank.rank, options),
    };
    let intake = Intake::spawn(
        app.tasks(),
        ZmqSource::start(app.tasks(), sockets),
        ingest,
        Arc::new(cache),
        Arc::new(move || clock.now()),
        Arc::clone(&picture) as _,
    );
    picture.attach(&source.events, intake.handle());
    Ok(Some(intake))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(events: &str, replay: Option<&str>) -> EventSource {
        EventSource {
            events: events.to_owned(),
            replay: replay.map(str::to_owned),
            topic: String::new(),
        }
    }

    #[test]
    fn the_user_says_more_than_the_engine_and_ranks_follow_by_port() {
        let mut facts = Facts::default();
        let engine = source("tcp://*:5557", Some("tcp://0.0.0.0:5558"));
        facts.events.insert(0, engine);
        let plain = WorkerAddress::parse("http://gpu-1:8000").unwrap();
        let found = source("tcp://gpu-1:5557", Some("tcp://gpu-1:5558"));
        assert_eq!(sources(&plain, &facts, 1), BTreeMap::from([(0, found)]));

        let told = "http://gpu-1:8000,events=tcp://other:7000,replay=tcp://other:7100";
        let told = WorkerAddress::parse(told).unwrap();
        let expected = [
            (0, source("tcp://other:7000", Some("tcp://other:7100"))),
            (1, source("tcp://other:7001", Some("tcp://other:7101"))),
        ];
        assert_eq!(sources(&told, &facts, 2), BTreeMap::from(expected));
        assert!(sources(&plain, &Facts::default(), 1).is_empty());
    }
}
