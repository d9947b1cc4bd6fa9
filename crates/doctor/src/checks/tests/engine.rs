//! The engine is not there, or not as it should be.

use super::*;

#[test]
fn a_good_worker_passes_everything() {
    let checks = examine(&good());
    assert!(
        checks.iter().all(|c| c.outcome == Outcome::Pass),
        "{checks:?}"
    );
    assert_eq!(checks.len(), 10);
}

#[test]
fn not_there() {
    check(
        |observed| {
            let error = "Connection refused".to_owned();
            observed.models = Err(ProbeError::Unreachable(error));
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  reachable       cannot connect: Connection refused
                                    engine: --host 0.0.0.0 --port 8000   (start it, and let it listen there)
                                    kvasir: or name the place where it does listen: --worker http://HOST:PORT
              skip  model           the worker does not answer
              skip  version         the worker does not answer
              skip  block-size      the worker does not answer
              skip  prefix-caching  the worker does not answer
              skip  event-socket    the worker does not answer
              skip  events-arrive   the worker does not answer
              skip  replay          the worker does not answer
              skip  tokens          the worker does not answer
              skip  cached-tokens   the worker does not answer

            0 passed, 1 failed, 9 skipped
        "#]],
    );
}

#[test]
fn another_answer_than_models() {
    check(
        |observed| {
            tell(observed, "http://gpu-1:8000/base");
            observed.models = Err(ProbeError::Status(404, "Not Found".to_owned()));
        },
        &expect![[r#"
            http://gpu-1:8000/base
              FAIL  reachable       it answers 404: Not Found
                                    kvasir: --worker http://gpu-1:8000   (no OpenAI server answers at /v1/models under this address)
              skip  model           the worker does not answer
              skip  version         the worker does not answer
              skip  block-size      the worker does not answer
              skip  prefix-caching  the worker does not answer
              skip  event-socket    the worker does not answer
              skip  events-arrive   the worker does not answer
              skip  replay          the worker does not answer
              skip  tokens          the worker does not answer
              skip  cached-tokens   the worker does not answer

            0 passed, 1 failed, 9 skipped
        "#]],
    );
    check(
        |observed| observed.models = Err(ProbeError::Status(401, "Unauthorized".to_owned())),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  reachable       it answers 401: it asks for a key, or for another one
                                    kvasir: --worker http://gpu-1:8000,api-key-file=FILE   (a file with the key that the engine was started with (--api-key))
              skip  model           the worker does not answer
              skip  version         the worker does not answer
              skip  block-size      the worker does not answer
              skip  prefix-caching  the worker does not answer
              skip  event-socket    the worker does not answer
              skip  events-arrive   the worker does not answer
              skip  replay          the worker does not answer
              skip  tokens          the worker does not answer
              skip  cached-tokens   the worker does not answer

            0 passed, 1 failed, 9 skipped
        "#]],
    );
}

#[test]
fn an_engine_whose_certificate_is_not_believed() {
    check(
        |observed| {
            tell(observed, "https://gpu-1:8000");
            let error = "invalid peer certificate: UnknownIssuer".to_owned();
            observed.models = Err(ProbeError::Insecure(error));
        },
        &expect![[r#"
            https://gpu-1:8000
              FAIL  reachable       no secure connection: invalid peer certificate: UnknownIssuer
                                    kvasir: --worker-tls-ca-path FILE   (a file with the authority that vouches for the engine, in PEM)
              skip  model           the worker does not answer
              skip  version         the worker does not answer
              skip  block-size      the worker does not answer
              skip  prefix-caching  the worker does not answer
              skip  event-socket    the worker does not answer
              skip  events-arrive   the worker does not answer
              skip  replay          the worker does not answer
              skip  tokens          the worker does not answer
              skip  cached-tokens   the worker does not answer

            0 passed, 1 failed, 9 skipped
        "#]],
    );
}

#[test]
fn another_model() {
    check(
        |observed| observed.target.model = Some("big".to_owned()),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  model           it serves tiny, not big
                                    engine: --served-model-name big   (serve it under that name)
                                    kvasir: --model-name tiny   (or ask for the name that it has)

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn an_old_version_and_one_from_source() {
    check(
        |observed| observed.facts.version = Some("0.8.5".to_owned()),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  version         0.8.5 is older than 0.9, whose events are the first that are known
                                    engine: upgrade it

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| observed.facts.version = Some("0.1.dev7+g12".to_owned()),
        &expect![[r#"
            http://gpu-1:8000

            0 passed
        "#]],
    );
    check(
        |observed| {
            observed.facts.version = None;
            observed.version = Err(ProbeError::Status(404, "Not Found".to_owned()));
        },
        &expect![[r#"
            http://gpu-1:8000
              skip  version         not reported (it answers 404: Not Found)

            0 passed, 1 skipped
        "#]],
    );
}

#[test]
fn another_block_size_than_told() {
    let differs = |observed: &mut Observations| {
        let rank = &mut observed.ranks[0];
        rank.events.other_block_size = Some(16);
        rank.events.blocks = 0;
        rank.repeated_prompt = Ok(RepeatedPrompt {
            prompt: 144,
            predicted: Some(0),
            reported: Some(128),
            hits: Some(128),
        });
    };
    check(
        |observed| {
            observed.target.block_size = Some(32);
            differs(observed);
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      the engine has 16, the frontend is configured with 32
                                    kvasir: --kv-cache-block-size 16   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |observed| {
            tell(observed, "http://gpu-1:8000,block-size=32");
            differs(observed);
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      the engine has 16, the frontend is configured with 32
                                    kvasir: --worker http://gpu-1:8000,block-size=16   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn another_block_size_than_its_peers_or_than_it_says() {
    check(
        |observed| observed.peers_block_size = Some((32, "http://gpu-2:8000".to_owned())),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      16, while http://gpu-2:8000 has 32: one model has one index, of one block size
                                    engine: --block-size 32   (as most of its peers have it)

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| {
            observed.ranks[0].events.other_block_size = Some(64);
            observed.ranks[0].events.blocks = 0;
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      its events have 64, the engine itself says 16
                                    kvasir: --worker http://gpu-1:8000,block-size=64   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |observed| {
            observed.facts.block_size = None;
            observed.peers_block_size = None;
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      neither the engine's metrics nor anybody else say it
                                    kvasir: --worker http://gpu-1:8000,block-size=16   (give its own --block-size, if it is not 16)

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn another_block_size_than_the_index_of_a_frontend() {
    check(
        |observed| observed.target.index_block_size = Some(64),
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      16, while the frontend's index of this model has 64
                                    kvasir: --kv-cache-block-size 16   (or leave it out and restart the frontend: it finds the engines' size)

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| {
            observed.target.index_block_size = Some(16);
            observed.peers_block_size = Some((32, "http://gpu-2:8000".to_owned()));
        },
        &expect![[r#"
            http://gpu-1:8000

            0 passed
        "#]],
    );
}

#[test]
fn no_prefix_caching() {
    check(
        |observed| {
            observed.facts.prefix_caching = Some(false);
            observed.ranks[0].events = EventCounts::default();
            observed.ranks[0].replay = ReplayProbe::Answered {
                batches: 0,
                has_last: None,
            };
            observed.ranks[0].repeated_prompt = Ok(RepeatedPrompt {
                prompt: 72,
                predicted: Some(0),
                reported: Some(0),
                hits: Some(0),
            });
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  prefix-caching  off: nothing is kept, so nothing can be found again
                                    engine: --enable-prefix-caching   (turn it on)
              skip  events-arrive   prefix caching is off, so there is nothing to tell
              skip  cached-tokens   prefix caching is off

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}

/// An SGLang without events that does not report what it found: its own flags are named.
#[test]
fn sglang_has_flags_of_its_own() {
    check(
        |observed| {
            observed.facts.kind = EngineKind::Sglang;
            observed.facts.version = Some("0.5.9".to_owned());
            observed.facts.events.clear();
            observed.facts.block_size = Some(64);
            observed.ranks[0] = RankProbe {
                source: None,
                link: Err(SourceFault::Silent),
                events: EventCounts::default(),
                replay: ReplayProbe::Skipped,
                stored_text: None,
                repeated_prompt: Ok(RepeatedPrompt {
                    prompt: 72,
                    predicted: None,
                    reported: None,
                    hits: Some(64),
                }),
                ..observed.ranks[0].clone()
            };
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      64, while http://gpu-2:8000 has 16: one model has one index, of one block size
                                    engine: --page-size 16   (as most of its peers have it)
              FAIL  event-socket    the engine publishes no events
                                    engine: --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'   (let it publish; it then says itself where)
              skip  events-arrive   no event socket
              skip  replay          no event socket
              FAIL  cached-tokens   usage does not say them, though the engine counted 64 tokens found again
                                    engine: --enable-cache-report   (have it report prompt_tokens_details, by which predictions are judged)

            0 passed, 3 failed, 2 skipped
        "#]],
    );
    check(
        |observed| {
            observed.facts.kind = EngineKind::Sglang;
            observed.facts.prefix_caching = Some(false);
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  prefix-caching  off: nothing is kept, so nothing can be found again
                                    engine: start it without --disable-radix-cache
              skip  cached-tokens   prefix caching is off

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

/// A TensorRT-LLM: no event socket is missed, and what has no flag stands in a file.
#[test]
fn tensorrt_llm_has_settings_in_a_file() {
    check(
        |observed| {
            observed.facts.kind = EngineKind::TensorRt;
            observed.facts.version = Some("0.21.0".to_owned());
            observed.facts.events.clear();
            observed.facts.block_size = Some(32);
            observed.facts.prefix_caching = Some(false);
            observed.ranks[0] = RankProbe {
                source: None,
                link: Err(SourceFault::Silent),
                events: EventCounts::default(),
                replay: ReplayProbe::Skipped,
                ..observed.ranks[0].clone()
            };
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      32, while http://gpu-2:8000 has 16: one model has one index, of one block size
                                    engine: --extra_llm_api_options FILE   (with `kv_cache_config: {tokens_per_block: 16}`, as most of its peers have it)
              FAIL  prefix-caching  off: nothing is kept, so nothing can be found again
                                    engine: --extra_llm_api_options FILE   (with `kv_cache_config: {enable_block_reuse: true}`)
              skip  event-socket    it has no event socket: its cache is predicted from what it is sent
              skip  events-arrive   no event socket
              skip  replay          no event socket
              skip  cached-tokens   prefix caching is off

            0 passed, 2 failed, 4 skipped
        "#]],
    );
}
