//! What the demo's mock model says: readable sentences, chosen by the prompt.

use std::sync::Arc;

use kvasir_engine::OutputTokens;
use kvasir_mocker::AnswerFn;
use kvasir_text::TextModel;
use kvasir_types::Token;

use crate::wiring::Failure;

const SENTENCES: &[&str] = &[
    "A parcel that reaches the depot before one leaves with the two o'clock van. Later ones go at six the next \
     morning.",
    "Please book heavy goods two days ahead. I can note the booking now if you tell me the weight.",
    "First look at the number on your receipt. With it I can see where the letter was last scanned.",
    "The address can be changed until the parcel is on the van. After that the driver has to bring it back \
     first.",
    "In the evening the depot is closed, so it will leave at six the next morning with everything else.",
    "We agreed on a signature, on the new address, and that you call us if nothing has come by Friday.",
    "The driver has your number and will ring before turning around. You can also leave a note at the door.",
    "Letters leave once a day and take two days inland. A signature costs a little more and can be traced.",
];

/// Answers in words of the model's own vocabulary.
pub(crate) fn in_words(text: &TextModel) -> Result<Arc<AnswerFn>, Failure> {
    let mut answers: Vec<Arc<[Token]>> = Vec::new();
    for sentence in SENTENCES {
        answers.push(text.encode_chat(sentence)?.into());
    }
    Ok(Arc::new(move |request| {
        let sum = request.tokens.iter().fold(0u64, |sum, &token| {
            sum.wrapping_mul(31).wrapping_add(token.into())
        });
        let chosen = &answers[(sum % answers.len() as u64) as usize];
        if request.sampling.ignore_eos {
            return OutputTokens::Repeated(Arc::clone(chosen));
        }
        OutputTokens::Given(Arc::clone(chosen))
    }))
}
