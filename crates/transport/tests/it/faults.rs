//! Workers that break the protocol, one way each: every row of the table of faults that was recorded with Dynamo 1.6.1.
//!
//! Where that release waits for ever, ours has a timeout with a name.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kvasir_protocol::control::{ControlMessage, Handshake, Word};
use kvasir_protocol::frame::{RequestFrame, TwoPart};
use kvasir_tasks::Tasks;
use kvasir_transport::tcp::{TcpClient, TcpOptions};
use kvasir_transport::{AnswerStep, PlaneError, RequestPlane, TokenPlane};
use kvasir_types::{Codec, FinishReason};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::rpc::{LONG, W, endpoint, home, loopback, read, request};

/// What a worker does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Answers properly, three tokens.
    None,
    PrologueError,
    CloseAfterTwoItems,
    SentinelWithoutFinal,
    CloseAfterFinal,
    ErrorItemInvalid,
    ErrorItemUnknown,
    LegacyError,
    NeverCallHome,
    WrongSubject,
    AckOverloaded,
    AckUnavailable,
    AckOther,
    NoAck,
    CloseWithoutAck,
    FinishError,
    FinishCancelled,
    ItemAfterFinal,
    Remarks,
    NoPrologue,
    SilentAfterPrologue,
    NoReason,
    HugeFrame,
    NotAFrame,
}

/// What the worker heard from the frontend.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Connection,
    Word(Word),
    Closed,
}

const TOKEN: &str = r#"{"data":{"token_ids":[7]}}"#;
const LAST: &str = r#"{"data":{"token_ids":[],"finish_reason":"length"}}"#;

async fn take<T>(
    socket: &mut TcpStream,
    buffer: &mut BytesMut,
    mut take: impl FnMut(&mut BytesMut) -> Option<T>,
) -> Option<T> {
    loop {
        if let Some(found) = take(buffer) {
            return Some(found);
        }
        if !matches!(socket.read_buf(buffer).await, Ok(1..)) {
            return None;
        }
    }
}

/// Serves requests with `fault` and tells what it hears.
async fn worker(fault: Fault, tasks: &Tasks) -> (String, mpsc::UnboundedReceiver<Heard>) {
    let listener = TcpListener::bind(loopback()).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (heard, told) = mpsc::unbounded_channel();
    let serving = tasks.clone();
    tasks.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let _ = heard.send(Heard::Connection);
            serving.spawn(requests(socket, fault, heard.clone(), serving.clone()));
        }
    });
    (address, told)
}

async fn requests(
    mut socket: TcpStream,
    fault: Fault,
    heard: mpsc::UnboundedSender<Heard>,
    tasks: Tasks,
) {
    let mut buffer = BytesMut::new();
    let next = |buffer: &mut BytesMut| RequestFrame::take(buffer, 1 << 20).unwrap();
    while let Some(frame) = take(&mut socket, &mut buffer, next).await {
        let text = match fault {
            Fault::CloseWithoutAck => return,
            Fault::NoAck => continue,
            Fault::AckOverloaded => "Server overloaded: worker at capacity",
            Fault::AckUnavailable => "Server unavailable: unknown endpoint x",
            Fault::AckOther => "something odd",
            _ => "",
        };
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        let ack = [&length[..], text.as_bytes()].concat();
        socket.write_all(&ack).await.unwrap();
        if text.is_empty() {
            tasks.spawn(answer(frame.payload, fault, heard.clone()));
        }
    }
}

