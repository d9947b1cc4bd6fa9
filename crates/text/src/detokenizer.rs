//! Tokens to text as they come.
//!
//! Answers one question: which new text may the client see after these tokens, and has a stop string ended
//! the answer?
//!
//! Invariants: text shown, joined, is the decoding of all tokens at once, or its part before the stop string;
//! a piece is never half a character; the outcome does not depend on how many tokens come at a time.

use std::sync::Arc;

use kvasir_types::Token;

use crate::decode::{Decoding, drain_utf8};
use crate::stop::Stops;
use crate::tokenizer::Tokenizer;

/// How an answer is turned into text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Leave special tokens out.
    pub skip_special: bool,
    /// Special tokens that are shown all the same: marks that somebody looks for in the text.
    pub visible: Vec<Token>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Show the stop string too.
    pub keep_stop: bool,
    /// Tokens before which no stop string ends the answer.
    pub min_tokens: u32,
    /// Tokens that make no text: the stop tokens, unless the client wants to see them.
    pub hidden: Vec<Token>,
}

/// A stop string ended the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Which of [`DetokenizeOptions::stop`].
    pub stop: usize,
    /// Tokens of this push that were used, the completing one included.
    pub tokens_used: usize,
}

/// The text of one choice, as its tokens come.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    visible: Vec<Token>,
    keep_stop: bool,
    min_tokens: u32,
    hidden: Vec<Token>,
    stops: Stops,
    tokens: u32,
    state: State,
    /// New text of one token; kept to reuse its memory.
    scratch: String,
}

/// What is known of the text and cannot be shown yet.
#[derive(Debug)]
enum State {
    /// Bytes that may be the head of a character.
    Bytes(Vec<u8>),
    /// A run of raw bytes, and the spaces that are still to be stripped.
    Fallback { run: Vec<u8>, strip: usize },
    /// All ids since text was last certain, and the text of those already shown.
    Library {
        ids: Vec<Token>,
        context: usize,
        shown: String,
    },
}

impl Detokenizer {
    /// A detokenizer for one answer.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        let state = match tokenizer.decoding() {
            Decoding::Bytes(_) => State::Bytes(Vec::new()),
            Decoding::Fallback { strip, .. } => State::Fallback {
                run: Vec::new(),
                strip: *strip,
            },
            Decoding::Library => State::Library {
                ids: Vec::new(),
                context: 0,
                shown: String::new(),
            },
        };
        Self {
            tokenizer,
            skip_special: options.skip_special,
            visible: options.visible,
            keep_stop: options.keep_stop,
            min_tokens: options.min_tokens,
            hidden: options.hidden,
            stops: Stops::new(options.stop),
            tokens: 0,
            state,
            scratch: String::new(),
        }
    }

    /// Tokens pushed, up to the one that completed a stop string.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Adds tokens and appends to `out` the text that may be shown. After a hit nothing more is to be pushed.
    pub fn push(&mut self, tokens: &[Token], out: &mut String) -> Option<StopHit> {
        for (i, &token) in tokens.iter().enumerate() {
            self.tokens = self.tokens.saturating_add(1);
            self.one(token);
            let armed = self.tokens > self.min_tokens;
            let text = &self.scratch;
            if let Some(stop) = self.stops.push(text, armed, self.keep_stop, out) {
                return Some(StopHit {
                    stop,
                    tokens_used: i + 1,
                });
            }
        }
        None
    }

    /// The answer has ended: appends what was held back. A character that never became whole is U+FFFD. Gives
    /// the stop string that this last text completed, if any.
    pub fn finish(&mut self, out: &mut String) -> Option<usize> {
        self.scratch.clear();
        self.state.finish(&self.tokenizer, &mut self.scratch);
        let armed = self.tokens > self.min_tokens;
        let hit = self.stops.push(&self.scratch, armed, self.keep_stop, out);
        if hit.is_none() {
            self.stops.finish(out);
        }
        hit
    }

    /// Puts the certain text of one more token into `scratch`.
    fn one(&mut self, token: Token) {
        self.scratch.clear();
        let is_skipped =
            self.skip_special && self.tokenizer.is_special(token) && !self.visible.contains(&token);
        if is_skipped || self.hidden.contains(&token) {
            return;
        }
        let out = &mut self.scratch;
        match (&mut self.state, self.tokenizer.decoding()) {
            (State::Bytes(held), Decoding::Bytes(pieces)) => {
                held.extend_from_slice(pieces.get(token));
                drain_utf8(held, out);
            }
            (State::Fallback { run, strip }, Decoding::Fallback { pieces, .. }) => {
                if pieces.is_raw(token) {
                    run.extend_from_slice(pieces.get(token));
                } else {
                    end_run(run, strip, out);
                    let text = std::str::from_utf8(pieces.get(token)).unwrap_or_default();
                    stripped(text, strip, out);
                }
            }
            (State::Library { .. }, _) => self.state.ask(&self.tokenizer, token, out),
            // The state was made from this tokenizer's own decoding.
            (State::Bytes(_) | State::Fallback { .. }, _) => {}
        }
    }
}

/// Tokens that the library sees before new ones, so that it treats those as the middle of a text.
const CONTEXT_TOKENS: usize = 8;

impl State {
    /// Asks the library what `token` adds. Text that ends in U+FFFD may be half a character and waits.
    fn ask(&mut self, tokenizer: &Tokenizer, token: Token, out: &mut String) {
        let Self::Library {
            ids,
            context,
            shown,
        } = self
        else {
            return;
        };
        ids.push(token);
        let text = tokenizer.decode(ids, false).unwrap_or_default();
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return;
        }
        out.push_str(text.strip_prefix(&**shown).unwrap_or_default());
        *context = ids.len().saturating_sub(CONTEXT_TOKENS);
        ids.drain(..*context);
        *shown = tokenizer.decode(ids, false).unwrap_or_default();
    }

    fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        match self {
            Self::Bytes(held) => {
                out.push_str(&String::from_utf8_lossy(held));
                held.clear();
            }
            Self::Fallback { run, strip } => end_run(run, strip, out),
            Self::Library { ids, shown, .. } => {
                let text = tokenizer.decode(ids, false).unwrap_or_default();
                out.push_str(text.strip_prefix(&**shown).unwrap_or_default());
                shown.clone_from(&text);
            }
        }
    }
}

/// A run of raw bytes ended: text if all of it is UTF-8, else U+FFFD for each byte.
fn end_run(run: &mut Vec<u8>, strip: &mut usize, out: &mut String) {
    if run.is_empty() {
        return;
    }
    match std::str::from_utf8(run) {
        Ok(text) => stripped(text, strip, out),
        Err(_) => {
            *strip = 0;
            out.extend(run.iter().map(|_| char::REPLACEMENT_CHARACTER));
        }
    }
    run.clear();
}

/// Appends `text` without the spaces that are still to be stripped from the beginning of the whole.
fn stripped(text: &str, strip: &mut usize, out: &mut String) {
    let mut text = text;
    while *strip > 0 && !text.is_empty() {
        match text.strip_prefix(' ') {
            Some(rest) => {
                text = rest;
                *strip -= 1;
            }
            None => *strip = 0,
        }
    }
    out.push_str(text);
}

#[cfg(test)]
mod tests;
