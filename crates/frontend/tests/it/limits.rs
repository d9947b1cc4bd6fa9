//! Clients that send too much, too slowly, or what could be read in two ways.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_frontend::{AppOptions, Limits};
use tokio::net::TcpStream;

use crate::engine::{ANSWER, DONE, FIRST, Step, first_event, stream};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

fn short_timeouts() -> Setup {
    Setup::limits(Limits {
        client_stall: Duration::from_millis(50),
        ..Limits::default()
    })
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_head_is_left() {
    let rig = Rig::with(1, short_timeouts()).await;
    for begun in [
        "",
        "P",
        "PRI * HT",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ",
    ] {
        let mut client = rig.client().await;
        client.send(begun).await;
        assert!(in_time("it is closed", client.closed()).await, "{begun}");
    }
    // So is one that is done and asks nothing more; one whose engine thinks for long is not.
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    rig.stage.gate.add_permits(1);
    assert_eq!(client.answer().await.text(), ANSWER);
    assert!(in_time("it is closed", client.closed()).await);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_left() {
    let rig = Rig::with(1, short_timeouts()).await;
    let event = format!("data: {}\n\n", "x".repeat(60_000));
    let flood = Step::Flood(crate::engine::chunk(event.as_bytes()));
    rig.stage.play(vec![first_event(), flood]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    in_time("its engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
    drop(client);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_words() {
    let options = AppOptions {
        body_limit_mb: 1,
        ..AppOptions::default()
    };
    let rig = Rig::with(1, Setup::options(options)).await;
    let large = vec![b' '; (1 << 20) + 1];
    let answer = rig.post(CHAT, &large).await;
    assert_eq!(answer.status, 413);
    assert!(
        answer
            .text()
            .contains("--http-body-limit-mb (DYN_HTTP_BODY_LIMIT_MB)"),
        "{}",
        answer.text()
    );
    // Without a declared length.
    let mut client = rig.client().await;
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for _ in 0..3 {
        client
            .try_send(crate::engine::chunk(&large[..1 << 19]))
            .await;
    }
    client.try_send("0\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 413);
    assert!(rig.stage.seen().is_empty());
    drop(client);
    rig.at_rest().await;
}

/// A client that says how much it will send is answered before it has sent any of it, and told to go on by nobody.
#[tokio::test]
async fn a_body_that_is_said_to_be_too_large_is_refused_unread() {
    let options = AppOptions {
        body_limit_mb: 1,
        ..Default::default()
    };
    let rig = Rig::with(1, Setup::options(options)).await;
    for (path, expect) in [
        (CHAT, ""),
        (CHAT, "expect: 100-continue\r\n"),
        ("/v1/embeddings", ""),
        ("/v1/embeddings", "expect: 100-continue\r\n"),
        ("/busy_threshold", "expect: 100-continue\r\n"),
    ] {
        let mut client = rig.client().await;
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{expect}content-length: 9000000000\r\n\r\n"
        );
        client.send(head).await;
        let answer = in_time("answer", client.answer()).await;
        assert_eq!(
            (answer.status, answer.whole),
            (413, true),
            "{path} {expect}"
        );
        assert_eq!(answer.header("connection"), Some("close"));
        if !expect.is_empty() {
            assert!(in_time("it is closed", client.closed()).await);
        }
    }
    // One that sends what it has before it looks finds the answer, and then the end.
    let mut client = rig.client().await;
    let large = vec![b' '; 8 << 20];
    client.post(CHAT, "", &large).await;
    let answer = in_time("answer", client.answer()).await;
    assert_eq!((answer.status, answer.whole), (413, true));
    assert!(in_time("it is closed", client.closed()).await);
    // One that was told to send gets its answer although the rest is still on its way.
    let mut client = rig.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n\
         transfer-encoding: chunked\r\n\r\n"
    );
    client.send(head).await;
    assert_eq!(in_time("word to go on", client.answer()).await.status, 100);
    client.send(format!("{:x}\r\n", large.len())).await;
    client.send(&large).await;
    let answer = in_time("answer", client.answer()).await;
    assert_eq!((answer.status, answer.whole), (413, true));
    assert!(rig.stage.seen().is_empty());
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 7.0);
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_refused_request_leaves_its_connection_in_order() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    for (line, kind, status) in [
        ("POST /v1/chat/completions", "text/csv", 415),
        ("POST /v1/nothing", "application/json", 404),
        ("DELETE /v1/chat/completions", "application/json", 405),
    ] {
        let head = format!(
            "{line} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n\r\n"
        );
        client.send(&head).await;
        for _ in 0..100 {
            tokio::task::yield_now().await; // The head is read alone.
        }
        client.send("{}").await;
        assert_eq!(client.answer().await.status, status, "{line}");
    }
    rig.stage.play(vec![crate::engine::ok()]);
    client.post(CHAT, "", ASK).await;
    assert_eq!(client.answer().await.text(), ANSWER);
    drop(client);
    rig.at_rest().await;
}

/// Who asks before it sends its body has its answer in the refusal, and is not told to go on.
#[tokio::test]
async fn a_refused_request_does_not_invite_its_body() {
    let rig = Rig::of(1).await;
    let invited = async |line: &str, kind: &str| {
        let mut client = rig.client().await;
        let head = format!(
            "{line} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        );
        client.send(&head).await;
        let answer = in_time("answer", client.answer()).await;
        (answer.status, client)
    };
    for (line, kind, status) in [
        ("POST /v1/chat/completions", "text/csv", 415),
        ("POST /v1/nothing", "application/json", 404),
        ("DELETE /v1/chat/completions", "application/json", 405),
    ] {
        let (answered, mut client) = invited(line, kind).await;
        assert_eq!(answered, status, "{line}");
        assert!(in_time("closed", client.closed()).await);
    }
    let (answered, client) = invited("POST /v1/chat/completions", "application/json").await;
    assert_eq!(answered, 100, "one that may be served is");
    drop(client);
    rig.app.start_draining();
    for path in [CHAT, "/v1/embeddings"] {
        let (answered, _) = invited(&format!("POST {path}"), "application/json").await;
        assert_eq!(answered, 503, "{path}");
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn a_head_over_the_limit_is_refused() {
    let limits = Limits {
        header_bytes_max: 8192,
        ..Limits::default()
    };
    let rig = Rig::with(1, Setup::limits(limits)).await;
    let mut client = rig.client().await;
    let long = format!(
        "GET /health HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n",
        "x".repeat(20_000)
    );
    client.try_send(long).await;
    assert_eq!(in_time("refusal", client.answer()).await.status, 431);
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_request_that_could_be_read_in_two_ways_is_refused() {
    let rig = Rig::of(1).await;
    let line = "POST /v1/chat/completions HTTP/1.1\r\n";
    let host = "host: x\r\ncontent-type: application/json\r\n";
    let refused = [
        "content-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
        "content-length: +5\r\n\r\n{}   ",
        "content-length: -5\r\n\r\n{}   ",
        "content-length: 0x5\r\n\r\n{}   ",
        "content-length: 5, 6\r\n\r\n{}   ",
        "content-length: 99999999999999999999\r\n\r\n{}   ",
        "content-length : 5\r\n\r\n{}   ",
        "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "transfer-encoding: identity\r\ncontent-length: 5\r\n\r\n{}   ",
        "transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: \u{b}chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n0x5\r\n{}   \r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        "transfer-encoding: chunked\r\n\r\n5\r\n{}   XX0\r\n\r\n",
        "x-folded: a\r\n b\r\n\r\n",
        " x-leading: 1\r\n\r\n",
        "x bad: 1\r\n\r\n",
        "x\u{0}: 1\r\n\r\n",
        "x: a\rb\r\n\r\n",
        "host: y\r\ncontent-length: 2\r\n\r\n{}",
    ];
    for rest in refused {
        let mut client = rig.client().await;
        client.send([line, host, rest].concat()).await;
        let answer = in_time(rest, client.answer()).await;
        assert!(
            (400..499).contains(&answer.status),
            "{rest:?}: {}",
            answer.head
        );
    }
    let mut client = rig.client().await;
    let coded = "transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    client.send([line, host, coded].concat()).await;
    assert_eq!(in_time("answer", client.answer()).await.status, 501);
    let mut client = rig.client().await;
    let bad = "transfer-encoding: chunked\r\n\r\n5\r\n{}   XX0\r\n\r\n";
    client.send([line, host, bad].concat()).await;
    let answer = in_time("answer", client.answer()).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("chunks"), "{}", answer.text());
    for head in [
        "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        "POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST  /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1 x\r\nhost: x\r\n\r\n",
        "POST /v1/chat/completions HTTP/3.0\r\nhost: x\r\n\r\n",
    ] {
        let mut client = rig.client().await;
        client.send(head).await;
        let answer = in_time(head, client.answer()).await;
        assert!(
            (400..506).contains(&answer.status),
            "{head:?}: {}",
            answer.head
        );
    }
    assert!(rig.stage.seen().is_empty(), "no engine saw any of it");
    rig.at_rest().await;
}

/// A request in chunks with these fields besides.
fn in_chunks(fields: &str) -> Vec<u8> {
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{fields}\r\n"
    );
    let chunks = crate::engine::chunk(ASK.as_bytes());
    [head.as_bytes(), &chunks, b"0\r\n\r\n"].concat()
}

/// The same with a length.
fn with_length() -> String {
    let length = ASK.len();
    format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{ASK}"
    )
}

const CHUNKED: &str = "transfer-encoding: chunked\r\n";

/// Somebody before us may have gone by the length and we by the chunks: no engine sees it, and what follows on the
/// connection is not read as a request.
#[tokio::test]
async fn a_body_with_two_lengths_is_refused_and_nothing_more_is_read() {
    let rig = Rig::of(1).await;
    let length = format!("Content-Length: {}\r\n", in_chunks(CHUNKED).len());
    for fields in [
        [&length, CHUNKED].concat(),
        [CHUNKED, &length].concat(),
        [CHUNKED, "content-length: 0\r\n"].concat(),
        [CHUNKED, "content-length: many\r\n"].concat(),
        [CHUNKED, "x: 1\ncontent-length:5\n"].concat(),
    ] {
        for by in [1, 7, 4096] {
            let mut client = rig.client().await;
            let sent = [in_chunks(&fields), with_length().into_bytes()].concat();
            for piece in sent.chunks(by) {
                client.try_send(piece).await;
                tokio::task::yield_now().await;
            }
            let answer = in_time("answer", client.answer()).await;
            assert_eq!(answer.status, 400, "{fields:?}");
            assert!(answer.text().contains("content-length"), "{fields:?}");
            assert_eq!(answer.header("connection"), Some("close"));
            assert!(in_time("closed", client.closed()).await);
        }
    }
    assert!(rig.stage.seen().is_empty());
    rig.at_rest().await;
}

/// Chunks alone are as good as a length, and the connection goes on; but sent ahead of the answer before them,
/// nobody can say what they came with.
#[tokio::test]
async fn chunks_alone_are_taken_and_pipelined_ones_are_not() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    let long = ASK.replace("hi", &"long ".repeat(40_000));
    for round in 0..3 {
        client.send(in_chunks(CHUNKED)).await;
        let answer = in_time("answer", client.answer()).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER));
        assert_eq!(answer.header("connection"), None);
        client.post(CHAT, "", [ASK, &long][round % 2]).await;
        assert_eq!(in_time("answer", client.answer()).await.status, 200);
    }
    let seen = rig.stage.seen();
    for seen in seen.iter().step_by(2) {
        assert_eq!(seen.body, ASK.as_bytes());
        assert_eq!(seen.header("content-length"), [ASK.len().to_string()]);
        assert!(seen.header("transfer-encoding").is_empty());
    }
    // A length may follow chunks at once.
    client
        .send([in_chunks(CHUNKED), with_length().into_bytes()].concat())
        .await;
    for _ in 0..2 {
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
    }
    let before = rig.stage.seen().len();
    for cut in [0, 1, 30, 80] {
        let mut client = rig.client().await;
        let chunks = in_chunks(CHUNKED);
        let ahead = [with_length().as_bytes(), &chunks[..chunks.len() - cut]].concat();
        client.send(ahead).await;
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
        client.try_send(&chunks[chunks.len() - cut..]).await;
        let answer = in_time("answer", client.answer()).await;
        assert_eq!(answer.status, 400, "{cut}");
        assert!(in_time("closed", client.closed()).await);
    }
    assert_eq!(rig.stage.seen().len(), before + 4);
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn requests_one_after_another_on_one_connection_keep_their_order() {
    let rig = Rig::of(1).await;
    let one = with_length();
    rig.stage
        .play(vec![Step::Write(crate::engine::unary("{\"n\":1}"))]);
    rig.stage
        .play(vec![Step::Write(crate::engine::unary("{\"n\":2}"))]);
    let mut client = rig.client().await;
    client.send([one.as_str(), one.as_str()].concat()).await;
    assert_eq!(client.answer().await.text(), "{\"n\":1}");
    assert_eq!(client.answer().await.text(), "{\"n\":2}");
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn http2_comes_in_as_http1_does() {
    let rig = Rig::of(1).await;
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(
        TokioExecutor::new(),
        TokioIo::new(socket),
    )
    .await
    .unwrap();
    let driver = kvasir_tasks::Tasks::new();
    driver.spawn(connection);
    let request = |body: &'static str| {
        http::Request::post(format!("http://door{CHAT}"))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap()
    };
    rig.stage
        .play(vec![stream(&[FIRST.as_bytes(), DONE.as_bytes()])]);
    let answer = sender.send_request(request(ASK_STREAM)).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, [FIRST, DONE].concat());
    let seen = rig.stage.seen().pop().unwrap();
    assert_eq!(seen.header("host"), [rig.engines[0].address.to_string()]);
    // A stream that its client resets is left at the engine; the connection stays.
    rig.stage.play(vec![first_event(), Step::Hang]);
    let mut answer = sender.send_request(request(ASK_STREAM)).await.unwrap();
    let _ = answer.body_mut().frame().await.unwrap().unwrap();
    drop(answer);
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    until("booking ends", || rig.booked() == 0).await;
    let answer = sender.send_request(request(ASK)).await.unwrap();
    assert_eq!(
        answer.into_body().collect().await.unwrap().to_bytes(),
        ANSWER
    );
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

/// A client of HTTP/2 that takes one window and no more: its stream slows its engine, the others run on.
#[tokio::test]
async fn a_slow_http2_stream_slows_its_engine_alone() {
    let rig = Rig::of(1).await;
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(Some(64 << 10))
        .handshake::<_, Full<Bytes>>(TokioIo::new(socket))
        .await
        .unwrap();
    let driver = kvasir_tasks::Tasks::new();
    driver.spawn(connection);
    let request = |body: &'static str| {
        http::Request::post(format!("http://door{CHAT}"))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap()
    };
    let event = format!("data: {}\n\n", "x".repeat(60_000));
    let flood = Step::Flood(crate::engine::chunk(event.as_bytes()));
    rig.stage.play(vec![first_event(), flood]);
    let slow = sender.send_request(request(ASK_STREAM)).await.unwrap();
    in_time("the engine is held up", rig.stage.held_up.notified()).await;
    let flooded = rig.stage.flooded.load(std::sync::atomic::Ordering::SeqCst);
    assert!(
        flooded < crate::streams::UNREAD_MAX,
        "{flooded} bytes went into buffers"
    );
    for _ in 0..3 {
        let answer = sender.send_request(request(ASK)).await.unwrap();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, ANSWER);
    }
    drop(slow);
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

#[tokio::test]
async fn where_keys_are_needed_nobody_asks_without_one() {
    let keys = kvasir_frontend::ApiKeys::parse("secret").unwrap();
    let options = AppOptions {
        keys,
        ..AppOptions::default()
    };
    let rig = Rig::with(1, Setup::options(options)).await;
    for path in [CHAT, "/v1/completions", "/v1/embeddings", "/busy_threshold"] {
        let answer = rig.post(path, ASK).await;
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    assert!(rig.stage.seen().is_empty());
    let mut client = rig.client().await;
    client
        .post(CHAT, "authorization: Bearer secret\r\n", ASK)
        .await;
    assert_eq!(client.answer().await.text(), ANSWER);
    client.send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 200);
    drop(client);
    rig.at_rest().await;
}
