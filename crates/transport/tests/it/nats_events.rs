//! The event plane over NATS, against a server of our own that speaks as much of its protocol as is needed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::{
    ChannelAddress, NatsEvents, NatsSource, PlanePublisher, PlanePublisherOptions,
};
use kvasir_transport::nats::{NatsLink, NatsOptions, NatsOptionsError};
use kvasir_transport::{SourceEvent, next_event};
use kvasir_wire::native::Topic;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

type Subscriptions = Arc<Mutex<BTreeMap<(u64, String), (String, mpsc::UnboundedSender<Vec<u8>>)>>>;

/// A NATS server: INFO, PING, SUB, UNSUB, PUB.
struct Server {
    address: SocketAddr,
    subscriptions: Subscriptions,
    stop: CancellationToken,
}

impl Server {
    async fn start(tasks: &Tasks, address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let (address, subscriptions) = (listener.local_addr().unwrap(), Subscriptions::default());
        let stop = CancellationToken::new();
        let (shared, inner, stopped) = (Arc::clone(&subscriptions), tasks.clone(), stop.clone());
        let accept = async move {
            for client in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let served = serve(stream, client, Arc::clone(&shared));
                inner.spawn(stopped.clone().run_until_cancelled_owned(served));
            }
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(accept));
        Self {
            address,
            subscriptions,
            stop,
        }
    }

    fn subscribed(&self) -> usize {
        self.subscriptions.lock().unwrap().len()
    }

    /// Closes every connection and the socket.
    fn stop(self) -> SocketAddr {
        self.stop.cancel();
        self.address
    }
}

async fn serve(stream: TcpStream, client: u64, subscriptions: Subscriptions) {
    let (reader, mut writer) = stream.into_split();
    let (sender, mut outgoing) = mpsc::unbounded_channel::<Vec<u8>>();
    let info = r#"INFO {"server_id":"t","version":"2.9.10","go":"","host":"127.0.0.1","port":0,"headers":true,"max_payload":1048576,"proto":1}"#;
    sender.send(format!("{info}\r\n").into_bytes()).unwrap();
    let write = async move {
        while let Some(bytes) = outgoing.recv().await {
            if writer.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let shared = Arc::clone(&subscriptions);
    let read = async move {
        let mut reader = BufReader::new(reader);
        let mut line = String::new();
        while reader.read_line(&mut line).await.is_ok_and(|n| n > 0) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["PING"] => sender.send(b"PONG\r\n".to_vec()).unwrap(),
                ["SUB", subject, .., sid] => {
                    let entry = ((*subject).to_owned(), sender.clone());
                    shared
                        .lock()
                        .unwrap()
                        .insert((client, (*sid).to_owned()), entry);
                }
                ["UNSUB", sid, ..] => {
                    shared.lock().unwrap().remove(&(client, (*sid).to_owned()));
                }
                ["PUB", subject, .., len] => {
                    let mut payload = vec![0; len.parse::<usize>().unwrap() + 2];
                    reader.read_exact(&mut payload).await.unwrap();
                    for ((_, sid), (of, to)) in shared.lock().unwrap().iter() {
                        if of == subject {
                            let mut message = format!("MSG {subject} {sid} {len}\r\n").into_bytes();
                            message.extend_from_slice(&payload);
                            let _ = to.send(message);
                        }
                    }
                }
                _ => {}
            }
            line.clear();
        }
    };
    tokio::select! { () = write => {}, () = read => {} }
    subscriptions
        .lock()
        .unwrap()
        .retain(|(of, _), _| *of != client);
}

fn connect(tasks: &Tasks, address: SocketAddr) -> NatsEvents {
    let options = NatsOptions {
        servers: vec![format!("nats://{address}")],
        ..NatsOptions::default()
    };
    NatsEvents::new(&NatsLink::new(&options, tasks).unwrap(), tasks)
}

fn publisher(events: &NatsEvents, publisher: u64) -> PlanePublisher {
    let options = PlanePublisherOptions {
        publisher,
        topic: Topic::KvEvents,
        host: String::new(),
    };
    PlanePublisher::on_nats(events, "namespace.n.component.c.endpoint.e", &options)
}

