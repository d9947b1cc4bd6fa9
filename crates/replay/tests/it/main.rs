//! Replays from options to reports.

mod split;

use expect_test::{Expect, expect};
use kvasir_config::{Command, Environment, Invocation, Settings, keys, parse};
use kvasir_index::{Approximate, IndexOptions};
use kvasir_replay::{
    Comparison, Plan, ReplayError, RunResult, html_report, json_report, run_all, text_table,
};
use kvasir_router::RouterConfig;
use serde_json::Value;

/// The few settings that these tests vary.
fn wiring(settings: &Settings, block_size: u32) -> Result<(RouterConfig, IndexOptions), String> {
    let mut router = RouterConfig {
        kv_cache_block_size: block_size,
        ..RouterConfig::default()
    };
    router.router_mode = settings.get(keys::ROUTER_MODE);
    router.router_prefill_load_scale = settings.get(keys::ROUTER_PREFILL_LOAD_SCALE);
    router.router_kv_events = settings.get(keys::ROUTER_KV_EVENTS);
    let approximate = (!router.router_kv_events).then(Approximate::default);
    let index = IndexOptions {
        approximate,
        ..IndexOptions::default()
    };
    Ok((router, index))
}

fn plan(words: &[&str]) -> Result<Plan, ReplayError> {
    let all = ["replay"].iter().chain(words).map(|word| (*word).into());
    let no_file = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
    match parse(all, &Environment::from_iter([("", ""); 0]), no_file) {
        Ok(Invocation::Run(run)) => {
            assert_eq!(run.command, Command::Replay);
            Plan::from_settings(&run.settings, &wiring)
        }
        other => panic!("{other:?}"),
    }
}

fn play(words: &[&str]) -> (Plan, Vec<RunResult>) {
    let plan = match plan(words) {
        Ok(plan) => plan,
        Err(error) => panic!("{error}"),
    };
    match run_all(&plan, false) {
        Ok(finished) => (plan, finished),
        Err(error) => panic!("{error}"),
    }
}

const SMALL: [&str; 10] = [
    "--workload",
    "chat,sessions=20,turns=3,rate=4,system=600,output=30",
    "--workers",
    "2",
    "--num-blocks",
    "3000",
    "--speed",
    "1,4",
    "--policy",
    "round-robin",
];

