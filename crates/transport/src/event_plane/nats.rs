//! The event plane over NATS core: one subject for all publishers of a scope and topic.
//!
//! One connection a process. A subject is subscribed to once, however many of its publishers are listened to; its messages are
//! handed to those who listen to their publisher and to nobody else. Nobody waits: a listener whose queue is full misses messages, a
//! publisher whose queue is full drops them, and numbers show both.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, Message, Subscriber};
use bytes::Bytes;
use futures_core::Stream;
use kvasir_tasks::Tasks;
use kvasir_wire::native::Topic;
use tokio::sync::{mpsc, watch};

use super::PlaneReader;
use crate::{EventSource, SourceEvent, SourceFault};

/// Messages that wait for one listener, and for the network.
const QUEUE_MESSAGES_MAX: usize = 4096;
/// Messages that wait to be published.
const OUTGOING_MAX: usize = 100_000;
/// Pause between attempts to connect again, at most.
const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// Longest time for a connection and its handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the server is, and how it is told who we are.
#[derive(Clone, Debug)]
pub struct NatsEventOptions {
    /// Addresses, such as `nats://localhost:4222`; a user and a password may stand before the host.
    pub servers: Vec<String>,
    /// An authority to believe beside those of the system, in PEM.
    pub tls_ca: Option<std::path::PathBuf>,
}

/// Whether the server is reached, and why not.
type Link = Result<(), SourceFault>;

/// Event channels on NATS. Clones are one connection.
#[derive(Clone, Debug)]
pub struct NatsEvents {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: Client,
    tasks: Tasks,
    link: watch::Receiver<Link>,
    outgoing: mpsc::Sender<(String, Bytes)>,
    subjects: Mutex<BTreeMap<String, Arc<Subject>>>,
}

/// One subject that is listened to.
#[derive(Debug, Default)]
struct Subject {
    routes: Mutex<Routes>,
}

#[derive(Debug, Default)]
struct Routes {
    next: u64,
    /// By the number of the listener: whom it listens to, and where it reads.
    listeners: BTreeMap<u64, Route>,
    /// The subscription stands.
    connected: bool,
}

