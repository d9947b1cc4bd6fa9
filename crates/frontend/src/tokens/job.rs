//! Everything that one HTTP request asks for, whichever endpoint it came through.

use std::sync::Arc;

use kvasir_openai::{ApiError, ChatRequest, Endpoint, HeaderHints, Nvext, Options};
use kvasir_text::TextModel;
use kvasir_types::{AgentSession, RequestContext, RequestId, Sampling, Token, WorkerId};

use crate::models::ServedModel;
use crate::models::prompt::Prompts;
use crate::tokens::reading::AnswerReading;

/// A request whose prompts are tokens.
pub(crate) struct Job {
    /// The request.
    pub(crate) id: RequestId,
    /// The id that its answer has.
    pub(crate) shown: RequestId,
    /// The model it named.
    pub(crate) model: Arc<ServedModel>,
    /// The model's template and tokenizer.
    pub(crate) text: Arc<TextModel>,
    /// Where it came in.
    pub(crate) endpoint: Endpoint,
    /// How to draw, stop and deliver.
    pub(crate) options: Options,
    /// What it says to the router.
    pub(crate) nvext: Nvext,
    /// The same in headers.
    pub(crate) headers: HeaderHints,
    /// What is asked.
    pub(crate) prompts: Prompts,
    /// The conversation, where the next turn is to be prefilled.
    pub(crate) chat: Option<Box<ChatRequest>>,
    /// How the text of its answers is read.
    pub(crate) reading: AnswerReading,
    /// The prompt as the template prints it, where the client wants to see it.
    pub(crate) formatted: Option<String>,
    /// Requests that waited in the router when this one came, where the client wants to know.
    pub(crate) queue_depth: u32,
}

impl Job {
    /// How many answers it wants: `n` for each prompt.
    pub(crate) fn choices(&self) -> u32 {
        let prompts = u32::try_from(self.prompts.tokens.len()).unwrap_or(u32::MAX);
        prompts.saturating_mul(self.options.n)
    }

    /// The prompt of choice `index`.
    pub(crate) fn prompt_of(&self, index: u32) -> Option<&Arc<[Token]>> {
        self.prompts.tokens.get(self.prompt_number(index))
    }

    /// The text that choice `index` begins with.
    pub(crate) fn echo_of(&self, index: u32) -> &str {
        self.prompts
            .echo
            .get(self.prompt_number(index))
            .map_or("", String::as_str)
    }

    fn prompt_number(&self, index: u32) -> usize {
        (index / self.options.n.max(1)) as usize
    }

    /// The cache namespace, header and extension before the body's own field.
    pub(crate) fn salt(&self) -> Option<&str> {
        self.nvext
            .cache_salt
            .as_deref()
            .or(self.options.cache_salt.as_deref())
    }

    /// When an answer to a prompt of this length stops, and how it is drawn.
    pub(crate) fn sampling(&self, prompt_tokens: usize) -> Sampling {
        let prompt = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let mut sampling = self
            .options
            .sampling(self.model.context_length.saturating_sub(prompt));
        if self.nvext.greedy {
            sampling.temperature = Some(0.0);
        }
        if !sampling.ignore_eos {
            sampling.stop_tokens.extend_from_slice(self.text.eos());
        }
        sampling
    }

    /// What a worker is told beside the prompt and how to draw.
    pub(crate) fn context(&self) -> RequestContext {
        let (nvext, headers) = (&self.nvext, &self.headers);
        let eos = (!self.options.ignore_eos).then(|| self.text.eos().into());
        let priority = nvext.hints.priority.map(f64::from);
        let session = headers.session.id.as_deref();
        let meta = headers.meta.iter();
        RequestContext {
            eos_tokens: eos.unwrap_or_default(),
            card_sum: self.model.tokens().card_sum().cloned(),
            annotations: nvext
                .annotations
                .iter()
                .map(|a| a.as_str().into())
                .collect(),
            expected_output_tokens: nvext.hints.osl,
            priority_jump: priority.or(nvext.hints.latency_sensitivity),
            strict_priority: nvext.hints.strict_priority,
            pinned: nvext.pinned_worker().map(WorkerId),
            session: session.map(|id| AgentSession {
                id: id.into(),
                trigger: None,
            }),
            metadata: meta
                .map(|(name, value)| (name.as_str().into(), value.as_str().into()))
                .collect(),
            ..RequestContext::default()
        }
    }

    /// Why an answer cannot be resumed at another worker.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        if self.choices() != 1 {
            return Some("choices");
        }
        let pinned = self.nvext.pinned_worker().map(|_| "pinned");
        self.options.obstacle().or(pinned)
    }

    /// Fails if a prompt leaves no room for an answer.
    pub(crate) fn check_length(&self) -> Result<(), ApiError> {
        let context = self.model.context_length as usize;
        match self.prompts.tokens.iter().map(|p| p.len()).max() {
            Some(longest) if longest >= context => Err(ApiError::validation(format_args!(
                "This model's maximum context length is {context} tokens, the prompt has {longest}; \
                 shorten it by at least {} tokens",
                longest - context + 1
            ))),
            _ => Ok(()),
        }
    }
}
