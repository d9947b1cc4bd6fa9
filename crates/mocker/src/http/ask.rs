//! What a request's body asks for, judged as vLLM judges it.

use std::sync::Arc;

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use kvasir_openai::{Prompt, Scan};
use kvasir_text::{ChatInput, DetokenizeOptions, Detokenizer, Dialect, TextError};
use kvasir_types::{DpRank, Sampling, Token};
use serde_json::Value;

use super::error::Refusal;
use super::server::Mock;
use super::transfer::{HttpPart, Wish};

/// Choices of one request at most.
const CHOICES_MAX: usize = 256;
/// Tokens of a completion where nothing is said.
const COMPLETION_TOKENS: u32 = 16;

/// A request for answers.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) chat: bool,
    /// One for each choice.
    pub(crate) prompts: Vec<Arc<[Token]>>,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    pub(crate) keep_stop: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) priority: i32,
    /// The adapter that is to answer.
    pub(crate) adapter: Option<Arc<str>>,
    pub(crate) rank: DpRank,
    /// What it says about where its prompt is.
    pub(crate) wish: Wish,
}

/// Fields of a body by name.
pub(crate) struct Fields(serde_json::Map<String, Value>);

impl Fields {
    /// Reads a body; refuses what is no JSON object.
    pub(crate) fn read(headers: &HeaderMap, body: &[u8]) -> Result<Self, Refusal> {
        let content_type = headers
            .get(CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default();
        if body.is_empty() {
            let details =
                "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}";
            return Err(Refusal::form(details, Some("body")));
        }
        if !content_type
            .to_ascii_lowercase()
            .starts_with("application/json")
        {
            let details = "Unsupported Media Type: Only 'application/json' is allowed";
            return Err(Refusal::form(details, None));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => {
                let details = "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary or object to extract fields from'}";
                Err(Refusal::form(details, Some("body")))
            }
            Err(error) => {
                let at = format!("body.{}", error.column().min(body.len()));
                let details = format!(
                    "{{'type': 'json_invalid', 'loc': '{at}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
                );
                Err(Refusal::form(&details, Some(&at)))
            }
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// A whole number of at least `least`.
    fn whole(&self, name: &str, least: u64) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(number) if number >= least => Ok(Some(number)),
            _ => {
                let message = format!("{name} must be at least {least}, got {value}.");
                Err(Refusal::parameter(&message, name, &value.to_string()))
            }
        }
    }
}

impl Ask {
    pub(crate) fn read(
        mock: &Mock,
        headers: &HeaderMap,
        body: &[u8],
        chat: bool,
    ) -> Result<Self, Refusal> {
        let fields = Fields::read(headers, body)?;
        let adapter = mock.check_model(&fields)?;
        let scan = Scan::parse(body).map_err(|error| Refusal::form(&error.to_string(), None))?;
        let prompts = match chat {
            true => vec![chat_prompt(mock, &scan, fields.len())?],
            false => completion_prompts(mock, &scan, fields.len())?,
        };
        let n = fields.whole("n", 1)?.unwrap_or(1);
        check_stream_options(&fields)?;
        let mut sampling = sampling(&fields, chat)?;
        if matches!(mock.part, HttpPart::SglangPrefill { .. }) {
            // It sets that itself, whatever the request says.
            (sampling.max_tokens, sampling.min_tokens) = (1, 0);
        }
        let max = mock.max_model_len();
        let prompts_asked = repeat(&prompts, n)?;
        let ask = Self {
            chat,
            sampling: fit(sampling, &prompts, max)?,
            wish: Wish::read(mock, &fields, prompts_asked.len())?,
            prompts: prompts_asked,
            stop: strings(fields.get("stop")),
            keep_stop: fields.flag("include_stop_str_in_output"),
            stream: fields.flag("stream"),
            include_usage: scan.include_usage(),
            continuous_usage: fields
                .get("stream_options")
                .is_some_and(|o| o["continuous_usage_stats"] == true),
            return_token_ids: fields.flag("return_token_ids"),
            salt: scan.cache_salt().map(|salt| salt.as_ref().into()),
            priority: scan.priority().unwrap_or(0).saturating_neg(), // vLLM: smaller is more urgent
            rank: rank(mock, headers)?,
            adapter,
        };
        Ok(ask)
    }

