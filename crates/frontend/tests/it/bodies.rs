//! What engines get and what clients get back, beside the streams.

use std::sync::atomic::Ordering;

use kvasir_upstream::parse_worker;

use std::time::Duration;

use crate::engine::{
    ANSWER, DONE, Engine, FIRST, LAST, STREAM_HEAD, Stage, Step, chunk, stream, unary,
};
use crate::rig::{ASK, CHAT, Rig, in_time, until};

#[tokio::test]
async fn a_body_reaches_the_engine_byte_for_byte() {
    let rig = Rig::of(1).await;
    let bodies = [
        ASK.to_owned(),
        "{ \"model\" : \"m\",\n\t\"messages\":[{\"role\":\"user\",\"content\":\"caf\u{e9} \u{1F600} \\u00e9\"}], \"unknown\": {\"a\":[1, 2.50, 1e3]},\"stream\":false }".to_owned(),
        "{\"model\":\"m\",\"messages\":\"of the wrong type\",\"temperature\":\"hot\"}".to_owned(),
        format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}]}}", "long ".repeat(400_000)),
    ];
    for body in &bodies {
        assert_eq!(rig.post(CHAT, body).await.text(), ANSWER);
        let seen = rig.stage.seen().pop().unwrap();
        assert!(seen.body == body.as_bytes(), "changed: {}", &body[..60]);
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn only_named_fields_change() {
    let rig = Rig::of(1).await;
    let body = r#"{"model":"m", "nvext":{"agent_hints":{"priority":3}}, "messages":[ ],"x": 1.0}"#;
    rig.post(CHAT, body).await;
    let sent = rig.stage.seen().pop().unwrap().body;
    let value: serde_json::Value = serde_json::from_slice(&sent).unwrap();
    assert_eq!(
        value,
        serde_json::json!({"model":"m","messages":[],"x":1.0,"priority":-3})
    );
    assert!(
        String::from_utf8(sent)
            .unwrap()
            .contains("\"messages\":[ ],\"x\": 1.0}")
    );
    rig.at_rest().await;
}

#[tokio::test]
async fn fields_of_the_head_go_on_as_they_should() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    let headers = "connection: close, x-private\r\nx-private: 1\r\nte: trailers\r\nexpect: 100-continue\r\n\
        authorization: Bearer k\r\ntraceparent: 00-ab-cd-01\r\nx-many: 1\r\nx-many: 2\r\naccept-encoding: gzip\r\n";
    client.post("/v1/chat/completions?a=b", headers, ASK).await;
    until("engine has it", || !rig.stage.seen().is_empty()).await;
    let seen = rig.stage.seen().pop().unwrap();
    assert!(
        seen.head
            .starts_with("POST /v1/chat/completions?a=b HTTP/1.1\r\n")
    );
    assert_eq!(seen.header("host"), [rig.engines[0].address.to_string()]);
    assert_eq!(seen.header("authorization"), ["Bearer k"]);
    assert_eq!(seen.header("traceparent"), ["00-ab-cd-01"]);
    assert_eq!(seen.header("x-many"), ["1", "2"]);
    let via = seen.header("via");
    assert!(
        via.len() == 1 && via[0].starts_with("1.1 kvasir-"),
        "{via:?}"
    );
    assert_eq!(seen.header("x-request-id").len(), 1);
    assert_eq!(seen.header("content-length"), [ASK.len().to_string()]);
    for gone in [
        "connection",
        "x-private",
        "te",
        "expect",
        "accept-encoding",
        "transfer-encoding",
    ] {
        assert!(seen.header(gone).is_empty(), "{gone}");
    }
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn an_engines_fields_pass_but_for_its_connections() {
    let rig = Rig::of(1).await;
    let answer = format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\nconnection: keep-alive, x-hop\r\nkeep-alive: timeout=5\r\nx-hop: 1\r\n\
         set-cookie: a\r\nset-cookie: b\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{ANSWER}",
        ANSWER.len()
    );
    rig.stage.play(vec![Step::Write(answer.into_bytes())]);
    let answer = rig.post(CHAT, ASK).await;
    assert_eq!((answer.status, answer.text()), (200, ANSWER));
    assert_eq!(answer.header("server"), Some("uvicorn"));
    assert_eq!(answer.head.matches("set-cookie: ").count(), 2);
    assert_eq!(answer.head.matches("content-length: ").count(), 1);
    for gone in ["keep-alive", "x-hop"] {
        assert_eq!(answer.header(gone), None);
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn the_client_is_told_who_served_it_and_when() {
    let rig = Rig::of(1).await;
    let worker = rig.model().specs()[0].id.0;
    let ask = |stream: bool| {
        format!(
            r#"{{"model":"m","messages":[],"stream":{stream},"nvext":{{"extra_fields":["worker_id","timing"]}}}}"#
        )
    };
    let answer = rig.post(CHAT, ask(false)).await;
    assert!(answer.whole);
    let nvext = &answer.json()["nvext"];
    assert_eq!(nvext["worker_id"]["decode_worker_id"], worker);
    assert!(nvext["timing"]["request_received_ms"].as_u64().unwrap() > 1_600_000_000_000);
    assert!(nvext["timing"]["total_time_ms"].as_f64().unwrap() >= 0.0);
    rig.stage.play(vec![stream(&[
        FIRST.as_bytes(),
        LAST.as_bytes(),
        DONE.as_bytes(),
    ])]);
    let answer = rig.post(CHAT, ask(true)).await;
    let events: Vec<&str> = answer.text().split_terminator("\n\n").collect();
    let nvext = |event: &str| -> serde_json::Value {
        let data = event.strip_prefix("data: ").unwrap();
        serde_json::from_str::<serde_json::Value>(data).unwrap()["nvext"].clone()
    };
    assert_eq!(events.len(), 3);
    assert_eq!(nvext(events[0])["worker_id"]["decode_worker_id"], worker);
    assert!(nvext(events[0])["timing"].is_null());
    let timing = nvext(events[1])["timing"].clone();
    for part in [
        "ttft_ms",
        "prefill_wait_time_ms",
        "prefill_time_ms",
        "kv_hit_rate",
    ] {
        assert!(timing[part].as_f64().unwrap() >= 0.0, "{part}: {timing}");
    }
    assert_eq!(events[2], "data: [DONE]");
    assert!(
        !rig.stage
            .seen()
            .iter()
            .any(|seen| String::from_utf8_lossy(&seen.body).contains("nvext"))
    );
    // An engine's refusal is its own.
    let refusal =
        "HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{\"a\":1}";
    rig.stage.play(vec![Step::Write(refusal.into())]);
    assert_eq!(rig.post(CHAT, ask(false)).await.text(), "{\"a\":1}");
    rig.at_rest().await;
}

#[tokio::test]
async fn routes_that_only_engines_know_pass_less_our_extension() {
    let rig = Rig::of(2).await;
    rig.stage.tokenizes.store(true, Ordering::SeqCst);
    let body = "{\"model\":\"m\", \"nvext\":{\"any\":1}, \"input\" : [\"a\"]}";
    let sent = "{\"model\":\"m\", \"input\" : [\"a\"]}";
    for path in [
        "/v1/embeddings",
        "/v1/responses?x=1",
        "/tokenize",
        "/rerank",
        "/score",
    ] {
        rig.stage.play(vec![Step::Write(unary("{\"data\":[]}"))]);
        let answer = rig.post(path, body).await;
        assert_eq!((answer.status, answer.text()), (200, "{\"data\":[]}"));
        let seen = rig.stage.seen().pop().unwrap();
        assert!(
            seen.head.starts_with(&format!("POST {path} ")),
            "{}",
            seen.head
        );
        assert_eq!(seen.body, sent.as_bytes());
    }
    // No JSON at all, as an upload of sound would be.
    rig.stage.play(vec![Step::Write(unary("{}"))]);
    let mut client = rig.client().await;
    let upload = "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: door\r\ncontent-type: audio/wav\r\ncontent-length: 2\r\n\r\n";
    client.send([upload.as_bytes(), b"\xff\x00"].concat()).await;
    assert_eq!(client.answer().await.status, 200);
    drop(client);
    assert_eq!(rig.stage.seen().pop().unwrap().body, b"\xff\x00");
    // A stream of any kind, cut where it breaks.
    rig.stage.play(vec![stream(&[b"event: x\ndata: {}\n\n"])]);
    assert_eq!(
        rig.post("/v1/responses", body).await.text(),
        "event: x\ndata: {}\n\n"
    );
    rig.stage.play(vec![Step::Close]);
    rig.stage.play(vec![Step::Write(unary("{}"))]);
    assert_eq!(
        rig.post("/v1/embeddings", body).await.text(),
        "{}",
        "another worker"
    );
    assert_eq!(
        rig.post("/v1/embeddings", "{\"model\":\"other\"}")
            .await
            .status,
        404
    );
    rig.at_rest().await;
}

/// An answer that was passed on whole is a success, however its end is told, and its connection is used again.
#[tokio::test]
async fn an_answer_that_was_passed_on_is_a_success() {
    let rig = Rig::of(1).await;
    let empty = "HTTP/1.1 204 No Content\r\n\r\n";
    let long = format!("{{\"data\":\"{}\"}}", "x".repeat(6 << 20));
    let (mut chunked, mut sized) = (STREAM_HEAD.as_bytes().to_vec(), unary(&long));
    chunked.extend(chunk(long.as_bytes()));
    chunked.extend_from_slice(b"0\r\n\r\n");
    let passed = "/v1/embeddings";
    let cases = [
        (passed, unary("{\"data\":[]}"), 200, 11),
        (passed, unary(""), 200, 0),
        (passed, empty.into(), 204, 0),
        (passed, sized.clone(), 200, long.len()),
        (passed, chunked, 200, long.len()),
        (CHAT, std::mem::take(&mut sized), 200, long.len()),
    ];
    for (n, (path, answer, status, length)) in cases.into_iter().enumerate() {
        rig.stage.play(vec![Step::Write(answer)]);
        let answer = rig.post(path, ASK).await;
        assert_eq!((answer.status, answer.body.len()), (status, length), "{n}");
        assert!(answer.whole);
        until("it is remembered", || {
            rig.app.in_flight().count() == 0 && rig.booked() == 0
        })
        .await;
        let name = answer.header("x-request-id").unwrap();
        let mut client = rig.client().await;
        let ask = format!("GET /decisions/{name} HTTP/1.1\r\nhost: door\r\n\r\n");
        client.send(ask).await;
        let why = client.answer().await.json();
        assert_eq!(why["outcome"]["status"], status, "{n}: {why}");
    }
    assert_eq!(
        rig.metric("dynamo_frontend_model_cancellation_total").await,
        0.0
    );
    assert_eq!(rig.stage.open(), 1, "one connection for all");
    rig.at_rest().await;
}

/// Uploads are forms: the field `model` says whose they are, and they pass byte for byte.
#[tokio::test]
async fn an_upload_goes_to_the_model_that_its_form_names() {
    const PATH: &str = "/v1/audio/transcriptions";
    let rig = Rig::of(1).await;
    let other = Stage::new();
    let models = r#"{"object":"list","data":[{"id":"whisper"}]}"#;
    other
        .pages
        .lock()
        .unwrap()
        .insert("/v1/models", models.into());
    let engine = Engine::start(&other).await;
    assert!(rig.fleet.watch(parse_worker(&engine.url()).unwrap()));
    until("it is served", || rig.app.models().get("whisper").is_some()).await;
    let upload = |model: &str| {
        let mut body =
            b"--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n"
                .to_vec();
        body.extend((0..300_000_u32).map(|n| (n.wrapping_mul(n) >> 3) as u8));
        let model = format!(
            "\r\n--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--x--\r\n"
        );
        [body, model.into_bytes()].concat()
    };
    let post = async |body: &[u8]| {
        let mut client = rig.client().await;
        let length = body.len();
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-length: {length}\r\n\r\n"
        );
        client.send([head.as_bytes(), body].concat()).await;
        client.answer().await.status
    };
    for (model, status, stage) in [("m", 200, &rig.stage), ("whisper", 200, &other)] {
        let body = upload(model);
        assert_eq!(post(&body).await, status, "{model}");
        let seen = stage.seen();
        assert_eq!(seen.len(), 1, "{model}");
        assert!(seen[0].body == body, "{model}: other bytes");
    }
    assert_eq!(post(&upload("nobody")).await, 404);
    assert_eq!(post(b"--x--\r\n").await, 404, "it names none");
    until("requests end", || rig.app.in_flight().count() == 0).await;
}

/// What an engine streams on a route of its own is counted as a stream, and a refusal has a name too.
#[tokio::test]
async fn what_passes_is_labelled_and_named() {
    let rig = Rig::of(1).await;
    rig.stage.play(vec![stream(&[b"data: {}\n\n"])]);
    rig.post("/v1/responses", r#"{"model":"m","stream":true}"#)
        .await;
    rig.at_rest().await;
    let mut client = rig.client().await;
    client
        .send("GET /metrics HTTP/1.1\r\nhost: door\r\n\r\n")
        .await;
    let page = client.answer().await;
    let mut lines = page.text().lines();
    let line = lines
        .find(|line| line.starts_with("dynamo_frontend_requests_total{"))
        .unwrap();
    assert!(line.contains("request_type=\"stream\""), "{line}");
    assert!(line.contains("status=\"success\""), "{line}");
    let mut client = rig.client().await;
    let named = "x-request-id: mine\r\n";
    client
        .post("/v1/embeddings", named, r#"{"model":"x"}"#)
        .await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.header("x-request-id")),
        (404, Some("mine"))
    );
    // More than are asked: a connection that was closed while it was idle is no attempt.
    for _ in 0..6 {
        rig.stage.play(vec![Step::Close]);
    }
    let answer = rig.post("/v1/embeddings", r#"{"model":"m"}"#).await;
    assert_eq!(answer.status, 502);
    assert!(answer.header("x-request-id").is_some());
}

/// `DYN_DISABLE_FRONTEND_NVEXT`: extensions are taken out and mean nothing, in body and headers alike.
#[tokio::test]
async fn switched_off_extensions_mean_nothing() {
    let mut setup = crate::rig::Setup::usual();
    setup.options.nvext_enabled = false;
    let rig = Rig::with(1, setup).await;
    let body = r#"{"model":"m","nvext":{"agent_hints":{"priority":3},"cache_salt":"s","backend_instance_id":1,"extra_fields":["worker_id"]},"messages":[]}"#;
    let mut client = rig.client().await;
    let pinned = "x-dynamo-worker-instance-id: 1\r\nx-tenant-id: t\r\nconnection: close\r\n";
    client.post(CHAT, pinned, body).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text()), (200, ANSWER));
    let sent = rig.stage.seen().pop().unwrap().body;
    assert_eq!(sent, br#"{"model":"m","messages":[]}"#);
    rig.at_rest().await;
}

/// A tenant's salt goes to the engine in its own field, header before body, and nothing else changes.
#[tokio::test]
async fn a_salt_reaches_the_engine() {
    let rig = Rig::of(1).await;
    let body = r#"{"model":"m","nvext":{"cache_salt":"s"},"messages":[]}"#;
    for (headers, salt) in [("", "s"), ("x-tenant-id: t\r\n", "t")] {
        let mut client = rig.client().await;
        client
            .post(CHAT, &format!("{headers}connection: close\r\n"), body)
            .await;
        assert_eq!(client.answer().await.status, 200);
        let sent = rig.stage.seen().pop().unwrap().body;
        let value: serde_json::Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"model":"m","messages":[],"cache_salt":salt})
        );
    }
    rig.at_rest().await;
}

