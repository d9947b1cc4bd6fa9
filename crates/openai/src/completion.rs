//! `/v1/completions` for token workers.
//!
//! Answers one question: which prompts, and how are they to be completed? A prompt is text or token ids, one
//! or several; each prompt gets `n` choices, numbered in order.

use std::fmt;

use kvasir_types::Token;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

use crate::ApiError;
use crate::chat::check_model;
use crate::nvext::Nvext;
use crate::object::Object;
use crate::options::{CHOICES_MAX, Options, invalid, range};
use crate::strict::{Reader, Unknown};
use crate::walk;

/// A completion request whose every field has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The model's name; never empty.
    pub model: String,
    /// One to 128 prompts, none empty.
    pub prompts: Vec<Prompt>,
    /// Put the prompt before the completion.
    pub echo: bool,
    /// Text after the completion, for models that fill in.
    pub suffix: Option<String>,
    /// What chat and completions share.
    pub options: Options,
    /// The extension object; empty when absent.
    pub nvext: Nvext,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized.
    Text(String),
    /// Already tokens.
    Tokens(Vec<Token>),
}

/// What a prompt may be, as errors say it.
const FORMS: &str =
    "expected a string, a list of strings, a list of token ids or a list of lists of token ids";

/// The forms of a prompt. The first item of a list says what the others are, so that a list of millions of ids is read
/// once and nothing is kept of it but the ids.
enum RawPrompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Token>),
    TokenLists(Vec<Vec<Token>>),
}

/// An item of a list of prompts, or of a prompt.
enum RawItem {
    Text(String),
    Token(Token),
    Tokens(Vec<Token>),
}

impl<'de> Deserialize<'de> for RawPrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyForm;
        impl<'de> Visitor<'de> for AnyForm {
            type Value = RawPrompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(FORMS)
            }

            fn visit_str<E>(self, text: &str) -> Result<RawPrompt, E> {
                Ok(RawPrompt::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawPrompt, A::Error> {
                Ok(match seq.next_element()? {
                    None => RawPrompt::Texts(Vec::new()),
                    Some(RawItem::Text(first)) => RawPrompt::Texts(rest(first, seq)?),
                    Some(RawItem::Token(first)) => RawPrompt::Tokens(rest(first, seq)?),
                    Some(RawItem::Tokens(first)) => RawPrompt::TokenLists(rest(first, seq)?),
                })
            }
        }
        let prompt = deserializer.deserialize_any(AnyForm);
        prompt.map_err(|_| D::Error::custom(FORMS))
    }
}

/// A list that begins with `first`.
fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    first: T,
    mut seq: A,
) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = seq.next_element()? {
        all.push(next);
    }
    Ok(all)
}

impl<'de> Deserialize<'de> for RawItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyItem;
        impl<'de> Visitor<'de> for AnyItem {
            type Value = RawItem;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<RawItem, E> {
                Ok(RawItem::Text(text.to_owned()))
            }

            fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<RawItem, E> {
                let id = Token::try_from(id).map_err(E::custom)?;
                Ok(RawItem::Token(id))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawItem, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(RawItem::Tokens(ids))
            }
        }
        deserializer.deserialize_any(AnyItem)
    }
}

impl From<RawPrompt> for Vec<Prompt> {
    fn from(raw: RawPrompt) -> Self {
        match raw {
            RawPrompt::Text(text) => vec![Prompt::Text(text)],
            RawPrompt::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            RawPrompt::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            RawPrompt::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

/// Reads the text of a `prompt` field, whatever its form; `None` when it has none of them.
#[must_use]
pub(crate) fn prompts(text: &str) -> Option<Vec<Prompt>> {
    serde_json::from_str::<RawPrompt>(text).ok().map(Vec::from)
}

/// The first prompt of a `prompt` field, and whether it is the only one and was read to its end; `None` when it has none of
/// the forms. Of ids at most `ids_max` are read. What follows it is not judged.
pub(crate) fn first_prompt(text: &str, ids_max: usize) -> Option<(Prompt, bool)> {
    if text.starts_with('"') {
        return Some((Prompt::Text(serde_json::from_str(text).ok()?), true));
    }
    let (first, alone) = walk::first_item(text)?;
    match first.as_bytes().first()? {
        b'"' => Some((Prompt::Text(serde_json::from_str(first).ok()?), alone)),
        b'[' => {
            let (ids, whole) = walk::ids(first, ids_max)?;
            Some((Prompt::Tokens(ids), alone && whole))
        }
        _ => {
            let (ids, whole) = walk::ids(text, ids_max)?;
            Some((Prompt::Tokens(ids), whole))
        }
    }
}

impl Prompt {
    /// Whether there is nothing to complete.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Tokens(tokens) => tokens.is_empty(),
        }
    }
}

impl CompletionRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// 400 with the field, what was expected, and where.
    pub fn parse(body: &[u8], unknown: Unknown) -> Result<Self, ApiError> {
        let object = Object::parse(body)?;
        let mut body = Reader::new(&object)?;
        let prompts: Vec<Prompt> = body.need::<RawPrompt>("prompt")?.into();
        let model: String = body.need("model")?;
        let nvext = Nvext::take(&mut body)?;
        let raw = Options::read(&mut body)?;
        let max_tokens = body.take("max_tokens")?;
        let logprobs = body.take("logprobs")?;
        let best_of: Option<u32> = body.take("best_of")?;
        let request = Self {
            echo: body.take("echo")?.unwrap_or(false),
            suffix: body.take("suffix")?,
            model: check_model(model)?,
            prompts,
            options: {
                range("Logprobs", logprobs, 0..=5)?;
                check_best_of(best_of, raw.n)?;
                raw.check(max_tokens.or(Some(DEFAULT_MAX_TOKENS)), logprobs, None)?
            },
            nvext,
        };
        request.check_prompts()?;
        body.finish(unknown)?;
        Ok(request)
    }

