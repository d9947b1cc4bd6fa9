//! `/v1/completions` for token workers.
//!
//! Answers one question: which prompts, and how are they to be completed? A prompt is text or token ids, one
//! or several; each prompt gets `n` choices, numbered in order.

use kvasir_types::Token;
use serde::Deserialize;

use crate::ApiError;
use crate::chat::check_model;
use crate::nvext::Nvext;
use crate::object::Object;
use crate::options::{CHOICES_MAX, Options, invalid, range};
use crate::strict::{Reader, Unknown};

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

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of lists of token ids"
)]
enum RawPrompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Token>),
    TokenLists(Vec<Vec<Token>>),
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
