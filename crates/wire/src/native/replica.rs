//! What replicas of a router ask each other: what is under way. Ours alone; Dynamo's begin at nothing.

use kvasir_msgpack::{DecodeError, Value};

use super::{SequenceEvent, SessionBinding, map, missing, text, uint};

/// A question of a replica, or a part of the answer to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaMessage {
    /// Everybody else: what have you under way?
    Ask {
        /// Who asks.
        from: u64,
    },
    /// Some of what a replica has under way. Whoever did not ask passes it over.
    State {
        /// Who answers.
        from: u64,
        /// Who asked.
        to: u64,
        /// The endpoint whose workers they are on.
        scope: String,
        /// Whether this is the last part.
        last: bool,
        /// Its requests, each as it was booked; one whose prompt is computed has no work left.
        requests: Vec<SequenceEvent>,
        /// Its sessions.
        sessions: Vec<SessionBinding>,
    },
}

impl ReplicaMessage {
    /// Reads a message.
    pub fn from_value(value: &Value) -> Result<Self, DecodeError> {
        let from = uint(value, "from")?;
        let Some(to) = value.get("to") else {
            return Ok(Self::Ask { from });
        };
        let list = |field: &'static str| {
            let list = value.get(field).and_then(Value::list);
            list.ok_or(missing(field))
        };
        let scope = value.get("scope").and_then(Value::text);
        let requests = list("requests")?.iter().map(SequenceEvent::from_value);
        let sessions = list("sessions")?.iter().map(SessionBinding::from_value);
        Ok(Self::State {
            from,
            to: to.uint().ok_or(DecodeError::Range { field: "to" })?,
            scope: scope.ok_or(missing("scope"))?.to_owned(),
            last: value.get("last") == Some(&Value::Bool(true)),
            requests: requests.collect::<Result<_, _>>()?,
            sessions: sessions.collect::<Result<_, _>>()?,
        })
    }

    /// The message as a tree.
    #[must_use]
    pub fn to_value(&self) -> Value {
        match self {
            Self::Ask { from } => map([("from", Value::Uint(*from))]),
            Self::State {
                from,
                to,
                scope,
                last,
                requests,
                sessions,
            } => {
                let requests = requests.iter().map(SequenceEvent::to_value).collect();
                let sessions = sessions.iter().map(SessionBinding::to_value).collect();
                map([
                    ("from", Value::Uint(*from)),
                    ("to", Value::Uint(*to)),
                    ("scope", text(scope)),
                    ("last", Value::Bool(*last)),
                    ("requests", Value::List(requests)),
                    ("sessions", Value::List(sessions)),
                ])
            }
        }
    }
}
