//! A question to servers that answer, refuse, talk too much, or say nothing.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

use super::*;
use crate::{parse_api_key, parse_url};

const BOUNDS: Bounds = Bounds {
    timeout: Duration::from_secs(20),
    answer_bytes_max: 64,
};

/// Takes one connection, answers its first request with `answer`, and gives back what it read.
fn server(answer: String) -> (HttpEndpoint, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/base/", listener.local_addr().unwrap());
    let heard = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut heard = Vec::new();
        let mut piece = [0; 1024];
        while !heard.windows(4).any(|w| w == b"\r\n\r\n") {
            let read = stream.read(&mut piece).unwrap();
            heard.extend_from_slice(&piece[..read]);
        }
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8(heard).unwrap()
    });
    (parse_url(&url).unwrap(), heard)
}

fn answer(status: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}")
}

async fn ask(at: &HttpEndpoint, bounds: Bounds) -> Result<Response<Bytes>, UpstreamError> {
    let request = Request::get("/page?x=1").body(Bytes::new()).unwrap();
    let client = Client::new(WorkerTls::default(), bounds);
    client.fetch(at, request).await
}

#[tokio::test]
async fn a_question_goes_below_the_prefix_with_host_and_key() {
    let (mut at, heard) = server(answer("418 I'm a teapot", "short and stout"));
    at.api_key = Some(parse_api_key("open").unwrap());
    let answer = ask(&at, BOUNDS).await.unwrap();
    assert_eq!(answer.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(answer.into_body(), "short and stout");
    let heard = heard.join().unwrap();
    assert!(
        heard.starts_with("GET /base/page?x=1 HTTP/1.1\r\n"),
        "{heard}"
    );
    let host = format!("host: 127.0.0.1:{}\r\n", at.port);
    assert!(heard.contains(&host), "{heard}");
    assert!(heard.contains("authorization: Bearer open\r\n"), "{heard}");
}

#[tokio::test]
async fn where_only_the_body_counts_a_refusal_is_an_error() {
    for (status, expected) in [("200 OK", Ok("ok")), ("404 Not Found", Err(404))] {
        let (at, _) = server(answer(status, "ok"));
        let pool = Pool::new(at, WorkerTls::default());
        let body = pool.fetch_ok(Request::new(Bytes::new()), BOUNDS).await;
        let seen = body.map_err(|error| match error {
            UpstreamError::Status(status) => status.as_u16(),
            other => panic!("{other}"),
        });
        assert_eq!(seen, expected.map(Bytes::from));
    }
}

#[tokio::test]
async fn an_answer_that_is_too_long_or_does_not_come_is_an_error() {
    let (at, _) = server(answer("200 OK", &"x".repeat(BOUNDS.answer_bytes_max)));
    assert!(ask(&at, BOUNDS).await.is_ok());
    let (at, _) = server(answer("200 OK", &"x".repeat(BOUNDS.answer_bytes_max + 1)));
    let long = ask(&at, BOUNDS).await;
    assert!(matches!(long, Err(UpstreamError::TooLong)), "{long:?}");

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let at = parse_url(&url).unwrap();
    let hurried = Bounds {
        timeout: Duration::from_millis(50),
        ..BOUNDS
    };
    let late = ask(&at, hurried).await;
    assert!(
        matches!(late, Err(UpstreamError::AnswerTimeout)),
        "{late:?}"
    );
    drop(silent);
    let nobody = ask(&at, BOUNDS).await;
    assert!(
        matches!(nobody, Err(UpstreamError::Connect(_))),
        "{nobody:?}"
    );
}

#[test]
fn a_refusal_is_shown_in_its_own_words() {
    let vllm = br#"{"error":{"message":"The model `x` does not exist.","code":404}}"#;
    assert_eq!(error_message(vllm), "The model `x` does not exist.");
    let flat = br#"{"message":"no such\nworker","type":"Not Found","code":404}"#;
    assert_eq!(error_message(flat), "no such worker");
    assert_eq!(error_message(br#"{"error":"worse"}"#), "worse");
    assert_eq!(error_message(br#"{"detail":"Not Found"}"#), "Not Found");
    assert_eq!(error_message(b"<html>\n\xff"), "<html> \u{fffd}");
    assert_eq!(error_message(&vec![b'x'; 5000]).len(), SHOWN_CHARS_MAX);
}
