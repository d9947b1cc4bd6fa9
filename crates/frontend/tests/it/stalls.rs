//! Clients that read or send slowly, and clients that stopped: the first have all the time they need, the others are
//! left, and only they.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_frontend::Limits;
use kvasir_tasks::Tasks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::engine::{ANSWER, Step, chunk, first_event, unary};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// How long the server bears a client that takes nothing.
const TIMEOUT: Duration = Duration::from_millis(500);
/// What a slow client reads at once, and how long it waits then: an answer of [`LARGE`] takes several timeouts.
const SIP: (usize, Duration) = (48 << 10, Duration::from_millis(20));
const LARGE: usize = 4_000_000;
/// What the kernel keeps for a slow client.
const SMALL_BUFFER: u32 = 16 << 10;

async fn rig() -> Rig {
    let limits = Limits {
        client_stall: TIMEOUT,
        ..Limits::default()
    };
    Rig::with(1, Setup::limits(limits)).await
}

fn large() -> Step {
    Step::Write(unary(&format!("\"{}\"", "x".repeat(LARGE))))
}

/// More than anybody keeps for a client that does not read.
fn flood() -> Vec<Step> {
    let event = format!("data: {}\n\n", "x".repeat(60_000));
    vec![first_event(), Step::Flood(chunk(event.as_bytes()))]
}

/// A connection that holds little that is not read.
async fn narrow(to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(SMALL_BUFFER).unwrap();
    socket.connect(to).await.unwrap()
}

async fn http2(rig: &Rig) -> (SendRequest<Full<Bytes>>, Tasks) {
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(Some(64 << 10))
        .handshake::<_, Full<Bytes>>(TokioIo::new(socket))
        .await
        .unwrap();
    let driver = Tasks::new();
    driver.spawn(connection);
    (sender, driver)
}

fn request(body: &'static str) -> http::Request<Full<Bytes>> {
    http::Request::post(format!("http://door{CHAT}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .unwrap()
}

/// A whole answer is in the library's hands at once: what counts is that its client takes it.
#[tokio::test]
async fn a_client_that_reads_slowly_gets_all_of_its_answer() {
    let rig = rig().await;
    rig.stage.play(vec![large()]);
    let mut client = narrow(rig.address()).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: door\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{ASK}",
        ASK.len()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut got, mut sip) = (0, vec![0; SIP.0]);
    loop {
        match in_time("more", client.read(&mut sip)).await.unwrap() {
            0 => break,
            bytes => got += bytes,
        }
        tokio::time::sleep(SIP.1).await;
    }
    assert!(got > LARGE, "the answer ended after {got} bytes");
    rig.at_rest().await;
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 0.0);
}

#[tokio::test]
async fn a_client_that_stops_reading_is_left() {
    let rig = rig().await;
    rig.stage.play(flood());
    let mut client = narrow(rig.address()).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{ASK_STREAM}",
        ASK_STREAM.len()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    in_time("its engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 1.0);
}

#[tokio::test]
async fn an_http2_client_that_reads_slowly_gets_all_of_its_answer() {
    let rig = rig().await;
    rig.stage.play(vec![large()]);
    let (mut sender, driver) = http2(&rig).await;
    let mut answer = sender.send_request(request(ASK)).await.unwrap();
    let mut got = 0;
    while let Some(frame) = in_time("more", answer.body_mut().frame()).await {
        got += frame.unwrap().into_data().unwrap().len();
        tokio::time::sleep(SIP.1 / 3).await; // A frame is a third of a sip.
    }
    assert_eq!(got, LARGE + 2);
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

/// A stream whose client does not take it is reset; one whose engine thinks for long is not, nor is their connection.
#[tokio::test]
async fn a_stalled_http2_stream_ends_alone() {
    let rig = rig().await;
    rig.stage.play(flood());
    let (mut sender, driver) = http2(&rig).await;
    let mut paused = sender.send_request(request(ASK_STREAM)).await.unwrap();
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let waiting = driver.spawn(sender.send_request(request(ASK)));
    in_time("the paused one is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    let end = loop {
        match in_time("its end", paused.body_mut().frame()).await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(end.to_string().contains("error"), "{end}");
    rig.stage.gate.add_permits(1);
    let answer = in_time("the other one", waiting).await.unwrap().unwrap();
    let body = answer.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), ANSWER);
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 1.0);
    // What follows is served on the same connection.
    let again = sender.send_request(request(ASK)).await.unwrap();
    assert_eq!(again.status(), 200);
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

#[tokio::test]
async fn new_requests_do_not_keep_a_stalled_http2_stream_alive() {
    let rig = rig().await;
    rig.stage.play(flood());
    let (mut sender, driver) = http2(&rig).await;
    let paused = sender.send_request(request(ASK_STREAM)).await.unwrap();
    let asking = async {
        while rig.stage.hung_up.try_acquire().is_err() {
            let answer = sender.send_request(request(ASK)).await.unwrap();
            assert_eq!(answer.status(), 200);
            tokio::time::sleep(TIMEOUT / 10).await;
        }
    };
    in_time("the paused one is left", asking).await;
    drop((paused, sender));
    driver.stop();
    rig.at_rest().await;
}

#[tokio::test]
async fn an_idle_http2_connection_is_closed() {
    let rig = rig().await;
    let (mut sender, driver) = http2(&rig).await;
    let answer = sender.send_request(request(ASK)).await.unwrap();
    assert_eq!(answer.status(), 200);
    drop(answer);
    until("it is closed", || sender.is_closed()).await;
    driver.stop();
    rig.at_rest().await;
}

/// The same timeout holds for what a client sends.
#[tokio::test]
async fn a_body_that_stops_coming_is_given_up() {
    let rig = rig().await;
    let mut client = rig.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{{"
    );
    client.send(&head).await;
    let answer = in_time("refusal", client.answer()).await;
    assert_eq!(answer.status, 408, "{}", answer.text());
    drop(client);
    rig.at_rest().await;
    assert_eq!(rig.metric("kvasir_limit_reached_total").await, 1.0);
}
