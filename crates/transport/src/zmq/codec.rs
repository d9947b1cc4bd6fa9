//! ZMTP 3 bytes: greeting, commands, messages. No I/O.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Length of the greeting that both sides send first.
pub(super) const GREETING_LEN: usize = 64;
/// Parts of one message. Event messages have four at most.
const PARTS_MAX: usize = 32;
/// Longest command; READY with its properties, or a subscription.
const COMMAND_MAX: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a peer's bytes were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZmtpError {
    /// It does not speak ZMTP at all, e.g. it is an HTTP server.
    #[error("it does not speak ZMTP (first bytes {0:02x?})")]
    Greeting([u8; 4]),
    /// It speaks a version before 3.
    #[error("it speaks ZMTP {0}, not 3; ZeroMQ 4.0 or later is needed")]
    Version(u8),
    /// It wants a security mechanism.
    #[error("it wants the security mechanism {0:?}; only NULL is supported")]
    Mechanism(String),
    /// It is another kind of socket.
    #[error("it is a {found:?} socket, not {expected:?}; is this the right port?")]
    SocketType {
        /// What was needed.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// It refused us.
    #[error("it refused the connection: {0:?}")]
    Refused(String),
    /// A frame or message is larger than the limit.
    #[error("a message of {size} bytes is over the limit of {limit}")]
    TooLarge {
        /// What it claims.
        size: u64,
        /// What is allowed.
        limit: usize,
    },
    /// A message has too many parts.
    #[error("a message has more than {PARTS_MAX} parts")]
    TooManyParts,
    /// A command that cannot be read.
    #[error("a command cannot be read")]
    Command,
    /// The first frame after the greeting is not READY.
    #[error("it sent something else before READY")]
    NotReady,
}

/// The greeting that we send: version 3.1, no security.
pub(super) fn greeting() -> [u8; GREETING_LEN] {
    let mut bytes = [0; GREETING_LEN];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Checks a peer's greeting. Returns its minor version.
pub(super) fn check_greeting(bytes: &[u8; GREETING_LEN]) -> Result<u8, ZmtpError> {
    let [a, b, c, d, ..] = *bytes;
    if bytes[0] != 0xff || bytes[9] & 1 != 1 {
        return Err(ZmtpError::Greeting([a, b, c, d]));
    }
    if bytes[10] < 3 {
        return Err(ZmtpError::Version(bytes[10]));
    }
    let mechanism = bytes[12..32].split(|b| *b == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        let name = String::from_utf8_lossy(mechanism).into_owned();
        return Err(ZmtpError::Mechanism(name));
    }
    Ok(bytes[11])
}

/// What a peer sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// A message, its parts.
    Message(Vec<Bytes>),
    /// The peer is ready; its kind of socket.
    Ready(String),
    /// The peer refuses us.
    Error(String),
    /// To be answered with the same context.
    Ping(Bytes),
    /// Any sign of life.
    Pong,
    /// A subscription, or its end.
    Subscribe(Bytes, bool),
    /// A command of a later version.
    Other,
}

/// Cuts a byte stream into items.
#[derive(Debug)]
pub(super) struct Decoder {
    limit: usize,
    parts: Vec<Bytes>,
    size: usize,
}

impl Decoder {
    /// Messages over `limit` bytes are refused.
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            limit,
            parts: Vec::new(),
            size: 0,
        }
    }

    /// Takes the next item from the front of `buffer`, if it is all there.
    pub(super) fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Item>, ZmtpError> {
        loop {
            let Some((flags, head, len)) = self.head(buffer)? else {
                return Ok(None);
            };
            if buffer.len() - head < len {
                return Ok(None);
            }
            buffer.advance(head);
            let body = buffer.split_to(len).freeze();
            if flags & COMMAND != 0 {
                return command(body).map(Some);
            }
            self.size += len;
            self.parts.push(body);
            if flags & MORE == 0 {
                self.size = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.parts))));
            }
        }
    }

    /// Flags, length of the head and length of the body of the next frame.
    fn head(&self, buffer: &[u8]) -> Result<Option<(u8, usize, usize)>, ZmtpError> {
        let Some(&flags) = buffer.first() else {
            return Ok(None);
        };
        let (head, size) = match flags & LONG {
            0 => match buffer.get(1) {
                Some(size) => (2, u64::from(*size)),
                None => return Ok(None),
            },
            _ => match buffer.get(1..).and_then(<[u8]>::first_chunk) {
                Some(size) => (9, u64::from_be_bytes(*size)),
                None => return Ok(None),
            },
        };
        let limit = match flags & COMMAND {
            0 => self.limit.saturating_sub(self.size),
            _ => COMMAND_MAX,
        };
        let fits = usize::try_from(size).ok().filter(|size| *size <= limit);
        let Some(len) = fits else {
            return Err(ZmtpError::TooLarge { size, limit });
        };
        if self.parts.len() >= PARTS_MAX {
            return Err(ZmtpError::TooManyParts);
        }
        Ok(Some((flags, head, len)))
    }
}

