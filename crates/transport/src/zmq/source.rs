//! An engine's PUB and ROUTER sockets as an [`EventSource`].
//!
//! A task per subscription connects, subscribes, reads and connects again; each replay is a task with a
//! connection of its own, closed when the answer is complete. Both wait when the queue is full: the
//! engine's own mark then drops messages there, which shows here as a gap.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use kvasir_msgpack::DecodeError;
use kvasir_tasks::Tasks;
use kvasir_types::Rng;
use kvasir_wire::frame::{Frame, ReplayPart, parse_live, parse_replay};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::codec::Item;
use super::connection::{LinkError, LinkReader, LinkWriter, Roles, handshake};
use super::{Endpoint, ZmqLimits};
use crate::event_plane::PlaneReader;
use crate::{EventSource, SourceEvent, SourceFault};

const SUB: Roles = Roles {
    own: "SUB",
    peers: &["PUB", "XPUB"],
};
const DEALER: Roles = Roles {
    own: "DEALER",
    peers: &["ROUTER", "REP"],
};

/// Which sockets to listen to, and how.
#[derive(Clone, Debug)]
pub struct ZmqSourceOptions {
    /// The engine's PUB socket.
    pub events: Endpoint,
    /// Its replay socket.
    pub replay: Option<Endpoint>,
    /// Prefix of the topics wanted; all if empty.
    pub topic: String,
    /// How its messages are cut.
    pub framing: ZmqFraming,
    /// First pause before connecting again; doubles.
    pub reconnect: Duration,
    /// Longest pause before connecting again.
    pub reconnect_max: Duration,
    /// Limits of each connection, and of the queue.
    pub limits: ZmqLimits,
}

impl ZmqSourceOptions {
    /// The defaults, for a PUB socket at `events`.
    #[must_use]
    pub fn new(events: Endpoint, replay: Option<Endpoint>) -> Self {
        Self {
            events,
            replay,
            topic: String::new(),
            framing: ZmqFraming::Engine,
            reconnect: Duration::from_millis(100),
            reconnect_max: Duration::from_secs(2),
            limits: ZmqLimits::default(),
        }
    }
}

/// What the parts of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZmqFraming {
    /// An engine's: topic, number, payload.
    Engine,
    /// The event plane's: topic, publisher, number, envelope.
    EventPlane,
    /// Topic and payload, without a number.
    TopicAndPayload,
}

/// An event and its share of the queue's bytes, given back when it is read.
type Queued = (SourceEvent, Option<OwnedSemaphorePermit>);

/// The writing end of the queue.
#[derive(Clone, Debug)]
struct Queue {
    sender: mpsc::Sender<Queued>,
    bytes: Arc<Semaphore>,
    bytes_max: usize,
}

impl Queue {
    /// Waits for room. `Err` when nobody reads any more.
    async fn push(&self, event: SourceEvent, size: usize) -> Result<(), LinkError> {
        let size = u32::try_from(size.min(self.bytes_max)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.bytes).acquire_many_owned(size).await.ok();
        let sent = self.sender.send((event, permit)).await;
        sent.map_err(|_| LinkError::Silent)
    }
}

/// An engine's events over ZeroMQ. Dropping it closes its connections.
#[derive(Debug)]
pub struct ZmqSource {
    queue: mpsc::Receiver<Queued>,
    sender: Queue,
    options: Arc<ZmqSourceOptions>,
    tasks: Tasks,
    replay: Option<(u64, DropGuard)>,
    _subscription: DropGuard,
}

impl ZmqSource {
    /// Begins to listen.
    #[must_use]
    pub fn start(tasks: &Tasks, options: ZmqSourceOptions) -> Self {
        let limits = &options.limits;
        let bytes_max = limits.queue_bytes_max.min(Semaphore::MAX_PERMITS);
        let (sender, queue) = mpsc::channel(limits.queue_messages_max.max(1));
        let sender = Queue {
            sender,
            bytes: Arc::new(Semaphore::new(bytes_max)),
            bytes_max,
        };
        let options = Arc::new(options);
        let stop = CancellationToken::new();
        let subscription = subscribe(Arc::clone(&options), sender.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(subscription));
        Self {
            queue,
            sender,
            options,
            tasks: tasks.clone(),
            replay: None,
            _subscription: stop.drop_guard(),
        }
    }
}

impl EventSource for ZmqSource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        match self.queue.poll_recv(cx) {
            Poll::Ready(Some((event, _share))) => Poll::Ready(event),
            // Never `None`: this end holds a sender too.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    fn replay(&mut self, attempt: u64, from: u64) {
        let stop = CancellationToken::new();
        let (options, queue) = (Arc::clone(&self.options), self.sender.clone());
        let replay = replay(options, queue, attempt, from);
        self.tasks
            .spawn(stop.clone().run_until_cancelled_owned(replay));
        self.replay = Some((attempt, stop.drop_guard()));
    }

    fn cancel_replay(&mut self, attempt: u64) {
        self.replay.take_if(|(running, _)| *running == attempt);
    }
}

async fn connect(
    endpoint: &Endpoint,
    roles: Roles,
    limits: &ZmqLimits,
) -> Result<(LinkReader, LinkWriter), LinkError> {
    let connecting = TcpStream::connect(endpoint.connect_address());
    let stream = timeout(limits.connect_timeout, connecting).await;
    let stream = stream.map_err(|_| LinkError::Silent)??;
    handshake(stream, roles, limits).await
}

