//! Workers that break the protocol, one way each: every row of the table of faults that was recorded with Dynamo 1.6.1.
//!
//! Where that release waits for ever, ours has a timeout with a name.

#[cfg(feature = "nats")]
use std::future::poll_fn;
#[cfg(feature = "nats")]
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
#[cfg(feature = "nats")]
use futures_core::Stream;
#[cfg(feature = "http")]
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_protocol::control::{ControlMessage, Handshake, Word};
use kvasir_protocol::frame::{RequestFrame, TwoPart};
use kvasir_tasks::Tasks;
use kvasir_transport::tcp::{TcpClient, TcpOptions};
use kvasir_transport::{AnswerStep, PlaneError, RequestPlane, TokenPlane};
use kvasir_types::{Codec, FinishReason, PlaneEndpoint};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

#[cfg(feature = "nats")]
use crate::nats_process::NatsProcess;
use crate::rpc::{LONG, PATH, W, home, loopback, read, request};
#[cfg(feature = "nats")]
use crate::wires::SUBJECT;
use crate::wires::Wire;

/// What a worker does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Answers properly, three tokens.
    None,
    PrologueError,
    CloseAfterTwoItems,
    SentinelWithoutFinal,
    CloseWithoutFinal,
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

/// What a worker says to a request before it answers it.
enum Said {
    Nothing,
    /// It closes the connection.
    Goodbye,
    Text(&'static str),
}

fn said(fault: Fault) -> Said {
    match fault {
        Fault::CloseWithoutAck => Said::Goodbye,
        Fault::NoAck => Said::Nothing,
        Fault::AckOverloaded => Said::Text("Server overloaded: worker at capacity"),
        Fault::AckUnavailable => Said::Text("Server unavailable: unknown endpoint x"),
        Fault::AckOther => Said::Text("something odd"),
        _ => Said::Text(""),
    }
}

type Told = mpsc::UnboundedSender<Heard>;

/// Serves requests with `fault` and tells what it hears.
async fn worker(
    wire: &Wire,
    fault: Fault,
    tasks: &Tasks,
) -> (PlaneEndpoint, mpsc::UnboundedReceiver<Heard>) {
    let (heard, told) = mpsc::unbounded_channel();
    let address = match wire {
        #[cfg(feature = "nats")]
        Wire::Nats(process) => nats_worker(process, fault, heard, tasks).await,
        _ => {
            let listener = TcpListener::bind(loopback()).await.unwrap();
            let address = listener.local_addr().unwrap();
            let (serving, is_tcp) = (tasks.clone(), matches!(wire, Wire::Tcp));
            tasks.spawn(async move {
                while let Ok((socket, _)) = listener.accept().await {
                    let _ = heard.send(Heard::Connection);
                    let (heard, tasks) = (heard.clone(), serving.clone());
                    match is_tcp {
                        true => serving.spawn(requests(socket, fault, heard, tasks)),
                        #[cfg(feature = "http")]
                        false => serving.spawn(http_requests(socket, fault, heard, tasks)),
                        #[cfg(not(feature = "http"))]
                        false => unreachable!(),
                    };
                }
            });
            match is_tcp {
                true => format!("{address}/{PATH}"),
                false => format!("http://{address}/v1/rpc/{PATH}"),
            }
        }
    };
    (wire.endpoint(&address, Codec::Json), told)
}

/// Requests over TCP.
async fn requests(mut socket: TcpStream, fault: Fault, heard: Told, tasks: Tasks) {
    let mut buffer = BytesMut::new();
    let next = |buffer: &mut BytesMut| RequestFrame::take(buffer, 1 << 20).unwrap();
    while let Some(frame) = take(&mut socket, &mut buffer, next).await {
        let text = match said(fault) {
            Said::Goodbye => return,
            Said::Nothing => continue,
            Said::Text(text) => text,
        };
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        let ack = [&length[..], text.as_bytes()].concat();
        socket.write_all(&ack).await.unwrap();
        if text.is_empty() {
            tasks.spawn(answer(frame.payload, fault, heard.clone()));
        }
    }
}

/// Requests over NATS.
#[cfg(feature = "nats")]
async fn nats_worker(process: &NatsProcess, fault: Fault, heard: Told, tasks: &Tasks) -> String {
    let server = format!("nats://127.0.0.1:{}", process.port);
    let options = async_nats::ConnectOptions::new().retry_on_initial_connect();
    let client = options.connect(server).await.unwrap();
    let mut requests = client.subscribe(SUBJECT).await.unwrap();
    let mut probe = client.subscribe("probe.own").await.unwrap();
    client.publish("probe.own", Bytes::new()).await.unwrap();
    poll_fn(|cx| Pin::new(&mut probe).poll_next(cx))
        .await
        .unwrap();
    let serving = tasks.clone();
    tasks.spawn(async move {
        while let Some(request) = poll_fn(|cx| Pin::new(&mut requests).poll_next(cx)).await {
            let Said::Text(text) = said(fault) else {
                continue;
            };
            let reply = request.reply.unwrap();
            client.publish(reply, text.into()).await.unwrap();
            if text.is_empty() {
                serving.spawn(answer(request.payload, fault, heard.clone()));
            }
        }
    });
    SUBJECT.to_owned()
}

/// Requests over HTTP.
#[cfg(feature = "http")]
async fn http_requests(socket: TcpStream, fault: Fault, heard: Told, tasks: Tasks) {
    use http_body_util::{BodyExt, Full};
    let service = hyper::service::service_fn(|request: http::Request<hyper::body::Incoming>| {
        let (heard, tasks) = (heard.clone(), tasks.clone());
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let text = match said(fault) {
                Said::Goodbye => return Err(std::io::Error::other("gone")),
                Said::Nothing => std::future::pending().await,
                Said::Text(text) => text,
            };
            if text.is_empty() {
                tasks.spawn(answer(body, fault, heard));
            }
            Ok(http::Response::new(Full::new(Bytes::from_static(
                text.as_bytes(),
            ))))
        }
    });
    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let _ = builder
        .serve_connection(TokioIo::new(socket), service)
        .await;
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
        Fault::CloseWithoutFinal => vec![token, last],
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
    if matches!(
        fault,
        Fault::CloseAfterTwoItems | Fault::CloseWithoutFinal | Fault::CloseAfterFinal
    ) {
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
async fn outcome(wire: &Wire, fault: Fault, options: TcpOptions) -> Outcome {
    let tasks = Tasks::new();
    let (endpoint, _heard) = worker(wire, fault, &tasks).await;
    let client = wire.client(home(&tasks).await, options, &tasks);
    let plane = TokenPlane::new(client, endpoint);
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
        (
            Fault::SentinelWithoutFinal,
            (1, Ok(Some(FinishReason::Length))),
        ),
        (
            Fault::CloseWithoutFinal,
            (1, Ok(Some(FinishReason::Length))),
        ),
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
        (Fault::CloseWithoutAck, (0, gone)),
        (Fault::NoReason, (1, Ok(Some(FinishReason::Stop)))),
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
    for wire in Wire::all() {
        for (fault, expected) in &rows {
            if *fault == Fault::CloseWithoutAck && wire.name() == "nats" {
                // There is no connection that could be closed.
                continue;
            }
            let found = tokio::time::timeout(LONG, outcome(&wire, *fault, short(None))).await;
            assert_eq!(found.unwrap(), *expected, "{wire:?} {fault:?}");
        }
        for (fault, tokens) in [
            (Fault::ItemAfterFinal, 1),
            (Fault::HugeFrame, 1),
            (Fault::NotAFrame, 0),
        ] {
            let (found, end) = outcome(&wire, fault, short(None)).await;
            assert_eq!(found, tokens, "{wire:?} {fault:?}");
            let broke = matches!(end, Err(PlaneError::Protocol { worker: W, .. }));
            assert!(broke, "{wire:?} {fault:?}: {end:?}");
        }
    }
}

/// Where Dynamo 1.6.1 waits for ever, ours waits for a time that has a name.
#[tokio::test]
async fn every_wait_for_a_worker_ends() {
    for wire in Wire::all() {
        for (fault, step) in [
            (Fault::NoAck, AnswerStep::Ack),
            (Fault::NeverCallHome, AnswerStep::CallHome),
            (Fault::WrongSubject, AnswerStep::CallHome),
            (Fault::AckOther, AnswerStep::CallHome),
            (Fault::NoPrologue, AnswerStep::Prologue),
        ] {
            let options = short(Some(step));
            let found = tokio::time::timeout(LONG, outcome(&wire, fault, options)).await;
            let late = PlaneError::Timeout { worker: W, step };
            assert_eq!(found.unwrap(), (0, Err(late)), "{wire:?} {fault:?}");
        }
    }
}

/// What the worker heard of its answer.
async fn next(heard: &mut mpsc::UnboundedReceiver<Heard>) -> Heard {
    loop {
        let next = tokio::time::timeout(LONG, heard.recv()).await;
        match next.unwrap().unwrap() {
            Heard::Connection => {}
            told => return told,
        }
    }
}

/// A worker whose answer nobody wants any more hears `kill`, then the end of the connection: whether the reader left, gave
/// up waiting, or the worker itself said what ends the answer.
#[tokio::test]
async fn a_worker_hears_that_nobody_reads() {
    for wire in Wire::all() {
        for (fault, step) in [
            (Fault::SilentAfterPrologue, None),
            (Fault::ErrorItemUnknown, None),
            (Fault::SentinelWithoutFinal, None),
            (Fault::NoPrologue, Some(AnswerStep::Prologue)),
            (Fault::WrongSubject, Some(AnswerStep::CallHome)),
        ] {
            let tasks = Tasks::new();
            let (endpoint, mut heard) = worker(&wire, fault, &tasks).await;
            let client = wire.client(home(&tasks).await, short(step), &tasks);
            let plane = TokenPlane::new(client, endpoint);
            match plane.send(W, request(3)).await {
                Ok(stream) if fault == Fault::SilentAfterPrologue => drop(stream),
                Ok(stream) => drop(read(stream).await),
                Err(error) => assert!(matches!(error, PlaneError::Timeout { .. }), "{error:?}"),
            }
            let said = (next(&mut heard).await, next(&mut heard).await);
            let kill = Heard::Word(Word::Kill);
            assert_eq!(said, (kill, Heard::Closed), "{wire:?} {fault:?}");
            tasks.stop();
        }
    }
}

/// After a worker has not acknowledged in time, its connection is not used again.
#[tokio::test]
async fn a_silent_connection_is_given_up() {
    let tasks = Tasks::new();
    let (endpoint, mut heard) = worker(&Wire::Tcp, Fault::NoAck, &tasks).await;
    let client = TcpClient::new(home(&tasks).await, short(Some(AnswerStep::Ack)), &tasks);
    let plane = TokenPlane::new(Arc::new(client.clone()), endpoint);
    for _ in 0..2 {
        let late = plane.send(W, request(1)).await.err().unwrap();
        assert!(matches!(late, PlaneError::Timeout { .. }), "{late:?}");
        assert_eq!(client.connections(), 0);
        let connected = tokio::time::timeout(LONG, heard.recv()).await;
        assert_eq!(connected.unwrap(), Some(Heard::Connection));
    }
}

/// A worker that takes a request and dies before it calls home is known to be gone at once; one that only closes the connection
/// may still answer.
#[tokio::test]
async fn a_worker_that_dies_with_a_request_is_not_waited_for() {
    for dies in [true, false] {
        let tasks = Tasks::new();
        let listener = TcpListener::bind(loopback()).await.unwrap();
        let address = format!("{}/{PATH}", listener.local_addr().unwrap());
        let client = TcpClient::new(home(&tasks).await, short(None), &tasks);
        let endpoint = Wire::Tcp.endpoint(&address, Codec::Json);
        let plane = TokenPlane::new(Arc::new(client), endpoint);
        let (heard, _told) = mpsc::unbounded_channel();
        tasks.spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut buffer = BytesMut::new();
            let next = |buffer: &mut BytesMut| RequestFrame::take(buffer, 1 << 20).unwrap();
            let frame = take(&mut socket, &mut buffer, next).await.unwrap();
            socket.write_all(&[0; 4]).await.unwrap();
            if dies {
                return;
            }
            drop(socket);
            // Whoever asked looks whether anybody is left.
            let _again = listener.accept().await.unwrap();
            answer(frame.payload, Fault::None, heard).await;
        });
        let sent = tokio::time::timeout(LONG / 2, plane.send(W, request(3)));
        match sent.await.unwrap() {
            Err(error) => {
                assert!(dies, "{error:?}");
                assert_eq!(error, PlaneError::Disconnected(W));
            }
            Ok(stream) => {
                assert!(!dies);
                assert_eq!(read(stream).await.0.len(), 3);
            }
        }
        tasks.stop();
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
    let mut silent = TcpStream::connect(&*home.address()).await.unwrap();
    let mut odd = TcpStream::connect(&*home.address()).await.unwrap();
    odd.write_all(&[0xff; 64]).await.unwrap();
    let mut unknown = TcpStream::connect(&*home.address()).await.unwrap();
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
