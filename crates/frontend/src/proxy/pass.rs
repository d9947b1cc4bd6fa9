//! Routes that only engines know: a request goes to one of them by load, and its answer is passed on.
//!
//! What always holds: bytes are not touched, but that `nvext`, which is ours, and what only a router says to engines are
//! taken out of a JSON object. A body is read whole before an engine sees any of it (another may be asked), up to
//! `--http-body-limit-mb`.

use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use kvasir_host::PromptBlocks;
use kvasir_openai::{ApiError, Form, HeaderHints, Nvext, Scan};
use kvasir_types::TransportKind;

use super::{Forward, Kind, PrefillPlan, PreparedRequest, headers, moved_to, path_of};
use crate::App;
use crate::http::body;
use crate::http::long_work;
use crate::http::reply::{self, Reply};
use crate::http::routes::{MESSAGES, RESPONSES, is_idempotent};
use crate::models::ServedModel;
use crate::models::tokenize::BYTES_PER_TOKEN;
use crate::observe::outcomes::RequestIdentity;
use crate::observe::request_record::RequestRecord;
use crate::request::ask;

/// Passes a request for a route that only engines know to one of them, by load.
///
/// `path` is the engine's, where it is not the client's.
pub(crate) async fn pass(
    app: &Arc<App>,
    request: Request<Incoming>,
    path: Option<&'static str>,
) -> Reply {
    let ticket = app.in_flight().enter();
    let (mut parts, incoming) = request.into_parts();
    let arrived = RequestIdentity::now(app.observer(), &mut parts.headers);
    let path = path.map_or_else(|| path_of(&parts.uri), |path| moved_to(path, &parts.uri));
    let anthropic = path.path().starts_with(MESSAGES);
    let outcome = match read(app, &parts, incoming).await {
        Ok(body) => pass_on(app, &arrived, &parts, &path, body).await,
        Err(error) => Err(unplaced(app, &arrived, &parts, &path, error)),
    };
    let mut reply = outcome.unwrap_or_else(|error| match anthropic {
        true => reply::anthropic_error(&error),
        false => reply::error(&error),
    });
    arrived.tell(&mut reply);
    reply.body_mut().hold(ticket);
    reply
}

pub(super) async fn read(app: &App, parts: &Parts, incoming: Incoming) -> Result<Bytes, ApiError> {
    if app.is_draining() {
        body::leave(parts, incoming).await;
        return Err(ApiError::not_ready());
    }
    body::read_for(app.http(), parts, incoming).await
}

/// Counts a request that failed before its model was known.
pub(super) fn unplaced(
    app: &App,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    error: ApiError,
) -> ApiError {
    let record = RequestRecord::start_at(
        app.observer(),
        arrived,
        &parts.headers,
        None,
        path.path(),
        false,
    );
    record.fail(error)
}

/// What matters here of a request.
struct PassedRequest<'b> {
    scan: Option<Scan<'b>>,
    /// It is a form with files.
    is_form: bool,
    stream: bool,
    model: Arc<ServedModel>,
}

impl<'b> PassedRequest<'b> {
    fn read(app: &App, parts: &Parts, body: &'b Bytes) -> Result<Self, ApiError> {
        let scan = match Scan::parse(body) {
            Ok(scan) => Some(scan),
            Err(error) if may_be_object(parts, body) => return Err(error.into()),
            Err(_) => None,
        };
        let form = form_of(parts, body).filter(|_| scan.is_none());
        let model = match scan.as_ref().and_then(Scan::model) {
            Some(name) => Some(name),
            None => form.as_ref().and_then(|form| form.field("model")),
        };
        let model = model_of(app, model.as_deref()).ok_or_else(|| app.unknown_model())?;
        let stream = match &form {
            Some(form) => form
                .field("stream")
                .is_some_and(|said| said.eq_ignore_ascii_case("true")),
            None => scan.as_ref().is_some_and(Scan::stream),
        };
        Ok(Self {
            is_form: form.is_some(),
            scan,
            stream,
            model,
        })
    }

    /// Whether running it twice does no harm. An answer of `/v1/responses` is stored unless the client says otherwise.
    fn is_idempotent(&self, path: &str) -> bool {
        let store = || self.scan.as_ref().and_then(|scan| scan.raw("store"));
        is_idempotent(path) || path == RESPONSES && store().is_some_and(|store| store == "false")
    }
}