/// Listens for ever; says each change once.
async fn subscribe(options: Arc<ZmqSourceOptions>, queue: Queue) {
    // Routers that lost one engine together shall not come back together.
    let name = options.events.to_string();
    let own = u64::from(std::process::id());
    let seed = name
        .bytes()
        .fold(own, |n, b| n.wrapping_mul(31) + u64::from(b));
    let mut rng = Rng::new(seed);
    let mut pause = options.reconnect;
    let mut said: Option<SourceFault> = None;
    let mut messages = MessageReader::new(&options);
    loop {
        let (connected, error) = listen(&options, &queue, &mut messages).await;
        if connected {
            pause = options.reconnect;
            said = None;
        }
        let fault = error.fault(connected);
        // Whoever counts the time that the engine is away is told that it is not the engine, each time.
        let is_local = matches!(fault, SourceFault::Local(_));
        if is_local || said.as_ref() != Some(&fault) {
            let event = SourceEvent::Disconnected(fault.clone());
            if queue.push(event, 0).await.is_err() {
                return;
            }
            said = Some(fault);
        }
        sleep(pause.mul_f64(0.5 + rng.unit())).await;
        pause = (pause * 2).min(options.reconnect_max);
    }
}

/// One connection, from its making to its end. Says whether it stood.
async fn listen(
    options: &ZmqSourceOptions,
    queue: &Queue,
    messages: &mut MessageReader,
) -> (bool, LinkError) {
    let made = connect(&options.events, SUB, &options.limits).await;
    let (reader, mut writer) = match made {
        Ok(halves) => halves,
        Err(error) => return (false, error),
    };
    let mut subscription = vec![1];
    subscription.extend_from_slice(options.topic.as_bytes());
    if let Err(error) = writer.message(&[subscription]).await {
        return (false, error);
    }
    if let Err(error) = queue.push(SourceEvent::Connected, 0).await {
        return (true, error);
    }
    let ended = read(options, queue, reader, writer, messages).await;
    (true, ended.err().unwrap_or(LinkError::Silent))
}

async fn read(
    options: &ZmqSourceOptions,
    queue: &Queue,
    mut reader: LinkReader,
    mut writer: LinkWriter,
    messages: &mut MessageReader,
) -> Result<(), LinkError> {
    let mut silences = 0;
    loop {
        let Ok(item) = timeout(options.limits.heartbeat, reader.next()).await else {
            silences += 1;
            if silences > 2 && writer.heartbeats {
                return Err(LinkError::Silent);
            }
            if writer.heartbeats {
                writer.ping().await?;
            }
            continue;
        };
        silences = 0;
        match item? {
            Item::Message(parts) => {
                let size = parts.iter().map(Bytes::len).sum();
                if let Some(event) = messages.read(&parts) {
                    queue.push(event, size).await?;
                }
            }
            Item::Ping(context) => writer.pong(&context).await?,
            Item::Ready(_) | Item::Error(_) | Item::Pong | Item::Subscribe(..) | Item::Other => {}
        }
    }
}

/// Makes events of messages; knows what came before.
enum MessageReader {
    Engine,
    EventPlane(PlaneReader),
    TopicAndPayload(String),
}

impl MessageReader {
    fn new(options: &ZmqSourceOptions) -> Self {
        match options.framing {
            ZmqFraming::Engine => Self::Engine,
            ZmqFraming::EventPlane => Self::EventPlane(PlaneReader::new(&options.topic)),
            ZmqFraming::TopicAndPayload => Self::TopicAndPayload(options.topic.clone()),
        }
    }

    /// What a message says; nothing if it is for others, or came before.
    fn read(&mut self, parts: &[Bytes]) -> Option<SourceEvent> {
        let read = match self {
            Self::Engine => parse_live(parts).map(Some),
            Self::EventPlane(plane) => plane.read_parts(parts),
            Self::TopicAndPayload(topic) => match parts {
                [of, payload] => Ok((of[..] == *topic.as_bytes()).then(|| Frame {
                    sequence: 0,
                    payload: payload.clone(),
                })),
                _ => Err(DecodeError::Parts {
                    found: parts.len(),
                    expected: 2,
                }),
            },
        };
        match read {
            Ok(frame) => frame.map(SourceEvent::Live),
            Err(error) => Some(SourceEvent::Refused(error)),
        }
    }
}

async fn replay(options: Arc<ZmqSourceOptions>, queue: Queue, attempt: u64, from: u64) {
    let event = match replay_parts(&options, &queue, attempt, from).await {
        Ok(()) => SourceEvent::ReplayEnded { attempt },
        Err(fault) => SourceEvent::ReplayFailed { attempt, fault },
    };
    let _ = queue.push(event, 0).await;
}

async fn replay_parts(
    options: &ZmqSourceOptions,
    queue: &Queue,
    attempt: u64,
    from: u64,
) -> Result<(), SourceFault> {
    let endpoint = options.replay.as_ref().ok_or(SourceFault::NoReplay)?;
    let made = connect(endpoint, DEALER, &options.limits).await;
    let (mut reader, mut writer) = made.map_err(|error| error.fault(false))?;
    let fault = |error: LinkError| error.fault(true);
    let request: [&[u8]; 2] = [b"", &from.to_be_bytes()];
    writer.message(&request).await.map_err(fault)?;
    loop {
        match reader.next().await.map_err(fault)? {
            Item::Message(parts) => {
                let size = parts.iter().map(Bytes::len).sum();
                let part = parse_replay(&parts);
                match part.map_err(|error| SourceFault::Protocol(error.to_string()))? {
                    ReplayPart::End => return Ok(()),
                    ReplayPart::Frame(frame) => {
                        let event = SourceEvent::Replayed { attempt, frame };
                        queue.push(event, size).await.map_err(fault)?;
                    }
                }
            }
            Item::Ping(context) => writer.pong(&context).await.map_err(fault)?,
            Item::Ready(_) | Item::Error(_) | Item::Pong | Item::Subscribe(..) | Item::Other => {}
        }
    }
}
