//! Tests of cuts: encoding the pieces gives the tokens of the whole, on hostile text too.

use proptest::prelude::*;

use super::*;
use crate::Tokenizer;

const BUILTIN: &str = include_str!("../builtin/tokenizer.json");

/// The built-in vocabulary behind each known pattern, with and without composition.
fn variant(which: usize, nfc: bool) -> String {
    let mut json: Value = serde_json::from_str(BUILTIN).unwrap();
    if nfc {
        json["normalizer"] = serde_json::json!({"type": "NFC"});
    }
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[which].0.into();
    if which == 0 {
        json["pre_tokenizer"] = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
        });
    }
    json.to_string()
}

fn variants() -> &'static [(Tokenizer, CutRules)] {
    static ALL: std::sync::LazyLock<Vec<(Tokenizer, CutRules)>> = std::sync::LazyLock::new(|| {
        (0..PATTERNS.len() * 2)
            .map(|i| {
                let json = variant(i / 2, i % 2 == 1);
                let rules = CutRules::of(json.as_bytes()).unwrap();
                (Tokenizer::from_json(json.as_bytes()).unwrap(), rules)
            })
            .collect()
    });
    &ALL
}

/// Pieces that fight: contractions, runs of space, marks that compose, line ends of all kinds, digits,
/// special tokens whole and broken.
pub(crate) fn hostile() -> impl Strategy<Value = String> {
    let shards = vec![
        "a",
        "B",
        "é",
        "e\u{301}",
        "\u{301}",
        "\u{319}",
        "\u{1715}",
        "가",
        "\u{1100}\u{1161}",
        "中文",
        "ا",
        "1",
        "234",
        "٣",
        "½",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{2028}",
        "\u{85}",
        "'s",
        "'LL",
        "'",
        "\"",
        ".",
        ";",
        "/",
        "//",
        "-",
        "_",
        "#",
        "don't",
        "the",
        "The router ",
        "x1 ",
        "9\n",
        "🚀",
        "👍🏽",
        "\u{200d}",
        "\u{fe0f}",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "start|>",
        "|>",
        "<|endoftext|>",
        "<|im_end|>\n",
        "ǅ",
        "ʰ",
        "ß",
        "ſ",
        "İ",
    ];
    proptest::collection::vec(prop::sample::select(shards), 0..40).prop_map(|p| p.concat())
}

/// One token for each word that the pattern makes, whatever is in it: shows every border.
fn words() -> &'static [(tokenizers::Tokenizer, CutRules)] {
    static ALL: std::sync::LazyLock<Vec<(tokenizers::Tokenizer, CutRules)>> =
        std::sync::LazyLock::new(|| {
            (0..PATTERNS.len() * 2)
                .map(|i| {
                    let json = variant(i / 2, i % 2 == 1);
                    let rules = CutRules::of(json.as_bytes()).unwrap();
                    let mut json: Value = serde_json::from_str(&json).unwrap();
                    json["model"] = serde_json::json!({
                        "type": "WordLevel", "unk_token": "?",
                        "vocab": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "?": 3}
                    });
                    (
                        tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap(),
                        rules,
                    )
                })
                .collect()
        });
    &ALL
}

fn borders(tokenizer: &tokenizers::Tokenizer, text: &str, base: usize) -> Vec<(usize, usize)> {
    let encoding = tokenizer.encode(text, false).unwrap();
    let offsets = encoding.get_offsets().iter();
    offsets.map(|(a, b)| (a + base, b + base)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// The same without a vocabulary: the words themselves are the same words.
    #[test]
    fn cuts_move_no_border(text in hostile()) {
        for (tokenizer, rules) in words() {
            let mut pieces = Vec::new();
            let mut from = 0;
            while let Some(at) = rules.next(&text, from + 1) {
                pieces.extend(borders(tokenizer, &text[from..at], from));
                from = at;
            }
            pieces.extend(borders(tokenizer, &text[from..], from));
            prop_assert_eq!(&pieces, &borders(tokenizer, &text, 0), "{:?}", rules);
        }
    }

    /// Every safe cut at once, behind every pattern: the pieces' tokens are the text's tokens.
    #[test]
    fn cuts_change_nothing(text in hostile()) {
        for (tokenizer, rules) in variants() {
            let mut pieces = Vec::new();
            let mut from = 0;
            while let Some(at) = rules.next(&text, from + 1) {
                pieces.extend(tokenizer.encode(&text[from..at], false).unwrap());
                from = at;
            }
            pieces.extend(tokenizer.encode(&text[from..], false).unwrap());
            prop_assert_eq!(&pieces, &tokenizer.encode(&text, false).unwrap(), "{:?}", rules);
        }
    }
}

#[test]
fn prose_has_cuts_and_unknown_tokenizers_have_none() {
    let rules = CutRules::of(BUILTIN.as_bytes()).unwrap();
    assert_eq!(rules.next("ab cd", 0), Some(2));
    assert_eq!(rules.next("ab cd", 3), None);
    assert_eq!(rules.next("。\n中", 0), Some(4));
    assert_eq!(rules.next("。\n/x", 0), None);
    let without = |change: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(BUILTIN).unwrap();
        change(&mut json);
        CutRules::of(json.to_string().as_bytes())
    };
    assert!(without(&|_| ()).is_some());
    assert_eq!(
        without(&|j| j["normalizer"] = serde_json::json!({"type": "NFKC"})),
        None
    );
    assert_eq!(without(&|j| j["model"]["dropout"] = 0.1.into()), None);
    assert_eq!(
        without(&|j| j["added_tokens"][0]["rstrip"] = true.into()),
        None
    );
    assert_eq!(
        without(&|j| j["added_tokens"][0]["content"] = "a b".into()),
        None
    );
    assert_eq!(
        without(&|j| j["pre_tokenizer"] = serde_json::json!({"type": "Metaspace"})),
        None
    );
    assert_eq!(without(&|j| j["pre_tokenizer"] = Value::Null), None);
    assert_eq!(CutRules::of(b"{}"), None);
}
