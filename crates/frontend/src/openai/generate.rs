//! The two endpoints that generate: from an HTTP request to its answer.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use kvasir_host::Stage;
use kvasir_openai::{
    ApiError, ChatRequest, CompletionRequest, Endpoint, HeaderHints, Nvext, Options, Prompt, Scan,
    ToolChoice, Tools,
};
use kvasir_telemetry::Clock;
use kvasir_text::{Effort, TextModel};
use kvasir_types::Time;

use super::mixed::{self, MixedRequest};
use crate::App;
use crate::http::body;
use crate::http::long_work;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;
use crate::models::links::Transports;
use crate::models::prompt;
use crate::models::prompt::{PromptError, Prompts};
use crate::models::tokenize::TextWork;
use crate::observe::outcomes::RequestIdentity;
use crate::observe::request_record::{RequestRecord, Totals};
use crate::proxy::{self, PreparedRequest};
use crate::request::ask;
use crate::request::client_request::ClientRequest;
use crate::request::query::Query;
use crate::request::response_extras;
use crate::tokens::answer::{Answer, StreamedAnswer};
use crate::tokens::job::Job;
use crate::tokens::lane;
use crate::tokens::reading::AnswerReading;

/// Texts longer than this are tokenized on a thread of their own, so that others are not held up.
const INLINE_TEXT_BYTES: usize = 32 * 1024;

/// What a body is told that names no model where there are several.
const WHICH_MODEL: &str = "`model` is missing and several models are served: name one of them";

/// A body that was read and checked.
pub(super) enum CheckedBody {
    Chat(Box<ChatRequest>),
    Completion(Box<CompletionRequest>),
}

/// Answers a request to `endpoint`.
pub(crate) async fn handle(
    app: &Arc<App>,
    endpoint: Endpoint,
    request: Request<Incoming>,
) -> Reply {
    let ticket = app.in_flight().enter();
    let (mut parts, incoming) = request.into_parts();
    let arrived = RequestIdentity::now(app.observer(), &mut parts.headers);
    let outcome = match read(app, &parts, incoming).await {
        Ok(body) => {
            let asked = ClientRequest {
                arrived: arrived.clone(),
                endpoint,
                parts,
                body,
            };
            by_worker_kind(app, asked).await
        }
        Err(error) => Err(unparsed(app, &arrived, &parts, endpoint, error)),
    };
    let mut reply = outcome.unwrap_or_else(|error| reply::error(&error));
    arrived.tell(&mut reply);
    reply.body_mut().hold(ticket);
    reply
}

async fn read(app: &App, parts: &Parts, incoming: Incoming) -> Result<Bytes, ApiError> {
    if app.is_draining() {
        body::leave(parts, incoming).await;
        return Err(ApiError::not_ready());
    }
    body::read_json(app.http(), parts, incoming).await
}

/// Counts a request that failed before its model was known.
fn unparsed(
    app: &App,
    arrived: &RequestIdentity,
    parts: &Parts,
    endpoint: Endpoint,
    error: ApiError,
) -> ApiError {
    RequestRecord::start(
        app.observer(),
        arrived,
        &parts.headers,
        None,
        endpoint,
        false,
    )
    .fail(error)
}

/// A completion that was read: what it asks for is known, and no worker has been chosen yet.
pub(super) enum Ready {
    /// For engines behind HTTP.
    Http(Box<PreparedRequest>),
    /// For workers of either kind.
    Both(Box<MixedRequest>),
    /// For token workers.
    Plane(Box<PlaneRequest>),
}

/// A completion for token workers.
pub(super) struct PlaneRequest {
    job: Job,
    record: RequestRecord,
}

