//! How a channel is listened to, by where it is.

use kvasir_tasks::Tasks;
use kvasir_transport::EventSource;
use kvasir_transport::event_plane::ChannelAddress;
#[cfg(feature = "nats")]
use kvasir_transport::event_plane::NatsEvents;
use kvasir_transport::zmq::{Endpoint, ZmqFraming, ZmqLimits, ZmqSource, ZmqSourceOptions};
use kvasir_wire::native::Topic;

use super::EventPlaneOptions;

/// Messages and bytes that wait in one channel.
const QUEUE_MESSAGES_MAX: usize = 4096;
const QUEUE_BYTES_MAX: usize = 16 << 20;

/// A channel that is listened to.
pub(super) type ChannelSource = Box<dyn EventSource>;

/// The networks that channels are on.
pub(super) struct Carriers {
    #[cfg(feature = "nats")]
    nats: NatsEvents,
}

impl Carriers {
    #[cfg_attr(
        not(feature = "nats"),
        expect(unused_variables, reason = "NATS is not built in")
    )]
    pub(super) fn new(options: &EventPlaneOptions, tasks: &Tasks) -> Self {
        Self {
            #[cfg(feature = "nats")]
            nats: NatsEvents::new(&options.nats, tasks),
        }
    }

    /// Listens to what a publisher says on a channel; an error says why that cannot be.
    pub(super) fn listen(
        &self,
        tasks: &Tasks,
        address: &ChannelAddress,
        topic: Topic,
        publisher: u64,
    ) -> Result<ChannelSource, String> {
        match address {
            ChannelAddress::Zmq(endpoint) => {
                let endpoint = endpoint.parse();
                let endpoint: Endpoint = endpoint.map_err(|error| format!("{error}"))?;
                Ok(Box::new(zmq_source(tasks, endpoint, topic)))
            }
            #[cfg(feature = "nats")]
            ChannelAddress::Nats(subject) => {
                Ok(Box::new(self.nats.listen(subject, topic, publisher)))
            }
            #[cfg(not(feature = "nats"))]
            ChannelAddress::Nats(_) => {
                let _ = publisher;
                Err("NATS is not built into this program".to_owned())
            }
        }
    }
}

fn zmq_source(tasks: &Tasks, endpoint: Endpoint, topic: Topic) -> ZmqSource {
    let options = ZmqSourceOptions {
        topic: topic.name().to_owned(),
        framing: ZmqFraming::EventPlane,
        limits: ZmqLimits {
            queue_messages_max: QUEUE_MESSAGES_MAX,
            queue_bytes_max: QUEUE_BYTES_MAX,
            ..ZmqLimits::default()
        },
        ..ZmqSourceOptions::new(endpoint, None)
    };
    ZmqSource::start(tasks, options)
}
