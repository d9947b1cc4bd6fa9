//! One TCP connection after its handshake, as a reading and a writing half.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::codec::{
    Decoder, GREETING_LEN, Item, ZmtpError, check_greeting, greeting, put_message, put_ping,
    put_pong, put_ready,
};
use crate::{SourceFault, is_local_error};

/// How much is read at once.
const READ_CHUNK: usize = 64 << 10;

/// Limits of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqLimits {
    /// Largest message taken.
    pub message_bytes_max: usize,
    /// Messages that wait for a slow reader.
    pub queue_messages_max: usize,
    /// Bytes that wait for a slow reader.
    pub queue_bytes_max: usize,
    /// Connections that a server takes.
    pub peers_max: usize,
    /// Longest time for a connection and its handshake.
    pub connect_timeout: Duration,
    /// Silence after which the peer is asked for a sign of life; after three times that it is given up.
    pub heartbeat: Duration,
}

impl Default for ZmqLimits {
    fn default() -> Self {
        Self {
            message_bytes_max: 64 << 20,
            queue_messages_max: 10_000,
            queue_bytes_max: 64 << 20,
            peers_max: 256,
            connect_timeout: Duration::from_secs(5),
            heartbeat: Duration::from_secs(10),
        }
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] ZmtpError),
    #[error("no answer")]
    Silent,
}

impl LinkError {
    /// As an operator reads it; `connected` says whether it had stood before.
    pub(super) fn fault(&self, connected: bool) -> SourceFault {
        match self {
            Self::Io(error) if connected => SourceFault::Closed(error.to_string()),
            Self::Io(error) if is_local_error(error) => SourceFault::Local(error.to_string()),
            Self::Io(error) => SourceFault::Unreachable(error.to_string()),
            Self::Protocol(error) => SourceFault::Protocol(error.to_string()),
            Self::Silent => SourceFault::Silent,
        }
    }
}

/// The reading half. Dropping a pending read loses nothing.
#[derive(Debug)]
pub(super) struct LinkReader {
    half: OwnedReadHalf,
    buffer: BytesMut,
    decoder: Decoder,
}

/// The writing half.
#[derive(Debug)]
pub(super) struct LinkWriter {
    half: OwnedWriteHalf,
    buffer: BytesMut,
    /// Whether the peer answers heartbeats (ZMTP 3.1).
    pub(super) heartbeats: bool,
}

/// Who we are, and whom we expect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Roles {
    pub(super) own: &'static str,
    pub(super) peers: &'static [&'static str],
}

/// Greets and is greeted.
pub(super) async fn handshake(
    stream: TcpStream,
    roles: Roles,
    limits: &ZmqLimits,
) -> Result<(LinkReader, LinkWriter), LinkError> {
    let shaken = timeout(limits.connect_timeout, shake(stream, roles, limits)).await;
    shaken.unwrap_or(Err(LinkError::Silent))
}

async fn shake(
    stream: TcpStream,
    roles: Roles,
    limits: &ZmqLimits,
) -> Result<(LinkReader, LinkWriter), LinkError> {
    stream.set_nodelay(true)?;
    let (mut read, mut write) = stream.into_split();
    write.write_all(&greeting()).await?;
    let mut bytes = [0; GREETING_LEN];
    // A peer that is no ZeroMQ may send less than a greeting: judge the first bytes as soon as they come.
    read.read_exact(&mut bytes[..10]).await?;
    if bytes[0] != 0xff {
        check_greeting(&bytes)?;
    }
    read.read_exact(&mut bytes[10..]).await?;
    let minor = check_greeting(&bytes)?;
    let mut writer = LinkWriter {
        half: write,
        buffer: BytesMut::new(),
        heartbeats: minor >= 1,
    };
    put_ready(roles.own, &mut writer.buffer);
    writer.flush().await?;
    let mut reader = LinkReader {
        half: read,
        buffer: BytesMut::new(),
        decoder: Decoder::new(limits.message_bytes_max),
    };
    match reader.next().await? {
        Item::Ready(found) if roles.peers.contains(&found.as_str()) => Ok((reader, writer)),
        Item::Ready(found) => {
            let expected = roles.peers[0];
            Err(ZmtpError::SocketType { expected, found }.into())
        }
        Item::Error(reason) => Err(ZmtpError::Refused(reason).into()),
        _ => Err(ZmtpError::NotReady.into()),
    }
}

impl LinkReader {
    /// The next item.
    pub(super) async fn next(&mut self) -> Result<Item, LinkError> {
        loop {
            if let Some(item) = self.decoder.decode(&mut self.buffer)? {
                return Ok(item);
            }
            self.buffer.reserve(READ_CHUNK);
            if self.half.read_buf(&mut self.buffer).await? == 0 {
                let closed = io::Error::new(io::ErrorKind::UnexpectedEof, "end of stream");
                return Err(closed.into());
            }
        }
    }
}

impl LinkWriter {
    pub(super) async fn flush(&mut self) -> Result<(), LinkError> {
        self.half.write_all_buf(&mut self.buffer).await?;
        Ok(())
    }

    pub(super) async fn message<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> Result<(), LinkError> {
        put_message(parts, &mut self.buffer);
        self.flush().await
    }

    /// Sends bytes that are encoded already.
    pub(super) async fn encoded(&mut self, bytes: &Bytes) -> Result<(), LinkError> {
        self.half.write_all(bytes).await?;
        Ok(())
    }

    pub(super) async fn ping(&mut self) -> Result<(), LinkError> {
        put_ping(0, &mut self.buffer);
        self.flush().await
    }

    pub(super) async fn pong(&mut self, context: &[u8]) -> Result<(), LinkError> {
        put_pong(context, &mut self.buffer);
        self.flush().await
    }
}
