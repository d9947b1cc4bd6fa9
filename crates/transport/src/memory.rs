//! The request plane inside one process: channels instead of sockets.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use kvasir_types::{TokenRequest, WorkerId};
use tokio::sync::mpsc;

use crate::plane::SendFuture;
use crate::{PlaneError, RequestPlane, TokenSink, token_stream};

/// Requests that wait at one worker before it takes them; past this the worker is overloaded.
const INBOX_MAX: usize = 4096;

type Workers = Arc<RwLock<HashMap<WorkerId, mpsc::Sender<Call>>>>;

/// Workers that live in this process. Clones are one plane.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlane {
    workers: Workers,
}

/// One request, as its worker receives it.
#[derive(Debug)]
pub struct Call {
    /// The request.
    pub request: TokenRequest,
    /// Where its tokens go.
    pub reply: TokenSink,
}

/// A worker's place on the plane; dropping it leaves.
#[derive(Debug)]
pub struct WorkerInbox {
    worker: WorkerId,
    calls: mpsc::Receiver<Call>,
    workers: Workers,
}

impl MemoryPlane {
    /// A plane without workers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the place of `worker`. One that held it before gets no more calls.
    #[must_use]
    pub fn join(&self, worker: WorkerId) -> WorkerInbox {
        let (sender, calls) = mpsc::channel(INBOX_MAX);
        self.workers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(worker, sender);
        WorkerInbox {
            worker,
            calls,
            workers: Arc::clone(&self.workers),
        }
    }

    fn hand_over(
        &self,
        worker: WorkerId,
        request: TokenRequest,
    ) -> Result<crate::TokenStream, PlaneError> {
        let workers = self.workers.read().unwrap_or_else(PoisonError::into_inner);
        let calls = workers.get(&worker).ok_or(PlaneError::Gone(worker))?;
        let (reply, stream) = token_stream(worker);
        calls
            .try_send(Call { request, reply })
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => PlaneError::Overloaded(worker),
                mpsc::error::TrySendError::Closed(_) => PlaneError::Gone(worker),
            })?;
        Ok(stream)
    }
}

impl RequestPlane for MemoryPlane {
    fn send(&self, worker: WorkerId, request: TokenRequest) -> SendFuture<'_> {
        Box::pin(std::future::ready(self.hand_over(worker, request)))
    }
}

impl WorkerInbox {
    /// The next request; waits for one. `None` if another took this worker's place.
    pub async fn next(&mut self) -> Option<Call> {
        self.calls.recv().await
    }

    /// The next request, if one waits already.
    pub fn try_next(&mut self) -> Option<Call> {
        self.calls.try_recv().ok()
    }
}

impl Drop for WorkerInbox {
    fn drop(&mut self) {
        self.calls.close();
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        if workers
            .get(&self.worker)
            .is_some_and(mpsc::Sender::is_closed)
        {
            workers.remove(&self.worker);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::{DpRank, FinishReason, RequestContext, RequestId, Sampling, TokenItem};

    use super::*;

    const W: WorkerId = WorkerId(1);

    fn request() -> TokenRequest {
        TokenRequest {
            id: RequestId(1),
            model: "m".into(),
            tokens: [1, 2, 3].into(),
            sampling: Sampling::default(),
            rank: DpRank(0),
            priority: 0,
            lora: None,
            salt: None,
            context: RequestContext::default(),
        }
    }

    #[tokio::test]
    async fn a_call_reaches_its_worker_and_the_answer_comes_back() {
        let plane = MemoryPlane::new();
        let mut inbox = plane.join(W);
        let mut stream = plane.send(W, request()).await.unwrap();
        let call = inbox.next().await.unwrap();
        assert_eq!(call.request, request());
        call.reply.push(TokenItem {
            finish: Some(FinishReason::Stop),
            ..TokenItem::default()
        });
        assert_eq!(
            stream.next().await.unwrap().unwrap().finish,
            Some(FinishReason::Stop)
        );
    }

    #[tokio::test]
    async fn a_worker_that_left_is_gone_and_its_waiting_calls_are_disconnected() {
        let plane = MemoryPlane::new();
        let inbox = plane.join(W);
        let mut waiting = plane.send(W, request()).await.unwrap();
        drop(inbox);
        assert_eq!(waiting.next().await, Some(Err(PlaneError::Disconnected(W))));
        assert_eq!(
            plane.send(W, request()).await.err(),
            Some(PlaneError::Gone(W))
        );
    }

    #[tokio::test]
    async fn a_newcomer_takes_the_place_and_the_old_one_leaving_changes_nothing() {
        let plane = MemoryPlane::new();
        let mut old = plane.join(W);
        let mut new = plane.join(W);
        assert!(old.next().await.is_none());
        drop(old);
        assert!(plane.send(W, request()).await.is_ok());
        assert!(new.try_next().is_some());
    }

    #[tokio::test]
    async fn a_full_inbox_refuses() {
        let plane = MemoryPlane::new();
        let _inbox = plane.join(W);
        let mut streams = Vec::new();
        for _ in 0..INBOX_MAX {
            streams.push(plane.send(W, request()).await.unwrap());
        }
        assert_eq!(
            plane.send(W, request()).await.err(),
            Some(PlaneError::Overloaded(W))
        );
    }
}