/// `query_instance_id:` says where a request would go, and no engine hears of it.
#[tokio::test]
async fn a_query_runs_nothing() {
    let rig = Rig::of(1).await;
    let worker = rig.model().specs()[0].id.0;
    let ask = |stream: bool| {
        format!(
            r#"{{"model":"m","prompt":[5,6,7],"stream":{stream},"nvext":{{"annotations":["query_instance_id:"]}}}}"#
        )
    };
    let answer = rig.post("/v1/completions", ask(false)).await;
    assert_eq!(answer.status, 200);
    let nvext = &answer.json()["nvext"];
    assert_eq!(nvext["worker_id"]["decode_worker_id"], worker);
    assert_eq!(nvext["token_ids"], serde_json::json!([5, 6, 7]));
    let answer = rig.post("/v1/completions", ask(true)).await;
    assert!(
        answer.text().contains("\"token_ids\":[5,6,7]"),
        "{}",
        answer.text()
    );
    assert!(answer.text().ends_with(DONE));
    // Of a prompt that nobody could read there are no tokens to tell.
    let body = r#"{"model":"m","messages":[],"nvext":{"annotations":["query_instance_id:"]}}"#;
    let nvext = &rig.post(CHAT, body).await.json()["nvext"];
    assert!(nvext["token_ids"].is_null() && nvext["worker_id"]["decode_dp_rank"] == 0);
    assert!(rig.stage.seen().is_empty(), "nothing ran");
    rig.at_rest().await;
}

