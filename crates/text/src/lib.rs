//! Text to tokens and back.
//!
//! Answers one question: which tokens does an engine see for this request, and which text do its tokens
//! make? Tokenizers and chat templates from a model's folder (or the small built-in one), detokenizing as
//! tokens come, and the cache that spares a long conversation from being tokenized again.
//!
//! Invariants: nothing is read from disk after loading; no clock is read (the time goes in with the request);
//! streamed text joined is the text of all tokens; cached tokenization equals plain tokenization.
//!
//! Elsewhere: which fields of a body make the prompt (`openai`), what blocks the tokens form (`hash`).

mod approximate;
mod builtin;
mod chat;
mod cuts;
mod decode;
mod detokenizer;
mod error;
#[cfg(feature = "fast")]
mod fast;
mod file_limits;
mod folders;
mod linear;
mod load;
mod model;
mod prefix;
mod pyvalue;
mod reference;
mod scratch;
mod stop;
mod strftime;
mod template;
mod tokenizer;

pub use approximate::approximate_tokens;
pub use chat::{ChatInput, Dialect};
pub use detokenizer::{DetokenizeOptions, Detokenizer, StopHit};
pub use error::{LoadError, TextError};
pub use folders::{FolderError, ModelFolders};
pub use load::TextFiles;
pub use model::{DEFAULT_CACHE_BYTES, GenerationDefaults, TextModel, after_loading};
pub use prefix::CacheStats;
pub use scratch::recycle_tokens;
pub use template::{ChatTemplate, Effort, RenderedPrompt};
pub use tokenizer::{EncoderStatus, Tokenizer};