async fn pass_on(
    app: &Arc<App>,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    body: Bytes,
) -> Result<Reply, ApiError> {
    let ready = match long_work::is_long(body.len()) {
        false => prepare(app, arrived, parts, path, &body)?,
        true => {
            let own = (
                Arc::clone(app),
                arrived.clone(),
                parts.clone(),
                path.clone(),
            );
            let work = async move {
                let (app, arrived, parts, path) = own;
                prepare(&app, &arrived, &parts, &path, &body)
            };
            let ready = Box::pin(app.long_work().drive(work)).await;
            ready.unwrap_or_else(|| Err(ApiError::internal()))?
        }
    };
    ready.run().await
}

fn prepare(
    app: &Arc<App>,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    body: &Bytes,
) -> Result<Box<PreparedRequest>, ApiError> {
    let said = match PassedRequest::read(app, parts, body) {
        Ok(said) => said,
        Err(error) => return Err(unplaced(app, arrived, parts, path, error)),
    };
    let model = &said.model;
    let headers = &parts.headers;
    let record = RequestRecord::start_at(
        app.observer(),
        arrived,
        headers,
        Some(&model.meters),
        path.path(),
        said.stream,
    );
    if !model.transports().has_http() {
        let (method, path) = (parts.method.as_str(), parts.uri.path());
        return Err(record.fail(ApiError::route_not_found(method, path)));
    }
    // Files are no prompts: their bytes say nothing of the work that they are.
    let text = if said.is_form { 0 } else { body.len() };
    let tokens = (text / BYTES_PER_TOKEN).max(1);
    let (nvext, hints) = (Nvext::default(), HeaderHints::default());
    let mut arrival = ask::arrival(arrived.id, tokens, &nvext, &hints);
    arrival.constraints.transport = Some(TransportKind::Http);
    arrival.silent = true;
    let scan = said.scan.as_ref();
    let prefill = scan.and_then(|scan| PrefillPlan::passed(app, model, path.path(), scan));
    if prefill.is_none() {
        arrival.constraints.allowed = model.links().only(true);
    }
    let mut headers = headers::to_engine(headers.clone(), app.via(), &arrived.name);
    record.trace_to(&mut headers);
    let forward = Forward {
        app: Arc::clone(app),
        method: parts.method.clone(),
        path: path.clone(),
        headers,
        body: without_extension(said.scan.as_ref(), body),
        urgency: None,
        kind: Kind::Opaque {
            idempotent: said.is_idempotent(path.path()),
        },
        received: record.received(),
        model: Arc::clone(model),
        notes: Bytes::new(),
        tells_bypass: false,
    };
    Ok(Box::new(PreparedRequest {
        forward: Arc::new(forward),
        arrival,
        blocks: PromptBlocks::none(),
        record,
        query: None,
        prefill,
        batch: None,
    }))
}

/// Whether an engine might read a body as an object, though we cannot: then nobody could take our extension out. Engines
/// read JSON where the client says that it is, and some where it says nothing.
fn may_be_object(parts: &Parts, body: &[u8]) -> bool {
    let first = body.trim_ascii_start().first();
    if !parts.headers.contains_key(CONTENT_TYPE) {
        // Python also reads JSON in other encodings, with a mark before it or without.
        return first.is_some_and(|byte| b"{\0\xef\xfe\xff".contains(byte));
    }
    let other = first.is_some_and(|byte| b"[\"-0123456789tfn".contains(byte));
    let json = body::check_content_type(&parts.headers).is_ok();
    json && !body.is_empty() && !other
}

/// The model of that name; a body that names none is for the only one that is served.
fn model_of(app: &App, name: Option<&str>) -> Option<Arc<ServedModel>> {
    match name {
        Some(name) => app.models().get(name),
        None => app.models().only(),
    }
}

/// The body as a form with files, if it is one.
fn form_of<'b>(parts: &Parts, body: &'b Bytes) -> Option<Form<'b>> {
    let kind = parts.headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Form::new(kind, body)
}

/// The body as the engine gets it.
fn without_extension(scan: Option<&Scan<'_>>, body: &Bytes) -> Bytes {
    match scan {
        Some(scan) => scan.edit().remove("nvext").remove_transfer().apply(body),
        None => body.clone(),
    }
}
