//! Where an answer ends, whose it is, and what becomes of its connection.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;

use crate::engine::{
    ANSWER, DONE, FIRST, LAST, STREAM_HEAD, Step, USAGE, chunk, ok, stream, unary,
};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, in_time, until};

const TIMED_OUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 4\r\n\r\nlate";

/// The beginning of a stream, all of whose data has come.
fn all_but_end(events: &[&str]) -> Step {
    let data = events.concat();
    Step::Write([STREAM_HEAD.as_bytes(), &chunk(data.as_bytes())].concat())
}

/// A request that asks for its own number, and the answer to it.
fn numbered(number: usize) -> (String, Vec<u8>) {
    let ask = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{number}"}}]}}"#);
    (
        ask,
        unary(&ANSWER.replace("\"hi\"", &format!("\"{number}\""))),
    )
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[tokio::test]
async fn nothing_passes_after_done_and_nothing_stays_booked() {
    let rig = Rig::of(1).await;
    let whole = [FIRST, LAST, DONE].concat();
    let late: [(&str, Vec<Step>); 4] = [
        (
            "in one piece",
            vec![stream(&[[&*whole, FIRST, DONE].concat().as_bytes()])],
        ),
        (
            "in two",
            vec![stream(&[
                whole.as_bytes(),
                FIRST.as_bytes(),
                DONE.as_bytes(),
            ])],
        ),
        (
            "later",
            vec![
                all_but_end(&[&whole]),
                Step::Gate,
                Step::Write(chunk(FIRST.as_bytes())),
            ],
        ),
        ("never ends", vec![all_but_end(&[&whole]), Step::Hang]),
    ];
    for (what, script) in late {
        rig.stage.play(script);
        let answer = in_time(what, rig.post(CHAT, ASK_STREAM)).await;
        assert_eq!((answer.whole, answer.text()), (true, &*whole), "{what}");
        until(what, || rig.booked() == 0).await;
        rig.stage.gate.add_permits(1);
        // Whatever comes late is nobody's answer.
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER, "{what}");
    }
    rig.at_rest().await;
}

/// The closing chunk, which engines send apart, is read before the connection is used again.
#[tokio::test]
async fn a_connection_is_kept_when_only_the_end_of_its_body_was_missing() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    for _ in 0..20 {
        rig.stage.play(vec![
            all_but_end(&[FIRST, DONE]),
            Step::Gate,
            Step::Write(b"0\r\n\r\n".to_vec()),
        ]);
        client.post(CHAT, "", ASK_STREAM).await;
        assert!(in_time("answer", client.answer()).await.whole);
        rig.stage.gate.add_permits(1);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(rig.stage.open() <= 4, "{} connections", rig.stage.open());
    drop(client);
    rig.at_rest().await;
}

/// A client may leave when it has the whole answer: it is done, with its usage.
#[tokio::test]
async fn who_has_the_whole_answer_may_leave() {
    let sized = unary(ANSWER);
    let chunked = |end: &[u8]| {
        let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        Step::Write([&head[..], &chunk(ANSWER.as_bytes()), end].concat())
    };
    // Too long to be held back: it passes as it comes.
    let long = format!(
        "{}{}",
        ANSWER.trim_end_matches('}'),
        " ".repeat(5 << 20) + "}"
    );
    let cases: [(&str, &str, Vec<Step>, &str); 5] = [
        (
            "stream",
            ASK_STREAM,
            vec![all_but_end(&[FIRST, LAST, USAGE, DONE]), Step::Hang],
            DONE,
        ),
        (
            "stream, ended",
            ASK_STREAM,
            vec![stream(&[FIRST, LAST, USAGE, DONE].map(str::as_bytes))],
            DONE,
        ),
        (
            "sized",
            ASK,
            vec![Step::Write(sized)],
            "\"total_tokens\":9}}",
        ),
        (
            "chunked",
            ASK,
            vec![chunked(b"0\r\n\r\n")],
            "\"total_tokens\":9}}",
        ),
        ("long", ASK, vec![Step::Write(unary(&long))], " }"),
    ];
    for (what, ask, script, end) in cases {
        let rig = Rig::of(1).await;
        rig.stage.play(script);
        let mut client = rig.client().await;
        client.post(CHAT, "", ask).await;
        assert!(in_time(what, client.read_until(end)).await, "{what}");
        drop(client);
        rig.at_rest().await;
        let cancelled = "dynamo_frontend_model_cancellation_total";
        assert_eq!(rig.metric(cancelled).await, 0.0, "{what}");
        let requests = "dynamo_frontend_requests_total";
        in_time(what, async { while rig.metric(requests).await < 1.0 {} }).await;
        assert!(rig.page().await.contains("status=\"success\""), "{what}");
        if what != "long" {
            let tokens = "dynamo_frontend_output_tokens_total";
            assert_eq!(rig.metric(tokens).await, 2.0, "{what}");
        }
    }
}