/// Annotations come before the engine's first event.
#[tokio::test]
async fn a_stream_begins_with_what_was_to_be_noted() {
    let rig = Rig::of(1).await;
    let events = [FIRST, LAST, DONE].map(str::as_bytes);
    rig.stage.play(vec![stream(&events)]);
    let body = r#"{"model":"m","prompt":[5,6],"stream":true,"nvext":{"annotations":["token_ids","request_id","llm_metrics"]}}"#;
    let answer = rig.post("/v1/completions", body).await;
    let name = answer.header("x-request-id").unwrap();
    let notes = format!("event: request_id\n: \"{name}\"\n\nevent: token_ids\n: \"[5,6]\"\n\n");
    assert_eq!(answer.text(), [&notes, FIRST, LAST, DONE].concat());
    rig.at_rest().await;
}

/// Without a model the only one is meant; an engine judges the body. An unknown one is unknown, whatever else the
/// body holds.
#[tokio::test]
async fn the_model_is_found_before_the_body_is_judged() {
    let rig = Rig::of(1).await;
    for body in [r#"{"messages":[]}"#, r#"{"model":null,"foo":1}"#] {
        assert_eq!(rig.post(CHAT, body).await.text(), ANSWER, "{body}");
        assert_eq!(rig.stage.seen().pop().unwrap().body, body.as_bytes());
    }
    let answer = rig
        .post(CHAT, r#"{"model":"nope","foo":1,"messages":5}"#)
        .await;
    assert_eq!(
        (answer.status, &answer.json()["message"]),
        (404, &"Model not found".into())
    );
    rig.at_rest().await;
}

/// Client, engine and log call a request by one name, whatever the client tried.
#[tokio::test]
async fn a_request_has_one_name() {
    let rig = Rig::of(1).await;
    let long = format!("x-request-id: {}\r\n", "x".repeat(5000));
    for (given, usable) in [
        ("x-request-id: mine\r\n", true),
        ("x-request-id: \r\n", false),
        ("x-request-id: one\r\nx-request-id: two\r\n", false),
        ("x-request-id: \u{e9}\r\n", false),
        (&*long, false),
    ] {
        for path in [CHAT, "/v1/embeddings"] {
            let mut client = rig.client().await;
            client
                .post(path, &format!("connection: close\r\n{given}"), ASK)
                .await;
            let told = client
                .answer()
                .await
                .header("x-request-id")
                .unwrap()
                .to_owned();
            assert_eq!(told == "mine", usable, "{given}");
            let seen = rig.stage.seen().pop().unwrap();
            assert_eq!(seen.header("x-request-id"), [told], "{given}");
        }
    }
    rig.at_rest().await;
}

/// A request comes when its head does: what its client takes to send the rest is part of how long it took.
#[tokio::test]
async fn the_time_of_a_request_begins_with_its_head() {
    const UPLOAD: Duration = Duration::from_millis(300);
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    let head =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n";
    let length = ASK.len();
    client
        .send(format!(
            "{head}expect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        ))
        .await;
    // The server has the head, however busy the machine is.
    let told = in_time("the word to go on", client.take_until("\r\n\r\n")).await;
    assert!(told.starts_with("HTTP/1.1 100"), "{told}");
    tokio::time::sleep(UPLOAD).await;
    client.send(ASK).await;
    assert_eq!(client.answer().await.status, 200);
    drop(client);
    let took = rig
        .metric("dynamo_frontend_request_duration_seconds_sum")
        .await;
    assert!(took >= UPLOAD.as_secs_f64(), "{took}");
    rig.at_rest().await;
}
