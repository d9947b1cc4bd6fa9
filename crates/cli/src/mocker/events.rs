//! Where each mock engine's event sockets are, and which wire they speak: four options that say one thing.
//!
//! `--events` and `--replay` name addresses; `--kv-events-config` is vLLM's own option; `--kv-events-port` is the
//! short form. Only one of the three ways may be used.

use std::sync::Arc;

use kvasir_config::{EngineFamily, EventWire, Settings, keys};
use kvasir_mocker::{EventOptions, EventSockets, Fault};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::zmq::Endpoint;
use kvasir_wire::engine::Dialect;
use serde::Deserialize;

use crate::wiring::{BadConfig, Failure};

/// vLLM's topic is empty; ours was this one from the start, and readers take any.
const TOPIC: &str = "kv-events";
/// Batches that vLLM keeps for replay.
const BUFFER_STEPS: usize = 10_000;

/// vLLM's `--kv-events-config`, with its defaults. What a mock engine does not need is not looked at.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct VllmConfig {
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: String,
    replay_endpoint: Option<String>,
    topic: String,
    buffer_steps: usize,
}

impl Default for VllmConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            topic: String::new(),
            buffer_steps: BUFFER_STEPS,
        }
    }
}

/// The event sockets of all workers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// Of the first worker's first rank.
    events: Endpoint,
    /// Likewise.
    replay: Option<Endpoint>,
    topic: String,
    buffer_steps: usize,
    ranks: u32,
    /// Ports from one worker to the next.
    stride: u32,
    dialect: Dialect,
    block_size: u32,
    faults: Vec<Fault>,
}

impl Plan {
    /// What the options ask for; `host` is where requests are taken. `None` without events.
    pub(super) fn read(settings: &Settings, host: &str) -> Result<Option<Self>, Failure> {
        let faults = settings.get(keys::EVENT_FAULT_AT_START);
        let faults: Result<Vec<Fault>, _> = faults.iter().map(|text| text.parse()).collect();
        let ranks = settings.get(keys::DATA_PARALLEL_SIZE);
        let Some(sockets) = sockets(settings, host, ranks)? else {
            return Ok(None);
        };
        let plan = Self {
            dialect: dialect(settings),
            block_size: settings.get(keys::BLOCK_SIZE),
            faults: faults.map_err(|error| bad(format!("--event-fault-at-start: {error}")))?,
            ..sockets
        };
        plan.check(settings.get(keys::WORKERS))?;
        Ok(Some(plan))
    }

    /// Refuses ports that do not exist or that two sockets would share.
    fn check(&self, workers: u32) -> Result<(), Failure> {
        let mut used = Vec::new();
        for at in 0..workers {
            for endpoint in [Some(&self.events), self.replay.as_ref()]
                .into_iter()
                .flatten()
            {
                for rank in 0..self.ranks {
                    let endpoint = self.shifted(endpoint, at, rank)?;
                    if endpoint.port() != 0 && used.contains(&endpoint.port()) {
                        return Err(bad(format!(
                            "two event sockets would be at {endpoint}: leave {} ports between events and \
                             replays",
                            self.ranks * workers
                        )));
                    }
                    used.push(endpoint.port());
                }
            }
        }
        Ok(())
    }

    fn shifted(&self, first: &Endpoint, worker: u32, rank: u32) -> Result<Endpoint, Failure> {
        if first.port() == 0 {
            return Ok(first.clone());
        }
        let port =
            u64::from(first.port()) + u64::from(self.stride) * u64::from(worker) + u64::from(rank);
        let port = u16::try_from(port).map_err(|_| {
            bad(format!(
                "events at {first}: worker {worker} would need port {port}"
            ))
        })?;
        Ok(first.with_port(port))
    }

