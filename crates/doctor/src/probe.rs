//! Asking a worker, within bounds, what a frontend would have to know.
//!
//! At most a dozen small requests to each worker, two or four of which make it compute one token; each has a time
//! limit. Whatever does not answer is written down as silent, and the rest goes on.

mod ear;
mod http;
mod talk;
mod tokens;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvasir_telemetry::Clock;
use kvasir_text::TextModel;
use kvasir_transport::{SourceFault, Tasks};
use kvasir_types::{HttpEndpoint, Rng};
use kvasir_upstream::{EngineKind, EventSource, Facts, ServerInfo, WorkerTls, event_sources};

use crate::world::{
    Asked, EventsSeen, RankSeen, ReplaySeen, Silence, TextSeen, Told, Twice, World,
};
use ear::Ear;
use http::Client;
use talk::Talk;

/// Ranks of one worker that are looked at; the rest is taken to be like them.
const RANKS_MAX: u32 = 8;
/// Workers that are asked at a time.
const WORKERS_AT_ONCE: usize = 16;
/// vLLM's own default, where an engine publishes.
const EVENT_PORT: u16 = 5557;
/// Tokens in a block where nobody says.
const BLOCK_SIZE: u32 = 16;
/// Times that a prompt is sent twice before a wrong prediction counts: a busy engine may evict meanwhile.
const ATTEMPTS: u32 = 2;
/// An event comes within milliseconds; nobody waits longer than this for one that does not.
const EVENT_TIMEOUT_MAX: Duration = Duration::from_secs(3);

/// How to ask.
#[derive(Clone, Debug)]
pub struct Probe {
    /// How long one answer may take.
    pub timeout: Duration,
    /// Whom to believe among workers that are reached by https.
    pub worker_tls: WorkerTls,
    /// The tokenizer of `--model-path`, or why there is none.
    pub text: Option<Result<Arc<TextModel>, String>>,
    /// Where requests that must not repeat each other come from.
    pub seed: u64,
}

impl Probe {
    /// Looks at all of them, several at a time, in the order given.
    pub async fn look(&self, tasks: &Tasks, targets: Vec<Told>) -> Vec<World> {
        let ports = event_ports(&targets);
        let mut worlds = Vec::new();
        let mut waiting = targets.into_iter().zip(ports).enumerate();
        loop {
            let some: Vec<_> = waiting.by_ref().take(WORKERS_AT_ONCE).collect();
            if some.is_empty() {
                break;
            }
            let looks = some.into_iter().map(|(at, (told, port))| {
                let (probe, own, unseen) = (self.clone(), tasks.clone(), unseen(told, port));
                let fallback = unseen.clone();
                let look = async move { probe.look_at(&own, unseen, at as u64).await };
                (tasks.spawn(look), fallback)
            });
            for (look, fallback) in looks.collect::<Vec<_>>() {
                worlds.push(look.await.ok().flatten().unwrap_or(fallback));
            }
        }
        note_peers(&mut worlds);
        worlds
    }

    async fn look_at(&self, tasks: &Tasks, mut world: World, at: u64) -> World {
        let tls = self.worker_tls.clone();
        let client = Client::new(self.timeout, tls);
        ask_facts(&client, &mut world).await;
        if world.models.is_err() {
            return world;
        }
        let told = world.told.worker.clone();
        let ranks = told.ranks.or(world.facts.ranks).unwrap_or(1);
        let sources = event_sources(&told, &world.facts, ranks);
        let size = world
            .told_block_size()
            .or(world.facts.block_size)
            .unwrap_or(BLOCK_SIZE);
        let rng = Rng::new(self.seed ^ at.rotate_left(40));
        let mut talk = Talk::new(&client, &world, size, ranks, rng);
        for rank in 0..ranks.min(RANKS_MAX) {
            let source = sources.get(&rank).cloned();
            let seen = self.look_at_rank(tasks, &mut talk, rank, source).await;
            world.ranks.push(seen);
        }
        world.text = tokens::compare(&client, &world, self.text.as_ref()).await;
        world
    }

    async fn look_at_rank(
        &self,
        tasks: &Tasks,
        talk: &mut Talk<'_>,
        rank: u32,
        source: Option<EventSource>,
    ) -> RankSeen {
        let (mut ear, link) = match &source {
            None => (None, Err(SourceFault::Silent)),
            Some(source) => {
                match Ear::open(tasks, talk.worker(), rank, talk.block_size(), source) {
                    Err(error) => (None, Err(SourceFault::Unreachable(error))),
                    Ok(mut ear) => {
                        let link = ear.linked(self.timeout).await;
                        (link.is_ok().then_some(ear), link)
                    }
                }
            }
        };
        let wait = self.timeout.min(EVENT_TIMEOUT_MAX);
        let mut twice = Err(Silence::NotAsked);
        for _ in 0..ATTEMPTS {
            twice = talk.twice(rank, ear.as_mut(), wait).await;
            if twice.as_ref().is_ok_and(settled) {
                break;
            }
        }
        let replay = match (&source, &ear) {
            (Some(source), Some(ear)) if source.replay.is_some() => {
                ear.ask_replay(tasks, source, self.timeout).await
            }
            (Some(_), Some(_)) => ReplaySeen::Unknown,
            _ => ReplaySeen::NotAsked,
        };
        RankSeen {
            rank,
            source,
            link,
            events: ear.as_ref().map_or_else(EventsSeen::default, Ear::seen),
            replay,
            twice,
        }
    }
}

