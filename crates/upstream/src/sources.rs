//! Where a worker's ranks publish their cache events.

use std::collections::BTreeMap;

use kvasir_transport::zmq::Endpoint;
use kvasir_types::{EventFeed, WorkerRecord};

use crate::{EventSource, Facts};

/// Where each rank publishes: as the record says, else as the engine says.
#[must_use]
pub fn event_sources(
    worker: &WorkerRecord,
    facts: &Facts,
    ranks: u32,
) -> BTreeMap<u32, EventSource> {
    let EventFeed::Sockets { publish, replay } = &worker.events else {
        return BTreeMap::new();
    };
    let Some(publish) = publish else {
        let host = worker.transport.http().map_or("", |http| &http.host);
        let here = |source: &EventSource| EventSource {
            events: on_host(&source.events, host),
            replay: source.replay.as_ref().map(|r| on_host(r, host)),
            topic: source.topic.clone(),
        };
        let known = facts.events.iter();
        return known.map(|(rank, source)| (*rank, here(source))).collect();
    };
    let source = |nth| {
        let source = EventSource {
            events: shifted(publish, nth)?,
            replay: replay.as_ref().and_then(|r| shifted(r, nth)),
            topic: String::new(),
        };
        Some((worker.first_rank.0.checked_add(nth)?, source))
    };
    (0..ranks).filter_map(source).collect()
}

/// The socket of a rank: as vLLM and SGLang do, each further one is one port further.
pub(crate) fn shifted(first: &str, rank: u32) -> Option<String> {
    let endpoint: Endpoint = first.parse().ok()?;
    let port = u16::try_from(u32::from(endpoint.port()).checked_add(rank)?).ok()?;
    Some(endpoint.with_port(port).to_string())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_worker;

    fn source(events: &str, replay: Option<&str>) -> EventSource {
        EventSource {
            events: events.to_owned(),
            replay: replay.map(str::to_owned),
            topic: String::new(),
        }
    }

    #[test]
    fn an_operators_endpoint_overrides_the_engines_and_ranks_follow_by_port() {
        let mut facts = Facts::default();
        let engine = source("tcp://*:5557", Some("tcp://0.0.0.0:5558"));
        facts.events.insert(0, engine);
        let plain = parse_worker("http://gpu-1:8000").unwrap();
        let found = source("tcp://gpu-1:5557", Some("tcp://gpu-1:5558"));
        assert_eq!(
            event_sources(&plain, &facts, 1),
            BTreeMap::from([(0, found)])
        );

        let given = "http://gpu-1:8000,events=tcp://other:7000,replay=tcp://other:7100";
        let mut given = parse_worker(given).unwrap();
        let expected = [
            (0, source("tcp://other:7000", Some("tcp://other:7100"))),
            (1, source("tcp://other:7001", Some("tcp://other:7101"))),
        ];
        assert_eq!(event_sources(&given, &facts, 2), BTreeMap::from(expected));
        given.events = EventFeed::Delivered;
        assert!(event_sources(&given, &facts, 2).is_empty());
        assert!(event_sources(&plain, &Facts::default(), 1).is_empty());
    }
}