    /// Opens the sockets of worker number `at`.
    pub(super) async fn open(&self, tasks: &Tasks, at: u32) -> Result<EventSockets, Failure> {
        let clock = Clock::new();
        let unix_time = move || clock.unix_millis(clock.now()) as f64 / 1e3;
        let events = self.shifted(&self.events, at, 0)?;
        let replay = self.replay.as_ref();
        let replay = replay.map(|r| self.shifted(r, at, 0)).transpose()?;
        let options = EventOptions {
            topic: self.topic.clone(),
            dialect: self.dialect,
            ranks: self.ranks,
            buffer_steps: self.buffer_steps,
            ..EventOptions::new(events.clone(), replay, self.block_size, Arc::new(unix_time))
        };
        let sockets = EventSockets::bind(tasks, &options).await;
        let sockets =
            sockets.map_err(|error| format!("cannot publish events at {events}: {error}"))?;
        for fault in &self.faults {
            sockets.inject(*fault);
        }
        Ok(sockets)
    }
}

fn bad(message: String) -> Failure {
    BadConfig(message).into()
}

/// The sockets alone, from whichever of the three ways was used.
fn sockets(settings: &Settings, host: &str, ranks: u32) -> Result<Option<Plan>, Failure> {
    let events = settings.get(keys::EVENTS);
    let config = settings.get(keys::KV_EVENTS_CONFIG);
    let port = settings.get(keys::KV_EVENTS_PORT);
    let replay = settings.get(keys::REPLAY);
    let plan = |events, replay, stride| Plan {
        events,
        replay,
        topic: TOPIC.to_owned(),
        buffer_steps: BUFFER_STEPS,
        ranks,
        stride,
        dialect: Dialect::Vllm24,
        block_size: 0,
        faults: Vec::new(),
    };
    match (events, config, port) {
        (None, None, None) if replay.is_some() => Err(bad(
            "--replay needs --events: there is nothing to replay".to_owned(),
        )),
        (None, None, None) => Ok(None),
        (Some(events), None, None) => {
            let events = endpoint("--events", &events)?;
            let replay = replay.map(|r| endpoint("--replay", &r)).transpose()?;
            Ok(Some(plan(events, replay, ranks)))
        }
        (None, Some(config), None) if replay.is_none() => {
            let config = vllm_config(&config)?;
            let Some((events, replay)) = config.sockets()? else {
                return Ok(None);
            };
            Ok(Some(Plan {
                topic: config.topic,
                buffer_steps: config.buffer_steps,
                ..plan(events, replay, ranks)
            }))
        }
        (None, None, Some(port)) if replay.is_none() => {
            let next = match port {
                0 => 0,
                port => u16::try_from(u32::from(port) + ranks).map_err(|_| {
                    bad(format!(
                        "--kv-events-port {port} leaves no port for replays"
                    ))
                })?,
            };
            let replay = Some(Endpoint::new(host, next));
            Ok(Some(plan(Endpoint::new(host, port), replay, 2 * ranks)))
        }
        _ => Err(bad(
            "give the event sockets in one way: --events with --replay, --kv-events-config, or \
             --kv-events-port"
                .to_owned(),
        )),
    }
}

fn endpoint(flag: &str, text: &str) -> Result<Endpoint, Failure> {
    text.parse()
        .map_err(|error| bad(format!("{flag}: {error}")))
}

fn vllm_config(text: &str) -> Result<VllmConfig, Failure> {
    serde_json::from_str(text).map_err(|error| bad(format!("--kv-events-config {text}: {error}")))
}

impl VllmConfig {
    /// Where events and replays are; `None` if nothing is published.
    fn sockets(&self) -> Result<Option<(Endpoint, Option<Endpoint>)>, Failure> {
        let silent = self.publisher.as_deref() == Some("null");
        if !self.enable_kv_cache_events || silent {
            return Ok(None);
        }
        let at = |text: &String| endpoint("--kv-events-config", text);
        let replay = self.replay_endpoint.as_ref().map(at).transpose()?;
        Ok(Some((at(&self.endpoint)?, replay)))
    }
}

