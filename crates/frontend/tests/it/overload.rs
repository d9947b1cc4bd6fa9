//! More than the fleet can take: who waits, who is refused, how it ends.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_frontend::{AppOptions, Limits};
use kvasir_router::{RouterConfig, RouterMode};
use tokio::net::TcpStream;

use crate::engine::{ANSWER, Stage, Step, ok};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// One request's prompt without a tokenizer: four bytes of its messages count as a token.
const PROMPT_TOKENS: usize = r#"[{"role":"user","content":"hi"}]"#.len() / 4;
/// Requests that wait at most.
const QUEUE: usize = 4;
/// Requests that the engine has at once before others wait: one, and one that makes it too much.
const RUNNING: usize = 2;

/// A fleet of one worker that is full with two prompts, and a queue of four.
async fn small_fleet() -> Rig {
    let router = RouterConfig {
        router_mode: RouterMode::Kv,
        router_queue_threshold: Some(1.0),
        router_queue_max_requests: QUEUE as u32,
        ..RouterConfig::default()
    };
    let setup = Setup {
        router,
        additions: format!(",max-num-batched-tokens={PROMPT_TOKENS}"),
        ..Setup::usual()
    };
    Rig::with(1, setup).await
}

#[tokio::test]
async fn three_times_too_much_waits_or_is_refused_at_once_and_all_is_well_after() {
    let rig = small_fleet().await;
    for round in 1..=2 {
        three_times_too_much(&rig, round).await;
    }
}

async fn three_times_too_much(rig: &Rig, round: usize) {
    let capacity = RUNNING + QUEUE;
    for _ in 0..capacity {
        rig.stage.play(vec![Step::Gate, ok()]);
    }
    let mut taken = Vec::new();
    for number in 0..3 * capacity {
        let mut client = rig.client().await;
        // Streams: their prompts are to be computed until something comes.
        client.post(CHAT, "", ASK_STREAM).await;
        if number < capacity {
            // Order matters: those that come first are taken.
            until("it is taken", || rig.app.in_flight().count() == number + 1).await;
            taken.push(client);
            continue;
        }
        let answer = in_time("refusal", client.answer()).await;
        assert_eq!(answer.status, 503);
        let body = answer.json();
        assert_eq!(
            (&body["message"], &body["type"], &body["code"]),
            (
                &"Service temporarily unavailable: All workers are busy, please retry later".into(),
                &"service_unavailable".into(),
                &503.into()
            )
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(answer.header("retry-after").is_some());
    }
    let refused = (round * 2 * capacity) as f64;
    assert_eq!(rig.metric("dynamo_tasks_rejected_total").await, refused);
    assert_eq!(
        rig.metric("dynamo_frontend_model_rejection_total").await,
        refused
    );
    assert_eq!(rig.metric("dynamo_queued_requests").await, capacity as f64);
    let full = r#"{model="m",policy_class="default",reason="request_limit",worker_type="decode"}"#;
    let full = format!("dynamo_frontend_router_queue_backpressure_total{full}");
    assert_eq!(rig.metric(&full).await, refused);
    let waiting = "dynamo_frontend_router_queue_pending_requests";
    assert_eq!(rig.metric(waiting).await, QUEUE as f64);
    // Each round ends with one more.
    let before = (round - 1) * (capacity + 1);
    assert_eq!(rig.stage.seen().len(), before + RUNNING);

    rig.stage.gate.add_permits(capacity);
    for mut client in taken {
        let answer = in_time("answer", client.answer()).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER));
    }
    assert_eq!(
        rig.post(CHAT, ASK).await.text(),
        ANSWER,
        "it recovers by itself"
    );
    rig.at_rest().await;
    assert_eq!(rig.metric("dynamo_queued_requests").await, 0.0);
    assert_eq!(rig.metric(waiting).await, 0.0);
}

