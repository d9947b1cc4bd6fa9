//! Links between replicas that name each other, without a broker (`--router-peers`).
//!
//! Answers one question: how do replicas that share static workers stay in step? Every two of them have one connection, authenticated by a
//! shared secret (`secure`). When it opens, each says what it has under way; from then on what changes; and now and then what each rank's
//! part of its index holds (`agreement`). One that starts takes the index of the first that answers.
//!
//! What always holds: two replicas have one connection, the one that the smaller id dialed; what a peer had booked goes with its
//! connection; a peer that does not keep up loses its connection and begins anew, so nothing is lost between two that are connected; a
//! peer that is dead holds up nobody.

mod agreement;
mod connection;
mod found;
mod message;
mod secure;

pub use found::PeerStore;
pub use message::WorkerNote;
pub use secure::PeerSecret;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use kvasir_router::ReplicaId;
use kvasir_types::Time;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{NEWS_MAX, ReplicaNews, Replicas, RoutedNews, lock, translate};
use crate::log_limit::LogLimit;
use agreement::Agreement;
use connection::Ended;
use message::LinkMessage;
use secure::{Introduction, Side};

/// Messages that wait for a peer; one that lets more wait loses its connection.
const QUEUE_MAX: usize = 16_384;
/// Events in one message.
const BATCH_MAX: usize = 256;
/// Bytes of a snapshot in one message.
const PART_BYTES: usize = 256 << 10;
/// Between two tries to reach a peer.
const DIAL_EVERY: Duration = Duration::from_secs(1);
/// Between two questions for the addresses of a name.
const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// What a connection may take to open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses of one name that are dialed.
const ADDRESSES_MAX: usize = 256;
/// Words about workers that wait until this process can take them; the oldest go first.
const EARLY_NOTES_MAX: usize = 16_384;
/// Connections that are being opened by others at once.
const OPENING_MAX: usize = 64;

/// What [`ReplicaFleet::snapshot`] returns.
pub type SnapshotFuture<'a> = Pin<Box<dyn Future<Output = Option<Vec<u8>>> + Send + 'a>>;

/// What a link needs of the process around it.
pub trait ReplicaFleet: Send + Sync + 'static {
    /// The index, as a snapshot file holds it; `None` if there is nothing to tell yet.
    fn snapshot(&self) -> SnapshotFuture<'_>;

    /// What operators said of workers, here or elsewhere.
    fn notes(&self) -> Vec<WorkerNote>;

    /// What operators said of workers elsewhere. Returns what of it was news, to be passed on.
    fn heard(&self, notes: Vec<WorkerNote>) -> Vec<WorkerNote>;
}

/// Whom to reach, and by which secret.
#[derive(Debug)]
pub struct PeerOptions {
    /// What all replicas know.
    pub secret: PeerSecret,
    /// Where to listen; nowhere, if others are only dialed.
    pub listen: Option<SocketAddr>,
    /// A listener there that a process had which this one replaces.
    pub opened: Option<std::net::TcpListener>,
    /// Names and ports. Each address of a name is a peer, so one name can stand for all replicas, this one included.
    pub peers: Vec<String>,
    /// Where replicas find each other besides.
    pub store: Option<PeerStore>,
}

/// A connected peer, as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRow {
    /// Its id.
    pub id: ReplicaId,
    /// Where it is.
    pub address: String,
    /// Since when it is connected.
    pub since: Time,
    /// Ranks of which both hold the same, where they could be compared.
    pub ranks_agreed: usize,
    /// Ranks of which they do not.
    pub ranks_differing: usize,
}

/// The links of this process. Clones are one.
#[derive(Clone)]
pub struct PeerLinks {
    inner: Arc<Inner>,
}

struct Inner {
    replicas: Replicas,
    own: Introduction,
    secret: PeerSecret,
    fleet: OnceLock<Arc<dyn ReplicaFleet>>,
    /// What peers said of workers before there was a fleet to tell.
    early_notes: Mutex<Vec<WorkerNote>>,
    open: Mutex<BTreeMap<ReplicaId, Link>>,
    /// Lines about those that are refused, which may try for ever.
    log_limit: Mutex<LogLimit>,
    /// Counts connections.
    made: AtomicU64,
    /// Something opened, closed or failed.
    changed: Notify,
    /// Names and addresses of which it is not known yet whether they can be reached.
    untried: AtomicUsize,
    /// Who waits for an index.
    fetching: Mutex<Option<(ReplicaId, mpsc::Sender<IndexPart>)>>,
    agreement: Mutex<Agreement>,
    /// Where it listens, and a copy of the listener.
    listener: OnceLock<(SocketAddr, OwnedFd)>,
    /// A process that replaces this one accepts at its port.
    has_left: watch::Sender<bool>,
}

