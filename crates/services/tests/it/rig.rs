//! Services for tests, an engine that publishes cache events, and recorded exchanges.

use std::time::Duration;

use bytes::Bytes;
use kvasir_host::{HostContext, RouterSetup};
use kvasir_index::IndexOptions;
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_services::{Answer, AnswerBody, Api, Ask, Verb};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_transport::zmq::{Endpoint, ZmqLimits, ZmqPublisher};
use kvasir_types::{EngineHash, Token};
use kvasir_wire::engine::{Dialect, Event, Stored, encode_batch};
use serde::Deserialize;
use serde_json::Value;

const RECORDED: &str = include_str!("../../../../testdata/dynamo-services/exchanges.jsonl");

/// One exchange with a service of Dynamo.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Exchange {
    pub(crate) service: String,
    pub(crate) case: String,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: String,
    pub(crate) status: u16,
    pub(crate) response: String,
}

pub(crate) fn recorded(service: &str, case: &str) -> Exchange {
    let all = RECORDED
        .lines()
        .map(|line| serde_json::from_str::<Exchange>(line).unwrap());
    let mut found = all.filter(|e| e.service == service && e.case == case);
    found.next().unwrap_or_else(|| panic!("{service} {case}"))
}

pub(crate) fn context() -> HostContext {
    HostContext {
        clock: Clock::new(),
        metrics: Metrics::new(&MetricOptions::default()).unwrap(),
        tasks: Tasks::new(),
    }
}

pub(crate) fn setup() -> RouterSetup {
    let config = RouterConfig {
        router_mode: RouterMode::Kv,
        router_track_output_blocks: true,
        router_queue_threshold: None,
        ..RouterConfig::default()
    };
    RouterSetup::new(config, IndexOptions::default())
}

pub(crate) async fn send(api: &impl Api, verb: Verb, path: &str, body: &str) -> (u16, String) {
    let (path, query) = match path.split_once('?') {
        Some((path, query)) => (path, Some(query.to_owned())),
        None => (path, None),
    };
    let ask = Ask {
        verb,
        path: path.to_owned(),
        query,
        body: Bytes::copy_from_slice(body.as_bytes()),
    };
    let Answer { status, body } = api.answer(ask).await;
    let text = match body {
        AnswerBody::Empty => String::new(),
        AnswerBody::Json(text) => String::from_utf8(text.to_vec()).unwrap(),
        AnswerBody::Text(text) => text,
        AnswerBody::Bytes(bytes) => format!("{} bytes", bytes.len()),
        AnswerBody::JsonParts(mut parts) => {
            let mut text = Vec::new();
            while let Some(part) = parts.recv().await.expect("it is not cut") {
                text.extend(part);
            }
            String::from_utf8(text).unwrap()
        }
    };
    (status, text)
}

/// Sends a recorded request; the answer is what Dynamo answered, byte for byte.
pub(crate) async fn same(api: &impl Api, service: &str, case: &str) {
    let (exchange, status, text) = replay(api, service, case).await;
    assert_eq!(
        (status, text.as_str()),
        (exchange.status, exchange.response.as_str()),
        "{service} {case}"
    );
}

/// The same, where the order of an answer's rows or keys is free.
pub(crate) async fn alike(api: &impl Api, service: &str, case: &str) {
    let (exchange, status, text) = replay(api, service, case).await;
    let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert_eq!(
        (status, parsed(&text)),
        (exchange.status, parsed(&exchange.response)),
        "{service} {case}"
    );
}

pub(crate) async fn replay(api: &impl Api, service: &str, case: &str) -> (Exchange, u16, String) {
    let exchange = recorded(service, case);
    let verb = match exchange.method.as_str() {
        "GET" => Verb::Get,
        "POST" => Verb::Post,
        "PATCH" => Verb::Patch,
        "DELETE" => Verb::Delete,
        other => panic!("{other}"),
    };
    let (status, text) = send(api, verb, &exchange.path, &exchange.body).await;
    (exchange, status, text)
}

/// An engine's event socket on a free port.
pub(crate) struct EventSocket {
    publisher: ZmqPublisher,
    pub(crate) address: String,
}

impl EventSocket {
    pub(crate) async fn bind(tasks: &Tasks) -> Self {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let endpoint = Endpoint::new("127.0.0.1", port);
        let publisher = ZmqPublisher::bind(tasks, &endpoint, ZmqLimits::default());
        Self {
            publisher: publisher.await.unwrap(),
            address: format!("tcp://127.0.0.1:{port}"),
        }
    }

    /// Who listens to it.
    pub(crate) fn listeners(&self) -> usize {
        self.publisher.subscribers()
    }

    /// Publishes blocks of 16 tokens that follow each other.
    pub(crate) async fn store(&self, sequence: u64, tokens: &[Token], names: &[u64]) {
        while self.publisher.subscribers() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let hashes: Vec<EngineHash> = names.iter().map(|name| EngineHash(*name)).collect();
        let stored = Event::Stored(Stored {
            hashes: &hashes,
            tokens,
            block_size: 16,
            ..Stored::default()
        });
        let mut payload = Vec::new();
        encode_batch(
            Dialect::Vllm24,
            1.0,
            [stored].into_iter(),
            Some(0),
            &mut payload,
        );
        let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
        self.publisher
            .publish(&[Bytes::new(), number, payload.into()]);
    }
}

/// Waits for an answer that says something.
pub(crate) async fn until(
    api: &impl Api,
    verb: Verb,
    path: &str,
    body: &str,
    says: &str,
) -> String {
    for _ in 0..5000 {
        let (_, text) = send(api, verb, path, body).await;
        if text.contains(says) {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(4)).await;
    }
    panic!("{path} never says {says}");
}