/// A client that leaves the queue makes room in it.
#[tokio::test]
async fn who_leaves_the_queue_makes_room() {
    let rig = small_fleet().await;
    for _ in 0..RUNNING + QUEUE {
        rig.stage.play(vec![Step::Gate, ok()]);
    }
    let mut clients = Vec::new();
    for number in 0..RUNNING + QUEUE {
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK_STREAM).await;
        until("it is taken", || rig.app.in_flight().count() == number + 1).await;
        clients.push(client);
    }
    assert_eq!(rig.post(CHAT, ASK).await.status, 503);
    drop(clients.pop());
    until("it is gone", || {
        rig.app.in_flight().count() == RUNNING + QUEUE - 1
    })
    .await;
    let mut late = rig.client().await;
    late.post(CHAT, "", ASK_STREAM).await;
    clients.push(late);
    until("it is taken", || {
        rig.app.in_flight().count() == RUNNING + QUEUE
    })
    .await;
    rig.stage.gate.add_permits(RUNNING + QUEUE);
    for mut client in clients {
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_unread() {
    let limits = Limits {
        requests_max: 2,
        ..Limits::default()
    };
    let rig = Rig::with(1, Setup::limits(limits)).await;
    let mut running = Vec::new();
    for number in 0..2 {
        rig.stage.play(vec![Step::Gate, ok()]);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK).await;
        until("it runs", || rig.stage.seen().len() == number + 1).await;
        running.push(client);
    }
    for path in [CHAT, "/v1/completions", "/v1/embeddings"] {
        let answer = rig.post(path, ASK).await;
        assert_eq!(
            (answer.status, answer.json()["code"].as_u64()),
            (503, Some(503)),
            "{path}"
        );
    }
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 3.0);
    assert_eq!(rig.metric("dynamo_tasks_rejected_total").await, 3.0);
    rig.stage.gate.add_permits(2);
    for mut client in running {
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
    }
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    rig.at_rest().await;
}

/// Two connections may be open; clients have all the time that they want.
async fn rig_of_two_connections() -> Rig {
    let limits = Limits {
        connections_max: 2,
        client_stall: Duration::from_secs(3600),
        ..Limits::default()
    };
    Rig::with(1, Setup::limits(limits)).await
}

#[tokio::test]
async fn a_connection_beyond_the_limit_waits_while_all_are_busy_and_takes_the_place_of_an_idle_one()
{
    let rig = rig_of_two_connections().await;
    let mut busy = Vec::new();
    for number in 1..=2 {
        rig.stage.play(vec![Step::Gate, ok()]);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK).await;
        until("it runs", || rig.stage.seen().len() == number).await;
        busy.push(client);
    }
    let mut third = rig.client().await;
    third.post(CHAT, "connection: close\r\n", ASK).await;
    // Longer than an idle connection is left alone.
    let early = tokio::time::timeout(Duration::from_millis(600), third.answer()).await;
    assert!(early.is_err(), "nobody is idle");
    assert_eq!(rig.stage.seen().len(), 2);
    rig.stage.gate.add_permits(1);
    let answer = in_time("the third is let in", third.answer()).await;
    assert_eq!(answer.text(), ANSWER);
    drop(third);
    rig.stage.gate.add_permits(1);
    let mut closed = 0;
    for client in &mut busy {
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
    }
    // One of the two was idle when its place was needed.
    for client in &mut busy {
        client
            .try_send("GET /live HTTP/1.1\r\nhost: door\r\n\r\n")
            .await;
        closed += usize::from(!in_time("it ends", client.read_until("\r\n\r\n")).await);
    }
    assert_eq!(closed, 1);
    assert!(rig.metric("kvasir_limit_reached_total").await >= 1.0);
    drop(busy);
    rig.at_rest().await;
}

/// Clients that connect and send nothing, or a piece of a head, keep nobody out, however long they may stay.
#[tokio::test]
async fn connections_on_which_nothing_is_asked_make_room() {
    let rig = rig_of_two_connections().await;
    for begun in ["", "GET /health HTTP/1.1\r\nhost"] {
        let mut held = Vec::new();
        for _ in 0..8 {
            let mut client = rig.client().await;
            client.try_send(begun).await;
            held.push(client);
        }
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!(answer.text(), ANSWER, "after {begun:?}");
    }
    rig.at_rest().await;
}

