//! What the mock model says: readable sentences.
//!
//! Invariant: the next sentence follows from the tokens so far and the request's seed alone. So an answer that
//! is broken off anywhere and continued by another worker, from the prompt and the answer so far, reads as if
//! it had never been broken off.

use std::sync::Arc;

use kvasir_engine::OutputTokens;
use kvasir_text::{TextError, TextModel, Tokenizer};
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
/// After a sentence the answer ends once in so many times.
const ENDS_ONE_IN: u64 = 4;
/// Tokens made for one request at most; an answer that must be longer repeats them.
const TOKENS_MAX: usize = 1 << 20;

/// Answers of some sentences in the model's own tokens. The same prompt gets the same answer unless the
/// request brings a seed; a prompt that ends in part of an answer gets the rest of it.
pub fn answers_in_words(text: &TextModel) -> Result<Arc<AnswerFn>, TextError> {
    let encode = |sentence: &&str| text.encode(sentence, false);
    let speech = Speech {
        sentences: SENTENCES.iter().map(encode).collect::<Result<_, _>>()?,
        tokenizer: Arc::clone(text.tokenizer()),
    };
    Ok(Arc::new(move |request| {
        let sampling = &request.sampling;
        let wanted = match sampling.ignore_eos {
            true => (sampling.max_tokens as usize).min(TOKENS_MAX),
            false => 0,
        };
        let tokens = speech.go_on(&request.tokens, sampling.seed.unwrap_or(0), wanted);
        OutputTokens::Given(tokens.into())
    }))
}

struct Speech {
    /// Each of [`SENTENCES`] in tokens.
    sentences: Vec<Vec<Token>>,
    tokenizer: Arc<Tokenizer>,
}

/// A hash of all tokens so far.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    fn new(seed: u64) -> Self {
        Self(0xCBF2_9CE4 ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn after(self, tokens: &[Token]) -> Self {
        let mix = |sum: u64, token: &Token| (sum ^ u64::from(*token)).wrapping_mul(0x100_0000_01B3);
        Self(tokens.iter().fold(self.0, mix))
    }

    fn sentence(self) -> usize {
        Rng::new(self.0).below(SENTENCES.len() as u64) as usize
    }

    fn ends(self) -> bool {
        Rng::new(self.0 ^ 1).below(ENDS_ONE_IN) == 0
    }
}

/// Where a prompt stands.
struct Standing {
    state: State,
    /// The rest of the sentence that it ends in.
    rest: Vec<Token>,
    /// A whole sentence, or part of one, stands before: the answer may end.
    spoken: bool,
}

impl Speech {
    /// The tokens that follow `prompt`: to the end of the answer, or at least `wanted` of them.
    fn go_on(&self, prompt: &[Token], seed: u64, wanted: usize) -> Vec<Token> {
        let Standing {
            state,
            rest: mut said,
            mut spoken,
        } = self.stand(prompt, State::new(seed));
        let mut state = state.after(&said);
        while said.len() < wanted || !spoken || wanted == 0 && !state.ends() {
            let next = &self.sentences[state.sentence()];
            said.extend_from_slice(next);
            state = state.after(next);
            spoken = true;
            if said.len() >= TOKENS_MAX {
                break;
            }
        }
        said
    }

    /// Finds the sentence that `prompt` ends in, whole or in part. Its tokens may differ from those that were
    /// said, as text that is cut and tokenized again may be cut elsewhere; its text may not.
    fn stand(&self, prompt: &[Token], start: State) -> Standing {
        let longest = self.sentences.iter().map(Vec::len).max().unwrap_or(0) * 2;
        let first = prompt.len().saturating_sub(longest);
        let (before, tail) = prompt.split_at(first);
        let mut states = vec![start.after(before)];
        for token in tail {
            let last = states[states.len() - 1];
            states.push(last.after(&[*token]));
        }
        for (at, state) in states.iter().enumerate().take(tail.len()) {
            let said = &tail[at..];
            if let Some(rest) = self.rest(state.sentence(), said) {
                return Standing {
                    state: states[states.len() - 1],
                    rest,
                    spoken: true,
                };
            }
        }
        Standing {
            state: states[states.len() - 1],
            rest: Vec::new(),
            spoken: false,
        }
    }

    /// What is left of a sentence of which `said` was said; none if it was not.
    fn rest(&self, sentence: usize, said: &[Token]) -> Option<Vec<Token>> {
        let whole = &self.sentences[sentence];
        if let Some(rest) = whole.strip_prefix(said) {
            return Some(rest.to_vec());
        }
        let said = self.tokenizer.decode(said, false).ok()?;
        let rest = SENTENCES[sentence].strip_prefix(said.as_str())?;
        self.tokenizer.encode(rest, false).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speech() -> (TextModel, Speech) {
        let text = TextModel::builtin().unwrap();
        let encode = |s: &&str| text.encode(s, false).unwrap();
        let speech = Speech {
            sentences: SENTENCES.iter().map(encode).collect(),
            tokenizer: Arc::clone(text.tokenizer()),
        };
        (text, speech)
    }

    /// Cut after any token, as tokens or as text, the answer goes on as it would have.
    #[test]
    fn an_answer_goes_on_from_wherever_it_was_cut() {
        let (text, speech) = speech();
        for (prompt, seed) in [
            ("count the ships", 0),
            ("who keeps the light?\n", 7),
            ("x", 0),
        ] {
            let prompt = text.encode(prompt, false).unwrap();
            for wanted in [0, 90] {
                let whole = speech.go_on(&prompt, seed, wanted);
                assert!(whole.len() >= wanted.max(5));
                let said = |tokens: &[Token]| text.tokenizer().decode(tokens, false).unwrap();
                for cut in 0..whole.len() {
                    let (head, tail) = whole.split_at(cut);
                    let left = wanted.saturating_sub(cut);
                    let tokens = [&prompt[..], head].concat();
                    let rest = speech.go_on(&tokens, seed, left);
                    assert!(
                        rest.starts_with(tail) || wanted == 0 && rest == tail,
                        "as tokens, cut at {cut}"
                    );
                    let again = text.encode(&said(head), false).unwrap();
                    let tokens = [&prompt[..], &again].concat();
                    let rest = said(&speech.go_on(&tokens, seed, left));
                    assert!(rest.starts_with(&said(tail)), "as text, cut at {cut}");
                }
            }
        }
    }
}
