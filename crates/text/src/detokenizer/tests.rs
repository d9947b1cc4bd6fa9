//! Tests of streamed text: any cut of the tokens gives the same bytes.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;

use super::*;
use crate::TextModel;

static BUILTIN: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| TextModel::builtin().unwrap().tokenizer().clone());

/// A tokenizer of these tokens, with this model and this decoder.
fn tokenizer(tokens: &[String], model: &str, decoder: &str) -> Arc<Tokenizer> {
    let vocabulary: serde_json::Map<_, _> =
        tokens.iter().cloned().zip((0..).map(Into::into)).collect();
    let vocabulary = serde_json::Value::Object(vocabulary);
    let json = format!(
        r#"{{"version":"1.0","added_tokens":[{{"id":0,"content":"<s>","single_word":false,"lstrip":false,
        "rstrip":false,"normalized":false,"special":true}}],"model":{{{model},"vocab":{vocabulary}}},
        "decoder":{decoder}}}"#
    );
    Arc::new(Tokenizer::from_json(json.as_bytes()).unwrap())
}

/// A vocabulary with byte fall-back, as Llama 2 and its kin have.
static FALLBACK: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let words = ["<s>", "▁a", "b▁", "é", "▁", "x", "<unk>", "▁▁", "😀"];
    let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
    let tokens: Vec<String> = words.iter().map(|w| (*w).to_owned()).chain(bytes).collect();
    tokenizer(
        &tokens,
        r#""type":"BPE","merges":[],"byte_fallback":true"#,
        r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#,
    )
});

/// A decoder that only the library knows.
static WORDS: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let tokens = ["<s>", "hello", "##ing", "world", ",", "é", "##s"].map(str::to_owned);
    tokenizer(
        &tokens,
        r#""type":"WordLevel","unk_token":"hello""#,
        r###"{"type":"WordPiece","prefix":"##","cleanup":false}"###,
    )
});

fn streamed(tokenizer: &Arc<Tokenizer>, pieces: &[&[Token]], skip: bool) -> String {
    let options = DetokenizeOptions {
        skip_special: skip,
        ..DetokenizeOptions::default()
    };
    let mut stream = Detokenizer::new(tokenizer.clone(), options);
    let mut text = String::new();
    for piece in pieces {
        stream.push(piece, &mut text);
    }
    stream.finish(&mut text);
    text
}

