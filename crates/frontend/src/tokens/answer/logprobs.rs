//! Log probabilities of an answer's tokens, as the API returns them.

use kvasir_openai::{Logprob, TokenLogprob};
use kvasir_text::TextModel;
use kvasir_types::{Likelihood, Token};

/// The log probabilities of `tokens`, with at most `most` alternatives each.
pub(super) fn of_tokens(
    text: &TextModel,
    tokens: &[Token],
    likely: &[Likelihood],
    most: u32,
) -> Vec<TokenLogprob> {
    let word = |token: Token, logprob: f32| {
        let text = text.tokenizer().decode(&[token], false);
        let text = text.unwrap_or_default();
        // Part of a character has no text of its own, and its bytes are not known here.
        let whole = !text.contains(char::REPLACEMENT_CHARACTER);
        Logprob {
            bytes: whole.then(|| text.as_bytes().to_vec()),
            text,
            logprob: f64::from(logprob),
        }
    };
    let one = |(token, likelihood): (&Token, &Likelihood)| TokenLogprob {
        chosen: word(*token, likelihood.logprob),
        top: likelihood
            .top
            .iter()
            .take(most as usize)
            .map(|(token, logprob)| word(*token, *logprob))
            .collect(),
    };
    tokens.iter().zip(likely).map(one).collect()
}
