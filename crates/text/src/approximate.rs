//! Tokens when there is no tokenizer.
//!
//! Answers one question: what can stand for the tokens of a text so that equal beginnings still have equal
//! blocks? Four bytes make one stand-in token, which is about what a token of English text takes. They mean
//! nothing to an engine: use them for the router's own record of its traffic, never for events of engines.

use kvasir_types::Token;

/// Bytes of one stand-in token.
const BYTES: usize = 4;

/// Stand-in tokens of `text`.
///
/// ```
/// # use kvasir_text::approximate_tokens;
/// let (short, long) = (approximate_tokens("one two three"), approximate_tokens("one two three four"));
/// assert_eq!(short[..3], long[..3]);
/// assert_eq!(long.len(), 5);
/// ```
#[must_use]
pub fn approximate_tokens(text: &str) -> Vec<Token> {
    let (whole, rest) = text.as_bytes().as_chunks::<BYTES>();
    let mut tokens = Vec::with_capacity(whole.len() + 1);
    tokens.extend(whole.iter().map(|word| Token::from_le_bytes(*word)));
    if !rest.is_empty() {
        let mut word = [0; BYTES];
        word[..rest.len()].copy_from_slice(rest);
        tokens.push(Token::from_le_bytes(word));
    }
    tokens
}
