//! The small bodies: models, health, busy thresholds.
//!
//! Answers one question: what do the routes around inference say? Shapes are those that clients and probes of
//! the peer already read.

use bytes::{Bytes, BytesMut};
use serde_json::value::RawValue;

use crate::ApiError;
use crate::error::one_line;
use crate::json::{Fields, write_float, write_int};
use crate::object::{JsonError, Object};
use crate::options::shown;
use crate::strict::Reader;

/// Longest name of a model that the route takes; it repeats the name.
const MODEL_BYTES_MAX: usize = 1024;

/// One row of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// The served name.
    pub id: String,
    /// When it was registered, Unix seconds.
    pub created: u64,
    /// Tokens of prompt and answer together; 0 when unknown.
    pub context_window: u64,
    /// Most tokens of an answer, where the model has a limit of its own.
    pub max_output_tokens: Option<u64>,
}

impl ModelInfo {
    /// Appends the object of `/v1/models/{id}`.
    pub fn write(&self, out: &mut BytesMut) {
        let mut fields = Fields::open(out);
        fields.str("id", &self.id);
        fields.str("object", "model");
        fields.int("created", self.created);
        fields.str("owned_by", "nvidia");
        fields.int("context_window", self.context_window);
        let known = Some(self.context_window).filter(|tokens| *tokens > 0);
        fields.opt_int("max_model_len", known);
        fields.opt_int("max_output_tokens", self.max_output_tokens);
        fields.close();
    }
}

/// The body of `/v1/models`.
#[must_use]
pub fn models(list: &[ModelInfo]) -> Bytes {
    let mut out = BytesMut::from(&b"{\"object\":\"list\",\"data\":["[..]);
    separated(&mut out, list, |out, model| model.write(out));
    out.extend_from_slice(b"]}");
    out.freeze()
}

/// The body of `/health` unless draining.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Endpoint names, `dyn://namespace.component.endpoint`.
    pub endpoints: Vec<String>,
    /// Instances, each a JSON object.
    pub instances: Vec<Box<RawValue>>,
    /// Workers that are named and have not answered yet. Without any instance it is not ready because of them.
    pub waiting_for: Vec<String>,
    /// Discovery backends, and why each is out of reach, if it is.
    pub discovery: Vec<DiscoveryHealth>,
}

/// A discovery backend on the health page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryHealth {
    /// Which one, and where.
    pub source: String,
    /// `ready`, `starting` or `lost`.
    pub state: &'static str,
    /// Why it is lost.
    pub error: Option<String>,
}

impl Health {
    /// Whether anybody could answer a request.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.instances.is_empty()
    }

    /// The body.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        let mut out = BytesMut::new();
        let mut fields = Fields::open(&mut out);
        if self.is_ready() {
            fields.str("status", "healthy");
        } else {
            let stage = match self.waiting_for.is_empty() {
                true => "no_workers",
                false => "waiting_for_workers",
            };
            fields.str("status", "not_ready");
            fields.str("stage", stage);
            fields.str("message", "Service is not ready");
        }
        let list = fields.key("endpoints");
        list.extend_from_slice(b"[");
        separated(list, &self.endpoints, |out, name| {
            crate::json::write_json_str(out, name);
        });
        list.extend_from_slice(b"]");
        let list = fields.key("instances");
        list.extend_from_slice(b"[");
        separated(list, &self.instances, |out, raw| {
            out.extend_from_slice(raw.get().as_bytes());
        });
        list.extend_from_slice(b"]");
        if !self.waiting_for.is_empty() {
            let list = fields.key("waiting_for");
            list.extend_from_slice(b"[");
            separated(list, &self.waiting_for, |out, name| {
                crate::json::write_json_str(out, name);
            });
            list.extend_from_slice(b"]");
        }
        if !self.discovery.is_empty() {
            let list = fields.key("discovery");
            list.extend_from_slice(b"[");
            separated(list, &self.discovery, |out, one| {
                let mut fields = Fields::open(out);
                fields.str("source", &one.source);
                fields.str("state", one.state);
                if let Some(error) = &one.error {
                    fields.str("error", error);
                }
                fields.close();
            });
            list.extend_from_slice(b"]");
        }
        fields.close();
        out.freeze()
    }
}

/// The body of `/health` with 503 while starting or draining; `stage` says which.
#[must_use]
pub fn not_ready(stage: &str) -> Bytes {
    status(&[
        ("status", "not_ready"),
        ("stage", stage),
        ("message", "Service is not ready"),
    ])
}

/// The body of `/live`.
#[must_use]
pub fn live() -> Bytes {
    status(&[("status", "live"), ("message", "Service is live")])
}

fn status(pairs: &[(&str, &str)]) -> Bytes {
    let mut out = BytesMut::new();
    let mut fields = Fields::open(&mut out);
    for (key, value) in pairs {
        fields.str(key, value);
    }
    fields.close();
    out.freeze()
}

/// When a model's workers count as busy; none means no such limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BusyThreshold {
    /// The model.
    pub model: String,
    /// Share of decode blocks in use, 0 to 1.
    pub decode_blocks: Option<f64>,
    /// Tokens waiting for prefill.
    pub prefill_tokens: Option<u64>,
    /// The same as a share of the batch budget.
    pub prefill_tokens_frac: Option<f64>,
}