    fn check_prompts(&self) -> Result<(), ApiError> {
        if self.prompts.is_empty() || self.prompts.iter().any(Prompt::is_empty) {
            return invalid("Prompt cannot be empty");
        }
        let n = self.options.n;
        let total = u32::try_from(self.prompts.len()).map_or(u32::MAX, |p| p.saturating_mul(n));
        if total > CHOICES_MAX {
            return invalid(format_args!(
                "prompts times n must be at most {CHOICES_MAX}, got {} times {n}",
                self.prompts.len()
            ));
        }
        Ok(())
    }
}

/// What the API gives a completion that names no limit.
const DEFAULT_MAX_TOKENS: u32 = 16;

fn check_best_of(best_of: Option<u32>, n: Option<u32>) -> Result<(), ApiError> {
    range("best_of", best_of, 0..=20)?;
    match best_of {
        Some(best_of) if best_of > 1 && best_of > n.unwrap_or(1) => {
            invalid("best_of above n is not supported: ask for n choices and pick")
        }
        Some(best_of) if best_of > 0 && best_of < n.unwrap_or(1) => {
            invalid(format_args!("best_of must not be below n, got {best_of}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompt() -> impl Strategy<Value = String> {
        let text = any::<String>().prop_map(|text| serde_json::Value::from(text).to_string());
        let list = |item: BoxedStrategy<String>| {
            prop::collection::vec(item, 0..4).prop_map(|items| format!("[ {}]", items.join(" ,")))
        };
        let item = prop_oneof![
            text.clone(),
            any::<u32>().prop_map(|id| id.to_string()),
            Just("-1".to_owned()),
            Just("4294967296".to_owned()),
            Just("1.5".to_owned()),
            Just("null".to_owned()),
        ]
        .boxed();
        let flat = list(item.clone()).boxed();
        prop_oneof![text, flat.clone(), list(flat), list(item)]
    }

    proptest! {
        /// The quick reading of the first prompt is what a whole reading finds, where that finds something.
        #[test]
        fn the_first_prompt_is_the_first_of_all(text in prompt()) {
            let (first, alone) = first_prompt(&text, usize::MAX).unzip();
            if let Some(all) = prompts(&text) {
                prop_assert_eq!(first.as_ref(), all.first(), "{}", text);
                prop_assert!(all.is_empty() || alone == Some(all.len() == 1), "{}", text);
            }
        }
    }

    #[test]
    fn ids_are_read_up_to_a_bound() {
        let read = |text, max| first_prompt(text, max);
        let ids = |list: &[Token]| Prompt::Tokens(list.to_vec());
        assert_eq!(read("[1, 2,3 ]", 3), Some((ids(&[1, 2, 3]), true)));
        assert_eq!(read("[1,2,3]", 2), Some((ids(&[1, 2]), false)));
        assert_eq!(read("[[1,2],[3]]", 2), Some((ids(&[1, 2]), false)));
        assert_eq!(read("[[1,2,3]]", 2), Some((ids(&[1, 2]), false)));
        assert_eq!(read("[[1,2]]", 2), Some((ids(&[1, 2]), true)));
        assert_eq!(read("[1,\"a\"]", 1), Some((ids(&[1]), false)));
        for text in [
            "[]",
            "5",
            "[1,\"a\"]",
            "[1.5]",
            "[-1]",
            "[4294967296]",
            "{}",
        ] {
            assert_eq!(read(text, 9), None, "{text}");
        }
    }
}
