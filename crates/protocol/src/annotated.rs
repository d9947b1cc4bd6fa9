//! An item of `generate`: an output, a remark for the client, or an error.

use bytes::Bytes;
use kvasir_msgpack::{Kind, Reader};

use crate::read::{self, Result, map};
use crate::{Output, Payload, PayloadWriter, ProtocolError};

const ANNOTATED: &str = "an item of generate";
/// Lines of a remark that are read.
const COMMENTS_MAX: usize = 64;

/// One item of `generate`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Annotated {
    /// Tokens and what belongs to them.
    pub data: Option<Output>,
    /// The item's own name.
    pub id: Option<String>,
    /// Name of a remark, or `error`.
    pub event: Option<String>,
    /// Lines of a remark.
    pub comment: Option<Vec<String>>,
    /// What went wrong.
    pub error: Option<WorkerError>,
}

/// What a worker says went wrong with a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerError {
    /// Which kind.
    pub kind: WorkerErrorKind,
    /// The worker's own words; not for clients.
    pub message: String,
    /// What clients may be told.
    pub public: Option<String>,
}

/// Kinds of a worker's errors that lead to different answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerErrorKind {
    /// The request asks for something that cannot be.
    InvalidArgument,
    /// The worker is full.
    Overloaded,
    /// The worker or what stands behind it cannot be reached, or it is about to leave.
    Unavailable,
    /// The worker was too slow.
    Timeout,
    /// The request was cancelled.
    Cancelled,
    /// Anything else.
    #[default]
    Unknown,
}

impl WorkerErrorKind {
    const NAMES: [(&'static str, Self); 12] = [
        ("InvalidArgument", Self::InvalidArgument),
        ("ResourceExhausted", Self::Overloaded),
        ("WorkerOverloaded", Self::Overloaded),
        ("CannotConnect", Self::Unavailable),
        ("Disconnected", Self::Unavailable),
        ("EngineShutdown", Self::Unavailable),
        ("StreamIncomplete", Self::Unavailable),
        ("WorkerUnavailable", Self::Unavailable),
        ("Unavailable", Self::Unavailable),
        ("ConnectionTimeout", Self::Timeout),
        ("ResponseTimeout", Self::Timeout),
        ("Cancelled", Self::Cancelled),
    ];

    fn of_name(name: &str) -> Self {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map_or(Self::Unknown, |(_, kind)| *kind)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::Overloaded => "ResourceExhausted",
            Self::Unavailable => "Disconnected",
            Self::Timeout => "ConnectionTimeout",
            Self::Cancelled => "Cancelled",
            Self::Unknown => "Unknown",
        }
    }

    /// As workers group it, and the reason that they give.
    const fn class(self) -> (&'static str, &'static str) {
        match self {
            Self::InvalidArgument => ("InvalidRequest", "request.invalid_argument"),
            Self::Overloaded => ("Overloaded", "worker.overloaded"),
            Self::Unavailable => ("Unavailable", "worker.unavailable"),
            Self::Timeout => ("Timeout", "worker.timeout"),
            Self::Cancelled => ("Cancelled", "request.cancelled"),
            Self::Unknown => ("Internal", "internal.unknown"),
        }
    }
}

impl Annotated {
    /// An item with tokens.
    #[must_use]
    pub fn of_output(output: Output) -> Self {
        Self {
            data: Some(output),
            ..Self::default()
        }
    }

    /// An item that says what went wrong.
    #[must_use]
    pub fn of_error(error: WorkerError) -> Self {
        Self {
            event: Some("error".to_owned()),
            error: Some(error),
            ..Self::default()
        }
    }

    /// Reads it.
    pub fn decode(payload: &Payload) -> std::result::Result<Self, ProtocolError> {
        let all = payload.to_msgpack()?;
        let mut reader = Reader::new(&all);
        let item = Self::read(&mut reader, &all).map_err(ProtocolError::decode(ANNOTATED))?;
        let end = reader.finish().map_err(ProtocolError::decode(ANNOTATED));
        end.map(|()| item)
    }

