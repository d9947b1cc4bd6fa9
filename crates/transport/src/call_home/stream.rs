//! One answer, as its worker sends it.
//!
//! Whoever reads the answer reads the socket: no task and no queue stand between. A reader that is slow slows its own
//! worker's stream, and nothing else.
//!
//! What always holds: an answer is complete once its worker has marked it so, and not before; a stream that is dropped
//! before tells its worker to stop.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use kvasir_protocol::control::{Prologue, Word};
use kvasir_protocol::frame::TwoPart;
use kvasir_protocol::{Annotated, Item, Payload, ProtocolError, TokenFrame};
use kvasir_tasks::Tasks;
use kvasir_types::{Codec, Token, WorkerId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::server::Expected;
use super::socket::AnswerSocket;
use crate::tcp::TcpOptions;
use crate::{AnswerStep, PlaneError};

/// How much is read at once of what nobody wants.
const LINGER_CHUNK: usize = 4 << 10;
/// Longest time that a connection is kept after its answer, for the worker's last words.
const LINGER: Duration = Duration::from_secs(1);
/// Most that is read meanwhile.
const LINGER_BYTES_MAX: usize = 8 << 20;

/// The items of one answer. Dropping it tells the worker to stop.
pub struct CallStream {
    worker: WorkerId,
    codec: Codec,
    /// Gone once nothing more is read.
    socket: Option<AnswerSocket>,
    buffer: BytesMut,
    /// The frame of the last item.
    last: Bytes,
    frame_bytes_max: usize,
    tasks: Tasks,
}

impl std::fmt::Debug for CallStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallStream")
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

/// How long a worker may take for each step, and how much it may send at once.
#[derive(Clone, Debug)]
pub(crate) struct AnswerLimits {
    pub(crate) call_home: Duration,
    pub(crate) prologue: Duration,
    pub(crate) frame_bytes_max: usize,
}

impl AnswerLimits {
    /// Those that these options name.
    pub(crate) const fn of(options: &TcpOptions) -> Self {
        Self {
            call_home: options.call_home_timeout,
            prologue: options.prologue_timeout,
            frame_bytes_max: options.message_bytes_max,
        }
    }
}

impl CallStream {
    /// Waits until the worker has connected and begun.
    pub(crate) async fn open(
        mut expected: Expected,
        worker: WorkerId,
        codec: Codec,
        limits: &AnswerLimits,
        tasks: &Tasks,
    ) -> Result<Self, PlaneError> {
        let arrived = expected.arrive(worker, limits.call_home).await?;
        let socket = arrived.caller.into_stream();
        let socket = socket.map_err(|error| PlaneError::Local(error.to_string()))?;
        let mut stream = Self {
            worker,
            codec,
            socket: Some(AnswerSocket::new(socket)),
            buffer: arrived.buffer,
            last: Bytes::new(),
            frame_bytes_max: limits.frame_bytes_max,
            tasks: tasks.clone(),
        };
        let begun = timeout(limits.prologue, poll_fn(|cx| stream.poll_frame(cx)));
        let frame = match begun.await {
            Ok(frame) => frame?.ok_or(PlaneError::Disconnected(worker))?,
            Err(_) => {
                return Err(PlaneError::Timeout {
                    worker,
                    step: AnswerStep::Prologue,
                });
            }
        };
        let prologue = Prologue::decode(&frame.header).map_err(|e| stream.broke(&e))?;
        match prologue.error {
            None => Ok(stream),
            Some(why) => {
                stream.close();
                Err(PlaneError::NotStarted { worker, why })
            }
        }
    }

    /// Who answers.
    #[must_use]
    pub const fn worker(&self) -> WorkerId {
        self.worker
    }

    /// The next item's data; `None` once the worker has marked its answer complete. Safe to drop while waiting.
    pub async fn next(&mut self) -> Option<Result<Payload, PlaneError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`Self::next`], for callers that are polled themselves.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Payload, PlaneError>>> {
        loop {
            if self.socket.is_none() {
                return Poll::Ready(None);
            }
            let item = match ready!(self.poll_item(cx)) {
                Ok(item) => item,
                Err(error) => {
                    self.close();
                    return Poll::Ready(Some(Err(error)));
                }
            };
            if item.complete_final {
                let end = self.end();
                return Poll::Ready(end.err().map(Err));
            }
            if let Some(data) = item.data {
                return Poll::Ready(Some(Ok(data)));
            }
        }
    }

    /// What the last item's frames look like, if `item`, which was read from it, says nothing but one token.
    pub(crate) fn token_frame(&self, item: &Annotated) -> Option<TokenFrame> {
        TokenFrame::of(self.codec, &self.last, item)
    }

    /// Takes the frames that say nothing but one more token, as far as they are here.
    pub(crate) fn take_tokens(&mut self, known: &TokenFrame, out: &mut Vec<Token>) {
        while self.socket.is_some()
            && let Some((body, length)) = TwoPart::peek_body(&self.buffer, self.frame_bytes_max)
            && let Some(token) = known.token(body)
        {
            out.push(token);
            self.buffer.advance(length);
        }
    }

    /// Asks the worker to end the answer soon. What it still sends can be read.
    pub fn stop(&self) {
        self.say(Word::Stop);
    }

    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Result<Item, PlaneError>> {
        let Some(frame) = ready!(self.poll_frame(cx))? else {
            return Poll::Ready(Err(PlaneError::Disconnected(self.worker)));
        };
        if frame.header.is_empty() {
            let item = Item::decode(self.codec, &frame.body);
            self.last = frame.body;
            return Poll::Ready(item.map_err(|error| self.broke(&error)));
        }
        Poll::Ready(Err(match Word::decode(&frame.header) {
            // The worker says that all was sent, and has not marked it complete.
            Some(Word::Sentinel) => PlaneError::Disconnected(self.worker),
            _ => self.broke(&ProtocolError::Order {
                what: "a frame with a header",
            }),
        }))
    }

    /// All has been sent. What follows must be the worker's goodbye.
    fn end(&mut self) -> Result<(), PlaneError> {
        let after = TwoPart::take(&mut self.buffer, self.frame_bytes_max);
        let Some(socket) = self.socket.take() else {
            return Ok(());
        };
        match after {
            Ok(Some(frame)) if Word::decode(&frame.header) == Some(Word::Sentinel) => Ok(()),
            Ok(None) => {
                self.linger(socket);
                Ok(())
            }
            Ok(Some(_)) => Err(self.broke(&ProtocolError::Order {
                what: "an item behind the mark of the last one",
            })),
            Err(error) => Err(self.broke(&error)),
        }
    }

    /// The next frame; none if the worker closed the connection between two.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<TwoPart>, PlaneError>> {
        loop {
            match TwoPart::take(&mut self.buffer, self.frame_bytes_max) {
                Ok(Some(frame)) => return Poll::Ready(Ok(Some(frame))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(self.broke(&error))),
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) => return Poll::Ready(Ok(None)),
                Ok(_) => {}
                Err(_) => return Poll::Ready(Err(PlaneError::Disconnected(self.worker))),
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match &mut self.socket {
            Some(socket) => socket.poll_read(cx, &mut self.buffer),
            None => Poll::Ready(Ok(0)),
        }
    }

    fn broke(&self, error: &ProtocolError) -> PlaneError {
        PlaneError::Protocol {
            worker: self.worker,
            why: error.to_string(),
        }
    }

    fn say(&self, word: Word) {
        if let Some(socket) = &self.socket {
            socket.say(&TwoPart::of_header(word.encode()).to_bytes());
        }
    }

    fn close(&mut self) {
        self.say(Word::Kill);
        if let Some(socket) = self.socket.take() {
            self.linger(socket);
        }
    }

    /// A connection that is closed with something unread is reset, and the worker may never see our last word.
    fn linger(&self, socket: AnswerSocket) {
        if Handle::try_current().is_ok()
            && let Ok(socket) = socket.into_stream()
        {
            self.tasks.background().spawn(linger(socket));
        }
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        self.close();
    }
}

/// Says that nothing more is sent, and reads what still comes until the worker closes too.
pub(super) async fn linger(mut socket: TcpStream) {
    let reading = async {
        socket.shutdown().await?;
        let mut left = LINGER_BYTES_MAX;
        let mut sink = [0u8; LINGER_CHUNK];
        while left > 0 {
            match socket.read(&mut sink).await? {
                0 => break,
                read => left = left.saturating_sub(read),
            }
        }
        io::Result::Ok(())
    };
    let _ = timeout(LINGER, reading).await;
}
