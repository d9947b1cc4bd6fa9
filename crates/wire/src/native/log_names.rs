//! What the streams, buckets and keys of a component are called where its cache events are kept in JetStream.

use super::{EventScope, Topic};

/// The names of one component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogNames {
    /// The stream of its cache events.
    pub stream: String,
    /// The subject on which they are written.
    pub subject: String,
    /// The bucket that snapshots are in.
    pub bucket: String,
    /// Only who has this name takes a snapshot.
    pub snapshot_lock: String,
    /// Only who has this name clears away what dead routers left.
    pub cleanup_lock: String,
    /// What the names of live routers begin with; a consumer's name follows.
    pub routers: String,
}

impl LogNames {
    /// The names of a component.
    ///
    /// ```
    /// # use kvasir_wire::native::LogNames;
    /// let names = LogNames::of("dynamo", "my_backend");
    /// assert_eq!(names.stream, "namespace-dynamo-component-my-backend-kv-events");
    /// assert_eq!(names.subject, "namespace-dynamo-component-my-backend-kv-events.kv-events");
    /// ```
    #[must_use]
    pub fn of(namespace: &str, component: &str) -> Self {
        let scope = EventScope {
            namespace: namespace.to_owned(),
            component: Some(component.to_owned()),
            endpoint: None,
        };
        let place = scope.subject_prefix();
        let plain = format!("namespace.{namespace}.component.{component}");
        let stream = slug(&format!("{plain}.kv-events"));
        Self {
            subject: format!("{stream}.{}", Topic::KvEvents),
            stream,
            bucket: slug(&format!("{plain}-radix-bucket")),
            snapshot_lock: format!("router-snapshot-lock/{place}"),
            cleanup_lock: format!("router-cleanup-lock/{place}"),
            routers: format!("v1/kv_routers/{namespace}/{component}/"),
        }
    }
}

/// Small letters, digits and hyphens; everything else is a hyphen.
fn slug(name: &str) -> String {
    let plain = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_alphanumeric() => c,
        _ => '-',
    };
    name.chars().map(plain).collect()
}
