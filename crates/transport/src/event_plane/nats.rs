//! The event plane over NATS core: one subject for all publishers of a scope and topic.
//!
//! A subject is subscribed to once, however many of its publishers are listened to; its messages are
//! handed to those who listen to their publisher and to nobody else. Nobody waits: a listener whose queue is full misses messages, a
//! publisher whose queue is full drops them, and numbers show both.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_wire::native::Topic;
use tokio::sync::mpsc;

use super::PlaneReader;
use crate::nats::{NatsLink, QUEUE_MESSAGES_MAX, next_message, round_trip};
use crate::{EventSource, SourceEvent, SourceFault};

/// Messages that wait to be published.
const OUTGOING_MAX: usize = 100_000;

/// Event channels on NATS. Clones are one connection.
#[derive(Clone, Debug)]
pub struct NatsEvents {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    link: NatsLink,
    tasks: Tasks,
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
    /// Channels over `link`, which is used as soon as somebody listens or publishes.
    #[must_use]
    pub fn new(link: &NatsLink, tasks: &Tasks) -> Self {
        let (outgoing, waiting) = mpsc::channel(OUTGOING_MAX);
        tasks.background().spawn(publish_all(link.clone(), waiting));
        Self {
            shared: Arc::new(Shared {
                link: link.clone(),
                tasks: tasks.background(),
                outgoing,
                subjects: Mutex::default(),
            }),
        }
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

async fn publish_all(link: NatsLink, mut waiting: mpsc::Receiver<(String, Bytes)>) {
    while let Some((subject, body)) = waiting.recv().await {
        let Some(client) = link.client().await else {
            return;
        };
        let _ = client.publish(subject, body).await;
    }
}

/// Hands the messages of a subject to who listens, until nobody does.
async fn follow(shared: Weak<Shared>, subject: String, topic: Topic) {
    let Some(link) = shared.upgrade().map(|shared| shared.link.clone()) else {
        return;
    };
    let Some(client) = link.client().await else {
        return;
    };
    let mut link = link.watch();
    let mut reader = PlaneReader::new(topic.name());
    let Ok(mut messages) = client.subscribe(subject.clone()).await else {
        return;
    };
    // The connection that listeners were told of.
    let mut told = None;
    loop {
        let state = link.borrow_and_update().clone();
        let now = state.reached.is_ok().then_some(state.connections);
        if now != told {
            let mut events = Vec::new();
            if told.is_some() {
                // Also where the next one stands already: what was said in between is lost.
                let closed = SourceFault::Closed("the NATS server went away".to_owned());
                events.push(SourceEvent::Disconnected(
                    state.reached.err().unwrap_or(closed),
                ));
            }
            if now.is_some() {
                // The server has the subscription before anybody is told: what is published from now on is heard.
                let _ = round_trip(&client).await;
                events.push(SourceEvent::Connected);
            }
            told = now;
            let Some(found) = subject_of(&shared, &subject) else {
                return;
            };
            found.tell_link(&events, now.is_some());
        }
        tokio::select! {
            changed = link.changed() => if changed.is_err() {
                return;
            },
            message = next_message(&mut messages) => match message {
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
    fn tell_link(&self, events: &[SourceEvent], connected: bool) {
        let mut routes = lock(&self.routes);
        routes.connected = connected;
        for route in routes.listeners.values_mut() {
            events.iter().for_each(|event| route.tell(event.clone()));
        }
    }

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