#[derive(Debug)]
struct Route {
    publisher: u64,
    queue: mpsc::Sender<SourceEvent>,
    /// What is to be told of the link as soon as there is room.
    link: Option<SourceEvent>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NatsEvents {
    /// Connects, and goes on trying until it does. An error says that the addresses cannot be used.
    pub async fn connect(tasks: &Tasks, options: &NatsEventOptions) -> Result<Self, String> {
        let (told, link) = watch::channel(Err(SourceFault::Unreachable("not yet".to_owned())));
        let mut connect = ConnectOptions::new()
            .name("kvasir")
            .retry_on_initial_connect()
            .connection_timeout(CONNECT_TIMEOUT)
            .subscription_capacity(QUEUE_MESSAGES_MAX)
            .reconnect_delay_callback(|attempts| {
                let doubled = Duration::from_millis(50 << attempts.min(6));
                doubled.min(RECONNECT_MAX)
            })
            .event_callback(move |event| {
                let link = match event {
                    Event::Connected => Some(Ok(())),
                    Event::Disconnected => {
                        let why = "the NATS server is gone".to_owned();
                        Some(Err(SourceFault::Closed(why)))
                    }
                    _ => None,
                };
                if let Some(link) = link {
                    drop(told.send_replace(link));
                }
                std::future::ready(())
            });
        if let Some(ca) = &options.tls_ca {
            connect = connect.add_root_certificates(ca.clone());
        }
        let servers: Result<Vec<async_nats::ServerAddr>, _> = options
            .servers
            .iter()
            .map(|server| server.parse())
            .collect();
        let servers = servers.map_err(|error| error.to_string())?;
        let client = connect
            .connect(servers)
            .await
            .map_err(|error| error.to_string())?;
        let (outgoing, waiting) = mpsc::channel(OUTGOING_MAX);
        tasks.spawn(publish_all(client.clone(), waiting));
        Ok(Self {
            shared: Arc::new(Shared {
                client,
                tasks: tasks.clone(),
                link,
                outgoing,
                subjects: Mutex::default(),
            }),
        })
    }

    /// Sends a message; false if there was no room for it.
    pub(super) fn publish(&self, subject: &str, body: Bytes) -> bool {
        let sent = self.shared.outgoing.try_send((subject.to_owned(), body));
        sent.is_ok()
    }

    /// Listens to one publisher of a subject.
    #[must_use]
    pub fn listen(&self, subject: &str, topic: Topic, publisher: u64) -> NatsSource {
        let (queue, events) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let mut subjects = lock(&self.shared.subjects);
        let found = subjects.entry(subject.to_owned()).or_insert_with(|| {
            let made = Arc::new(Subject::default());
            let task = follow(Arc::downgrade(&self.shared), subject.to_owned(), topic);
            self.shared.tasks.spawn(task);
            made
        });
        let mut routes = lock(&found.routes);
        let number = routes.next;
        routes.next += 1;
        let mut route = Route {
            publisher,
            queue,
            link: None,
        };
        if routes.connected {
            route.tell(SourceEvent::Connected);
        }
        routes.listeners.insert(number, route);
        drop(routes);
        NatsSource {
            events,
            number,
            subject: Arc::clone(found),
        }
    }
}

async fn publish_all(client: Client, mut waiting: mpsc::Receiver<(String, Bytes)>) {
    while let Some((subject, body)) = waiting.recv().await {
        let _ = client.publish(subject, body).await;
    }
}

/// Hands the messages of a subject to who listens, until nobody does.
async fn follow(shared: Weak<Shared>, subject: String, topic: Topic) {
    let Some((client, mut link)) = shared.upgrade().map(|s| (s.client.clone(), s.link.clone()))
    else {
        return;
    };
    let mut reader = PlaneReader::new(topic.name());
    let Ok(mut messages) = client.subscribe(subject.clone()).await else {
        return;
    };
    let mut connected = false;
    loop {
        let is_up = link.borrow_and_update().clone();
        if is_up.is_ok() != connected {
            if is_up.is_ok() {
                // The subscription is on its way to the server before anybody is told.
                let _ = client.flush().await;
            }
            connected = is_up.is_ok();
            let event = match is_up {
                Ok(()) => SourceEvent::Connected,
                Err(fault) => SourceEvent::Disconnected(fault),
            };
            let Some(found) = subject_of(&shared, &subject) else {
                return;
            };
            let mut routes = lock(&found.routes);
            routes.connected = connected;
            routes
                .listeners
                .values_mut()
                .for_each(|route| route.tell(event.clone()));
        }
        tokio::select! {
            changed = link.changed() => if changed.is_err() {
                return;
            },
            message = next(&mut messages) => match message {
                Some(message) => {
                    let Some(found) = subject_of(&shared, &subject) else {
                        return;
                    };
                    found.deliver(reader.read_envelope(&message.payload));
                }
                None => return,
            },
        }
    }
}

async fn next(messages: &mut Subscriber) -> Option<Message> {
    poll_fn(|cx| Pin::new(&mut *messages).poll_next(cx)).await
}

/// The subject, unless nobody listens to it any more: then it is forgotten.
fn subject_of(shared: &Weak<Shared>, subject: &str) -> Option<Arc<Subject>> {
    let shared = shared.upgrade()?;
    let mut subjects = lock(&shared.subjects);
    let found = Arc::clone(subjects.get(subject)?);
    if lock(&found.routes).listeners.is_empty() {
        subjects.remove(subject);
        return None;
    }
    Some(found)
}

impl Subject {
    fn deliver(
        &self,
        read: Result<Option<(u64, kvasir_wire::frame::Frame<Bytes>)>, kvasir_msgpack::DecodeError>,
    ) {
        let mut routes = lock(&self.routes);
        match read {
            Ok(None) => {}
            Ok(Some((publisher, frame))) => {
                for route in routes.listeners.values_mut() {
                    if route.publisher == publisher {
                        route.tell(SourceEvent::Live(frame.clone()));
                    }
                }
            }
            // Nobody knows whose it was.
            Err(error) => routes
                .listeners
                .values_mut()
                .for_each(|route| route.tell(SourceEvent::Refused(error))),
        }
    }
}

impl Route {
    /// Tells something without waiting: a message that finds no room is dropped, what happened to the link is told later.
    fn tell(&mut self, event: SourceEvent) {
        let message = match event {
            SourceEvent::Connected | SourceEvent::Disconnected(_) => {
                self.link = Some(event);
                None
            }
            message => Some(message),
        };
        if let Some(link) = self.link.take()
            && let Err(mpsc::error::TrySendError::Full(link)) = self.queue.try_send(link)
        {
            self.link = Some(link);
            return;
        }
        if let Some(message) = message {
            let _ = self.queue.try_send(message);
        }
    }
}

/// One publisher of a subject, as a source of events. Dropping it ends its part.
#[derive(Debug)]
pub struct NatsSource {
    events: mpsc::Receiver<SourceEvent>,
    number: u64,
    subject: Arc<Subject>,
}

impl EventSource for NatsSource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        match self.events.poll_recv(cx) {
            Poll::Ready(Some(event)) => Poll::Ready(event),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    fn replay(&mut self, _: u64, _: u64) {}

    fn cancel_replay(&mut self, _: u64) {}
}

impl Drop for NatsSource {
    fn drop(&mut self) {
        lock(&self.subject.routes).listeners.remove(&self.number);
    }
}
