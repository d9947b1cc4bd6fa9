//! Traces as text.

use expect_test::{Expect, expect};
use kvasir_sim::{PromptSource, Trace, TraceError, TraceOptions, ideal_hit_share};
use kvasir_types::Token;

fn read(text: &str) -> Result<Trace, TraceError> {
    Trace::read("test", text, &TraceOptions::default())
}

fn tokens(prompt: &PromptSource) -> Vec<Token> {
    let mut tokens = Vec::new();
    match prompt {
        PromptSource::Pieces(pieces) => pieces.iter().for_each(|p| p.extend(&mut tokens)),
        PromptSource::Tokens(list) => tokens.extend_from_slice(list),
        PromptSource::Hashes { .. } => {}
    }
    tokens
}

/// Ids 46..57 shared, then 58.. and 64: 12 blocks of 512 tokens are equal, whatever the engine's block.
#[test]
fn equal_ids_are_equal_tokens_and_the_last_block_is_cut() {
    let ids = |last: &[u32]| -> String {
        let all: Vec<String> = (46..58)
            .chain(last.iter().copied())
            .map(|i| i.to_string())
            .collect();
        all.join(",")
    };
    let text = format!(
        "{{\"timestamp\":0,\"input_length\":6755,\"output_length\":500,\"hash_ids\":[{}]}}\n\
         {{\"timestamp\":3000,\"input_length\":6500,\"output_length\":26,\"hash_ids\":[{}]}}\n",
        ids(&[58, 59]),
        ids(&[64]),
    );
    let trace = read(&text).unwrap();
    let [first, second] = [0, 1].map(|at| tokens(&trace.requests[at].prompt));
    assert_eq!((first.len(), second.len()), (6755, 6500));
    let shared = first
        .iter()
        .zip(&second)
        .take_while(|(a, b)| a == b)
        .count();
    assert_eq!(shared, 12 * 512);
    for block_size in [1, 16, 64, 512] {
        let share = ideal_hit_share(&trace, block_size);
        assert_eq!(share, 6144.0 / (6755.0 + 6500.0), "{block_size}");
    }
}

#[test]
fn other_names_of_the_fields_and_sessions_are_known() {
    let trace = read(
        "{\"created_time\": 5.5, \"input_tokens\": 3, \"output_tokens\": 2, \"hash_ids\": [9], \"session_id\": 1}\n\
         \n\
         {\"timestamp\": 7, \"input_length\": 4, \"output_length\": 0, \"hash_ids\": [9], \"session_id\": 1, \"delay\": 250, \"priority\": 3}\n",
    )
    .unwrap();
    assert_eq!(trace.requests[0].at.as_nanos(), 5_500_000);
    let (before, delay) = trace.requests[1].follows.unwrap();
    assert_eq!((before, delay.as_millis()), (0, 250));
    assert_eq!(
        (trace.requests[1].priority, trace.requests[1].output_tokens),
        (3, 1)
    );
}

#[test]
fn our_own_format_has_tokens_text_or_hashes() {
    let trace = read(
        "{\"at_ms\": 0, \"tokens\": [1, 2, 3], \"output_tokens\": 5}\n\
         {\"at_ms\": 1, \"text\": \"hello world\", \"output_tokens\": 5}\n\
         {\"at_ms\": 2, \"text\": \"hello weird\", \"max_tokens\": 5}\n\
         {\"at_ms\": 3, \"local_hashes\": [18446744073709551615, -1], \"block_size\": 16, \"input_tokens\": 40, \"output_tokens\": 5}\n",
    )
    .unwrap();
    let lens: Vec<u32> = trace.requests.iter().map(|r| r.prompt.len()).collect();
    assert_eq!(lens, [3, 3, 3, 40]);
    let [a, b] = [1, 2].map(|at| tokens(&trace.requests[at].prompt));
    assert_eq!(a[..1], b[..1], "`hell` is one token");
    assert_ne!(a, b);
    let PromptSource::Hashes { locals, .. } = &trace.requests[3].prompt else {
        panic!("hashes")
    };
    assert_eq!(locals[0], locals[1]);
}

