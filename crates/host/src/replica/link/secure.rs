//! A connection between replicas that know the same secret: who is at the other end, and that nobody changes what is said.
//!
//! Both ends send who they are and 32 random bytes, then prove that they know the secret by a keyed hash of all of that; the dialer
//! first. From then on every frame carries a keyed hash of its number and its payload, with a key of its own for each direction and
//! connection. What is said is not hidden: load, block hashes and names of sessions can be read on the way.
//!
//! What always holds: nothing of a frame is used before its hash is checked; a frame from before, from elsewhere or out of order ends
//! the connection; a frame has at most [`FRAME_BYTES_MAX`] bytes.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use kvasir_router::ReplicaId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a frame's payload.
pub(super) const FRAME_BYTES_MAX: usize = 4 << 20;
/// First bytes of a connection: what is spoken, and its version.
const MAGIC: [u8; 8] = *b"KVPEER01";
const NONCE: usize = 32;
const TAG: usize = 32;
const HELLO: usize = MAGIC.len() + 8 + 8 + NONCE;
const CONTEXT: &str = "kvasir 2026-11-16 replica links";

/// What all replicas know and nobody else does.
#[derive(Clone)]
pub struct PeerSecret([u8; 32]);

impl std::fmt::Debug for PeerSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PeerSecret(..)")
    }
}

impl PeerSecret {
    /// Of any text; white space around it does not count.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(blake3::derive_key(CONTEXT, text.trim().as_bytes()))
    }
}

/// Which end opened the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Dialer,
    Acceptor,
}

impl Side {
    const fn other(self) -> Self {
        match self {
            Self::Dialer => Self::Acceptor,
            Self::Acceptor => Self::Dialer,
        }
    }

    const fn name(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"dialer",
            Self::Acceptor => b"acceptor",
        }
    }
}

/// A replica, as it introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) id: ReplicaId,
    /// When it began, in nanoseconds of the Unix clock.
    pub(super) began: u64,
}

/// The writing end.
pub(super) struct SecureWriter<W> {
    to: W,
    key: [u8; 32],
    count: u64,
}

/// The reading end.
pub(super) struct SecureReader<R> {
    from: R,
    key: [u8; 32],
    count: u64,
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn nonce() -> [u8; NONCE] {
    // The standard library seeds its hashers from the system, each anew.
    let mut nonce = [0; NONCE];
    for part in nonce.chunks_mut(8) {
        let drawn = RandomState::new().build_hasher().finish().to_le_bytes();
        part.copy_from_slice(drawn.get(..part.len()).unwrap_or_default());
    }
    nonce
}

fn hello(own: Introduction) -> [u8; HELLO] {
    let mut hello = [0; HELLO];
    let parts: [&[u8]; 4] = [
        &MAGIC,
        &own.id.0.to_le_bytes(),
        &own.began.to_le_bytes(),
        &nonce(),
    ];
    let bytes = parts.into_iter().flatten();
    hello
        .iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = *from);
    hello
}

fn number(hello: &[u8; HELLO], at: usize) -> u64 {
    let bytes = hello.get(at..at + 8).and_then(|b| b.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Proves to the other end who this is, and has it prove the same.
pub(super) async fn introduce<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    mut from: R,
    mut to: W,
    side: Side,
    own: Introduction,
    secret: &PeerSecret,
) -> io::Result<(Introduction, SecureReader<R>, SecureWriter<W>)> {
    let ours = hello(own);
    to.write_all(&ours).await?;
    let mut theirs = [0; HELLO];
    from.read_exact(&mut theirs).await?;
    if !theirs.starts_with(&MAGIC) {
        return Err(refused("the other end is no replica of this release"));
    }
    let (first, second) = match side {
        Side::Dialer => (&ours, &theirs),
        Side::Acceptor => (&theirs, &ours),
    };
    let derived = |what: &[u8], side: Side| {
        let mut hasher = blake3::Hasher::new_keyed(&secret.0);
        let parts: [&[u8]; 4] = [what, side.name(), first, second];
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    };
    let prove = derived(b"proof", side);
    if side == Side::Dialer {
        to.write_all(prove.as_bytes()).await?;
    }
    let mut proof = [0; TAG];
    from.read_exact(&mut proof).await?;
    // In constant time.
    if blake3::Hash::from_bytes(proof) != derived(b"proof", side.other()) {
        return Err(refused("the other end has another secret"));
    }
    if side == Side::Acceptor {
        to.write_all(prove.as_bytes()).await?;
    }
    let theirs = Introduction {
        id: ReplicaId(number(&theirs, MAGIC.len())),
        began: number(&theirs, MAGIC.len() + 8),
    };
    let reader = SecureReader {
        from,
        key: *derived(b"frames", side.other()).as_bytes(),
        count: 0,
    };
    let writer = SecureWriter {
        to,
        key: *derived(b"frames", side).as_bytes(),
        count: 0,
    };
    Ok((theirs, reader, writer))
}

fn tag(key: &[u8; 32], count: &mut u64, payload: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&count.to_le_bytes());
    hasher.update(payload);
    *count += 1;
    hasher.finalize()
}

impl<W: AsyncWrite + Unpin> SecureWriter<W> {
    /// Sends a payload of at most [`FRAME_BYTES_MAX`] bytes.
    pub(super) async fn write(&mut self, payload: &[u8]) -> io::Result<()> {
        if payload.len() > FRAME_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let tag = tag(&self.key, &mut self.count, payload);
        let mut frame = Vec::with_capacity(4 + TAG + payload.len());
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(tag.as_bytes());
        frame.extend(payload);
        self.to.write_all(&frame).await
    }
}

impl<R: AsyncRead + Unpin> SecureReader<R> {
    /// The next payload. To be called again only when it has ended.
    pub(super) async fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length).await?;
        let length = u32::from_be_bytes(length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(refused("a frame is too long"));
        }
        let mut found = [0; TAG];
        self.from.read_exact(&mut found).await?;
        let mut payload = vec![0; length];
        self.from.read_exact(&mut payload).await?;
        match blake3::Hash::from_bytes(found) == tag(&self.key, &mut self.count, &payload) {
            true => Ok(payload),
            false => Err(refused("a frame was changed on the way")),
        }
    }
}

/// What a liar on the way would do.
#[cfg(test)]
impl<W: AsyncWrite + Unpin> SecureWriter<W> {
    /// A frame was dropped.
    pub(super) fn skip(&mut self) {
        self.count += 1;
    }

    /// A frame of before is sent again.
    pub(super) async fn write_raw(&mut self, payload: &[u8]) -> io::Result<()> {
        self.count = 0;
        self.write(payload).await
    }

    /// A frame says that it is longer than anything.
    pub(super) async fn lie(&mut self) -> io::Result<()> {
        self.to.write_all(&u32::MAX.to_be_bytes()).await
    }
}
