//! What is predicted is not what is so.

use super::*;

#[test]
fn usage_without_details() {
    let quiet = |hits| {
        move |observed: &mut Observations| {
            observed.ranks[0].repeated_prompt = Ok(RepeatedPrompt {
                prompt: 72,
                predicted: Some(64),
                reported: None,
                hits,
            });
        }
    };
    check(
        quiet(Some(64)),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   usage does not say them, though the engine counted 64 tokens found again
                                engine: --enable-prompt-tokens-details   (have it report prompt_tokens_details, by which predictions are judged)

        0 passed, 1 failed
    "#]],
    );
    check(
        quiet(None),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   usage does not say them
                                engine: --enable-prompt-tokens-details   (have it report prompt_tokens_details, by which predictions are judged)

        0 passed, 1 failed
    "#]],
    );
}

#[test]
fn a_wrong_prediction() {
    let said = |predicted, reported| {
        move |observed: &mut Observations| {
            observed.ranks[0].repeated_prompt = Ok(RepeatedPrompt {
                prompt: 72,
                predicted: Some(predicted),
                reported: Some(reported),
                hits: None,
            });
        }
    };
    check(
        said(64, 32),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   64 of 72 predicted, 32 reported
                                engine: it evicts without saying so, or is busy with much else: ask again when it is idle

        0 passed, 1 failed
    "#]],
    );
    check(
        said(16, 64),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   16 of 72 predicted, 64 reported
                                engine: it keeps more than it tells: look at its offloading and at the event topic

        0 passed, 1 failed
    "#]],
    );
}

fn differs() -> Option<Difference> {
    Some(Difference {
        at: 3,
        ours: 71,
        theirs: 80,
        our_text: "<|im_start|>".to_owned(),
        their_text: "\n".to_owned(),
    })
}

#[test]
fn other_tokens() {
    let compared = |plain, chat, engine_folder: Option<&str>, counts_only| {
        let engine_folder = engine_folder.map(str::to_owned);
        move |observed: &mut Observations| {
            observed.text = TokenizerProbe::Compared(Comparison {
                plain,
                chat,
                chat_tokens: 71,
                vocabulary_tokens: 0,
                counts_only,
                engine_folder,
            });
        }
    };
    let folder = Some("/models/other");
    check(
        compared(differs(), differs(), folder, false),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the tokenizer differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                kvasir: --model-path /models/other   (the engine's own folder)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(None, differs(), None, false),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the chat template differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                engine: --chat-template /models/tiny/chat_template.jinja   (give both the same template)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(differs(), None, None, false),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the tokenizer differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                kvasir: --model-path DIR   (the folder of the model that the engine serves)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(None, differs(), None, true),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          the tokens of a conversation differ: 71 tokens here, 80 there
                                    engine: --chat-template /models/tiny/chat_template.jinja   (give both the same template)

            0 passed, 1 failed
        "#]],
    );
}

/// Blocks that the engine stored for a text tell what counts and pages cannot: two ids that changed places.
#[test]
fn stored_blocks_show_other_tokens() {
    let stored = |text: TokenizerProbe, found| {
        move |observed: &mut Observations| {
            observed.text = text;
            let stored = StoredText {
                expected: 24,
                found,
            };
            observed.ranks[0].stored_text = Some(stored);
        }
    };
    let alike = || {
        TokenizerProbe::Compared(Comparison {
            chat_tokens: 71,
            vocabulary_tokens: 9000,
            ..Comparison::default()
        })
    };
    let untold = || TokenizerProbe::NoEngineTokens(ProbeError::Status(404, String::new()));
    check(
        stored(alike(), 7),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          the tokenizer differs: of 24 blocks of a text the engine stored 7 as we name them
                                    kvasir: --model-path DIR   (the folder of the model that the engine serves)

            0 passed, 1 failed
        "#]],
    );
    check(
        stored(untold(), 7),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          the tokenizer differs: of 24 blocks of a text the engine stored 7 as we name them
                                    kvasir: --model-path DIR   (the folder of the model that the engine serves)

            0 passed, 1 failed
        "#]],
    );
    let verdict = |text, found| {
        let mut observed = good();
        stored(text, found)(&mut observed);
        let findings = examine(&observed);
        let tokens = findings.into_iter().find(|f| f.check == Check::Tokens);
        tokens.map(|f| f.why).unwrap_or_default()
    };
    assert_eq!(
        verdict(untold(), 24),
        "24 blocks of a text, stored by the engine as we name them"
    );
    assert_eq!(
        verdict(alike(), 24),
        "71 of a conversation, and 9000 of the vocabulary, as the engine's own"
    );
}

#[test]
fn no_tokenizer() {
    let no_model_path = |folder: Option<&'static str>, tokenizes| {
        move |observed: &mut Observations| {
            let folder = folder.map(Into::into);
            observed.text = TokenizerProbe::NoModelPath { folder, tokenizes };
        }
    };
    check(
        no_model_path(Some("/models/tiny"), false),
        &expect![[r#"
            http://gpu-1:8000
              skip  tokens          --model-path is not given; prompts are routed by cache, as the engine's own folder is on this machine
                                    kvasir: --model-path /models/tiny   (the folder with the model's tokenizer and template, to have its tokens compared here)

            0 passed, 1 skipped
        "#]],
    );
    check(
        no_model_path(None, true),
        &expect![[r#"
            http://gpu-1:8000
              skip  tokens          --model-path is not given; prompts are routed by cache, as the engine has /tokenize
                                    kvasir: --model-path DIR   (the folder with the model's tokenizer and template; it spares a question to the engine for each prompt)

            0 passed, 1 skipped
        "#]],
    );
    check(
        no_model_path(None, false),
        &expect![[r#"
            http://gpu-1:8000
              skip  tokens          --model-path is not given, and the engine has no /tokenize
                                    kvasir: --model-path DIR   (the folder with the model's tokenizer and template; without it only prompts of token ids are routed by cache)

            0 passed, 1 skipped
        "#]],
    );
    check(
        |observed| observed.text = TokenizerProbe::Unusable("no tokenizer.json".to_owned()),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          no tokenizer.json
                                    kvasir: --model-path DIR   (a folder with tokenizer.json)

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| {
            observed.text =
                TokenizerProbe::NoEngineTokens(ProbeError::Status(404, "Not Found".to_owned()))
        },
        &expect![[r#"
            http://gpu-1:8000
              skip  tokens          the engine tells no tokens (it answers 404: Not Found)

            0 passed, 1 skipped
        "#]],
    );
}
