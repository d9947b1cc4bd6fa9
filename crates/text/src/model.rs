//! A model's text side: tokenizer, template, and what its files say.
//!
//! Answers one question: given a model's folder, how do its requests become tokens and its tokens text?

use std::path::Path;
use std::sync::{Arc, OnceLock};

use kvasir_types::Token;

use crate::chat::ChatInput;
use crate::cuts::CutRules;
use crate::error::{LoadError, TextError};
use crate::file_limits::CheckedFile;
use crate::linear;
use crate::load::TextFiles;
use crate::prefix::{CacheStats, PrefixCache};
use crate::scratch;
use crate::template::{ChatTemplate, Effort, RenderedPrompt};
use crate::tokenizer::Tokenizer;

/// Bytes of text that a token stands for, about; sizes buffers.
const BYTES_PER_TOKEN: usize = 4;
/// About a quarter of a millisecond of tokenizing with the reference library.
const LONG_BYTES: usize = 512;
/// The same with the quick one, nothing cached.
const LONG_BYTES_FAST: usize = 40 << 10;

/// Everything that turns a model's requests into tokens and its tokens into text.
#[derive(Debug)]
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    eos: Vec<Token>,
    context_length: Option<u32>,
    defaults: GenerationDefaults,
    cache: Option<PrefixCache>,
    frame: Option<Frame>,
    linear: bool,
}

/// What the tokenizer puts around a plain prompt.
#[derive(Debug)]
struct Frame {
    before: Vec<Token>,
    after: Vec<Token>,
}

impl Frame {
    /// Finds it by tokenizing a letter with and without; none if that is not how the tokenizer works.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let bare = tokenizer.encode("a", false).ok()?;
        let framed = tokenizer.encode("a", true).ok()?;
        let extra = framed.len().checked_sub(bare.len())?;
        let at = (0..=extra).find(|at| framed[*at..].starts_with(&bare))?;
        Some(Self {
            before: framed[..at].to_vec(),
            after: framed[at + bare.len()..].to_vec(),
        })
    }
}

static AFTER_LOADING: OnceLock<fn()> = OnceLock::new();

/// Has `done` called on every thread that has loaded a model: it has freed twice the memory that it still uses. The first one counts.
pub fn after_loading(done: fn()) {
    let _ = AFTER_LOADING.set(done);
}

fn loaded() {
    if let Some(done) = AFTER_LOADING.get() {
        done();
    }
}

