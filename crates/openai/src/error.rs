//! Error bodies.
//!
//! Answers one question: which status and which body tell the client what went wrong? The body is flat,
//! `{"message","type","code","details"?}`; inside a stream it is an `error` frame whose `type` is a slug.
//!
//! Invariants: a message never carries an internal error chain; what a client cannot act on is
//! "Internal server error". A message may repeat what a client wrote, so it is one line without control characters
//! and at most [`MESSAGE_BYTES_MAX`] long, and so is every log line and answer made of it.

use std::borrow::Cow;

use bytes::BytesMut;

use crate::JsonError;
use crate::json::{Fields, JsonText};

/// Status of an overload answer unless the operator chose another.
pub const DEFAULT_OVERLOAD_STATUS: u16 = 503;

/// No client is told to stay away for longer than this.
const RETRY_AFTER_SECS_MAX: u64 = 60;

/// Longest message; a longer one loses its middle.
pub(crate) const MESSAGE_BYTES_MAX: usize = 2048;
/// How much of a message's end stays where its middle is cut: what would be right stands there.
const MESSAGE_TAIL_BYTES: usize = 512;
const CUT: &str = "…";

const BODIES_FULL: &str = "Service temporarily unavailable: The bodies of requests under way take all the room that \
    --http-body-budget-mb (KVASIR_HTTP_BODY_BUDGET_MB) gives them, please retry later";
const PREFIX_BODY: &str = "Failed to deserialize the JSON body into the target type: ";

/// An answer that says no. Status, texts and `code` are what clients of the peer already match on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{status} {kind}: {message}")]
pub struct ApiError {
    /// HTTP status, and `code` in the body.
    pub status: u16,
    /// What happened and what to do, for the client's eyes.
    pub message: Cow<'static, str>,
    /// `type` in the body: the status's reason phrase, or a slug of the API.
    pub kind: Cow<'static, str>,
    /// Machine-readable addition.
    pub details: Option<JsonText>,
    /// Seconds after which it makes sense to come again, where that is known better than "soon".
    pub retry_after_secs: Option<u32>,
}

