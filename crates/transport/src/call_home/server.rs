//! Where the answers of all workers come in.
//!
//! Every runtime that asks has a listener of its own, made when it asks first: the worker connects to the thread that waits, and
//! neither the socket nor the answer moves. Where a port is given there is one listener, and sockets are handed over.
//!
//! Invariants: a connection that does not name its answer in time is closed; one that names an answer nobody waits for is
//! told to stop and closed; connections that have not named theirs yet are bounded.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use kvasir_protocol::control::{Handshake, Word};
use kvasir_protocol::frame::TwoPart;
use kvasir_tasks::Tasks;
use kvasir_types::{RequestId, WorkerId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Handle, Id};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

use crate::{AnswerStep, PlaneError};

/// Largest first frame of a connection: a subject and a word.
const HANDSHAKE_BYTES_MAX: usize = 8 << 10;
/// Answers that are waited for at once.
const EXPECTED_MAX: usize = 1 << 18;
/// Listeners of one process; runtimes beyond them use the first.
const LISTENERS_MAX: usize = 256;
/// Connections that wait to be accepted by one of them.
const BACKLOG: u32 = 1024;
/// Room for what a worker says first.
const FIRST_BYTES: usize = 4096;
/// Pause after a listener failed, which is for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

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
    /// It came to the runtime that waits for it.
    Here(TcpStream),
    /// It came to another one, and belongs to none on its way.
    Elsewhere(std::net::TcpStream),
}

impl Caller {
    /// The connection, on this runtime.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        match self {
            Self::Here(socket) => Ok(socket),
            Self::Elsewhere(socket) => TcpStream::from_std(socket),
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
        let first = told(&options, listener.local_addr()?);
        let shared = Arc::new(Shared {
            homes: Mutex::new(vec![(Handle::current().id(), first)]),
            expected: Mutex::default(),
            keys: RandomState::new(),
            made: AtomicU64::new(0),
            counters: Counters::default(),
            options,
        });
        let accepting = accept(Arc::clone(&shared), listener, tasks.clone());
        tasks.background().spawn(accepting);
        let tasks = tasks.clone();
        Ok(Self { shared, tasks })
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

async fn accept(shared: Arc<Shared>, listener: TcpListener, tasks: Tasks) {
    let here = Handle::current().id();
    let handshakes = Arc::new(Semaphore::new(shared.options.handshakes_max));
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&handshakes).try_acquire_owned() else {
            shared.counters.refused.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let mut arriving = Arriving {
            socket,
            buffer: BytesMut::with_capacity(FIRST_BYTES),
            here,
        };
        // Most have said whose answer they bring by now, and need no task of their own.
        if let Ok(Some(subject)) = arriving.said_at_once() {
            match shared.hand_over(subject, arriving) {
                None => {}
                Some(unwanted) => drop(tasks.background().spawn(async move {
                    let _permit = permit;
                    turn_away(unwanted).await;
                })),
            }
            continue;
        }
        let shared = Arc::clone(&shared);
        tasks.background().spawn(async move {
            let _permit = permit;
            let limit = shared.options.handshake_timeout;
            let Ok(Ok(subject)) = timeout(limit, arriving.said()).await else {
                shared.counters.nameless.fetch_add(1, Ordering::Relaxed);
                return;
            };
            if let Some(unwanted) = shared.hand_over(subject, arriving) {
                turn_away(unwanted).await;
            }
        });
    }
}

/// A connection that has not said yet which answer it brings.
struct Arriving {
    socket: TcpStream,
    buffer: BytesMut,
    /// The runtime that it came to.
    here: Id,
}

/// Which answer it is; none if that is no name of ours.
type Subject = Option<u128>;

impl Arriving {
    /// What it has said already. Asked before the reactor has looked at the socket.
    fn said_at_once(&mut self) -> io::Result<Option<Subject>> {
        let mut chunk = [const { MaybeUninit::uninit() }; FIRST_BYTES];
        let (read, _) = rustix::io::read(&self.socket, &mut chunk[..])?;
        self.buffer.extend_from_slice(read);
        self.subject()
    }

    /// Waits until it says it.
    async fn said(&mut self) -> io::Result<Subject> {
        loop {
            if let Some(subject) = self.subject()? {
                return Ok(subject);
            }
            if self.socket.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn subject(&mut self) -> io::Result<Option<Subject>> {
        let frame = TwoPart::take(&mut self.buffer, HANDSHAKE_BYTES_MAX);
        let Some(frame) = frame.map_err(io::Error::other)? else {
            return Ok(None);
        };
        let handshake = Handshake::decode(&frame.header).map_err(io::Error::other)?;
        Ok(Some(RequestId::parse(&handshake.subject).map(|id| id.0)))
    }
}

impl Shared {
    /// Hands a connection to whoever waits for its answer, or back if nobody does.
    fn hand_over(&self, subject: Subject, arriving: Arriving) -> Option<TcpStream> {
        let unwanted = |socket| {
            self.counters.unexpected.fetch_add(1, Ordering::Relaxed);
            socket
        };
        let waiting = subject.and_then(|subject| self.lock().remove(&subject));
        let Some(waiting) = waiting else {
            return Some(unwanted(arriving.socket));
        };
        let caller = match waiting.runtime == Some(arriving.here) {
            true => Caller::Here(arriving.socket),
            false => Caller::Elsewhere(arriving.socket.into_std().ok()?),
        };
        let arrived = Arrived {
            caller,
            buffer: arriving.buffer,
        };
        match waiting.sender.send(arrived) {
            Ok(()) => {
                self.counters.arrived.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(arrived) => arrived.caller.into_stream().ok().map(unwanted),
        }
    }
}

/// Tells a worker that nobody wants its answer.
async fn turn_away(mut socket: TcpStream) {
    let kill = TwoPart::of_header(Word::Kill.encode()).to_bytes();
    if socket.write_all(&kill).await.is_ok() {
        super::stream::linger(socket).await;
    }
}
