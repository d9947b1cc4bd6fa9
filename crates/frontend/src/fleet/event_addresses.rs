//! Which worker listens to which event address, and what speaks against an address at start.
//!
//! Answers one question: can this be the event socket of this engine? Two workers with one address have the events of one
//! engine; an address that the engine itself does not name is likely another's. Both are said once, before any prediction is wrong.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvasir_transport::zmq::Endpoint;
use kvasir_types::{EventFeed, WorkerId, WorkerRecord};
use kvasir_upstream::{EventSource, Facts, event_sources};

/// Names of this machine that mean the same.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Who listens where, by address.
#[derive(Debug, Default)]
pub(super) struct EventAddresses(Mutex<BTreeMap<String, BTreeMap<WorkerId, String>>>);

impl EventAddresses {
    /// A worker listens to these sources and to no others. Says it if another worker has one of them.
    pub(super) fn listen(&self, worker: WorkerId, url: &str, sources: &BTreeMap<u32, EventSource>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shared = Vec::new();
        for source in sources.values() {
            let workers = all.entry(source.events.clone()).or_default();
            if workers.insert(worker, url.to_owned()).is_none() {
                let other = workers.iter().find(|(id, _)| **id != worker);
                shared.extend(other.map(|(_, other)| (source.events.clone(), other.clone())));
            }
        }
        all.retain(|address, workers| {
            if !sources.values().any(|source| source.events == *address) {
                workers.remove(&worker);
            }
            !workers.is_empty()
        });
        drop(all);
        for (events, other) in shared {
            tracing::warn!(worker = url, %other, %events,
                "two workers have one event address: the cache of one of them is not known; give each the socket of its \
                 own engine (events=, or --kv-events-config with its own ports)");
        }
    }
}

/// What the operator said and what the engine announces, if they are different sockets.
pub(super) fn contradiction(record: &WorkerRecord, facts: &Facts) -> Option<(String, String)> {
    record.events.publish()?;
    let plain = WorkerRecord {
        events: EventFeed::default(),
        ..record.clone()
    };
    let announced = event_sources(&plain, facts, 1);
    let told = event_sources(record, facts, 1);
    let first = record.first_rank.0;
    let (told, announced) = (told.get(&first)?, announced.get(&first)?);
    let (a, b) = (parse(&told.events)?, parse(&announced.events)?);
    let same_host = a.host() == b.host() || [&a, &b].iter().all(|e| LOOPBACK.contains(&e.host()));
    let same = a.port() == b.port() && same_host;
    (!same).then(|| (told.events.clone(), announced.events.clone()))
}

fn parse(address: &str) -> Option<Endpoint> {
    address.parse().ok()
}

#[cfg(test)]
mod tests {
    use kvasir_upstream::parse_worker;

    use super::*;

    fn announced(events: &str) -> Facts {
        let source = EventSource {
            events: events.to_owned(),
            replay: None,
            topic: String::new(),
        };
        Facts {
            events: BTreeMap::from([(0, source)]),
            ..Facts::default()
        }
    }

    #[test]
    fn an_address_that_the_engine_does_not_name_is_a_contradiction() {
        let differ = |worker: &str, events: &str| {
            let worker = parse_worker(worker).unwrap();
            contradiction(&worker, &announced(events)).is_some()
        };
        let told = "http://10.0.0.7:8000,events=tcp://10.0.0.7:5557";
        assert!(!differ(told, "tcp://*:5557"));
        assert!(differ(told, "tcp://*:5559"));
        let elsewhere = "http://10.0.0.7:8000,events=tcp://10.0.0.8:5557";
        assert!(differ(elsewhere, "tcp://*:5557"));
        let here = "http://localhost:8000,events=tcp://127.0.0.1:5557";
        assert!(!differ(here, "tcp://*:5557"));
        assert!(!differ("http://10.0.0.7:8000", "tcp://*:5557"));
        assert!(!differ(told, "ipc:///tmp/events"), "nobody can compare it");
    }

    #[test]
    fn an_address_is_free_again_when_its_worker_listens_elsewhere() {
        let addresses = EventAddresses::default();
        let at = |events: &str| announced(events).events;
        addresses.listen(WorkerId(1), "http://a", &at("tcp://a:1"));
        addresses.listen(WorkerId(2), "http://b", &at("tcp://a:1"));
        let count = |addresses: &EventAddresses| {
            let all = addresses.0.lock().unwrap();
            all.values().map(BTreeMap::len).sum::<usize>()
        };
        assert_eq!(count(&addresses), 2);
        addresses.listen(WorkerId(2), "http://b", &at("tcp://b:1"));
        addresses.listen(WorkerId(1), "http://a", &BTreeMap::new());
        assert_eq!(count(&addresses), 1);
    }
}
