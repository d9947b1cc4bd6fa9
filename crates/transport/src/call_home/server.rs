//! Where the answers of all workers come in.
//!
//! Every runtime that asks has a listener of its own, made when it asks first: the worker connects to the thread that waits, and
//! neither the socket nor the answer moves. Where a port is given there is one listener, and sockets are handed over. That listener can be shared with a
//! process that replaces this one ([`ResponseServer::share`]); connections that come to the wrong one are passed on ([`neighbours`](super::neighbours)).
//!
//! Invariants: a connection that does not name its answer in time is closed; one that names an answer nobody waits for is
//! told to stop and closed; connections that have not named theirs yet are bounded.

mod arrivals;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use kvasir_tasks::Tasks;
use kvasir_types::{RequestId, WorkerId};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Handle, Id};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::neighbours::{Link, Neighbours, Towards, pair};
use crate::{AnswerStep, PlaneError};
use arrivals::{Came, accept};

/// Answers that are waited for at once.
const EXPECTED_MAX: usize = 1 << 18;
/// Listeners of one process; runtimes beyond them use the first.
const LISTENERS_MAX: usize = 256;
/// Connections that wait to be accepted by one of them.
const BACKLOG: u32 = 1024;

/// Where and how answers are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseOptions {
    /// Where listeners are. With port 0 every runtime has one of its own.
    pub bind: SocketAddr,
    /// The host that workers are told, where it is not that of `bind`.
    pub advertise: Option<String>,
    /// Longest time from a connection to the name of its answer.
    pub handshake_timeout: Duration,
    /// Connections that have not named theirs yet.
    pub handshakes_max: usize,
}

impl Default for ResponseOptions {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
            advertise: None,
            handshake_timeout: Duration::from_secs(10),
            handshakes_max: 4096,
        }
    }
}

/// What the listener has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HomeCounts {
    /// Answers that reached whoever waited.
    pub arrived: u64,
    /// Answers that nobody waited for (any more).
    pub unexpected: u64,
    /// Connections that never said what they bring.
    pub nameless: u64,
    /// Connections closed at once: too many had not named theirs yet.
    pub refused: u64,
}

#[derive(Default)]
struct Counters {
    arrived: AtomicU64,
    unexpected: AtomicU64,
    nameless: AtomicU64,
    refused: AtomicU64,
}

/// An answer's connection, and what came after its first frame.
pub(super) struct Arrived {
    pub(super) caller: Caller,
    pub(super) buffer: BytesMut,
}

/// A worker's connection.
pub(super) enum Caller {
    /// It came to this runtime.
    Here(TcpStream, Id),
    /// It came to another one, and belongs to none on its way.
    Elsewhere(std::net::TcpStream),
}

impl Caller {
    /// The connection, on this runtime.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        match self {
            Self::Here(socket, _) => Ok(socket),
            Self::Elsewhere(socket) => TcpStream::from_std(socket),
        }
    }

    /// The connection, for whoever waits on this runtime.
    fn towards(self, runtime: Option<Id>) -> io::Result<Self> {
        match self {
            Self::Here(socket, here) if runtime != Some(here) => {
                socket.into_std().map(Self::Elsewhere)
            }
            caller => Ok(caller),
        }
    }
}

/// The listeners. Clones are one.
#[derive(Clone)]
pub struct ResponseServer {
    shared: Arc<Shared>,
    tasks: Tasks,
}

/// Who waits for an answer, and where.
struct Waiting {
    runtime: Option<Id>,
    sender: oneshot::Sender<Arrived>,
}

struct Shared {
    /// What workers are told, by the runtime that asks; never empty.
    homes: Mutex<Vec<(Id, Arc<str>)>>,
    expected: Mutex<HashMap<u128, Waiting>>,
    /// Makes subjects that nobody can guess.
    keys: RandomState,
    made: AtomicU64,
    counters: Counters,
    options: ResponseOptions,
    /// A copy of the listener, where a port is given.
    listener: Option<OwnedFd>,
    neighbours: Neighbours,
    /// Another process accepts at our port.
    has_left: watch::Sender<bool>,
}

