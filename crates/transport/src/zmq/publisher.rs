//! A PUB socket: what a mock engine publishes reaches whoever subscribed.
//!
//! As every PUB does, it never waits: a subscriber whose queue is full misses messages.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use kvasir_tasks::Tasks;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::codec::{Item, put_message, subscription};
use super::connection::{LinkError, LinkReader, LinkWriter, Roles, handshake};
use super::{Endpoint, ZmqLimits};
use crate::listen::BoundedListener;

const PUB: Roles = Roles {
    own: "PUB",
    peers: &["SUB", "XSUB"],
};

/// A message, encoded once for all subscribers, and its topic.
#[derive(Clone, Debug)]
struct Outgoing {
    topic: Bytes,
    encoded: Bytes,
}

#[derive(Debug, Default)]
struct Peers {
    next: u64,
    queues: HashMap<u64, mpsc::Sender<Outgoing>>,
    /// Peers whose subscription stands.
    subscribed: usize,
    dropped: u64,
}

type Shared = Arc<Mutex<Peers>>;

fn lock(peers: &Shared) -> std::sync::MutexGuard<'_, Peers> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A bound PUB socket. Dropping it closes it and its connections.
#[derive(Debug)]
pub struct ZmqPublisher {
    peers: Shared,
    address: SocketAddr,
    _stop: DropGuard,
}

impl ZmqPublisher {
    /// Binds; port 0 takes a free one.
    pub async fn bind(tasks: &Tasks, endpoint: &Endpoint, limits: ZmqLimits) -> io::Result<Self> {
        let listener = TcpListener::bind(endpoint.bind_address()).await?;
        let address = listener.local_addr()?;
        let peers = Shared::default();
        let stop = CancellationToken::new();
        let accept = accept(
            listener,
            Arc::clone(&peers),
            tasks.clone(),
            limits,
            stop.clone(),
        );
        tasks.spawn(stop.clone().run_until_cancelled_owned(accept));
        Ok(Self {
            peers,
            address,
            _stop: stop.drop_guard(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends a message to whoever subscribed to its first part. Returns how many subscribers' queues
    /// were full and missed it.
    pub fn publish(&self, parts: &[Bytes]) -> usize {
        send(&self.peers, parts)
    }

    /// The same, to be called later; does nothing once the socket is closed.
    pub fn later(&self, parts: Vec<Bytes>) -> impl FnOnce() + Send + 'static {
        let peers = Arc::downgrade(&self.peers);
        move || {
            if let Some(peers) = peers.upgrade() {
                send(&peers, &parts);
            }
        }
    }

    /// Closes every connection, as the end of a process does; subscribers may come back.
    pub fn disconnect_all(&self) {
        lock(&self.peers).queues.clear();
    }

    /// Subscribers whose subscription stands.
    #[must_use]
    pub fn subscribers(&self) -> usize {
        lock(&self.peers).subscribed
    }

    /// Messages that a slow subscriber missed.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        lock(&self.peers).dropped
    }
}

fn send(peers: &Shared, parts: &[Bytes]) -> usize {
    let mut encoded = BytesMut::new();
    put_message(parts, &mut encoded);
    let message = Outgoing {
        topic: parts.first().cloned().unwrap_or_default(),
        encoded: encoded.freeze(),
    };
    let mut peers = lock(peers);
    let send = |queue: &&mpsc::Sender<Outgoing>| queue.try_send(message.clone()).is_err();
    let missed = peers.queues.values().filter(send).count();
    peers.dropped += missed as u64;
    missed
}

async fn accept(
    listener: TcpListener,
    peers: Shared,
    tasks: Tasks,
    limits: ZmqLimits,
    stop: CancellationToken,
) {
    let listener = BoundedListener::new(listener, limits.peers_max);
    loop {
        let (stream, permit) = listener.accept().await;
        let (peers, limits) = (Arc::clone(&peers), limits.clone());
        let peer = async move {
            let _permit = permit;
            serve(stream, peers, limits).await;
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(peer));
    }
}

/// Takes the peer out of the list whatever ends it.
struct Registration {
    peers: Shared,
    id: u64,
    subscribed: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut peers = lock(&self.peers);
        peers.queues.remove(&self.id);
        peers.subscribed -= usize::from(self.subscribed);
    }
}

impl Registration {
    fn new(peers: Shared, queue: mpsc::Sender<Outgoing>) -> Self {
        let mut locked = lock(&peers);
        let id = locked.next;
        locked.next += 1;
        locked.queues.insert(id, queue);
        drop(locked);
        let subscribed = false;
        Self {
            peers,
            id,
            subscribed,
        }
    }

    fn subscribed(&mut self, now: bool) {
        let mut peers = lock(&self.peers);
        peers.subscribed -= usize::from(self.subscribed);
        peers.subscribed += usize::from(now);
        self.subscribed = now;
    }
}

async fn serve(stream: TcpStream, peers: Shared, limits: ZmqLimits) {
    let Ok((reader, writer)) = handshake(stream, PUB, &limits).await else {
        return;
    };
    let (sender, queue) = mpsc::channel(limits.queue_messages_max.max(1));
    let mut registration = Registration::new(peers, sender);
    let _ = relay(reader, writer, queue, &mut registration).await;
}

async fn relay(
    mut reader: LinkReader,
    mut writer: LinkWriter,
    mut queue: mpsc::Receiver<Outgoing>,
    registration: &mut Registration,
) -> Result<(), LinkError> {
    let mut topics: Vec<Bytes> = Vec::new();
    loop {
        let item = tokio::select! {
            biased;
            item = reader.next() => item?,
            message = queue.recv() => {
                // Taken out of the list: the socket was told to let everybody go.
                let Some(message) = message else {
                    return Ok(());
                };
                if topics.iter().any(|topic| message.topic.starts_with(topic)) {
                    writer.encoded(&message.encoded).await?;
                }
                continue;
            }
        };
        let change = match item {
            Item::Subscribe(topic, begin) => Some((topic, begin)),
            Item::Message(parts) => subscription(&parts),
            Item::Ping(context) => {
                writer.pong(&context).await?;
                None
            }
            Item::Ready(_) | Item::Error(_) | Item::Pong | Item::Other => None,
        };
        if let Some((topic, begin)) = change {
            subscribe(&mut topics, topic, begin);
            registration.subscribed(!topics.is_empty());
        }
    }
}

/// Topics of one subscriber; more are ignored.
const TOPICS_MAX: usize = 64;

fn subscribe(topics: &mut Vec<Bytes>, topic: Bytes, begin: bool) {
    if begin && topics.len() < TOPICS_MAX {
        topics.push(topic);
    } else if let Some(at) = topics.iter().position(|t| *t == topic) {
        topics.swap_remove(at);
    }
}
