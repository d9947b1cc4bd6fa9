//! Which fields of a body make the prompt, and which tokens that prompt is.

use std::sync::Arc;

use kvasir_openai::{
    ApiError, ChatRequest, CompletionRequest, Endpoint, Options, Prompt, Scan, Span, content_spans,
    count_values, is_outside,
};
use kvasir_text::{
    ChatInput, DetokenizeOptions, Detokenizer, Dialect, Effort, TextError, TextModel,
};
use kvasir_types::Token;

use crate::models::tokenize::fitting;

/// The prompts of one request as tokens.
#[derive(Debug, Default)]
pub(crate) struct Prompts {
    /// At least one, none empty.
    pub(crate) tokens: Vec<Arc<[Token]>>,
    /// The text that each answer is to begin with; empty unless the client wants an echo.
    pub(crate) echo: Vec<String>,
    /// The end of a conversation's prompt, where its template may have begun the answer.
    pub(crate) end: Box<str>,
}

impl Prompts {
    /// The first of them as text, special tokens included.
    pub(crate) fn formatted(&self, text: &TextModel) -> Option<String> {
        text.tokenizer().decode(self.tokens.first()?, false).ok()
    }
}

/// How much of a prompt's end is kept: more than any mark that a template puts there.
const PROMPT_END_BYTES: usize = 64;
/// JSON values that a template is given at most: each takes near a kilobyte, and no model reads so many.
const VALUES_MAX: usize = 1 << 17;
/// Bytes of tools, documents and arguments of the template that are never too many, however short the model's prompts are.
const EXTRAS_BYTES_MIN: usize = 1 << 20;

/// Why a prompt did not become tokens.
#[derive(Debug)]
pub(crate) enum PromptError {
    /// The client can be told why.
    Refused(ApiError),
    /// It takes more effort than was to be spent.
    TooMuch(TextError),
    /// What the engine will make of it is not known.
    Unknown,
}

impl PromptError {
    /// What the client is told.
    pub(crate) fn told(self) -> ApiError {
        match self {
            Self::Refused(error) => error,
            Self::TooMuch(error) => client_error(error),
            Self::Unknown => ApiError::internal(),
        }
    }
}

impl From<TextError> for PromptError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::TooMuch(_) => Self::TooMuch(error),
            error => Self::Refused(client_error(error)),
        }
    }
}

