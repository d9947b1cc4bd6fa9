//! The messages that set an answer up and take it down. All of them are JSON.

use bytes::Bytes;
use kvasir_types::Codec;
use serde_json::Value as Json;

use crate::ProtocolError;
use crate::payload::json;

const CONTROL: &str = "a control message";
const HANDSHAKE: &str = "a handshake";
const PROLOGUE: &str = "a prologue";
const TCP_SERVER: &str = "tcp_server";

/// Longest name, address or id in a message.
pub const NAME_BYTES_MAX: usize = 1024;
/// Members of a request's metadata.
pub const METADATA_MAX: usize = 128;

/// What stands before a request's payload: who asks, how the payload is written, where the answer goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlMessage {
    /// The request.
    pub id: String,
    /// How payload and answer are written.
    pub codec: Codec,
    /// Where the answer goes.
    pub home: CallHome,
    /// What the client's headers say to the worker, by name.
    pub metadata: Vec<(String, String)>,
}

/// Where an answer goes: the worker connects there and names the subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallHome {
    /// `host:port` of the frontend.
    pub address: String,
    /// Names this answer.
    pub subject: String,
    /// The request again.
    pub context: String,
}

fn quoted(text: &str, out: &mut Vec<u8>) {
    let written = serde_json::to_writer(&mut *out, text);
    debug_assert!(written.is_ok(), "text can be written to memory");
}

impl ControlMessage {
    /// Its JSON, with the members in the order in which Dynamo writes them.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(384);
        out.extend_from_slice(b"{\"id\":");
        quoted(&self.id, &mut out);
        out.extend_from_slice(
            b",\"request_type\":\"single_in\",\"response_type\":\"many_out\",\"payload_codec\":\"",
        );
        out.extend_from_slice(self.codec.name().as_bytes());
        out.extend_from_slice(b"\",\"connection_info\":{\"transport\":\"tcp_server\",\"info\":");
        let info = self.home.encode();
        quoted(&info, &mut out);
        out.push(b'}');
        if !self.metadata.is_empty() {
            out.extend_from_slice(b",\"metadata\":{");
            for (at, (name, value)) in self.metadata.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                quoted(name, &mut out);
                out.push(b':');
                quoted(value, &mut out);
            }
            out.push(b'}');
        }
        out.push(b'}');
        Bytes::from(out)
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let value = json(bytes)?;
        let codec = match value.get("payload_codec") {
            None | Some(Json::Null) => Some(Codec::Json),
            Some(name) => name.as_str().and_then(Codec::from_name),
        };
        let codec = codec.ok_or(unknown("payload_codec"))?;
        let info = value.get("connection_info");
        let info = info.ok_or(missing(CONTROL, "connection_info"))?;
        if info.get("transport").and_then(Json::as_str) != Some(TCP_SERVER) {
            return Err(unknown("transport"));
        }
        let metadata = value.get("metadata").and_then(Json::as_object);
        let metadata = metadata.into_iter().flatten().take(METADATA_MAX);
        let metadata = metadata.filter_map(|(name, value)| Some((name, value.as_str()?)));
        Ok(Self {
            id: text(&value, CONTROL, "id")?,
            codec,
            home: CallHome::decode(text(info, CONTROL, "info")?.as_bytes())?,
            metadata: metadata
                .map(|(name, value)| (name.clone(), value.to_owned()))
                .collect(),
        })
    }
}

impl CallHome {
    fn encode(&self) -> String {
        let mut out = Vec::with_capacity(192);
        out.extend_from_slice(b"{\"address\":");
        quoted(&self.address, &mut out);
        out.extend_from_slice(b",\"subject\":");
        quoted(&self.subject, &mut out);
        out.extend_from_slice(b",\"context\":");
        quoted(&self.context, &mut out);
        out.extend_from_slice(b",\"stream_type\":\"response\"}");
        String::from_utf8(out).unwrap_or_default()
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let value = json(bytes)?;
        Ok(Self {
            address: text(&value, CONTROL, "address")?,
            subject: text(&value, CONTROL, "subject")?,
            context: text(&value, CONTROL, "context").unwrap_or_default(),
        })
    }
}

/// The first frame of a worker that calls home: which answer it brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// As [`CallHome::subject`] named it.
    pub subject: String,
}

