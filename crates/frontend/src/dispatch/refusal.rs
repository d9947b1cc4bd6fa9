//! What becomes of a request that reaches no handler: its answer, an id, one line in the log, one count.
//!
//! What always holds: no text of a client's is a label, and of what is logged of it there is a bound. What the HTTP
//! library refuses by itself (a head that is too large or malformed) has no request and no id; it is counted and logged
//! when its connection ends.

use std::error::Error;

use http::request::Parts;
use http::{HeaderMap, Request, Version};
use kvasir_openai::{ApiError, Endpoint};

use crate::app::App;
use crate::http::context::HttpContext;
use crate::http::limits::HEADER_FIELDS_MAX;
use crate::http::reply::{self, Reply};
use crate::http::routes::{MESSAGES, Route};
use crate::observe::meter::RequestKind;
use crate::observe::outcomes::RequestIdentity;
use crate::observe::request_record::{RequestRecord, error_type};

/// What a field of HTTP/2 counts beside its name and value (RFC 9113, section 6.5.2).
const FIELD_OVERHEAD: usize = 32;
/// Bytes of a refusal's text that are logged: some of it is the client's own.
const LOGGED_BYTES_MAX: usize = 256;
/// The limit that a head which is too large has reached.
const HEADER_LIMIT: &str = "header_bytes";
/// The label of a request whose model or endpoint is not known.
const UNKNOWN: &str = "unknown";

/// Why a request goes no further.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: ApiError,
    /// What was asked for, if that is something to count by.
    pub(crate) asking: Option<RequestKind>,
    /// Too many requests are under way: it is an overload as any other.
    pub(crate) is_overload: bool,
    /// Methods that the path is there for.
    pub(crate) allowed: Option<&'static str>,
    /// The client speaks Anthropic's API.
    pub(crate) is_anthropic: bool,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self {
            error,
            asking: None,
            is_overload: false,
            allowed: None,
            is_anthropic: false,
        }
    }
}

impl Refusal {
    /// The path is there, for other methods.
    pub(crate) fn method(method: &str, allowed: &'static str) -> Self {
        let message = format!("{method} is not allowed here; this path has {allowed}");
        Self {
            allowed: Some(allowed),
            ..ApiError::new(405, message).into()
        }
    }

    /// The same, of a request that asked for this.
    pub(crate) fn of(self, route: &Route, path: &str) -> Self {
        let asking = match route {
            Route::Chat => Some(RequestKind::completion(Endpoint::Chat, false)),
            Route::Completions => Some(RequestKind::completion(Endpoint::Completions, false)),
            Route::Engine(theirs) => Some(RequestKind::route(theirs.unwrap_or(path), false)),
            Route::Stored(path) => Some(RequestKind::route(path, false)),
            _ => None,
        };
        let is_anthropic =
            matches!(route, Route::Engine(Some(theirs)) if theirs.starts_with(MESSAGES));
        Self {
            asking,
            is_anthropic,
            ..self
        }
    }

    /// The answer, counted and logged.
    pub(crate) fn answer(self, app: &App, head: &Parts) -> Reply {
        let arrived = RequestIdentity::refused(app.observer(), &head.headers);
        let error = match (self.is_overload, self.asking) {
            (true, Some(asking)) => {
                RequestRecord::begin(app.observer(), &arrived, &head.headers, None, asking)
                    .fail(self.error)
            }
            (_, asking) => {
                count(app.http(), asking, &self.error);
                let given = arrived.given();
                tracing::info!(
                    request = %arrived.id,
                    client_request = given.as_ref().and_then(|given| given.to_str().ok()),
                    endpoint = asking.map_or(UNKNOWN, |asking| asking.endpoint),
                    status = self.error.status,
                    error = shortened(&self.error.to_string()),
                    "request refused"
                );
                self.error
            }
        };
        let mut reply = match self.is_anthropic {
            true => reply::anthropic_error(&error),
            false => reply::error(&error),
        };
        if let Some(allowed) = self.allowed {
            reply::allow(&mut reply, allowed);
        }
        arrived.tell(&mut reply);
        reply
    }
}

fn count(http: &HttpContext, asking: Option<RequestKind>, error: &ApiError) {
    let (endpoint, kind) = asking.map_or((UNKNOWN, "unary"), |a| (a.endpoint, a.request_type));
    let metrics = &http.metrics;
    let error_type = error_type(error.status, &error.kind);
    metrics
        .requests_started_total
        .with_label_values(&[UNKNOWN, endpoint, kind])
        .inc();
    metrics
        .requests_total
        .with_label_values(&[UNKNOWN, endpoint, kind, "error", error_type])
        .inc();
}

fn shortened(text: &str) -> &str {
    text.get(..text.floor_char_boundary(LOGGED_BYTES_MAX))
        .unwrap_or_default()
}

/// Refuses an HTTP/2 head that HTTP/1 would not have taken.
pub(crate) fn check_head<B>(http: &HttpContext, request: &Request<B>) -> Result<(), Box<Refusal>> {
    if request.version() != Version::HTTP_2 {
        return Ok(());
    }
    let headers = request.headers();
    let is_long = || bytes_of(headers) > http.limits.header_bytes_max;
    if headers.len() > HEADER_FIELDS_MAX || is_long() {
        http.limit_reached(HEADER_LIMIT);
        return Err(Box::new(ApiError::headers_too_large().into()));
    }
    Ok(())
}

fn bytes_of(headers: &HeaderMap) -> usize {
    let bytes = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        name.as_str().len() + value.len() + FIELD_OVERHEAD
    };
    headers.iter().map(bytes).sum()
}

/// A connection ended by an error: if that is a head that the library refused, it is counted and logged.
pub(crate) fn at_connection_end(http: &HttpContext, error: &(dyn Error + 'static)) {
    let Some(refused) = error
        .downcast_ref::<hyper::Error>()
        .filter(|e| e.is_parse())
    else {
        return tracing::debug!(%error, "connection ended early");
    };
    let refusal = match refused.is_parse_too_large() {
        true => {
            http.limit_reached(HEADER_LIMIT);
            ApiError::headers_too_large()
        }
        false => ApiError::bad_request(refused.to_string()),
    };
    count(http, None, &refusal);
    let (status, error) = (refusal.status, refusal.to_string());
    tracing::info!(status, error, "request refused: its head cannot be read");
}