/// Whether asking again would tell nothing new.
fn settled(twice: &Twice) -> bool {
    match (twice.predicted, twice.reported) {
        (Some(predicted), Some(reported)) => predicted == reported && predicted > 0,
        (None, _) => true,
        (Some(predicted), None) => predicted > 0,
    }
}

/// A worker of which nothing is known yet.
fn unseen(told: Told, free_event_port: u16) -> World {
    World {
        told,
        models: Err(Silence::NotAsked),
        version: Err(Silence::NotAsked),
        metrics: Err(Silence::NotAsked),
        event_route: Err(Silence::NotAsked),
        facts: Facts::default(),
        ranks: Vec::new(),
        text: TextSeen::NotAsked,
        peers_block_size: None,
        free_event_port,
    }
}

/// What the engine says about itself.
async fn ask_facts(client: &Client, world: &mut World) {
    let clock = Clock::new();
    let endpoint = world.told.endpoint.clone();
    let began = clock.now();
    world.models = match client.get(&endpoint, "/v1/models").await {
        Err(silence) => Err(silence),
        Ok(body) => {
            world.facts.read_models(&body);
            match is_model_list(&body) {
                true => Ok(clock.now() - began),
                false => Err(Silence::Unreadable("no list of models".to_owned())),
            }
        }
    };
    if world.models.is_err() {
        return;
    }
    let version = client.get(&endpoint, "/version").await;
    world.version = version.map(|body| world.facts.read_version(&body));
    let metrics = client.get(&endpoint, "/metrics").await;
    let before = Facts::default();
    world.metrics = metrics.and_then(|page| {
        world.facts.read_metrics(text_of(&page)?, &before);
        Ok(())
    });
    let sources = client.get(&endpoint, "/kv_event_sources").await;
    world.event_route = sources.map(|body| world.facts.read_event_sources(&body));
    world.facts.info = ask_info(client, &endpoint, world.facts.kind).await;
    let told_events = world.told.worker.events.publish().is_some();
    world.facts.merge_info(told_events);
    if world.facts.kind == EngineKind::Sglang && world.facts.info.is_read {
        // It has no page of its own for them: its settings say where its events are, or that there are none.
        world.event_route = Ok(());
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
fn text_of(page: &[u8]) -> Asked<&str> {
    std::str::from_utf8(page).map_err(|error| Silence::Unreadable(error.to_string()))
}

fn is_model_list(body: &[u8]) -> bool {
    let read: Result<serde_json::Value, _> = serde_json::from_slice(body);
    read.is_ok_and(|list| list.get("data").is_some_and(serde_json::Value::is_array))
}

/// For each worker a port for its events; neighbours on one host get ports of their own.
fn event_ports(targets: &[Told]) -> Vec<u16> {
    let mut next: BTreeMap<&str, u16> = BTreeMap::new();
    let mut ports = Vec::new();
    for told in targets {
        let next = next
            .entry(told.endpoint.host.as_str())
            .or_insert(EVENT_PORT);
        let ranks = told.worker.ranks.unwrap_or(1).clamp(1, 64) as u16;
        ports.push(*next);
        *next = next.saturating_add(2 * ranks);
    }
    ports
}

/// Tells each worker the block size that most of those that serve its model have, and who else has it. Of sizes
/// that as many have, that of the worker named first counts.
fn note_peers(worlds: &mut [World]) {
    let model = |world: &World| world.facts.models.first().map(|m| m.name.clone());
    let rows: Vec<(Option<String>, Option<u32>, String)> = worlds
        .iter()
        .map(|w| (model(w), w.true_block_size(), w.told.endpoint.to_string()))
        .collect();
    for (at, world) in worlds.iter_mut().enumerate() {
        let name = model(world);
        let same = rows.iter().filter(|(served, ..)| *served == name);
        let sizes: Vec<u32> = same.filter_map(|(_, size, _)| *size).collect();
        let most = most_frequent(&sizes);
        let mut others = rows.iter().enumerate();
        let one = others.find(|(other, (served, size, _))| {
            *other != at && *served == name && size.is_some() && *size == most
        });
        world.peers_block_size = most.zip(one.map(|(_, (.., url))| url.clone()));
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

    fn told(url: &str) -> Told {
        let worker = kvasir_upstream::parse_worker(url).unwrap();
        Told {
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
            told("http://a:8000"),
            told("http://a:8001,data-parallel-size=2"),
            told("http://b:8000"),
            told("http://a:8002"),
        ];
        assert_eq!(event_ports(&targets), [5557, 5559, 5557, 5563]);
    }

    #[test]
    fn a_prediction_is_asked_for_again_only_where_that_may_help() {
        let twice = |predicted, reported| Twice {
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
