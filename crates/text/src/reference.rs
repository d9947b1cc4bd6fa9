//! The reference library's tokenizer, while it is needed.
//!
//! Answers one question: what does the library that engines use say? Its tables take some 40 MB for a vocabulary of 150,000 tokens.
//! Where a quicker library does its work they are made anew for each round of checks, and dropped after it.

use std::panic::catch_unwind;
use std::sync::OnceLock;

use kvasir_types::Token;
use tokenizers::Tokenizer as Library;

use crate::error::TextError;

/// A `tokenizer.json` and what the library made of it.
pub(crate) struct Reference {
    json: Box<[u8]>,
    loaded: OnceLock<Library>,
}

impl Reference {
    /// Reads the file.
    pub(crate) fn new(json: &[u8]) -> Result<Self, TextError> {
        Ok(Self {
            loaded: OnceLock::from(read(json)?),
            json: json.into(),
        })
    }

    /// The same, not loaded.
    #[cfg(feature = "fast")]
    pub(crate) fn rest(self) -> Self {
        Self {
            loaded: OnceLock::new(),
            ..self
        }
    }

    /// What the library made of it; from now on that stays.
    pub(crate) fn library(&self) -> Result<&Library, TextError> {
        if self.loaded.get().is_none() {
            // Whoever was quicker wins: both are the same.
            let _ = self.loaded.set(read(&self.json)?);
        }
        let gone = || TextError::Tokenizer("the reference library is not loaded".into());
        self.loaded.get().ok_or_else(gone)
    }

    /// What it is, for as long as the caller keeps it.
    #[cfg(feature = "fast")]
    pub(crate) fn read_again(&self) -> Result<Library, TextError> {
        read(&self.json)
    }

    /// Keeps what was read again.
    #[cfg(feature = "fast")]
    pub(crate) fn keep(&self, library: Library) {
        let _ = self.loaded.set(library);
    }

    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        encode(self.library()?, text, add_special)
    }
}

/// The library's tokens of `text`.
pub(crate) fn encode(
    library: &Library,
    text: &str,
    add_special: bool,
) -> Result<Vec<Token>, TextError> {
    let encoding = library.encode_fast(text, add_special).map_err(failed)?;
    Ok(encoding.get_ids().to_vec())
}

/// Reads the file. The library panics on some that are broken: those are refused like the others.
fn read(json: &[u8]) -> Result<Library, TextError> {
    catch_unwind(|| Library::from_bytes(json))
        .map_err(|_| TextError::Tokenizer("the library panicked on this file".into()))?
        .map_err(failed)
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err wants")]
pub(crate) fn failed(error: Box<dyn std::error::Error + Send + Sync>) -> TextError {
    TextError::Tokenizer(error.to_string())
}
