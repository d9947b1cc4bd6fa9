//! The body of an engine's answer, and what becomes of its connection.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::futures::OwnedNotified;

use crate::UpstreamError;
use crate::connection::Connection;
use crate::pool::Pool;

/// The body of an engine's answer. Read to its end, its connection goes back to the pool; dropped before, the
/// connection is closed and the engine stops working on it.
pub struct UpstreamBody {
    connection: Option<Connection>,
    pool: Pool,
    /// The generation of the pool when the request was sent.
    generation: u32,
    /// The connection had served another request before.
    is_reused: bool,
    place: Option<OwnedSemaphorePermit>,
    /// Wakes the reader when requests are aborted. Made when the body is first pending.
    aborted: Option<(Pin<Box<OwnedNotified>>, Waker)>,
}

impl UpstreamBody {
    pub(crate) fn new(
        connection: Connection,
        pool: Pool,
        (generation, is_reused): (u32, bool),
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            connection: Some(connection),
            pool,
            generation,
            is_reused,
            place,
            aborted: None,
        }
    }

    /// The next piece; `None` at the end.
    pub fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let Some(connection) = &mut self.connection else {
            return Poll::Ready(None);
        };
        match connection.poll_data(cx) {
            Poll::Ready(Some(Ok(data))) => {
                // Hyper does not poll again for the end of a body of known length.
                let is_at_end = connection.is_at_end();
                self.pool.mark_received();
                self.outlive_abort();
                if is_at_end {
                    self.give_back();
                }
                Poll::Ready(Some(Ok(data)))
            }
            Poll::Ready(Some(Err(error))) => {
                self.connection = None;
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => {
                self.give_back();
                Poll::Ready(None)
            }
            Poll::Pending if self.is_aborted(cx) => {
                self.connection = None;
                Poll::Ready(Some(Err(self.pool.abort_error())))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Whether more was read than was given out: the next piece may be at hand.
    #[must_use]
    pub fn has_unparsed(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(Connection::has_unparsed)
    }

    /// Whether the body has ended. Known before its end is polled if its length is known.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.connection.is_none()
    }

    /// The body names a request, ours or not. Says whether it is another request's answer, for all that is known of the engine: then
    /// it must not be used, and ours is to be asked again.
    #[must_use]
    pub fn is_named_otherwise(&self, names_ours: bool) -> bool {
        self.pool.is_named_otherwise(names_ours, self.is_reused)
    }

    fn give_back(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.give_back(connection, self.generation);
        }
    }

    /// Whether requests in flight were aborted; if not, `cx` is woken when they are.
    fn is_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        // The same task polls nearly always, and is registered already.
        let registered = |(_, waker): &(_, Waker)| waker.will_wake(cx.waker());
        if !self.aborted.as_ref().is_some_and(registered) {
            let mut aborted = Box::pin(self.pool.aborted());
            let _ = aborted.as_mut().poll(cx);
            self.aborted = Some((aborted, cx.waker().clone()));
        }
        self.pool.generation() != self.generation
    }

    /// Bytes came on this stream, perhaps after they waited for a slow client: it is not as dead as it was taken for.
    fn outlive_abort(&mut self) {
        let generation = self.pool.generation();
        if self.generation != generation && !self.pool.is_closed() {
            self.generation = generation;
            self.aborted = None;
        }
    }

    /// The answer is complete, as its data says: what may still come is the end of its framing. The connection is kept if that is all
    /// that comes.
    pub fn finish(&mut self) {
        self.give_back();
        self.place = None;
    }

    /// Closes the connection, as if it were dropped.
    pub fn close(&mut self) {
        self.connection = None;
        self.place = None;
    }

    /// All of it, if it is no longer than `limit` bytes.
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = poll_fn(|cx| self.poll_data(cx)).await {
            let data = data?;
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLong);
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }
}