/// An engine that sends each answer twice: nobody gets the second one of another.
#[tokio::test]
async fn an_answer_that_is_sent_twice_is_the_next_clients_never() {
    let rig = Rig::of(1).await;
    for number in 0..60 {
        let (ask, answer) = numbered(number);
        let again = match number % 3 {
            0 => vec![Step::Write([&answer[..], &answer].concat())],
            1 => vec![Step::Write(answer.clone()), Step::Write(answer)],
            _ => vec![
                Step::Write(answer.clone()),
                Step::Pause(Duration::from_millis(1)),
                Step::Write(answer),
            ],
        };
        rig.stage.play(again);
        let got = rig.post(CHAT, ask).await;
        assert_eq!(content(&got.json()), number.to_string());
    }
    rig.at_rest().await;
}

/// Servers say 408 on an idle connection before they close it: that is no answer to what is sent next.
#[tokio::test]
async fn what_lies_in_an_idle_connection_is_no_answer() {
    let rig = Rig::of(1).await;
    for number in 0..20 {
        rig.stage.play(vec![
            ok(),
            Step::Gate,
            Step::Write(TIMED_OUT.to_vec()),
            Step::Close,
        ]);
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
        rig.stage.gate.add_permits(1);
        if number % 2 == 0 {
            let open = rig.engines[0].open();
            until("it is sent", || rig.engines[0].open() < open).await;
        }
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    rig.at_rest().await;
}

/// Where an engine says the id of the request back, an answer with another id is not passed on.
#[tokio::test]
async fn an_answer_with_another_id_is_asked_for_again() {
    let rig = Rig::of(1).await;
    let with_id = |id: &str| {
        let text = String::from_utf8(unary(ANSWER)).unwrap();
        let field = format!("200 OK\r\nx-request-id: {id}\r\n");
        text.replacen("200 OK\r\n", &field, 1).into_bytes()
    };
    let post = async |id: &str| {
        let mut client = rig.client().await;
        let headers = format!("connection: close\r\nx-request-id: {id}\r\n");
        client.post(CHAT, &headers, ASK).await;
        in_time("answer", client.answer()).await
    };
    rig.stage.play(vec![Step::Write(with_id("one"))]);
    assert_eq!(post("one").await.header("x-request-id"), Some("one"));
    let wrong = String::from_utf8(with_id("one"))
        .unwrap()
        .replace("\"hi\"", "\"no\"");
    rig.stage.play(vec![Step::Write(wrong.into_bytes())]);
    rig.stage.play(vec![Step::Write(with_id("two"))]);
    let answer = post("two").await;
    assert_eq!(
        (answer.text(), answer.header("x-request-id")),
        (ANSWER, Some("two"))
    );
    assert_eq!(rig.stage.seen().len(), 3, "on a new connection");
    rig.at_rest().await;
}

/// An engine may call requests what it likes: the client is told the name by which it can ask about its own.
#[tokio::test]
async fn the_id_of_a_request_is_ours_to_say() {
    let rig = Rig::of(1).await;
    for (path, ask) in [(CHAT, ASK), ("/v1/embeddings", ASK)] {
        let text = String::from_utf8(unary(ANSWER)).unwrap();
        let named = text.replacen(
            "200 OK\r\n",
            "200 OK\r\nX-Request-Id: theirs\r\nX-Request-Id: too\r\n",
            1,
        );
        rig.stage
            .play(vec![Step::Write(named.clone().into_bytes())]);
        let mut client = rig.client().await;
        client.post(path, "x-request-id: mine\r\n", ask).await;
        let answer = in_time("answer", client.answer()).await;
        assert_eq!(answer.header("x-request-id"), Some("mine"), "{path}");
        assert!(!answer.head.contains("theirs") && !answer.head.contains("too"));
        rig.stage.play(vec![Step::Write(named.into_bytes())]);
        let answer = rig.post(path, ask).await;
        let ours = answer.header("x-request-id").unwrap();
        assert_eq!(ours.len(), 36, "{ours}");
    }
    assert_eq!(
        rig.stage.checked.load(Ordering::SeqCst),
        1,
        "nobody was suspected"
    );
    rig.at_rest().await;
}
