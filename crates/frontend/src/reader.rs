//! Requests read for a program that sends them itself.
//!
//! Answers one question: which tokens is the prompt of this body, and what does the body ask of the router? A gateway that only wants to
//! know the worker (the C library) has the server's own reading of bodies, templates and `nvext` by it, and no HTTP.

use std::sync::Arc;

use kvasir_discovery::Card;
use kvasir_openai::{
    ApiError, ChatRequest, CompletionRequest, HeaderHints, Object, ToolChoice, Tools, Unknown,
};
use kvasir_router::Arrival;
use kvasir_text::{Effort, TextModel};
use kvasir_types::{RequestId, Token};
use kvasir_upstream::WorkerTls;

use crate::fleet::load_card_text;
use crate::models::prompt;
use crate::request::ask;

/// Longest sequence, where a card says none.
const CONTEXT_LENGTH_DEFAULT: u32 = 1 << 20;

/// Reads requests to one model.
pub struct RequestReader {
    text: Arc<TextModel>,
    context_length: u32,
}

/// A request that was read.
#[derive(Debug)]
pub struct ReadRequest {
    /// Its prompt; of several the first.
    pub tokens: Arc<[Token]>,
    /// What it asks of the router; the index is not asked yet.
    pub arrival: Box<Arrival>,
    /// Whose cache it may share, if it says so.
    pub cache_namespace: Option<String>,
}

impl RequestReader {
    /// Loads the tokenizer and the template that a card names. What fails is said and tried again, for ever: whoever calls bounds it.
    pub async fn of_card(card: &Card) -> Self {
        let tls = WorkerTls::default();
        Self {
            text: load_card_text(card, &tls).await,
            context_length: card.context_length.unwrap_or(CONTEXT_LENGTH_DEFAULT),
        }
    }

    /// Reads a body of `/v1/chat/completions`, or of `/v1/completions` if it has a `prompt` and no `messages`. Fields that nobody knows are
    /// read past.
    pub fn read(&self, id: RequestId, body: &[u8], now_unix: u64) -> Result<ReadRequest, ApiError> {
        let is_completion = {
            let object = Object::parse(body)?;
            object.get("messages").is_none() && object.get("prompt").is_some()
        };
        let (prompts, nvext, options) = if is_completion {
            let request = CompletionRequest::parse(body, Unknown::Ignore)?;
            let prompts = prompt::of_completion(&self.text, &request, self.context_length);
            (prompts, request.nvext, request.options)
        } else {
            let mut chat = ChatRequest::parse(body, Unknown::Ignore)?;
            let is_unused = |tools: &mut Tools| tools.choice == ToolChoice::None;
            drop(chat.tools.take_if(is_unused));
            let terms = (self.context_length, Effort::Full);
            let prompts = prompt::of_chat(&self.text, &chat, now_unix, terms, || ());
            (prompts, chat.nvext, chat.options)
        };
        let prompts = prompts.map_err(prompt::PromptError::told)?;
        let tokens = prompts.tokens.first().cloned().unwrap_or_default();
        let headers = HeaderHints::default();
        let arrival = Box::new(ask::arrival(id, tokens.len(), &nvext, &headers));
        Ok(ReadRequest {
            tokens,
            arrival,
            cache_namespace: nvext.cache_salt.or(options.cache_salt),
        })
    }
}
