//! Where a worker's ranks publish their cache events.

use std::collections::BTreeMap;

use kvasir_transport::zmq::Endpoint;

use crate::{EventSource, Facts, WorkerAddress};

/// Where each rank publishes: as the user says, else as the engine says.
#[must_use]
pub fn event_sources(
    address: &WorkerAddress,
    facts: &Facts,
    ranks: u32,
) -> BTreeMap<u32, EventSource> {
    let Some(events) = &address.events else {
        let here = |source: &EventSource| EventSource {
            events: on_host(&source.events, &address.host),
            replay: source.replay.as_ref().map(|r| on_host(r, &address.host)),
            topic: source.topic.clone(),
        };
        let known = facts.events.iter();
        return known.map(|(rank, source)| (*rank, here(source))).collect();
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
        assert_eq!(
            event_sources(&plain, &facts, 1),
            BTreeMap::from([(0, found)])
        );

        let told = "http://gpu-1:8000,events=tcp://other:7000,replay=tcp://other:7100";
        let told = WorkerAddress::parse(told).unwrap();
        let expected = [
            (0, source("tcp://other:7000", Some("tcp://other:7100"))),
            (1, source("tcp://other:7001", Some("tcp://other:7101"))),
        ];
        assert_eq!(event_sources(&told, &facts, 2), BTreeMap::from(expected));
        assert!(event_sources(&plain, &Facts::default(), 1).is_empty());
    }
}
