//! The channels of a worker on the event plane.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;

use kvasir_discovery::{EndpointName, EventTransport};
use kvasir_msgpack::Value;
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::event_plane::{
    ChannelAddress, NatsEvents, PlanePublisher, PlanePublisherOptions,
};
use kvasir_wire::native::Topic;

/// How a worker's events reach whoever listens.
#[derive(Clone, Debug)]
pub enum EventCarrier {
    /// Each channel is a PUB socket of this process.
    Zmq {
        /// The host by which listeners reach it.
        host: String,
    },
    /// Each channel is a part of a subject.
    Nats {
        /// The connection.
        events: NatsEvents,
        /// What stands before the topic in a subject.
        prefix: String,
    },
}

impl EventCarrier {
    /// Channels of an endpoint over NATS.
    #[must_use]
    pub fn nats(events: NatsEvents, endpoint: &EndpointName) -> Self {
        let EndpointName {
            namespace,
            component,
            endpoint,
        } = endpoint;
        Self::Nats {
            events,
            prefix: format!("namespace.{namespace}.component.{component}.endpoint.{endpoint}"),
        }
    }
}

/// One topic that a worker publishes.
#[derive(Debug)]
pub(crate) struct Channel {
    publisher: PlanePublisher,
    clock: Clock,
}

/// A publisher's id: random, and exact as a number of JavaScript.
fn publisher_id() -> u64 {
    // The standard library seeds its hashers from the system; nothing more is needed here.
    (RandomState::new().build_hasher().finish() >> 11).max(1)
}

impl Channel {
    pub(crate) async fn open(
        topic: Topic,
        carrier: &EventCarrier,
        clock: Clock,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let mut options = PlanePublisherOptions {
            publisher: publisher_id(),
            topic,
            host: String::new(),
        };
        let publisher = match carrier {
            EventCarrier::Zmq { host } => {
                options.host.clone_from(host);
                PlanePublisher::bind_zmq(tasks, options).await?
            }
            EventCarrier::Nats { events, prefix } => {
                PlanePublisher::on_nats(events, prefix, &options)
            }
        };
        Ok(Self { publisher, clock })
    }

    pub(crate) fn id(&self) -> u64 {
        self.publisher.publisher()
    }

    pub(crate) fn topic(&self) -> Topic {
        self.publisher.topic()
    }

    /// What discovery says of it.
    pub(crate) fn transport(&self) -> EventTransport {
        match self.publisher.address() {
            ChannelAddress::Zmq(endpoint) => EventTransport::Zmq { endpoint },
            ChannelAddress::Nats(subject) => {
                let topic = self.topic().name();
                let prefix = subject.strip_suffix(topic).unwrap_or(&subject);
                EventTransport::Nats {
                    subject_prefix: prefix.trim_end_matches('.').to_owned(),
                }
            }
        }
    }

    /// Whether nobody listens, as far as that can be known.
    pub(crate) fn is_unheard(&self) -> bool {
        self.publisher.subscribers() == Some(0)
    }

    /// Whether listeners take one event a message.
    pub(crate) fn is_bare(&self) -> bool {
        self.publisher.is_bare()
    }

    pub(crate) fn publish(&self, payload: Vec<u8>) {
        let now = self.clock.unix_millis(self.clock.now());
        self.publisher.publish(payload, now);
    }

    pub(crate) fn publish_value(&self, value: &Value) {
        let mut payload = Vec::new();
        value.to_msgpack(&mut payload);
        self.publish(payload);
    }
}
