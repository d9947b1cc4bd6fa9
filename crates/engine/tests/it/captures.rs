//! The same requests and the same capacity must give the events that vLLM 0.32.0 sent, batch by batch.
//!
//! vLLM's names for blocks are its own: a name of ours must always stand for the same name of theirs,
//! and the other way round. Not compared: the recording with sliding-window layers (the model has one
//! kind of attention) and time.

#![expect(clippy::unwrap_used, reason = "a broken fixture is a failed test")]

use std::collections::HashMap;
use std::path::PathBuf;

use kvasir_engine::{Engine, EngineConfig, EngineRequest, OutputTokens, Prompt, Step};
use kvasir_hash::Scope;
use kvasir_types::{EngineHash, KvEvent, RequestId, Token};
use serde_json::Value;

const BLOCK_SIZE: u32 = 32;

/// One change of one block, in a form that both sides have.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change<Name> {
    Stored {
        parent: Option<Name>,
        name: Name,
        tokens: Vec<Token>,
    },
    Removed(Name),
    Cleared,
}

fn lines(folder: &str, file: &str) -> Vec<Value> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/vllm-kv-events");
    let text = std::fs::read_to_string(PathBuf::from(root).join(folder).join(file)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn numbers(value: &Value) -> Vec<Token> {
    let list = value.as_array().into_iter().flatten();
    list.map(|n| n.as_u64().unwrap() as Token).collect()
}

/// The recorded batches: sequence number and changes.
fn recorded(folder: &str) -> Vec<(u64, Vec<Change<String>>)> {
    let read = |line: &Value| {
        let events = line["batch"][1].as_array().unwrap();
        let changes = events.iter().flat_map(recorded_changes).collect();
        (line["seq"].as_u64().unwrap(), changes)
    };
    lines(folder, "decoded.jsonl").iter().map(read).collect()
}

fn recorded_changes(event: &Value) -> Vec<Change<String>> {
    let names: Vec<String> = event["block_hashes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(Value::to_string)
        .collect();
    match event["type"].as_str().unwrap() {
        "BlockStored" => {
            let tokens = numbers(&event["token_ids"]);
            let mut parent = Some(event["parent_block_hash"].to_string()).filter(|p| p != "null");
            let mut changes = Vec::new();
            for (name, tokens) in names.into_iter().zip(tokens.chunks(BLOCK_SIZE as usize)) {
                let next = Some(name.clone());
                let tokens = tokens.to_vec();
                changes.push(Change::Stored {
                    parent,
                    name,
                    tokens,
                });
                parent = next;
            }
            changes
        }
        "BlockRemoved" => names.into_iter().map(Change::Removed).collect(),
        "AllBlocksCleared" => vec![Change::Cleared],
        other => panic!("unknown event {other}"),
    }
}

fn our_changes(step: &Step) -> Vec<Change<EngineHash>> {
    let mut changes = Vec::new();
    for event in &step.events {
        match &event.event {
            KvEvent::Stored { parent, blocks, .. } => {
                let mut parent = *parent;
                for (block, tokens) in blocks.iter().zip(event.tokens.chunks(BLOCK_SIZE as usize)) {
                    let (name, tokens) = (block.engine, tokens.to_vec());
                    changes.push(Change::Stored {
                        parent,
                        name,
                        tokens,
                    });
                    parent = Some(name);
                }
            }
            KvEvent::Removed { blocks, .. } => {
                changes.extend(blocks.iter().map(|name| Change::Removed(*name)));
            }
            KvEvent::Cleared { .. } => changes.push(Change::Cleared),
        }
    }
    changes
}

/// Drives the model with a recorded session.
struct Session {
    engine: Engine,
    batches: Vec<Vec<Change<EngineHash>>>,
    /// Cached tokens that the model found, by request.
    cached: HashMap<RequestId, u32>,
}

impl Session {
    fn new() -> Self {
        let engine = Engine::new(EngineConfig {
            block_size: BLOCK_SIZE,
            num_blocks: 150,
            max_num_seqs: 8,
            max_num_batched_tokens: 2048,
            max_model_len: 2048,
            event_tokens: true,
            ..EngineConfig::default()
        });
        Self {
            engine: engine.unwrap(),
            batches: Vec::new(),
            cached: HashMap::new(),
        }
    }

    fn admit(&mut self, request: &Value) -> RequestId {
        let id = RequestId(request["n"].as_u64().unwrap().into());
        let (tokens, body) = (numbers(&request["prompt_token_ids"]), &request["body"]);
        let scope = Scope {
            salt: body["cache_salt"].as_str().unwrap_or_default(),
            ..Scope::default()
        };
        let answer = match numbers(&request["output_token_ids"]) {
            none if none.is_empty() => OutputTokens::Seeded {
                seed: 1,
                vocabulary: 1000,
            },
            tokens => OutputTokens::Given(tokens.into()),
        };
        let admitted = self.engine.admit(EngineRequest {
            id,
            prompt: Prompt::new(&tokens, BLOCK_SIZE, &scope).keep_tokens(tokens.into()),
            output: answer,
            max_tokens: body["max_tokens"].as_u64().unwrap() as u32,
            priority: 0,
            announce_hits: body["vllm_xargs"]["kv_cache_report_mode"] == "full",
        });
        admitted.unwrap();
        id
    }

    fn step(&mut self) {
        let mut step = Step::default();
        self.engine.step(&mut step);
        self.engine.verify();
        self.cached
            .extend(step.started.iter().map(|s| (s.id, s.cached_tokens)));
        let changes = our_changes(&step);
        if !changes.is_empty() {
            self.batches.push(changes);
        }
    }

    fn finish(&mut self) {
        while !self.engine.is_idle() {
            self.step();
        }
    }

    /// Compares the last batches with the recorded ones, and the cached tokens with the usage.
    fn compare(&self, folder: &str, skipped: usize) {
        let theirs = recorded(folder);
        let ours = &self.batches[skipped..];
        let (mut there, mut back) = (HashMap::new(), HashMap::new());
        let mut same = |ours: EngineHash, theirs: &String, seq: u64| {
            let known = there.entry(ours).or_insert_with(|| theirs.clone());
            assert_eq!(known, theirs, "{folder}, batch {seq}: two names for {ours}");
            let known = back.entry(theirs.clone()).or_insert(ours);
            assert_eq!(
                *known, ours,
                "{folder}, batch {seq}: {theirs} means two blocks"
            );
        };
        for ((seq, theirs), ours) in theirs.iter().zip(ours) {
            assert_eq!(theirs.len(), ours.len(), "{folder}, batch {seq}: {ours:?}");
            for (theirs, ours) in theirs.iter().zip(ours) {
                match (ours, theirs) {
                    (Change::Cleared, Change::Cleared) => {}
                    (Change::Removed(ours), Change::Removed(theirs)) => same(*ours, theirs, *seq),
                    (
                        Change::Stored {
                            parent,
                            name,
                            tokens,
                        },
                        Change::Stored {
                            parent: their_parent,
                            name: their_name,
                            tokens: their_tokens,
                        },
                    ) => {
                        assert_eq!(tokens, their_tokens, "{folder}, batch {seq}");
                        assert_eq!(parent.is_some(), their_parent.is_some(), "{folder} {seq}");
                        if let (Some(ours), Some(theirs)) = (parent, their_parent) {
                            same(*ours, theirs, *seq);
                        }
                        same(*name, their_name, *seq);
                    }
                    _ => panic!("{folder}, batch {seq}: {ours:?} is not {theirs:?}"),
                }
            }
        }
        assert_eq!(ours.len(), theirs.len(), "{folder}: number of batches");
        for request in lines(folder, "requests.jsonl") {
            let id = RequestId(request["n"].as_u64().unwrap().into());
            let details = &request["usage"]["prompt_tokens_details"]["cached_tokens"];
            let Some(theirs) = details.as_u64() else {
                continue;
            };
            assert_eq!(
                self.cached.get(&id).map(|c| u64::from(*c)),
                Some(theirs),
                "{folder} {id}"
            );
        }
    }
}

fn requests_as_sent(folder: &str) -> Vec<Value> {
    let mut requests = lines(folder, "requests.jsonl");
    if requests.iter().all(|r| r["t_sent"].is_number()) {
        let sent = |r: &Value| (r["t_sent"].as_f64().unwrap() * 1e6) as u64;
        requests.sort_by_key(sent);
    }
    requests
}

/// Shared prefixes, turns, repeats, salt, concurrency, eviction, alignment, reset. Of the four prompts
/// sent at once the first `earlier` were scheduled a step before the others, and in the order `came`:
/// that was chance, and the events show it.
fn whole_session(folder: &str, came: [&str; 4], earlier: usize) {
    let mut session = Session::new();
    let mut concurrent = 0;
    let mut requests = requests_as_sent(folder);
    let note = |r: &Value| r["note"].as_str().unwrap().to_owned();
    let first = requests
        .iter()
        .position(|r| came.contains(&note(r).as_str()))
        .unwrap();
    requests[first..first + 4].sort_by_key(|r| came.iter().position(|n| *n == note(r)));
    for request in requests {
        if request["path"] == "/reset_prefix_cache" {
            session.finish();
            assert!(session.engine.clear_cache());
            continue;
        }
        let at_once = request["note"].as_str().unwrap().starts_with("concurrent");
        if !at_once || concurrent == 0 {
            session.finish();
        }
        session.admit(&request);
        concurrent += usize::from(at_once);
        if at_once && concurrent == earlier {
            session.step();
        }
    }
    session.finish();
    session.compare(folder, 0);
}

#[test]
fn a_whole_session_gives_the_recorded_events() {
    let came = [
        "concurrent 0",
        "concurrent 1",
        "concurrent 2",
        "concurrent 3",
    ];
    whole_session("int-sha256", came, 1);
}

#[test]
fn a_session_with_byte_names_gives_the_recorded_events() {
    let came = [
        "concurrent 2",
        "concurrent 1",
        "concurrent 0",
        "concurrent 3",
    ];
    whole_session("bytes-sha256_cbor", came, 3);
}

/// Identical prompts at once, eviction, and a client that leaves mid-stream. Its first two batches were
/// sent before the subscriber came.
#[test]
fn duplicates_and_an_abort_give_the_recorded_events() {
    let folder = "int-sha256-duplicates";
    let mut session = Session::new();
    let mut identical = 0;
    for request in requests_as_sent(folder) {
        let note = request["note"].as_str().unwrap();
        let at_once = note.starts_with("identical concurrent");
        if !at_once || identical == 0 {
            session.finish();
        }
        identical += usize::from(at_once);
        let id = session.admit(&request);
        if note.starts_with("stream aborted") {
            (0..20).for_each(|_| session.step());
            assert!(session.engine.cancel(id));
            assert!(session.engine.is_idle());
            session.engine.verify();
        }
    }
    session.compare(folder, 2);
}

/// A prompt of whole blocks is stored once more each time it is asked, and removed as often.
#[test]
fn block_aligned_prompts_give_the_recorded_events() {
    let folder = "int-sha256-aligned";
    let mut session = Session::new();
    assert!(session.engine.clear_cache());
    for request in requests_as_sent(folder) {
        session.admit(&request);
        session.finish();
    }
    session.compare(folder, 0);
}
