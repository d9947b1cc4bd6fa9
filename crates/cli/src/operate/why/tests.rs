//! What people read about a decision, from bodies as the frontend writes them.

use expect_test::expect;
use serde_json::json;

use super::*;

const NOW_MS: u64 = 1_794_728_412_345;

fn decision() -> Value {
    let terms = |raw: f64, credit: f64, decode: f64, cached: f64| {
        json!({"raw_prefill_blocks": raw, "credit_blocks": credit, "prefill_blocks": raw - credit,
               "decode_blocks": decode, "request_cost": 0.0, "taint_factor": 1.0, "cached_blocks": cached,
               "cost": raw - credit + decode})
    };
    json!({
        "id": "7d9f3c1e-0000-4000-8000-000000000001", "at": 1, "at_unix_ms": NOW_MS - 61_000, "model": "tiny",
        "queued": {"secs": 0, "nanos": 12_500_000}, "mode": "kv", "isl_tokens": 1600, "request_blocks": 100,
        "block_size": 16, "prefill_load_scale": 1.0, "temperature": 0.0, "eligible": 2,
        "candidates": [
            {"rank": {"worker": 11, "rank": 0}, "terms": terms(100.0, 90.0, 4.0, 90.0)},
            {"rank": {"worker": 12, "rank": 1}, "terms": terms(102.5, 0.0, 0.0, 0.0)},
        ],
        "candidate_urls": ["http://a:8000", "http://b:8000"],
        "excluded": {"count": 2, "named": [[{"worker": 13, "rank": 0}, "busy"]]},
        "winner": [{"worker": 11, "rank": 0}, "lowest_cost"], "error": null,
        "outcome": {"client_request_id": "mine\u{1b}[2J", "status": 200, "worker": 11, "rank": 0,
            "prompt_tokens": 1600, "predicted_cached_tokens": 1440, "reported_cached_tokens": 1424,
            "output_tokens": 12, "ttft_ms": 34.4, "total_ms": 180.2},
    })
}