impl ApiError {
    /// An error whose `type` is the reason phrase of `status`.
    #[must_use]
    pub fn new(status: u16, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            message: one_line(message.into()),
            kind: Cow::Borrowed(reason(status)),
            details: None,
            retry_after_secs: None,
        }
    }

    /// 400 with a text of ours.
    #[must_use]
    pub fn bad_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, message)
    }

    /// 400: JSON that does not parse or has a wrong shape.
    #[must_use]
    pub fn body(error: &JsonError) -> Self {
        Self::new(400, format!("{PREFIX_BODY}{error}"))
    }

    /// 400: the shape is right and a value is not.
    #[must_use]
    pub fn validation(what: impl std::fmt::Display) -> Self {
        Self::new(400, format!("Validation: {what}"))
    }

    /// 400: a pin names a worker or rank that is not there; `what` says which.
    #[must_use]
    pub fn invalid_pin(what: impl std::fmt::Display) -> Self {
        Self::new(400, format!("Invalid request: {what}"))
    }

    /// 415: the content type is missing or not JSON.
    #[must_use]
    pub fn media_type() -> Self {
        Self::new(415, "Expected request with Content-Type application/json")
    }

    /// 413: more than `limit_mb` megabytes.
    #[must_use]
    pub fn body_too_large(limit_mb: u64) -> Self {
        Self::new(
            413,
            format!(
                "Request body exceeds the limit of {limit_mb} MB set by --http-body-limit-mb (DYN_HTTP_BODY_LIMIT_MB)"
            ),
        )
    }

    /// 431: the headers are too large.
    #[must_use]
    pub fn headers_too_large() -> Self {
        Self::new(431, "Request header fields too large")
    }

    /// 404: no route has this path.
    #[must_use]
    pub fn route_not_found(method: &str, path: &str) -> Self {
        Self::new(404, format!("Route not found: {method} {path}"))
    }

    /// 404: no worker serves this model.
    #[must_use]
    pub fn model_not_found() -> Self {
        Self::new(404, "Model not found")
    }

    /// 501: the API has it, we do not.
    #[must_use]
    pub fn not_implemented(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(501, message)
    }

    /// 503 (or the operator's `status`): every eligible worker is busy. The default keeps the mandatory body.
    #[must_use]
    pub fn overloaded(status: u16) -> Self {
        Self {
            status,
            message: Cow::Borrowed(
                "Service temporarily unavailable: All workers are busy, please retry later",
            ),
            kind: Cow::Borrowed("service_unavailable"),
            details: None,
            retry_after_secs: None,
        }
    }

    /// As [`ApiError::overloaded`]: the bodies of other requests leave no room for this one.
    #[must_use]
    pub fn bodies_full(status: u16) -> Self {
        Self {
            message: Cow::Borrowed(BODIES_FULL),
            ..Self::overloaded(status)
        }
    }

    /// Whether it refuses a body, of which a part may still be on its way.
    #[must_use]
    pub fn leaves_body(&self) -> bool {
        self.status == 413 || self.message == BODIES_FULL
    }

    /// Whether it says that everybody is busy, under whichever status.
    #[must_use]
    pub fn is_overload(&self) -> bool {
        self.kind == "service_unavailable"
    }

    /// As [`ApiError::overloaded`], for the queue of one policy class.
    #[must_use]
    pub fn queue_full(status: u16, class: &str, limit_kind: &str, now: u64, limit: u64) -> Self {
        let mut out = BytesMut::new();
        let mut fields = Fields::open(&mut out);
        fields.str("policy_class", class);
        fields.str("limit_kind", limit_kind);
        fields.int("current", now);
        fields.int("limit", limit);
        fields.close();
        Self {
            details: JsonText::new(&String::from_utf8_lossy(&out)),
            ..Self::overloaded(status)
        }
    }

    /// As [`ApiError::overloaded`], with the time after which those who wait now will have been served.
    #[must_use]
    pub fn queue_too_slow(
        status: u16,
        expected_ms: u64,
        limit_ms: u64,
        retry_after_ms: u64,
    ) -> Self {
        Self::queue_full(status, "default", "wait_ms", expected_ms, limit_ms)
            .retry_after(Some(retry_after_ms))
    }

    /// The same with the time after which the client should come back, where that is known.
    #[must_use]
    pub fn retry_after(mut self, millis: Option<u64>) -> Self {
        if let Some(millis) = millis {
            let secs = millis.div_ceil(1000).clamp(1, RETRY_AFTER_SECS_MAX);
            self.retry_after_secs = u32::try_from(secs).ok();
        }
        self
    }

    /// 503: no worker can be reached, or it died before its answer was whole.
    #[must_use]
    pub fn unavailable() -> Self {
        Self::new(503, "Service temporarily unavailable")
    }

    /// 503: starting, or draining before the end.
    #[must_use]
    pub fn not_ready() -> Self {
        Self::new(503, "Service is not ready")
    }

    /// 503: the model is registered but its set of workers is not complete.
    #[must_use]
    pub fn model_not_ready(model: &str) -> Self {
        Self::new(
            503,
            format!("Model '{model}' is not ready: its set of workers is incomplete"),
        )
    }

    /// 504: no sign from the worker in time.
    #[must_use]
    pub fn deadline() -> Self {
        Self::new(504, "Request deadline exceeded")
    }

    /// 499: the client left.
    #[must_use]
    pub fn cancelled() -> Self {
        Self::new(499, "Request cancelled")
    }

    /// 500: ours, or an engine's fault that the client cannot mend.
    #[must_use]
    pub fn internal() -> Self {
        Self::new(500, "Internal server error")
    }

    /// 500: the worker is out of capacity, and no other worker could take the request.
    #[must_use]
    pub fn generation_failed() -> Self {
        Self::new(500, "Failed to generate completions")
    }

    /// What the client sees of a worker's error: 4xx passes with its text, 503 and the overload status keep
    /// their code without the text, anything else is 500 and says the worker's status.
    #[must_use]
    pub fn backend(status: u16, message: &str, overload_status: u16) -> Self {
        match status {
            499 => Self::cancelled(),
            400..=498 => Self::new(status, message.to_owned()),
            _ if status == overload_status => Self::overloaded(status),
            503 => Self::unavailable(),
            _ => Self {
                details: JsonText::new(&format!("{{\"backend_status\":{status}}}")),
                ..Self::internal()
            },
        }
    }

    /// Appends the body of an HTTP answer.
    pub fn write(&self, out: &mut BytesMut) {
        let mut fields = Fields::open(out);
        fields.str("message", &self.message);
        fields.str("type", &self.kind);
        fields.int("code", self.status);
        if let Some(details) = &self.details {
            fields.raw("details", details.as_str());
        }
        fields.close();
    }

    /// The body that Anthropic's API has for it.
    #[must_use]
    pub fn to_anthropic_body(&self) -> BytesMut {
        let kind = match self.status {
            400 | 415 | 431 => "invalid_request_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 | 405 => "not_found_error",
            413 => "request_too_large",
            499 => "request_cancelled",
            _ if self.is_overload() => "overloaded_error",
            503 | 529 => "overloaded_error",
            _ => "api_error",
        };
        let mut out = BytesMut::new();
        let mut fields = Fields::open(&mut out);
        fields.str("type", "error");
        let mut error = Fields::open(fields.key("error"));
        error.str("type", kind);
        error.str("message", &self.message);
        error.close();
        fields.close();
        out
    }

    /// The body of an HTTP answer.
    ///
    /// ```
    /// # use kvasir_openai::ApiError;
    /// assert_eq!(
    ///     &ApiError::model_not_found().to_body()[..],
    ///     br#"{"message":"Model not found","type":"Not Found","code":404}"#
    /// );
    /// ```
    #[must_use]
    pub fn to_body(&self) -> bytes::Bytes {
        let mut out = BytesMut::with_capacity(128 + self.message.len());
        self.write(&mut out);
        out.freeze()
    }

    /// Appends the frame that ends a stream that has begun; `[DONE]` follows it.
    pub fn write_frame(&self, out: &mut BytesMut) {
        out.extend_from_slice(b"data: {\"error\":");
        let mut fields = Fields::open(out);
        fields.str("message", &self.message);
        fields.str("type", slug(self.status));
        fields.int("code", self.status);
        fields.close();
        out.extend_from_slice(b"}\n\n");
    }
}

