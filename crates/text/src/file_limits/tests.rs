//! Files that would take a machine's memory are refused, and those of real tokenizers are not.

use serde_json::json;

use super::*;
use crate::Tokenizer;

/// The built-in file with `name` set to something else.
fn with(name: &str, value: Value) -> Vec<u8> {
    let files = crate::builtin::files();
    let mut file: Value = serde_json::from_slice(&files.tokenizer).unwrap();
    file[name] = value;
    serde_json::to_vec(&file).unwrap()
}

fn refusal(name: &str, value: Value) -> String {
    match Tokenizer::from_json(&with(name, value)) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{name} was taken"),
    }
}

fn normalizers(steps: &[Value]) -> Value {
    json!({"type": "Sequence", "normalizers": steps})
}

fn replace(content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": "a"}, "content": content})
}

/// Both libraries pad where a file says so, and this one says a petabyte.
#[test]
fn padding_and_truncation_are_left_out() {
    let plain = Tokenizer::from_json(&with("version", json!("1.0"))).unwrap();
    let wanted = plain.encode("hello there", false).unwrap();
    let padding = json!({"strategy": {"Fixed": 1u64 << 50}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    let truncation =
        json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
    for file in [with("padding", padding), with("truncation", truncation)] {
        let tokenizer = Tokenizer::from_json(&file).unwrap();
        assert_eq!(tokenizer.encode("hello there", false).unwrap(), wanted);
        assert_eq!(tokenizer.status(), plain.status());
    }
}

#[test]
fn a_name_that_is_there_twice_or_escaped_is_looked_at() {
    let file = br#"{"pa\u0064ding":{"strategy":{"Fixed":9}},"padding":null,"version":"1.0"}"#;
    let checked = CheckedFile::new(file).unwrap();
    assert_eq!(checked.json, br#"{"version":"1.0"}"#);
    let twice =
        br#"{"normalizer":null,"normalizer":{"type":"Prepend","prepend":"x","prepend":"y"}}"#;
    let checked = CheckedFile::new(twice).unwrap();
    assert_eq!(
        checked.json,
        br#"{"normalizer":{"prepend":"y","type":"Prepend"}}"#
    );
}

#[test]
fn steps_that_multiply_a_text_are_refused() {
    let doubles = vec![replace("aa"); 30];
    assert!(refusal("normalizer", normalizers(&doubles)).contains("becomes longer"));
    let nested = normalizers(&[normalizers(&doubles[..10]), normalizers(&doubles[..10])]);
    assert!(refusal("normalizer", nested).contains("becomes longer"));
    let levels = vec![json!({"type": "ByteLevel"}); 30];
    let levels = json!({"type": "Sequence", "pretokenizers": levels});
    assert!(refusal("pre_tokenizer", levels).contains("becomes longer"));
    let long = "a".repeat(1 << 20);
    let prepend = json!({"type": "Prepend", "prepend": long});
    assert!(refusal("normalizer", prepend).contains("becomes longer"));
    assert!(refusal("decoder", replace(&long)).contains("lengthens a token"));
}

#[test]
fn lists_and_lengths_are_bounded() {
    let token = json!({"SpecialToken": {"id": "x", "type_id": 0}});
    let template = json!({"type": "TemplateProcessing", "single": vec![token; 10_000]});
    assert!(refusal("post_processor", template).contains("pieces of the post_processor: 10000"));
    let strips = vec![json!({"type": "StripAccents"}); 300];
    assert!(refusal("normalizer", normalizers(&strips)).contains("pieces of the normalizer"));
    let padded = normalizers(&[replace(&"a".repeat(PART_BYTES_MAX))]);
    assert!(refusal("normalizer", padded).contains("bytes of the normalizer"));
    let added = |count: usize, content: &str| vec![json!({"id": 1, "content": content}); count];
    let many = Value::Array(added(ADDED_MAX + 1, "a"));
    assert!(refusal("added_tokens", many).contains("added tokens: 131073"));
    let long = Value::Array(added(1, &"a".repeat(ADDED_BYTES_MAX + 1)));
    assert!(refusal("added_tokens", long).contains("bytes of an added token"));
    let model = json!({"type": "BPE", "continuing_subword_prefix": "a".repeat(1 << 20), "vocab": {}, "merges": []});
    assert!(refusal("model", model).contains("other fields"));
}

#[test]
fn growth_is_that_of_the_steps() {
    let table = |texts: &[u8]| STANDARD.encode([&[2, 0, 0, 0, 9, 9], texts].concat());
    assert_eq!(longest_entry(&table(b"ab\0abcd\0a\0")), 4);
    assert_eq!(longest_entry("no base64!"), 1);
    assert_eq!(growth_of(&replace("\u{2581}")), 3);
    let regex = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "ab"});
    assert_eq!(growth_of(&regex), 3);
    let all = normalizers(&[replace("aa"), json!({"type": "NFC"}), regex]);
    assert_eq!(growth_of(&all), 2 * 3 * 3);
    assert_eq!(growth_of(&Value::Null), 1);
}

/// What growth a file has bounds the texts that are tokenized at once; without any, no prompt is too long.
#[test]
fn a_text_that_could_take_all_memory_is_refused() {
    let doubles = normalizers(&vec![replace("aa"); 12]);
    let tokenizer = Tokenizer::from_json(&with("normalizer", doubles)).unwrap();
    assert!(tokenizer.encode("hello", false).is_ok());
    let long = tokenizer.encode(&"a".repeat(20_000), false).unwrap_err();
    assert!(
        matches!(long, TextError::TooLong { bytes: 20_000, .. }),
        "{long}"
    );
    assert!(long.is_client_fault());
    let plain = CheckedFile::new(&crate::builtin::files().tokenizer).unwrap();
    assert!(plain.text_bytes_max() >= 16 << 20);
}