/// Pieces of heads by the hundred: whoever waits behind them does not wait for each in turn.
#[tokio::test]
async fn pieces_of_heads_make_room_by_the_dozen() {
    let limits = Limits {
        connections_max: 64,
        client_stall: Duration::from_secs(3600),
        ..Limits::default()
    };
    let rig = Rig::with(1, Setup::limits(limits)).await;
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut client = rig.client().await;
        client
            .try_send("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n")
            .await;
        held.push(client);
    }
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    drop(held);
    rig.at_rest().await;
}

/// A connection of HTTP/2 stays while it carries a request; between two it makes room as any other does, by a GOAWAY.
#[tokio::test]
async fn an_idle_http2_connection_makes_room_and_a_busy_one_does_not() {
    let rig = rig_of_two_connections().await;
    let driver = kvasir_tasks::Tasks::new();
    let mut senders = Vec::new();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let socket = TcpStream::connect(rig.address()).await.unwrap();
        let (sender, connection) = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(
            TokioExecutor::new(),
            TokioIo::new(socket),
        )
        .await
        .unwrap();
        ends.push(driver.spawn(connection));
        senders.push(sender);
    }
    let request = |body: &'static str| {
        http::Request::post(format!("http://door{CHAT}"))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap()
    };
    let taken = |answer: http::Response<hyper::body::Incoming>| async {
        answer.into_body().collect().await.unwrap().to_bytes()
    };
    // Both have served: the second is idle then, the first waits for its engine.
    let answer = senders[1].send_request(request(ASK)).await.unwrap();
    assert_eq!(taken(answer).await, ANSWER);
    rig.stage.play(vec![Step::Gate, ok()]);
    let busy = driver.spawn(senders[0].send_request(request(ASK)));
    until("it runs", || rig.stage.seen().len() == 2).await;
    let third = in_time("the third is let in", rig.post(CHAT, ASK)).await;
    assert_eq!(third.text(), ANSWER);
    let idle = ends.pop().unwrap();
    in_time("the idle one ends", idle)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(senders[1].is_closed());
    assert!(!senders[0].is_closed(), "it carries a request");
    rig.stage.gate.add_permits(1);
    let answer = in_time("the busy one is answered", busy).await.unwrap();
    assert_eq!(taken(answer.unwrap().unwrap()).await, ANSWER);
    drop(senders);
    driver.stop();
    rig.at_rest().await;
}

/// Many clients that each hold a connection and never finish: all are left, and a good one is served meanwhile.
#[tokio::test]
async fn slow_clients_do_not_keep_others_out() {
    let limits = Limits {
        client_stall: Duration::from_millis(200),
        connections_max: 64,
        ..Limits::default()
    };
    let options = AppOptions {
        limits,
        ..AppOptions::default()
    };
    let setup = Setup::options(options);
    let rig = Rig::with(1, setup).await;
    let mut slow = Vec::new();
    for number in 0..64 {
        let mut client = rig.client().await;
        let begun = &"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: 1"[..number % 40];
        client.try_send(begun).await;
        slow.push(client);
    }
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    for mut client in slow {
        in_time("it is left", async { while !client.closed().await {} }).await;
    }
    rig.at_rest().await;
}

/// What a vLLM says on its metrics page when so much of its cache is in use; nothing else is published.
fn page(used: f64) -> String {
    let recorded = include_str!("../../../../testdata/vllm-facts/metrics_under_load.txt");
    let mut lines: Vec<String> = recorded.lines().map(str::to_owned).collect();
    for line in &mut lines {
        if line.starts_with("vllm:kv_cache_usage_perc{") {
            let (series, _) = line.rsplit_once(' ').unwrap();
            *line = format!("{series} {used}");
        }
    }
    lines.join("\n")
}

#[tokio::test]
async fn a_vllm_is_busy_by_its_metrics_page_alone() {
    busy_by(|stage, used| *stage.metrics.lock().unwrap() = Some(page(used))).await;
}

