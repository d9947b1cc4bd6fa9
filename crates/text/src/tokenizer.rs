//! One tokenizer: text to ids, ids to bytes.
//!
//! Answers one question: which ids does this text have, exactly as the engine computes them? Behind it is the
//! `tokenizers` library, which the engines use too, and with feature `fast` a quicker one under its watch.
//!
//! Invariants: no truncation and no padding, whatever the file says; the same text has the same ids on every
//! thread; ids are checked before they index anything.

use std::sync::Arc;

use kvasir_types::Token;
use tokenizers::Tokenizer as Library;

use crate::decode::Decoding;
use crate::error::TextError;
use crate::file_limits::CheckedFile;
use crate::reference::{Reference, failed};

/// Largest id of a token; real vocabularies are under a million, and tables are made for every id.
const VOCABULARY_MAX: u32 = 1 << 24;

/// A loaded tokenizer; share it with an `Arc`.
pub struct Tokenizer {
    reference: Arc<Reference>,
    decoding: Decoding,
    special: Vec<bool>,
    /// The longest text that is tokenized at once.
    text_bytes_max: usize,
    #[cfg(feature = "fast")]
    fast: Result<crate::fast::Fast, String>,
}

/// Which library tokenizes, and what the checks found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderStatus {
    /// The quick library is in use.
    pub fast: bool,
    /// Why not, if it is not.
    pub reason: Option<String>,
    /// Texts tokenized by both libraries since loading.
    pub checks: u64,
    /// Of those, texts with different tokens; the first one ends the use of the quick library.
    pub differences: u64,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.special.len())
    }
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// What the library says is wrong with the file, or the limit that it passes.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        Self::from_checked(&CheckedFile::new(json)?)
    }

    /// As [`Tokenizer::from_json`], of a file that was looked at.
    pub(crate) fn from_checked(file: &CheckedFile) -> Result<Self, TextError> {
        #[cfg_attr(
            not(feature = "fast"),
            expect(unused_mut, reason = "the feature adds to it")
        )]
        let mut tokenizer = Self::by_reference(file)?;
        #[cfg(feature = "fast")]
        {
            tokenizer.fast = crate::fast::Fast::load(&file.json, &tokenizer.reference);
        }
        Ok(tokenizer)
    }

    /// The same, without the reference library's tables where nothing needs them for now.
    #[cfg_attr(
        not(feature = "fast"),
        expect(unused_mut, reason = "the feature changes it")
    )]
    pub(crate) fn with_reference_at_rest(mut self) -> Self {
        #[cfg(feature = "fast")]
        if self.fast.is_ok() && !matches!(self.decoding, Decoding::Library) {
            self.reference = match Arc::try_unwrap(self.reference) {
                Ok(reference) => Arc::new(reference.rest()),
                Err(shared) => shared,
            };
        }
        self
    }

    /// As [`Tokenizer::from_json`], never using the quick library.
    ///
    /// # Errors
    /// What the library says is wrong with the file, or the limit that it passes.
    pub fn reference_only(json: &[u8]) -> Result<Self, TextError> {
        Self::by_reference(&CheckedFile::new(json)?)
    }

    fn by_reference(file: &CheckedFile) -> Result<Self, TextError> {
        let reference = Reference::new(&file.json)?;
        let size = vocabulary_size(reference.library()?);
        if size > VOCABULARY_MAX {
            return Err(TextError::Tokenizer(format!(
                "token ids up to {size}; the limit is {VOCABULARY_MAX}"
            )));
        }
        Self::from_reference(reference, size, file.text_bytes_max())
    }

    fn from_reference(
        reference: Reference,
        size: u32,
        text_bytes_max: usize,
    ) -> Result<Self, TextError> {
        let library = reference.library()?;
        let added = library.get_added_tokens_decoder();
        let special = (0..size)
            .map(|id| added.get(&id).is_some_and(|token| token.special))
            .collect();
        let decoding = Decoding::new(library, size);
        Ok(Self {
            reference: Arc::new(reference),
            decoding,
            special,
            text_bytes_max,
            #[cfg(feature = "fast")]
            fast: Err("not asked for".to_owned()),
        })
    }

    /// Which library tokenizes, and what the checks found.
    #[must_use]
    pub fn status(&self) -> EncoderStatus {
        #[cfg(feature = "fast")]
        let (fast, reason, (checks, differences)) = match &self.fast {
            Ok(fast) if fast.is_trusted() => (true, None, fast.checks()),
            Ok(fast) => (false, Some("it differed in use".to_owned()), fast.checks()),
            Err(reason) => (false, Some(reason.clone()), (0, 0)),
        };
        #[cfg(not(feature = "fast"))]
        let (fast, reason, (checks, differences)) = (
            false,
            Some("built without feature `fast`".to_owned()),
            (0, 0),
        );
        EncoderStatus {
            fast,
            reason,
            checks,
            differences,
        }
    }

    /// The ids of `text`. `add_special` adds what the tokenizer puts around a text of its own accord, which
    /// is wanted for plain prompts and not for rendered templates.
    ///
    /// # Errors
    /// The text could become longer than there is memory for; or the library's own failure, and no text is known
    /// to cause one.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        if text.len() > self.text_bytes_max {
            return Err(TextError::TooLong {
                bytes: text.len(),
                bytes_max: self.text_bytes_max,
            });
        }
        #[cfg(feature = "fast")]
        if let Ok(fast) = &self.fast {
            return fast.encode(text, add_special, &self.reference);
        }
        self.reference.encode(text, add_special)
    }

    /// The text of all `ids` at once: what a stream must add up to.
    ///
    /// # Errors
    /// The library's own failure.
    pub fn decode(&self, ids: &[Token], skip_special: bool) -> Result<String, TextError> {
        let library = self.reference.library()?;
        library.decode(ids, skip_special).map_err(failed)
    }

    /// The id of a token written out, special tokens included.
    #[must_use]
    pub fn id_of(&self, token: &str) -> Option<Token> {
        self.reference.library().ok()?.token_to_id(token)
    }

    /// Whether `id` is a special token, which texts usually leave out.
    #[must_use]
    pub fn is_special(&self, id: Token) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id.
    #[must_use]
    pub fn vocabulary_size(&self) -> u32 {
        self.special.len() as u32
    }

    /// Checks ids that came from a client.
    ///
    /// # Errors
    /// Names the first id that the model does not have.
    pub fn check(&self, ids: &[Token]) -> Result<(), TextError> {
        let size = self.vocabulary_size();
        match ids.iter().find(|id| **id >= size) {
            Some(&id) => Err(TextError::UnknownToken { id, size }),
            None => Ok(()),
        }
    }

    pub(crate) fn decoding(&self) -> &Decoding {
        &self.decoding
    }
}

/// One more than the largest id that has a token; ids may have holes.
fn vocabulary_size(library: &Library) -> u32 {
    let largest = library.get_vocab(true).into_values().max();
    largest.map_or(0, |id| id.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one enormous id is refused before tables are made for it.
    #[test]
    fn the_largest_id_is_bounded() {
        let with = |id: u32| {
            let json = format!(
                r#"{{"version":"1.0","added_tokens":[],"model":{{"type":"WordLevel","unk_token":"a","vocab":{{"a":{id}}}}}}}"#
            );
            Tokenizer::reference_only(json.as_bytes()).map(|t| t.vocabulary_size())
        };
        assert_eq!(with(VOCABULARY_MAX - 1), Ok(VOCABULARY_MAX));
        assert!(with(VOCABULARY_MAX).is_err());
        assert!(with(u32::MAX).is_err());
    }
}