impl From<JsonError> for ApiError {
    fn from(error: JsonError) -> Self {
        Self::body(&error)
    }
}

/// A text as one bounded line: control characters escaped, the middle cut out of a long one. Texts that are in our code
/// are such lines.
pub(crate) fn one_line(text: Cow<'static, str>) -> Cow<'static, str> {
    if matches!(text, Cow::Borrowed(_)) {
        return text;
    }
    let text = match text.contains(char::is_control) {
        true => Cow::Owned(escaped(&text)),
        false => text,
    };
    if text.len() <= MESSAGE_BYTES_MAX {
        return text;
    }
    let head = text.floor_char_boundary(MESSAGE_BYTES_MAX - MESSAGE_TAIL_BYTES - CUT.len());
    let tail = text.ceil_char_boundary(text.len() - MESSAGE_TAIL_BYTES);
    let part = |range: Option<&str>| range.unwrap_or_default().to_owned();
    Cow::Owned(part(text.get(..head)) + CUT + &part(text.get(tail..)))
}

fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// The `type` of an error frame.
fn slug(status: u16) -> &'static str {
    match status {
        499 => "request_cancelled",
        503 | 504 | 529 => "service_unavailable",
        400..=498 => "invalid_request_error",
        _ => "internal_server_error",
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Payload Too Large",
        415 => "Unsupported Media Type",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        499 => "Client Closed Request",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        529 => "Overloaded",
        other if (400..499).contains(&other) => "Client Error",
        _ => "Internal Server Error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_whatever_a_client_wrote() {
        let error =
            ApiError::bad_request("`zz\n2026 INFO forged\u{1b}[2J` is no action".to_owned());
        assert_eq!(
            error.message,
            r"`zz\n2026 INFO forged\u{1b}[2J` is no action"
        );
        let backend = ApiError::backend(422, "a\r\nb", 503);
        assert_eq!(backend.message, r"a\r\nb");
    }

    #[test]
    fn a_long_message_keeps_its_beginning_and_its_end() {
        let value = "é".repeat(150_000);
        let error = ApiError::validation(format_args!("action `{value}`; give open or close"));
        assert!(
            error.message.len() <= MESSAGE_BYTES_MAX,
            "{}",
            error.message.len()
        );
        assert!(error.message.starts_with("Validation: action `éé"));
        assert!(error.message.ends_with("éé`; give open or close"));
        let escapes = ApiError::bad_request("\u{1}".repeat(MESSAGE_BYTES_MAX)).message;
        assert!(escapes.len() <= MESSAGE_BYTES_MAX, "{}", escapes.len());
        let fits = "x".repeat(MESSAGE_BYTES_MAX);
        assert_eq!(ApiError::bad_request(fits.clone()).message, fits);
    }
}
