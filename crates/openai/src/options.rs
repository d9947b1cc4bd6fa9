//! What chat and completions share.
//!
//! Answers one question: how is the answer to be drawn, when does it stop and how is it delivered? Values
//! are checked here once; only checked ones leave.

use std::fmt::{Display, LowerExp};
use std::ops::RangeInclusive;

use kvasir_types::{Sampling, Token};
use serde::Deserialize;

use crate::strict::Reader;
use crate::{ApiError, JsonError, JsonText};

/// Stop strings or stop token lists in one request.
const STOP_MAX: usize = 32;
/// Digits of a number that an error shows before it is shown as a power of ten.
const DIGITS_MAX: usize = 24;
/// Stop token ids in one request.
const STOP_TOKENS_MAX: usize = 1024;
/// Entries of a logit bias.
const LOGIT_BIAS_MAX: usize = 1024;
/// Choices of one request, prompts times `n`.
pub(crate) const CHOICES_MAX: u32 = 128;

/// How to draw, when to stop, how to deliver. Both endpoints have these.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Deliver as server-sent events.
    pub stream: bool,
    /// End a stream with a chunk that carries usage.
    pub include_usage: bool,
    /// Usage on every chunk.
    pub continuous_usage: bool,
    /// Choices per prompt, 1 to 128.
    pub n: u32,
    /// Most tokens of an answer; none means as many as the model's context leaves.
    pub max_tokens: Option<u32>,
    /// Fewest tokens of an answer, before which nothing stops it.
    pub min_tokens: u32,
    /// Strings that end the answer; at most 32, none empty.
    pub stop: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<Token>,
    /// Continue past the model's own end.
    pub ignore_eos: bool,
    /// Leave the stop string in the text.
    pub include_stop_str: bool,
    /// Leave special tokens out of the text; true unless the client says no.
    pub skip_special_tokens: bool,
    /// 0 to 2; none means the model's default.
    pub temperature: Option<f32>,
    /// 0 to 1.
    pub top_p: Option<f32>,
    /// -1 for all.
    pub top_k: Option<i32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Above 0, to 2.
    pub repetition_penalty: Option<f32>,
    /// Added to the odds of these tokens, each -100 to 100.
    pub logit_bias: Vec<(Token, f32)>,
    /// Fixes the draw where the engine can.
    pub seed: Option<i64>,
    /// Log probabilities wanted, with this many alternatives a token.
    pub logprobs: Option<u32>,
    /// The answer must follow a grammar or schema: JSON text of an object that has it under the name of its kind, such as
    /// `{"regex":"a+"}`.
    pub guided: Option<JsonText>,
    /// Cache namespace from the body's top level; empty is none.
    pub cache_salt: Option<String>,
    /// Larger is more urgent; from the body's top level.
    pub priority: Option<i32>,
    /// The client's name for its user.
    pub user: Option<String>,
}

impl Options {
    /// The part an engine needs. `context_left` is what the model's context leaves after the prompt; it bounds
    /// an answer whose length the client left open.
    #[must_use]
    pub fn sampling(&self, context_left: u32) -> Sampling {
        Sampling {
            max_tokens: self.max_tokens.unwrap_or(context_left).min(context_left),
            min_tokens: self.min_tokens,
            stop_tokens: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: self.logit_bias.clone(),
            guided: self.guided.as_ref().map(|text| text.as_str().into()),
            logprobs: self.logprobs,
            seed: self.seed.map(i64::cast_unsigned),
        }
    }

