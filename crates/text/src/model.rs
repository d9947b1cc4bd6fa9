//! A model's text side: tokenizer, template, and what its files say.
//!
//! Answers one question: given a model's folder, how do its requests become tokens and its tokens text?

use std::path::Path;
use std::sync::Arc;

use kvasir_types::Token;

use crate::chat::ChatInput;
use crate::error::{LoadError, TextError};
use crate::load::Files;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Everything that turns a model's requests into tokens and its tokens into text.
#[derive(Debug)]
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    eos: Vec<Token>,
    context_length: Option<u32>,
    defaults: GenerationDefaults,
}

/// Sampling values that the model's makers recommend; a request's own values beat them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: Option<f32>,
    /// Nucleus share.
    pub top_p: Option<f32>,
    /// Likeliest tokens considered.
    pub top_k: Option<i32>,
    /// Penalty on repetition.
    pub repetition_penalty: Option<f32>,
}

impl TextModel {
    /// Loads a folder with `tokenizer.json` and, where present, `tokenizer_config.json`,
    /// `generation_config.json`, `config.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file that is there is not usable.
    pub fn load(folder: &Path) -> Result<Self, LoadError> {
        Self::from_files(&Files::read(folder)?)
    }

    /// The small tokenizer that the demo carries: byte-level BPE of about 4,000 tokens with a ChatML-like
    /// template.
    ///
    /// # Errors
    /// None in a build whose tests passed.
    pub fn builtin() -> Result<Self, LoadError> {
        Self::from_files(&crate::builtin::files())
    }

    pub(crate) fn from_files(files: &Files) -> Result<Self, LoadError> {
        let path = files.folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_json(&files.tokenizer).map_err(|e| LoadError::Parse {
            path,
            reason: e.to_string(),
        })?;
        let config = files.parse()?;
        let template = match config.templates.is_empty() {
            true => None,
            false => Some(ChatTemplate::new(config.templates, config.specials)?),
        };
        let mut eos = config.eos_ids;
        eos.extend(config.eos_token.and_then(|token| tokenizer.id_of(&token)));
        eos.sort_unstable();
        eos.dedup();
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template,
            eos,
            context_length: config.context_length,
            defaults: config.defaults,
        })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Whether conversations can be rendered.
    #[must_use]
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// No template, or one that refuses or fails.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        template.render(input)
    }

    /// The tokens of a rendered conversation: the template has put the special tokens in.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<Token>, TextError> {
        self.tokenizer.encode(rendered, false)
    }

    /// The tokens of a plain prompt, with what the tokenizer puts around a text.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<Token>, TextError> {
        self.tokenizer.encode(text, true)
    }

    /// Tokens that end an answer, in ascending order.
    #[must_use]
    pub fn eos(&self) -> &[Token] {
        &self.eos
    }

    /// Tokens of prompt and answer together, where the files say.
    #[must_use]
    pub fn context_length(&self) -> Option<u32> {
        self.context_length
    }

    /// What the model's makers recommend.
    #[must_use]
    pub fn defaults(&self) -> GenerationDefaults {
        self.defaults
    }
}
