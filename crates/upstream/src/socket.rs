//! The socket to a worker: plain, or with TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kvasir_types::HttpEndpoint;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{Error, InvalidMessage};

use crate::tls::WorkerTls;

/// Idle time before the first keep-alive probe.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(10);
/// Time between probes.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
/// Unanswered probes after which the connection is dead.
const KEEP_ALIVE_MAX: u32 = 4;
/// Unacknowledged data this old closes the connection.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);

/// The first bytes of an answer by which a server says that an idle connection timed out (RFC 9110, section 15.5.9).
const TIMED_OUT: [&[u8]; 2] = [b"HTTP/1.1 408", b"HTTP/1.0 408"];

/// What lies in a socket that nobody has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// Nothing.
    Nothing,
    /// Bytes that nobody asked for.
    Surplus,
    /// The end, an error, or the notice of a server that it closes an idle connection.
    End,
}

/// A socket to a worker.
#[derive(Debug)]
pub enum Socket {
    /// Plain TCP.
    Plain(TcpStream),
    /// TLS over TCP.
    Secure(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// Connects to `endpoint`.
    pub async fn open(endpoint: &HttpEndpoint, tls: &WorkerTls) -> io::Result<Self> {
        let connected = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await;
        let stream = connected.map_err(name_local_cause)?;
        let _ = stream.set_nodelay(true);
        if let Err(error) = set_keep_alive(&stream) {
            tracing::debug!(worker = %endpoint, %error, "TCP keep-alive cannot be set");
        }
        if !endpoint.tls {
            return Ok(Self::Plain(stream));
        }
        let name = ServerName::try_from(endpoint.host.clone()).map_err(io::Error::other)?;
        let connector = tls.connector().map_err(io::Error::other)?;
        let secure = connector
            .connect(name, stream)
            .await
            .map_err(explain_plain_http)?;
        Ok(Self::Secure(Box::new(secure)))
    }

    /// Reads what lies in a plain socket, whatever the reactor has noted; none if nothing does, and where the socket is not plain.
    pub(crate) fn read_now(&self, buffer: &mut [u8]) -> Option<io::Result<usize>> {
        let Self::Plain(stream) = self else {
            return None;
        };
        match recv(stream, buffer, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) => None,
            Err(error) => Some(Err(error.into())),
            Ok((count, _)) => Some(Ok(count)),
        }
    }

    /// What lies in the socket. Asks the kernel: what the reactor has noted may be older than the last byte.
    pub(crate) fn unread(&self) -> Unread {
        let (stream, is_plain) = match self {
            Self::Plain(stream) => (stream, true),
            Self::Secure(stream) => (stream.get_ref().0, false),
        };
        let mut seen = [0; 12];
        match recv(stream, &mut seen[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) => Unread::Nothing,
            Ok((0, _)) | Err(_) => Unread::End,
            // Records of TLS: most likely the other side says that it closes.
            Ok(_) if !is_plain => Unread::End,
            Ok(_) if TIMED_OUT.contains(&&seen[..]) => Unread::End,
            Ok(_) => Unread::Surplus,
        }
    }
}

/// Without a descriptor no name can be looked up, and the resolver says that the name is unknown. A socket that cannot be made
/// tells the two apart.
fn name_local_cause(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(_) => error,
        None => TcpSocket::new_v4().err().unwrap_or(error),
    }
}

/// Lets the kernel notice a host that vanishes. The kernel of a live host answers, however busy its engine is.
fn set_keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_MAX)?;
    #[cfg(target_os = "linux")]
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MAX.as_millis() as u32)?;
    Ok(())
}

/// A reply that is no TLS record comes from a port that speaks plain HTTP.
fn explain_plain_http(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|e| e.downcast_ref::<Error>());
    match cause {
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => io::Error::new(
            io::ErrorKind::InvalidInput,
            "that port speaks plain HTTP; use http://",
        ),
        _ => error,
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Secure(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Secure(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Secure(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secure(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secure(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secure(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_that_vanishes_is_noticed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let address = crate::parse_url(&url).unwrap();
        let socket = Socket::open(&address, &WorkerTls::default()).await.unwrap();
        let Socket::Plain(stream) = socket else {
            panic!("not asked for TLS");
        };
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEP_ALIVE_AFTER);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEP_ALIVE_EVERY);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEP_ALIVE_MAX);
        #[cfg(target_os = "linux")]
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 30_000);
    }
}
