//! What can go wrong between text and tokens, and whose fault it is.

use std::path::PathBuf;

/// A model's folder could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file that must be there is not, or cannot be read.
    #[error("cannot read {path}: give --model-path a folder with a tokenizer.json")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file is there and is not what it should be.
    #[error("{path} is not usable: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// A request could not be turned into tokens, or tokens into text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The template refused the conversation; its text is meant for the client.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template failed on this conversation, or the conversation is no JSON.
    #[error("the chat template cannot render this conversation: {0}")]
    Template(String),
    /// The template would take more time or memory for this conversation than it may.
    #[error("the chat template does too much for this conversation: {0}")]
    TooMuch(String),
    /// The model has no chat template.
    #[error("the model has no chat template: use /v1/completions, or add chat_template.jinja")]
    NoTemplate,
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The tokenizer's own steps could make the text longer than there is memory for.
    #[error(
        "a text of {bytes} bytes; this model's tokenizer takes {bytes_max} at once: shorten it"
    )]
    TooLong {
        /// What the text has.
        bytes: usize,
        /// What it may have.
        bytes_max: usize,
    },
    /// A token id that the model does not have.
    #[error("token id {id} is out of vocabulary (size {size})")]
    UnknownToken {
        /// The id.
        id: u32,
        /// One more than the largest id.
        size: u32,
    },
}

impl TextError {
    /// Whether the client can mend it by sending something else.
    #[must_use]
    pub fn is_client_fault(&self) -> bool {
        !matches!(self, Self::Tokenizer(_))
    }
}
