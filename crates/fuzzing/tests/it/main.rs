//! What a fuzzer does, from a seed and bounded: every target over its kept inputs, as they are and changed.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use kvasir_fuzzing::{Mutator, TARGETS, Target};
use kvasir_index::Index;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

/// Inputs of one target.
const ROUNDS: u64 = 15_000;
/// Inputs of one target whose checks take longer.
const ROUNDS_SLOW: u64 = 1_500;
/// Of all inputs so many in a thousand must be accepted and so many refused: otherwise the changes do nothing.
const SHARE_MIN: u64 = 10;

fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).unwrap()
}

/// The kept inputs, in the order of their names.
fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
    let folder = PathBuf::from(root).join(target.name);
    let entries =
        std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// Checks one input; a failure shows it, so that it can be kept.
fn check(target: &Target, input: &[u8], what: &str) -> bool {
    catch_unwind(AssertUnwindSafe(|| (target.check)(input))).unwrap_or_else(|_| {
        let shown = input.escape_ascii();
        panic!("target {}, {what}: the input is b\"{shown}\"", target.name)
    })
}

fn run(name: &str, seed: u64, rounds: u64) {
    let target = target(name);
    let corpus = corpus(target);
    assert!(!corpus.is_empty());
    for (at, input) in corpus.iter().enumerate() {
        assert!(input.len() <= target.len_max);
        check(target, input, &format!("kept input {at}"));
    }
    let mut mutator = Mutator::new(seed, &corpus, target.words, target.len_max);
    let mut accepted = 0;
    for round in 0..rounds {
        let input = mutator.input();
        accepted += u64::from(check(
            target,
            &input,
            &format!("seed {seed}, round {round}"),
        ));
    }
    let refused = rounds - accepted;
    assert!(
        accepted.min(refused) * 1000 >= rounds * SHARE_MIN,
        "{name}: {accepted} accepted, {refused} refused: the changes do nothing"
    );
}

#[test]
fn answers_of_engines() {
    run("answer", 1, ROUNDS);
}

#[test]
fn texts_of_answers() {
    run("answer_text", 13, ROUNDS_SLOW);
}

#[test]
fn bodies_of_clients() {
    run("body", 2, ROUNDS);
}

#[test]
fn messages_of_the_event_plane() {
    run("event_plane", 11, ROUNDS);
}

#[test]
fn messages_of_event_sockets() {
    run("events", 3, ROUNDS);
}

#[test]
fn snapshots_of_the_index() {
    run("index_snapshot", 4, ROUNDS);
}

#[test]
fn messages_of_request_planes() {
    run("request_plane", 12, ROUNDS);
}

#[test]
fn snapshot_files() {
    run("snapshot", 5, ROUNDS);
}

#[test]
fn server_sent_events() {
    run("sse", 6, ROUNDS);
}

#[test]
fn chat_templates() {
    run("template", 7, ROUNDS_SLOW);
}

#[test]
fn workers_files() {
    run("workers_file", 8, ROUNDS);
}

/// The list has no target that is not run above, and `fuzz/` has each.
#[test]
fn every_target_is_run() {
    let tests = include_str!("main.rs");
    let fuzz = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz");
    let manifest = std::fs::read_to_string(format!("{fuzz}/Cargo.toml")).unwrap();
    for Target { name, .. } in TARGETS {
        assert!(tests.contains(&format!("run(\"{name}\"")), "{name}");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let source = std::fs::read_to_string(format!("{fuzz}/fuzz_targets/{name}.rs")).unwrap();
        assert!(source.contains(&format!("\"{name}\"")));
    }
}

/// A hundred times as many, for whoever changes a reader: `cargo test -p kvasir-fuzzing -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn very_many_inputs_by_seed() {
    for target in TARGETS {
        let rounds = if target.name == "template" {
            ROUNDS_SLOW
        } else {
            ROUNDS
        };
        for seed in 100..200 {
            run(target.name, seed, rounds);
        }
    }
}

/// Writes the kept inputs of `index_snapshot` anew, after a change of that form.
#[test]
#[ignore = "writes into the repository"]
fn keep_snapshots_of_the_index() {
    let index = Index::new();
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/seeds/index_snapshot"
    );
    std::fs::create_dir_all(folder).unwrap();
    let keep = |name: &str| {
        let bytes = index.snapshot().unwrap();
        std::fs::write(format!("{folder}/{name}"), bytes).unwrap();
    };
    keep("empty");
    let names = |from: u64, count: u64| (from..from + count).map(EngineHash);
    for (worker, rank, parent, from, count) in [
        (1, 0, None, 100, 6),
        (1, 0, Some(103), 200, 3),
        (2, 1, None, 100, 4),
        (3, 0, None, 500, 2),
    ] {
        let block = |engine: EngineHash| StoredBlock {
            engine,
            local: LocalHash(engine.0 * 7),
        };
        let stored = KvEvent::Stored {
            tier: if worker == 3 {
                Tier::HostPinned
            } else {
                Tier::Device
            },
            parent: parent.map(EngineHash),
            blocks: names(from, count).map(block).collect(),
        };
        index.apply(WorkerRank::new(worker, rank), &stored).unwrap();
        keep(&format!("after-{worker}-{from}"));
    }
    let removed = KvEvent::Removed {
        tier: Tier::Device,
        blocks: names(104, 2).collect(),
    };
    index.apply(WorkerRank::new(1, 0), &removed).unwrap();
    keep("removed");
}
