//! Reading a stream through a consumer that is asked for more.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::{Client, Message, Subscriber};
use bytes::Bytes;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{JetStream, JetStreamError};
use crate::nats::{NatsLinkState, next_message};

/// Messages that are asked for at once.
const BATCH: u64 = 512;
/// The server lets a request wait for messages this long.
const EXPIRES: Duration = Duration::from_secs(5);
/// How much later its answer may come.
const GRACE: Duration = Duration::from_secs(3);
/// Before a server that refuses for now is asked again.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);

/// A message of a stream.
#[derive(Clone, Debug)]
pub struct LogMessage {
    /// Its number in the stream.
    pub sequence: u64,
    /// Its bytes.
    pub payload: Bytes,
    /// How many follow it in the stream so far.
    pub pending: u64,
}

/// What asking a consumer yields.
#[derive(Debug)]
pub enum Pulled {
    /// The next message.
    Message(LogMessage),
    /// The consumer is gone, or never was there: it has to be made anew.
    Gone,
}

/// Reads a stream. Only numbers that rise are yielded: what the server repeats was yielded before.
#[derive(Debug)]
pub struct PullConsumer {
    client: Client,
    link: watch::Receiver<NatsLinkState>,
    next: String,
    inbox: String,
    messages: Subscriber,
    /// What is still to come of the request that is out, and until when.
    asked: Option<(u64, Instant)>,
    connection: u64,
    last: u64,
    /// Messages that the server was not told to be done with, and where to say so.
    unacknowledged: VecDeque<(u64, String)>,
    acknowledges: bool,
    /// The server let a request expire without a word.
    is_silent: bool,
}

impl PullConsumer {
    /// A consumer of this name that outlives us, from message `first` on. One that there was is made anew.
    pub async fn durable(
        jetstream: &JetStream,
        stream: &str,
        name: &str,
        first: u64,
    ) -> Result<Self, JetStreamError> {
        jetstream.create_durable(stream, name, first).await?;
        Self::read(jetstream, stream, name, first, true).await
    }

    /// A consumer for one reading, from message `first` on.
    pub async fn once(
        jetstream: &JetStream,
        stream: &str,
        first: u64,
    ) -> Result<Self, JetStreamError> {
        let name = jetstream.create_ephemeral(stream, first).await?;
        Self::read(jetstream, stream, &name, first, false).await
    }

    async fn read(
        jetstream: &JetStream,
        stream: &str,
        name: &str,
        first: u64,
        acknowledges: bool,
    ) -> Result<Self, JetStreamError> {
        let client = jetstream.client().await?;
        let inbox = client.new_inbox();
        let messages = client.subscribe(inbox.clone()).await;
        let messages = messages.map_err(|error| JetStreamError::Unreachable(error.to_string()))?;
        Ok(Self {
            client,
            link: jetstream.link().watch(),
            next: format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"),
            inbox,
            messages,
            asked: None,
            connection: 0,
            last: first.saturating_sub(1),
            unacknowledged: VecDeque::new(),
            acknowledges,
            is_silent: false,
        })
    }

    /// The number of the last message that was yielded, or was to be passed over.
    #[must_use]
    pub const fn last(&self) -> u64 {
        self.last
    }

    /// The next message; waits for it. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Pulled, JetStreamError> {
        loop {
            self.request().await?;
            let (mut link, connection) = (self.link.clone(), self.connection);
            let changed = link.wait_for(|state| state.connections != connection);
            let until = self.asked.map_or_else(Instant::now, |(_, until)| until);
            tokio::select! {
                biased;
                message = next_message(&mut self.messages) => match message {
                    None => return Err(JetStreamError::Unreachable("the process ends".to_owned())),
                    Some(message) => if let Some(pulled) = self.take(message) {
                        return Ok(pulled);
                    },
                },
                // What was asked for over the old connection does not come any more.
                _ = changed => self.asked = None,
                () = tokio::time::sleep_until(until) => {
                    self.asked = None;
                    // A server that does not even say that there is nothing may have lost the consumer.
                    let was_silent = std::mem::replace(&mut self.is_silent, true);
                    if was_silent && self.link.borrow().reached.is_ok() {
                        return Ok(Pulled::Gone);
                    }
                }
            }
        }
    }

    /// Asks for more messages, unless that was done.
    async fn request(&mut self) -> Result<(), JetStreamError> {
        if self.asked.is_some() {
            return Ok(());
        }
        self.connection = self.link.borrow().connections;
        let expires = EXPIRES.as_nanos() as u64;
        let body = json!({"batch": BATCH, "expires": expires}).to_string();
        let (next, inbox) = (self.next.clone(), self.inbox.clone());
        let asked = self.client.publish_with_reply(next, inbox, body.into());
        asked
            .await
            .map_err(|error| JetStreamError::Unreachable(error.to_string()))?;
        self.asked = Some((BATCH, Instant::now() + EXPIRES + GRACE));
        Ok(())
    }

    fn take(&mut self, message: Message) -> Option<Pulled> {
        self.is_silent = false;
        if let Some(status) = message.status {
            // 404 and 408: nothing for now; 409: refused or gone; 503: nobody knows the consumer.
            self.asked = None;
            return match status.as_u16() {
                409 if !is_gone(message.description.as_deref()) => {
                    self.asked = Some((BATCH, Instant::now() + REFUSED_PAUSE));
                    None
                }
                409 | 503 => Some(Pulled::Gone),
                _ => None,
            };
        }
        if let Some((left, _)) = &mut self.asked {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.asked = None;
            }
        }
        let reply = message.reply?;
        let (sequence, pending) = place(&reply)?;
        if sequence <= self.last {
            return None;
        }
        self.last = sequence;
        if self.acknowledges {
            self.unacknowledged.push_back((sequence, reply.to_string()));
        }
        Some(Pulled::Message(LogMessage {
            sequence,
            payload: message.payload,
            pending,
        }))
    }

    /// Tells the server that we are done with every message up to `sequence`.
    pub async fn acknowledge(&mut self, sequence: u64) {
        let mut reply = None;
        while let Some((first, _)) = self.unacknowledged.front()
            && *first <= sequence
        {
            reply = self.unacknowledged.pop_front();
        }
        if let Some((_, reply)) = reply {
            // One that is lost is made good by the next.
            let _ = self
                .client
                .publish(reply, Bytes::from_static(b"+ACK"))
                .await;
        }
    }
}

fn is_gone(description: Option<&str>) -> bool {
    description.is_some_and(|text| text.contains("Deleted") || text.contains("Not Found"))
}

/// Where a message stands, by the subject that acknowledges it: `$JS.ACK.` and, from the end, how many follow, the time, and two numbers. Newer
/// servers put a random token at the end, and a domain and an account before the stream.
fn place(reply: &str) -> Option<(u64, u64)> {
    let tokens: Vec<&str> = reply.split('.').collect();
    let at = match tokens.len() {
        9 => 5,
        11.. => 7,
        _ => return None,
    };
    let sequence = tokens.get(at)?.parse().ok()?;
    let pending = tokens.get(at + 3)?.parse().ok()?;
    Some((sequence, pending))
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn a_message_says_where_it_stands() {
        assert_eq!(place("$JS.ACK.s.c.1.42.7.1700000000.3"), Some((42, 3)));
        let long = "$JS.ACK.hub.acc.s.c.1.42.7.1700000000.3.rnd";
        assert_eq!(place(long), Some((42, 3)));
        assert_eq!(place("$JS.ACK.s.c"), None);
        assert_eq!(place("$JS.ACK.s.c.1.x.7.1700000000.3"), None);
    }
}
