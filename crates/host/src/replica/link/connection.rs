//! One connection: how it opens, what is said on it, and what its end means.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use kvasir_router::ReplicaId;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::message::LinkMessage;
use super::secure::{self, Introduction, SecureReader, SecureWriter, Side};
use super::{BATCH_MAX, Link, OPEN_TIMEOUT, PART_BYTES, PeerLinks, QUEUE_MAX, lock};

/// A sign of life at least this often.
const PING_EVERY: Duration = Duration::from_secs(1);
/// A peer that is silent for so long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// A peer that does not take what is said for so long is gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Parts of an index that wait to be sent at once.
const PARTS_WAITING_MAX: usize = 8;
/// Between two looks whether there is room for the next.
const PART_PAUSE: Duration = Duration::from_millis(2);

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// Its other end is this very process.
    Own,
    /// There is another one to this peer.
    Duplicate(ReplicaId),
    /// It broke, or never stood.
    Lost(io::Error),
}

impl PeerLinks {
    /// Opens a connection and keeps it until it ends; `opening` is dropped when it stands.
    pub(super) async fn connect(
        &self,
        stream: TcpStream,
        side: Side,
        address: String,
        opening: Option<impl Send>,
    ) -> Ended {
        let _ = stream.set_nodelay(true);
        let (own, secret) = (self.inner.own, &self.inner.secret);
        let (from, to) = stream.into_split();
        let introduced = secure::introduce(from, to, side, own, secret);
        let introduced = tokio::time::timeout(OPEN_TIMEOUT, introduced).await;
        let introduced = introduced.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let (peer, reader, writer) = match introduced {
            Ok(introduced) => introduced,
            Err(error) => {
                let now = self.inner.replicas.shared.context.clock.now();
                if error.kind() == io::ErrorKind::PermissionDenied
                    && let Some(withheld) = lock(&self.inner.log_limit).admit(now, "refused")
                {
                    tracing::warn!(peer = address, %error, withheld, "a replica is refused: is --router-peer-secret-file the same everywhere?");
                }
                return Ended::Lost(error);
            }
        };
        if peer.id == own.id {
            return Ended::Own;
        }
        let (queue, waiting) = mpsc::channel(QUEUE_MAX);
        let stop = CancellationToken::new();
        let link = Link {
            queue,
            peer,
            address: address.clone(),
            since: self.inner.replicas.shared.context.clock.now(),
            number: self.number(),
            stop: stop.clone(),
        };
        let number = link.number;
        if !self.register(link, side) {
            return Ended::Duplicate(peer.id);
        }
        drop(opening);
        self.begin(peer.id);
        tracing::info!(
            replica = peer.id.0,
            peer = address,
            "a replica is connected"
        );
        let error = tokio::select! {
            error = self.listen(peer, reader) => error,
            error = speak(writer, waiting) => error,
            () = stop.cancelled() => io::Error::other("it did not keep up, or there is a better one"),
        };
        self.end(peer, number, &error);
        Ended::Lost(error)
    }

    /// Notes a connection. False if there is one that counts more.
    fn register(&self, link: Link, side: Side) -> bool {
        let (own, peer) = (self.inner.own.id, link.peer.id);
        let counts_more = (side == Side::Dialer) == (own < peer);
        let mut open = lock(&self.inner.open);
        if let Some(other) = open.get(&peer) {
            if !counts_more {
                return false;
            }
            other.stop.cancel();
        }
        open.insert(peer, link);
        drop(open);
        // What an earlier connection told is told again.
        self.inner.replicas.reset(peer);
        self.inner.replicas.meet(peer);
        self.inner.changed.notify_waiters();
        true
    }

    fn end(&self, peer: Introduction, number: u64, error: &io::Error) {
        let mut open = lock(&self.inner.open);
        if open.get(&peer.id).is_none_or(|link| link.number != number) {
            return;
        }
        open.remove(&peer.id);
        drop(open);
        tracing::info!(replica = peer.id.0, %error, "a replica is not connected any more");
        self.inner.replicas.lost(peer.id);
        lock(&self.inner.agreement).forget(peer.id);
        let mut fetching = lock(&self.inner.fetching);
        fetching.take_if(|(from, _)| *from == peer.id);
        drop(fetching);
        self.inner.changed.notify_waiters();
    }

    /// Says what is under way here.
    fn begin(&self, peer: ReplicaId) {
        for host in self.inner.replicas.hosts() {
            let router = host.name().to_string();
            let (requests, sessions) = self.inner.replicas.in_flight_of(&host);
            for events in requests.chunks(BATCH_MAX) {
                let (router, events) = (router.clone(), events.to_vec());
                let recalled = true;
                self.send(
                    peer,
                    &LinkMessage::Requests {
                        router,
                        recalled,
                        events,
                    },
                );
            }
            for bindings in sessions.chunks(BATCH_MAX * 16) {
                let (router, bindings) = (router.clone(), bindings.to_vec());
                self.send(peer, &LinkMessage::Sessions { router, bindings });
            }
        }
        let notes = self.notes();
        if !notes.is_empty() {
            self.send(peer, &LinkMessage::Workers(notes));
        }
    }

