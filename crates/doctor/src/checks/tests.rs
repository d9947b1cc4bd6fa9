//! One thing wrong at a time: which checks notice, and what they advise.

use std::time::Duration;

use expect_test::{Expect, expect};
use kvasir_frontend::{EngineModel, EventSource, Facts, WorkerAddress};
use kvasir_transport::SourceFault;

use super::examine;
use crate::finding::Outcome;
use crate::report::{Examined, Report};
use crate::world::{
    Comparison, Difference, EventsSeen, RankSeen, ReplaySeen, Silence, TextSeen, Told, Twice, World,
};

const URL: &str = "http://gpu-1:8000";

fn source(events: &str, replay: Option<&str>) -> EventSource {
    EventSource {
        events: events.to_owned(),
        replay: replay.map(str::to_owned),
        topic: "kv".to_owned(),
    }
}

/// A worker with which nothing is wrong.
fn good() -> World {
    let mut facts = Facts {
        version: Some("0.32.0".to_owned()),
        models: vec![EngineModel {
            name: "tiny".to_owned(),
            root: Some("/models/tiny".to_owned()),
            max_model_len: Some(2048),
        }],
        block_size: Some(16),
        prefix_caching: Some(true),
        ranks: Some(1),
        ..Facts::default()
    };
    facts
        .events
        .insert(0, source("tcp://*:5557", Some("tcp://*:5558")));
    World {
        told: Told {
            address: WorkerAddress::parse(URL).unwrap(),
            model: Some("tiny".to_owned()),
            block_size: None,
            model_path: Some("/models/tiny".to_owned()),
        },
        models: Ok(Duration::from_millis(3)),
        version: Ok(()),
        metrics: Ok(()),
        event_route: Ok(()),
        facts,
        ranks: vec![RankSeen {
            rank: 0,
            source: Some(source("tcp://gpu-1:5557", Some("tcp://gpu-1:5558"))),
            link: Ok(()),
            events: EventsSeen {
                batches: 2,
                blocks: 4,
                after: Some(Duration::from_millis(5)),
                ..EventsSeen::default()
            },
            replay: ReplaySeen::Answered {
                batches: 1,
                has_last: Some(true),
            },
            twice: Ok(Twice {
                prompt: 72,
                predicted: Some(64),
                reported: Some(64),
                hits: Some(64),
            }),
        }],
        text: TextSeen::Compared(Comparison {
            chat_tokens: 71,
            ..Comparison::default()
        }),
        peers_block_size: Some((16, "http://gpu-2:8000".to_owned())),
        free_event_port: 5557,
    }
}

/// The rows that did not pass, after `change`.
fn check(change: impl FnOnce(&mut World), expected: Expect) {
    let mut world = good();
    change(&mut world);
    let mut checks = examine(&world);
    checks.retain(|finding| finding.outcome != Outcome::Pass);
    let worker = world.told.address.to_string();
    let workers = vec![Examined { worker, checks }];
    let report = Report { workers };
    expected.assert_eq(&report.to_string());
}

