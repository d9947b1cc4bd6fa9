//! Noise into everything that reads text: errors, never a panic.

use kvasir_text::{ChatInput, DetokenizeOptions, Detokenizer, TextModel, Tokenizer};
use proptest::prelude::*;

fn model() -> &'static TextModel {
    static MODEL: std::sync::OnceLock<TextModel> = std::sync::OnceLock::new();
    MODEL.get_or_init(|| TextModel::builtin().unwrap())
}

fn shards() -> impl Strategy<Value = String> {
    let shards = vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "null",
        "1",
        "-1e9",
        "\"\"",
        "\"role\"",
        "\"user\"",
        "\"content\"",
        "\"text\"",
        "\"type\"",
        "\"tool_calls\"",
        "\"function\"",
        "\"arguments\"",
        "\"{\"",
        "\\ud800",
        "\u{0}",
        "[{\"role\":\"user\",\"content\":",
        "{\"function\":{\"arguments\":\"[1\"}}",
        "}]",
    ];
    proptest::collection::vec(prop::sample::select(shards), 0..30).prop_map(|p| p.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn conversations(messages in shards(), tools in shards(), kwargs in shards(), more in any::<bool>()) {
        let input = ChatInput {
            messages: &messages,
            tools: more.then_some(&tools),
            documents: more.then_some(&kwargs),
            kwargs: Some(&kwargs),
            continue_final_message: more,
            now_unix: i64::MIN,
            ..ChatInput::default()
        };
        let _ = model().render(&input);
        let _ = model().render(&ChatInput { kwargs: None, documents: None, ..input });
    }

    #[test]
    fn texts(text in any::<String>(), special in any::<bool>()) {
        let ids = model().encode(&text, special).unwrap();
        prop_assert_eq!(model().tokenizer().decode(&ids, false).unwrap(), text);
    }

    #[test]
    fn token_ids(ids in proptest::collection::vec(any::<u32>(), 0..20), stop in any::<String>()) {
        let options = DetokenizeOptions { stop: vec![stop], ..DetokenizeOptions::default() };
        let mut stream = Detokenizer::new(model().tokenizer().clone(), options);
        let mut text = String::new();
        stream.push(&ids, &mut text);
        stream.finish(&mut text);
    }

    /// A real file with a piece cut out or replaced: it loads or it is refused.
    #[test]
    fn damaged_tokenizer_files(at in any::<prop::sample::Index>(), len in 0usize..40, put in shards()) {
        let mut json = include_bytes!("../../src/builtin/tokenizer.json").to_vec();
        let at = at.index(1200.min(json.len()));
        json.splice(at..at + len, put.into_bytes());
        if let Ok(tokenizer) = Tokenizer::from_json(&json) {
            let _ = tokenizer.encode("Hello <|im_end|> 12 é", true);
        }
    }
}
