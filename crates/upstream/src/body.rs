//! The body of an engine's answer, and what becomes of its connection.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::futures::OwnedNotified;

use crate::UpstreamError;
use crate::line::Line;
use crate::pool::Pool;

/// The body of an engine's answer. Read to its end, its connection goes back to the pool; dropped before, the
/// connection is closed and the engine stops working on it.
pub struct UpstreamBody {
    line: Option<Line>,
    pool: Pool,
    /// When it was asked for, in the pool's count of its ends.
    era: u32,
    place: Option<OwnedSemaphorePermit>,
    /// Who is woken when the pool is cut; made when there is first something to wait for.
    cut: Option<(Pin<Box<OwnedNotified>>, Waker)>,
}

impl UpstreamBody {
    pub(crate) fn new(
        line: Line,
        pool: Pool,
        era: u32,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            line: Some(line),
            pool,
            era,
            place,
            cut: None,
        }
    }

    /// The next piece; `None` at the end.
    pub fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let Some(line) = &mut self.line else {
            return Poll::Ready(None);
        };
        match line.poll_data(cx) {
            Poll::Ready(Some(Ok(data))) => {
                self.pool.heard();
                // Whoever writes a body of known length does not ask once more for its end.
                if line.is_at_end() {
                    self.give_back();
                }
                Poll::Ready(Some(Ok(data)))
            }
            Poll::Ready(Some(Err(error))) => {
                self.line = None;
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => {
                self.give_back();
                Poll::Ready(None)
            }
            Poll::Pending if self.is_cut(cx) => {
                self.line = None;
                Poll::Ready(Some(Err(self.pool.why_cut())))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Whether everything has come that will; known before the end is asked for if the length was.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.line.is_none()
    }

    fn give_back(&mut self) {
        if let Some(line) = self.line.take() {
            self.pool.give_back(line, self.era);
        }
    }

    /// Whether what runs on the pool was given up; if not, `cx` is woken when it is.
    fn is_cut(&mut self, cx: &mut Context<'_>) -> bool {
        // Whoever polls is nearly always the same task, which is registered already.
        let registered = |(_, waker): &(_, Waker)| waker.will_wake(cx.waker());
        if !self.cut.as_ref().is_some_and(registered) {
            let mut cut = Box::pin(self.pool.cutting());
            let _ = cut.as_mut().poll(cx);
            self.cut = Some((cut, cx.waker().clone()));
        }
        self.pool.era() != self.era
    }

    /// Closes the connection, as if it were dropped.
    pub fn close(&mut self) {
        self.line = None;
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
