//! A port for answers that several processes share, while one replaces another.

use std::sync::Arc;

use kvasir_protocol::control::{Handshake, Word};
use kvasir_protocol::frame::TwoPart;
use kvasir_tasks::Tasks;
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{
    RequestPlane, ResponseOptions, ResponseServer, TokenEndpoint, TokenPlane, TokenSink,
};
use kvasir_types::{Codec, FinishReason, TokenRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rpc::{LONG, PATH, W, endpoint, item, loopback, read, request};

/// Processes that replace each other share a port for answers: each gets its own, whoever of them accepts; also the one in the middle, and one that no
/// longer accepts.
#[tokio::test]
async fn processes_that_share_a_port_get_their_own_answers() {
    let tasks = Tasks::new();
    let server = EndpointServer::bind(ServerOptions::new(loopback()), &tasks);
    let server = server.await.unwrap();
    let generate = TokenEndpoint::new(W, |request: TokenRequest, sink: TokenSink| {
        sink.push(item(
            &[request.sampling.max_tokens],
            Some(FinishReason::Stop),
        ));
    });
    let _served = server.serve(PATH, Arc::new(generate));
    let taken = std::net::TcpListener::bind(loopback()).unwrap();
    let options = ResponseOptions {
        bind: taken.local_addr().unwrap(),
        ..ResponseOptions::default()
    };
    drop(taken);
    let oldest = ResponseServer::start(options.clone(), &tasks)
        .await
        .unwrap();
    let replace = |home: &ResponseServer| {
        let shared = home.share().unwrap().expect("its port is given");
        ResponseServer::start_at(options.clone(), shared, &tasks).unwrap()
    };
    let middle = replace(&oldest);
    let newest = replace(&middle);
    let homes = [oldest, middle, newest];
    let planes = homes.clone().map(|home| {
        let client = TcpClient::new(home, TcpOptions::default(), &tasks);
        TokenPlane::new(
            Arc::new(client),
            endpoint(server.local_addr(), Codec::MessagePack),
        )
    });
    let ask_all = async || {
        for number in 0..60 {
            let plane = &planes[number as usize % planes.len()];
            let stream = plane.send(W, request(number)).await.unwrap();
            let answer = tokio::time::timeout(LONG, read(stream)).await.unwrap();
            assert_eq!(answer, (vec![number], Ok(Some(FinishReason::Stop))));
        }
    };
    ask_all().await;
    // One alone accepts: what the others wait for is passed on to them, by way of the one in the middle.
    homes[0].set_left(true);
    homes[1].set_left(true);
    ask_all().await;
    homes[0].set_left(false);
    homes[1].set_left(false);
    homes[2].set_left(true);
    ask_all().await;
    let arrived: Vec<u64> = homes.iter().map(|home| home.counts().arrived).collect();
    assert_eq!(arrived, [60, 60, 60]);
    assert!(homes.iter().all(|home| home.counts().unexpected == 0));
    // What nobody waits for is turned away, once.
    let mut stranger = TcpStream::connect(options.bind).await.unwrap();
    let subject = "00000000-0000-0000-0000-000000000000".to_owned();
    let handshake = TwoPart::of_header(Handshake { subject }.encode()).to_bytes();
    stranger.write_all(&handshake).await.unwrap();
    let mut heard = Vec::new();
    let closed = tokio::time::timeout(LONG, stranger.read_to_end(&mut heard)).await;
    closed.unwrap().unwrap();
    assert_eq!(heard, TwoPart::of_header(Word::Kill.encode()).to_bytes());
    let unexpected: u64 = homes.iter().map(|home| home.counts().unexpected).sum();
    assert_eq!(unexpected, 1);
    tasks.stop();
}
