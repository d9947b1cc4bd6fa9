//! The public interface against recorded answers of real servers, and against noise.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod dynamo;
mod noise;
mod strict;
mod vllm;

use serde::Deserialize;

/// One exchange with a real server.
#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(default)]
    request: String,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body: String,
    status: u16,
    answer: String,
}

fn cases(folder: &str) -> Vec<Case> {
    let path = format!(
        "{}/../../testdata/{folder}/cases.jsonl",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = std::fs::read_to_string(&path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn case(folder: &str, name: &str) -> Case {
    cases(folder).into_iter().find(|c| c.name == name).unwrap()
}
