//! Answers that come to one of several processes which listen at the same port.
//!
//! Answers one question: who gets a worker's connection, if a process that is being replaced and the one that replaces it share a listener? A connection
//! names its answer; the process that took it and does not wait for that answer passes the connection on, with what was read of it, over a socket to its
//! neighbour: first towards the oldest process, from there towards the newest. What nobody waits for is turned away by the last one.
//!
//! What always holds: a connection is passed on at most twice by each process; one whose neighbour is gone goes the other way; no more than
//! [`PASSED_BYTES_MAX`] go with it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

/// What may have been read of a connection that is passed on.
const PASSED_BYTES_MAX: usize = 32 << 10;
/// Direction and name of the answer.
const HEAD_BYTES: usize = 1 + 16;

/// Neither the link nor what comes over it is for our children.
#[cfg(target_os = "linux")]
const OWN_ALONE: (SocketFlags, RecvFlags) = (SocketFlags::CLOEXEC, RecvFlags::CMSG_CLOEXEC);
#[cfg(not(target_os = "linux"))]
const OWN_ALONE: (SocketFlags, RecvFlags) = (SocketFlags::empty(), RecvFlags::empty());

/// Which way a connection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Towards {
    /// To the process that this one replaces.
    Older,
    /// To the one that replaces this one.
    Newer,
}

/// A connection on its way.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) towards: Towards,
    pub(super) subject: u128,
    pub(super) socket: TcpStream,
    /// What was read after the name of its answer.
    pub(super) buffer: BytesMut,
}

/// Both ends of a link between two processes. Not every system has such sockets.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socketpair(family, kind, OWN_ALONE.0, None)?)
}

/// One end of a link. Its messages are whole, as those of datagrams, and its end is noticed.
#[derive(Debug)]
pub(super) struct Link(UnixDatagram);

impl Link {
    /// Must be called in a runtime.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixDatagram::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self(UnixDatagram::from_std(socket)?))
    }

    /// Passes a connection on.
    async fn send(&self, passed: &Passed) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + passed.buffer.len());
        bytes.push(u8::from(passed.towards == Towards::Newer));
        bytes.extend(passed.subject.to_le_bytes());
        bytes.extend_from_slice(&passed.buffer);
        let send = || {
            let files = [passed.socket.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            let parts = [IoSlice::new(&bytes)];
            Ok(sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)?)
        };
        self.0.async_io(Interest::WRITABLE, send).await.map(drop)
    }

    /// The next connection that the neighbour passes on; none once it is gone.
    pub(super) async fn receive(&self) -> io::Result<Option<Passed>> {
        let mut bytes = vec![0; HEAD_BYTES + PASSED_BYTES_MAX];
        let (length, socket) = self
            .0
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut parts = [IoSliceMut::new(&mut bytes)];
                let came = recvmsg(&self.0, &mut parts, &mut control, OWN_ALONE.1)?;
                let files = control.drain().filter_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                    _ => None,
                });
                Ok((came.bytes, files.last()))
            })
            .await?;
        if length == 0 {
            return Ok(None);
        }
        let read = bytes.get(..length).unwrap_or_default();
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "no connection was passed on");
        let (direction, rest) = read.split_first().ok_or_else(bad)?;
        let (subject, rest) = rest.split_first_chunk().ok_or_else(bad)?;
        Ok(Some(Passed {
            towards: match direction {
                0 => Towards::Older,
                _ => Towards::Newer,
            },
            subject: u128::from_le_bytes(*subject),
            socket: TcpStream::from(socket.ok_or_else(bad)?),
            buffer: BytesMut::from(rest),
        }))
    }
}

/// The processes on either side of this one.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    sides: Mutex<Sides>,
}

#[derive(Debug, Default)]
struct Sides {
    older: Option<Arc<Link>>,
    newer: Option<Arc<Link>>,
}

impl Neighbours {
    fn lock(&self) -> MutexGuard<'_, Sides> {
        self.sides.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is a neighbour.
    pub(super) fn add(&self, side: Towards, link: &Arc<Link>) {
        let mut sides = self.lock();
        let place = match side {
            Towards::Older => &mut sides.older,
            Towards::Newer => &mut sides.newer,
        };
        *place = Some(Arc::clone(link));
    }

    /// It is gone.
    pub(super) fn remove(&self, link: &Arc<Link>) {
        let mut sides = self.lock();
        let Sides { older, newer } = &mut *sides;
        for place in [older, newer] {
            place.take_if(|known| Arc::ptr_eq(known, link));
        }
    }

    /// Where a connection goes that nobody here waits for: `from` is the way that it has come, none if it came from a worker.
    fn next(&self, from: Option<Towards>) -> Option<(Towards, Arc<Link>)> {
        let sides = self.lock();
        let older = sides.older.clone().filter(|_| from != Some(Towards::Newer));
        let older = older.map(|link| (Towards::Older, link));
        older.or_else(|| sides.newer.clone().map(|link| (Towards::Newer, link)))
    }

    /// Passes a connection on; it comes back if nobody is left who could wait for it.
    pub(super) async fn pass(
        &self,
        from: Option<Towards>,
        subject: u128,
        socket: TcpStream,
        buffer: BytesMut,
    ) -> Option<TcpStream> {
        let mut passed = Passed {
            towards: Towards::Older,
            subject,
            socket,
            buffer,
        };
        if passed.buffer.len() > PASSED_BYTES_MAX {
            return Some(passed.socket);
        }
        while let Some((towards, link)) = self.next(from) {
            passed.towards = towards;
            match link.send(&passed).await {
                Ok(()) => return None,
                Err(_) => self.remove(&link),
            }
        }
        Some(passed.socket)
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        let sides = self.lock();
        sides.older.is_none() && sides.newer.is_none()
    }
}