    fn read(reader: &mut Reader<'_>, all: &Bytes) -> Result<Self> {
        let mut item = Self::default();
        map(reader, |reader, name| {
            match name {
                b"data" => item.data = read::option(reader, |r| Output::read(r, all))?,
                b"id" => item.id = read::text(reader)?,
                b"event" => item.event = read::text(reader)?,
                b"comment" => item.comment = read::option(reader, comments)?,
                b"error" => item.error = read::option(reader, WorkerError::read)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        if item.event.as_deref() == Some("error") && item.error.is_none() {
            // Older workers say what went wrong as a remark.
            let message = item.comment.take().unwrap_or_default().join("; ");
            item.error = Some(WorkerError {
                message,
                ..WorkerError::default()
            });
        }
        Ok(item)
    }

    /// Writes it.
    pub fn write(&self, w: &mut PayloadWriter) {
        let members = [
            self.data.is_some(),
            self.id.is_some(),
            self.event.is_some(),
            self.comment.is_some(),
            self.error.is_some(),
        ];
        w.map(members.into_iter().map(usize::from).sum());
        if let Some(output) = &self.data {
            w.key("data");
            output.write(w);
        }
        for (name, text) in [("id", &self.id), ("event", &self.event)] {
            if let Some(text) = text {
                w.key(name);
                w.text(text);
            }
        }
        if let Some(lines) = &self.comment {
            w.key("comment");
            w.list(lines.len());
            lines.iter().for_each(|line| w.text(line));
            w.end_list();
        }
        if let Some(error) = &self.error {
            w.key("error");
            error.write(w);
        }
        w.end_map();
    }
}

fn comments(reader: &mut Reader<'_>) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for _ in 0..reader.array()? {
        match lines.len() {
            COMMENTS_MAX => reader.skip()?,
            _ => lines.push(reader.str()?.to_owned()),
        }
    }
    Ok(lines)
}

impl WorkerError {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut error = Self::default();
        if reader.peek()? == Kind::Str {
            error.message = reader.str()?.to_owned();
            return Ok(error);
        }
        map(reader, |reader, name| {
            match name {
                b"error_type" => error.kind = read_kind(reader)?,
                b"message" => error.message = read::text(reader)?.unwrap_or_default(),
                b"public" => read::map_or_nil(reader, |reader, name| {
                    match name {
                        b"message" => error.public = read::text(reader)?,
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(error)
    }

    fn write(&self, w: &mut PayloadWriter) {
        let (class, reason) = self.kind.class();
        w.map(5 + usize::from(self.public.is_some()));
        for (name, text) in [
            ("error_type", self.kind.name()),
            ("class", class),
            ("reason", reason),
            ("message", &self.message),
            ("diagnostic", &self.message),
        ] {
            w.key(name);
            w.text(text);
        }
        if let Some(public) = &self.public {
            w.key("public");
            w.map(2);
            w.key("type");
            w.text("message");
            w.key("message");
            w.text(public);
            w.end_map();
        }
        w.end_map();
    }
}

/// A name, or a map from who says it to the name.
fn read_kind(reader: &mut Reader<'_>) -> Result<WorkerErrorKind> {
    let mut kind = WorkerErrorKind::Unknown;
    match reader.peek()? {
        Kind::Str => kind = WorkerErrorKind::of_name(reader.str()?),
        Kind::Map => map(reader, |reader, _| {
            match reader.peek()? {
                Kind::Str => kind = WorkerErrorKind::of_name(reader.str()?),
                _ => reader.skip()?,
            }
            Ok(())
        })?,
        _ => reader.skip()?,
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use kvasir_types::Codec;

    use super::*;

    fn read(json: &str) -> Annotated {
        let json = Bytes::copy_from_slice(json.as_bytes());
        Annotated::decode(&Payload::new(Codec::Json, json)).unwrap()
    }

    /// What a real worker said to a request without `max_tokens`, and the forms of older ones.
    #[test]
    fn every_form_of_an_error_is_read() {
        let said = read(
            r#"{"event":"error","error":{"error_type":"InvalidArgument","class":"InvalidRequest",
                "reason":"request.invalid_argument","message":"bad","diagnostic":"bad",
                "public":{"type":"message","message":"say so"}}}"#,
        );
        let error = WorkerError {
            kind: WorkerErrorKind::InvalidArgument,
            message: "bad".into(),
            public: Some("say so".into()),
        };
        assert_eq!(said, Annotated::of_error(error));
        let error = |json| read(json).error.unwrap();
        let backend =
            error(r#"{"error":{"error_type":{"Backend":"InvalidArgument"},"message":"x"}}"#);
        assert_eq!(backend.kind, WorkerErrorKind::InvalidArgument);
        let unknown = error(r#"{"event":"error","error":{"error_type":"New","message":"x"}}"#);
        assert_eq!(
            (unknown.kind, &*unknown.message),
            (WorkerErrorKind::Unknown, "x")
        );
        let old = error(r#"{"event":"error","comment":["old","style"]}"#);
        assert_eq!(old.message, "old; style");
        assert_eq!(error(r#"{"error":"text"}"#).message, "text");
    }

    #[test]
    fn what_is_written_is_read_again() {
        for kind in [
            WorkerErrorKind::InvalidArgument,
            WorkerErrorKind::Overloaded,
            WorkerErrorKind::Unavailable,
            WorkerErrorKind::Timeout,
            WorkerErrorKind::Cancelled,
            WorkerErrorKind::Unknown,
        ] {
            let item = Annotated::of_error(WorkerError {
                kind,
                message: "m".into(),
                public: None,
            });
            for codec in [Codec::Json, Codec::MessagePack] {
                let mut writer = PayloadWriter::new(codec);
                item.write(&mut writer);
                assert_eq!(Annotated::decode(&writer.finish()), Ok(item.clone()));
            }
        }
        let remark = read(r#"{"event":"note","comment":["a","b"],"id":"7","unknown":1}"#);
        assert_eq!(remark.comment.as_deref().map(<[_]>::len), Some(2));
        assert!(remark.error.is_none());
    }
}
