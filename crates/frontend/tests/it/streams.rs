//! Streams: every byte in its place, however the engine cuts them.

use std::sync::atomic::Ordering;

use kvasir_router::RouterMode;

use crate::engine::{DONE, FIRST, LAST, STREAM_HEAD, Step, USAGE, chunk, first_event, ok, stream};
use crate::rig::{ASK_STREAM, CHAT, Rig, Setup, in_time, until};

const WITH_USAGE: &str =
    r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
/// What the kernel's buffers on the way and ours may hold of a stream that nobody reads.
pub(crate) const UNREAD_MAX: usize = 48 << 20;

#[tokio::test]
async fn events_are_whole_wherever_the_engine_cuts_them() {
    let rig = Rig::of(1).await;
    let all = [FIRST, USAGE, LAST, DONE].concat();
    let shown = [FIRST, LAST, DONE].concat();
    for cut in 0..all.len() {
        let (before, after) = all.as_bytes().split_at(cut);
        rig.stage.play(vec![stream(&[before, after])]);
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!(
            (answer.whole, answer.text()),
            (true, shown.as_str()),
            "cut at {cut}"
        );
    }
    let bytes: Vec<&[u8]> = all.as_bytes().chunks(1).collect();
    rig.stage.play(vec![stream(&bytes)]);
    assert_eq!(
        rig.post(CHAT, ASK_STREAM).await.text(),
        shown,
        "byte by byte"
    );
    rig.stage.play(vec![stream(&[all.as_bytes()])]);
    assert_eq!(
        rig.post(CHAT, ASK_STREAM).await.text(),
        shown,
        "in one piece"
    );
    rig.at_rest().await;
}