/// A listener that another process is to share, and its end of the link between the two.
#[derive(Debug)]
pub struct SharedHome {
    /// Accepts what workers bring.
    pub listener: OwnedFd,
    /// Over it go connections that came to the wrong process.
    pub link: OwnedFd,
}

/// The address by which other machines reach this one, as far as it can be told without asking one.
#[must_use]
pub fn local_address() -> IpAddr {
    // No packet is sent: the kernel only looks up which address it would be sent from.
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    match found {
        Ok(address) if !address.ip().is_unspecified() => address.ip(),
        _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}

impl ResponseServer {
    /// Listens. The listeners end with `tasks`.
    pub async fn start(options: ResponseOptions, tasks: &Tasks) -> io::Result<Self> {
        let listener = TcpListener::bind(options.bind).await?;
        Self::serve(options, listener, tasks)
    }

    /// Listens at the port of a process that this one replaces.
    pub fn start_at(options: ResponseOptions, home: SharedHome, tasks: &Tasks) -> io::Result<Self> {
        let listener = std::net::TcpListener::from(home.listener);
        listener.set_nonblocking(true)?;
        let server = Self::serve(options, TcpListener::from_std(listener)?, tasks)?;
        server.link(Towards::Older, home.link)?;
        Ok(server)
    }

    fn serve(options: ResponseOptions, listener: TcpListener, tasks: &Tasks) -> io::Result<Self> {
        let first = told(&options, listener.local_addr()?);
        let copy = match options.bind.port() {
            0 => None,
            _ => Some(listener.as_fd().try_clone_to_owned()?),
        };
        let shared = Arc::new(Shared {
            homes: Mutex::new(vec![(Handle::current().id(), first)]),
            expected: Mutex::default(),
            keys: RandomState::new(),
            made: AtomicU64::new(0),
            counters: Counters::default(),
            options,
            listener: copy,
            neighbours: Neighbours::default(),
            has_left: watch::Sender::new(false),
        });
        let accepting = accept(Arc::clone(&shared), listener, tasks.clone());
        tasks.background().spawn(accepting);
        let tasks = tasks.clone();
        Ok(Self { shared, tasks })
    }

    /// What a process needs that is to replace this one; none if every runtime has a port of its own, which stays with it.
    pub fn share(&self) -> io::Result<Option<SharedHome>> {
        let Some(listener) = &self.shared.listener else {
            return Ok(None);
        };
        let listener = listener.try_clone()?;
        let (ours, link) = pair()?;
        self.link(Towards::Newer, ours)?;
        Ok(Some(SharedHome { listener, link }))
    }

    /// Whether there is something to share.
    #[must_use]
    pub fn is_shareable(&self) -> bool {
        self.shared.listener.is_some()
    }

    /// Lets the other process alone accept what comes to the port that both have, or not any more.
    pub fn set_left(&self, has_left: bool) {
        if self.shared.listener.is_some() {
            self.shared.has_left.send_replace(has_left);
        }
    }

    /// Takes connections that a neighbour passes on, as long as it is there.
    fn link(&self, side: Towards, socket: OwnedFd) -> io::Result<()> {
        let link = Arc::new(Link::new(socket)?);
        self.shared.neighbours.add(side, &link);
        let shared = Arc::clone(&self.shared);
        self.tasks.background().spawn(async move {
            while let Ok(Some(passed)) = link.receive().await {
                let came = Came {
                    subject: Some(passed.subject),
                    caller: Caller::Elsewhere(passed.socket),
                    buffer: passed.buffer,
                    from: Some(passed.towards),
                };
                if let Some(unwanted) = shared.hand_over(came) {
                    shared.send_on(unwanted).await;
                }
            }
            shared.neighbours.remove(&link);
        });
        Ok(())
    }

    /// What workers are told by requests of this runtime: `host:port`.
    #[must_use]
    pub fn address(&self) -> Arc<str> {
        let mut homes = self.shared.homes();
        let first = homes.first().map(|(_, address)| Arc::clone(address));
        let first = first.unwrap_or_default();
        let Ok(handle) = Handle::try_current() else {
            return first;
        };
        let here = handle.id();
        if let Some((_, address)) = homes.iter().find(|(runtime, _)| *runtime == here) {
            return Arc::clone(address);
        }
        if self.shared.options.bind.port() != 0 || homes.len() >= LISTENERS_MAX {
            return first;
        }
        // Where no port can be had the first listener serves this runtime too.
        let address = self.listen().unwrap_or(first);
        homes.push((here, Arc::clone(&address)));
        address
    }

    /// One more listener, on this runtime.
    fn listen(&self) -> io::Result<Arc<str>> {
        let bind = self.shared.options.bind;
        let socket = match bind.is_ipv4() {
            true => TcpSocket::new_v4()?,
            false => TcpSocket::new_v6()?,
        };
        socket.bind(bind)?;
        let listener = socket.listen(BACKLOG)?;
        let address = told(&self.shared.options, listener.local_addr()?);
        let accepting = accept(Arc::clone(&self.shared), listener, self.tasks.clone());
        self.tasks.background().spawn(accepting);
        Ok(address)
    }

    /// What it has seen.
    #[must_use]
    pub fn counts(&self) -> HomeCounts {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HomeCounts {
            arrived: get(&counters.arrived),
            unexpected: get(&counters.unexpected),
            nameless: get(&counters.nameless),
            refused: get(&counters.refused),
        }
    }

    /// How many answers are waited for.
    #[must_use]
    pub fn expected(&self) -> usize {
        self.shared.lock().len()
    }

    /// Waits for an answer from now on.
    pub(crate) fn expect(&self) -> Result<Expected, PlaneError> {
        let home = self.address();
        let made = self.shared.made.fetch_add(1, Ordering::Relaxed);
        let half = |number: u64| u128::from(self.shared.keys.hash_one((made, number)));
        let subject = half(0) << 64 | half(1);
        let (sender, arrived) = oneshot::channel();
        let mut expected = self.shared.lock();
        if expected.len() >= EXPECTED_MAX {
            return Err(PlaneError::Local("too many answers are waited for".into()));
        }
        let runtime = Handle::try_current().ok().map(|handle| handle.id());
        expected.insert(subject, Waiting { runtime, sender });
        drop(expected);
        Ok(Expected {
            subject,
            home,
            arrived,
            early: None,
            shared: Arc::clone(&self.shared),
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Waiting>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn homes(&self) -> MutexGuard<'_, Vec<(Id, Arc<str>)>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer that is waited for; dropped, it is waited for no more.
pub(crate) struct Expected {
    subject: u128,
    home: Arc<str>,
    arrived: oneshot::Receiver<Arrived>,
    /// It came before anybody waited for it.
    early: Option<Arrived>,
    shared: Arc<Shared>,
}

impl Expected {
    /// Where the worker is to bring it: `host:port`.
    pub(crate) fn home(&self) -> &str {
        &self.home
    }

    /// Its name on the wire.
    pub(crate) fn subject(&self) -> String {
        RequestId(self.subject).to_string()
    }

    /// Waits until the worker has called, for ever if it does not. Safe to drop while waiting.
    pub(crate) async fn called(&mut self) {
        if self.early.is_some() {
            return;
        }
        match (&mut self.arrived).await {
            Ok(arrived) => self.early = Some(arrived),
            Err(_) => std::future::pending().await,
        }
    }

    /// Waits for the worker's connection.
    pub(super) async fn arrive(
        &mut self,
        worker: WorkerId,
        longest: Duration,
    ) -> Result<Arrived, PlaneError> {
        if let Some(arrived) = self.early.take() {
            return Ok(arrived);
        }
        match timeout(longest, &mut self.arrived).await {
            Ok(Ok(arrived)) => Ok(arrived),
            Ok(Err(_)) => Err(PlaneError::Disconnected(worker)),
            Err(_) => Err(PlaneError::Timeout {
                worker,
                step: AnswerStep::CallHome,
            }),
        }
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.shared.lock().remove(&self.subject);
    }
}

/// What workers are told of a listener.
fn told(options: &ResponseOptions, local: SocketAddr) -> Arc<str> {
    let host = match &options.advertise {
        Some(host) => host.clone(),
        None if local.ip().is_unspecified() => local_address().to_string(),
        None => local.ip().to_string(),
    };
    let port = local.port();
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}").into(),
        false => format!("{host}:{port}").into(),
    }
}
