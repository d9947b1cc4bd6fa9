//! Where a worker's answer goes: the connection to whoever asked.
//!
//! What always holds: an answer that is dropped unfinished is not marked complete, so the reader knows; after the reader
//! said that it wants no more, nothing more is sent.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kvasir_protocol::control::{Handshake, Prologue, Word};
use kvasir_protocol::frame::TwoPart;
use kvasir_protocol::{Item, Payload, PayloadWriter};
use kvasir_types::Codec;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use kvasir_tasks::Tasks;

/// Largest frame that a reader sends: a word.
const WORD_BYTES_MAX: usize = 1 << 10;
/// Longest time that a finished answer waits for its reader to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The worker's end of an answer's connection.
#[derive(Debug)]
pub struct ReplySink {
    socket: OwnedWriteHalf,
    codec: Codec,
    /// The reader has said that it wants no more, or has closed.
    cancelled: CancellationToken,
    /// The reader has closed.
    closed: CancellationToken,
    /// Nobody listens to the reader once this is gone.
    _open: DropGuard,
}

impl ReplySink {
    /// Names the answer that this connection brings.
    pub(crate) async fn open(
        socket: TcpStream,
        subject: String,
        codec: Codec,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let (reader, mut socket) = socket.into_split();
        let handshake = TwoPart::of_header(Handshake { subject }.encode());
        socket.write_all(&handshake.to_bytes()).await?;
        let (cancelled, closed) = (CancellationToken::new(), CancellationToken::new());
        let listening = listen(reader, cancelled.clone());
        let (told, open) = (closed.clone(), CancellationToken::new());
        let dropped = open.clone();
        tasks.background().spawn(async move {
            tokio::select! {
                () = listening => {}
                () = dropped.cancelled() => {}
            }
            told.cancel();
        });
        Ok(Self {
            socket,
            codec,
            cancelled,
            closed,
            _open: open.drop_guard(),
        })
    }

    /// How the caller writes and reads.
    #[must_use]
    pub const fn codec(&self) -> Codec {
        self.codec
    }

    /// Ends when the caller wants no more.
    #[must_use]
    pub fn cancellation(&self) -> CancellationToken {
        self.cancelled.clone()
    }

    /// Whether the caller wants no more.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.is_cancelled()
    }

    /// Says that the answer begins. False if the caller is gone.
    pub async fn start(&mut self) -> bool {
        self.send_frame(&TwoPart::of_header(Prologue::default().encode()))
            .await
    }

    /// Says why no answer begins.
    pub async fn refuse(mut self, why: &str) {
        let error = Some(why.to_owned());
        self.send_frame(&TwoPart::of_header(Prologue { error }.encode()))
            .await;
    }

    /// Sends an item. Waits while the caller is slow. False if the caller wants no more.
    pub async fn send(&mut self, data: &Payload) -> bool {
        self.send_with(|writer| writer.payload(data)).await
    }

    /// Sends an item that `write` writes.
    pub async fn send_with(&mut self, write: impl FnOnce(&mut PayloadWriter)) -> bool {
        let item = Item::encode_data(self.codec, write);
        self.send_frame(&TwoPart::of_body(item)).await
    }

    /// Marks the answer complete and ends it.
    pub async fn finish(self) {
        self.end(BytesMut::new()).await;
    }

    /// The same after a last item that `write` writes. Both are one write: the reader is woken once.
    pub async fn finish_with(self, write: impl FnOnce(&mut PayloadWriter)) {
        let mut last = BytesMut::new();
        TwoPart::of_body(Item::encode_data(self.codec, write)).encode(&mut last);
        self.end(last).await;
    }

    /// Sends `last`, and that it was the last.
    async fn end(mut self, mut last: BytesMut) {
        TwoPart::of_body(Item::end(true).encode(self.codec)).encode(&mut last);
        TwoPart::of_header(Word::Sentinel.encode()).encode(&mut last);
        if self.send_bytes(&last).await {
            // The reader closes first: what was sent is not lost to a reset.
            let _ = timeout(CLOSE_TIMEOUT, self.closed.cancelled()).await;
        }
    }

    async fn send_frame(&mut self, frame: &TwoPart) -> bool {
        self.send_bytes(&frame.to_bytes()).await
    }

    async fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        if self.cancelled.is_cancelled() {
            return false;
        }
        tokio::select! {
            sent = self.socket.write_all(bytes) => sent.is_ok(),
            () = self.cancelled.cancelled() => false,
        }
    }

    /// Sends bytes as they are: for workers that break the protocol on command.
    pub async fn send_raw(&mut self, bytes: Bytes) -> bool {
        self.send_bytes(&bytes).await
    }
}

/// Reads what the caller says until it closes.
async fn listen(mut reader: OwnedReadHalf, cancelled: CancellationToken) {
    let mut buffer = BytesMut::new();
    loop {
        match TwoPart::take(&mut buffer, WORD_BYTES_MAX) {
            Ok(Some(frame)) => match Word::decode(&frame.header) {
                Some(Word::Stop | Word::Kill) => cancelled.cancel(),
                Some(Word::Sentinel) | None => {}
            },
            Ok(None) => match reader.read_buf(&mut buffer).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => break,
            },
            Err(_) => break,
        }
    }
    cancelled.cancel();
}
