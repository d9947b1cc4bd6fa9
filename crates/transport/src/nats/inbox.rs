//! Where acknowledgements of requests over NATS come back: one subscription for all of them.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_nats::{Message, StatusCode};
use bytes::Bytes;
use kvasir_tasks::Tasks;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{NatsLink, next_message};

/// What came back for a request.
#[derive(Debug)]
pub(super) enum Reply {
    /// The worker's words.
    Ack(Bytes),
    /// The server says that nobody reads the subject.
    Nobody,
}

/// The subscription. Clones are one.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    prefix: String,
    waiting: Mutex<Waiting>,
    /// Fires once the subscription has been asked for: what is published after it can be answered.
    listening: CancellationToken,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    replies: HashMap<u64, oneshot::Sender<Reply>>,
}

/// A reply that is waited for; dropped, it is waited for no more.
#[derive(Debug)]
pub(super) struct ReplyWait {
    number: u64,
    shared: Arc<Shared>,
    reply: oneshot::Receiver<Reply>,
}

impl Inbox {
    /// Subscribes as soon as the link is used, by a task of `tasks` on the runtime of the caller.
    pub(super) fn open(link: &NatsLink, tasks: &Tasks) -> Self {
        let keys = RandomState::new();
        let shared = Arc::new(Shared {
            prefix: format!("_INBOX.{:016x}{:016x}", keys.hash_one(0), keys.hash_one(1)),
            waiting: Mutex::default(),
            listening: CancellationToken::new(),
        });
        tasks
            .background()
            .spawn(listen(link.clone(), Arc::clone(&shared)));
        Self { shared }
    }

    /// Waits until replies can come.
    pub(super) async fn listening(&self) {
        self.shared.listening.cancelled().await;
    }

    /// Waits for a reply from now on.
    pub(super) fn expect(&self) -> ReplyWait {
        let (sender, reply) = oneshot::channel();
        let mut waiting = self.shared.lock();
        let number = waiting.next;
        waiting.next += 1;
        waiting.replies.insert(number, sender);
        drop(waiting);
        ReplyWait {
            number,
            shared: Arc::clone(&self.shared),
            reply,
        }
    }
}

impl ReplyWait {
    /// Where the reply is to be sent.
    pub(super) fn subject(&self) -> String {
        format!("{}.{:x}", self.shared.prefix, self.number)
    }

    /// The reply. Waits for ever if none comes. Safe to drop while waiting.
    pub(super) async fn reply(&mut self) -> Reply {
        match (&mut self.reply).await {
            Ok(reply) => reply,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for ReplyWait {
    fn drop(&mut self) {
        self.shared.lock().replies.remove(&self.number);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, message: Message) {
        let number = message.subject.rsplit_once('.');
        let number = number.and_then(|(_, number)| u64::from_str_radix(number, 16).ok());
        let waiting = number.and_then(|number| self.lock().replies.remove(&number));
        // Who does not wait any more wants no reply.
        if let Some(waiting) = waiting {
            let _ = waiting.send(match message.status {
                Some(StatusCode::NO_RESPONDERS) => Reply::Nobody,
                _ => Reply::Ack(message.payload),
            });
        }
    }
}

async fn listen(link: NatsLink, shared: Arc<Shared>) {
    let Some(client) = link.wanted_client().await else {
        return;
    };
    let Ok(mut replies) = client.subscribe(format!("{}.*", shared.prefix)).await else {
        return;
    };
    shared.listening.cancel();
    while let Some(message) = next_message(&mut replies).await {
        shared.take(message);
    }
}
