//! The values that a store holds, and the keys they stand under.
//!
//! Answers one question: what do the bytes of a key and its value say? Four buckets, one kind of value in each. Members that are
//! not known are ignored when a value is read, so that newer writers can be read by older readers; a card and the metadata of an
//! event source are kept whole.
//!
//! What always holds: the key of a record follows from its value; ids are written in hexadecimal without leading zeros.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest name of a namespace, a component, an endpoint or a topic, in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// Longest value, in bytes. The largest that is known is a card, some two thousand.
pub const VALUE_BYTES_MAX: usize = 1 << 20;
/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 2048;

/// Where a kind of record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bucket {
    /// Endpoints that take requests.
    Instances,
    /// Model cards.
    Models,
    /// Where topics are published.
    EventChannels,
    /// Whose cache a publisher of events speaks of.
    EventSources,
}

impl Bucket {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Instances,
        Self::Models,
        Self::EventChannels,
        Self::EventSources,
    ];

    /// Its name in a store, without slashes around it.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Instances => "v1/instances",
            Self::Models => "v1/mdc",
            Self::EventChannels => "v1/event_channels",
            Self::EventSources => "v1/event_sources",
        }
    }

    /// Splits a key of a store that has plain slashes into bucket and key.
    #[must_use]
    pub fn split(path: &str) -> Option<(Self, &str)> {
        Self::ALL.into_iter().find_map(|bucket| {
            let key = path.strip_prefix(bucket.path())?.strip_prefix('/')?;
            (!key.is_empty()).then_some((bucket, key))
        })
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path())
    }
}

/// A record's place: its bucket, and its key there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey {
    /// The bucket.
    pub bucket: Bucket,
    /// The key, with plain slashes.
    pub key: String,
}

impl RecordKey {
    /// A key of a bucket.
    #[must_use]
    pub fn new(bucket: Bucket, key: impl Into<String>) -> Self {
        let key = key.into();
        Self { bucket, key }
    }
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.bucket, self.key)
    }
}

/// Why a value cannot be used. Its writer is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// It is no JSON of the shape that its bucket has.
    #[error("not a record: {0}")]
    Malformed(String),
    /// It stands in another bucket than its kind belongs to.
    #[error("a record of {0} in another bucket")]
    Misplaced(Bucket),
    /// It is longer than [`VALUE_BYTES_MAX`].
    #[error("{0} bytes, {VALUE_BYTES_MAX} allowed")]
    TooLong(usize),
    /// A name is empty, longer than [`NAME_BYTES_MAX`], or has slashes or control characters.
    #[error("{0} cannot be a name")]
    BadName(&'static str),
}

/// One value of a store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Record {
    /// An endpoint that takes requests.
    Endpoint(Instance),
    /// A model that an instance serves.
    Model(ModelEntry),
    /// Where a topic is published.
    EventChannel(EventChannel),
    /// Whose state a publisher's events describe.
    EventSource(EventSource),
}

impl Record {
    /// Reads a value of a bucket.
    pub fn parse(bucket: Bucket, value: &[u8]) -> Result<Self, RecordError> {
        if value.len() > VALUE_BYTES_MAX {
            return Err(RecordError::TooLong(value.len()));
        }
        let record: Self = serde_json::from_slice(value)
            .map_err(|error| RecordError::Malformed(error.to_string()))?;
        if record.bucket() != bucket {
            return Err(RecordError::Misplaced(record.bucket()));
        }
        record.check_names()?;
        Ok(record)
    }

    /// The bytes of the value: JSON without spaces.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // Strings, numbers and maps with text keys: nothing here can fail to become JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Which bucket it belongs to.
    #[must_use]
    pub const fn bucket(&self) -> Bucket {
        match self {
            Self::Endpoint(_) => Bucket::Instances,
            Self::Model(_) => Bucket::Models,
            Self::EventChannel(_) => Bucket::EventChannels,
            Self::EventSource(_) => Bucket::EventSources,
        }
    }

    /// Where it stands.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        let key = match self {
            Self::Endpoint(instance) => {
                format!("{}/{:x}", instance.name(), instance.instance_id)
            }
            Self::Model(model) => {
                let base = format!("{}/{:x}", model.name(), model.instance_id);
                match &model.model_suffix {
                    Some(suffix) => format!("{base}/{suffix}"),
                    None => base,
                }
            }
            Self::EventChannel(channel) => channel.scope.key(&channel.topic, channel.instance_id),
            Self::EventSource(source) => source.scope.key(&source.topic, source.publisher_id),
        };
        RecordKey::new(self.bucket(), key)
    }

    /// The namespace that it belongs to.
    #[must_use]
    pub fn namespace(&self) -> &str {
        match self {
            Self::Endpoint(instance) => &instance.namespace,
            Self::Model(model) => &model.namespace,
            Self::EventChannel(channel) => channel.scope.namespace(),
            Self::EventSource(source) => source.scope.namespace(),
        }
    }

    fn check_names(&self) -> Result<(), RecordError> {
        let endpoint = |namespace: &str, component: &str, endpoint: &str| {
            check_name("namespace", namespace)?;
            check_name("component", component)?;
            check_name("endpoint", endpoint)
        };
        match self {
            Self::Endpoint(of) => endpoint(&of.namespace, &of.component, &of.endpoint),
            Self::Model(of) => {
                endpoint(&of.namespace, &of.component, &of.endpoint)?;
                let suffix = of.model_suffix.as_deref();
                suffix.map_or(Ok(()), |suffix| check_name("model_suffix", suffix))
            }
            Self::EventChannel(EventChannel { scope, topic, .. })
            | Self::EventSource(EventSource { scope, topic, .. }) => {
                check_name("topic", topic)?;
                scope.check()
            }
        }
    }
}

