//! Publishing on the event plane: one topic, one publisher, its own numbers.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_wire::native::{Envelope, Topic};

use super::ChannelAddress;
#[cfg(feature = "nats")]
use super::nats::NatsEvents;
use crate::zmq::{Endpoint, ZmqLimits, ZmqPublisher};

/// Messages that wait for a slow listener.
const QUEUE_MESSAGES_MAX: usize = 100_000;

/// Who publishes what.
#[derive(Clone, Debug)]
pub struct PlanePublisherOptions {
    /// The publisher's id: random, below 2^53.
    pub publisher: u64,
    /// The topic.
    pub topic: Topic,
    /// Under which host listeners find a socket of this process.
    pub host: String,
}

/// Publishes the messages of one topic. Never waits.
#[derive(Debug)]
pub struct PlanePublisher {
    publisher: u64,
    topic: Topic,
    sequence: AtomicU64,
    carrier: Carrier,
}

#[derive(Debug)]
enum Carrier {
    Zmq {
        socket: ZmqPublisher,
        address: String,
    },
    #[cfg(feature = "nats")]
    Nats { events: NatsEvents, subject: String },
}

impl PlanePublisher {
    /// Binds a PUB socket on a free port of all interfaces.
    pub async fn bind_zmq(tasks: &Tasks, options: PlanePublisherOptions) -> io::Result<Self> {
        let limits = ZmqLimits {
            queue_messages_max: QUEUE_MESSAGES_MAX,
            ..ZmqLimits::default()
        };
        let everywhere = if options.host.contains(':') {
            "::"
        } else {
            "*"
        };
        let socket = ZmqPublisher::bind(tasks, &Endpoint::new(everywhere, 0), limits).await?;
        let address = Endpoint::new(&options.host, socket.address().port()).to_string();
        Ok(Self {
            publisher: options.publisher,
            topic: options.topic,
            sequence: AtomicU64::new(0),
            carrier: Carrier::Zmq { socket, address },
        })
    }

    /// Publishes on a subject; `prefix` is the subject without the topic.
    #[cfg(feature = "nats")]
    #[must_use]
    pub fn on_nats(events: &NatsEvents, prefix: &str, options: &PlanePublisherOptions) -> Self {
        Self {
            publisher: options.publisher,
            topic: options.topic,
            sequence: AtomicU64::new(0),
            carrier: Carrier::Nats {
                events: events.clone(),
                subject: format!("{prefix}.{}", options.topic),
            },
        }
    }

    /// Where it is listened to.
    #[must_use]
    pub fn address(&self) -> ChannelAddress {
        match &self.carrier {
            Carrier::Zmq { address, .. } => ChannelAddress::Zmq(address.clone()),
            #[cfg(feature = "nats")]
            Carrier::Nats { subject, .. } => ChannelAddress::Nats(subject.clone()),
        }
    }

    /// The publisher's id.
    #[must_use]
    pub const fn publisher(&self) -> u64 {
        self.publisher
    }

    /// The topic.
    #[must_use]
    pub const fn topic(&self) -> Topic {
        self.topic
    }

    /// Whether listeners take one event a message, not a list of them: what routers book, on NATS.
    #[must_use]
    pub const fn is_bare(&self) -> bool {
        match &self.carrier {
            Carrier::Zmq { .. } => false,
            #[cfg(feature = "nats")]
            Carrier::Nats { .. } => true,
        }
    }

    /// Sends a payload to whoever listens. `now_ms` is the Unix time in milliseconds. Returns how many listeners missed
    /// it for want of room.
    pub fn publish(&self, payload: Vec<u8>, now_ms: u64) -> usize {
        let envelope = Envelope {
            publisher: self.publisher,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed),
            published_ms: now_ms,
            topic: self.topic.name().to_owned(),
            payload,
        };
        let mut body = Vec::with_capacity(envelope.payload.len() + 128);
        match &self.carrier {
            Carrier::Zmq { socket, .. } => {
                envelope.encode_prefixed(&mut body);
                socket.publish(&[
                    Bytes::from_static(self.topic.name().as_bytes()),
                    Bytes::copy_from_slice(&envelope.publisher.to_be_bytes()),
                    Bytes::copy_from_slice(&envelope.sequence.to_be_bytes()),
                    body.into(),
                ])
            }
            #[cfg(feature = "nats")]
            Carrier::Nats { events, subject } => {
                envelope.encode(&mut body);
                usize::from(!events.publish(subject, body.into()))
            }
        }
    }

    /// Listeners whose subscription stands, where that is known.
    #[must_use]
    pub fn subscribers(&self) -> Option<usize> {
        match &self.carrier {
            Carrier::Zmq { socket, .. } => Some(socket.subscribers()),
            #[cfg(feature = "nats")]
            Carrier::Nats { .. } => None,
        }
    }
}
