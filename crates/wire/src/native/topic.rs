//! What a message of the event plane is about, and whose: topics, and the scopes that NATS subjects spell out.

use std::fmt;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// Blocks stored, removed, cleared: a list of [`RouterEvent`](super::RouterEvent)s.
    KvEvents,
    /// How loaded a rank is: [`ActiveLoad`](super::ActiveLoad).
    KvMetrics,
    /// What routers book, and when a prefill is done: [`SequenceEvent`](super::SequenceEvent)s.
    ActiveSequences,
    /// Which worker a session is bound to: [`SessionBinding`](super::SessionBinding).
    SessionAffinity,
    /// What an engine computed in a step: [`ForwardPass`](super::ForwardPass).
    ForwardPass,
    /// What replicas of a router ask each other: [`ReplicaMessage`](super::ReplicaMessage). Ours alone.
    Replicas,
}

impl Topic {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::KvEvents,
        Self::KvMetrics,
        Self::ActiveSequences,
        Self::SessionAffinity,
        Self::ForwardPass,
        Self::Replicas,
    ];

    /// Its name, in frames, subjects and keys of discovery.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvEvents => "kv-events",
            Self::KvMetrics => "kv_metrics",
            Self::ActiveSequences => "active_sequences_events",
            Self::SessionAffinity => "session_affinity_events",
            Self::ForwardPass => "forward-pass-metrics",
            Self::Replicas => "kvasir_replicas",
        }
    }

    /// The topic of this name, if it is one that we read.
    ///
    /// ```
    /// # use kvasir_wire::native::Topic;
    /// assert_eq!(Topic::named("kv_metrics"), Some(Topic::KvMetrics));
    /// assert_eq!(Topic::named("prefill_events"), None);
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|topic| topic.name() == name)
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whose messages: all of a namespace, of a component of it, or of one endpoint of that.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventScope {
    /// The namespace.
    pub namespace: String,
    /// The component.
    pub component: Option<String>,
    /// The endpoint; only with a component.
    pub endpoint: Option<String>,
}

impl EventScope {
    /// An endpoint's.
    #[must_use]
    pub fn endpoint(namespace: &str, component: &str, endpoint: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            component: Some(component.to_owned()),
            endpoint: Some(endpoint.to_owned()),
        }
    }

    /// The NATS subject before the topic. Every byte of a name but letters, digits, `-` and `_` is percent-coded.
    ///
    /// ```
    /// # use kvasir_wire::native::EventScope;
    /// let scope = EventScope::endpoint("team.a", "backend", "generate");
    /// assert_eq!(scope.subject_prefix(), "namespace.team%2Ea.component.backend.endpoint.generate");
    /// ```
    #[must_use]
    pub fn subject_prefix(&self) -> String {
        let mut subject = "namespace.".to_owned();
        push_coded(&self.namespace, &mut subject);
        let below = [("component", &self.component), ("endpoint", &self.endpoint)];
        for (kind, name) in below {
            let Some(name) = name else { break };
            subject.push('.');
            subject.push_str(kind);
            subject.push('.');
            push_coded(name, &mut subject);
        }
        subject
    }

    /// The NATS subject of a topic.
    #[must_use]
    pub fn subject(&self, topic: Topic) -> String {
        format!("{}.{topic}", self.subject_prefix())
    }
}

fn push_coded(name: &str, out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push(char::from(DIGITS[usize::from(byte >> 4)]));
            out.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
}