fn small(more: &[&'static str]) -> (Plan, Vec<RunResult>) {
    let words: Vec<&str> = SMALL.iter().chain(more).copied().collect();
    play(&words)
}

/// The JSON of a run without what may differ.
fn without_wall(text: &str) -> Value {
    let mut value: Value = serde_json::from_str(text).unwrap_or_default();
    for run in value["runs"].as_array_mut().into_iter().flatten() {
        assert!(run["wall_s"].as_f64().is_some());
        run["wall_s"] = Value::Null;
    }
    value
}

/// Two times, with one and with three threads: the same table, page and numbers.
#[test]
fn a_seed_is_a_report_whatever_the_threads() {
    let more = ["--policy", "kv", "--seeds", "2"];
    let (plan, one) = small(&[&more[..], &["--jobs", "1"]].concat());
    let (_, three) = small(&[&more[..], &["--jobs", "3"]].concat());
    assert_eq!(one.len(), 2 * 2 * 2);
    let [a, b] = [&one, &three].map(|runs| Comparison::new(&plan, runs));
    assert_eq!(text_table(&a), text_table(&b));
    assert_eq!(html_report(&plan, &a, &one), html_report(&plan, &b, &three));
    let [a, b] = [&one, &three].map(|runs| without_wall(&json_report(&plan, runs)));
    assert_eq!(a, b);
}

#[test]
fn the_document_has_the_promised_fields() {
    let (plan, finished) = small(&["--policy", "kv,router-prefill-load-scale=16"]);
    let document: Value = serde_json::from_str(&json_report(&plan, &finished)).unwrap_or_default();
    let runs = document["runs"].as_array().map_or(0, Vec::len);
    assert_eq!(runs, 4);
    let run = &document["runs"][1];
    assert_eq!(run["policy"], "kv,router-prefill-load-scale=16");
    assert_eq!(
        (&run["speed"], &run["workers"], &run["seed"]),
        (&1.0.into(), &2.into(), &0.into())
    );
    assert_eq!(
        (&run["requests"], &run["completed"]),
        (&60.into(), &60.into())
    );
    for summary in ["ttft_ms", "itl_ms", "e2e_ms", "queue_ms"] {
        for field in ["mean", "p50", "p90", "p99"] {
            assert!(run[summary][field].is_number(), "{summary}.{field}");
        }
    }
    let numbers = [
        "hit_share",
        "ideal_hit_share",
        "output_tokens_per_s",
        "goodput_share",
        "imbalance",
        "preemptions",
        "wall_s",
    ];
    assert!(numbers.iter().all(|field| run[field].is_number()), "{run}");
    assert!(run["hit_share"].as_f64() <= run["ideal_hit_share"].as_f64());
}

/// The table's shape; its numbers are the engine's and the router's affair.
#[test]
fn the_table_marks_the_best_and_compares_with_the_baseline() {
    let (plan, finished) = small(&["--policy", "least-loaded", "--baseline", "least-loaded"]);
    let text = text_table(&Comparison::new(&plan, &finished));
    let shape: Vec<String> = text
        .lines()
        .map(|line| {
            let digits = line.replace(|c: char| c.is_ascii_digit(), "9");
            let words: Vec<&str> = digits.split_whitespace().collect();
            words.first().copied().unwrap_or_default().to_owned()
        })
        .collect();
    assert_eq!(
        shape.iter().filter(|word| *word == "round-robin").count(),
        2,
        "{text}"
    );
    assert!(
        text.contains("speed 1\n") && text.contains("speed 4\n"),
        "{text}"
    );
    assert!(
        text.contains('*') && text.contains("relative to least-loaded"),
        "{text}"
    );
    assert!(
        text.lines().all(|line| line.chars().count() <= 170),
        "{text}"
    );
}

#[test]
fn a_policy_that_served_nothing_has_no_figures_and_is_never_the_best() {
    let (plan, finished) = small(&["--policy", "direct"]);
    let comparison = Comparison::new(&plan, &finished);
    let text = text_table(&comparison);
    let rows: Vec<&str> = text
        .lines()
        .filter(|line| line.trim_start().starts_with("direct "))
        .collect();
    assert!(!rows.is_empty(), "{text}");
    for row in rows {
        assert!(!row.contains('*') && row.contains(" - "), "{row}");
    }
    assert!(text.contains("direct: "), "{text}");
}

#[test]
fn the_page_stands_alone() {
    let (plan, finished) = small(&["--policy", "kv"]);
    let text = html_report(&plan, &Comparison::new(&plan, &finished), &finished);
    for absent in [
        "http://", "https://", "<script", "url(", "@import", "NaN", "inf",
    ] {
        assert!(!text.contains(absent), "{absent}");
    }
    for id in [
        "ttft-cdf-0",
        "ttft-cdf-1",
        "hits-0",
        "loads-0-0",
        "loads-1-1",
        "throughput-latency",
    ] {
        assert!(text.contains(&format!("<figure id=\"{id}\"><svg")), "{id}");
    }
    assert_eq!(text.matches("<svg").count(), text.matches("</svg>").count());
}

#[test]
fn a_closed_loop_is_a_level_of_its_own() {
    let words = [
        &SMALL[..6],
        &["--closed-loop", "2,5", "--think-ms", "10", "--policy", "kv"],
    ]
    .concat();
    let (plan, finished) = play(&words);
    let text = text_table(&Comparison::new(&plan, &finished));
    assert!(
        text.contains("2 clients, thinking 10 ms") && text.contains("5 clients"),
        "{text}"
    );
    let document: Value = serde_json::from_str(&json_report(&plan, &finished)).unwrap_or_default();
    assert_eq!(
        (
            &document["runs"][1]["clients"],
            &document["runs"][1]["speed"]
        ),
        (&5.into(), &Value::Null)
    );
}

fn refuse(words: &[&str], expect: &Expect) {
    let error = match plan(words) {
        Ok(_) => panic!("{words:?} were taken"),
        Err(error) => error,
    };
    assert_eq!(error.exit_code(), 2);
    expect.assert_eq(&error.to_string());
}

#[test]
fn what_cannot_be_replayed_is_said() {
    let dir = std::env::temp_dir().join(format!("kvasir-replay-{}", std::process::id()));
    assert!(std::fs::create_dir_all(&dir).is_ok());
    let bad = dir.join("bad.jsonl");
    assert!(std::fs::write(&bad, "{\"timestamp\":0,\"hash_ids\":[1]}\n").is_ok());
    let told = |error: ReplayError| error.to_string().replace(&*dir.to_string_lossy(), "DIR");
    let error = plan(&["--trace", &bad.to_string_lossy()]).err().map(told);
    expect!["--trace DIR/bad.jsonl: line 1: `input_length` is missing"]
        .assert_eq(&error.unwrap_or_default());
    let none = dir.join("none.jsonl");
    let error = plan(&["--trace", &none.to_string_lossy()]).err().map(told);
    expect!["--trace DIR/none.jsonl: No such file or directory (os error 2)"]
        .assert_eq(&error.unwrap_or_default());
    assert!(std::fs::remove_dir_all(&dir).is_ok());

    refuse(
        &[],
        &expect!["nothing to replay; give --trace FILE, or --workload such as chat"],
    );
    refuse(
        &["--workload", "chat", "--trace", "x"],
        &expect!["--trace and --workload are both given; give one of them"],
    );
    refuse(
        &["--workload", "chats"],
        &expect![
            "--workload: there is no workload `chats`; there are tenants, chat, agents and documents"
        ],
    );
    refuse(
        &["--workload", "chat,turn=3"],
        &expect![
            "--workload: workload `chat` has no setting `turn`; it has sessions, rate, system, user, output, tenants, turns, think-ms"
        ],
    );
    refuse(
        &["--workload", "chat,turns=-3"],
        &expect!["--workload: `-3` is no value of `turns`: a number above 0 is needed"],
    );
    refuse(
        &["--workload", "chat", "--policy", "kv,router-temprature=1"],
        &expect![[r#"
            error: unknown option `router-temprature` (policy kv,router-temprature=1). Did you mean `router-temperature`?
            More: kvasir replay --help"#]],
    );
    refuse(
        &["--workload", "chat", "--baseline", "kvv"],
        &expect![
            "--baseline kvv is not a policy of this run; they are `round-robin`, `random`, `least-loaded`, `kv`"
        ],
    );
    refuse(
        &["--workload", "chat", "--worker-leaves", "8@5"],
        &expect!["--worker-leaves 8@5: there is no worker 8; workers are 0 to 7"],
    );
    refuse(
        &["--workload", "chat", "--max-model-len", "900000"],
        &expect![
            "engine: the pool holds 769328 tokens and a request may have 900000; raise num_blocks or lower max_model_len"
        ],
    );
}

/// A fleet that loses and gains workers still completes everything.
#[test]
fn workers_may_leave_and_join() {
    let (_, finished) = small(&[
        "--policy",
        "kv",
        "--worker-leaves",
        "0@3",
        "--worker-joins",
        "2@4",
    ]);
    for run in &finished {
        assert_eq!(
            run.report.counts.completed, run.report.requests,
            "{:?}",
            run.report.counts
        );
    }
    assert!(finished.iter().any(|run| run.report.retries > 0));
}