impl BusyThreshold {
    /// Appends the object; unset values are `null`.
    pub fn write(&self, out: &mut BytesMut) {
        let mut fields = Fields::open(out);
        fields.str("model", &self.model);
        let out = fields.key("active_decode_blocks_threshold");
        nullable(out, self.decode_blocks, write_float);
        let out = fields.key("active_prefill_tokens_threshold");
        nullable(out, self.prefill_tokens, write_int);
        let out = fields.key("active_prefill_tokens_threshold_frac");
        nullable(out, self.prefill_tokens_frac, write_float);
        fields.close();
    }

    /// Takes over the values that `update` names and keeps the others.
    pub fn merge(&mut self, update: &BusyUpdate) {
        self.decode_blocks = update.decode_blocks.or(self.decode_blocks);
        self.prefill_tokens = update.prefill_tokens.or(self.prefill_tokens);
        self.prefill_tokens_frac = update.prefill_tokens_frac.or(self.prefill_tokens_frac);
    }
}

/// The body of `GET /busy_threshold`.
#[must_use]
pub fn busy_thresholds(list: &[BusyThreshold]) -> Bytes {
    let mut out = BytesMut::from(&b"{\"thresholds\":["[..]);
    separated(&mut out, list, |out, row| row.write(out));
    out.extend_from_slice(b"]}");
    out.freeze()
}

/// A `POST /busy_threshold`, types and ranges checked. Without values it is a question.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BusyUpdate {
    /// The model.
    pub model: String,
    /// As in [`BusyThreshold`].
    pub decode_blocks: Option<f64>,
    /// As in [`BusyThreshold`].
    pub prefill_tokens: Option<u64>,
    /// As in [`BusyThreshold`].
    pub prefill_tokens_frac: Option<f64>,
}

/// Why a `POST /busy_threshold` was refused; this route has its own error body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub struct BusyError {
    /// HTTP status.
    pub status: u16,
    /// The text.
    pub message: String,
    /// The body is the bare text (`text/plain`), not JSON.
    pub plain: bool,
}

impl BusyError {
    /// 404: a threshold for a model that no worker serves.
    #[must_use]
    pub fn unknown_model(model: &str) -> Self {
        Self::new(
            404,
            format!("Model '{model}' not found. Thresholds can only be set for discovered models."),
        )
    }

    fn new(status: u16, message: String) -> Self {
        Self {
            status,
            message: one_line(message.into()).into_owned(),
            plain: false,
        }
    }

    /// The body of the answer.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        if self.plain {
            return Bytes::copy_from_slice(self.message.as_bytes());
        }
        status(&[("error", &self.message)])
    }
}

impl From<JsonError> for BusyError {
    fn from(error: JsonError) -> Self {
        if error.is_syntax() {
            let message = format!("Failed to parse the request body as JSON: {error}");
            return Self {
                plain: true,
                ..Self::new(400, message)
            };
        }
        Self::new(422, ApiError::body(&error).message.into_owned())
    }
}

impl BusyUpdate {
    /// Reads a body; unknown fields are ignored, as the route always did.
    ///
    /// # Errors
    /// 400 for no JSON or a value out of range, 422 for a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, BusyError> {
        let object = Object::parse(body)?;
        let mut reader = Reader::new(&object)?;
        let update = Self {
            model: reader.need("model")?,
            decode_blocks: reader.take("active_decode_blocks_threshold")?,
            prefill_tokens: reader.take("active_prefill_tokens_threshold")?,
            prefill_tokens_frac: reader.take("active_prefill_tokens_threshold_frac")?,
        };
        if update.model.len() > MODEL_BYTES_MAX {
            let message = format!("model: a name has at most {MODEL_BYTES_MAX} bytes");
            return Err(BusyError::new(400, message));
        }
        if let Some(share) = update.decode_blocks.filter(|s| !(0.0..=1.0).contains(s)) {
            return Err(BusyError::new(
                400,
                format!(
                    "active_decode_blocks_threshold must be between 0.0 and 1.0, got {}",
                    shown(share)
                ),
            ));
        }
        if let Some(share) = update.prefill_tokens_frac.filter(|s| *s < 0.0) {
            return Err(BusyError::new(
                400,
                format!(
                    "active_prefill_tokens_threshold_frac must not be negative, got {}",
                    shown(share)
                ),
            ));
        }
        Ok(update)
    }

    /// Whether this only asks.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.decode_blocks.is_none()
            && self.prefill_tokens.is_none()
            && self.prefill_tokens_frac.is_none()
    }
}

fn nullable<T>(out: &mut BytesMut, value: Option<T>, write: impl Fn(&mut BytesMut, T)) {
    match value {
        Some(value) => write(out, value),
        None => out.extend_from_slice(b"null"),
    }
}

fn separated<T>(out: &mut BytesMut, items: &[T], write: impl Fn(&mut BytesMut, &T)) {
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.extend_from_slice(b",");
        }
        write(out, item);
    }
}
