//! Asking a worker, within bounds, what a frontend would have to know.
//!
//! A dozen small requests to each worker, up to five of which make it compute one token, and up to sixteen texts that it
//! only tokenizes; each has a time limit. A probe without an answer is recorded as an error, and the other probes continue.

mod event_probe;
mod http;
mod pair;
mod test_requests;
mod tokens;
mod vocabulary;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_text::TextModel;
use kvasir_transport::SourceFault;
use kvasir_types::{HttpEndpoint, Rng};
use kvasir_upstream::{EngineKind, EventSource, Facts, ServerInfo, WorkerTls, event_sources};

use crate::observations::{
    EventCounts, Observations, ProbeError, ProbeResult, RankProbe, RepeatedPrompt, ReplayProbe,
    Target, TokenizerProbe,
};
use event_probe::EventProbe;
use http::Client;
use test_requests::TestRequests;

/// Ranks of one worker that are looked at; the rest is taken to be like them.
const RANKS_MAX: u32 = 8;
/// Workers that are asked at a time.
const WORKERS_AT_ONCE: usize = 16;
/// vLLM's own default, where an engine publishes.
const EVENT_PORT: u16 = 5557;
/// Tokens in a block where neither operator nor engine gives them.
const BLOCK_SIZE: u32 = 16;
/// Times that a prompt is sent twice before a wrong prediction counts: a busy engine may evict meanwhile.
const ATTEMPTS: u32 = 2;
/// An event comes within milliseconds; longest wait for one.
const EVENT_TIMEOUT_MAX: Duration = Duration::from_secs(3);

/// How to ask.
#[derive(Clone, Debug)]
pub struct Probe {
    /// How long one answer may take.
    pub timeout: Duration,
    /// Which certificates of workers are trusted.
    pub worker_tls: WorkerTls,
    /// The tokenizer of `--model-path`, or why there is none.
    pub text: Option<Result<Arc<TextModel>, String>>,
    /// Where requests that must not repeat each other come from.
    pub seed: u64,
}

impl Probe {
    /// Looks at all of them, several at a time, in the order given.
    pub async fn look(&self, tasks: &Tasks, targets: Vec<Target>) -> Vec<Observations> {
        let ports = event_ports(&targets);
        let mut observations = Vec::new();
        let mut waiting = targets.into_iter().zip(ports).enumerate();
        loop {
            let some: Vec<_> = waiting.by_ref().take(WORKERS_AT_ONCE).collect();
            if some.is_empty() {
                break;
            }
            let looks = some.into_iter().map(|(at, (target, port))| {
                let (probe, own, unseen) = (self.clone(), tasks.clone(), unseen(target, port));
                let fallback = unseen.clone();
                let look = async move { probe.look_at(&own, unseen, at as u64).await };
                (tasks.spawn(look), fallback)
            });
            for (look, fallback) in looks.collect::<Vec<_>>() {
                observations.push(look.await.ok().flatten().unwrap_or(fallback));
            }
        }
        note_peers(&mut observations);
        observations
    }

    async fn look_at(&self, tasks: &Tasks, mut observed: Observations, at: u64) -> Observations {
        let tls = self.worker_tls.clone();
        let client = Client::new(self.timeout, tls);
        ask_facts(&client, &mut observed).await;
        if observed.models.is_err() {
            return observed;
        }
        let target = observed.target.worker.clone();
        let ranks = target.ranks.or(observed.facts.ranks).unwrap_or(1);
        let sources = event_sources(&target, &observed.facts, ranks);
        let size = observed
            .configured_block_size()
            .or(observed.facts.block_size)
            .unwrap_or(BLOCK_SIZE);
        let rng = Rng::new(self.seed ^ at.rotate_left(40));
        let mut requests = TestRequests::new(&client, &observed, size, ranks, rng);
        for rank in 0..ranks.min(RANKS_MAX) {
            let source = sources.get(&rank).cloned();
            // One rank's tokens are all ranks' tokens.
            let text = self.text.as_ref().filter(|_| rank == 0);
            let text = text.and_then(|text| text.as_ref().ok());
            let seen = self
                .look_at_rank(tasks, &mut requests, rank, source, text)
                .await;
            observed.ranks.push(seen);
        }
        observed.text = tokens::compare(&client, &observed, self.text.as_ref()).await;
        observed
    }

