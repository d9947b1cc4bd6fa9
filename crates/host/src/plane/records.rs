//! What a store announces, as the event plane takes it.
//!
//! Answers one question: which channels and sources do these records name? What always holds: a store that is lost takes no channel
//! away; a record that says nothing we can use is passed over and said once.

use std::collections::BTreeMap;

use kvasir_discovery::{
    Change, EventChannel, EventSource, EventTransport, Instance, Record, RequestTransport, Watch,
};
use kvasir_transport::event_plane::ChannelAddress;
use kvasir_types::{Codec, PlaneEndpoint, WorkerId, WorkerRank};
use kvasir_wire::native::Topic;

use super::{EventPlane, PlaneChange, PlaneChannel, PlaneSource};

impl EventPlane {
    /// Is told what a store announces, of records that are `wanted`, for ever. `watch` is of event channels and event sources.
    pub async fn follow(self, mut watch: Watch, wanted: impl Fn(&Record) -> bool) {
        let mut known = BTreeMap::new();
        loop {
            let told = match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => {
                    let is_wanted = wanted(&record);
                    let change = is_wanted.then(|| plane_change(&record)).flatten();
                    let before = match &change {
                        Some(change) => known.insert(key, undo_of(change)),
                        None => known.remove(&key),
                    };
                    // What says nothing that we can use any more is gone; a component is counted by its endpoints.
                    let counted = matches!(change, Some(PlaneChange::Component { .. }));
                    match (before, counted) {
                        (Some(gone), false) if change.is_none() => Some(gone),
                        (Some(_), true) => None,
                        _ => change,
                    }
                }
                Change::Removed(key) => known.remove(&key),
                Change::Synced | Change::Lost(_) | Change::Restored => None,
            };
            if let Some(change) = told {
                self.tell(change).await;
            }
        }
    }
}

/// What takes a change back.
fn undo_of(change: &PlaneChange) -> PlaneChange {
    match change {
        PlaneChange::Channel(PlaneChannel {
            publisher, topic, ..
        }) => PlaneChange::ChannelGone {
            publisher: *publisher,
            topic: *topic,
        },
        PlaneChange::Source(PlaneSource { publisher, .. }) => PlaneChange::SourceGone {
            publisher: *publisher,
        },
        PlaneChange::Component { worker, .. } => PlaneChange::ComponentGone { worker: *worker },
        gone => gone.clone(),
    }
}

/// What a record says to the event plane, if it concerns it.
#[must_use]
pub fn plane_change(record: &Record) -> Option<PlaneChange> {
    match record {
        Record::EventChannel(channel) => channel_of(channel).map(PlaneChange::Channel),
        Record::EventSource(source) => source_of(source).map(PlaneChange::Source),
        Record::Endpoint(instance) => Some(PlaneChange::Component {
            worker: WorkerId(instance.instance_id),
            namespace: instance.namespace.clone(),
            component: instance.component.clone(),
        }),
        Record::Model(_) => None,
    }
}

fn channel_of(channel: &EventChannel) -> Option<PlaneChannel> {
    let topic = Topic::named(&channel.topic)?;
    let address = match &channel.transport {
        EventTransport::Zmq { endpoint } => ChannelAddress::Zmq(endpoint.clone()),
        EventTransport::Nats { subject_prefix } => {
            ChannelAddress::Nats(format!("{subject_prefix}.{topic}"))
        }
        EventTransport::ZmqBroker { .. } => {
            tracing::warn!(topic = %topic, "a channel through a ZeroMQ broker is not listened to");
            return None;
        }
    };
    Some(PlaneChannel {
        publisher: channel.instance_id,
        topic,
        address,
    })
}

fn source_of(source: &EventSource) -> Option<PlaneSource> {
    if Topic::named(&source.topic) != Some(Topic::KvEvents) {
        return None;
    }
    let kv = match source.kv() {
        Ok(kv) => kv,
        Err(error) => {
            tracing::warn!(publisher = source.publisher_id, %error, "an event source cannot be read");
            return None;
        }
    };
    Some(PlaneSource {
        publisher: source.publisher_id,
        rank: WorkerRank::new(kv.worker.worker_id, kv.worker.dp_rank),
        recovery: kv.recovery_target.as_ref().map(endpoint_of),
    })
}

/// Where an instance takes requests, as this process names it.
#[must_use]
pub fn endpoint_of(instance: &Instance) -> PlaneEndpoint {
    let (plane, address) = match &instance.transport {
        RequestTransport::Tcp(address) => ("tcp", address),
        RequestTransport::NatsTcp(subject) => ("nats", subject),
        RequestTransport::Http(url) => ("http", url),
    };
    let codec = match instance.request_plane_codec.as_deref() {
        Some("msgpack") => Codec::MessagePack,
        _ => Codec::Json,
    };
    PlaneEndpoint {
        plane: plane.into(),
        address: address.as_str().into(),
        codec,
    }
}