/// Whether a name can be a part of a key.
fn check_name(what: &'static str, name: &str) -> Result<(), RecordError> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    match fits && !name.contains(|c: char| c == '/' || c.is_control()) {
        true => Ok(()),
        false => Err(RecordError::BadName(what)),
    }
}

/// The full name of an endpoint. Printed with slashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointName {
    /// The namespace.
    pub namespace: String,
    /// The component.
    pub component: String,
    /// The endpoint.
    #[serde(rename = "name")]
    pub endpoint: String,
}

impl EndpointName {
    /// The endpoint of these three names.
    #[must_use]
    pub fn new(namespace: &str, component: &str, endpoint: &str) -> Self {
        Self {
            namespace: namespace.into(),
            component: component.into(),
            endpoint: endpoint.into(),
        }
    }
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.component, self.endpoint)
    }
}

/// An endpoint of one worker that takes requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// The component that it is one of.
    pub component: String,
    /// The endpoint.
    pub endpoint: String,
    /// The namespace.
    pub namespace: String,
    /// The worker's id.
    pub instance_id: u64,
    /// How requests reach it.
    pub transport: RequestTransport,
    /// What the worker computes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_type: Option<String>,
    /// In which form it takes requests; JSON if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_plane_codec: Option<String>,
}

impl Instance {
    /// Its endpoint's name.
    #[must_use]
    pub fn name(&self) -> EndpointName {
        EndpointName::new(&self.namespace, &self.component, &self.endpoint)
    }
}

/// How requests reach an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestTransport {
    /// `host:port/` and a path that tells the endpoints of one port apart.
    Tcp(String),
    /// A subject of NATS; answers come over TCP.
    NatsTcp(String),
    /// A URL.
    Http(String),
}

/// A model that an instance serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// The namespace of the endpoint that serves it.
    pub namespace: String,
    /// Its component.
    pub component: String,
    /// Its name.
    pub endpoint: String,
    /// The worker.
    pub instance_id: u64,
    /// The card, whole; [`Card`](crate::Card) reads it.
    pub card_json: Value,
    /// What tells several models of one instance apart: the slug of an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_suffix: Option<String>,
}

impl ModelEntry {
    /// The name of the endpoint that serves it.
    #[must_use]
    pub fn name(&self) -> EndpointName {
        EndpointName::new(&self.namespace, &self.component, &self.endpoint)
    }
}

/// Where a topic is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventChannel {
    /// Who it is about.
    pub scope: EventScope,
    /// The topic.
    pub topic: String,
    /// The publisher's id, which is not a worker's.
    pub instance_id: u64,
    /// How it is listened to.
    pub transport: EventTransport,
}

/// Whose state the events of a publisher describe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventSource {
    /// Who it is about.
    pub scope: EventScope,
    /// The topic.
    pub topic: String,
    /// The publisher; its channel has the same id.
    pub publisher_id: u64,
    /// What the topic says of its sources; [`Self::kv`] reads that of cache events.
    pub metadata: Value,
}

impl EventSource {
    /// Whose cache the events describe, if that is what the topic is about.
    pub fn kv(&self) -> Result<KvSource, RecordError> {
        KvSource::deserialize(&self.metadata)
            .map_err(|error| RecordError::Malformed(error.to_string()))
    }
}

/// Which rank's cache a publisher's events describe, and whom to ask for what was missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSource {
    /// The endpoint whose workers' caches are described.
    pub kv_state_endpoint: EndpointName,
    /// The rank.
    pub worker: SourceRank,
    /// The publisher, once more.
    pub publisher_id: u64,
    /// Answers questions about events that were missed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_target: Option<Instance>,
}

/// A rank of a worker, as records write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SourceRank {
    /// The worker.
    pub worker_id: u64,
    /// Its data-parallel rank.
    #[serde(default)]
    pub dp_rank: u32,
}