/// Lines may end in CR, LF or both, and the engine may cut between the two; what is left out leaves nothing behind.
#[tokio::test]
async fn whatever_ends_a_line_nothing_is_left_of_what_is_hidden() {
    let rig = Rig::of(1).await;
    for end in ["\r", "\n", "\r\n"] {
        let with = |event: &str| event.replace('\n', end);
        let all = with(&[FIRST, LAST, USAGE, DONE].concat());
        let shown = with(&[FIRST, LAST, DONE].concat());
        for cut in 0..all.len() {
            let (before, after) = all.as_bytes().split_at(cut);
            rig.stage.play(vec![stream(&[before, after])]);
            let answer = rig.post(CHAT, ASK_STREAM).await;
            let told = (answer.whole, answer.text());
            assert_eq!(told, (true, shown.as_str()), "{end:?} cut at {cut}");
        }
        let bytes: Vec<&[u8]> = all.as_bytes().chunks(1).collect();
        rig.stage.play(vec![stream(&bytes)]);
        assert_eq!(rig.post(CHAT, ASK_STREAM).await.text(), shown, "{end:?}");
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn an_event_is_passed_on_before_the_next_one_comes() {
    let rig = Rig::of(1).await;
    let rest = [
        chunk(LAST.as_bytes()),
        chunk(DONE.as_bytes()),
        b"0\r\n\r\n".to_vec(),
    ]
    .concat();
    rig.stage
        .play(vec![first_event(), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(in_time("first event", client.read_until("\n\n")).await);
    rig.stage.gate.add_permits(1);
    let answer = in_time("end", client.answer()).await;
    assert_eq!(answer.text(), [FIRST, LAST, DONE].concat());
    assert_eq!(
        answer.header("server"),
        Some("uvicorn"),
        "the engine's fields pass"
    );
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn usage_is_asked_for_and_hidden_unless_the_client_asked() {
    let rig = Rig::of(1).await;
    let all = [FIRST, LAST, USAGE, DONE].concat();
    rig.stage.play(vec![stream(&[all.as_bytes()])]);
    assert_eq!(
        rig.post(CHAT, ASK_STREAM).await.text(),
        [FIRST, LAST, DONE].concat()
    );
    rig.stage.play(vec![stream(&[all.as_bytes()])]);
    assert_eq!(rig.post(CHAT, WITH_USAGE).await.text(), all);
    let bodies: Vec<Vec<u8>> = rig.stage.seen().into_iter().map(|seen| seen.body).collect();
    let first: serde_json::Value = serde_json::from_slice(&bodies[0]).unwrap();
    assert_eq!(first["stream_options"]["include_usage"], true);
    assert_eq!(bodies[1], WITH_USAGE.as_bytes());
    rig.at_rest().await;
    assert_eq!(rig.metric("dynamo_frontend_output_tokens_total").await, 4.0);
    assert_eq!(rig.metric("dynamo_frontend_cached_tokens_sum").await, 8.0);
}

#[tokio::test]
async fn odd_streams_pass_as_they_are() {
    let rig = Rig::of(1).await;
    let odd = [
        ": a comment\n\ndata: {\"choices\":[]}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n",
        "data: no end of line",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\"\"}}]}\n\ndata: [DONE]\n\n",
    ];
    for text in odd {
        rig.stage.play(vec![stream(&[text.as_bytes()])]);
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!((answer.whole, answer.text()), (true, text));
    }
    // An event too large to look into.
    let huge = format!("data: {}\n\n{DONE}", "x".repeat(5 << 20));
    rig.stage.play(vec![stream(&[huge.as_bytes()])]);
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert!(answer.whole && answer.body == huge.as_bytes());
    rig.at_rest().await;
}

#[tokio::test]
async fn a_stream_that_only_its_connection_ends_is_known_complete_by_done() {
    let rig = Rig::of(1).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let whole = [head, FIRST, DONE].concat();
    rig.stage
        .play(vec![Step::Write(whole.into_bytes()), Step::Close]);
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert_eq!(
        (answer.whole, answer.text()),
        (true, &*[FIRST, DONE].concat())
    );
    let cut = [head, FIRST].concat();
    rig.stage
        .play(vec![Step::Write(cut.into_bytes()), Step::Close]);
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert!(answer.text().contains("\"error\"") && answer.text().ends_with(DONE));
    rig.at_rest().await;
}

/// Clients of OpenAI's library close their connection when they have read `[DONE]`, before the body has ended.
#[tokio::test]
async fn a_client_that_leaves_after_done_has_its_answer() {
    let rig = Rig::of(1).await;
    let mut whole = STREAM_HEAD.as_bytes().to_vec();
    whole.extend(chunk([FIRST, LAST, DONE].concat().as_bytes()));
    rig.stage.play(vec![Step::Write(whole), Step::Hang]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until(DONE).await);
    drop(client);
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
    let page = rig.page().await;
    let done = page
        .lines()
        .find(|line| line.starts_with("dynamo_frontend_requests_total{"))
        .unwrap();
    assert!(
        done.contains("status=\"success\"") && done.ends_with(" 1"),
        "{done}"
    );
    assert_eq!(
        rig.metric("dynamo_frontend_model_cancellation_total").await,
        0.0
    );
}

#[tokio::test]
async fn a_slow_client_slows_its_engine() {
    let rig = Rig::of(1).await;
    let event = format!("data: {}\n\n", "x".repeat(60_000));
    let flood = Step::Flood(chunk(event.as_bytes()));
    rig.stage
        .play(vec![Step::Write(STREAM_HEAD.as_bytes().to_vec()), flood]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    in_time("the engine is held up", rig.stage.held_up.notified()).await;
    let flooded = rig.stage.flooded.load(Ordering::SeqCst);
    assert!(flooded < UNREAD_MAX, "{flooded} bytes went into buffers");
    drop(client);
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
}

#[tokio::test]
async fn connections_are_used_again_and_bounded() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    for _ in 0..20 {
        client.post(CHAT, "", ASK_STREAM).await;
        rig.stage
            .play(vec![stream(&[FIRST.as_bytes(), DONE.as_bytes()])]);
        let answer = client.answer().await;
        assert!(answer.whole);
    }
    assert!(
        rig.stage.open() <= 2,
        "{} connections for one client",
        rig.stage.open()
    );
    drop(client);
    rig.at_rest().await;
    // The engine dies: what was kept is given up, not held half closed.
    let open = rig.stage.open();
    assert!(open > 0);
    drop(rig.engines);
    until("connections are gone", || rig.stage.open() == 0).await;
}

/// What the router and its operator know of an engine's answers: every token once, and how quick it was.
#[tokio::test]
async fn an_engines_tokens_are_counted_as_they_come() {
    let rig = Rig::with(1, Setup::in_mode(RouterMode::Kv)).await;
    let event = |text: &str, more: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]{more}}}\n\n"
        )
    };
    // 40 tokens are more than two blocks of 16.
    let begun = [
        STREAM_HEAD.as_bytes(),
        &chunk(event("a", "").repeat(36).as_bytes()),
    ]
    .concat();
    let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":40}}"#;
    let rest = event("a", "").repeat(4) + usage + "\n\n" + DONE;
    let rest = [&chunk(rest.as_bytes())[..], b"0\r\n\r\n"].concat();
    rig.stage
        .play(vec![Step::Write(begun), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until("\n\n").await);
    let total = "dynamo_frontend_output_tokens_total";
    in_time("tokens are counted before the end", async {
        while rig.metric(total).await < 32.0 {}
    })
    .await;
    rig.stage.gate.add_permits(1);
    let answer = in_time("end", client.answer()).await;
    assert!(answer.whole && !answer.text().contains("usage"));
    drop(client);
    rig.at_rest().await;
    assert_eq!(rig.metric(total).await, 40.0);
    let worker = "dynamo_frontend_worker_last_";
    let last = async |name: &str| rig.metric(&format!("{worker}{name}")).await;
    assert_eq!(last("input_sequence_tokens").await, 9.0);
    assert!(last("time_to_first_token_seconds").await > 0.0);
    assert!(last("inter_token_latency_seconds").await > 0.0);
    for name in [
        "requests_started_total",
        "requests_total",
        "kv_hit_rate_count",
    ] {
        let name = format!("dynamo_component_router_{name}");
        assert_eq!(rig.metric(&name).await, 1.0, "{name}");
    }
}

/// Usage that we asked for is taken out of chunks that carry more, too.
#[tokio::test]
async fn usage_beside_text_is_hidden_and_the_text_is_not() {
    let rig = Rig::of(1).await;
    let with = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n";
    let all = format!("{with}{DONE}");
    rig.stage.play(vec![stream(&[all.as_bytes()])]);
    let shown = format!("data: {{\"choices\":[{{\"text\":\"a\"}}]}}\n\n{DONE}");
    assert_eq!(rig.post(CHAT, ASK_STREAM).await.text(), shown);
    rig.stage.play(vec![stream(&[all.as_bytes()])]);
    assert_eq!(rig.post(CHAT, WITH_USAGE).await.text(), all);
    rig.at_rest().await;
}

/// An engine does not say when the prompt of an answer in one piece is computed: the prompt is taken off the books
/// after the time that it should take, by default and by the pace of streams, and the request stays on them to its end.
#[tokio::test]
async fn the_prompt_of_a_whole_answer_does_not_stay_booked() {
    let rig = Rig::with(1, Setup::in_mode(RouterMode::Kv)).await;
    let words = "word ".repeat(200);
    let ask = |stream: bool| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"{stream} {words}"}}],"stream":{stream}}}"#
        )
    };
    rig.stage.play(vec![Step::Gate, ok()]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ask(false)).await;
    until("it runs", || rig.stage.seen().len() == 1).await;
    until("its prompt should be done", || rig.booked_prefill() == 0).await;
    assert_eq!(rig.booked_requests(), 1);
    rig.stage.gate.add_permits(1);
    assert_eq!(in_time("answer", client.answer()).await.status, 200);
    let events = [FIRST, LAST, DONE].map(str::as_bytes);
    rig.stage.play(vec![stream(&events)]);
    assert_eq!(rig.post(CHAT, ask(true)).await.status, 200);
    until("bookings end", || rig.booked() == 0).await;
    rig.stage.play(vec![Step::Gate, ok()]);
    client
        .post(CHAT, "", ask(false).replace("word", "other"))
        .await;
    until("it runs", || rig.stage.seen().len() == 3).await;
    until("its prompt is thought done", || rig.booked_prefill() == 0).await;
    assert_eq!(rig.booked_requests(), 1);
    rig.stage.gate.add_permits(1);
    assert_eq!(in_time("answer", client.answer()).await.status, 200);
    drop(client);
    rig.at_rest().await;
}