#[tokio::test]
async fn a_tensorrt_llm_is_busy_by_the_steps_that_it_ran() {
    busy_by(|stage, used| {
        let blocks = (used * 1000.0) as u64;
        let kv = format!(r#"{{"maxNumBlocks":1000,"usedNumBlocks":{blocks},"tokensPerBlock":32}}"#);
        let steps = format!(r#"[{{"iter":1,"kvCacheStats":{kv},"numActiveRequests":1}}]"#);
        *stage.metrics.lock().unwrap() = Some(steps);
    })
    .await;
}

#[tokio::test]
async fn an_sglang_without_metrics_is_busy_by_its_loads() {
    busy_by(|stage, used| {
        let info = r#"{"max_total_num_tokens":6400,"page_size":64,"version":"0.5.9"}"#;
        let loads = format!(r#"{{"loads":[{{"dp_rank":0,"token_usage":{used}}}]}}"#);
        let mut pages = stage.pages.lock().unwrap();
        pages.insert("/server_info", info.into());
        pages.insert("/v1/loads", loads);
    })
    .await;
}

/// An engine that says by `tell` how much of its cache is in use is busy and free again by that alone.
async fn busy_by(tell: impl Fn(&Stage, f64)) {
    let router = RouterConfig {
        active_decode_blocks_threshold: Some(0.8),
        ..Setup::usual().router
    };
    let setup = Setup {
        router,
        ..Setup::usual()
    };
    let rig = Rig::of_stage(1, setup, |stage| tell(stage, 0.5)).await;
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    let asks = async |status: u16| while rig.post(CHAT, ASK).await.status != status {};
    tell(&rig.stage, 0.95);
    in_time("it is busy", asks(503)).await;
    assert_eq!(rig.booked(), 0, "and not by our own count");
    tell(&rig.stage, 0.1);
    in_time("it is free again", asks(200)).await;
    rig.at_rest().await;
}

/// A completion of so many token ids.
fn long_prompt(tokens: usize, stream: bool) -> String {
    let ids = vec!["1"; tokens].join(",");
    format!(r#"{{"model":"m","prompt":[{ids}],"stream":{stream}}}"#)
}

const COMPLETIONS: &str = "/v1/completions";

/// Three answers in one piece of 4,000 prompt tokens each, which their engine decodes for as long as the gate is shut:
/// they keep a fourth out only until their prompts should be computed. No stream has shown how fast that is.
#[tokio::test]
async fn unary_answers_that_decode_do_not_keep_others_out() {
    for mode in [RouterMode::Kv, RouterMode::RoundRobin] {
        let router = RouterConfig {
            router_mode: mode,
            active_prefill_tokens_threshold: Some(11_000),
            ..RouterConfig::default()
        };
        let setup = Setup {
            router,
            ..Setup::usual()
        };
        let rig = Rig::with(1, setup).await;
        let mut running = Vec::new();
        for number in 0..3 {
            rig.stage.play(vec![Step::Gate, ok()]);
            let mut client = rig.client().await;
            let body = long_prompt(4000, false);
            client.post(COMPLETIONS, "", body).await;
            until("it runs", || rig.stage.seen().len() == number + 1).await;
            running.push(client);
        }
        let busy = rig.booked_prefill();
        assert!(busy <= 12_000, "{busy}");
        until("their prompts are taken for computed", || {
            rig.booked_prefill() == 0
        })
        .await;
        assert_eq!(rig.booked_requests(), 3, "they run on");
        let fourth = rig.post(COMPLETIONS, long_prompt(4000, false)).await;
        assert_eq!(fourth.status, 200);
        rig.stage.gate.add_permits(3);
        for mut client in running {
            assert_eq!(in_time("answer", client.answer()).await.status, 200);
        }
        rig.at_rest().await;
    }
}

/// A stream that waits for its first token is load in every mode: thresholds refuse by it and gauges show it.
#[tokio::test]
async fn prefill_thresholds_and_gauges_work_in_every_mode() {
    for mode in [
        RouterMode::RoundRobin,
        RouterMode::Random,
        RouterMode::LeastLoaded,
        RouterMode::PowerOfTwo,
        RouterMode::Kv,
    ] {
        let router = RouterConfig {
            router_mode: mode,
            active_prefill_tokens_threshold: Some(500),
            ..RouterConfig::default()
        };
        let setup = Setup {
            router,
            ..Setup::usual()
        };
        let rig = Rig::with(1, setup).await;
        rig.stage.play(vec![Step::Gate, ok()]);
        let mut client = rig.client().await;
        client.post(COMPLETIONS, "", long_prompt(640, true)).await;
        until("it runs", || rig.stage.seen().len() == 1).await;
        let prefill = rig.metric("dynamo_frontend_worker_active_prefill_tokens");
        assert_eq!(prefill.await, 640.0, "{mode:?}");
        let blocks = rig.metric("dynamo_frontend_worker_active_decode_blocks");
        assert_eq!(blocks.await, 40.0, "{mode:?}");
        assert_eq!(rig.post(CHAT, ASK).await.status, 503, "{mode:?}");
        rig.stage.gate.add_permits(1);
        in_time("answer", client.answer()).await;
        drop(client);
        assert_eq!(rig.post(CHAT, ASK).await.status, 200, "{mode:?}");
        rig.at_rest().await;
    }
}

/// With overload protection and nothing else set: eight wait in the engine, the ninth waits here and is refused after
/// its time with a time to come back; all is well once the engine goes on.
#[tokio::test]
async fn a_protected_engine_is_given_a_few_and_the_others_wait_or_are_refused() {
    let router = RouterConfig {
        overload_protection: true,
        router_queue_max_wait_secs: 0.5,
        ..Setup::usual().router
    };
    let setup = Setup {
        router,
        ..Setup::usual()
    };
    let rig = Rig::with(1, setup).await;
    let mut taken = Vec::new();
    for number in 0..8 {
        rig.stage.play(vec![Step::Gate, ok()]);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK_STREAM).await;
        until("it runs", || rig.stage.seen().len() == number + 1).await;
        taken.push(client);
    }
    let late = rig.post(CHAT, ASK_STREAM).await;
    assert_eq!((late.status, rig.stage.seen().len()), (503, 8));
    let body = late.json();
    assert_eq!(body["type"], "service_unavailable");
    assert_eq!(body["details"]["limit_kind"], "wait_ms");
    let retry: u64 = late.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry));
    let refused = r#"dynamo_frontend_router_queue_backpressure_total{model="m",policy_class="default",reason="wait_limit",worker_type="decode"}"#;
    assert_eq!(rig.metric(refused).await, 1.0);
    let mut waits = rig.client().await;
    waits.post(CHAT, "", ASK_STREAM).await;
    until("it waits", || rig.app.in_flight().count() == 9).await;
    rig.stage.gate.add_permits(8);
    for mut client in taken {
        assert_eq!(in_time("answer", client.answer()).await.status, 200);
    }
    assert_eq!(in_time("answer", waits.answer()).await.status, 200);
    drop(waits);
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    rig.at_rest().await;
}

#[tokio::test]
async fn router_config_override_is_taken_and_checked() {
    let rig = Rig::of(1).await;
    let with = |nvext: &str| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"nvext":{{"router_config_override":{nvext}}}}}"#
        )
    };
    let good = r#"{"overlap_score_weight":0.5,"router_temperature":0.7,"assume_kv_reuse":true}"#;
    assert_eq!(rig.post(CHAT, with(good)).await.status, 200);
    let sent = rig.stage.seen();
    let body = String::from_utf8_lossy(&sent.last().unwrap().body).into_owned();
    assert!(!body.contains("router_config_override"), "{body}");
    for (bad, named) in [
        (r#"{"router_temperature":-1}"#, "router_temperature"),
        (r#"{"overlap_score_credit":1.5}"#, "overlap_score_credit"),
        (r#"{"temperature":1}"#, "temperature"),
        ("3", "router_config_override"),
    ] {
        let answer = rig.post(CHAT, with(bad)).await;
        assert_eq!(answer.status, 400, "{bad}");
        assert!(answer.text().contains(named), "{bad}: {}", answer.text());
    }
    rig.at_rest().await;
}
