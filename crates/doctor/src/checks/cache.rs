//! Would the frontend predict what the engine's cache holds?

use crate::advice::{engine, kvasir, report_hits};
use crate::finding::{Advice, Outcome, Verdict};
use crate::observations::{
    Comparison, Difference, Observations, RepeatedPrompt, StoredText, TokenizerProbe,
};

pub(super) fn tokens(observed: &Observations) -> Verdict {
    match &observed.text {
        TokenizerProbe::Skipped => Verdict::skip("not asked"),
        TokenizerProbe::NoModelPath { folder, tokenizes } => no_model_path(folder, *tokenizes),
        TokenizerProbe::Unusable(error) => Verdict::fail(
            error.clone(),
            vec![kvasir(
                &["--model-path", "DIR"],
                "a folder with tokenizer.json",
            )],
        ),
        TokenizerProbe::NoEngineTokens(silence) => stored_alike(observed)
            .unwrap_or_else(|| Verdict::skip(format!("the engine tells no tokens ({silence})"))),
        TokenizerProbe::Compared(found) => compared(observed, found),
    }
}

/// What the frontend makes tokens by then: the engine's own folder, if it is on this machine, or the engine itself.
fn no_model_path(folder: &Option<String>, tokenizes: bool) -> Verdict {
    let (why, text) = match (folder, tokenizes) {
        (Some(_), _) => (
            "--model-path is not given; prompts are routed by cache, as the engine's own folder is on this machine",
            "the folder with the model's tokenizer and template, to have its tokens compared here",
        ),
        (None, true) => (
            "--model-path is not given; prompts are routed by cache, as the engine has /tokenize",
            "the folder with the model's tokenizer and template; it spares a question to the engine for each prompt",
        ),
        (None, false) => (
            "--model-path is not given, and the engine has no /tokenize",
            "the folder with the model's tokenizer and template; without it only prompts of token ids are routed by cache",
        ),
    };
    let folder = folder.as_deref().unwrap_or("DIR");
    let advice = vec![kvasir(&["--model-path", folder], text)];
    Verdict::of(Outcome::Skip, why, advice)
}

/// What the blocks say that the engine stored for a text of ours; `None` if nothing.
fn stored_alike(observed: &Observations) -> Option<Verdict> {
    let stored = observed.ranks.iter().find_map(|rank| rank.stored_text)?;
    let StoredText { expected, found } = stored;
    if found >= expected {
        let why = format!("{expected} blocks of a text, stored by the engine as we name them");
        return Some(Verdict::pass(why));
    }
    let why = format!(
        "the tokenizer differs: of {expected} blocks of a text the engine stored {found} as we name them"
    );
    Some(Verdict::fail(why, vec![other_folder(observed)]))
}

fn other_folder(observed: &Observations) -> Advice {
    let found = match &observed.text {
        TokenizerProbe::Compared(found) => found.engine_folder.as_deref(),
        _ => None,
    };
    match found {
        Some(folder) => kvasir(&["--model-path", folder], "the engine's own folder"),
        None => kvasir(
            &["--model-path", "DIR"],
            "the folder of the model that the engine serves",
        ),
    }
}

fn compared(observed: &Observations, found: &Comparison) -> Verdict {
    let (what, difference) = match (&found.plain, &found.chat) {
        (None, None) => {
            if let Some(differs) = stored_alike(observed).filter(|v| v.outcome == Outcome::Fail) {
                return differs;
            }
            let how = match found.counts_only {
                true => "as many as the engine counts",
                false => "as the engine's own",
            };
            let ids = match found.vocabulary_tokens {
                0 => String::new(),
                count => format!(", and {count} of the vocabulary"),
            };
            return Verdict::pass(format!(
                "{} of a conversation{ids}, {how}",
                found.chat_tokens
            ));
        }
        (Some(plain), _) => ("the tokenizer differs", plain),
        (None, Some(chat)) if found.counts_only => ("the tokens of a conversation differ", chat),
        (None, Some(chat)) => ("the chat template differs", chat),
    };
    let why = format!("{what}: {}", shown(difference, found.counts_only));
    let ours = observed.target.model_path.as_deref().unwrap_or("DIR");
    let template = found.plain.is_none();
    let advice = match &found.engine_folder {
        Some(folder) => kvasir(&["--model-path", folder], "the engine's own folder"),
        None if template => {
            let file = format!("{ours}/chat_template.jinja");
            engine(&["--chat-template", &file], "give both the same template")
        }
        None => other_folder(observed),
    };
    Verdict::fail(why, vec![advice])
}

fn shown(difference: &Difference, counts_only: bool) -> String {
    let Difference {
        at,
        ours,
        theirs,
        our_text,
        their_text,
    } = difference;
    match counts_only {
        true => format!("{ours} tokens here, {theirs} there"),
        false => format!(
            "{ours} tokens here, {theirs} there, from token {at} on {our_text:?} here, {their_text:?} there"
        ),
    }
}

pub(super) fn cached_tokens(observed: &Observations) -> Verdict {
    let mut passed = None;
    for rank in &observed.ranks {
        let verdict = match &rank.repeated_prompt {
            Err(silence) => Verdict::skip(format!("the test request failed: {silence}")),
            Ok(twice) => compared_hits(observed, twice),
        };
        if verdict.outcome != Outcome::Pass {
            return verdict;
        }
        passed = Some(verdict);
    }
    passed.unwrap_or_else(|| Verdict::skip("no rank was looked at"))
}

fn compared_hits(observed: &Observations, twice: &RepeatedPrompt) -> Verdict {
    if observed.facts.prefix_caching == Some(false) {
        return Verdict::skip("prefix caching is off");
    }
    let Some(reported) = twice.reported else {
        let why = match twice.hits {
            Some(hits) if hits > 0 => {
                format!(
                    "usage does not say them, though the engine counted {hits} tokens found again"
                )
            }
            _ => "usage does not say them".to_owned(),
        };
        return Verdict::fail(why, vec![report_hits(observed)]);
    };
    if !observed.block_size_fits() {
        return Verdict::skip("the block size differs");
    }
    match twice.predicted {
        // What kept them away is what `events-arrive` says.
        None | Some(0) => Verdict::skip("no prediction without events"),
        Some(predicted) if predicted == reported => Verdict::pass(format!(
            "{predicted} of {} predicted and reported",
            twice.prompt
        )),
        Some(predicted) => {
            let why = format!(
                "{predicted} of {} predicted, {reported} reported",
                twice.prompt
            );
            let text = match predicted > reported {
                true => {
                    "it evicts without saying so, or is busy with much else: ask again when it is idle"
                }
                false => {
                    "it keeps more than it tells: look at its offloading and at the event topic"
                }
            };
            Verdict::fail(why, vec![engine(&[], text)])
        }
    }
}
