//! A connection to a peer that sends exactly what a test wants, over a real socket.

use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A connection and the peer's end of it.
async fn pair() -> (Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let address = crate::parse_url(&address).unwrap();
    let tls = WorkerTls::default();
    let (connection, peer) = tokio::join!(Connection::open(&address, &tls), listener.accept());
    (connection.unwrap(), peer.unwrap().0)
}

async fn send(connection: &mut Connection, body: &'static [u8]) -> Result<Head, UpstreamError> {
    let request = UpstreamRequest {
        method: &Method::POST,
        path: "/x",
        headers: &HeaderMap::new(),
        also: None,
        body: &Bytes::from_static(body),
        fresh: false,
    };
    let destination = Destination {
        prefix: "",
        authority: &HeaderValue::from_static("e"),
        key: None,
    };
    connection.send(&request, &destination).await
}

async fn rest(connection: &mut Connection) -> Result<Vec<u8>, UpstreamError> {
    let mut out = Vec::new();
    while let Some(data) = poll_fn(|cx| connection.poll_data(cx)).await {
        out.extend_from_slice(&data?);
    }
    Ok(out)
}

/// Reads until `end`, then says `says`.
async fn answer(peer: &mut TcpStream, end: &[u8], says: &[u8]) -> Vec<u8> {
    let mut heard = Vec::new();
    while !heard.ends_with(end) {
        heard.push(peer.read_u8().await.unwrap());
    }
    peer.write_all(says).await.unwrap();
    heard
}

fn is_ready(connection: &mut Connection) -> bool {
    connection.readiness() == Readiness::Ready
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[tokio::test]
async fn a_connection_serves_again_and_again() {
    let (mut connection, mut peer) = pair().await;
    assert!(is_ready(&mut connection));
    for _ in 0..3 {
        let (head, heard) =
            tokio::join!(send(&mut connection, b"hey"), answer(&mut peer, b"hey", OK));
        assert_eq!(head.unwrap().status, StatusCode::OK);
        assert_eq!(
            heard,
            b"POST /x HTTP/1.1\r\nhost: e\r\ncontent-length: 3\r\n\r\nhey"
        );
        assert!(!is_ready(&mut connection), "its answer was not read");
        assert_eq!(rest(&mut connection).await.unwrap(), b"ok");
        assert!(is_ready(&mut connection));
    }
    drop(peer);
    connection.socket_readable().await;
    assert!(!is_ready(&mut connection), "the worker has closed it");
}

#[tokio::test]
async fn an_answer_is_the_same_wherever_it_is_cut() {
    let text = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Fine\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n\
        3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
    let (mut connection, mut peer) = pair().await;
    for cut in 0..text.len() {
        let (first, second) = text.split_at(cut);
        let peer = async {
            answer(&mut peer, b"q", first).await;
            tokio::task::yield_now().await;
            peer.write_all(second).await.unwrap();
        };
        let asked = async {
            let head = send(&mut connection, b"q").await.unwrap();
            (head, rest(&mut connection).await.unwrap())
        };
        let ((head, body), ()) = tokio::join!(asked, peer);
        assert_eq!(
            (head.status.as_u16(), &head.headers["a"]),
            (201, &"b".parse().unwrap())
        );
        assert_eq!(
            (&body[..], is_ready(&mut connection)),
            (&b"abcde"[..], true),
            "{cut}"
        );
    }
}

#[tokio::test]
async fn a_connection_that_may_be_out_of_step_is_not_kept() {
    let cases: [(&[u8], &[u8]); 4] = [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok?", b"ok"),
        (
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
            b"ok",
        ),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
    ];
    for (says, body) in cases {
        let (mut connection, mut peer) = pair().await;
        let (head, _) = tokio::join!(send(&mut connection, b"q"), answer(&mut peer, b"q", says));
        head.unwrap();
        drop(peer);
        assert_eq!(rest(&mut connection).await.unwrap(), body);
        assert!(!is_ready(&mut connection));
    }
}

#[tokio::test]
async fn what_breaks_off_is_no_answer() {
    let cases: [(&[u8], bool); 5] = [
        (b"", false),
        (b"HTTP/1.1 200 OK\r\ncontent-le", false),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", false),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", true),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
            true,
        ),
    ];
    for (says, begins) in cases {
        let (mut connection, mut peer) = pair().await;
        let peer = async {
            answer(&mut peer, b"q", says).await;
            drop(peer);
        };
        let (head, ()) = tokio::join!(send(&mut connection, b"q"), peer);
        assert_eq!(head.is_ok(), begins, "{says:?}");
        if begins {
            assert!(matches!(
                rest(&mut connection).await,
                Err(UpstreamError::Broken(_))
            ));
        }
        assert!(!is_ready(&mut connection));
    }
}