#[test]
fn a_decision_in_full() {
    expect![[r#"
        request    7d9f3c1e-0000-4000-8000-000000000001
        model      tiny
        when       2026-11-15 07:39:11.345 UTC, 61 s ago
        prompt     1,600 tokens, 100 blocks of 16
        mode       kv; it waited 12 ms in the queue
        went to    worker 11/0 at http://a:8000: lowest cost of 2
        left out   13/0 (busy) and 1 more
        called     mine[2J by its client
        predicted  1,440 tokens cached, 90%
        reported   1,424 of 1,600 tokens cached, 89%; 16 fewer than predicted
        answer     status 200, 12 tokens, the first after 34 ms, all after 180 ms

           WORKER   COST  PROMPT  CREDIT  DECODE  REQUESTS  TAINTS  CACHED  URL
        >  11/0       14     100      90       4         0       1      90  http://a:8000
           12/1    102.5   102.5       0       0         0       1       0  http://b:8000

        In blocks; the lowest cost wins: cost = (1 x max(0, prompt - credit) + decode + requests) x taints.
        PROMPT is what waits there plus this prompt, CREDIT what is taken off for what is cached, DECODE what runs there with this request.
    "#]].assert_eq(&one(&decision(), NOW_MS));
}

#[test]
fn what_a_shared_cache_counts_has_its_column_where_it_counts() {
    let mut pooled = decision();
    pooled["candidates"][1]["terms"]["shared_blocks"] = json!(45.5);
    let text = one(&pooled, NOW_MS);
    let head = text.lines().find(|line| line.contains("CREDIT  SHARED"));
    assert!(head.is_some(), "{text}");
    assert!(text.contains("45.5") && text.contains("SHARED is the part of CREDIT"));
    pooled["candidates"][0]["seconds"] = json!({"wait": 0.1, "new_tokens": 5.0});
    let text = one(&pooled, NOW_MS);
    assert!(
        text.contains("SHARED is what a cache counts") && text.contains("45.5"),
        "{text}"
    );
    assert!(!one(&decision(), NOW_MS).contains("SHARED"));
}

#[test]
fn a_prediction_names_what_it_is_made_of() {
    let shown = |predicted: Value| {
        let mut decision = decision();
        decision["predicted"] = predicted;
        let text = one(&decision, NOW_MS);
        let line = text.lines().find(|line| line.starts_with("predicted"));
        line.unwrap_or_default().to_owned()
    };
    assert_eq!(
        shown(json!({"indexed": 1440, "in_flight": 0, "evicted": 0})),
        "predicted  1,440 tokens cached, 90%"
    );
    assert_eq!(
        shown(json!({"indexed": 1200, "in_flight": 240, "evicted": 0})),
        "predicted  1,440 tokens cached, 90%: 1,200 by the index, 240 by requests under way"
    );
    assert_eq!(
        shown(json!({"indexed": 1500, "in_flight": 0, "evicted": 60})),
        "predicted  1,440 tokens cached, 90%: 1,500 by the index, 60 fewer for want of room"
    );
}

#[test]
fn a_shadow_says_what_it_would_have_done_and_what_the_model_thinks_of_it() {
    let shown = |shadow: Value| {
        let mut decision = decision();
        decision["shadow"] = shadow;
        let text = one(&decision, NOW_MS);
        let line = text.lines().find(|line| line.starts_with("shadow"));
        line.unwrap_or_default().to_owned()
    };
    let other = |regret: f64| json!({"policy": "time", "rank": {"worker": 12, "rank": 1}, "disagrees": true, "regret_s": regret});
    assert_eq!(
        shown(other(0.25)),
        "shadow     time would have chosen 12/1, 0.250 s cheaper by the time model"
    );
    assert_eq!(
        shown(other(-0.25)),
        "shadow     time would have chosen 12/1, 0.250 s dearer by the time model"
    );
    assert_eq!(
        shown(json!({"policy": "time", "disagrees": false})),
        "shadow     time agrees"
    );
    assert_eq!(shown(Value::Null), "");
}

#[test]
fn what_was_learned_of_the_winner_is_told_in_figures_that_one_can_check() {
    let shown = |learned: Value| {
        let mut decision = decision();
        decision["learned"] = learned;
        let text = one(&decision, NOW_MS);
        let line = text.lines().find(|line| line.starts_with("learned"));
        line.unwrap_or_default().to_owned()
    };
    let learned = json!({"prompt_8k_s": 0.26, "step_64x2k_s": 0.012, "prompt_samples": 812, "step_samples": 4031});
    assert_eq!(
        shown(learned),
        "learned    8k prompt 260 ms, step 12 ms at 64 × 2k; from 812 runs of prompts and 4,031 of steps there"
    );
    assert_eq!(shown(Value::Null), "");
}

#[test]
fn the_latest_one_a_line() {
    let mut running = decision();
    running["outcome"] = Value::Null;
    running["winner"][1] = json!({"tie": {"among": 2}});
    let answer = json!({"decisions": [running, decision()]});
    expect![[r#"
        REQUEST                                   WHEN  MODEL  WORKER  BECAUSE                            PROMPT  PREDICTED  CACHED   STATUS   TTFT   TOTAL
        7d9f3c1e-0000-4000-8000-000000000001  61 s ago  tiny   11/0    lowest cost, drawn among 2 equals    1600          -       -  running      -       -
        7d9f3c1e-0000-4000-8000-000000000001  61 s ago  tiny   11/0    lowest cost of 2                     1600       1440    1424      200  34 ms  180 ms
    "#]].assert_eq(&latest(&answer, NOW_MS));
    assert_eq!(
        latest(&json!({"decisions": []}), 0),
        "no request has been routed yet\n"
    );
}

/// Whatever a frontend of another version says, something is shown and nothing fails.
#[test]
fn bodies_without_fields_are_shown_as_far_as_they_go() {
    for body in [
        json!(null),
        json!({}),
        json!({"winner": 3, "candidates": [1, {}], "outcome": []}),
    ] {
        assert!(one(&body, 0).starts_with("request "));
    }
    let refused = json!({"winner": null, "error": "all 2 workers are busy"});
    assert!(one(&refused, 0).contains("nobody: all 2 workers are busy"));
}