    /// Why a stream cannot be resumed elsewhere: several choices or a grammar's state cannot be moved.
    #[must_use]
    pub fn obstacle(&self) -> Option<&'static str> {
        match (self.n, &self.guided) {
            (2.., _) => Some("choices"),
            (_, Some(_)) => Some("guided"),
            _ => None,
        }
    }

    /// Takes the shared fields; types first, then ranges, as the API orders its errors.
    pub(crate) fn read(body: &mut Reader<'_, '_>) -> Result<RawOptions, JsonError> {
        for ignored in ACCEPTED_WITHOUT_EFFECT {
            body.raw(ignored);
        }
        let guided = GUIDES.map(|(key, name)| body.json(key).map(|text| guide(name, &text)));
        Ok(RawOptions {
            stream: body.take("stream")?,
            stream_options: body.take("stream_options")?,
            n: body.take("n")?,
            min_tokens: body.take("min_tokens")?,
            stop: body.take("stop")?,
            stop_token_ids: body.take("stop_token_ids")?,
            ignore_eos: body.take("ignore_eos")?,
            include_stop_str: body.take("include_stop_str_in_output")?,
            skip_special_tokens: body.take("skip_special_tokens")?,
            temperature: body.take("temperature")?,
            top_p: body.take("top_p")?,
            top_k: body.take("top_k")?,
            min_p: body.take("min_p")?,
            frequency_penalty: body.take("frequency_penalty")?,
            presence_penalty: body.take("presence_penalty")?,
            repetition_penalty: body.take("repetition_penalty")?,
            length_penalty: body.take("length_penalty")?,
            seed: body.take("seed")?,
            logit_bias: body.take("logit_bias")?,
            guided: guided.into_iter().flatten().next(),
            cache_salt: body.take("cache_salt")?,
            priority: body.take("priority")?,
            user: body.take("user")?,
        })
    }
}

/// Fields that ask for an answer of a certain form, and what engines call that kind.
const GUIDES: [(&str, &str); 4] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_grammar", "grammar"),
    ("guided_choice", "choice"),
];

/// An answer must have this form: `text` is the JSON of a schema or grammar of this kind.
pub(crate) fn guide(kind: &str, text: &JsonText) -> JsonText {
    JsonText::from_checked(&format!("{{\"{kind}\":{}}}", text.as_str()))
}

/// Fields of the API or of engines that are read past: they change nothing that we or a token worker do.
pub(crate) const ACCEPTED_WITHOUT_EFFECT: &[&str] = &[
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words_token_ids",
    "detokenize",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "truncate_prompt_tokens",
];

/// The shared fields with right types and unchecked values.
pub(crate) struct RawOptions {
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub(crate) n: Option<u32>,
    min_tokens: Option<u32>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<Token>>,
    ignore_eos: Option<bool>,
    include_stop_str: Option<bool>,
    skip_special_tokens: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
    min_p: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    length_penalty: Option<f32>,
    seed: Option<i64>,
    logit_bias: Option<std::collections::BTreeMap<String, f32>>,
    guided: Option<JsonText>,
    cache_salt: Option<String>,
    priority: Option<i32>,
    user: Option<String>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
    #[serde(default)]
    continuous_usage_stats: Option<bool>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings or a list of token ids"
)]
enum Stop {
    One(String),
    Many(Vec<String>),
    Tokens(Vec<Token>),
}

impl RawOptions {
    /// Checks the ranges. `max_tokens`, `logprobs` and `guided` come from the endpoint's own fields.
    pub(crate) fn check(
        self,
        max_tokens: Option<u32>,
        logprobs: Option<u32>,
        guided: Option<JsonText>,
    ) -> Result<Options, ApiError> {
        range("Temperature", self.temperature, 0.0..=2.0)?;
        range("Top_p", self.top_p, 0.0..=1.0)?;
        range("Min_p", self.min_p, 0.0..=1.0)?;
        range("Frequency penalty", self.frequency_penalty, -2.0..=2.0)?;
        range("Presence penalty", self.presence_penalty, -2.0..=2.0)?;
        range("Repetition penalty", self.repetition_penalty, 0.0..=2.0)?;
        range("Length penalty", self.length_penalty, -2.0..=2.0)?;
        range("n", self.n, 1..=CHOICES_MAX)?;
        self.check_rest(max_tokens)?;
        let logit_bias = self.bias()?;
        let (stop, stop_token_ids) = stops(self.stop, self.stop_token_ids)?;
        let stream = self.stream.unwrap_or(false);
        let usage = self.stream_options.filter(|_| stream);
        Ok(Options {
            stream,
            include_usage: usage
                .as_ref()
                .is_some_and(|o| o.include_usage == Some(true)),
            continuous_usage: usage.is_some_and(|o| o.continuous_usage_stats == Some(true)),
            n: self.n.unwrap_or(1),
            max_tokens,
            min_tokens: self.min_tokens.unwrap_or(0),
            stop,
            stop_token_ids,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            include_stop_str: self.include_stop_str.unwrap_or(false),
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias,
            seed: self.seed,
            logprobs,
            guided: guided.or(self.guided),
            cache_salt: self.cache_salt.filter(|s| !s.is_empty()),
            priority: self.priority,
            user: self.user,
        })
    }

