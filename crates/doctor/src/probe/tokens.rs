//! Our tokens of a text and of a conversation beside the engine's.

use std::path::Path;
use std::sync::Arc;

use kvasir_telemetry::Clock;
use kvasir_text::{ChatInput, Dialect, TextError, TextModel};
use kvasir_types::Token;
use serde_json::{Value, json};

use super::http::Client;
use super::test_requests::read_tokens;
use super::vocabulary;
use crate::observations::{
    Comparison, Difference, Observations, ProbeError, ProbeResult, TokenizerProbe,
};

/// A text with what tokenizers disagree about: letters of several scripts, numbers, blanks, code.
const PLAIN: &str =
    "Größe 12345.67 of   naïve 東京 🙂\n\tfn main() { println!(\"{}\", 0x1F); }\n\n";

/// A conversation with a system's word, an answer and a further question.
fn conversation() -> Value {
    json!([
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": PLAIN},
        {"role": "assistant", "content": "That prints 31."},
        {"role": "user", "content": "Why? "},
    ])
}

/// Compares, if there is a tokenizer here.
pub(crate) async fn compare(
    client: &Client,
    observed: &Observations,
    text: Option<&Result<Arc<TextModel>, String>>,
) -> TokenizerProbe {
    let model = observed.facts.models.first();
    let root = model.and_then(|m| m.root.clone());
    let folder = root.filter(|r| Path::new(r).join("tokenizer.json").is_file());
    let text = match text {
        None => {
            let name = model.map_or("", |m| m.name.as_str());
            let body = json!({"model": name, "prompt": PLAIN, "add_special_tokens": true});
            let tokenizes = tokenize(client, observed, &body).await.is_ok();
            return TokenizerProbe::NoModelPath { folder, tokenizes };
        }
        Some(Err(error)) => return TokenizerProbe::Unusable(error.clone()),
        Some(Ok(text)) => text,
    };
    let name = model.map_or("", |m| m.name.as_str());
    let (plain, chat) = match ours(text) {
        Ok(ours) => ours,
        Err(error) => return TokenizerProbe::Unusable(error.to_string()),
    };
    let told = async {
        let plain = json!({"model": name, "prompt": PLAIN, "add_special_tokens": true});
        let chat = json!({"model": name, "messages": conversation()});
        let plain = tokenize(client, observed, &plain).await?;
        Ok::<_, ProbeError>((plain, tokenize(client, observed, &chat).await?))
    };
    let show = |tokens: &[Token]| text.tokenizer().decode(tokens, false).unwrap_or_default();
    let mut found = Comparison {
        chat_tokens: chat.len(),
        engine_folder: folder.filter(|f| observed.target.model_path.as_ref() != Some(f)),
        ..Comparison::default()
    };
    match told.await {
        Ok((their_plain, their_chat)) => {
            found.plain = Difference::between(&plain, &their_plain, show);
            found.chat = Difference::between(&chat, &their_chat, show);
            if found.plain.is_none() && found.chat.is_none() {
                compare_vocabulary(client, observed, text, name, &mut found).await;
            }
        }
        Err(silence) => match told_by_answer(client, observed, name).await {
            Some(EngineTokens::Tokens(theirs)) => {
                found.chat = Difference::between(&chat, &theirs, show)
            }
            Some(EngineTokens::Count(count)) => {
                found.counts_only = true;
                found.chat = (count != chat.len()).then(|| Difference {
                    at: 0,
                    ours: chat.len(),
                    theirs: count,
                    our_text: String::new(),
                    their_text: String::new(),
                });
            }
            None => return TokenizerProbe::NoEngineTokens(silence),
        },
    }
    TokenizerProbe::Compared(found)
}

/// Compares the ids of whole texts of the vocabulary, until one differs or the engine takes no more.
async fn compare_vocabulary(
    client: &Client,
    observed: &Observations,
    text: &TextModel,
    model: &str,
    found: &mut Comparison,
) {
    let show = |tokens: &[Token]| text.tokenizer().decode(tokens, false).unwrap_or_default();
    for words in vocabulary::texts(text.tokenizer()) {
        let body = json!({"model": model, "prompt": words, "add_special_tokens": true});
        let (Ok(ours), Ok(theirs)) = (
            text.encode_prompt(&words),
            tokenize(client, observed, &body).await,
        ) else {
            return;
        };
        found.vocabulary_tokens += ours.len();
        found.plain = Difference::between(&ours, &theirs, show);
        if found.plain.is_some() {
            return;
        }
    }
}

/// The plain text and the conversation, as the frontend makes tokens of them.
fn ours(text: &TextModel) -> Result<(Vec<Token>, Vec<Token>), TextError> {
    let clock = Clock::new();
    let messages = conversation().to_string();
    let rendered = text.render(&ChatInput {
        messages: &messages,
        add_generation_prompt: true,
        now_unix: i64::try_from(clock.unix_secs(clock.now())).unwrap_or(i64::MAX),
        dialect: Dialect::Vllm,
        ..ChatInput::default()
    })?;
    Ok((text.encode_prompt(PLAIN)?, text.encode_chat(&rendered)?))
}

async fn tokenize(
    client: &Client,
    observed: &Observations,
    body: &Value,
) -> ProbeResult<Vec<Token>> {
    let answer = client
        .post(&observed.target.endpoint, "/tokenize", body, None)
        .await?;
    read_tokens(&answer).ok_or_else(|| ProbeError::Unreadable("it lists no tokens".to_owned()))
}

/// What an engine without `/tokenize` tells about its prompt.
enum EngineTokens {
    Tokens(Vec<Token>),
    Count(usize),
}

async fn told_by_answer(
    client: &Client,
    observed: &Observations,
    model: &str,
) -> Option<EngineTokens> {
    let body = json!({
        "model": model,
        "messages": conversation(),
        "max_tokens": 1,
        "return_token_ids": true,
    });
    let path = "/v1/chat/completions";
    let answer = client
        .post(&observed.target.endpoint, path, &body, None)
        .await
        .ok()?;
    let answer: Value = serde_json::from_slice(&answer).ok()?;
    if let Some(tokens) = answer.get("prompt_token_ids").and_then(Value::as_array) {
        let token = |value: &Value| Token::try_from(value.as_u64()?).ok();
        return tokens
            .iter()
            .map(token)
            .collect::<Option<_>>()
            .map(EngineTokens::Tokens);
    }
    let count = answer.pointer("/usage/prompt_tokens")?.as_u64()?;
    Some(EngineTokens::Count(count as usize))
}