impl Handshake {
    /// Its JSON.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(80);
        out.extend_from_slice(b"{\"subject\":");
        quoted(&self.subject, &mut out);
        out.extend_from_slice(b",\"stream_type\":\"response\"}");
        Bytes::from(out)
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let value = json(bytes)?;
        Ok(Self {
            subject: text(&value, HANDSHAKE, "subject")?,
        })
    }
}

/// The second frame: whether the worker has begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prologue {
    /// Why it could not begin.
    pub error: Option<String>,
}

impl Prologue {
    /// Its JSON.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        match &self.error {
            None => Bytes::from_static(b"{\"error\":null}"),
            Some(error) => {
                let mut out = b"{\"error\":".to_vec();
                quoted(error, &mut out);
                out.push(b'}');
                Bytes::from(out)
            }
        }
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let value = json(bytes)?;
        if !value.is_object() {
            return Err(ProtocolError::Order { what: PROLOGUE });
        }
        Ok(Self {
            error: match value.get("error") {
                None | Some(Json::Null) => None,
                Some(Json::String(text)) => Some(text.clone()),
                Some(other) => Some(other.to_string()),
            },
        })
    }
}

/// A word on an answer's connection: from the worker that all was said, from the frontend that no more is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Frontend: finish soon.
    Stop,
    /// Frontend: stop at once.
    Kill,
    /// Worker: all was sent.
    Sentinel,
}

impl Word {
    /// Its JSON, a text with its quotes.
    #[must_use]
    pub const fn encode(self) -> &'static [u8] {
        match self {
            Self::Stop => b"\"stop\"",
            Self::Kill => b"\"kill\"",
            Self::Sentinel => b"\"sentinel\"",
        }
    }

    /// The word of this header, if it is one.
    #[must_use]
    pub fn decode(header: &[u8]) -> Option<Self> {
        [Self::Stop, Self::Kill, Self::Sentinel]
            .into_iter()
            .find(|word| word.encode() == header)
    }
}

fn text(value: &Json, what: &'static str, member: &'static str) -> Result<String, ProtocolError> {
    let text = value.get(member).and_then(Json::as_str);
    let text = text.ok_or(missing(what, member))?;
    match text.len() {
        0..=NAME_BYTES_MAX => Ok(text.to_owned()),
        bytes => Err(ProtocolError::TooLarge {
            what,
            bytes: bytes as u64,
            max: NAME_BYTES_MAX as u64,
        }),
    }
}

const fn missing(what: &'static str, member: &'static str) -> ProtocolError {
    ProtocolError::Missing { what, member }
}

const fn unknown(member: &'static str) -> ProtocolError {
    ProtocolError::Unknown {
        what: CONTROL,
        member,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prologue_says_yes_or_why_not() {
        for error in [None, Some("no \"room\"".to_owned())] {
            let prologue = Prologue { error };
            assert_eq!(Prologue::decode(&prologue.encode()), Ok(prologue));
        }
        assert_eq!(Prologue::decode(b"{}"), Ok(Prologue::default()));
        assert!(Prologue::decode(b"\"sentinel\"").is_err());
    }

    #[test]
    fn words_have_their_quotes() {
        for word in [Word::Stop, Word::Kill, Word::Sentinel] {
            assert_eq!(Word::decode(word.encode()), Some(word));
        }
        assert_eq!(Word::decode(b"kill"), None);
    }

    #[test]
    fn a_control_message_of_another_plane_is_refused() {
        let message = ControlMessage {
            id: "1".into(),
            codec: Codec::MessagePack,
            home: CallHome {
                address: "127.0.0.1:1".into(),
                subject: "s".into(),
                context: "1".into(),
            },
            metadata: vec![("team".into(), "blue".into()), ("a".into(), "\"".into())],
        };
        let mut read = ControlMessage::decode(&message.encode()).unwrap();
        read.metadata.sort_by(|a, b| b.cmp(a));
        assert_eq!(read, message);
        let text = String::from_utf8(message.encode().to_vec()).unwrap();
        let quic = text.replace("tcp_server", "quic-response");
        assert_eq!(
            ControlMessage::decode(quic.as_bytes()),
            Err(unknown("transport"))
        );
        let other = text.replace("msgpack", "cbor");
        assert_eq!(
            ControlMessage::decode(other.as_bytes()),
            Err(unknown("payload_codec"))
        );
        let long = text.replace("127.0.0.1:1", &"1".repeat(NAME_BYTES_MAX + 1));
        assert!(matches!(
            ControlMessage::decode(long.as_bytes()),
            Err(ProtocolError::TooLarge { .. })
        ));
    }
}
