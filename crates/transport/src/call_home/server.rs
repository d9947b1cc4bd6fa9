//! One listener for the answers of all workers.
//!
//! Invariants: a connection that does not name its answer in time is closed; one that names an answer nobody waits for is
//! told to stop and closed; connections that have not named theirs yet are bounded.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

use crate::{AnswerStep, PlaneError};

/// Largest first frame of a connection: a subject and a word.
const HANDSHAKE_BYTES_MAX: usize = 8 << 10;
/// Answers that are waited for at once.
const EXPECTED_MAX: usize = 1 << 18;
/// Pause after the listener failed, which is for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Where and how answers are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseOptions {
    /// Where the listener is.
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
    pub(super) socket: std::net::TcpStream,
    pub(super) buffer: BytesMut,
}

/// The listener. Clones are one.
#[derive(Clone)]
pub struct ResponseServer {
    shared: Arc<Shared>,
}

struct Shared {
    /// What workers are told.
    address: String,
    expected: Mutex<HashMap<u128, oneshot::Sender<Arrived>>>,
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
    /// Listens. The listener ends with `tasks`.
    pub async fn start(options: ResponseOptions, tasks: &Tasks) -> io::Result<Self> {
        let listener = TcpListener::bind(options.bind).await?;
        let local = listener.local_addr()?;
        let host = match &options.advertise {
            Some(host) => host.clone(),
            None if local.ip().is_unspecified() => local_address().to_string(),
            None => local.ip().to_string(),
        };
        let address = match host.contains(':') && !host.starts_with('[') {
            true => format!("[{host}]:{}", local.port()),
            false => format!("{host}:{}", local.port()),
        };
        let shared = Arc::new(Shared {
            address,
            expected: Mutex::default(),
            keys: RandomState::new(),
            made: AtomicU64::new(0),
            counters: Counters::default(),
            options,
        });
        let accepting = accept(Arc::clone(&shared), listener, tasks.clone());
        tasks.background().spawn(accepting);
        Ok(Self { shared })
    }

    /// What workers are told: `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
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
        let made = self.shared.made.fetch_add(1, Ordering::Relaxed);
        let half = |number: u64| u128::from(self.shared.keys.hash_one((made, number)));
        let subject = half(0) << 64 | half(1);
        let (sender, arrived) = oneshot::channel();
        let mut expected = self.shared.lock();
        if expected.len() >= EXPECTED_MAX {
            return Err(PlaneError::Local("too many answers are waited for".into()));
        }
        expected.insert(subject, sender);
        drop(expected);
        Ok(Expected {
            subject,
            arrived,
            early: None,
            shared: Arc::clone(&self.shared),
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<u128, oneshot::Sender<Arrived>>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer that is waited for; dropped, it is waited for no more.
pub(crate) struct Expected {
    subject: u128,
    arrived: oneshot::Receiver<Arrived>,
    /// It came before anybody waited for it.
    early: Option<Arrived>,
    shared: Arc<Shared>,
}

impl Expected {
    /// Its name on the wire.
    pub(crate) fn subject(&self) -> String {
        RequestId(self.subject).to_string()
    }

    /// Waits until the worker has called, for ever if it does not. Safe to drop while waiting.
    #[cfg(feature = "nats")]
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

async fn accept(shared: Arc<Shared>, listener: TcpListener, tasks: Tasks) {
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
        let shared = Arc::clone(&shared);
        tasks.background().spawn(async move {
            let limit = shared.options.handshake_timeout;
            let counter = match timeout(limit, receive(&shared, socket)).await {
                Ok(Ok(true)) => &shared.counters.arrived,
                Ok(Ok(false)) => &shared.counters.unexpected,
                Ok(Err(_)) | Err(_) => &shared.counters.nameless,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            drop(permit);
        });
    }
}

/// Reads which answer a connection brings and hands it to whoever waits; false if nobody does.
async fn receive(shared: &Shared, mut socket: TcpStream) -> io::Result<bool> {
    socket.set_nodelay(true)?;
    let mut buffer = BytesMut::with_capacity(4096);
    let frame = loop {
        let frame = TwoPart::take(&mut buffer, HANDSHAKE_BYTES_MAX).map_err(io::Error::other)?;
        if let Some(frame) = frame {
            break frame;
        }
        if socket.read_buf(&mut buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let handshake = Handshake::decode(&frame.header).map_err(io::Error::other)?;
    let subject = RequestId::parse(&handshake.subject).map(|id| id.0);
    let waiting = subject.and_then(|subject| shared.lock().remove(&subject));
    // It goes on where the request is: on another thread, with that thread's reactor.
    let arrived = Arrived {
        socket: socket.into_std()?,
        buffer,
    };
    let unwanted = match waiting {
        Some(waiting) => match waiting.send(arrived) {
            Ok(()) => return Ok(true),
            Err(arrived) => arrived,
        },
        None => arrived,
    };
    let mut socket = TcpStream::from_std(unwanted.socket)?;
    let kill = TwoPart::of_header(Word::Kill.encode()).to_bytes();
    socket.write_all(&kill).await?;
    super::stream::linger(socket).await;
    Ok(false)
}
