//! The way back: an answer that never makes its worker wait.
//!
//! An engine cannot pause one request of its batch, so a slow client must not slow the sender. What the
//! reader has not taken yet is kept as *one* item to which new tokens are appended: the memory held is
//! bounded by the length of the answer, and a reader that was late catches up in one step.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use kvasir_types::{TokenItem, WorkerId};

use crate::PlaneError;

/// Opens the way back for one request to `worker`.
#[must_use]
pub fn token_stream(worker: WorkerId) -> (TokenSink, TokenStream) {
    let shared = Arc::new(Shared {
        worker,
        state: Mutex::default(),
    });
    (
        TokenSink {
            shared: Arc::clone(&shared),
        },
        TokenStream {
            source: Source::Memory(shared),
        },
    )
}

#[derive(Debug)]
struct Shared {
    worker: WorkerId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the reader has not taken.
    pending: Option<TokenItem>,
    /// How it ended: nothing is appended after this.
    end: Option<Result<(), PlaneError>>,
    /// The reader is gone.
    closed: bool,
    /// The reader, where it waits for news.
    reader: Option<Waker>,
    /// The sender, where it waits for the reader to go.
    sender: Option<Waker>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Result<TokenItem, PlaneError>>> {
        let mut state = self.lock();
        if let Some(item) = state.pending.take() {
            return Poll::Ready(Some(Ok(item)));
        }
        match &mut state.end {
            None => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(end) => Poll::Ready(std::mem::replace(end, Ok(())).err().map(Err)),
        }
    }

    fn end(&self, how: Result<(), PlaneError>) {
        let mut state = self.lock();
        state.end.get_or_insert(how);
        wake(state, |state| &mut state.reader);
    }
}

/// Makes one item of two that follow each other.
pub(crate) fn append(pending: &mut TokenItem, item: TokenItem) {
    pending.tokens.extend_from_slice(&item.tokens);
    pending.logprobs.extend(item.logprobs);
    pending.cached_tokens = pending.cached_tokens.or(item.cached_tokens);
    if item.disaggregated_params.is_some() {
        pending.disaggregated_params = item.disaggregated_params;
    }
    pending.finish = item.finish;
}

/// Wakes one side after the lock is given back, so that it does not wake into a held lock.
fn wake(mut state: MutexGuard<'_, State>, side: impl Fn(&mut State) -> &mut Option<Waker>) {
    let waker = side(&mut state).take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The worker's end. Dropped before an item with a finish reason, it tells the reader of a disconnection.
#[derive(Debug)]
pub struct TokenSink {
    shared: Arc<Shared>,
}

impl TokenSink {
    /// Appends tokens. An item with a finish reason ends the answer. Returns false if nobody reads any
    /// more: the request is cancelled and its work should stop.
    pub fn push(&self, item: TokenItem) -> bool {
        let mut state = self.shared.lock();
        if state.closed {
            return false;
        }
        if state.end.is_none() {
            let finished = item.finish.is_some();
            match &mut state.pending {
                None => state.pending = Some(item),
                Some(pending) => append(pending, item),
            }
            if finished {
                state.end = Some(Ok(()));
            }
        }
        wake(state, |state| &mut state.reader);
        true
    }

    /// Ends the answer with an error; what was pushed before is still delivered.
    pub fn fail(self, error: PlaneError) {
        self.shared.end(Err(error));
    }

    /// Whether the reader is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.lock().closed
    }

    /// Waits until the reader is gone.
    pub async fn closed(&self) {
        poll_fn(|cx| {
            let mut state = self.shared.lock();
            if state.closed {
                return Poll::Ready(());
            }
            state.sender = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for TokenSink {
    fn drop(&mut self) {
        self.shared
            .end(Err(PlaneError::Disconnected(self.shared.worker)));
    }
}

/// Where tokens come from when it is not a [`TokenSink`] of this process. Dropping it cancels the request.
pub trait TokenSource: Send + Sync {
    /// As [`TokenStream::poll_next`].
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<TokenItem, PlaneError>>>;
}

/// The frontend's end. Dropping it cancels the request.
#[derive(Debug)]
pub struct TokenStream {
    source: Source,
}

enum Source {
    /// A sink of this process.
    Memory(Arc<Shared>),
    /// A plane over sockets.
    Remote(Box<dyn TokenSource>),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(shared) => shared.fmt(f),
            Self::Remote(_) => f.write_str("Remote"),
        }
    }
}

impl TokenStream {
    /// Tokens of a plane over sockets.
    #[must_use]
    pub fn from_source(source: Box<dyn TokenSource>) -> Self {
        Self {
            source: Source::Remote(source),
        }
    }

    /// Everything that came since the last call; `None` after the item that carried a finish reason.
    /// Safe to drop while waiting: nothing is lost.
    pub async fn next(&mut self) -> Option<Result<TokenItem, PlaneError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`Self::next`], for callers that are polled themselves.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<TokenItem, PlaneError>>> {
        match &mut self.source {
            Source::Memory(shared) => shared.poll_next(cx),
            Source::Remote(source) => source.poll_next(cx),
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if let Source::Memory(shared) = &self.source {
            let mut state = shared.lock();
            state.closed = true;
            wake(state, |state| &mut state.sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::FinishReason;

    use super::*;

    const W: WorkerId = WorkerId(1);

    fn item(tokens: &[u32]) -> TokenItem {
        TokenItem {
            tokens: tokens.to_vec(),
            ..TokenItem::default()
        }
    }

    #[tokio::test]
    async fn a_late_reader_gets_everything_in_one_item() {
        let (sink, mut stream) = token_stream(W);
        sink.push(TokenItem {
            cached_tokens: Some(32),
            ..item(&[1])
        });
        sink.push(item(&[2, 3]));
        sink.push(TokenItem {
            finish: Some(FinishReason::Stop),
            ..item(&[4])
        });
        drop(sink);
        let all = stream.next().await.unwrap().unwrap();
        assert_eq!(all.tokens, [1, 2, 3, 4]);
        assert_eq!(
            (all.cached_tokens, all.finish),
            (Some(32), Some(FinishReason::Stop))
        );
        assert_eq!(stream.next().await, None);
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn a_sink_that_vanishes_is_a_disconnection_after_what_it_sent() {
        let (sink, mut stream) = token_stream(W);
        sink.push(item(&[1]));
        drop(sink);
        assert_eq!(stream.next().await, Some(Ok(item(&[1]))));
        assert_eq!(stream.next().await, Some(Err(PlaneError::Disconnected(W))));
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn a_failure_is_told_once_and_nothing_follows_it() {
        let (sink, mut stream) = token_stream(W);
        sink.fail(PlaneError::Overloaded(W));
        assert_eq!(stream.next().await, Some(Err(PlaneError::Overloaded(W))));
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn dropping_the_stream_cancels() {
        let (sink, stream) = token_stream(W);
        assert!(!sink.is_closed());
        let (_, told) = tokio::join!(async { drop(stream) }, async {
            sink.closed().await;
            sink.push(item(&[1]))
        });
        assert!(!told);
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken() {
        let (sink, mut stream) = token_stream(W);
        let (got, _) = tokio::join!(stream.next(), async {
            tokio::task::yield_now().await;
            sink.push(item(&[9]))
        });
        assert_eq!(got, Some(Ok(item(&[9]))));
    }
}
