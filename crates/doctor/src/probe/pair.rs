//! One real request through two servers: one computes the prompt, the other answers.
//!
//! Every server of either part is asked at least once, and no more than [`PAIRS_MAX`] pairs are tried; each question has a time limit.

use kvasir_telemetry::Clock;
use kvasir_types::{Rng, Role};
use kvasir_upstream::{EngineKind, ServerPart};
use serde_json::{Value, json};

use super::http::Client;
use super::test_requests::TestRequests;
use super::{BLOCK_SIZE, Probe};
use crate::observations::{Observations, PairOutcome, PairProbe, ProbeError, ProbeResult};

/// Pairs that are tried at most.
const PAIRS_MAX: usize = 64;
/// Series that a vLLM server has whose connector is NIXL.
const NIXL_SERIES: &[u8] = b"vllm:nixl_";

/// Which part of requests a worker computes.
fn role(observed: &Observations) -> Role {
    match observed.facts.info.part {
        Some(ServerPart::Prefill(_)) => Role::Prefill,
        Some(ServerPart::Decode) => Role::Decode,
        None => observed.target.worker.role,
    }
}

impl Probe {
    /// Sends a request through servers that compute prompts and those that answer, where some of both were looked at.
    pub async fn look_at_pairs(&self, all: &[Observations]) -> Vec<PairProbe> {
        let answers = |observed: &&Observations| observed.models.is_ok();
        let of = |wanted: fn(Role) -> bool| -> Vec<&Observations> {
            let those = all.iter().filter(|observed| wanted(role(observed)));
            those.filter(answers).collect()
        };
        let (prefill, decode) = (
            of(|role| role == Role::Prefill),
            of(|role| role != Role::Prefill),
        );
        let mut pairs = Vec::new();
        if prefill.is_empty() || decode.is_empty() {
            return pairs;
        }
        let client = Client::new(self.timeout, self.worker_tls.clone());
        for at in 0..prefill.len().max(decode.len()).min(PAIRS_MAX) {
            let one = prefill.get(at % prefill.len());
            let other = decode.get(at % decode.len());
            if let (Some(one), Some(other)) = (one, other) {
                let rng = Rng::new(self.seed ^ (at as u64).rotate_left(20));
                pairs.push(look_at(&client, one, other, rng).await);
            }
        }
        pairs
    }
}

async fn look_at(
    client: &Client,
    prefill: &Observations,
    decode: &Observations,
    rng: Rng,
) -> PairProbe {
    let size = prefill.facts.block_size.unwrap_or(BLOCK_SIZE);
    let mut requests = TestRequests::new(client, prefill, size, 1, rng);
    let body = json!({
        "model": requests.model(),
        "prompt": requests.prompt().await,
        "max_tokens": 1,
        "temperature": 0,
    });
    let meeting = prefill.target.worker.bootstrap.as_ref().map(|at| at.port);
    let meeting = match prefill.facts.info.part {
        Some(ServerPart::Prefill(port)) => meeting.or(Some(port)),
        _ => meeting,
    };
    let outcome = match meeting {
        _ if is_mixed(meeting.is_some(), decode) => PairOutcome::Mixed,
        Some(port) => meet(client, (prefill, decode), body, port).await,
        None => hand_over(client, (prefill, decode), body).await,
    };
    PairProbe {
        prefill: prefill.target.endpoint.to_string(),
        decode: decode.target.endpoint.to_string(),
        is_sglang: meeting.is_some(),
        outcome,
    }
}

/// Whether the server that answers does not know the words of the other: it would not read them, compute the prompt itself, and say nothing.
fn is_mixed(meets: bool, decode: &Observations) -> bool {
    let answers_sglang = decode.facts.info.part == Some(ServerPart::Decode);
    match meets {
        true => decode.facts.kind == EngineKind::Vllm && !answers_sglang,
        false => answers_sglang,
    }
}

async fn post(client: &Client, observed: &Observations, body: &Value) -> ProbeResult<Value> {
    let answer = client.post(&observed.target.endpoint, "/v1/completions", body, None);
    let answer = answer.await?;
    serde_json::from_slice(&answer).map_err(|error| ProbeError::Unreadable(error.to_string()))
}

/// As vLLM's servers with a connector do it.
async fn hand_over(
    client: &Client,
    (prefill, decode): (&Observations, &Observations),
    mut body: Value,
) -> PairOutcome {
    let connectors = [prefill, decode].map(|one| one.facts.info.unsupported_connector());
    if let Some(connector) = connectors.into_iter().flatten().next() {
        return PairOutcome::Unsupported(connector.to_owned());
    }
    if lacks_nixl(client, prefill, decode).await {
        return PairOutcome::NoConnector;
    }
    let clock = Clock::new();
    let began = clock.now();
    body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let computed = match post(client, prefill, &body).await {
        Ok(answer) => answer,
        Err(error) => return PairOutcome::PrefillFailed(error),
    };
    let computed_at = clock.now();
    let params = &computed["kv_transfer_params"];
    if !params.is_object() {
        return PairOutcome::NoTransfer;
    }
    body["kv_transfer_params"] = params.clone();
    let sent = clock.now();
    match post(client, decode, &body).await {
        Ok(answer) => PairOutcome::Answered {
            prompt: computed_at - began,
            answer: clock.now() - sent,
            is_same: first_text(&computed) == first_text(&answer),
        },
        Err(error) => {
            let word = |name: &str| params[name].as_str().unwrap_or("?").to_owned();
            let port = params["remote_port"].as_u64().unwrap_or(0);
            PairOutcome::NotFetched {
                error,
                from: format!("{}:{port}", word("remote_host")),
            }
        }
    }
}

fn first_text(answer: &Value) -> Option<&str> {
    answer.pointer("/choices/0/text")?.as_str()
}

/// Whether the one server has NIXL and the other has not: it would compute every prompt itself, and say nothing.
async fn lacks_nixl(client: &Client, prefill: &Observations, decode: &Observations) -> bool {
    let has = async |observed: &Observations| {
        let page = client.get(&observed.target.endpoint, "/metrics").await;
        let is_nixl = |line: &[u8]| line.starts_with(NIXL_SERIES);
        page.ok()
            .map(|page| page.split(|b| *b == b'\n').any(is_nixl))
    };
    let is_vllm = decode.facts.kind == EngineKind::Vllm;
    is_vllm && has(prefill).await == Some(true) && has(decode).await == Some(false)
}

/// As SGLang's servers do it.
async fn meet(
    client: &Client,
    (prefill, decode): (&Observations, &Observations),
    mut body: Value,
    port: u16,
) -> PairOutcome {
    let clock = Clock::new();
    let began = clock.now();
    body["bootstrap_host"] = prefill.target.endpoint.host.clone().into();
    body["bootstrap_port"] = port.into();
    body["bootstrap_room"] = (clock.unix_nanos(began) >> 1).max(1).into();
    let (computed, answered) =
        tokio::join!(post(client, prefill, &body), post(client, decode, &body));
    match (computed, answered) {
        (Err(error), _) => PairOutcome::PrefillFailed(error),
        (_, Err(error)) => PairOutcome::NotFetched {
            error,
            from: format!("{}:{port}", prefill.target.endpoint.host),
        },
        (Ok(_), Ok(_)) => PairOutcome::Answered {
            prompt: clock.now() - began,
            answer: clock.now() - began,
            is_same: true,
        },
    }
}
