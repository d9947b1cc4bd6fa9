//! When is an answer's socket read?
//!
//! When it has something; and one that always has, only every [`GATHER_TIME`]. A worker that sends a token every 0.4 ms would have us
//! read, pass on and wake for each of them; twenty at once cost as much as one, and nobody sees 8 ms. A stream of up to 250 tokens a
//! second is read at once, whatever it brings.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// How much is read at once.
const READ_CHUNK: usize = 16 << 10;
/// Time between two reads of a stream that always has something.
const GATHER_TIME: Duration = Duration::from_millis(8);
/// A read that finds something so soon after the one before is quick.
const QUICK_TIME: Duration = Duration::from_millis(4);
/// Quick reads in a row that make a stream one that always has something.
const QUICK_READS: u8 = 4;
/// Reads in a row that find nothing, after which it is one no more.
const EMPTY_READS: u8 = 2;

/// The socket that brings an answer.
pub(super) struct AnswerSocket {
    source: Source,
    pace: Pace,
}

enum Source {
    /// The reactor says when there is something.
    Reactor(TcpStream),
    /// Nobody says: it is looked at when the time has come.
    Timer {
        socket: std::net::TcpStream,
        tick: Pin<Box<Sleep>>,
        empty: u8,
    },
    /// It broke while it went from one to the other.
    Gone,
}

impl AnswerSocket {
    pub(super) const fn new(socket: TcpStream) -> Self {
        Self {
            source: Source::Reactor(socket),
            pace: Pace::new(),
        }
    }

    /// Appends what came to `buffer` and says how much that was; 0 once the worker has closed.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        let mut chunk = [const { MaybeUninit::uninit() }; READ_CHUNK];
        loop {
            match &mut self.source {
                Source::Gone => return Poll::Ready(Ok(0)),
                Source::Reactor(socket) => {
                    let mut read = ReadBuf::uninit(&mut chunk);
                    ready!(Pin::new(socket).poll_read(cx, &mut read))?;
                    buffer.extend_from_slice(read.filled());
                    let now = Instant::now();
                    if self.pace.is_quick(now) {
                        self.gather(now)?;
                    }
                    return Poll::Ready(Ok(read.filled().len()));
                }
                Source::Timer {
                    socket,
                    tick,
                    empty,
                } => {
                    ready!(tick.as_mut().poll(cx));
                    tick.as_mut().reset(Instant::now() + GATHER_TIME);
                    match rustix::io::read(&*socket, &mut chunk[..]) {
                        Ok((read, _)) => {
                            *empty = 0;
                            buffer.extend_from_slice(read);
                            return Poll::Ready(Ok(read.len()));
                        }
                        Err(rustix::io::Errno::WOULDBLOCK) => *empty += 1,
                        Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Poll::Ready(Err(error.into())),
                    }
                    if *empty >= EMPTY_READS {
                        self.wait_again()?;
                    }
                }
            }
        }
    }

    /// Sends a few bytes, which fit: nothing else is written here. Not by tokio, which asks its reactor first whether they do, and
    /// that may not have looked at a socket that came just now.
    pub(super) fn say(&self, bytes: &[u8]) {
        let _ = match &self.source {
            Source::Reactor(socket) => rustix::io::write(socket, bytes),
            Source::Timer { socket, .. } => rustix::io::write(socket, bytes),
            Source::Gone => Ok(0),
        };
    }

    /// The socket, to be waited for.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        match self.source {
            Source::Reactor(socket) => Ok(socket),
            Source::Timer { socket, .. } => TcpStream::from_std(socket),
            Source::Gone => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn gather(&mut self, now: Instant) -> io::Result<()> {
        if let Source::Reactor(socket) = std::mem::replace(&mut self.source, Source::Gone) {
            self.source = Source::Timer {
                socket: socket.into_std()?,
                tick: Box::pin(sleep_until(now + GATHER_TIME)),
                empty: 0,
            };
        }
        Ok(())
    }

    fn wait_again(&mut self) -> io::Result<()> {
        if let Source::Timer { socket, .. } = std::mem::replace(&mut self.source, Source::Gone) {
            self.source = Source::Reactor(TcpStream::from_std(socket)?);
            self.pace = Pace::new();
        }
        Ok(())
    }
}

/// How soon after each other reads found something.
struct Pace {
    last: Option<Instant>,
    quick: u8,
}

impl Pace {
    const fn new() -> Self {
        Self {
            last: None,
            quick: 0,
        }
    }

    /// Something was read now: does this stream always have something?
    fn is_quick(&mut self, now: Instant) -> bool {
        let since = self.last.map(|last| now.duration_since(last));
        self.last = Some(now);
        self.quick = match since {
            Some(since) if since < QUICK_TIME => self.quick.saturating_add(1),
            _ => 0,
        };
        self.quick >= QUICK_READS
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn only_a_stream_that_always_has_something_is_quick() {
        let (mut pace, begin) = (Pace::new(), Instant::now());
        let mut quick = |at: u64| pace.is_quick(begin + Duration::from_millis(at));
        assert!([0, 1, 2, 3].iter().all(|at| !quick(*at)));
        assert!(quick(4));
        assert!([10, 14, 18, 22, 26].iter().all(|at| !quick(*at)));
        assert!([27, 28, 29].iter().all(|at| !quick(*at)));
        assert!(quick(30));
    }

    /// All bytes come, in order, whichever way they are read, and so does the end.
    #[tokio::test]
    async fn what_is_read_is_the_same_quick_or_slow() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let sending = async {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.set_nodelay(true).unwrap();
            for number in 0..400u32 {
                socket.write_all(&number.to_be_bytes()).await.unwrap();
                // Bursts, and pauses that are longer than a stream is gathered for.
                let pause = if number % 100 == 99 { 20_000 } else { 200 };
                tokio::time::sleep(Duration::from_micros(pause)).await;
            }
        };
        let reading = async {
            let (socket, _) = listener.accept().await.unwrap();
            let (mut socket, mut buffer) = (AnswerSocket::new(socket), BytesMut::new());
            while poll_fn(|cx| socket.poll_read(cx, &mut buffer))
                .await
                .unwrap()
                > 0
            {}
            buffer
        };
        let ((), bytes) = tokio::join!(sending, reading);
        let wanted: Vec<u8> = (0..400u32).flat_map(u32::to_be_bytes).collect();
        assert_eq!(&bytes[..], wanted);
    }

    /// From one way to the other and back, and a word can be said on each.
    #[tokio::test]
    async fn a_socket_that_falls_silent_is_waited_for_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap());
        let (peer, accepted) = tokio::join!(peer, listener.accept());
        let (mut peer, mut socket) = (peer.unwrap(), AnswerSocket::new(accepted.unwrap().0));
        socket.gather(Instant::now()).unwrap();
        socket.say(b"a");
        assert!(matches!(socket.source, Source::Timer { .. }));
        let mut buffer = BytesMut::new();
        let late = async {
            tokio::time::sleep(4 * GATHER_TIME).await;
            peer.write_all(b"late").await.unwrap();
        };
        let read = poll_fn(|cx| socket.poll_read(cx, &mut buffer));
        let (read, ()) = tokio::join!(read, late);
        assert_eq!((read.unwrap(), &buffer[..]), (4, &b"late"[..]));
        assert!(matches!(socket.source, Source::Reactor(_)));
        socket.say(b"b");
        let mut said = [0; 2];
        tokio::io::AsyncReadExt::read_exact(&mut peer, &mut said)
            .await
            .unwrap();
        assert_eq!(&said, b"ab");
    }
}
