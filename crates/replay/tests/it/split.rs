//! Engines that compute prompts for others: every split is a row, and the best is named.

use kvasir_replay::{Comparison, ReplayError, html_report, json_report, text_table};
use serde_json::Value;

use crate::{plan, play};

const WORDS: [&str; 8] = [
    "--workload",
    "documents,requests=40,rate=4,documents=6,output=40",
    "--num-blocks",
    "9000",
    "--policy",
    "kv",
    "--speed",
    "1,3",
];

fn words(more: &[&'static str]) -> Vec<&'static str> {
    WORDS.iter().chain(more).copied().collect()
}

/// Two engines compute prompts and four answer: beside them six that do both, and the same on condition.
#[test]
fn a_split_is_compared_with_engines_that_do_both() {
    let (plan, finished) = play(&words(&["--workers", "4", "--prefill-workers", "2"]));
    let names: Vec<&str> = plan.policies.iter().map(|p| p.name.as_str()).collect();
    let expected = ["kv · 6 aggregated", "kv · 2+4", "kv · 2+4 conditional"];
    assert_eq!(names, expected);
    let comparison = Comparison::new(&plan, &finished);
    assert_eq!(comparison.verdict.len(), 2);
    for (line, speed) in comparison.verdict.iter().zip(["speed 1: ", "speed 3: "]) {
        assert!(
            line.starts_with(speed) && line.contains(" is best: "),
            "{line}"
        );
        assert!(
            line.contains("6 aggregated") && line.contains("2+4"),
            "{line}"
        );
        assert!(text_table(&comparison).contains(line), "{line}");
        assert!(
            html_report(&plan, &comparison, &finished).contains(line),
            "{line}"
        );
    }
    assert!(
        comparison.subtitle.contains("6 × "),
        "{}",
        comparison.subtitle
    );
    let document: Value = serde_json::from_str(&json_report(&plan, &finished)).unwrap_or_default();
    let sizes = |at: usize| {
        let run = &document["runs"][at];
        (run["prefill_workers"].clone(), run["workers"].clone())
    };
    assert_eq!(sizes(0), (0.into(), 6.into()));
    assert_eq!(sizes(1), (2.into(), 4.into()));
}

#[test]
fn every_split_of_the_engines_can_be_compared() {
    let plan = plan(&words(&["--workers", "3", "--prefill-workers", "all"])).unwrap();
    let names: Vec<String> = plan.splits.iter().map(kvasir_replay::Split::name).collect();
    let expected = [
        "3 aggregated",
        "1+2",
        "1+2 conditional",
        "2+1",
        "2+1 conditional",
    ];
    assert_eq!(names, expected);
}

#[test]
fn one_engine_cannot_be_split_and_nobody_leaves_a_pool() {
    let told = |more: &[&'static str]| match plan(&words(more)) {
        Err(error @ ReplayError::Options(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let one = told(&["--workers", "1", "--prefill-workers", "all"]);
    assert!(one.contains("give 2 or more"), "{one}");
    let plan = plan(&words(&[
        "--prefill-workers",
        "2",
        "--worker-leaves",
        "0@1",
    ]))
    .unwrap();
    let error = kvasir_replay::run_all(&plan, false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a worker that leaves or joins cannot be simulated"),
        "{error}"
    );
}