#[tokio::test]
async fn only_a_line_that_ended_in_silence_was_stale() {
    let cases: [(&[u8], bool); 3] = [
        (b"", true),
        (b"HTTP/1.1 2", false),
        (b"SSH-2.0-x\r\n", false),
    ];
    for (says, stale) in cases {
        let (mut connection, mut peer) = pair().await;
        let peer = async {
            answer(&mut peer, b"q", says).await;
            drop(peer);
        };
        let (head, ()) = tokio::join!(send(&mut connection, b"q"), peer);
        assert_eq!(connection.was_stale(&head.unwrap_err()), stale, "{says:?}");
    }
}

#[tokio::test]
async fn a_refusal_that_comes_before_the_question_was_sent_is_heard() {
    const HUGE: &[u8] = &[b'x'; 32 << 20];
    let says = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
    let (mut connection, mut peer) = pair().await;
    let (head, _) = tokio::join!(send(&mut connection, HUGE), answer(&mut peer, b"xxx", says));
    assert_eq!(head.unwrap().status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(rest(&mut connection).await.unwrap(), b"no");
    assert!(!is_ready(&mut connection), "the request was not sent whole");
}

#[tokio::test]
async fn a_long_answer_is_read_in_larger_and_larger_pieces() {
    let (mut connection, mut peer) = pair().await;
    let body = vec![b'y'; 3 << 20];
    let says = [
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(),
        &body,
    ]
    .concat();
    let asked = async {
        send(&mut connection, b"q").await.unwrap();
        rest(&mut connection).await.unwrap()
    };
    let (came, _) = tokio::join!(asked, answer(&mut peer, b"q", &says));
    assert!(came == body && connection.read_bytes > READ_BYTES && is_ready(&mut connection));
}

/// What came is noticed though the reactor, which did not run since, cannot know of it.
#[tokio::test]
async fn bytes_are_noticed_before_the_reactor_hears_of_them() {
    use std::io::Write;
    let cases: [(&[u8], Readiness); 3] = [
        (OK, Readiness::Surplus),
        (b"HTTP/1.1 408 Request Timeout\r\n\r\n", Readiness::Unfit),
        (b"", Readiness::Unfit),
    ];
    for (late, readiness) in cases {
        let (mut connection, mut peer) = pair().await;
        let (head, _) = tokio::join!(send(&mut connection, b"q"), answer(&mut peer, b"q", OK));
        head.unwrap();
        assert_eq!(rest(&mut connection).await.unwrap(), b"ok");
        // Another look, so that the reactor's note says that nothing is there.
        assert_eq!(connection.readiness(), Readiness::Ready);
        let mut peer = peer.into_std().unwrap();
        peer.write_all(late).unwrap();
        if late.is_empty() {
            drop(peer);
        }
        assert_eq!(connection.readiness(), readiness, "{late:?}");
    }
}

/// The closing chunk may come after all data: the connection waits for it, and for nothing else.
#[tokio::test]
async fn a_connection_waits_for_the_end_of_its_answer() {
    use std::io::Write;
    let begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok";
    let cases: [(&[&[u8]], Readiness); 6] = [
        (&[b"\r\n0\r\n\r\n"], Readiness::Ready),
        (&[b"\r", b"\n0", b"\r\n\r", b"\n"], Readiness::Ready),
        (&[b"\r\n1\r\n\n\r\n0\r\n\r\n"], Readiness::Ready),
        (&[b"\r\n3\r\nmo"], Readiness::Surplus),
        (&[b"\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n"], Readiness::Surplus),
        (&[b"\r\nzz\r\n"], Readiness::Unfit),
    ];
    for (pieces, readiness) in cases {
        let (mut connection, mut peer) = pair().await;
        let (head, _) = tokio::join!(send(&mut connection, b"q"), answer(&mut peer, b"q", begun));
        head.unwrap();
        let data = poll_fn(|cx| connection.poll_data(cx)).await;
        assert_eq!(data.unwrap().unwrap(), "ok");
        let mut peer = peer.into_std().unwrap();
        peer.set_nonblocking(false).unwrap();
        for piece in pieces {
            assert_eq!(connection.may_be_kept(), Readiness::Unfinished);
            assert_eq!(connection.readiness(), Readiness::Unfinished);
            peer.write_all(piece).unwrap();
        }
        assert_eq!(connection.readiness(), readiness, "{pieces:?}");
    }
}

impl Connection {
    /// Waits until something is there to be read, be it the end.
    async fn socket_readable(&self) {
        match &self.socket {
            Socket::Plain(stream) => stream.readable().await.unwrap(),
            Socket::Secure(_) => {}
        }
    }
}