    fn check_rest(&self, max_tokens: Option<u32>) -> Result<(), ApiError> {
        if max_tokens == Some(0) {
            return invalid("Max tokens must be greater than 0, got 0");
        }
        if let (Some(max), Some(min)) = (max_tokens, self.min_tokens)
            && min > max
        {
            return invalid(format_args!(
                "min_tokens must not exceed max_tokens, got {min} and {max}"
            ));
        }
        if self.repetition_penalty == Some(0.0) {
            return invalid("Repetition penalty must be greater than 0, got 0");
        }
        if let Some(k) = self.top_k.filter(|k| *k < -1) {
            return invalid(format_args!("Top_k must be -1 or more, got {k}"));
        }
        if self.n.is_some_and(|n| n > 1) && self.temperature == Some(0.0) {
            return invalid("n above 1 needs a temperature above 0: the choices would be equal");
        }
        if self.stream_options.is_some() && self.stream != Some(true) {
            return invalid("`stream_options` needs `stream` to be true");
        }
        if self
            .user
            .as_ref()
            .is_some_and(|user| user.trim().is_empty())
        {
            return invalid("User ID cannot be empty");
        }
        Ok(())
    }

    fn bias(&self) -> Result<Vec<(Token, f32)>, ApiError> {
        let Some(bias) = &self.logit_bias else {
            return Ok(Vec::new());
        };
        if bias.len() > LOGIT_BIAS_MAX {
            return invalid(format_args!(
                "logit_bias may have {LOGIT_BIAS_MAX} entries, got {}",
                bias.len()
            ));
        }
        let entry = |(token, value): (&String, &f32)| {
            let shown = crate::strict::echo(token);
            let name = format!("Logit bias for token '{shown}'");
            range(&name, Some(*value), -100.0..=100.0)?;
            match token.parse() {
                Ok(id) => Ok((id, *value)),
                Err(_) => invalid(format_args!(
                    "logit_bias has a key that is no token id: '{shown}'"
                )),
            }
        };
        bias.iter().map(entry).collect()
    }
}

fn stops(
    stop: Option<Stop>,
    ids: Option<Vec<Token>>,
) -> Result<(Vec<String>, Vec<Token>), ApiError> {
    let mut ids = ids.unwrap_or_default();
    let strings = match stop {
        None => Vec::new(),
        Some(Stop::One(one)) => vec![one],
        Some(Stop::Many(many)) => many,
        Some(Stop::Tokens(tokens)) => {
            ids.extend(tokens);
            Vec::new()
        }
    };
    if strings.len() > STOP_MAX {
        return invalid(format_args!(
            "Maximum of {STOP_MAX} stop sequences allowed, got {}",
            strings.len()
        ));
    }
    if ids.len() > STOP_TOKENS_MAX {
        return invalid(format_args!(
            "Maximum of {STOP_TOKENS_MAX} stop token IDs allowed, got {}",
            ids.len()
        ));
    }
    if strings.iter().any(String::is_empty) {
        return invalid("Stop sequence cannot be empty");
    }
    Ok((strings, ids))
}

pub(crate) fn invalid<T>(what: impl Display) -> Result<T, ApiError> {
    Err(ApiError::validation(what))
}

/// NaN is in no range.
pub(crate) fn range<T: PartialOrd + Display + LowerExp + Copy>(
    name: &str,
    value: Option<T>,
    allowed: RangeInclusive<T>,
) -> Result<(), ApiError> {
    let Some(v) = value.filter(|v| !allowed.contains(v)) else {
        return Ok(());
    };
    let (start, end, got) = (shown(*allowed.start()), shown(*allowed.end()), shown(v));
    // The largest number that there is bounds nothing.
    match end.contains('e') {
        true => invalid(format_args!("{name} must be at least {start}, got {got}")),
        false => invalid(format_args!(
            "{name} must be between {start} and {end}, got {got}"
        )),
    }
}

/// A number in few digits: the largest ones have three hundred.
pub(crate) fn shown(number: impl Display + LowerExp) -> String {
    let whole = number.to_string();
    match whole.len() > DIGITS_MAX {
        true => format!("{number:e}"),
        false => whole,
    }
}
