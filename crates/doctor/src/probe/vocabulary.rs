//! Texts made of a tokenizer's own vocabulary: most of its ids, in few requests.
//!
//! Two tokenizers may differ in a few ids that no ordinary text holds. Ids are numbered in the order in which a tokenizer learned
//! them, so the first ones are those that prompts are made of.

use kvasir_text::Tokenizer;
use kvasir_types::{Rng, Token};

/// Ids that are read, the first ones.
const IDS_MAX: u32 = 32_768;
/// Ids in one text.
const IDS_PER_TEXT: u32 = 2048;

/// Texts that hold the first ids of the vocabulary, each on a line of its own.
pub(super) fn texts(tokenizer: &Tokenizer) -> impl Iterator<Item = String> + '_ {
    let end = tokenizer.vocabulary_size().min(IDS_MAX);
    (0..end.div_ceil(IDS_PER_TEXT)).map(move |nth| {
        let from = nth * IDS_PER_TEXT;
        let ids = from..(from + IDS_PER_TEXT).min(end);
        let words = ids.filter_map(|id| word(tokenizer, id));
        words.collect::<Vec<_>>().join("\n")
    })
}

/// A text of about `tokens` ids of the whole vocabulary, never the same twice.
pub(super) fn random_text(tokenizer: &Tokenizer, tokens: u32, rng: &mut Rng) -> String {
    let end = u64::from(tokenizer.vocabulary_size().clamp(1, IDS_MAX));
    let words = (0..tokens).filter_map(|_| word(tokenizer, rng.below(end) as Token));
    words.collect::<Vec<_>>().join(" ")
}

/// What one id stands for; none if it is special or no whole text.
fn word(tokenizer: &Tokenizer, id: Token) -> Option<String> {
    let word = tokenizer.decode(&[id], true).ok()?;
    let whole = !word.trim().is_empty() && !word.contains(char::REPLACEMENT_CHARACTER);
    (whole && !word.contains(char::is_control)).then_some(word)
}
