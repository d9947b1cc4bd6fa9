//! The worker's side of requests over NATS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Subscriber};
use bytes::Bytes;
use kvasir_tasks::Tasks;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{NatsLink, next_message};
use crate::{Dispatcher, EndpointHandler, ServedEndpoint};

/// A message that has not come round by then is sent again.
const ROUND_TRIP_PAUSE: Duration = Duration::from_secs(1);

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

/// Waits until the server has taken in all that was sent before: it takes one thing after the other.
async fn round_trip(client: &Client) -> io::Result<()> {
    let inbox = client.new_inbox();
    let mut own = client
        .subscribe(inbox.clone())
        .await
        .map_err(io::Error::other)?;
    loop {
        let sent = client.publish(inbox.clone(), Bytes::new()).await;
        sent.map_err(io::Error::other)?;
        match timeout(ROUND_TRIP_PAUSE, next_message(&mut own)).await {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => return Err(io::ErrorKind::BrokenPipe.into()),
            // The server went away with it, or is not there yet.
            Err(_) => {}
        }
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
