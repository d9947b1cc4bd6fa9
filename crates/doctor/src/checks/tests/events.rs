//! Its events do not come, or cannot be had again.

use super::*;

fn unheard(observed: &mut Observations) {
    let rank = &mut observed.ranks[0];
    rank.source = None;
    rank.link = Err(SourceFault::Silent);
    rank.events = EventCounts::default();
    rank.replay = ReplayProbe::Skipped;
    rank.repeated_prompt = Ok(RepeatedPrompt {
        prompt: 72,
        predicted: None,
        reported: Some(64),
        hits: Some(64),
    });
    observed.facts.events.clear();
}

#[test]
fn events_off() {
    check(
        unheard,
        &expect![[r#"
        http://gpu-1:8000
          FAIL  event-socket    the engine publishes no events
                                engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'   (let it publish; it then says itself where)
          skip  events-arrive   no event socket
          skip  replay          no event socket
          skip  cached-tokens   no prediction without events

        0 passed, 1 failed, 3 skipped
    "#]],
    );
    check(
        |observed| {
            unheard(observed);
            observed.event_route = Err(ProbeError::Status(404, "Not Found".to_owned()));
            observed.free_event_port = 5561;
            observed.facts.ranks = Some(2);
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    the engine does not say where its events are (it answers 404: Not Found)
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5561","replay_endpoint":"tcp://*:5563"}'   (let it publish, if it does not yet)
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5561,replay=tcp://gpu-1:5563   (name the sockets, as this engine does not)
              skip  events-arrive   no event socket
              skip  replay          no event socket
              skip  cached-tokens   no prediction without events

            0 passed, 1 failed, 3 skipped
        "#]],
    );
}

#[test]
fn an_event_socket_that_cannot_be_reached() {
    let closed = || Err(SourceFault::Unreachable("Connection refused".to_owned()));
    check(
        |observed| observed.ranks[0].link = closed(),
        &expect![[r#"
        http://gpu-1:8000
          FAIL  event-socket    tcp://gpu-1:5557: cannot connect: Connection refused
                                engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
          skip  events-arrive   no event socket
          skip  replay          no event socket

        0 passed, 1 failed, 2 skipped
    "#]],
    );
    check(
        |observed| {
            observed
                .facts
                .events
                .insert(0, source("tcp://127.0.0.1:5557", None));
            observed.ranks[0].source = Some(source("tcp://127.0.0.1:5557", None));
            observed.ranks[0].link = closed();
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    tcp://127.0.0.1:5557: cannot connect: Connection refused
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
              skip  events-arrive   no event socket
              skip  replay          no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
    check(
        |observed| {
            tell(observed, "http://gpu-1:8000,events=tcp://gpu-1:9999");
            observed.ranks[0].source = Some(source("tcp://gpu-1:9999", None));
            observed.ranks[0].link = closed();
        },
        &expect![[r#"
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
        |observed| {
            let told = "http://gpu-1:8000,events=tcp://gpu-1:5558,replay=tcp://gpu-1:5557";
            tell(observed, told);
            observed.facts.events.clear();
            observed.event_route = Err(ProbeError::Status(404, "Not Found".to_owned()));
            observed.ranks[0].source = Some(source("tcp://gpu-1:5558", Some("tcp://gpu-1:5557")));
            observed.ranks[0].link = Err(SourceFault::Protocol("a ROUTER".to_owned()));
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    tcp://gpu-1:5558: the peer is not what was expected: a ROUTER
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (that is no socket that publishes: events and replay may be swapped)
              skip  events-arrive   no event socket
              skip  replay          no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}

fn silent(observed: &mut Observations) {
    observed.ranks[0].events = EventCounts::default();
    observed.ranks[0].replay = ReplayProbe::Answered {
        batches: 0,
        has_last: None,
    };
    observed.ranks[0].repeated_prompt = Ok(RepeatedPrompt {
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
        &expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came
                                    engine: its publisher is stuck: restart the engine
              skip  cached-tokens   no prediction without events

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |observed| {
            silent(observed);
            let told = "http://gpu-1:8000,events=tcp://gpu-2:5557,replay=tcp://gpu-2:5558";
            tell(observed, told);
            observed.ranks[0].source = Some(source("tcp://gpu-2:5557", Some("tcp://gpu-2:5558")));
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (these are the engine's own; what it is told are somebody else's)
              skip  cached-tokens   no prediction without events

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |observed| {
            silent(observed);
            observed.ranks[0].replay = ReplayProbe::Answered {
                batches: 9,
                has_last: None,
            };
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the socket is there, a request was answered, and no event came, though the replay has 9
                                    engine: look for a proxy between here and the engine that holds live messages back
              skip  cached-tokens   no prediction without events

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn events_of_somebody_else_or_of_another_world() {
    check(
        |observed| {
            observed.ranks[0].repeated_prompt = Ok(RepeatedPrompt {
                prompt: 72,
                predicted: Some(0),
                reported: Some(64),
                hits: Some(64),
            });
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   events come, and none is about the prompt that was sent
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5657","replay_endpoint":"tcp://*:5658","topic":"kv"}'   (its sockets are another engine's: give each engine on a host its own ports)
              skip  cached-tokens   no prediction without events

            0 passed, 1 failed, 1 skipped
        "#]],
    );
    check(
        |observed| {
            observed.ranks[0].events.blocks = 0;
            observed.ranks[0].events.refused = Some("no msgpack".to_owned());
        },
        &expect![[r#"
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
        |observed| {
            observed
                .facts
                .events
                .insert(0, source("tcp://*:5557", None));
            observed.ranks[0].source = Some(source("tcp://gpu-1:5557", None));
            observed.ranks[0].replay = ReplayProbe::Unknown;
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  replay          there is none: a lost event costs the whole cache view
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (give it a replay socket)

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| {
            tell(observed, "http://gpu-1:8000,events=tcp://gpu-1:5557");
            observed.ranks[0].source = Some(source("tcp://gpu-1:5557", None));
            observed.ranks[0].replay = ReplayProbe::Unknown;
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  replay          there is none: a lost event costs the whole cache view
                                    kvasir: --worker http://gpu-1:8000,events=tcp://gpu-1:5557,replay=tcp://gpu-1:5558   (this is the engine's own replay socket)

            0 passed, 1 failed
        "#]],
    );
    check(
        |observed| observed.ranks[0].replay = ReplayProbe::TimedOut(Duration::from_secs(5)),
        &expect![[r#"
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
        |observed| {
            observed.ranks[0].repeated_prompt =
                Err(ProbeError::Status(500, "out of memory".to_owned()));
            observed.ranks[0].events = EventCounts::default();
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  events-arrive   the test request failed: it answers 500: out of memory
                                    engine: make it answer /v1/completions; its log says more
              skip  cached-tokens   the test request failed: it answers 500: out of memory

            0 passed, 1 failed, 1 skipped
        "#]],
    );
}

#[test]
fn ranks_are_named_and_the_sick_one_is_shown() {
    check(
        |observed| {
            observed.facts.ranks = Some(2);
            let mut second = observed.ranks[0].clone();
            second.rank = 1;
            second.link = Err(SourceFault::Unreachable("Connection refused".to_owned()));
            second.events = EventCounts::default();
            observed.ranks.push(second);
        },
        &expect![[r#"
            http://gpu-1:8000
              FAIL  event-socket    rank 1: tcp://gpu-1:5557: cannot connect: Connection refused
                                    engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv"}'   (let it publish on all interfaces, and open the port on the way from here)
              skip  events-arrive   rank 1: no event socket
              skip  replay          rank 1: no event socket

            0 passed, 1 failed, 2 skipped
        "#]],
    );
}