    async fn look_at_rank(
        &self,
        tasks: &Tasks,
        requests: &mut TestRequests<'_>,
        rank: u32,
        source: Option<EventSource>,
        text: Option<&Arc<TextModel>>,
    ) -> RankProbe {
        let (mut events, link) = match &source {
            None => (None, Err(SourceFault::Silent)),
            Some(source) => {
                match EventProbe::open(
                    tasks,
                    requests.worker(),
                    rank,
                    requests.block_size(),
                    source,
                ) {
                    Err(error) => (None, Err(SourceFault::Unreachable(error))),
                    Ok(mut events) => {
                        let link = events.linked(self.timeout).await;
                        (link.is_ok().then_some(events), link)
                    }
                }
            }
        };
        let wait = self.timeout.min(EVENT_TIMEOUT_MAX);
        let mut twice = Err(ProbeError::Skipped);
        for _ in 0..ATTEMPTS {
            twice = requests.send_twice(rank, events.as_mut(), wait).await;
            if twice.as_ref().is_ok_and(settled) {
                break;
            }
        }
        let heard = twice.as_ref().is_ok_and(|twice| twice.predicted > Some(0));
        let stored_text = match (text, events.as_mut().filter(|_| heard)) {
            (Some(text), Some(events)) => requests.send_text(text, rank, events, wait).await,
            _ => None,
        };
        let replay = match (&source, &events) {
            (Some(source), Some(events)) if source.replay.is_some() => {
                events.ask_replay(tasks, source, self.timeout).await
            }
            (Some(_), Some(_)) => ReplayProbe::Unknown,
            _ => ReplayProbe::Skipped,
        };
        RankProbe {
            rank,
            source,
            link,
            events: events
                .as_ref()
                .map_or_else(EventCounts::default, EventProbe::seen),
            replay,
            repeated_prompt: twice,
            stored_text,
        }
    }
}

/// Whether a further attempt would show nothing new.
fn settled(twice: &RepeatedPrompt) -> bool {
    match (twice.predicted, twice.reported) {
        (Some(predicted), Some(reported)) => predicted == reported && predicted > 0,
        (None, _) => true,
        (Some(predicted), None) => predicted > 0,
    }
}

/// A worker of which nothing is known yet.
fn unseen(target: Target, free_event_port: u16) -> Observations {
    Observations {
        target,
        models: Err(ProbeError::Skipped),
        version: Err(ProbeError::Skipped),
        metrics: Err(ProbeError::Skipped),
        event_route: Err(ProbeError::Skipped),
        facts: Facts::default(),
        ranks: Vec::new(),
        text: TokenizerProbe::Skipped,
        peers_block_size: None,
        free_event_port,
    }
}

/// What the engine says about itself.
async fn ask_facts(client: &Client, observed: &mut Observations) {
    let clock = Clock::new();
    let endpoint = observed.target.endpoint.clone();
    let began = clock.now();
    observed.models = match client.get(&endpoint, "/v1/models").await {
        Err(silence) => Err(silence),
        Ok(body) => {
            observed.facts.read_models(&body);
            match is_model_list(&body) {
                true => Ok(clock.now() - began),
                false => Err(ProbeError::Unreadable("no list of models".to_owned())),
            }
        }
    };
    if observed.models.is_err() {
        return;
    }
    let version = client.get(&endpoint, "/version").await;
    observed.version = version.map(|body| observed.facts.read_version(&body));
    let metrics = client.get(&endpoint, "/metrics").await;
    let before = Facts::default();
    observed.metrics = metrics.and_then(|page| {
        observed.facts.read_metrics(text_of(&page)?, &before);
        Ok(())
    });
    let sources = client.get(&endpoint, "/kv_event_sources").await;
    observed.event_route = sources.map(|body| observed.facts.read_event_sources(&body));
    observed.facts.info = ask_info(client, &endpoint, observed.facts.kind).await;
    let told_events = observed.target.worker.events.publish().is_some();
    observed.facts.merge_info(told_events);
    if observed.facts.kind == EngineKind::Sglang && observed.facts.info.is_read {
        // It has no page of its own for them: its settings say where its events are, or that there are none.
        observed.event_route = Ok(());
    }
}

