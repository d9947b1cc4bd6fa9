//! Writing to a stream: in order, each message until the server has it.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use kvasir_tasks::Tasks;
use tokio::sync::mpsc;

use super::{JetStream, JetStreamError};

/// Events that wait to be written.
const QUEUE_MAX: usize = 100_000;
/// Events of one message.
const MESSAGE_EVENTS_MAX: usize = 256;
/// Bytes of one message, unless one event has more: a quarter of what servers take.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// Before a message is sent again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Between two attempts at most.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Before a stream that was there is made anew: a server that is deleting it needs its time.
const ANEW_PAUSE: Duration = Duration::from_millis(500);

/// Where events are written to.
#[derive(Clone, Debug)]
pub struct LogPublisherOptions {
    /// The stream, which is made if it is not there.
    pub stream: String,
    /// The subject; one of the stream's.
    pub subject: String,
    /// For how long a stream that is made keeps messages.
    pub max_age: Duration,
    /// Tells messages of this publisher from those of others: random.
    pub publisher: u64,
}

/// Writes events to a stream. Clones are one, and events are written in the order in which they were given.
#[derive(Clone, Debug)]
pub struct LogPublisher {
    waiting: mpsc::Sender<Bytes>,
}

impl LogPublisher {
    /// Begins to write.
    #[must_use]
    pub fn start(jetstream: JetStream, options: LogPublisherOptions, tasks: &Tasks) -> Self {
        let (waiting, received) = mpsc::channel(QUEUE_MAX);
        let writer = Writer {
            jetstream,
            options,
            written: 0,
            told: false,
        };
        tasks.background().spawn(writer.run(received));
        Self { waiting }
    }

    /// Writes one event, in JSON, as soon as that can be. Never waits; false if there was no room for it.
    pub fn publish(&self, event: Bytes) -> bool {
        self.waiting.try_send(event).is_ok()
    }
}

struct Writer {
    jetstream: JetStream,
    options: LogPublisherOptions,
    /// Messages so far.
    written: u64,
    /// That nothing can be written was said.
    told: bool,
}

impl Writer {
    async fn run(mut self, mut waiting: mpsc::Receiver<Bytes>) {
        let mut events = Vec::new();
        // One event that did not fit into the last message.
        let mut left: Option<Bytes> = None;
        loop {
            events.extend(left.take());
            if events.is_empty() {
                match waiting.recv().await {
                    Some(event) => events.push(event),
                    None => return,
                }
            }
            let mut bytes: usize = events.iter().map(Bytes::len).sum();
            while events.len() < MESSAGE_EVENTS_MAX
                && let Ok(event) = waiting.try_recv()
            {
                bytes += event.len();
                if bytes > MESSAGE_BYTES_MAX {
                    left = Some(event);
                    break;
                }
                events.push(event);
            }
            self.write(message(&events)).await;
            events.clear();
        }
    }

    /// One message at a time: what follows waits, so that nothing can overtake what is sent again.
    async fn write(&mut self, message: Bytes) {
        self.written += 1;
        let name = format!("{:x}-{}", self.options.publisher, self.written);
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Msg-Id", name.as_str());
        let mut pause = FIRST_PAUSE;
        loop {
            let (subject, body) = (&self.options.subject, message.clone());
            let sent = self
                .jetstream
                .send(subject, Some(headers.clone()), body)
                .await;
            let mut error = match sent {
                Ok(_) => return self.tell(None),
                Err(error) => error,
            };
            // It was made while the server deleted another one of that name: nothing is lost with it.
            if error.has_lost_files() {
                let _ = self.jetstream.delete_stream(&self.options.stream).await;
            }
            // Nobody answers on a subject that no stream has.
            if matches!(error, JetStreamError::NotEnabled) {
                if self.written > 1 {
                    tokio::time::sleep(ANEW_PAUSE).await;
                }
                let (stream, age) = (&self.options.stream, self.options.max_age);
                match self.jetstream.ensure_stream(stream, age, false).await {
                    Ok(_) => continue,
                    Err(why) => error = why,
                }
            }
            self.tell(Some(&error));
            // It is larger than the server takes: what is missing shows.
            if matches!(error, JetStreamError::Refused { code: 0, .. }) {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Says once that events cannot be written, and once that they can.
    fn tell(&mut self, error: Option<&JetStreamError>) {
        let was_told = std::mem::replace(&mut self.told, error.is_some());
        let stream = &self.options.stream;
        match error {
            Some(error) if !was_told => {
                tracing::warn!(stream, %error, "cache events cannot be written to JetStream; they wait");
            }
            None if was_told => {
                tracing::info!(stream, "cache events are written to JetStream again")
            }
            _ => {}
        }
    }
}

/// One event stands alone, several are a list.
fn message(events: &[Bytes]) -> Bytes {
    if let [event] = events {
        return event.clone();
    }
    let size: usize = events.iter().map(|event| event.len() + 1).sum();
    let mut list = Vec::with_capacity(size + 1);
    for (at, event) in events.iter().enumerate() {
        list.push(if at == 0 { b'[' } else { b',' });
        list.extend_from_slice(event);
    }
    list.push(b']');
    list.into()
}
