//! A worker's connection, from the listener to whoever waits for its answer.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::BytesMut;
use kvasir_protocol::control::{Handshake, Word};
use kvasir_protocol::frame::TwoPart;
use kvasir_tasks::Tasks;
use kvasir_types::RequestId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, Id};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::{Arrived, Caller, Shared};
use crate::call_home::neighbours::Towards;

/// Largest first frame of a connection: a subject and a word.
const HANDSHAKE_BYTES_MAX: usize = 8 << 10;
/// Room for what a worker says first.
const FIRST_BYTES: usize = 4096;
/// Pause after a listener failed, which is for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) async fn accept(shared: Arc<Shared>, listener: TcpListener, tasks: Tasks) {
    let here = Handle::current().id();
    let handshakes = Arc::new(Semaphore::new(shared.options.handshakes_max));
    let mut left = shared.has_left.subscribe();
    loop {
        let has_left = *left.borrow_and_update();
        let accepted = tokio::select! {
            accepted = listener.accept(), if !has_left => accepted,
            _ = left.changed() => continue,
        };
        let Ok((socket, _)) = accepted else {
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
            if let Some(unwanted) = shared.hand_over(arriving.came(subject)) {
                let shared = Arc::clone(&shared);
                tasks.background().spawn(async move {
                    let _permit = permit;
                    shared.send_on(unwanted).await;
                });
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
            if let Some(unwanted) = shared.hand_over(arriving.came(subject)) {
                shared.send_on(unwanted).await;
            }
        });
    }
}

/// A connection that has said which answer it brings.
pub(super) struct Came {
    pub(super) subject: Subject,
    pub(super) caller: Caller,
    pub(super) buffer: BytesMut,
    /// The way that it has come, if another process passed it on.
    pub(super) from: Option<Towards>,
}

/// A connection that has not said yet which answer it brings.
struct Arriving {
    socket: TcpStream,
    buffer: BytesMut,
    /// The runtime that it came to.
    here: Id,
}

/// Which answer it is; none if that is no name of ours.
pub(super) type Subject = Option<u128>;

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

    fn came(self, subject: Subject) -> Came {
        Came {
            subject,
            caller: Caller::Here(self.socket, self.here),
            buffer: self.buffer,
            from: None,
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
    pub(super) fn hand_over(&self, came: Came) -> Option<Came> {
        let waiting = came.subject.and_then(|name| self.lock().remove(&name));
        let Some(waiting) = waiting else {
            return Some(came);
        };
        let Came {
            subject,
            caller,
            buffer,
            from,
        } = came;
        let caller = caller.towards(waiting.runtime).ok()?;
        match waiting.sender.send(Arrived { caller, buffer }) {
            Ok(()) => {
                self.counters.arrived.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(Arrived { caller, buffer }) => Some(Came {
                subject,
                caller,
                buffer,
                from,
            }),
        }
    }

    /// Passes on what nobody here waits for; tells the worker if nobody else can.
    pub(super) async fn send_on(&self, came: Came) {
        let Came {
            subject,
            caller,
            buffer,
            from,
        } = came;
        let Ok(mut socket) = caller.into_stream() else {
            return;
        };
        if let Some(subject) = subject.filter(|_| !self.neighbours.is_empty()) {
            let Ok(passed) = socket.into_std() else {
                return;
            };
            let left = self.neighbours.pass(from, subject, passed, buffer).await;
            let Some(Ok(back)) = left.map(TcpStream::from_std) else {
                return;
            };
            socket = back;
        }
        self.counters.unexpected.fetch_add(1, Ordering::Relaxed);
        turn_away(socket).await;
    }
}

/// Tells a worker that nobody wants its answer.
async fn turn_away(mut socket: TcpStream) {
    let kill = TwoPart::of_header(Word::Kill.encode()).to_bytes();
    if socket.write_all(&kill).await.is_ok() {
        crate::call_home::stream::linger(socket).await;
    }
}