/// Reads the body, here or, if it is long, elsewhere; then looks for a worker.
async fn by_worker_kind(app: &Arc<App>, asked: ClientRequest) -> Result<Reply, ApiError> {
    let ready = match long_work::is_long(asked.body.len()) {
        // Apart, so that what it takes to get ready is not carried along while the engine works.
        false => make_ready(app, asked).await?,
        true => {
            let own = Arc::clone(app);
            let work = async move { make_ready(&own, asked).await };
            let ready = Box::pin(app.long_work().drive(work)).await;
            ready.unwrap_or_else(|| Err(ApiError::internal()))?
        }
    };
    match ready {
        Ready::Http(ready) => proxy::answer(app, ready).await,
        // Boxed: what other requests carry along stays small.
        Ready::Both(ready) => Box::pin(mixed::answer(app, *ready)).await,
        Ready::Plane(ready) => Box::pin(answer(app, *ready)).await,
    }
}

/// An engine behind HTTP judges the body itself; for a token worker we do. Where a model has both, the request goes the way of
/// the worker that is chosen.
async fn make_ready(app: &Arc<App>, asked: ClientRequest) -> Result<Ready, ApiError> {
    let body = &asked.body.clone();
    let scanned = Scan::parse(body).ok();
    let model = match scanned.as_ref().map_or(Ok(None), |scan| served(app, scan)) {
        Ok(model) => model,
        Err(error) => {
            return Err(unparsed(
                app,
                &asked.arrived,
                &asked.parts,
                asked.endpoint,
                error,
            ));
        }
    };
    if let (Some(scan), Some(model)) = (&scanned, &model) {
        match model.transports() {
            Transports::Http => {
                return proxy::prepare(app, asked, scan, model)
                    .await
                    .map(Ready::Http);
            }
            Transports::Both => return Box::pin(mixed::prepare(app, asked, scan, model)).await,
            Transports::Plane => {}
        }
    }
    match CheckedBody::parse(app, asked.endpoint, body) {
        // Boxed: what forwarded requests carry along stays small.
        Ok(parsed) => {
            let ready = Box::pin(make_job(app, &asked, parsed, model)).await?;
            Ok(Ready::Plane(Box::new(ready)))
        }
        Err(error) => Err(unparsed(
            app,
            &asked.arrived,
            &asked.parts,
            asked.endpoint,
            error,
        )),
    }
}

/// The model that a body names, or the only one if it names none and an engine is to judge it; `None` where the
/// reading for token workers says what is wrong.
fn served(app: &App, scan: &Scan<'_>) -> Result<Option<Arc<ServedModel>>, ApiError> {
    let models = app.models();
    match scan.model() {
        Some(name) if name.trim().is_empty() => Ok(None),
        Some(name) => match models.get(&name) {
            Some(model) => Ok(Some(model)),
            None => Err(app.unknown_model()),
        },
        None if models.has_several() => Err(ApiError::validation(WHICH_MODEL)),
        None => {
            let only = models.only();
            Ok(only.filter(|model| model.transports().has_http()))
        }
    }
}

async fn make_job(
    app: &Arc<App>,
    asked: &ClientRequest,
    parsed: CheckedBody,
    model: Option<Arc<ServedModel>>,
) -> Result<PlaneRequest, ApiError> {
    let (stream, began) = (parsed.options().stream, app.clock().now());
    let record = RequestRecord::start(
        app.observer(),
        &asked.arrived,
        &asked.parts.headers,
        model.as_ref().map(|model| &model.meters),
        asked.endpoint,
        stream,
    );
    let meters = model.as_ref().map(|model| Arc::clone(&model.placements));
    let inside = meters.as_ref().map(|m| m.enter(Stage::Preprocess));
    let job = match prepare(app, asked, parsed, model).await {
        Ok(job) => job,
        Err(error) => return Err(record.fail(error)),
    };
    drop(inside);
    let took = app.clock().now() - began;
    job.model.placements.stage_took(Stage::Preprocess, took);
    Ok(PlaneRequest { job, record })
}

