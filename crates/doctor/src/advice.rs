//! The exact words to change, made from what was seen.

use kvasir_transport::zmq::Endpoint;
use kvasir_types::{EventFeed, WorkerRecord};
use kvasir_upstream::{EngineKind, EventSource};
use serde::Serialize;

use crate::finding::{Advice, AdviceTarget};
use crate::observations::Observations;

/// Advice for the engine's command line.
pub(crate) fn engine(args: &[&str], text: impl Into<String>) -> Advice {
    made(AdviceTarget::Engine, args, text)
}

/// Advice for Kvasir's command line.
pub(crate) fn kvasir(args: &[&str], text: impl Into<String>) -> Advice {
    made(AdviceTarget::Kvasir, args, text)
}

fn made(whose: AdviceTarget, args: &[&str], text: impl Into<String>) -> Advice {
    Advice {
        whose,
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        text: text.into(),
    }
}

/// `--kv-events-config`, its fields in the order of vLLM's own documents. SGLang's has no switch: a publisher is one.
#[derive(Serialize)]
struct EventsConfig<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_kv_cache_events: Option<bool>,
    publisher: &'a str,
    endpoint: &'a str,
    replay_endpoint: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    topic: &'a str,
}

/// Has the engine publish, with replay. What it has already stays as it is.
pub(crate) fn publish(observed: &Observations, text: impl Into<String>) -> Advice {
    let (events, replay) = free_sockets(observed);
    let known = observed.facts.events.get(&0);
    let events = known.map_or(events, |k| k.events.clone());
    let replay = known.and_then(|k| k.replay.clone()).unwrap_or_else(|| {
        let after = |e: Endpoint| {
            let port = u32::from(e.port()).saturating_add(ranks(observed));
            u16::try_from(port).ok().map(|p| e.with_port(p).to_string())
        };
        let next = known.and_then(|k| after(k.events.parse().ok()?));
        next.unwrap_or(replay)
    });
    let config = EventsConfig {
        enable_kv_cache_events: (kind(observed) != EngineKind::Sglang).then_some(true),
        publisher: "zmq",
        endpoint: &events,
        replay_endpoint: &replay,
        topic: known.map_or("", |k| k.topic.as_str()),
    };
    let json = serde_json::to_string(&config).unwrap_or_default();
    engine(&["--kv-events-config", &json], text)
}

/// Gives the engine blocks of another size.
pub(crate) fn resize(observed: &Observations, size: u32, text: &str) -> Advice {
    let size = size.to_string();
    match kind(observed) {
        EngineKind::Sglang => engine(&["--page-size", &size], text),
        EngineKind::TensorRt => in_file(&format!(
            "`kv_cache_config: {{tokens_per_block: {size}}}`, {text}"
        )),
        _ => engine(&["--block-size", &size], text),
    }
}

/// Has the engine keep prefixes.
pub(crate) fn keep_prefixes(observed: &Observations) -> Advice {
    match kind(observed) {
        EngineKind::Sglang => engine(&[], "start it without --disable-radix-cache"),
        EngineKind::TensorRt => in_file("`kv_cache_config: {enable_block_reuse: true}`"),
        _ => engine(&["--enable-prefix-caching"], "turn it on"),
    }
}

/// Has the engine say in `usage` how much of a prompt it found in its cache.
pub(crate) fn report_hits(observed: &Observations) -> Advice {
    let text = "have it report prompt_tokens_details, by which predictions are judged";
    match kind(observed) {
        EngineKind::Sglang => engine(&["--enable-cache-report"], text),
        EngineKind::TensorRt => engine(&[], "a release that reports prompt_tokens_details"),
        _ => engine(&["--enable-prompt-tokens-details"], text),
    }
}

/// What stands in the file of settings of `trtllm-serve`, which has no flag for it.
fn in_file(text: &str) -> Advice {
    engine(&["--extra_llm_api_options", "FILE"], format!("with {text}"))
}

fn kind(observed: &Observations) -> EngineKind {
    observed.facts.kind
}

