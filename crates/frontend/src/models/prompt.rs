//! Which fields of a body make the prompt, and which tokens that prompt is.

use std::sync::Arc;

use kvasir_openai::{
    ApiError, ChatRequest, CompletionRequest, Endpoint, Options, Prompt, Scan, Span, content_spans,
    is_outside,
};
use kvasir_text::{ChatInput, DetokenizeOptions, Detokenizer, Dialect, TextError, TextModel};
use kvasir_types::Token;

/// The prompts of one request as tokens.
#[derive(Debug, Default)]
pub(crate) struct Prompts {
    /// At least one, none empty.
    pub(crate) tokens: Vec<Arc<[Token]>>,
    /// The text that each answer is to begin with; empty unless the client wants an echo.
    pub(crate) echo: Vec<String>,
}

impl Prompts {
    /// The first of them as text, special tokens included.
    pub(crate) fn formatted(&self, text: &TextModel) -> Option<String> {
        text.tokenizer().decode(self.tokens.first()?, false).ok()
    }
}

/// The prompt of a conversation for a token worker.
pub(crate) fn of_chat(
    text: &TextModel,
    chat: &ChatRequest,
    now_unix: u64,
    rendered: impl FnOnce(),
) -> Result<Prompts, ApiError> {
    let messages = chat.messages.as_str();
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
    let prompt = text.rendered(&input).map_err(client_error)?;
    rendered();
    one_prompt(text.encode_rendered(&prompt).map_err(client_error)?)
}

/// The prompts of a completion for a token worker.
pub(crate) fn of_completion(
    text: &TextModel,
    request: CompletionRequest,
) -> Result<Prompts, ApiError> {
    let mut prompts = Prompts::default();
    for prompt in request.prompts {
        if request.echo {
            prompts.echo.push(match &prompt {
                Prompt::Text(prompt) => prompt.clone(),
                Prompt::Tokens(ids) => text.tokenizer().decode(ids, false).map_err(client_error)?,
            });
        }
        let tokens = match prompt {
            Prompt::Text(prompt) => text.encode_prompt(&prompt).map_err(client_error)?,
            Prompt::Tokens(ids) => {
                text.tokenizer().check(&ids).map_err(client_error)?;
                ids
            }
        };
        prompts.tokens.push(non_empty(tokens)?.into());
    }
    Ok(prompts)
}

/// A prompt that came as tokens.
pub(crate) fn of_tokens(text: &TextModel, tokens: Vec<Token>) -> Result<Prompts, ApiError> {
    text.tokenizer().check(&tokens).map_err(client_error)?;
    one_prompt(tokens)
}

fn one_prompt(tokens: Vec<Token>) -> Result<Prompts, ApiError> {
    Ok(Prompts {
        tokens: vec![non_empty(tokens)?.into()],
        echo: Vec::new(),
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
fn beginning(text: &str, bytes_max: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes_max))
        .unwrap_or(text)
}

/// The tokens that an engine will see for a body that it judges itself, and whether they are its only prompt;
/// `None` where we cannot know.
///
/// `rendered` is called when the template is done. A prompt that came as tokens needs no tokenizer. `spans` are the texts of the messages, if they are known. Of a text
/// with more than `bytes_max` bytes only the beginning is read: then the tokens are not those that the engine will count.
pub(crate) fn of_scan(
    text: Option<&TextModel>,
    scan: &Scan<'_>,
    spans: Option<&[Span]>,
    chat: bool,
    now_unix: u64,
    bytes_max: usize,
    rendered: impl FnOnce(),
) -> Option<(Vec<Token>, bool)> {
    if !chat {
        let mut prompts = scan.prompts()?.into_iter();
        let (tokens, whole) = match prompts.next()? {
            Prompt::Tokens(tokens) => (tokens, true),
            Prompt::Text(prompt) => {
                let read = beginning(&prompt, bytes_max);
                (text?.encode_prompt(read).ok()?, read.len() == prompt.len())
            }
        };
        return Some((tokens, whole && prompts.next().is_none()));
    }
    let text = text.filter(|_| scan.chat_template().is_none())?;
    let effort = scan.reasoning_effort();
    let input = conversation(scan, spans, effort.as_deref(), now_unix)?;
    if input.messages.len() <= bytes_max {
        let prompt = text.rendered(&input).ok()?;
        rendered();
        return Some((text.encode_rendered(&prompt).ok()?, true));
    }
    let prompt = text.render(&input).ok()?;
    rendered();
    let read = beginning(&prompt, bytes_max);
    let tokens = text.encode_chat(read).ok()?;
    Some((tokens, read.len() == prompt.len()))
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
        return match scan.prompts()?.into_iter().next()? {
            Prompt::Text(prompt) => Some(prompt),
            Prompt::Tokens(ids) => text.tokenizer().decode(&ids, false).ok(),
        };
    }
    if scan.chat_template().is_some() {
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
pub(crate) fn detokenizer(text: &TextModel, options: &Options) -> Detokenizer {
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
            let spans = scan.messages().and_then(content_spans);
            is_plain(&scan, spans.as_deref())
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

    #[test]
    fn a_text_that_cannot_fit_is_read_in_part_and_the_rest_exactly() {
        let text = TextModel::builtin().unwrap();
        let prompt = "na\u{ef}ve words ".repeat(50);
        let body = format!(r#"{{"prompt":"{prompt}"}}"#);
        let scan = Scan::parse(body.as_bytes()).unwrap();
        let read =
            |bytes_max| of_scan(Some(&text), &scan, None, false, 0, bytes_max, || ()).unwrap();
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
        assert!(
            of_scan(Some(&text), &scan, None, true, 0, usize::MAX, || ())
                .unwrap()
                .1
        );
        assert!(
            !of_scan(Some(&text), &scan, None, true, 0, 8, || ())
                .unwrap()
                .1
        );
    }
}