fn check(text: &str, expect: &Expect) {
    let problem = read(text).err().map(|error| error.to_string());
    expect.assert_eq(&problem.unwrap_or_default());
}

#[test]
fn bad_traces_say_which_line_and_why() {
    let good = "{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}";
    check("", &expect!["the trace has no requests"]);
    check(
        &format!("{good}\n{{oops"),
        &expect!["line 2: not a JSON object: key must be a string at column 2"],
    );
    check(
        &format!("{good}\n[1]"),
        &expect!["line 2: expected an object, got [1]"],
    );
    check("7", &expect!["line 1: expected an object, got 7"]);
    check(
        "{\"at_ms\":0,\"output_tokens\":1}",
        &expect!["line 1: one of `tokens`, `text`, `local_hashes` or `hash_ids` is needed"],
    );
    check(
        "{\"at_ms\":0,\"tokens\":[],\"output_tokens\":1}",
        &expect!["line 1: the prompt is empty"],
    );
    check(
        "{\"at_ms\":0,\"tokens\":[-3],\"output_tokens\":1}",
        &expect!["line 1: `tokens` has something that is no token id"],
    );
    check(
        "{\"at_ms\":-1,\"tokens\":[3],\"output_tokens\":1}",
        &expect!["line 1: `at_ms` is -1; it must be a number of milliseconds, at least 0"],
    );
    check(
        &good.replace("[1]", "[1,2]"),
        &expect![
            "line 1: `hash_ids` has 2 ids and `input_length` 5 needs 1 of 512 tokens each; is the trace's block size another one (--trace-block-size)?"
        ],
    );
    check(
        &good.replace("[1]", "[\"a\"]"),
        &expect![[r#"line 1: `hash_ids` has "a"; ids are whole numbers"#]],
    );
    check(
        &good.replace(":5", ":0"),
        &expect!["line 1: `input_length` is 0; a prompt has at least one token"],
    );
    check(
        &good.replace(":5", ":5.5"),
        &expect!["line 1: `input_length` is 5.5; it must be a whole number of at least 0"],
    );
    check(
        &good.replace(":5", ":99999999999"),
        &expect!["line 1: `input_length` is 99999999999; at most 16777216 are taken"],
    );
    check(
        &good.replace("\"timestamp\":0,", ""),
        &expect!["line 1: `timestamp` is missing"],
    );
    let hashes = "{\"at_ms\":0,\"local_hashes\":[1],\"block_size\":16,\"input_tokens\":40,\"output_tokens\":5}";
    check(
        hashes,
        &expect!["line 1: 40 tokens in blocks of 16 do not have 1 complete blocks"],
    );
}

/// Requests of one moment end up between it and the next, in their order.
#[test]
fn rounded_times_are_spread() {
    let line = |at: u32, id: u32| {
        format!(
            "{{\"timestamp\":{at},\"input_length\":5,\"output_length\":1,\"hash_ids\":[{id}]}}\n"
        )
    };
    let text: String = [(0, 1), (0, 2), (0, 3), (3000, 4), (3000, 5), (6000, 6)]
        .map(|(at, id)| line(at, id))
        .concat();
    let mut trace = read(&text).unwrap();
    let before = trace.clone();
    trace.spread(1);
    let times: Vec<f64> = trace.requests.iter().map(|r| r.at.as_secs_f64()).collect();
    assert!(
        times.is_sorted() && times[2] < 3.0 && times[3] >= 3.0 && times[5] == 6.0,
        "{times:?}"
    );
    assert!(times[0] > 0.0 && times[0] < times[1], "{times:?}");
    for (a, b) in trace.requests.iter().zip(&before.requests) {
        assert_eq!(a.prompt, b.prompt);
    }
}