/// Lets the engine publish at other ports, as another process has its own.
pub(crate) fn publish_elsewhere(observed: &Observations, text: impl Into<String>) -> Advice {
    /// Far enough for the ranks of a usual engine.
    const PORTS_FURTHER: u16 = 100;
    let mut observed = observed.clone();
    for source in observed.facts.events.values_mut() {
        let further = |text: &str| {
            let endpoint: Endpoint = text.parse().ok()?;
            let port = endpoint.port().checked_add(PORTS_FURTHER)?;
            Some(endpoint.with_port(port).to_string())
        };
        source.events = further(&source.events).unwrap_or_default();
        source.replay = source.replay.as_deref().and_then(further);
    }
    publish(&observed, text)
}

/// Sockets for an engine that has none: on its own machine only, if that is where it is asked.
fn free_sockets(observed: &Observations) -> (String, String) {
    let host = observed.target.endpoint.host.as_str();
    let local = ["localhost", "127.0.0.1", "::1"].contains(&host);
    let host = match local {
        true if host == "::1" => "::1",
        true => "127.0.0.1",
        false => "*",
    };
    let port = observed.free_event_port;
    let next = u32::from(port).saturating_add(ranks(observed));
    let next = u16::try_from(next).unwrap_or(u16::MAX);
    let at = |port| Endpoint::new(host, port).to_string();
    (at(port), at(next))
}

fn ranks(observed: &Observations) -> u32 {
    let configured = observed.target.worker.ranks;
    configured.or(observed.facts.ranks).unwrap_or(1).max(1)
}

/// What `--worker` is to say, with other sockets.
pub(crate) fn with_sockets(
    observed: &Observations,
    source: &EventSource,
    text: impl Into<String>,
) -> Advice {
    let mut configured = observed.target.worker.clone();
    configured.events = EventFeed::Sockets {
        publish: Some(source.events.clone()),
        replay: source.replay.clone(),
    };
    worker(&configured, text)
}

/// The same for an engine that does not say where its sockets are.
pub(crate) fn with_free_sockets(observed: &Observations, text: impl Into<String>) -> Advice {
    let (events, replay) = free_sockets(observed);
    let host = &observed.target.endpoint.host;
    let there = |endpoint: &str| endpoint.replacen('*', host, 1);
    let source = EventSource {
        events: there(&events),
        replay: Some(there(&replay)),
        topic: String::new(),
    };
    with_sockets(observed, &source, text)
}

/// What `--worker` is to say, with another block size.
pub(crate) fn with_block_size(
    observed: &Observations,
    size: u32,
    text: impl Into<String>,
) -> Advice {
    if observed.target.block_size.is_some() {
        return kvasir(&["--kv-cache-block-size", &size.to_string()], text);
    }
    let mut configured = observed.target.worker.clone();
    configured.block_size = Some(size);
    worker(&configured, text)
}

fn worker(configured: &WorkerRecord, text: impl Into<String>) -> Advice {
    let mut words = configured.transport.to_string();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            words = format!("{words},{name}={value}");
        }
    };
    add("block-size", configured.block_size.map(|n| n.to_string()));
    add(
        "kv-blocks",
        configured.capacity.kv_blocks.map(|n| n.to_string()),
    );
    let tokens = configured.capacity.max_num_batched_tokens;
    add("max-num-batched-tokens", tokens.map(|n| n.to_string()));
    let ranks = configured.ranks;
    add("data-parallel-size", ranks.map(|n| n.to_string()));
    add("events", configured.events.publish().map(Into::into));
    add("replay", configured.events.replay().map(Into::into));
    let key = configured
        .transport
        .http()
        .and_then(|http| http.api_key.as_ref());
    add("api-key-file", key.map(|_| "FILE".to_owned()));
    kvasir(&["--worker", &words], text)
}

/// A word as a shell wants it.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("--block-size"), "--block-size");
        assert_eq!(quoted(r#"{"a": 1}"#), r#"'{"a": 1}'"#);
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("tcp://*:5557"), "'tcp://*:5557'");
        assert_eq!(quoted(""), "''");
    }
}