async fn next(source: &mut NatsSource) -> SourceEvent {
    let next = tokio::time::timeout(Duration::from_secs(30), next_event(source));
    next.await.unwrap()
}

async fn until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait)
        .await
        .unwrap();
}

async fn payload(source: &mut NatsSource) -> String {
    match next(source).await {
        SourceEvent::Live(frame) => String::from_utf8(frame.payload.to_vec()).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Two publishers of one subject, each heard by those who listen to it; the subject is subscribed to once, and no longer when
/// nobody listens. A server that goes and comes back is told in order.
#[tokio::test]
async fn publishers_of_a_subject_are_told_apart_and_a_lost_server_is_found_again() {
    let tasks = Tasks::new();
    let server = Server::start(&tasks, "127.0.0.1:0").await;
    let (listens, publishes) = (
        connect(&tasks, server.address),
        connect(&tasks, server.address),
    );
    let (one, two) = (publisher(&publishes, 1), publisher(&publishes, 2));
    let ChannelAddress::Nats(subject) = one.address() else {
        panic!("it publishes on NATS");
    };
    assert_eq!(subject, "namespace.n.component.c.endpoint.e.kv-events");
    assert!(one.is_bare());
    let mut of_one = listens.listen(&subject, Topic::KvEvents, 1);
    let mut of_two = listens.listen(&subject, Topic::KvEvents, 2);
    assert_eq!(next(&mut of_one).await, SourceEvent::Connected);
    assert_eq!(next(&mut of_two).await, SourceEvent::Connected);
    until(|| server.subscribed() == 1).await;
    for text in ["a", "b"] {
        one.publish(text.into(), 1);
        two.publish(format!("{text}2").into_bytes(), 1);
    }
    assert_eq!(
        (payload(&mut of_one).await, payload(&mut of_one).await),
        ("a".into(), "b".into())
    );
    assert_eq!(
        (payload(&mut of_two).await, payload(&mut of_two).await),
        ("a2".into(), "b2".into())
    );
    // A third who comes later is connected at once.
    let mut late = listens.listen(&subject, Topic::KvEvents, 1);
    assert_eq!(next(&mut late).await, SourceEvent::Connected);
    drop(of_two);
    let address = server.stop();
    assert!(matches!(
        next(&mut of_one).await,
        SourceEvent::Disconnected(_)
    ));
    let server = Server::start(&tasks, &address.to_string()).await;
    assert_eq!(next(&mut of_one).await, SourceEvent::Connected);
    let heard = async {
        loop {
            one.publish(b"again".to_vec(), 1);
            let wait = tokio::time::timeout(Duration::from_millis(200), next_event(&mut of_one));
            if let Ok(SourceEvent::Live(frame)) = wait.await {
                return frame.payload;
            }
        }
    };
    let heard = tokio::time::timeout(Duration::from_secs(30), heard)
        .await
        .unwrap();
    assert_eq!(heard, "again");
    drop((of_one, late));
    let forgotten = async {
        while server.subscribed() > 0 {
            two.publish(b"to nobody".to_vec(), 1);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), forgotten)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_address_that_is_none_is_refused_without_its_password() {
    let mut options = NatsOptions {
        servers: vec!["nats://h".to_owned(), "nats://me:secret@[".to_owned()],
        ..NatsOptions::default()
    };
    let refused = NatsLink::new(&options, &Tasks::new()).unwrap_err();
    assert_eq!(refused, NatsOptionsError::BadAddress(2));
    assert!(!refused.to_string().contains("secret"));
    options.servers = vec!["nats://me:secret@h:7".to_owned(), "h2".to_owned()];
    let link = NatsLink::new(&options, &Tasks::new()).unwrap();
    assert_eq!((link.servers(), link.is_wanted()), ("h:7, h2:4222", false));
    options.servers.clear();
    let refused = NatsLink::new(&options, &Tasks::new()).unwrap_err();
    assert_eq!(refused, NatsOptionsError::NoAddress);
}