fn body(json: &str, complete_final: bool) -> Bytes {
    let text = match json {
        "" => format!(r#"{{"complete_final":{complete_final}}}"#),
        data => format!(r#"{{"data":{data},"complete_final":{complete_final}}}"#),
    };
    TwoPart::of_body(text).to_bytes()
}

fn header(text: &'static [u8]) -> Bytes {
    TwoPart::of_header(text).to_bytes()
}

/// The frames of an answer, in the order in which they are sent.
fn frames(fault: Fault) -> Vec<Bytes> {
    let (token, last, done) = (body(TOKEN, false), body(LAST, false), body("", true));
    let sentinel = header(Word::Sentinel.encode());
    let error = |json: &str| vec![body(json, false), body("", true), header(b"\"sentinel\"")];
    match fault {
        Fault::CloseAfterTwoItems => vec![token.clone(), token],
        Fault::SentinelWithoutFinal => vec![token, last, sentinel],
        Fault::CloseAfterFinal => vec![token, last, done],
        Fault::ItemAfterFinal => vec![token.clone(), last, done, token],
        Fault::ErrorItemInvalid => error(
            r#"{"event":"error","error":{"error_type":"InvalidArgument","message":"bad thing",
                "public":{"type":"message","message":"public text"}}}"#,
        ),
        Fault::ErrorItemUnknown => {
            error(r#"{"event":"error","error":{"error_type":"Unknown","message":"secret"}}"#)
        }
        Fault::LegacyError => error(r#"{"event":"error","comment":["old style error"]}"#),
        Fault::FinishError => {
            error(r#"{"data":{"token_ids":[],"finish_reason":{"error":"engine said no"}}}"#)
        }
        Fault::FinishCancelled => error(r#"{"data":{"token_ids":[],"finish_reason":"cancelled"}}"#),
        Fault::Remarks => vec![
            body(r#"{"event":"note","comment":["hello","there"]}"#, false),
            body(r#"{"id":"7","data":{"token_ids":[7]}}"#, false),
            last,
            done,
            sentinel,
        ],
        Fault::NoReason => vec![token, done, sentinel],
        Fault::SilentAfterPrologue => vec![],
        Fault::HugeFrame => vec![token, Bytes::from_static(&[0xff; 24])],
        Fault::NotAFrame => vec![TwoPart::of_body("not JSON").to_bytes()],
        _ => vec![token.clone(), token.clone(), token, last, done, sentinel],
    }
}

async fn answer(payload: Bytes, fault: Fault, heard: mpsc::UnboundedSender<Heard>) {
    if fault == Fault::NeverCallHome {
        return;
    }
    let request = TwoPart::decode(&payload).unwrap();
    let control = ControlMessage::decode(&request.header).unwrap();
    let mut socket = TcpStream::connect(&control.home.address).await.unwrap();
    let subject = match fault {
        Fault::WrongSubject => "00000000-0000-0000-0000-000000000000".to_owned(),
        _ => control.home.subject,
    };
    let handshake = TwoPart::of_header(Handshake { subject }.encode());
    let _ = socket.write_all(&handshake.to_bytes()).await;
    let prologue = match fault {
        Fault::PrologueError => header(b"{\"error\":\"prologue says no\"}"),
        _ => header(b"{\"error\":null}"),
    };
    if fault != Fault::NoPrologue {
        let _ = socket.write_all(&prologue).await;
    }
    if !matches!(
        fault,
        Fault::PrologueError | Fault::NoPrologue | Fault::WrongSubject
    ) {
        // In one piece: what stands behind the last mark is there when the mark is read.
        let _ = socket.write_all(&frames(fault).concat()).await;
    }
    if matches!(fault, Fault::CloseAfterTwoItems | Fault::CloseAfterFinal) {
        let _ = socket.shutdown().await;
    }
    let mut buffer = BytesMut::new();
    let next = |buffer: &mut BytesMut| TwoPart::take(buffer, 1 << 10).unwrap();
    while let Some(frame) = take(&mut socket, &mut buffer, next).await {
        let word = Word::decode(&frame.header).unwrap();
        let _ = heard.send(Heard::Word(word));
    }
    let _ = heard.send(Heard::Closed);
}

fn short(step: Option<AnswerStep>) -> TcpOptions {
    let of = |which| match step == Some(which) {
        true => Duration::from_millis(200),
        false => LONG,
    };
    TcpOptions {
        ack_timeout: of(AnswerStep::Ack),
        call_home_timeout: of(AnswerStep::CallHome),
        prologue_timeout: of(AnswerStep::Prologue),
        ..TcpOptions::default()
    }
}

type Outcome = (usize, Result<Option<FinishReason>, PlaneError>);

/// How many tokens came from a worker with `fault`, and how the answer ended.
async fn outcome(fault: Fault, options: TcpOptions) -> Outcome {
    let tasks = Tasks::new();
    let (address, _heard) = worker(fault, &tasks).await;
    let client = TcpClient::new(home(&tasks).await, options, &tasks);
    let plane = TokenPlane::new(Arc::new(client), endpoint(address, Codec::Json));
    let outcome = match plane.send(W, request(3)).await {
        Ok(stream) => {
            let (tokens, end) = read(stream).await;
            (tokens.len(), end)
        }
        Err(error) => (0, Err(error)),
    };
    tasks.stop();
    outcome
}

#[tokio::test]
async fn every_fault_has_its_answer() {
    let gone = Err(PlaneError::Disconnected(W));
    let engine = |text: &str| Err(PlaneError::Engine(text.into()));
    let rows: Vec<(Fault, Outcome)> = vec![
        (Fault::None, (3, Ok(Some(FinishReason::Length)))),
        (Fault::CloseAfterTwoItems, (2, gone.clone())),
        (Fault::SentinelWithoutFinal, (1, gone.clone())),
        (Fault::CloseAfterFinal, (1, Ok(Some(FinishReason::Length)))),
        (Fault::Remarks, (1, Ok(Some(FinishReason::Length)))),
        (
            Fault::FinishCancelled,
            (0, Ok(Some(FinishReason::Cancelled))),
        ),
        (Fault::FinishError, (0, engine("engine said no"))),
        (Fault::ErrorItemUnknown, (0, engine("secret"))),
        (Fault::LegacyError, (0, engine("old style error"))),
        (
            Fault::ErrorItemInvalid,
            (0, Err(PlaneError::Rejected("public text".into()))),
        ),
        (Fault::AckOverloaded, (0, Err(PlaneError::Overloaded(W)))),
        (Fault::CloseWithoutAck, (0, gone.clone())),
        (Fault::NoReason, (1, gone)),
        (
            Fault::AckUnavailable,
            (
                0,
                Err(PlaneError::Refused {
                    worker: W,
                    why: "unknown endpoint x".into(),
                }),
            ),
        ),
        (
            Fault::PrologueError,
            (
                0,
                Err(PlaneError::NotStarted {
                    worker: W,
                    why: "prologue says no".into(),
                }),
            ),
        ),
    ];
    for (fault, expected) in rows {
        let found = tokio::time::timeout(LONG, outcome(fault, short(None))).await;
        assert_eq!(found.unwrap(), expected, "{fault:?}");
    }
    for (fault, tokens) in [
        (Fault::ItemAfterFinal, 1),
        (Fault::HugeFrame, 1),
        (Fault::NotAFrame, 0),
    ] {
        let (found, end) = outcome(fault, short(None)).await;
        assert_eq!(found, tokens, "{fault:?}");
        let broke = matches!(end, Err(PlaneError::Protocol { worker: W, .. }));
        assert!(broke, "{fault:?}: {end:?}");
    }
}

/// Where Dynamo 1.6.1 waits for ever, ours waits for a time that has a name.
#[tokio::test]
async fn every_wait_for_a_worker_ends() {
    for (fault, step) in [
        (Fault::NoAck, AnswerStep::Ack),
        (Fault::NeverCallHome, AnswerStep::CallHome),
        (Fault::WrongSubject, AnswerStep::CallHome),
        (Fault::AckOther, AnswerStep::CallHome),
        (Fault::NoPrologue, AnswerStep::Prologue),
    ] {
        let found = tokio::time::timeout(LONG, outcome(fault, short(Some(step)))).await;
        let late = PlaneError::Timeout { worker: W, step };
        assert_eq!(found.unwrap(), (0, Err(late)), "{fault:?}");
    }
}

async fn next(heard: &mut mpsc::UnboundedReceiver<Heard>) -> Heard {
    let next = tokio::time::timeout(LONG, heard.recv()).await;
    next.unwrap().unwrap()
}

/// A worker whose answer nobody wants any more hears `kill`, then the end of the connection: whether the reader left, gave
/// up waiting, or the worker itself said what ends the answer.
#[tokio::test]
async fn a_worker_hears_that_nobody_reads() {
    for (fault, step) in [
        (Fault::SilentAfterPrologue, None),
        (Fault::ErrorItemUnknown, None),
        (Fault::SentinelWithoutFinal, None),
        (Fault::NoPrologue, Some(AnswerStep::Prologue)),
        (Fault::WrongSubject, Some(AnswerStep::CallHome)),
    ] {
        let tasks = Tasks::new();
        let (address, mut heard) = worker(fault, &tasks).await;
        let client = TcpClient::new(home(&tasks).await, short(step), &tasks);
        let plane = TokenPlane::new(Arc::new(client), endpoint(address, Codec::Json));
        match plane.send(W, request(3)).await {
            Ok(stream) if fault == Fault::SilentAfterPrologue => drop(stream),
            Ok(stream) => drop(read(stream).await),
            Err(error) => assert!(matches!(error, PlaneError::Timeout { .. }), "{error:?}"),
        }
        assert_eq!(next(&mut heard).await, Heard::Connection);
        assert_eq!(next(&mut heard).await, Heard::Word(Word::Kill), "{fault:?}");
        assert_eq!(next(&mut heard).await, Heard::Closed, "{fault:?}");
        tasks.stop();
    }
}

/// After a worker has not acknowledged in time, its connection is not used again.
#[tokio::test]
async fn a_silent_connection_is_given_up() {
    let tasks = Tasks::new();
    let (address, mut heard) = worker(Fault::NoAck, &tasks).await;
    let client = TcpClient::new(home(&tasks).await, short(Some(AnswerStep::Ack)), &tasks);
    let plane = TokenPlane::new(Arc::new(client.clone()), endpoint(address, Codec::Json));
    for _ in 0..2 {
        let late = plane.send(W, request(1)).await.err().unwrap();
        assert!(matches!(late, PlaneError::Timeout { .. }), "{late:?}");
        assert_eq!(client.connections(), 0);
        assert_eq!(next(&mut heard).await, Heard::Connection);
    }
}

/// A connection that says nothing is closed, and those that say something are not kept waiting by it.
#[tokio::test]
async fn who_does_not_say_what_it_brings_is_closed() {
    let tasks = Tasks::new();
    let options = kvasir_transport::ResponseOptions {
        bind: loopback(),
        handshake_timeout: Duration::from_millis(100),
        ..Default::default()
    };
    let home = kvasir_transport::ResponseServer::start(options, &tasks)
        .await
        .unwrap();
    let mut silent = TcpStream::connect(home.address()).await.unwrap();
    let mut odd = TcpStream::connect(home.address()).await.unwrap();
    odd.write_all(&[0xff; 64]).await.unwrap();
    let mut unknown = TcpStream::connect(home.address()).await.unwrap();
    let subject = "00000000-0000-0000-0000-000000000000".to_owned();
    let handshake = TwoPart::of_header(Handshake { subject }.encode()).to_bytes();
    unknown.write_all(&handshake).await.unwrap();
    let mut last = Vec::new();
    unknown.read_to_end(&mut last).await.unwrap();
    assert_eq!(last, TwoPart::of_header(Word::Kill.encode()).to_bytes());
    drop(unknown);
    for socket in [&mut silent, &mut odd] {
        let closed = tokio::time::timeout(LONG, socket.read_to_end(&mut Vec::new())).await;
        let _ = closed.unwrap();
    }
    while home.counts().nameless + home.counts().unexpected < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!((home.counts().nameless, home.counts().unexpected), (2, 1));
}
