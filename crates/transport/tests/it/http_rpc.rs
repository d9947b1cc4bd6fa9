//! Requests over HTTP: our client with our own workers.

use std::sync::Arc;

use kvasir_tasks::Tasks;
use kvasir_transport::http_rpc::{HttpClient, HttpServer};
use kvasir_transport::tcp::{ServerOptions, TcpOptions};
use kvasir_transport::{PlaneError, RequestPlane, TokenEndpoint, TokenPlane};
use kvasir_types::{Codec, FinishReason, PlaneEndpoint};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::rpc::{PATH, W, home, item, loopback, read, request};

#[tokio::test]
async fn a_request_reaches_its_worker_over_http() {
    let tasks = Tasks::new();
    let mut options = ServerOptions::new(loopback());
    options.capacity = 1;
    let server = HttpServer::bind(options, &tasks).await.unwrap();
    let (sender, mut calls) = mpsc::unbounded_channel();
    let generate = TokenEndpoint::new(W, move |request, sink| {
        let _ = sender.send((request, sink));
    });
    let served = server.serve(PATH, Arc::new(generate));
    let client = HttpClient::new(home(&tasks).await, &TcpOptions::default(), &tasks);
    let endpoint = PlaneEndpoint {
        plane: "http".into(),
        address: format!("http://{}/v1/rpc/{PATH}", server.local_addr()).into(),
        codec: Codec::MessagePack,
    };
    let plane = TokenPlane::new(Arc::new(client), endpoint);
    let stream = plane.send(W, request(2)).await.unwrap();
    let full = plane.send(W, request(2)).await.err();
    assert_eq!(full, Some(PlaneError::Overloaded(W)));
    let (asked, sink) = calls.recv().await.unwrap();
    assert_eq!(asked.tokens, request(2).tokens);
    sink.push(item(&[4, 5], Some(FinishReason::Length)));
    assert_eq!(
        read(stream).await,
        (vec![4, 5], Ok(Some(FinishReason::Length)))
    );
    drop(served);
    let gone = plane.send(W, request(2)).await.err().unwrap();
    assert!(matches!(gone, PlaneError::Refused { .. }), "{gone:?}");
    // Older clients speak HTTP/1.1.
    let mut socket = tokio::net::TcpStream::connect(server.local_addr())
        .await
        .unwrap();
    let old =
        b"POST /v1/rpc/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    socket.write_all(old).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert!(
        answer.ends_with("Server unavailable: unknown endpoint x"),
        "{answer}"
    );
    tasks.stop();
}

#[tokio::test]
async fn a_worker_that_is_not_there_cannot_be_reached() {
    let tasks = Tasks::new();
    let client = HttpClient::new(home(&tasks).await, &TcpOptions::default(), &tasks);
    let unused = std::net::TcpListener::bind(loopback()).unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let endpoint = |address: &str| PlaneEndpoint {
        plane: "http".into(),
        address: address.into(),
        codec: Codec::Json,
    };
    for address in [
        &*format!("http://{address}/v1/rpc/x"),
        "/v1/rpc/x",
        "no url",
    ] {
        let plane = TokenPlane::new(Arc::new(client.clone()), endpoint(address));
        let failed = plane.send(W, request(2)).await.err().unwrap();
        assert!(matches!(failed, PlaneError::Connect { .. }), "{failed:?}");
    }
}