/// Answers a completion by token workers.
async fn answer(app: &Arc<App>, ready: PlaneRequest) -> Result<Reply, ApiError> {
    let PlaneRequest { job, record } = ready;
    let stream = job.options.stream;
    if job.nvext.query_only() {
        return match query(app, &job).await {
            Ok(reply) => {
                record.succeed(&Totals {
                    status: reply.status().as_u16(),
                    ..Totals::default()
                });
                Ok(reply)
            }
            Err(error) => Err(record.fail(error)),
        };
    }
    let job = Arc::new(job);
    let lanes = match start_lanes(app, &job).await {
        Ok(lanes) => lanes,
        Err(error) => return Err(record.fail(error)),
    };
    let answer = Answer::new(Arc::clone(app), job, lanes, record);
    if stream {
        return Ok(reply::events(Box::new(StreamedAnswer::new(answer))));
    }
    Ok(reply::json(StatusCode::OK, answer.collect().await?))
}

/// Makes what token workers get of a checked body.
pub(super) async fn prepare(
    app: &App,
    asked: &ClientRequest,
    mut parsed: CheckedBody,
    model: Option<Arc<ServedModel>>,
) -> Result<Job, ApiError> {
    let model = model.ok_or_else(|| app.unknown_model())?;
    let text = model.text().cloned().ok_or_else(ApiError::internal)?;
    let headers = if app.options().nvext_enabled {
        HeaderHints::read(ask::header_pairs(&asked.parts.headers))
    } else {
        HeaderHints::default()
    };
    let (mut nvext, options) = parsed.extension(app.options().nvext_enabled);
    headers.apply(&mut nvext);
    if app.options().exclude_tools {
        parsed.exclude_unused_tools();
    }
    let chat = match &parsed {
        CheckedBody::Chat(chat) if nvext.hints.speculative_prefill && options.n == 1 => {
            Some(chat.clone())
        }
        _ => None,
    };
    let mut reading = parsed.reading(&model);
    let start = app.clock().now();
    let (prompts, printed) = tokenize(app, &model, &text, parsed, &mut nvext).await?;
    model.meters.tokenized(start, printed, app.clock().now());
    let formatted = match options.stream && response_extras::wants_formatted(&nvext) {
        true => prompts.formatted(&text),
        false => None,
    };
    reading.after(&prompts.end);
    let job = Job {
        reading,
        shown: asked.arrived.shown,
        queue_depth: response_extras::queue_depth(&model, &nvext),
        formatted,
        id: asked.arrived.id,
        endpoint: asked.endpoint,
        model,
        text,
        options,
        nvext,
        headers,
        prompts,
        chat,
    };
    job.check_length()?;
    Ok(job)
}

/// Hands every choice to a worker; if one cannot be, the others are given up.
async fn start_lanes(app: &Arc<App>, job: &Arc<Job>) -> Result<Vec<lane::Lane>, ApiError> {
    let prompt = job.prompt_of(0).ok_or_else(ApiError::internal)?;
    let first = lane::start(app, job, job.id, prompt).await?;
    further_lanes(app, job, first).await
}

/// Hands the choices after the first to workers.
pub(super) async fn further_lanes(
    app: &Arc<App>,
    job: &Arc<Job>,
    first: lane::Lane,
) -> Result<Vec<lane::Lane>, ApiError> {
    let mut lanes = vec![first];
    for index in 1..job.choices() {
        let Some(prompt) = job.prompt_of(index) else {
            break;
        };
        let id = app.observer().new_request_id();
        lanes.push(lane::start(app, job, id, prompt).await?);
    }
    Ok(lanes)
}