fn split(ids: &[Token], cuts: &[prop::sample::Index]) -> Vec<Vec<Token>> {
    let mut at: Vec<usize> = cuts.iter().map(|c| c.index(ids.len() + 1)).collect();
    at.extend([0, ids.len()]);
    at.sort_unstable();
    at.windows(2).map(|w| ids[w[0]..w[1]].to_vec()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Random ids, most of them broken UTF-8: the stream is the library's decoding of the whole.
    #[test]
    fn byte_level_streams_are_exact(
        ids in proptest::collection::vec(prop_oneof![0u32..300, 0u32..4100], 0..40),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
        skip in any::<bool>(),
    ) {
        let pieces = split(&ids, &cuts);
        let pieces: Vec<&[Token]> = pieces.iter().map(|p| &**p).collect();
        prop_assert_eq!(streamed(&BUILTIN, &pieces, skip), BUILTIN.decode(&ids, skip).unwrap());
    }

    #[test]
    fn fallback_streams_are_exact(
        ids in proptest::collection::vec(prop_oneof![0u32..9, 0u32..265, 0xe0u32..0xf9], 0..30),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
        skip in any::<bool>(),
    ) {
        let pieces = split(&ids, &cuts);
        let pieces: Vec<&[Token]> = pieces.iter().map(|p| &**p).collect();
        prop_assert_eq!(streamed(&FALLBACK, &pieces, skip), FALLBACK.decode(&ids, skip).unwrap());
    }

    #[test]
    fn other_decoders_are_exact_too(ids in proptest::collection::vec(1u32..7, 0..40)) {
        let pieces: Vec<&[Token]> = ids.chunks(1).collect();
        prop_assert_eq!(streamed(&WORDS, &pieces, false), WORDS.decode(&ids, false).unwrap());
    }

    /// Real text with a stop string somewhere: never leaked, and the same for one token at a time and all
    /// at once.
    #[test]
    fn stops_do_not_depend_on_the_pieces(
        text in "[a-d é]{0,20}(stop)?[a-d ]{0,10}",
        stop in "[a-dé ]{1,3}|stop",
        min in 0u32..6,
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let ids = BUILTIN.encode(&text, false).unwrap();
        let run = |pieces: &[Vec<Token>]| {
            let options = DetokenizeOptions {
                stop: vec![stop.clone()], min_tokens: min, ..DetokenizeOptions::default()
            };
            let mut stream = Detokenizer::new(BUILTIN.clone(), options);
            let mut text = String::new();
            for piece in pieces {
                if stream.push(piece, &mut text).is_some() {
                    return (text, true, stream.tokens());
                }
            }
            let hit = stream.finish(&mut text).is_some();
            (text, hit, stream.tokens())
        };
        let whole = run(std::slice::from_ref(&ids));
        prop_assert_eq!(&run(&split(&ids, &cuts)), &whole);
        if min == 0 {
            let want = text.split(&*stop).next().unwrap_or_default();
            prop_assert_eq!(&whole.0, want);
        }
    }
}

/// An emoji of four bytes, a token each: nothing until it is whole, U+FFFD if it never is.
#[test]
fn half_a_character_is_never_shown() {
    let ids = BUILTIN.encode("\u{1f9ed}", false).unwrap();
    assert!(ids.len() > 1, "{ids:?}");
    let mut stream = Detokenizer::new(BUILTIN.clone(), DetokenizeOptions::default());
    let mut text = String::new();
    for (i, id) in ids.iter().enumerate() {
        stream.push(&[*id], &mut text);
        assert_eq!(text.is_empty(), i + 1 < ids.len());
    }
    assert_eq!(text, "\u{1f9ed}");
    let mut cut = String::new();
    let mut stream = Detokenizer::new(BUILTIN.clone(), DetokenizeOptions::default());
    stream.push(&ids[..1], &mut cut);
    stream.finish(&mut cut);
    assert_eq!(cut, BUILTIN.decode(&ids[..1], false).unwrap());
}

#[test]
fn a_hit_says_how_many_tokens_were_used() {
    let ids = BUILTIN.encode("one two three four", false).unwrap();
    let options = DetokenizeOptions {
        stop: vec![" three".into()],
        ..Default::default()
    };
    let mut stream = Detokenizer::new(BUILTIN.clone(), options);
    let mut text = String::new();
    let hit = stream.push(&ids, &mut text).unwrap();
    assert_eq!(text, "one two");
    assert_eq!(
        BUILTIN.decode(&ids[..hit.tokens_used], false).unwrap(),
        "one two three"
    );
    assert_eq!(stream.tokens() as usize, hit.tokens_used);
}

#[test]
fn hidden_tokens_make_no_text() {
    let end = BUILTIN.id_of("<|im_end|>").unwrap();
    let mut ids = BUILTIN.encode("hello", false).unwrap();
    ids.push(end);
    let text = |hidden: Vec<Token>| {
        let options = DetokenizeOptions {
            hidden,
            ..Default::default()
        };
        let mut stream = Detokenizer::new(BUILTIN.clone(), options);
        let mut text = String::new();
        stream.push(&ids, &mut text);
        text
    };
    assert_eq!(text(vec![end]), "hello");
    assert_eq!(text(Vec::new()), "hello<|im_end|>");
}

/// Of the special tokens that are left out, those that somebody looks for are not.
#[test]
fn visible_tokens_are_shown_among_those_left_out() {
    let (start, end) = (
        BUILTIN.id_of("<|im_start|>").unwrap(),
        BUILTIN.id_of("<|im_end|>").unwrap(),
    );
    let options = DetokenizeOptions {
        skip_special: true,
        visible: vec![start],
        ..Default::default()
    };
    let mut stream = Detokenizer::new(BUILTIN.clone(), options);
    let mut text = String::new();
    stream.push(&[end, start, end], &mut text);
    assert_eq!(text, "<|im_start|>");
}