/// The settings that it was started with, where it tells them; older SGLangs have another name for the page.
async fn ask_info(client: &Client, endpoint: &HttpEndpoint, kind: EngineKind) -> ServerInfo {
    let pages = ["/server_info?config_format=json", "/get_server_info"];
    let pages = match kind {
        EngineKind::Vllm => &pages[..1],
        _ => &pages[..],
    };
    for page in pages {
        if let Ok(body) = client.get(endpoint, page).await {
            let mut info = ServerInfo::read(&body);
            info.is_read = true;
            return info;
        }
    }
    ServerInfo::default()
}

/// A page as the text that it must be.
fn text_of(page: &[u8]) -> ProbeResult<&str> {
    std::str::from_utf8(page).map_err(|error| ProbeError::Unreadable(error.to_string()))
}

fn is_model_list(body: &[u8]) -> bool {
    let read: Result<serde_json::Value, _> = serde_json::from_slice(body);
    read.is_ok_and(|list| list.get("data").is_some_and(serde_json::Value::is_array))
}

/// For each worker a port for its events; neighbours on one host get ports of their own.
fn event_ports(targets: &[Target]) -> Vec<u16> {
    let mut next: BTreeMap<&str, u16> = BTreeMap::new();
    let mut ports = Vec::new();
    for target in targets {
        let next = next
            .entry(target.endpoint.host.as_str())
            .or_insert(EVENT_PORT);
        let ranks = target.worker.ranks.unwrap_or(1).clamp(1, 64) as u16;
        ports.push(*next);
        *next = next.saturating_add(2 * ranks);
    }
    ports
}

/// Tells each worker the block size that most of those that serve its model have, and who else has it. Of sizes
/// that as many have, that of the worker named first counts.
fn note_peers(observations: &mut [Observations]) {
    let model = |observed: &Observations| observed.facts.models.first().map(|m| m.name.clone());
    let rows: Vec<(Option<String>, Option<u32>, String)> = observations
        .iter()
        .map(|w| (model(w), w.true_block_size(), w.target.endpoint.to_string()))
        .collect();
    for (at, observed) in observations.iter_mut().enumerate() {
        let name = model(observed);
        let same = rows.iter().filter(|(served, ..)| *served == name);
        let sizes: Vec<u32> = same.filter_map(|(_, size, _)| *size).collect();
        let most = most_frequent(&sizes);
        let mut others = rows.iter().enumerate();
        let one = others.find(|(other, (served, size, _))| {
            *other != at && *served == name && size.is_some() && *size == most
        });
        observed.peers_block_size = most.zip(one.map(|(_, (.., url))| url.clone()));
    }
}

/// What stands there most often; of several, the first.
fn most_frequent(sizes: &[u32]) -> Option<u32> {
    let count = |size: u32| sizes.iter().filter(|other| **other == size).count();
    // The last of equal maxima is taken: from behind, that is the first.
    sizes.iter().rev().max_by_key(|size| count(**size)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Target {
        let worker = kvasir_upstream::parse_worker(url).unwrap();
        Target {
            endpoint: worker.transport.http().unwrap().clone(),
            worker,
            model: None,
            block_size: None,
            model_path: None,
            index_block_size: None,
        }
    }

    #[test]
    fn the_majority_has_the_right_block_size_and_of_two_the_first() {
        assert_eq!(most_frequent(&[16, 16, 32]), Some(16));
        assert_eq!(most_frequent(&[32, 16, 16]), Some(16));
        assert_eq!(most_frequent(&[32, 16]), Some(32));
        assert_eq!(most_frequent(&[]), None);
    }

    #[test]
    fn neighbours_get_ports_of_their_own() {
        let targets = [
            target("http://a:8000"),
            target("http://a:8001,data-parallel-size=2"),
            target("http://b:8000"),
            target("http://a:8002"),
        ];
        assert_eq!(event_ports(&targets), [5557, 5559, 5557, 5563]);
    }

    #[test]
    fn a_prediction_is_asked_for_again_only_where_that_may_help() {
        let twice = |predicted, reported| RepeatedPrompt {
            prompt: 72,
            predicted,
            reported,
            hits: None,
        };
        assert!(settled(&twice(Some(64), Some(64))));
        assert!(settled(&twice(None, None)));
        assert!(settled(&twice(Some(64), None)));
        assert!(!settled(&twice(Some(0), Some(0))));
        assert!(!settled(&twice(Some(0), Some(64))));
    }
}