/// Who a topic is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventScope {
    /// All of a namespace.
    Namespace {
        /// Its name.
        name: String,
    },
    /// All of a component.
    Component {
        /// Its namespace.
        namespace: String,
        /// Its name.
        component: String,
    },
    /// One endpoint.
    Endpoint {
        /// Its name.
        endpoint: EndpointName,
    },
}

impl EventScope {
    /// The scope of one endpoint.
    #[must_use]
    pub const fn of(endpoint: EndpointName) -> Self {
        Self::Endpoint { endpoint }
    }

    /// The namespace that it lies in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        match self {
            Self::Namespace { name } => name,
            Self::Component { namespace, .. } => namespace,
            Self::Endpoint { endpoint } => &endpoint.namespace,
        }
    }

    fn key(&self, topic: &str, publisher: u64) -> String {
        let scope = match self {
            Self::Namespace { name } => format!("namespace/{name}"),
            Self::Component {
                namespace,
                component,
            } => format!("namespace/{namespace}/component/{component}"),
            Self::Endpoint { endpoint: of } => format!(
                "namespace/{}/component/{}/endpoint/{}",
                of.namespace, of.component, of.endpoint
            ),
        };
        format!("{scope}/topic/{topic}/{publisher:x}")
    }

    fn check(&self) -> Result<(), RecordError> {
        match self {
            Self::Namespace { name } => check_name("namespace", name),
            Self::Component {
                namespace,
                component,
            } => {
                check_name("namespace", namespace)?;
                check_name("component", component)
            }
            Self::Endpoint { endpoint: of } => {
                check_name("namespace", &of.namespace)?;
                check_name("component", &of.component)?;
                check_name("endpoint", &of.endpoint)
            }
        }
    }
}

/// How a topic is listened to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "config")]
pub enum EventTransport {
    /// A socket of the publisher.
    Zmq {
        /// Such as `tcp://gpu-1:5557`.
        endpoint: String,
    },
    /// Subjects of NATS.
    Nats {
        /// What stands before the topic.
        subject_prefix: String,
    },
    /// Sockets that many publishers share.
    ZmqBroker {
        /// Where publishers connect.
        #[serde(default)]
        xsub_endpoints: Vec<String>,
        /// Where subscribers connect.
        #[serde(default)]
        xpub_endpoints: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance() -> Instance {
        Instance {
            component: "backend".into(),
            endpoint: "generate".into(),
            namespace: "dynamo".into(),
            instance_id: 0x0052_156b_15ad_6774,
            transport: RequestTransport::Tcp("127.0.0.1:1/x".into()),
            device_type: None,
            request_plane_codec: None,
        }
    }

    #[test]
    fn keys_follow_from_values() {
        let record = Record::Endpoint(instance());
        let key = record.key();
        assert_eq!(
            key.to_string(),
            "v1/instances/dynamo/backend/generate/52156b15ad6774"
        );
        let path = key.to_string();
        assert_eq!(Bucket::split(&path), Some((Bucket::Instances, &*key.key)));
        let adapter = Record::Model(ModelEntry {
            namespace: "ns".into(),
            component: "c".into(),
            endpoint: "e".into(),
            instance_id: 10,
            card_json: Value::Null,
            model_suffix: Some("ada".into()),
        });
        assert_eq!(adapter.key().key, "ns/c/e/a/ada");
        for (scope, key) in [
            (
                EventScope::Namespace { name: "n".into() },
                "namespace/n/topic/t/ff",
            ),
            (
                EventScope::Component {
                    namespace: "n".into(),
                    component: "c".into(),
                },
                "namespace/n/component/c/topic/t/ff",
            ),
        ] {
            assert_eq!(scope.key("t", 255), key);
        }
        assert_eq!(Bucket::split("v1/instancesx/a"), None);
        assert_eq!(Bucket::split("v1/mdc/"), None);
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_cause() {
        let bytes = Record::Endpoint(instance()).to_bytes();
        assert!(Record::parse(Bucket::Instances, &bytes).is_ok());
        assert_eq!(
            Record::parse(Bucket::Models, &bytes),
            Err(RecordError::Misplaced(Bucket::Instances))
        );
        let slash = Record::Endpoint(Instance {
            namespace: "a/b".into(),
            ..instance()
        });
        assert_eq!(
            Record::parse(Bucket::Instances, &slash.to_bytes()),
            Err(RecordError::BadName("namespace"))
        );
        let long = vec![b' '; VALUE_BYTES_MAX + 1];
        assert!(matches!(
            Record::parse(Bucket::Models, &long),
            Err(RecordError::TooLong(_))
        ));
        for bad in [
            "",
            "{}",
            "[1]",
            r#"{"type":"Endpoint"}"#,
            r#"{"type":"Later"}"#,
        ] {
            let parsed = Record::parse(Bucket::Instances, bad.as_bytes());
            assert!(matches!(parsed, Err(RecordError::Malformed(_))), "{bad}");
        }
    }
}
