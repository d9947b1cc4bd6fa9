//! The worker's side of requests over NATS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Subscriber};
use kvasir_tasks::Tasks;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{NatsLink, next_message, round_trip};
use crate::{Dispatcher, EndpointHandler, ServedEndpoint};

/// For so long after an endpoint is served no more, its subject is still read.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Takes requests over NATS for the endpoints of one process. Clones are one.
#[derive(Clone)]
pub struct NatsServer {
    link: NatsLink,
    dispatcher: Dispatcher,
    tasks: Tasks,
}

impl NatsServer {
    /// Answers at most `capacity` calls at once.
    #[must_use]
    pub fn new(link: NatsLink, capacity: usize, tasks: &Tasks) -> Self {
        Self {
            link,
            dispatcher: Dispatcher::new(capacity, tasks),
            tasks: tasks.clone(),
        }
    }

    /// The endpoints and the calls under way.
    #[must_use]
    pub const fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Serves `subject`, such as `dynamo_backend.generate-52156b15ad6774b`, until what it returns is dropped. Waits until the
    /// server has the subscription: who publishes there from now on is heard.
    pub async fn serve(
        &self,
        subject: &str,
        handler: Arc<dyn EndpointHandler>,
    ) -> io::Result<ServedEndpoint> {
        let gone = || io::Error::other("the connection to NATS has ended");
        let client = self.link.client().await.ok_or_else(gone)?;
        let requests = client.subscribe(subject.to_owned()).await;
        let requests = requests.map_err(io::Error::other)?;
        round_trip(&client).await?;
        let served = self.dispatcher.serve(subject, handler);
        let reading = CancellationToken::new();
        let over = reading.clone();
        let mut taking = Box::pin(take(
            requests,
            client,
            self.dispatcher.clone(),
            subject.to_owned(),
        ));
        self.tasks.background().spawn(async move {
            tokio::select! {
                () = &mut taking => {}
                () = over.cancelled() => {
                    // What is on its way is told that nobody serves it any more, not left without a word.
                    let _ = timeout(LAST_WORDS, taking).await;
                }
            }
        });
        Ok(served.reading(reading.drop_guard()))
    }
}

async fn take(mut requests: Subscriber, client: Client, dispatcher: Dispatcher, subject: String) {
    while let Some(request) = next_message(&mut requests).await {
        let ack = dispatcher.accept(&subject, request.payload);
        if let Some(reply) = request.reply {
            let _ = client.publish(reply, ack.text().into()).await;
        }
    }
}