/// The prompts as tokens, and when their template was done. Long texts, and those of a model that is not known to be quick,
/// are read on a thread of their own.
async fn tokenize(
    app: &App,
    model: &ServedModel,
    text: &Arc<TextModel>,
    parsed: CheckedBody,
    nvext: &mut Nvext,
) -> Result<(Prompts, Option<Time>), ApiError> {
    if let Some(tokens) = nvext.token_data.take() {
        return Ok((prompt::of_tokens(text, tokens)?, None));
    }
    let (clock, length) = (app.clock(), model.context_length);
    let bytes = parsed.text_bytes();
    let work = TextWork::new(app.long_work(), model);
    if bytes <= INLINE_TEXT_BYTES && work.is_quick() {
        let read = work.inline(|effort| parsed.tokenize(text, clock, length, effort));
        if let Some(read) = read {
            return read.map_err(|error| error.told());
        }
    }
    let text = Arc::clone(text);
    let read = move || parsed.tokenize(&text, clock, length, Effort::Full);
    match work.elsewhere(bytes, read).await {
        Some(Some(read)) => read.map_err(|error| error.told()),
        Some(None) => Err(ApiError::internal()),
        None => Err(ApiError::deadline()),
    }
}

impl CheckedBody {
    /// Reads and checks a body, as token workers need it.
    pub(super) fn parse(app: &App, endpoint: Endpoint, body: &[u8]) -> Result<Self, ApiError> {
        let unknown = app.options().unknown_fields;
        match endpoint {
            Endpoint::Chat => ChatRequest::parse(body, unknown).map(|r| Self::Chat(r.into())),
            Endpoint::Completions => {
                CompletionRequest::parse(body, unknown).map(|r| Self::Completion(r.into()))
            }
        }
    }

    /// How to draw, stop and deliver.
    fn options(&self) -> &Options {
        match self {
            Self::Chat(chat) => &chat.options,
            Self::Completion(request) => &request.options,
        }
    }

    /// Leaves tools out of the prompt that may not be called.
    fn exclude_unused_tools(&mut self) {
        if let Self::Chat(chat) = self {
            let is_unused = |tools: &mut Tools| tools.choice == ToolChoice::None;
            drop(chat.tools.take_if(is_unused));
        }
    }

    /// How the answers are read.
    fn reading(&self, model: &ServedModel) -> AnswerReading {
        match self {
            Self::Chat(chat) => AnswerReading::of(chat, model.tokens().formats()),
            Self::Completion(_) => AnswerReading::default(),
        }
    }

    /// How many bytes the template and the tokenizer are given.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => prompt::chat_bytes(chat),
            Self::Completion(request) => request.prompts.iter().map(text_bytes).sum(),
        }
    }

    fn tokenize(
        &self,
        text: &TextModel,
        clock: Clock,
        context_length: u32,
        effort: Effort,
    ) -> Result<(Prompts, Option<Time>), PromptError> {
        let mut printed = None;
        let terms = (context_length, effort);
        let prompts = match self {
            Self::Chat(chat) => {
                let now_unix = clock.unix_secs(clock.now());
                prompt::of_chat(text, chat, now_unix, terms, || printed = Some(clock.now()))
            }
            Self::Completion(request) => prompt::of_completion(text, request, context_length),
        };
        Ok((prompts?, printed))
    }

    /// What the client says to the router, and how to draw.
    fn extension(&self, enabled: bool) -> (Nvext, Options) {
        let (nvext, options) = match self {
            Self::Chat(chat) => (&chat.nvext, &chat.options),
            Self::Completion(request) => (&request.nvext, &request.options),
        };
        (
            if enabled {
                nvext.clone()
            } else {
                Nvext::default()
            },
            options.clone(),
        )
    }
}

fn text_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(_) => 0,
    }
}

/// Answers where a request would go, without running it.
async fn query(app: &App, job: &Job) -> Result<Reply, ApiError> {
    let prompt = job.prompt_of(0).ok_or_else(ApiError::internal)?;
    let target = lane::query(app, job, prompt).await?;
    let query = Query {
        id: job.shown,
        endpoint: job.endpoint,
        stream: job.options.stream,
        tokens: Some(prompt.to_vec()),
    };
    Ok(query.answer(app.clock(), &job.model, target))
}
