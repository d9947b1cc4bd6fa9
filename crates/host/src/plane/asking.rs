//! A source of router events whose worker can be asked what its cache holds.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvasir_tasks::Tasks;
use kvasir_transport::{EventSource, SourceEvent, SourceFault};
use kvasir_types::PlaneEndpoint;
use kvasir_wire::native::{RecoveryReply, RecoveryRequest};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

/// What [`RecoveryClient::ask`] returns.
pub type RecoveryFuture<'a> =
    Pin<Box<dyn Future<Output = Result<RecoveryReply, SourceFault>> + Send + 'a>>;

/// Asks a worker's own index. Whoever asks sets the time limit: dropping the future takes the question back.
pub trait RecoveryClient: Send + Sync + 'static {
    /// Puts a question to an endpoint.
    fn ask<'a>(
        &'a self,
        endpoint: &'a PlaneEndpoint,
        request: RecoveryRequest,
    ) -> RecoveryFuture<'a>;
}

/// Answers that wait to be read. There is one question at a time, and its failure.
const ANSWERS_MAX: usize = 4;

/// Events of a source, and answers of the worker that they are about.
pub(super) struct AskingSource<S> {
    source: S,
    client: Arc<dyn RecoveryClient>,
    endpoint: Option<PlaneEndpoint>,
    tasks: Tasks,
    sender: mpsc::Sender<SourceEvent>,
    answers: mpsc::Receiver<SourceEvent>,
    /// The question that is out.
    asked: Option<(u64, DropGuard)>,
}

impl<S> AskingSource<S> {
    pub(super) fn new(
        tasks: &Tasks,
        source: S,
        client: Arc<dyn RecoveryClient>,
        endpoint: Option<PlaneEndpoint>,
    ) -> Self {
        let (sender, answers) = mpsc::channel(ANSWERS_MAX);
        Self {
            source,
            client,
            endpoint,
            tasks: tasks.clone(),
            sender,
            answers,
            asked: None,
        }
    }
}

impl<S: EventSource> EventSource for AskingSource<S> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        // Never `None`: this end holds a sender, too.
        if let Poll::Ready(Some(answer)) = self.answers.poll_recv(cx) {
            return Poll::Ready(answer);
        }
        self.source.poll_next(cx)
    }

    fn replay(&mut self, attempt: u64, from: u64) {
        self.source.replay(attempt, from);
    }

    fn cancel_replay(&mut self, attempt: u64) {
        self.asked.take_if(|(asked, _)| *asked == attempt);
        self.source.cancel_replay(attempt);
    }

    fn query(&mut self, attempt: u64, request: RecoveryRequest) {
        let (client, sender) = (Arc::clone(&self.client), self.sender.clone());
        let endpoint = self.endpoint.clone();
        let ask = async move {
            let answer = match &endpoint {
                Some(endpoint) => client.ask(endpoint, request).await,
                None => Err(SourceFault::NoReplay),
            };
            let event = match answer {
                Ok(reply) => {
                    if let RecoveryReply::Error(reason) = &reply {
                        let rank = request.rank;
                        tracing::debug!(%rank, reason, "worker refuses to say what its cache holds");
                    }
                    SourceEvent::Answered { attempt, reply }
                }
                Err(fault) => {
                    tracing::debug!(rank = %request.rank, %fault, "worker did not say what its cache holds");
                    SourceEvent::ReplayFailed { attempt, fault }
                }
            };
            let _ = sender.send(event).await;
        };
        let stop = CancellationToken::new();
        self.tasks
            .spawn(stop.clone().run_until_cancelled_owned(ask));
        self.asked = Some((attempt, stop.drop_guard()));
    }
}