impl From<ApiError> for PromptError {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

/// The prompt of a conversation for a token worker. `rendered` is called when the template is done.
pub(crate) fn of_chat(
    text: &TextModel,
    chat: &ChatRequest,
    now_unix: u64,
    (context_length, effort): (u32, Effort),
    rendered: impl FnOnce(),
) -> Result<Prompts, PromptError> {
    let messages = chat.messages.as_str();
    if let Some(excess) = excess(messages, extras_of(chat), fitting(context_length)) {
        return Err(ApiError::validation(excess).into());
    }
    let spans = content_spans(messages);
    let input = ChatInput {
        messages,
        contents: spans.as_deref(),
        tools: chat.tools.as_ref().map(|tools| tools.list.as_str()),
        documents: chat.documents.as_ref().map(|d| d.as_str()),
        kwargs: chat.template_kwargs.as_ref().map(|k| k.as_str()),
        reasoning_effort: chat.reasoning_effort.as_deref(),
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        now_unix: i64::try_from(now_unix).unwrap_or(i64::MAX),
        dialect: Dialect::Schema,
    };
    let prompt = text.rendered(&input, effort)?;
    rendered();
    check_fits(prompt.as_str(), context_length, |part| {
        text.encode_chat(part)
    })?;
    let end = prompt.as_str();
    let end = &end[end.ceil_char_boundary(end.len().saturating_sub(PROMPT_END_BYTES))..];
    let mut prompts = one_prompt(text.encode_rendered(&prompt)?)?;
    prompts.end = end.into();
    Ok(prompts)
}

/// The prompts of a completion for a token worker.
pub(crate) fn of_completion(
    text: &TextModel,
    request: &CompletionRequest,
    context_length: u32,
) -> Result<Prompts, PromptError> {
    let mut prompts = Prompts::default();
    for prompt in &request.prompts {
        if request.echo {
            prompts.echo.push(match prompt {
                Prompt::Text(prompt) => prompt.clone(),
                Prompt::Tokens(ids) => text.tokenizer().decode(ids, false)?,
            });
        }
        let tokens: Arc<[Token]> = match prompt {
            Prompt::Text(prompt) => {
                check_fits(prompt, context_length, |part| text.encode_prompt(part))?;
                non_empty(text.encode_prompt(prompt)?)?.into()
            }
            Prompt::Tokens(ids) => {
                text.tokenizer().check(ids)?;
                ids.as_slice().into()
            }
        };
        prompts.tokens.push(tokens);
    }
    Ok(prompts)
}

/// Refuses a long text by its beginning, where that has more tokens than the model takes.
fn check_fits(
    prompt: &str,
    context_length: u32,
    encode: impl FnOnce(&str) -> Result<Vec<Token>, TextError>,
) -> Result<(), PromptError> {
    let bytes_max = fitting(context_length);
    if prompt.len() <= bytes_max {
        return Ok(());
    }
    let tokens = encode(beginning(prompt, bytes_max))?.len();
    if tokens < context_length as usize {
        return Ok(());
    }
    Err(PromptError::Refused(ApiError::validation(format_args!(
        "This model's maximum context length is {context_length} tokens, the prompt has more than {tokens}; shorten it"
    ))))
}

/// Bytes that a template is given for a conversation.
pub(crate) fn chat_bytes(chat: &ChatRequest) -> usize {
    let extras = extras_of(chat).into_iter().flatten();
    chat.messages.as_str().len() + extras.map(str::len).sum::<usize>()
}

/// What a template is given beside the messages.
fn extras_of(chat: &ChatRequest) -> [Option<&str>; 3] {
    [
        chat.tools.as_ref().map(|tools| tools.list.as_str()),
        chat.documents.as_ref().map(|d| d.as_str()),
        chat.template_kwargs.as_ref().map(|k| k.as_str()),
    ]
}

/// Why a conversation is more than a template is given; none if it is not. Looked at before anything is built of it. Messages
/// may have pictures, which are long and are no text, so they are measured when they are printed.
fn excess(messages: &str, extras: [Option<&str>; 3], bytes_max: usize) -> Option<String> {
    let extras = extras.into_iter().flatten();
    let bytes: usize = extras.clone().map(str::len).sum();
    let bytes_max = bytes_max.max(EXTRAS_BYTES_MIN);
    if bytes > bytes_max {
        return Some(format!(
            "`tools`, `documents` and `chat_template_kwargs` have {bytes} bytes; this model reads {bytes_max} of them at most"
        ));
    }
    // Short ones cannot have so many.
    if messages.len() + bytes <= VALUES_MAX {
        return None;
    }
    let mut left = VALUES_MAX;
    for part in extras.chain([messages]) {
        let values = count_values(part, left);
        let Some(rest) = left.checked_sub(values) else {
            return Some(format!(
                "the conversation and its tools have more than {VALUES_MAX} JSON values"
            ));
        };
        left = rest;
    }
    None
}

/// The same of a body that an engine judges.
fn is_excessive(scan: &Scan<'_>, bytes_max: usize) -> bool {
    let extras = [scan.tools(), scan.documents(), scan.template_kwargs()];
    excess(scan.messages().unwrap_or_default(), extras, bytes_max).is_some()
}

/// A prompt that came as tokens.
pub(crate) fn of_tokens(text: &TextModel, tokens: Vec<Token>) -> Result<Prompts, ApiError> {
    text.tokenizer().check(&tokens).map_err(client_error)?;
    one_prompt(tokens)
}

fn one_prompt(tokens: Vec<Token>) -> Result<Prompts, ApiError> {
    Ok(Prompts {
        tokens: vec![non_empty(tokens)?.into()],
        ..Prompts::default()
    })
}

fn non_empty(tokens: Vec<Token>) -> Result<Vec<Token>, ApiError> {
    if tokens.is_empty() {
        return Err(ApiError::validation("Prompt cannot be empty"));
    }
    Ok(tokens)
}

/// What the client is told when its prompt does not become tokens.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the shape that map_err takes"
)]
fn client_error(error: TextError) -> ApiError {
    if error.is_client_fault() {
        return ApiError::bad_request(error.to_string());
    }
    tracing::error!(%error, "a prompt could not be tokenized");
    ApiError::internal()
}

/// At most so many bytes of a text, in whole characters.
pub(crate) fn beginning(text: &str, bytes_max: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes_max))
        .unwrap_or(text)
}

