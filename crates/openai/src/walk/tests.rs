//! Tests of the quick reader against `serde_json`.

use proptest::prelude::*;
use serde::de::IgnoredAny;

use super::*;

/// JSON objects, and texts that nearly are.
pub(crate) fn near_json() -> impl Strategy<Value = String> {
    let scrap = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "\\\"",
        "\\u00e9",
        "\\uD83D",
        "\\u12",
        "\\x",
        "0",
        "01",
        "-",
        "-0",
        "1.5",
        "1.",
        ".5",
        "1e5",
        "1E+",
        "2e-3",
        "true",
        "fals",
        "null",
        " ",
        "\n",
        "\t",
        "\r",
        "\u{0}",
        "\u{1f}",
        "\u{7f}",
        "é",
        "🚀",
        "a",
        "\"a\"",
        "\"a\":",
        "{\"a\":1}",
        "[1,2]",
        "sixteen bytes or more of text",
        "\"a string that is longer than sixteen bytes\"",
    ]);
    let loose = prop::collection::vec(scrap.clone(), 0..12).prop_map(|parts| parts.concat());
    let object = prop::collection::vec((json_value(), scrap, prop::bool::weighted(0.1)), 0..5)
        .prop_map(|fields| {
            let field = |(value, scrap, broken): (String, &str, bool)| {
                let scrap = if broken { scrap } else { "" };
                format!(" \"k{}\" :{value}{scrap}", value.len() % 3)
            };
            let fields: Vec<String> = fields.into_iter().map(field).collect();
            format!("{{{}}}\n", fields.join(","))
        });
    prop_oneof![loose, object]
}

fn json_value() -> impl Strategy<Value = String> {
    let text = prop_oneof!["\\PC{0,40}", "[ -~\n\"\\\\\u{1}]{0,40}"]
        .prop_map(|text: String| serde_json::Value::from(text).to_string());
    let number = "-?(0|[1-9][0-9]{0,5})(\\.[0-9]{1,4})?([eE][+-]?[0-9]{1,3})?";
    let word = prop::sample::select(vec!["true", "false", "null"]).prop_map(str::to_owned);
    let leaf = prop_oneof![text, number, word];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let list = prop::collection::vec(inner.clone(), 0..4)
            .prop_map(|items| format!("[{} ]", items.join(" ,")));
        let object = prop::collection::vec(inner, 0..4).prop_map(|items| {
            let field = |(at, value)| format!("\"{at}\\n\": {value}");
            let fields: Vec<String> = items.into_iter().enumerate().map(field).collect();
            format!("{{{}}}", fields.join(","))
        });
        prop_oneof![list, object]
    })
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// What the quick reader takes for a value is one, and it takes every value that is not too deep.
    #[test]
    fn a_value_is_a_value(text in prop_oneof![near_json(), json_value()]) {
        let trimmed = text.trim_matches([' ', '\n', '\t', '\r']);
        let whole = value(trimmed.as_bytes(), 0) == Some(trimmed.len());
        prop_assert_eq!(whole, is_json(trimmed), "{}", trimmed);
    }

    /// No beginning of a value sends it past the end.
    #[test]
    fn cut_texts_end(text in near_json(), at in any::<prop::sample::Index>()) {
        let cut = &text.as_bytes()[..at.index(text.len() + 1)];
        if let Some(end) = value(cut, 0) {
            prop_assert!(end <= cut.len());
        }
    }
}

#[test]
fn what_is_too_deep_is_left_to_the_careful_reader() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert_eq!(value(nested(64).as_bytes(), 0), Some(128));
    assert_eq!(value(nested(65).as_bytes(), 0), None);
}

/// Long strings are looked through in words, blocks and the rest: a stop at every place is found.
#[test]
fn a_stop_anywhere_in_a_string_is_found() {
    let stops = [
        "\u{0}", "\u{1f}", " ", "\\\\", "\\\"", "\\u0041", "\\u004", "\\x", "\u{7f}", "é",
    ];
    for at in 0..180 {
        for stop in stops {
            let text = format!("\"{}{stop}{}\"", "a".repeat(at), "é".repeat(180 - at));
            let end = string(text.as_bytes(), 0);
            assert_eq!(end.is_some(), is_json(&text), "{at} {stop:?}");
            assert!(end.is_none_or(|end| end == text.len()), "{at} {stop:?}");
        }
    }
}