    pub(crate) fn detokenizer(&self, mock: &Mock) -> Detokenizer {
        let hidden = mock
            .text
            .eos()
            .iter()
            .chain(&self.sampling.stop_tokens)
            .copied();
        Detokenizer::new(
            Arc::clone(mock.text.tokenizer()),
            DetokenizeOptions {
                skip_special: true,
                visible: Vec::new(),
                stop: self.stop.clone(),
                keep_stop: self.keep_stop,
                min_tokens: self.sampling.min_tokens,
                hidden: hidden.collect(),
            },
        )
    }
}

/// Options of a stream are for streams.
fn check_stream_options(fields: &Fields) -> Result<(), Refusal> {
    if fields.get("stream_options").is_some() && !fields.flag("stream") {
        let message =
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
        return Err(Refusal::bad(message, Some("stream_options")));
    }
    Ok(())
}

fn client(error: &TextError) -> Refusal {
    Refusal::bad(error.to_string(), None)
}

/// The tokens of a conversation.
pub(crate) fn chat_prompt(
    mock: &Mock,
    scan: &Scan<'_>,
    fields: usize,
) -> Result<Arc<[Token]>, Refusal> {
    let Some(messages) = scan.messages() else {
        return Err(Refusal::missing("messages", fields));
    };
    let rendered = mock.text.render(&ChatInput {
        messages,
        contents: None,
        tools: scan.tools(),
        documents: scan.documents(),
        kwargs: scan.template_kwargs(),
        reasoning_effort: None,
        add_generation_prompt: scan.add_generation_prompt(),
        continue_final_message: scan.continue_final_message(),
        now_unix: i64::try_from(mock.unix_secs()).unwrap_or(i64::MAX),
        dialect: Dialect::Schema,
    });
    let tokens = rendered.and_then(|text| mock.text.encode_chat(&text));
    checked(mock, tokens.map_err(|error| client(&error))?)
}

fn completion_prompts(
    mock: &Mock,
    scan: &Scan<'_>,
    fields: usize,
) -> Result<Vec<Arc<[Token]>>, Refusal> {
    if scan.raw("prompt").is_none() {
        return Err(Refusal::missing("prompt", fields));
    }
    let Some(prompts) = scan.prompts() else {
        return Err(Refusal::bad(
            "prompt must be a string, array of strings, array of tokens, or array of token arrays",
            Some("prompt"),
        ));
    };
    let tokens = |prompt: Prompt| match prompt {
        Prompt::Text(text) => {
            let tokens = mock.text.encode_prompt(&text);
            checked(mock, tokens.map_err(|error| client(&error))?)
        }
        Prompt::Tokens(tokens) => checked(mock, tokens),
    };
    prompts.into_iter().map(tokens).collect()
}

/// Refuses a prompt that is empty, too long, or has tokens that do not exist.
fn checked(mock: &Mock, tokens: Vec<Token>) -> Result<Arc<[Token]>, Refusal> {
    let max = mock.max_model_len();
    if tokens.is_empty() {
        return Err(Refusal::bad(
            "The decoder prompt cannot be empty",
            Some("prompt"),
        ));
    }
    let vocabulary = mock.text.tokenizer().vocabulary_size();
    if let Some(token) = tokens.iter().find(|token| **token >= vocabulary) {
        return Err(Refusal::bad(
            format!("Token id {token} is out of vocabulary"),
            None,
        ));
    }
    if tokens.len() >= max as usize {
        let least = max + 1;
        let message = format!(
            "This model's maximum context length is {max} tokens. However, your prompt contains at least {least} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        );
        return Err(Refusal::parameter(
            &message,
            "input_tokens",
            &least.to_string(),
        ));
    }
    Ok(tokens.into())
}

fn sampling(fields: &Fields, chat: bool) -> Result<Sampling, Refusal> {
    let temperature = fields
        .get("temperature")
        .and_then(Value::as_f64)
        .unwrap_or(1.0);
    if temperature < 0.0 {
        let value = format!("{temperature:?}");
        let message = format!("temperature must be non-negative, got {value}.");
        return Err(Refusal::parameter(&message, "temperature", &value));
    }
    let asked = fields.whole("max_completion_tokens", 1)?;
    let asked = match asked {
        None => fields.whole("max_tokens", 1)?,
        some => some,
    };
    let least = fields.whole("min_tokens", 0)?.unwrap_or(0);
    if let Some(most) = asked.filter(|most| *most < least) {
        let message =
            format!("min_tokens must be less than or equal to max_tokens={most}, got {least}.");
        return Err(Refusal::bad(message, None));
    }
    let otherwise = if chat { u32::MAX } else { COMPLETION_TOKENS };
    let ids = fields
        .get("stop_token_ids")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    Ok(Sampling {
        max_tokens: asked.map_or(otherwise, |n| u32::try_from(n).unwrap_or(u32::MAX - 1)),
        min_tokens: u32::try_from(least).unwrap_or(u32::MAX),
        stop_tokens: ids
            .filter_map(|id| Token::try_from(id.as_u64()?).ok())
            .collect(),
        ignore_eos: fields.flag("ignore_eos"),
        temperature: Some(temperature as f32),
        seed: fields.get("seed").and_then(Value::as_u64),
        ..Sampling::default()
    })
}

/// Makes the answer's length fit the model, or refuses.
fn fit(mut sampling: Sampling, prompts: &[Arc<[Token]>], max: u32) -> Result<Sampling, Refusal> {
    let longest = prompts.iter().map(|p| p.len() as u32).max().unwrap_or(0);
    if sampling.max_tokens == u32::MAX {
        sampling.max_tokens = max - longest;
        return Ok(sampling);
    }
    let asked = sampling.max_tokens;
    if asked > max {
        let message = format!(
            "max_tokens={asked} cannot be greater than max_model_len={max}. Please request fewer output tokens."
        );
        return Err(Refusal::parameter(
            &message,
            "max_tokens",
            &asked.to_string(),
        ));
    }
    if asked + longest > max {
        let message = format!(
            "This model's maximum context length is {max} tokens. However, you requested {asked} output tokens and your prompt contains at least {longest} input tokens, for a total of at least {} tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
            asked + longest
        );
        return Err(Refusal::parameter(
            &message,
            "input_tokens",
            &longest.to_string(),
        ));
    }
    Ok(sampling)
}

/// Each prompt `n` times, one after the other.
fn repeat(prompts: &[Arc<[Token]>], n: u64) -> Result<Vec<Arc<[Token]>>, Refusal> {
    let n = usize::try_from(n).unwrap_or(usize::MAX);
    if prompts.len().saturating_mul(n) > CHOICES_MAX {
        let message = format!("n must be at most {CHOICES_MAX}, got {n}.");
        return Err(Refusal::parameter(&message, "n", &n.to_string()));
    }
    Ok(prompts
        .iter()
        .flat_map(|prompt| std::iter::repeat_n(Arc::clone(prompt), n))
        .collect())
}

fn strings(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|v| Some(v.as_str()?.to_owned()))
            .collect(),
        _ => Vec::new(),
    }
}

/// The rank that the client wants; what is no number is ignored, as vLLM does.
fn rank(mock: &Mock, headers: &HeaderMap) -> Result<DpRank, Refusal> {
    let asked = headers
        .get("x-data-parallel-rank")
        .and_then(|v| v.to_str().ok());
    let Some(asked) = asked.and_then(|text| text.trim().parse::<i64>().ok()) else {
        return Ok(mock.next_rank());
    };
    let ranks = mock.worker.options().ranks.max(1);
    match u32::try_from(asked).ok().filter(|rank| *rank < ranks) {
        Some(rank) => Ok(DpRank(rank)),
        None => Err(Refusal::bad(
            format!("data_parallel_rank {asked} is out of range [0, {ranks})."),
            None,
        )),
    }
}
