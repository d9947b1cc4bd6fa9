//! What a worker writes into a store: its records, in the order in which they appear.

use kvasir_discovery::record::SourceRank;
use kvasir_discovery::{
    EndpointName, EventChannel, EventScope, EventSource, EventTransport, Instance, KvSource,
    ModelEntry, Record, RequestTransport,
};
use kvasir_types::Codec;
use kvasir_wire::native::Topic;

/// An endpoint as its callers know it.
pub(crate) fn instance(
    worker: u64,
    endpoint: &EndpointName,
    transport: RequestTransport,
    device: Option<&str>,
    codec: Codec,
) -> Instance {
    Instance {
        component: endpoint.component.clone(),
        endpoint: endpoint.endpoint.clone(),
        namespace: endpoint.namespace.clone(),
        instance_id: worker,
        transport,
        device_type: device.map(Into::into),
        request_plane_codec: match codec {
            Codec::MessagePack => Some("msgpack".into()),
            // Who does not say takes JSON.
            Codec::Json => None,
        },
    }
}

/// The card of the model that an endpoint serves.
pub(crate) fn model(worker: u64, endpoint: &EndpointName, card_json: serde_json::Value) -> Record {
    Record::Model(ModelEntry {
        namespace: endpoint.namespace.clone(),
        component: endpoint.component.clone(),
        endpoint: endpoint.endpoint.clone(),
        instance_id: worker,
        card_json,
        model_suffix: None,
    })
}

/// Where a topic of an endpoint is published.
pub(crate) fn channel(
    endpoint: &EndpointName,
    topic: Topic,
    publisher: u64,
    transport: EventTransport,
) -> Record {
    Record::EventChannel(EventChannel {
        scope: EventScope::Endpoint {
            endpoint: endpoint.clone(),
        },
        topic: topic.name().into(),
        instance_id: publisher,
        transport,
    })
}

/// Whose cache a publisher speaks of, and who answers for it.
pub(crate) fn source(
    endpoint: &EndpointName,
    publisher: u64,
    worker: SourceRank,
    recovery_target: Option<Instance>,
) -> Record {
    let kv = KvSource {
        kv_state_endpoint: endpoint.clone(),
        worker,
        publisher_id: publisher,
        recovery_target,
    };
    Record::EventSource(EventSource {
        scope: EventScope::Endpoint {
            endpoint: endpoint.clone(),
        },
        topic: Topic::KvEvents.name().into(),
        publisher_id: publisher,
        // Numbers, strings and maps: nothing that could not become JSON.
        metadata: serde_json::to_value(kv).unwrap_or_default(),
    })
}

/// The endpoint that answers for a publisher's events.
pub(crate) fn query_endpoint(endpoint: &EndpointName, publisher: u64) -> EndpointName {
    sibling(endpoint, &format!("worker_kv_query_source_{publisher:x}"))
}

/// Another endpoint of the same component.
pub(crate) fn sibling(endpoint: &EndpointName, name: &str) -> EndpointName {
    EndpointName::new(&endpoint.namespace, &endpoint.component, name)
}