fn tell(world: &mut World, address: &str) {
    world.told.address = WorkerAddress::parse(address).unwrap();
}

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
        |world| {
            let error = "Connection refused".to_owned();
            world.models = Err(Silence::Unreachable(error));
        },
        expect![[r#"
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
        |world| {
            tell(world, "http://gpu-1:8000/base");
            world.models = Err(Silence::Status(404, "Not Found".to_owned()));
        },
        expect![[r#"
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
        |world| world.models = Err(Silence::Status(401, "Unauthorized".to_owned())),
        expect![[r#"
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
fn another_model() {
    check(
        |world| world.told.model = Some("big".to_owned()),
        expect![[r#"
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
        |world| world.facts.version = Some("0.8.5".to_owned()),
        expect![[r#"
            http://gpu-1:8000
              FAIL  version         0.8.5 is older than 0.9, whose events are the first that are known
                                    engine: upgrade it

            0 passed, 1 failed
        "#]],
    );
    check(
        |world| world.facts.version = Some("0.1.dev7+g12".to_owned()),
        expect![[r#"
            http://gpu-1:8000

            0 passed
        "#]],
    );
    check(
        |world| {
            world.facts.version = None;
            world.version = Err(Silence::Status(404, "Not Found".to_owned()));
        },
        expect![[r#"
            http://gpu-1:8000
              skip  version         not told (it answers 404: Not Found)

            0 passed, 1 skipped
        "#]],
    );
}

#[test]
fn another_block_size_than_told() {
    let differs = |world: &mut World| {
        let rank = &mut world.ranks[0];
        rank.events.other_block_size = Some(16);
        rank.events.blocks = 0;
        rank.twice = Ok(Twice {
            prompt: 144,
            predicted: Some(0),
            reported: Some(128),
            hits: Some(128),
        });
    };
    check(
        |world| {
            world.told.block_size = Some(32);
            differs(world);
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      the engine has 16, the frontend is told 32
                                    kvasir: --kv-cache-block-size 16   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |world| {
            tell(world, "http://gpu-1:8000,block-size=32");
            differs(world);
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      the engine has 16, the frontend is told 32
                                    kvasir: --worker http://gpu-1:8000,block-size=16   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn another_block_size_than_its_peers_or_than_it_says() {
    check(
        |world| world.peers_block_size = Some((32, "http://gpu-2:8000".to_owned())),
        expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      16, while http://gpu-2:8000 has 32: one model has one index, of one block size
                                    engine: --block-size 32   (as its peers have it)

            0 passed, 1 failed
        "#]],
    );
    check(
        |world| {
            world.ranks[0].events.other_block_size = Some(64);
            world.ranks[0].events.blocks = 0;
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      its events have 64, the engine itself says 16
                                    kvasir: --worker http://gpu-1:8000,block-size=64   (tell the frontend the truth)
              skip  cached-tokens   the block size differs

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |world| {
            world.facts.block_size = None;
            world.peers_block_size = None;
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  block-size      the engine does not say, and nobody else does
                                    kvasir: --worker http://gpu-1:8000,block-size=16   (give its own --block-size, if it is not 16)

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn no_prefix_caching() {
    check(
        |world| {
            world.facts.prefix_caching = Some(false);
            world.ranks[0].events = EventsSeen::default();
            world.ranks[0].replay = ReplaySeen::Answered {
                batches: 0,
                has_last: None,
            };
            world.ranks[0].twice = Ok(Twice {
                prompt: 72,
                predicted: Some(0),
                reported: Some(0),
                hits: Some(0),
            });
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  prefix-caching  off: nothing is kept, so nothing can be found again
                                    engine: --enable-prefix-caching   (turn it on)
              skip  events-arrive   prefix caching is off, so there is nothing to tell
              skip  cached-tokens   prefix caching is off

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}

fn unheard(world: &mut World) {
    let rank = &mut world.ranks[0];
    rank.source = None;
    rank.link = Err(SourceFault::NoReplay);
    rank.events = EventsSeen::default();
    rank.replay = ReplaySeen::NotAsked;
    rank.twice = Ok(Twice {
        prompt: 72,
        predicted: None,
        reported: Some(64),
        hits: Some(64),
    });
    world.facts.events.clear();
}

#[test]
fn events_off() {
    check(
        unheard,
        expect![[r#"
        http://gpu-1:8000
          FAIL  event-socket    the engine publishes no events
                                engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'   (let it publish; it then says itself where)
          skip  events-arrive   no event socket
          skip  replay          no event socket
          skip  cached-tokens   without events nothing is foretold

        0 passed, 1 failed, 3 skipped
    "#]],
    );
    check(
        |world| {
            unheard(world);
            world.event_route = Err(Silence::Status(404, "Not Found".to_owned()));
            world.free_event_port = 5561;
            world.facts.ranks = Some(2);
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    the engine does not say where its events are (it answers 404: Not Found)
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5561","replay_endpoint":"tcp://*:5563"}'   (let it publish, if it does not yet)
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5561,replay=tcp://gpu-1:5563   (name the sockets, as this engine does not)
              skip  events-arrive   no event socket
              skip  replay          no event socket
              skip  cached-tokens   without events nothing is foretold

            0 passed, 1 failed, 3 skipped
        "#]],
    );
}

#[test]
fn an_event_socket_that_cannot_be_reached() {
    let closed = || Err(SourceFault::Unreachable("Connection refused".to_owned()));
    check(
        |world| world.ranks[0].link = closed(),
        expect![[r#"
        http://gpu-1:8000
          FAIL  event-socket    tcp://gpu-1:5557: cannot connect: Connection refused
                                engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
          skip  events-arrive   no event socket
          skip  replay          no event socket

        0 passed, 1 failed, 2 skipped
    "#]],
    );
    check(
        |world| {
            world
                .facts
                .events
                .insert(0, source("tcp://127.0.0.1:5557", None));
            world.ranks[0].source = Some(source("tcp://127.0.0.1:5557", None));
            world.ranks[0].link = closed();
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    tcp://127.0.0.1:5557: cannot connect: Connection refused
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
              skip  events-arrive   no event socket
              skip  replay          no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
    check(
        |world| {
            tell(world, "http://gpu-1:8000,events=tcp://gpu-1:9999");
            world.ranks[0].source = Some(source("tcp://gpu-1:9999", None));
            world.ranks[0].link = closed();
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    tcp://gpu-1:9999: cannot connect: Connection refused
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (these are the engine's own; what it is told are somebody else's)
              skip  events-arrive   no event socket
              skip  replay          no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}

#[test]
fn swapped_sockets() {
    check(
        |world| {
            let told = "http://gpu-1:8000,events=tcp://gpu-1:5558,replay=tcp://gpu-1:5557";
            tell(world, told);
            world.facts.events.clear();
            world.event_route = Err(Silence::Status(404, "Not Found".to_owned()));
            world.ranks[0].source = Some(source("tcp://gpu-1:5558", Some("tcp://gpu-1:5557")));
            world.ranks[0].link = Err(SourceFault::Protocol("a ROUTER".to_owned()));
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    tcp://gpu-1:5558: the peer is not what was expected: a ROUTER
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (that is no socket that publishes: events and replay may be swapped)
              skip  events-arrive   no event socket
              skip  replay          no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}

fn silent(world: &mut World) {
    world.ranks[0].events = EventsSeen::default();
    world.ranks[0].replay = ReplaySeen::Answered {
        batches: 0,
        has_last: None,
    };
    world.ranks[0].twice = Ok(Twice {
        prompt: 72,
        predicted: Some(0),
        reported: Some(64),
        hits: Some(64),
    });
}

#[test]
fn silent_events() {
    check(
        silent,
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came
                                    engine: its publisher is stuck: restart the engine
              skip  cached-tokens   without events nothing is foretold

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |world| {
            silent(world);
            let told = "http://gpu-1:8000,events=tcp://gpu-2:5557,replay=tcp://gpu-2:5558";
            tell(world, told);
            world.ranks[0].source = Some(source("tcp://gpu-2:5557", Some("tcp://gpu-2:5558")));
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (these are the engine's own; what it is told are somebody else's)
              skip  cached-tokens   without events nothing is foretold

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |world| {
            silent(world);
            world.ranks[0].replay = ReplaySeen::Answered {
                batches: 9,
                has_last: None,
            };
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came, though the replay has 9
                                    engine: look for a proxy between here and the engine that holds live messages back
              skip  cached-tokens   without events nothing is foretold

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn events_of_somebody_else_or_of_another_world() {
    check(
        |world| {
            world.ranks[0].twice = Ok(Twice {
                prompt: 72,
                predicted: Some(0),
                reported: Some(64),
                hits: Some(64),
            });
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   events come, and none is about the prompt that was sent
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5657","replay_endpoint":"tcp://*:5658","topic":"kv"}'   (its sockets are another engine's: give each engine on a host its own ports)
              skip  cached-tokens   without events nothing is foretold

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |world| {
            world.ranks[0].events.blocks = 0;
            world.ranks[0].events.refused = Some("no msgpack".to_owned());
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   messages come and cannot be read: no msgpack
                                    engine: an engine release that is not known: report it with its version

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn no_replay() {
    check(
        |world| {
            world.facts.events.insert(0, source("tcp://*:5557", None));
            world.ranks[0].source = Some(source("tcp://gpu-1:5557", None));
            world.ranks[0].replay = ReplaySeen::Unknown;
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  replay          there is none: a lost event costs the whole picture
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (give it a replay socket)

            0 passed, 1 failed
        "#]],
    );
    check(
        |world| {
            tell(world, "http://gpu-1:8000,events=tcp://gpu-1:5557");
            world.ranks[0].source = Some(source("tcp://gpu-1:5557", None));
            world.ranks[0].replay = ReplaySeen::Unknown;
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  replay          there is none: a lost event costs the whole picture
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (this is the engine's own replay socket)

            0 passed, 1 failed
        "#]],
    );
    check(
        |world| world.ranks[0].replay = ReplaySeen::TimedOut(Duration::from_secs(5)),
        expect![[r#"
            http://gpu-1:8000
              FAIL  replay          tcp://gpu-1:5558: no answer within 5 s
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (give it a replay socket)

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn a_request_that_fails() {
    check(
        |world| {
            world.ranks[0].twice = Err(Silence::Status(500, "out of memory".to_owned()));
            world.ranks[0].events = EventsSeen::default();
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the test request failed: it answers 500: out of memory
                                    engine: make it answer /v1/completions; its log says more
              skip  cached-tokens   the test request failed: it answers 500: out of memory

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn usage_without_details() {
    let quiet = |hits| {
        move |world: &mut World| {
            world.ranks[0].twice = Ok(Twice {
                prompt: 72,
                predicted: Some(64),
                reported: None,
                hits,
            });
        }
    };
    check(
        quiet(Some(64)),
        expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   usage does not say them, though the engine counted 64 tokens found again
                                engine: --enable-prompt-tokens-details   (have it report prompt_tokens_details, by which predictions are judged)

        0 passed, 1 failed
    "#]],
    );
    check(
        quiet(None),
        expect![[r#"
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
        move |world: &mut World| {
            world.ranks[0].twice = Ok(Twice {
                prompt: 72,
                predicted: Some(predicted),
                reported: Some(reported),
                hits: None,
            });
        }
    };
    check(
        said(64, 32),
        expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   64 of 72 foretold, 32 reported
                                engine: it evicts without saying so, or is busy with much else: ask again when it is idle

        0 passed, 1 failed
    "#]],
    );
    check(
        said(16, 64),
        expect![[r#"
        http://gpu-1:8000
          FAIL  cached-tokens   16 of 72 foretold, 64 reported
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
        move |world: &mut World| {
            world.text = TextSeen::Compared(Comparison {
                plain,
                chat,
                chat_tokens: 71,
                counts_only,
                engine_folder,
            });
        }
    };
    let folder = Some("/models/other");
    check(
        compared(differs(), differs(), folder, false),
        expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the tokenizer differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                kvasir: --model-path /models/other   (the engine's own folder)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(None, differs(), None, false),
        expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the chat template differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                engine: --chat-template /models/tiny/chat_template.jinja   (give both the same template)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(differs(), None, None, false),
        expect![[r#"
        http://gpu-1:8000
          FAIL  tokens          the tokenizer differs: 71 tokens here, 80 there, from token 3 on "<|im_start|>" here, "\n" there
                                kvasir: --model-path DIR   (the folder of the model that the engine serves)

        0 passed, 1 failed
    "#]],
    );
    check(
        compared(None, differs(), None, true),
        expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          the tokens of a conversation differ: 71 tokens here, 80 there
                                    engine: --chat-template /models/tiny/chat_template.jinja   (give both the same template)

            0 passed, 1 failed
        "#]],
    );
}

#[test]
fn no_tokenizer() {
    check(
        |world| world.text = TextSeen::NoModelPath(Some("/models/tiny".to_owned())),
        expect![[r#"
            http://gpu-1:8000
              skip  tokens          --model-path is not given
                                    kvasir: --model-path /models/tiny   (the folder with the model's tokenizer and template; without it only prompts of token ids are routed by cache)

            0 passed, 1 skipped
        "#]],
    );
    check(
        |world| world.text = TextSeen::Unusable("no tokenizer.json".to_owned()),
        expect![[r#"
            http://gpu-1:8000
              FAIL  tokens          no tokenizer.json
                                    kvasir: --model-path DIR   (a folder with tokenizer.json)

            0 passed, 1 failed
        "#]],
    );
    check(
        |world| world.text = TextSeen::Untold(Silence::Status(404, "Not Found".to_owned())),
        expect![[r#"
            http://gpu-1:8000
              skip  tokens          the engine tells no tokens (it answers 404: Not Found)

            0 passed, 1 skipped
        "#]],
    );
}

#[test]
fn ranks_are_named_and_the_sick_one_is_shown() {
    check(
        |world| {
            world.facts.ranks = Some(2);
            let mut second = world.ranks[0].clone();
            second.rank = 1;
            second.link = Err(SourceFault::Unreachable("Connection refused".to_owned()));
            second.events = EventsSeen::default();
            world.ranks.push(second);
        },
        expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    rank 1: tcp://gpu-1:5557: cannot connect: Connection refused
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
              skip  events-arrive   rank 1: no event socket
              skip  replay          rank 1: no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}