/// A part of a snapshot, and whether it is the last.
type IndexPart = (bool, Vec<u8>);

/// A listener of another process, on this runtime.
fn adopt(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// A connection that is open.
struct Link {
    queue: mpsc::Sender<Bytes>,
    peer: Introduction,
    address: String,
    since: Time,
    number: u64,
    stop: CancellationToken,
}

impl PeerLinks {
    /// Listens, dials, and tells what happens from now on.
    pub async fn start(replicas: &Replicas, options: PeerOptions) -> io::Result<Self> {
        let context = &replicas.shared.context;
        let own = Introduction {
            id: replicas.id(),
            began: context.clock.unix_nanos(Time::ZERO),
        };
        let links = Self {
            inner: Arc::new(Inner {
                replicas: replicas.clone(),
                own,
                secret: options.secret,
                fleet: OnceLock::new(),
                early_notes: Mutex::default(),
                open: Mutex::default(),
                log_limit: Mutex::default(),
                made: AtomicU64::new(0),
                changed: Notify::new(),
                untried: AtomicUsize::new(0),
                fetching: Mutex::default(),
                agreement: Mutex::default(),
                listener: OnceLock::new(),
                has_left: watch::Sender::new(false),
            }),
        };
        let tasks = context.tasks.background();
        if let Some(address) = options.listen {
            let opened = match options.opened {
                Some(opened) => adopt(opened),
                None => TcpListener::bind(address).await,
            };
            match opened {
                Ok(listener) => links.listen_on(listener)?,
                // The process that this one takes over from ends later.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    tracing::warn!(%address, "another process listens for replicas here; it is tried until it has ended: see --router-peer-listen");
                    tasks.spawn(links.clone().listen_later(address));
                }
                Err(error) => return Err(error),
            }
        }
        let (news, waiting) = mpsc::channel(NEWS_MAX);
        let _ = replicas.shared.links.set(news);
        tasks.spawn(links.clone().tell_all(waiting));
        tasks.spawn(links.clone().keep_agreeing());
        for peer in options.peers {
            let trial = Trial::new(&links);
            let never = CancellationToken::new();
            tasks.spawn(links.clone().follow_name(peer, trial, never));
        }
        if let Some(found) = options.store {
            let trial = Trial::new(&links);
            tasks.spawn(links.clone().follow_store(found.clone(), trial));
            // Waited for when the process ends: what it wrote is taken back.
            context.tasks.spawn(links.clone().announce(found));
        }
        Ok(links)
    }

    /// What the links need of the process around them; until then they tell of no index and of no workers, and keep what they hear.
    pub fn serve(&self, fleet: Arc<dyn ReplicaFleet>) {
        let mut early = lock(&self.inner.early_notes);
        if self.inner.fleet.set(fleet).is_ok() {
            let heard = std::mem::take(&mut *early);
            drop(early);
            self.tell_notes(&self.notes());
            self.hear_notes(heard);
        }
    }

    /// What operators said of workers elsewhere: news are passed on.
    fn hear_notes(&self, mut notes: Vec<WorkerNote>) {
        let mut early = lock(&self.inner.early_notes);
        let Some(fleet) = self.inner.fleet.get() else {
            early.append(&mut notes);
            let excess = early.len().saturating_sub(EARLY_NOTES_MAX);
            early.drain(..excess);
            return;
        };
        drop(early);
        self.tell_notes(&fleet.heard(notes));
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.inner.listener.get().map(|(address, _)| *address)
    }

    /// A copy of the listener, for a process that replaces this one; none if it does not listen.
    pub fn share(&self) -> io::Result<Option<OwnedFd>> {
        let listener = self.inner.listener.get();
        listener.map(|(_, copy)| copy.try_clone()).transpose()
    }

    /// Lets the other process alone accept what comes to the port that both have, or not any more.
    pub fn set_left(&self, has_left: bool) {
        self.inner.has_left.send_replace(has_left);
    }

    /// The peers that are connected, by id.
    #[must_use]
    pub fn rows(&self) -> Vec<PeerRow> {
        let agreement = lock(&self.inner.agreement);
        let open = lock(&self.inner.open);
        let row = |link: &Link| {
            let (ranks_agreed, ranks_differing) = agreement.counts(link.peer.id);
            PeerRow {
                id: link.peer.id,
                address: link.address.clone(),
                since: link.since,
                ranks_agreed,
                ranks_differing,
            }
        };
        open.values().map(row).collect()
    }

    /// Tells all peers what operators said of workers.
    pub fn tell_notes(&self, notes: &[WorkerNote]) {
        if !notes.is_empty() {
            self.send_all(&LinkMessage::Workers(notes.to_vec()));
        }
    }

    /// The index of a peer: of the first that is reached and has one. Gives up after `timeout`, with a peer that sends more than
    /// `bytes_max`, and as soon as nobody can be reached.
    pub async fn fetch_index(&self, timeout: Duration, bytes_max: u64) -> Option<Vec<u8>> {
        let mut asked = BTreeSet::new();
        let fetch = async {
            loop {
                let changed = self.inner.changed.notified();
                let open: Vec<ReplicaId> = lock(&self.inner.open).keys().copied().collect();
                let next = open.into_iter().find(|peer| !asked.contains(peer));
                if let Some(peer) = next {
                    asked.insert(peer);
                    match self.fetch_from(peer, bytes_max).await {
                        Some(bytes) => return Some(bytes),
                        None => continue,
                    }
                }
                if self.inner.untried.load(Ordering::Acquire) == 0 {
                    return None;
                }
                changed.await;
            }
        };
        let fetched = tokio::time::timeout(timeout, fetch).await;
        *lock(&self.inner.fetching) = None;
        fetched.unwrap_or_default()
    }

    async fn fetch_from(&self, peer: ReplicaId, bytes_max: u64) -> Option<Vec<u8>> {
        let (parts, mut received) = mpsc::channel(4);
        *lock(&self.inner.fetching) = Some((peer, parts));
        self.send(peer, &LinkMessage::AskIndex);
        let mut bytes = Vec::new();
        while let Some((last, part)) = received.recv().await {
            bytes.extend(part);
            if bytes.len() as u64 > bytes_max {
                tracing::warn!(
                    replica = peer.0,
                    bytes_max,
                    "a replica's index is too large to be taken over"
                );
                return None;
            }
            if last {
                return (!bytes.is_empty()).then_some(bytes);
            }
        }
        None
    }

    async fn accept(self, listener: TcpListener) {
        let opening = Arc::new(tokio::sync::Semaphore::new(OPENING_MAX));
        let mut left = self.inner.has_left.subscribe();
        loop {
            let Ok(permit) = Arc::clone(&opening).acquire_owned().await else {
                return;
            };
            let has_left = *left.borrow_and_update();
            let accepted = tokio::select! {
                accepted = listener.accept(), if !has_left => accepted,
                _ = left.changed() => continue,
            };
            match accepted {
                Ok((stream, address)) => {
                    let links = self.clone();
                    let tasks = self.inner.replicas.shared.context.tasks.background();
                    tasks.spawn(async move {
                        let ended = links
                            .connect(stream, Side::Acceptor, address.to_string(), Some(permit))
                            .await;
                        if let Ended::Lost(error) = ended {
                            tracing::debug!(%address, %error, "a connection of a replica has ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection of a replica can be taken");
                    tokio::time::sleep(DIAL_EVERY).await;
                }
            }
        }
    }

    fn listen_on(&self, listener: TcpListener) -> io::Result<()> {
        let address = listener.local_addr()?;
        let copy = listener.as_fd().try_clone_to_owned()?;
        let _ = self.inner.listener.set((address, copy));
        let tasks = self.inner.replicas.shared.context.tasks.background();
        tasks.spawn(self.clone().accept(listener));
        tracing::info!(%address, replica = self.inner.own.id.0, "listening for other replicas");
        Ok(())
    }

    async fn listen_later(self, address: SocketAddr) {
        loop {
            tokio::time::sleep(DIAL_EVERY).await;
            if let Ok(listener) = TcpListener::bind(address).await
                && self.listen_on(listener).is_ok()
            {
                return;
            }
        }
    }

    /// Dials every address of a name, and those that come later, until it is stopped.
    async fn follow_name(self, name: String, trial: Trial, stop: CancellationToken) {
        let (mut dialed, mut said) = (BTreeSet::new(), false);
        let mut trial = Some(trial);
        loop {
            match tokio::net::lookup_host(&name).await {
                Ok(found) => {
                    said = false;
                    for address in found.take(ADDRESSES_MAX) {
                        if dialed.len() < ADDRESSES_MAX && dialed.insert(address) {
                            let trial = Trial::new(&self);
                            let dial =
                                self.clone()
                                    .dial(address, name.clone(), trial, stop.clone());
                            let tasks = &self.inner.replicas.shared.context.tasks;
                            tasks.background().spawn(dial);
                        }
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(peer = name, %error, "a peer has no address; it is looked for until it has: see --router-peers");
                    }
                }
            }
            drop(trial.take());
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(RESOLVE_EVERY) => {}
            }
        }
    }

    /// Keeps a connection to an address, unless it is this process's own, until it is stopped; one that is open stays.
    async fn dial(self, address: SocketAddr, name: String, trial: Trial, stop: CancellationToken) {
        let (mut trial, mut said) = (Some(trial), false);
        loop {
            let stream = tokio::time::timeout(OPEN_TIMEOUT, TcpStream::connect(address)).await;
            let ended = match stream.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(stream) => {
                    let side = Side::Dialer;
                    self.connect(stream, side, name.clone(), trial.take()).await
                }
                Err(error) => {
                    trial = None;
                    Ended::Lost(error)
                }
            };
            match ended {
                Ended::Own => return,
                Ended::Duplicate(peer) => self.until_gone(peer).await,
                Ended::Lost(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::info!(peer = name, %address, %error, "a peer is not connected; it is tried until it is");
                    }
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(DIAL_EVERY) => {}
            }
        }
    }

    async fn until_gone(&self, peer: ReplicaId) {
        loop {
            let changed = self.inner.changed.notified();
            if !lock(&self.inner.open).contains_key(&peer) {
                return;
            }
            changed.await;
        }
    }

    /// Tells all peers what routers do, in order.
    async fn tell_all(self, mut news: mpsc::Receiver<RoutedNews>) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while news.recv_many(&mut batch, BATCH_MAX).await > 0 {
            if lock(&self.inner.open).is_empty() {
                batch.clear();
                continue;
            }
            // As they happened: one message as long as router and kind stay the same.
            let mut gathered: Option<LinkMessage> = None;
            for (router, news) in batch.drain(..) {
                let next = self.message_of(&router, &news);
                let apart = match &mut gathered {
                    None => Some(next),
                    Some(before) => joined(before, next),
                };
                if let Some(next) = apart
                    && let Some(before) = gathered.replace(next)
                {
                    self.send_all(&before);
                }
            }
            if let Some(last) = gathered {
                self.send_all(&last);
            }
        }
    }

    fn message_of(&self, router: &str, news: &ReplicaNews) -> LinkMessage {
        let (id, clock) = (self.inner.own.id, &self.inner.replicas.shared.context.clock);
        let router = router.to_owned();
        match news {
            ReplicaNews::Request(event) => LinkMessage::Requests {
                router,
                recalled: false,
                events: vec![translate::told(event, id)],
            },
            ReplicaNews::Session {
                id: session,
                target,
                since,
            } => LinkMessage::Sessions {
                router,
                bindings: vec![translate::told_session(session, *target, *since, id, clock)],
            },
        }
    }

    fn notes(&self) -> Vec<WorkerNote> {
        let fleet = self.inner.fleet.get();
        fleet.map(|fleet| fleet.notes()).unwrap_or_default()
    }

    /// Says something to every peer. One that has no room for it loses its connection.
    fn send_all(&self, message: &LinkMessage) {
        let bytes = Bytes::from(message.encode());
        for link in lock(&self.inner.open).values() {
            self.push(link, bytes.clone());
        }
    }

    fn send(&self, peer: ReplicaId, message: &LinkMessage) {
        if let Some(link) = lock(&self.inner.open).get(&peer) {
            self.push(link, Bytes::from(message.encode()));
        }
    }

    fn push(&self, link: &Link, bytes: Bytes) {
        match link.queue.try_send(bytes) {
            Ok(()) => self.inner.replicas.count("sent", 1),
            Err(_) => {
                self.inner.replicas.count("dropped", 1);
                link.stop.cancel();
            }
        }
    }

    fn number(&self) -> u64 {
        self.inner.made.fetch_add(1, Ordering::Relaxed)
    }
}

/// Holds back the verdict that nobody can be reached, until it is dropped.
struct Trial(PeerLinks);

impl Trial {
    fn new(links: &PeerLinks) -> Self {
        links.inner.untried.fetch_add(1, Ordering::AcqRel);
        Self(links.clone())
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.0.inner.untried.fetch_sub(1, Ordering::AcqRel);
        self.0.inner.changed.notify_waiters();
    }
}

/// Adds a message to one of the same kind and router; if it is of another, gives it back.
fn joined(before: &mut LinkMessage, next: LinkMessage) -> Option<LinkMessage> {
    match (before, next) {
        (
            LinkMessage::Requests { router, events, .. },
            LinkMessage::Requests {
                router: same,
                events: more,
                ..
            },
        ) if *router == same => {
            events.extend(more);
            None
        }
        (_, next) => Some(next),
    }
}

#[cfg(test)]
mod tests;
