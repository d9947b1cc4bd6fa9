//! Why JetStream did not do what it was asked.

use async_nats::client::RequestErrorKind;

/// Why JetStream did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JetStreamError {
    /// The server is not there or does not answer; asking again may help.
    #[error("the NATS server does not answer: {0}")]
    Unreachable(String),
    /// Nobody answers for JetStream: the server was started without it, or does not have it yet.
    #[error("the NATS server has no JetStream; start it with -js")]
    NotEnabled,
    /// There is no such stream, consumer, message or object.
    #[error("not found: {0}")]
    NotFound(String),
    /// Somebody else wrote first.
    #[error("changed by somebody else meanwhile: {0}")]
    Conflict(String),
    /// The server refuses, for a reason that its operator has to put right.
    #[error("the NATS server refuses ({code}): {text}")]
    Refused {
        /// JetStream's own number of the reason.
        code: u64,
        /// Its words.
        text: String,
    },
    /// An answer cannot be read.
    #[error("the NATS server's answer cannot be read: {0}")]
    Unreadable(String),
}

/// "wrong last sequence", of a stream and of a subject.
const WRONG_LAST: [u64; 2] = [10071, 10164];

impl JetStreamError {
    pub(super) fn of_code(code: u64, status: u64, text: &str) -> Self {
        let text = text.to_owned();
        match (code, status) {
            (code, _) if WRONG_LAST.contains(&code) => Self::Conflict(text),
            (_, 404) => Self::NotFound(text),
            (_, 503) => Self::Unreachable(text),
            _ => Self::Refused { code, text },
        }
    }

    pub(super) fn of_request(kind: RequestErrorKind, text: String) -> Self {
        match kind {
            RequestErrorKind::NoResponders => Self::NotEnabled,
            RequestErrorKind::MaxPayloadExceeded => Self::Refused { code: 0, text },
            _ => Self::Unreachable(text),
        }
    }

    /// Whether the server has lost the files of a stream, so that nothing can be in it or come into it.
    #[must_use]
    pub fn has_lost_files(&self) -> bool {
        let (Self::Unreachable(text) | Self::Refused { text, .. }) = self else {
            return false;
        };
        text.contains("msg block") && text.contains("no such file or directory")
    }

    /// Whether there is no such thing.
    #[must_use]
    pub const fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound(_))
    }

    /// Whether asking again may help.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::NotEnabled)
    }
}

#[cfg(test)]
mod tests {
    use super::JetStreamError;

    /// As nats-server 2.9.10 says it of a stream that was made while it deleted another one of that name.
    #[test]
    fn a_stream_without_files_is_known_by_what_the_server_says() {
        let text = "error opening msg block file [\"/data/$G/streams/s/msgs/1.blk\"]: open /data/$G/streams/s/msgs/1.blk: no such file or directory";
        assert!(JetStreamError::of_code(10077, 503, text).has_lost_files());
        assert!(!JetStreamError::of_code(10077, 503, "no space left on device").has_lost_files());
        assert!(!JetStreamError::NotEnabled.has_lost_files());
    }
}
