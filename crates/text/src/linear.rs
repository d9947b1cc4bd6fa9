//! Does a tokenizer take time in proportion to its text?
//!
//! Its patterns are run by an engine that goes back and tries again where a pattern has look-around, back-references or atomic
//! groups, for as long as a text makes it. Patterns without those are run by an automaton. One look-ahead is in nearly
//! every tokenizer (`\s+(?!\S)`) and is known to be harmless.

use serde::Deserialize;
use serde_json::Value;

/// The look-ahead that tokenizers share.
const HARMLESS: &str = r"\s+(?!\S)";
/// What an automaton cannot run; a pattern that has it, even if escaped, counts as one that goes back.
const GOES_BACK: [&str; 8] = ["(?=", "(?!", "(?<", "(?>", "(?(", "*+", "++", "?+"];

/// The parts of a `tokenizer.json` that have patterns.
#[derive(Deserialize)]
struct Patterns {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
}

/// Whether all patterns of a `tokenizer.json` are run by an automaton.
pub(crate) fn is_linear(json: &[u8]) -> bool {
    let Ok(patterns) = serde_json::from_slice::<Patterns>(json) else {
        return false;
    };
    let Patterns {
        normalizer,
        pre_tokenizer,
        post_processor,
    } = &patterns;
    [normalizer, pre_tokenizer, post_processor]
        .into_iter()
        .all(part_is_linear)
}

fn part_is_linear(part: &Value) -> bool {
    match part {
        Value::Object(fields) => fields.iter().all(|(key, value)| match value {
            Value::String(pattern) if key == "Regex" => pattern_is_linear(pattern),
            value => part_is_linear(value),
        }),
        Value::Array(items) => items.iter().all(part_is_linear),
        _ => true,
    }
}

fn pattern_is_linear(pattern: &str) -> bool {
    let rest = pattern.replace(HARMLESS, "");
    let refers = rest
        .as_bytes()
        .windows(2)
        .any(|pair| matches!(pair, [b'\\', b'1'..=b'9' | b'k' | b'g' | b'K' | b'G']));
    // As in `a{1,3}+`, and not as in `\p{L}+`.
    let possessive = rest
        .as_bytes()
        .windows(3)
        .any(|three| matches!(three, [b'0'..=b'9' | b',', b'}', b'+']));
    !refers && !possessive && !GOES_BACK.iter().any(|sign| rest.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_known_tokenizers_are_linear_and_those_that_go_back_are_not() {
        for pattern in [
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}",
            "(a+)+b",
        ] {
            assert!(pattern_is_linear(pattern), "{pattern}");
        }
        for pattern in [
            r"(a+)+b(?!\S)",
            r"(a|aa)+(?=b)",
            r"(a+)\1",
            r"(?<=a)b",
            r"(?>a+)b",
            r"a++b",
            r"a{1,3}+b",
            r"(?<x>a)\k<x>",
        ] {
            assert!(!pattern_is_linear(pattern), "{pattern}");
        }
    }

    #[test]
    fn patterns_are_found_wherever_they_stand() {
        let with = |pattern: &str| {
            let split = format!(r#"{{"type":"Split","pattern":{{"Regex":"{pattern}"}}}}"#);
            format!(
                r#"{{"model":{{}},"pre_tokenizer":{{"type":"Sequence","pretokenizers":[{split}]}}}}"#
            )
        };
        assert!(is_linear(with("a+").as_bytes()));
        assert!(!is_linear(with("(a+)+(?=b)").as_bytes()));
        assert!(is_linear(b"{}") && !is_linear(b"["));
    }
}
