//! One thing wrong at a time: which checks notice, and what they advise.

mod cache;
mod engine;
mod events;

use std::time::Duration;

use expect_test::{Expect, expect};
use kvasir_transport::SourceFault;
use kvasir_types::ModelCard;
use kvasir_upstream::{EngineKind, EventSource, Facts, parse_url, parse_worker};

use super::examine;
use crate::finding::{Check, Outcome};
use crate::observations::{
    Comparison, Difference, EventCounts, Observations, ProbeError, RankProbe, RepeatedPrompt,
    ReplayProbe, StoredText, Target, TokenizerProbe,
};
use crate::report::{Report, WorkerReport};

const URL: &str = "http://gpu-1:8000";

fn source(events: &str, replay: Option<&str>) -> EventSource {
    EventSource {
        events: events.to_owned(),
        replay: replay.map(str::to_owned),
        topic: "kv".to_owned(),
    }
}

/// A worker with which nothing is wrong.
fn good() -> Observations {
    let mut facts = Facts {
        version: Some("0.32.0".to_owned()),
        models: vec![ModelCard {
            name: "tiny".to_owned(),
            root: Some("/models/tiny".to_owned()),
            max_model_len: Some(2048),
            parent: None,
            migration_limit: 0,
        }],
        block_size: Some(16),
        prefix_caching: Some(true),
        ranks: Some(1),
        ..Facts::default()
    };
    facts
        .events
        .insert(0, source("tcp://*:5557", Some("tcp://*:5558")));
    Observations {
        target: Target {
            worker: parse_worker(URL).unwrap(),
            endpoint: parse_url(URL).unwrap(),
            model: Some("tiny".to_owned()),
            block_size: None,
            model_path: Some("/models/tiny".to_owned()),
            index_block_size: None,
        },
        models: Ok(Duration::from_millis(3)),
        version: Ok(()),
        metrics: Ok(()),
        event_route: Ok(()),
        facts,
        ranks: vec![RankProbe {
            rank: 0,
            source: Some(source("tcp://gpu-1:5557", Some("tcp://gpu-1:5558"))),
            link: Ok(()),
            events: EventCounts {
                batches: 2,
                blocks: 4,
                after: Some(Duration::from_millis(5)),
                ..EventCounts::default()
            },
            replay: ReplayProbe::Answered {
                batches: 1,
                has_last: Some(true),
            },
            stored_text: None,
            repeated_prompt: Ok(RepeatedPrompt {
                prompt: 72,
                predicted: Some(64),
                reported: Some(64),
                hits: Some(64),
            }),
        }],
        text: TokenizerProbe::Compared(Comparison {
            chat_tokens: 71,
            ..Comparison::default()
        }),
        peers_block_size: Some((16, "http://gpu-2:8000".to_owned())),
        free_event_port: 5557,
    }
}

/// The rows that did not pass, after `change`.
fn check(change: impl FnOnce(&mut Observations), expected: &Expect) {
    let mut observed = good();
    change(&mut observed);
    let mut checks = examine(&observed);
    checks.retain(|finding| finding.outcome != Outcome::Pass);
    let worker = observed.target.endpoint.to_string();
    let workers = vec![WorkerReport { worker, checks }];
    let report = Report { workers };
    expected.assert_eq(&report.to_string());
}

fn tell(observed: &mut Observations, address: &str) {
    observed.target.worker = parse_worker(address).unwrap();
    observed.target.endpoint = observed.target.worker.transport.http().unwrap().clone();
}