/// Bytes of memory for tokenized text, unless the caller says otherwise: about four million tokens.
pub const DEFAULT_CACHE_BYTES: usize = 32 << 20;

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
        Self::load_with(folder, DEFAULT_CACHE_BYTES)
    }

    /// As [`TextModel::load`], with this much memory for tokenized text; 0 keeps none.
    ///
    /// # Errors
    /// As [`TextModel::load`].
    pub fn load_with(folder: &Path, cache_bytes: usize) -> Result<Self, LoadError> {
        let files = TextFiles::read(folder)?;
        let model = Self::from_files(&files, cache_bytes);
        drop(files);
        loaded();
        model
    }

    /// Made of files that came otherwise than from a folder.
    ///
    /// # Errors
    /// One of them is not usable.
    pub fn of_files(files: &TextFiles) -> Result<Self, LoadError> {
        let model = Self::from_files(files, DEFAULT_CACHE_BYTES);
        loaded();
        model
    }

    /// The small tokenizer that the demo carries: byte-level BPE of about 4,000 tokens with a ChatML-like
    /// template.
    ///
    /// # Errors
    /// None in a build whose tests passed.
    pub fn builtin() -> Result<Self, LoadError> {
        Self::from_files(&crate::builtin::files(), DEFAULT_CACHE_BYTES)
    }

    fn from_files(files: &TextFiles, cache_bytes: usize) -> Result<Self, LoadError> {
        let path = files.folder.join("tokenizer.json");
        let refused = |e: TextError| LoadError::Parse {
            path: path.clone(),
            reason: e.to_string(),
        };
        let checked = CheckedFile::new(&files.tokenizer).map_err(refused)?;
        let tokenizer = Tokenizer::from_checked(&checked).map_err(refused)?;
        let config = files.parse()?;
        let template = match config.templates.is_empty() {
            true => None,
            false => Some(ChatTemplate::new(config.templates, config.specials)?),
        };
        let mut eos = config.eos_ids;
        eos.extend(config.eos_token.and_then(|token| tokenizer.id_of(&token)));
        eos.sort_unstable();
        eos.dedup();
        let rules = CutRules::of(&checked.json).filter(|_| cache_bytes > 0);
        Ok(Self {
            cache: rules.map(|rules| PrefixCache::new(rules, cache_bytes)),
            frame: Frame::of(&tokenizer),
            linear: linear::is_linear(&checked.json),
            tokenizer: Arc::new(tokenizer.with_reference_at_rest()),
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

    /// The tokens of a conversation: [`TextModel::render`] and [`TextModel::encode_chat`] in one, which spares the parts
    /// around the texts from being tokenized again.
    ///
    /// # Errors
    /// Those of both.
    pub fn encode_conversation(&self, input: &ChatInput<'_>) -> Result<Vec<Token>, TextError> {
        self.encode_rendered(&self.rendered(input, Effort::Full)?)
    }

    /// The first half of [`TextModel::encode_conversation`]: the prompt, and where its texts begin. Fails if that takes more
    /// than `effort`.
    ///
    /// # Errors
    /// Those of [`TextModel::render`].
    pub fn rendered(
        &self,
        input: &ChatInput<'_>,
        effort: Effort,
    ) -> Result<RenderedPrompt, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        template.rendered(input, effort)
    }

    /// Whether all patterns of the tokenizer are of kinds that take time in proportion to the text: then a short text is
    /// tokenized soon, whatever it is.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        self.linear
    }

    /// The second half of [`TextModel::encode_conversation`]: its tokens.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode_rendered(&self, rendered: &RenderedPrompt) -> Result<Vec<Token>, TextError> {
        self.encode_at(&rendered.text, &rendered.begins, false)
    }

    /// The tokens of a rendered conversation: the template has put the special tokens in.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<Token>, TextError> {
        self.encode(rendered, false)
    }

    /// The tokens of a plain prompt, with what the tokenizer puts around a text.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<Token>, TextError> {
        self.encode(text, true)
    }

    /// The tokens of `text`; what was tokenized before is not tokenized again.
    ///
    /// # Errors
    /// The tokenizer's own failure.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        self.encode_at(text, &[], add_special)
    }

    /// As [`TextModel::encode`]; at `places` something new is likely to begin.
    fn encode_at(
        &self,
        text: &str,
        places: &[usize],
        add_special: bool,
    ) -> Result<Vec<Token>, TextError> {
        let frame = self.frame.as_ref().filter(|_| add_special);
        let (Some(cache), true) = (&self.cache, frame.is_some() == add_special) else {
            return self.tokenizer.encode(text, add_special);
        };
        let mut ids = scratch::take_tokens(text.len() / BYTES_PER_TOKEN + 8);
        ids.extend(frame.iter().flat_map(|f| &f.before));
        let tokenizer = &self.tokenizer;
        let encode = |piece: &str| tokenizer.encode(piece, false);
        cache.encode(text, places, encode, &mut ids)?;
        ids.extend(frame.iter().flat_map(|f| &f.after));
        Ok(ids)
    }

    /// Whether tokenizing this many bytes can take more than about a quarter of a millisecond, which is too
    /// long for a thread that serves others too.
    #[must_use]
    pub fn is_long(&self, bytes: usize) -> bool {
        bytes
            > if self.tokenizer.status().fast {
                LONG_BYTES_FAST
            } else {
                LONG_BYTES
            }
    }

    /// What the cache of tokenized text has done; none if this tokenizer's texts cannot be cut.
    #[must_use]
    pub fn cache_stats(&self) -> Option<CacheStats> {
        self.cache.as_ref().map(PrefixCache::stats)
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