/// How a body that an engine judges is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadTerms {
    /// It is a conversation.
    pub(crate) chat: bool,
    /// The time for templates that print the date.
    pub(crate) now_unix: u64,
    /// Of a text with more bytes only the beginning is read: then the tokens are not those that the engine will count.
    pub(crate) bytes_max: usize,
    /// What its template may do.
    pub(crate) effort: Effort,
}

/// The tokens that an engine will see for a body that it judges itself, and whether they are its only prompt, whole.
///
/// `rendered` is called when the template is done. `spans` are the texts of the messages, if they are known.
pub(crate) fn of_scan(
    text: &TextModel,
    scan: &Scan<'_>,
    spans: Option<&[Span]>,
    terms: &ReadTerms,
    rendered: impl FnOnce(),
) -> Result<(Vec<Token>, bool), PromptError> {
    let bytes_max = terms.bytes_max;
    if !terms.chat {
        let first = scan.first_prompt(usize::MAX);
        return match first.ok_or(PromptError::Unknown)? {
            (Prompt::Tokens(tokens), alone) => Ok((tokens, alone)),
            (Prompt::Text(prompt), alone) => {
                let read = beginning(&prompt, bytes_max);
                let tokens = text.encode_prompt(read)?;
                Ok((tokens, alone && read.len() == prompt.len()))
            }
        };
    }
    if scan.chat_template().is_some() || is_excessive(scan, bytes_max) {
        return Err(PromptError::Unknown);
    }
    let effort = scan.reasoning_effort();
    let input = conversation(scan, spans, effort.as_deref(), terms.now_unix);
    let input = input.ok_or(PromptError::Unknown)?;
    let prompt = text.rendered(&input, terms.effort)?;
    rendered();
    if prompt.as_str().len() <= bytes_max {
        return Ok((text.encode_rendered(&prompt)?, true));
    }
    let tokens = text.encode_chat(beginning(prompt.as_str(), bytes_max))?;
    Ok((tokens, false))
}

/// What a forwarded chat hands to the template.
fn conversation<'a>(
    scan: &Scan<'a>,
    spans: Option<&'a [Span]>,
    effort: Option<&'a str>,
    now_unix: u64,
) -> Option<ChatInput<'a>> {
    Some(ChatInput {
        messages: scan.messages()?,
        contents: spans,
        tools: scan.tools(),
        documents: scan.documents(),
        kwargs: scan.template_kwargs(),
        reasoning_effort: effort,
        add_generation_prompt: scan.add_generation_prompt(),
        continue_final_message: scan.continue_final_message(),
        now_unix: i64::try_from(now_unix).unwrap_or(i64::MAX),
        dialect: Dialect::Vllm,
    })
}

/// The first prompt of a forwarded body as text, special tokens included; `None` where we cannot know.
pub(crate) fn formatted(
    text: &TextModel,
    scan: &Scan<'_>,
    endpoint: Endpoint,
    now_unix: u64,
) -> Option<String> {
    if endpoint == Endpoint::Completions {
        return match scan.first_prompt(usize::MAX)?.0 {
            Prompt::Text(prompt) => Some(prompt),
            Prompt::Tokens(ids) => text.tokenizer().decode(&ids, false).ok(),
        };
    }
    if scan.chat_template().is_some() || is_excessive(scan, EXTRAS_BYTES_MIN) {
        return None;
    }
    let effort = scan.reasoning_effort();
    let input = conversation(scan, None, effort.as_deref(), now_unix)?;
    text.render(&input).ok()
}

/// Whether an engine's counts for a body with one prompt speak of that: no second answer, no media that become
/// tokens unseen, nothing that cuts the prompt or keeps the engine from using its cache.
pub(crate) fn is_plain(scan: &Scan<'_>, spans: Option<&[Span]>) -> bool {
    let set = |key: &str| {
        scan.raw(key)
            .is_some_and(|value| !["null", "false"].contains(&value))
    };
    let messages = scan.messages().unwrap_or_default();
    let outside = |name: &str| is_outside(messages, spans.unwrap_or_default(), name);
    // All their names have this in them, and plain conversations have not.
    let media = outside("_") && MEDIA.iter().any(|name| outside(name));
    scan.n() == 1 && !UNPLAIN.iter().any(|key| set(key)) && !media
}

/// Fields that change what an engine computes or counts.
const UNPLAIN: [&str; 6] = [
    "best_of",
    "echo",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "kv_transfer_params",
];
/// Parts of a message that are more tokens to the engine than to us.
const MEDIA: [&str; 5] = [
    "\"image_url\"",
    "\"input_audio\"",
    "\"audio_url\"",
    "\"video_url\"",
    "\"image_embeds\"",
];