fn dialect(settings: &Settings) -> Dialect {
    let otherwise = match settings.get(keys::ENGINE_TYPE) {
        EngineFamily::Sglang => EventWire::Sglang,
        EngineFamily::Vllm | EngineFamily::Trtllm => EventWire::Vllm,
    };
    match settings.get(keys::EVENT_WIRE).unwrap_or(otherwise) {
        EventWire::Vllm => Dialect::Vllm24,
        EventWire::VllmBytes => Dialect::Vllm24Bytes,
        EventWire::Vllm20 => Dialect::Vllm20,
        EventWire::Vllm09 => Dialect::Vllm09,
        EventWire::Sglang => Dialect::SglangMap,
        EventWire::SglangArrays => Dialect::SglangArray,
    }
}

#[cfg(test)]
mod tests {
    use kvasir_config::{Environment, Invocation};

    use super::*;

    fn plan(args: &[&str]) -> Result<Option<Plan>, String> {
        let words = ["mocker"].iter().chain(args).map(|word| word.into());
        let no_file = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
        let parsed = kvasir_config::parse(words, &Environment::from_iter([("", "")]), no_file);
        let Invocation::Run(run) = parsed.map_err(|error| error.to_string())? else {
            return Err("nothing to run".to_owned());
        };
        Plan::read(&run.settings, "10.0.0.1").map_err(|error| error.to_string())
    }

    /// Where rank 1 of worker 1 is.
    fn second(args: &[&str]) -> (String, Option<String>) {
        let two = ["--workers", "2", "--data-parallel-size", "2"];
        let plan = plan(&[args, &two].concat()).unwrap().unwrap();
        let at = |first: &Endpoint| plan.shifted(first, 1, 1).unwrap().to_string();
        (at(&plan.events), plan.replay.as_ref().map(at))
    }

    #[test]
    fn three_ways_to_say_where() {
        assert_eq!(plan(&[]), Ok(None));
        let named = ["--events", "tcp://*:5557", "--replay", "tcp://*:6557"];
        let found = ("tcp://*:5560".into(), Some("tcp://*:6560".into()));
        assert_eq!(second(&named), found);
        let alone = ("tcp://*:5560".into(), None);
        assert_eq!(second(&["--events", "tcp://*:5557"]), alone);
        let short = ["--kv-events-port", "7000"];
        let found = (
            "tcp://10.0.0.1:7005".into(),
            Some("tcp://10.0.0.1:7007".into()),
        );
        assert_eq!(second(&short), found);
        let config =
            r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:1000", "topic": "t"}"#;
        let config = plan(&["--kv-events-config", config]).unwrap().unwrap();
        assert_eq!((config.events.port(), config.topic.as_str()), (1000, "t"));
        for off in [
            "{}",
            r#"{"enable_kv_cache_events": true, "publisher": "null"}"#,
        ] {
            assert_eq!(plan(&["--kv-events-config", off]), Ok(None));
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let both = ["--events", "tcp://*:5557", "--kv-events-port", "1"];
        assert!(plan(&both).unwrap_err().contains("in one way"));
        let alone = plan(&["--replay", "tcp://*:5557"]).unwrap_err();
        assert!(alone.contains("needs --events"), "{alone}");
        let near = [
            "--events",
            "tcp://*:5557",
            "--replay",
            "tcp://*:5558",
            "--workers",
            "2",
        ];
        let shared = plan(&near).unwrap_err();
        assert!(shared.contains("leave 2 ports between"), "{shared}");
        let high = ["--events", "tcp://*:65535", "--workers", "2"];
        assert!(plan(&high).unwrap_err().contains("would need port 65536"));
    }

    #[test]
    fn the_wire_follows_the_engine_unless_said() {
        let dialect = |args: &[&str]| {
            let args = [&["--events", "tcp://*:0"], args].concat();
            plan(&args).unwrap().unwrap().dialect
        };
        assert_eq!(dialect(&[]), Dialect::Vllm24);
        assert_eq!(dialect(&["--event-wire", "vllm-0.9"]), Dialect::Vllm09);
        assert_eq!(dialect(&["--engine-type", "sglang"]), Dialect::SglangMap);
    }
}