    /// Hears a peer until it is silent for too long.
    async fn listen<R: tokio::io::AsyncRead + Unpin>(
        &self,
        peer: Introduction,
        mut reader: SecureReader<R>,
    ) -> io::Error {
        loop {
            let read = tokio::time::timeout(SILENCE_MAX, reader.read()).await;
            let payload = match read {
                Ok(Ok(payload)) => payload,
                Ok(Err(error)) => return error,
                Err(_) => return io::Error::new(io::ErrorKind::TimedOut, "it is silent"),
            };
            match LinkMessage::decode(&payload) {
                Ok(message) => self.hear(peer, message).await,
                Err(error) => return io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
            }
        }
    }

    async fn hear(&self, peer: Introduction, message: LinkMessage) {
        let replicas = &self.inner.replicas;
        match message {
            LinkMessage::Requests {
                router,
                recalled,
                events,
            } => {
                let theirs = events.iter().filter(|event| event.router == peer.id.0);
                theirs.for_each(|event| replicas.hear(event, Some(&router), recalled));
            }
            LinkMessage::Sessions { router, bindings } => {
                let theirs = bindings.iter().filter(|one| one.writer == peer.id.0);
                theirs.for_each(|binding| replicas.hear_session(binding, Some(&router)));
            }
            LinkMessage::Workers(notes) => self.hear_notes(notes),
            LinkMessage::AskIndex => self.answer_index(peer.id),
            LinkMessage::Index { last, bytes } => {
                let fetching = lock(&self.inner.fetching).clone();
                if let Some((_, parts)) = fetching.filter(|(from, _)| *from == peer.id) {
                    let _ = parts.send((last, bytes)).await;
                }
            }
            LinkMessage::Digests { router, ranks } => self.compare(peer, &router, &ranks),
            LinkMessage::AskRank { router, rank } => self.answer_rank(peer.id, router, rank),
            LinkMessage::Rank {
                router,
                rank,
                at,
                last,
                bytes,
            } => self.mend(peer.id, &router, rank, at, last, &bytes).await,
            LinkMessage::Ping => {}
        }
    }

    /// Sends the index, a part at a time and no faster than it is taken.
    fn answer_index(&self, peer: ReplicaId) {
        let links = self.clone();
        let tasks = self.inner.replicas.shared.context.tasks.background();
        tasks.spawn(async move {
            let snapshot = match links.inner.fleet.get() {
                Some(fleet) => fleet.snapshot().await,
                None => None,
            };
            let snapshot = snapshot.unwrap_or_default();
            tracing::debug!(
                replica = peer.0,
                bytes = snapshot.len(),
                "index asked for by a replica"
            );
            let count = snapshot.len().div_ceil(PART_BYTES).max(1);
            for number in 0..count {
                let end = snapshot.len().min((number + 1) * PART_BYTES);
                let part = snapshot.get(number * PART_BYTES..end).unwrap_or_default();
                let message = LinkMessage::Index {
                    last: number + 1 == count,
                    bytes: part.to_vec(),
                };
                if !links.send_waiting(peer, &message).await {
                    return;
                }
            }
        });
    }

    /// Says something that may wait for room. False if the peer is gone.
    pub(super) async fn send_waiting(&self, peer: ReplicaId, message: &LinkMessage) -> bool {
        let open = || {
            let open = lock(&self.inner.open);
            open.get(&peer).map(|link| link.queue.clone())
        };
        while let Some(queue) = open() {
            // Parts are large: few of them wait at a time, and news go between them.
            if queue.max_capacity() - queue.capacity() < PARTS_WAITING_MAX {
                return queue.try_send(Bytes::from(message.encode())).is_ok();
            }
            drop(queue);
            tokio::time::sleep(PART_PAUSE).await;
        }
        false
    }
}

/// Says what waits, and signs of life between.
async fn speak<W: AsyncWrite + Unpin>(
    mut writer: SecureWriter<W>,
    mut waiting: mpsc::Receiver<Bytes>,
) -> io::Error {
    let ping = LinkMessage::Ping.encode();
    loop {
        let next = tokio::time::timeout(PING_EVERY, waiting.recv()).await;
        let written = match &next {
            Ok(Some(bytes)) => writer.write(bytes),
            Ok(None) => return io::ErrorKind::BrokenPipe.into(),
            Err(_) => writer.write(&ping),
        };
        match tokio::time::timeout(WRITE_TIMEOUT, written).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error,
            Err(_) => return io::Error::new(io::ErrorKind::TimedOut, "it takes nothing"),
        }
    }
}