fn command(mut body: Bytes) -> Result<Item, ZmtpError> {
    let len = usize::from(*body.first().ok_or(ZmtpError::Command)?);
    if body.len() < 1 + len {
        return Err(ZmtpError::Command);
    }
    body.advance(1);
    let name = body.split_to(len);
    Ok(match name.as_ref() {
        b"READY" => Item::Ready(socket_type(body)?),
        b"ERROR" => {
            let reason = body.get(1..).unwrap_or_default();
            Item::Error(String::from_utf8_lossy(reason).into_owned())
        }
        b"PING" => {
            let ttl = 2.min(body.len());
            body.advance(ttl);
            Item::Ping(body)
        }
        b"PONG" => Item::Pong,
        b"SUBSCRIBE" => Item::Subscribe(body, true),
        b"CANCEL" => Item::Subscribe(body, false),
        _ => Item::Other,
    })
}

/// Finds the property `Socket-Type`.
fn socket_type(mut body: Bytes) -> Result<String, ZmtpError> {
    while !body.is_empty() {
        let name_len = usize::from(body.get_u8());
        if body.len() < name_len + 4 {
            return Err(ZmtpError::Command);
        }
        let name = body.split_to(name_len);
        let len = body.get_u32() as usize;
        if body.len() < len {
            return Err(ZmtpError::Command);
        }
        let value = body.split_to(len);
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(String::from_utf8_lossy(&value).into_owned());
        }
    }
    Err(ZmtpError::Command)
}

/// What an old-style subscription message asks: topics are prefixed by 1 (begin) or 0 (end).
pub(super) fn subscription(parts: &[Bytes]) -> Option<(Bytes, bool)> {
    match parts {
        [only] => match only.first() {
            Some(begin @ (0 | 1)) => Some((only.slice(1..), *begin == 1)),
            _ => None,
        },
        _ => None,
    }
}

fn put_head(flags: u8, len: usize, out: &mut BytesMut) {
    match u8::try_from(len) {
        Ok(len) => out.put_slice(&[flags, len]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(len as u64);
        }
    }
}

/// Appends a message.
pub(super) fn put_message<P: AsRef<[u8]>>(parts: &[P], out: &mut BytesMut) {
    for (i, part) in parts.iter().enumerate() {
        let part = part.as_ref();
        let more = if i + 1 < parts.len() { MORE } else { 0 };
        put_head(more, part.len(), out);
        out.put_slice(part);
    }
}

fn put_command(name: &[u8], body: &[u8], out: &mut BytesMut) {
    put_head(COMMAND, 1 + name.len() + body.len(), out);
    out.put_u8(name.len() as u8);
    out.put_slice(name);
    out.put_slice(body);
}

/// Appends READY for our kind of socket.
pub(super) fn put_ready(socket_type: &str, out: &mut BytesMut) {
    let mut body = BytesMut::new();
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.put_u8(name.len() as u8);
        body.put_slice(name.as_bytes());
        body.put_u32(value.len() as u32);
        body.put_slice(value.as_bytes());
    }
    put_command(b"READY", &body, out);
}

/// Appends a heartbeat; the peer may drop us after `ttl_ds` tenths of a second of silence (0: never).
pub(super) fn put_ping(ttl_ds: u16, out: &mut BytesMut) {
    put_command(b"PING", &ttl_ds.to_be_bytes(), out);
}

/// Appends the answer to a heartbeat.
pub(super) fn put_pong(context: &[u8], out: &mut BytesMut) {
    put_command(b"PONG", context, out);
}

#[cfg(test)]
mod tests;
