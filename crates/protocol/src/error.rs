//! Why a message was refused.

use kvasir_msgpack::DecodeError;

/// Why a message of a request plane could not be read. Always the sender's fault, or the path's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A value inside it is malformed.
    #[error("{what} cannot be read")]
    Decode {
        /// Which message.
        what: &'static str,
        /// What is wrong with it.
        #[source]
        cause: DecodeError,
    },
    /// It is larger than this side accepts.
    #[error("{what} has {bytes} bytes, more than the {max} that are accepted")]
    TooLarge {
        /// Which message or part.
        what: &'static str,
        /// Its size as the sender claims it.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// It ends too early.
    #[error("{what} ends too early")]
    Truncated {
        /// Which message.
        what: &'static str,
    },
    /// A member that it needs is missing or of another kind.
    #[error("{what} has no {member}")]
    Missing {
        /// Which message.
        what: &'static str,
        /// Which member.
        member: &'static str,
    },
    /// It says something that this side does not speak.
    #[error("{what} has a {member} that is not spoken here")]
    Unknown {
        /// Which message.
        what: &'static str,
        /// Which member.
        member: &'static str,
    },
    /// A message of this kind does not belong here.
    #[error("{what} came out of order")]
    Order {
        /// Which message.
        what: &'static str,
    },
}

impl ProtocolError {
    /// A value inside of `what` is malformed.
    pub(crate) fn decode(what: &'static str) -> impl Fn(DecodeError) -> Self {
        move |cause| Self::Decode { what, cause }
    }
}
