//! What the mock model says: readable sentences.

use std::sync::Arc;

use kvasir_engine::Answer;
use kvasir_text::{TextError, TextModel};
use kvasir_types::{Rng, Token};

use crate::AnswerFn;

const SENTENCES: [&str; 8] = [
    " The ferry leaves the harbour at seven and comes back before dark.",
    " Old maps show a road along the shore that nobody uses today.",
    " Bread is baked twice a day, and the second loaf is the better one.",
    " Whoever keeps the light also keeps the log of every ship that passed.",
    " In winter the river carries ice down to the mill and no further.",
    " There are three ways over the hill; the longest one has the best view.",
    " The library lends tools as well as books, for a week at a time.",
    " Rain is announced by the swallows an hour before it comes.",
];
/// Sentences of one answer at most.
const SENTENCES_MAX: u64 = 6;

/// Answers of one to six sentences in the model's own tokens. The same prompt gets the same answer unless
/// the request brings a seed.
pub fn answers_in_words(text: &TextModel) -> Result<Arc<AnswerFn>, TextError> {
    let encode = |sentence: &&str| text.encode(sentence, false);
    let sentences: Vec<Vec<Token>> = SENTENCES.iter().map(encode).collect::<Result<_, _>>()?;
    Ok(Arc::new(move |request| {
        let mix = |sum: u64, token: &Token| (sum ^ u64::from(*token)).wrapping_mul(0x100_0000_01B3);
        let of_prompt = || request.tokens.iter().fold(0xCBF2_9CE4, mix);
        let mut rng = Rng::new(request.sampling.seed.unwrap_or_else(of_prompt));
        let count = 1 + rng.below(SENTENCES_MAX);
        let mut tokens = Vec::new();
        for _ in 0..count {
            tokens.extend_from_slice(&sentences[rng.below(sentences.len() as u64) as usize]);
        }
        Answer::Given(tokens.into())
    }))
}