/// What turns the tokens of one answer into text.
/// Special tokens that are `visible` are shown though others are left out.
pub(crate) fn detokenizer(text: &TextModel, options: &Options, visible: Vec<Token>) -> Detokenizer {
    let hidden = text
        .eos()
        .iter()
        .chain(&options.stop_token_ids)
        .copied()
        .collect();
    Detokenizer::new(
        Arc::clone(text.tokenizer()),
        DetokenizeOptions {
            skip_special: options.skip_special_tokens,
            visible,
            stop: options.stop.clone(),
            keep_stop: options.include_stop_str,
            min_tokens: options.min_tokens,
            hidden,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_are_told_from_texts_that_name_them() {
        assert!(MEDIA.iter().all(|name| name.contains('_')));
        let plain = |messages: &str| {
            let body = format!("{{\"messages\":{messages}}}");
            let scan = Scan::parse(body.as_bytes()).unwrap();
            is_plain(&scan, scan.content_spans())
        };
        assert!(plain(r#"[{"role":"user","content":"image_url"}]"#));
        assert!(plain(r#"[{"role":"user","content":"a","tool_calls":[]}]"#));
        assert!(plain(
            r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#
        ));
        let picture = r#"[{"content":"a"},{"content":[{"type":"image_url","image_url":{}}]}]"#;
        assert!(!plain(picture));
        assert!(!plain(
            r#"[{"content":[{"type":"input_audio"}],"content":"a"}]"#
        ));
    }

    /// Tools count as much as messages: both become values of the template.
    #[test]
    fn what_a_template_is_given_is_bounded_before_it_is_built() {
        let list = |count: usize| format!("[{}]", vec!["{}"; count].join(","));
        let (half, most) = (list(VALUES_MAX / 4), list(VALUES_MAX / 2 - 8));
        let says = |messages: &str, tools: &str, documents: &str, bytes_max| {
            excess(messages, [Some(tools), None, Some(documents)], bytes_max)
        };
        assert_eq!(says("[{}]", &half, "[]", 1 << 24), None);
        assert_eq!(says("[{}]", &most, "[]", 1 << 24), None);
        let many = [
            says(&list(VALUES_MAX), "[]", "[]", 1 << 24),
            says("[{}]", &list(VALUES_MAX), "[]", 1 << 24),
            says(&half, &half, &half, 1 << 24),
        ];
        for said in many {
            assert!(said.is_some_and(|said| said.contains("131072 JSON values")));
        }
        let long = format!("[\"{}\"]", "x".repeat(EXTRAS_BYTES_MIN));
        let said = says("[{}]", &long, "[]", 4096);
        assert!(said.is_some_and(|said| said.starts_with("`tools`")));
        assert_eq!(says("[{}]", &long, "[]", 1 << 24), None, "it may fit");
        assert_eq!(says(&long, "[]", "[]", 4096), None, "that may be a picture");
    }

    #[test]
    fn a_text_that_cannot_fit_is_read_in_part_and_the_rest_exactly() {
        let text = TextModel::builtin().unwrap();
        let prompt = "na\u{ef}ve words ".repeat(50);
        let body = format!(r#"{{"prompt":"{prompt}"}}"#);
        let scan = Scan::parse(body.as_bytes()).unwrap();
        let read_as = |scan: &Scan<'_>, chat, bytes_max| {
            let terms = ReadTerms {
                chat,
                now_unix: 0,
                bytes_max,
                effort: Effort::Brief,
            };
            of_scan(&text, scan, None, &terms, || ()).unwrap()
        };
        let read = |bytes_max| read_as(&scan, false, bytes_max);
        let whole = text.encode_prompt(&prompt).unwrap();
        assert_eq!(
            read(prompt.len()),
            (whole.clone(), true),
            "exact at the bound"
        );
        let (part, complete) = read(prompt.len() - 1);
        assert!(!complete && part.len() <= whole.len());
        // A cut inside a character leaves it out.
        let (part, complete) = read(3);
        assert_eq!((part, complete), (text.encode_prompt("na").unwrap(), false));
        let chat = r#"{"messages":[{"role":"user","content":"hello there"}]}"#;
        let scan = Scan::parse(chat.as_bytes()).unwrap();
        assert!(read_as(&scan, true, usize::MAX).1);
        assert!(!read_as(&scan, true, 8).1);
    }
}
