//! What others say on a topic of the event plane, as a program reads it.
//!
//! Answers one question: which messages does an endpoint's topic carry? Channels are found in the store and listened to as they come and go,
//! on ZeroMQ or NATS.
//!
//! What always holds: a reader that is slow misses the newest messages and holds up nobody; at most [`WAITING_MAX`] of them wait.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_discovery::{Bucket, Change, EndpointName, EventScope, Record};
use kvasir_host::{PlaneChange, PlaneChannel, plane_change};
use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::{ChannelAddress, NatsEvents};
use kvasir_transport::nats::NatsLink;
use kvasir_transport::zmq::{Endpoint, ZmqFraming, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{EventSource, SourceEvent, next_event};
use kvasir_wire::native::Topic;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::{EmbedError, ProcessPlanes};

/// Messages that wait for their reader.
const WAITING_MAX: usize = 4096;

/// Listens to one topic of one endpoint until it is dropped.
pub struct ChannelListener {
    messages: mpsc::Receiver<Vec<u8>>,
    tasks: Tasks,
}

impl ChannelListener {
    /// Listens from now on.
    pub async fn open(
        planes: &Arc<ProcessPlanes>,
        endpoint: EndpointName,
        topic: Topic,
    ) -> Result<Self, EmbedError> {
        let (_, nats) = planes.clients().await?;
        let (sender, messages) = mpsc::channel(WAITING_MAX);
        let tasks = Tasks::new();
        let follower = Follower {
            endpoint,
            topic,
            nats: nats.clone(),
            sender,
            tasks: tasks.clone(),
        };
        let watch = planes.store.watch(&[Bucket::EventChannels]);
        tasks.background().spawn(follower.run(watch));
        Ok(Self { messages, tasks })
    }

    /// The next message; none when nobody listens any more.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        self.messages.recv().await
    }
}

impl Drop for ChannelListener {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

struct Follower {
    endpoint: EndpointName,
    topic: Topic,
    nats: NatsLink,
    sender: mpsc::Sender<Vec<u8>>,
    tasks: Tasks,
}

impl Follower {
    async fn run(self, mut watch: kvasir_discovery::Watch) {
        let mut heard: BTreeMap<_, AbortHandle> = BTreeMap::new();
        loop {
            match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => {
                    let before = heard.remove(&key);
                    if let Some(before) = before {
                        before.abort();
                    }
                    if let Some(listening) = self.listen(&record) {
                        heard.insert(key, listening);
                    }
                }
                Change::Removed(key) => {
                    if let Some(gone) = heard.remove(&key) {
                        gone.abort();
                    }
                }
                Change::Synced | Change::Lost(_) | Change::Restored => {}
            }
        }
    }

    /// Listens to a channel, if it is one of those that are asked for.
    fn listen(&self, record: &Record) -> Option<AbortHandle> {
        let Record::EventChannel(channel) = record else {
            return None;
        };
        let ours = &self.endpoint;
        let is_ours = match &channel.scope {
            EventScope::Endpoint { endpoint } => endpoint == ours,
            EventScope::Component {
                namespace,
                component,
            } => *namespace == ours.namespace && *component == ours.component,
            EventScope::Namespace { name } => *name == ours.namespace,
        };
        let PlaneChange::Channel(PlaneChannel {
            publisher,
            topic,
            address,
        }) = plane_change(record)?
        else {
            return None;
        };
        if !is_ours || topic != self.topic {
            return None;
        }
        let source: Box<dyn EventSource> = match address {
            ChannelAddress::Zmq(address) => {
                let options = ZmqSourceOptions {
                    topic: topic.name().to_owned(),
                    framing: ZmqFraming::EventPlane,
                    ..ZmqSourceOptions::new(address.parse::<Endpoint>().ok()?, None)
                };
                Box::new(ZmqSource::start(&self.tasks, options))
            }
            ChannelAddress::Nats(subject) => {
                let events = NatsEvents::new(&self.nats, &self.tasks);
                Box::new(events.listen(&subject, topic, publisher))
            }
        };
        let reading = pass_on(source, self.sender.clone());
        Some(self.tasks.background().spawn(reading).abort_handle())
    }
}

async fn pass_on(mut source: Box<dyn EventSource>, to: mpsc::Sender<Vec<u8>>) {
    loop {
        if let SourceEvent::Live(frame) = next_event(&mut source).await {
            // Whoever is slow misses some: the next report says more than the last.
            let _ = to.try_send(frame.payload.to_vec());
        }
    }
}
