//! Requests to engines behind HTTP: the client's body goes to the chosen engine, the engine's answer comes back.
//!
//! We read only what routing needs and refuse only what no engine could read. The engine judges the rest, and its answers pass
//! unchanged, errors included. Until the client has received something, a worker that fails is replaced by another.

mod attempt;
mod batch;
mod headers;
mod keep_alive;
mod kept_prompt;
mod next_turn;
mod outgoing;
mod pass;
mod peek;
mod prefill;
pub(crate) mod relay;
mod resume;
mod stored;
mod two_step;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::response::Parts as Head;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Response, StatusCode, Uri, header};
use kvasir_host::{Booking, PromptBlocks, Stage, hit_rate};
use kvasir_openai::answer_text;
use kvasir_openai::resume::{obstacle, tokens_wanted};
use kvasir_openai::{
    ApiError, Endpoint, HeaderHints, Nvext, ResponseNvext, Scan, Timing, WorkerIds,
    write_annotation,
};
use kvasir_router::{Arrival, Attempts, Placement};
use kvasir_types::{FailureCause, Time, TransportKind, WorkerRank};
use kvasir_upstream::cause_of_status;

use crate::App;
use crate::http::reply::{Reply, ReplyBody};
use crate::models::ServedModel;
use crate::models::tokenize;
use crate::observe::request_record::{PartRoute, RequestRecord};
use crate::proxy::relay::{
    Accounting, AnswerStart, Extras, FirstBytes, Form, HiddenUsage, Relay, ResumeState, Source,
    Timeouts,
};
use crate::request::ask;
use crate::request::bypass;
use crate::request::client_request::ClientRequest;
use crate::request::query::Query;
use crate::request::response_extras::{self, ExtraFields};
use crate::request::route_error;
use crate::request::two_step::PrefillSummary;

pub(crate) use attempt::HttpAttempt;
use batch::Batch;
pub(crate) use next_turn::NextTurn;
pub(crate) use pass::pass;
use resume::ResumeTerms;
pub(crate) use resume::{Continuation, Resume, ResumeFuture, ResumedAnswer};
pub(crate) use stored::seek;
use two_step::PrefillPlan;

/// A request to an engine behind HTTP.
pub(crate) struct Forward {
    app: Arc<App>,
    model: Arc<ServedModel>,
    method: Method,
    path: PathAndQuery,
    /// Headers for the engine, without those that differ between workers.
    headers: HeaderMap,
    body: Bytes,
    /// How urgent the client says it is; in `body` it stands as vLLM writes it.
    urgency: Option<i32>,
    kind: Kind,
    received: Time,
    /// Annotations that the client's stream begins with.
    notes: Bytes,
    /// The client's stream is told if the prompt goes past the engines for prompts.
    tells_bypass: bool,
}

/// What kind of request it is.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A completion.
    Completion {
        stream: bool,
        /// The usage that the client did not ask for.
        hide: HiddenUsage,
        extra_fields: ExtraFields,
        /// On which terms its answer may be resumed; none if it may not.
        terms: Option<ResumeTerms>,
        /// The next turn is to be prefilled (`speculative_prefill`).
        prefill_next_turn: bool,
    },
    /// Any other request, which passes unread.
    Opaque {
        /// Running it twice does no harm.
        idempotent: bool,
    },
}

/// An answer of an engine that has begun.
pub(crate) struct EngineAnswer {
    /// When the request was sent to its worker.
    dispatched: Time,
    /// How its prompt was computed, if by another engine.
    prefill: Option<PrefillSummary>,
    /// The prompt went past the engines for prompts.
    bypassed: bool,
    head: Head,
    source: Source,
    first: FirstBytes,
}

/// A completion that is ready to be placed.
pub(crate) struct PreparedRequest {
    pub(crate) forward: Arc<Forward>,
    pub(crate) arrival: Arrival,
    pub(crate) blocks: PromptBlocks,
    pub(crate) record: RequestRecord,
    /// It only asks which worker would serve it.
    pub(crate) query: Option<Box<Query>>,
    /// How two engines compute it, if they do.
    prefill: Option<Box<PrefillPlan>>,
    /// Its answers are asked for one by one; where the first goes.
    batch: Option<(Box<Batch>, PartRoute)>,
}

/// Answers a completion by one of the model's OpenAI workers.
pub(crate) async fn answer(
    app: &Arc<App>,
    mut ready: Box<PreparedRequest>,
) -> Result<Reply, ApiError> {
    if let Some(query) = ready.query.take() {
        // In a box: requests that are run do not carry its room.
        return Box::pin(ask_only(app, *query, *ready)).await;
    }
    let keep_alive = keep_alive(app, ready.forward.is_stream());
    let answer = ready.run();
    match keep_alive {
        Some((every, peek)) => keep_alive::wait(answer, every, peek).await,
        None => answer.await,
    }
}

/// How often a client that waits for a stream gets a comment, and how long an error may still set the status.
pub(crate) type KeepAlive = Option<(Duration, Option<Duration>)>;

/// What a client of a stream gets while it waits.
pub(crate) fn keep_alive(app: &App, stream: bool) -> KeepAlive {
    let every = app.options().limits.keep_alive.filter(|_| stream);
    every.map(|every| (every, app.options().error_peek))
}

/// Waits for an answer; its client gets what `keep_alive` says meanwhile.
pub(crate) async fn wait(
    answer: Pin<Box<dyn Future<Output = Result<Reply, ApiError>> + Send>>,
    keep_alive: KeepAlive,
) -> Result<Reply, ApiError> {
    match keep_alive {
        Some((every, peek)) => keep_alive::wait(answer, every, peek).await,
        None => answer.await,
    }
}

/// Answers where a completion would go; nothing is booked.
pub(crate) async fn ask_only(
    app: &App,
    query: Query,
    ready: PreparedRequest,
) -> Result<Reply, ApiError> {
    let model = &ready.forward.model;
    let (mut arrival, record) = (ready.arrival, ready.record);
    arrival.query_only = true;
    match model.book(Box::new(arrival), &ready.blocks).await {
        Ok(booking) => {
            record.passed(StatusCode::OK.as_u16());
            Ok(query.answer(app.clock(), model, booking.target()))
        }
        Err(error) => Err(record.fail(route_error::answer(app.options().overload_status, &error))),
    }
}

/// Reads what routing needs to know, and writes what the engine will get.
pub(crate) async fn prepare(
    app: &Arc<App>,
    asked: ClientRequest,
    scan: &Scan<'_>,
    model: &Arc<ServedModel>,
) -> Result<Box<PreparedRequest>, ApiError> {
    let record = start_record(app, &asked, scan, model);
    match batch::split(app, model, &asked, scan) {
        None => prepare_one(app, asked, scan, model, record).await,
        Some(parts) => {
            let wants_usage = scan.include_usage();
            // In a box: most requests are for one answer.
            Box::pin(batch::prepare(
                app,
                asked,
                model,
                record,
                (parts, wants_usage),
            ))
            .await
        }
    }
}

/// Counts the request from here to its end.
fn start_record(
    app: &App,
    asked: &ClientRequest,
    scan: &Scan<'_>,
    model: &ServedModel,
) -> RequestRecord {
    RequestRecord::start(
        app.observer(),
        &asked.arrived,
        &asked.parts.headers,
        Some(&model.meters),
        asked.endpoint,
        scan.stream(),
    )
}

/// The same of a request that is not cut.
pub(crate) async fn prepare_whole(
    app: &Arc<App>,
    asked: ClientRequest,
    scan: &Scan<'_>,
    model: &Arc<ServedModel>,
) -> Result<Box<PreparedRequest>, ApiError> {
    let record = start_record(app, &asked, scan, model);
    prepare_one(app, asked, scan, model, record).await
}

async fn prepare_one(
    app: &Arc<App>,
    asked: ClientRequest,
    scan: &Scan<'_>,
    model: &Arc<ServedModel>,
    record: RequestRecord,
) -> Result<Box<PreparedRequest>, ApiError> {
    let (stream, endpoint, began) = (scan.stream(), asked.endpoint, app.clock().now());
    let preprocess = model.placements.enter(Stage::Preprocess);
    let (nvext, hints) = match extension(app, scan, &asked.parts.headers) {
        Ok(extension) => extension,
        Err(error) => return Err(record.fail(error)),
    };
    // A busy engine is not asked for the tokens of a request that will be refused because it is busy.
    let refused = tokenize::asks_an_engine(model, &nvext) && {
        let mut arrival = ask::arrival(asked.arrived.id, 1, &nvext, &hints);
        arrival.constraints.transport = Some(TransportKind::Http);
        arrival.model = Some(Arc::clone(&model.name));
        // Those who compute its prompt may be full, too.
        let is_full = |pool: Arc<ServedModel>| {
            let mut arrival = arrival.clone();
            arrival.model = Some(Arc::clone(&pool.name));
            pool.host.refuses(&arrival)
        };
        model.host.refuses(&arrival) || two_step::active_pool(app, model).is_some_and(is_full)
    };
    let reading = match refused {
        true => tokenize::unread(model, endpoint, scan),
        false => {
            let pool = app.long_work();
            tokenize::read(pool, model, endpoint, scan, &asked.body, &nvext).await
        }
    };
    let tokens = &reading.tokens;
    let salt = nvext
        .cache_salt
        .clone()
        .or_else(|| scan.cache_salt().map(Into::into));
    let mut blocks = model.name_blocks(tokens, salt.as_deref().unwrap_or_default());
    blocks.set_guessed(reading.guessed());
    blocks.certain_tokens = u32::try_from(tokens.len()).ok().filter(|_| reading.certain);
    let mut arrival = ask::arrival(asked.arrived.id, tokens.len().max(1), &nvext, &hints);
    arrival.constraints.transport = Some(TransportKind::Http);
    arrival.silent = !stream;
    let exact = (!reading.guessed()).then_some(tokens);
    let query = nvext.query_only().then(|| Query {
        id: asked.arrived.shown,
        endpoint,
        stream,
        tokens: exact.cloned(),
    });
    let formatted = match stream && response_extras::wants_formatted(&nvext) {
        // In a box: those who do not ask for it do not carry its room.
        true => {
            Box::pin(response_extras::formatted(
                app.long_work(),
                model,
                endpoint,
                &asked.body,
                &nvext,
            ))
            .await
        }
        false => None,
    };
    let shown = exact.filter(|_| stream).map(Vec::as_slice);
    let notes = response_extras::notes(&nvext, asked.arrived.shown, shown, formatted.as_deref());
    let salt = salt.as_deref().unwrap_or_default();
    let prompt = (&tokens[..], salt, reading.guessed());
    let prefill = PrefillPlan::of(app, model, (scan, endpoint), &nvext, prompt);
    if prefill.is_none() {
        arrival.constraints.allowed = model.links().only(true);
    }
    // An engine that computes no prompts cannot compute the answer so far.
    let is_off = app.options().migration.limit_of(model) == 0 || model.links().needs_prefill();
    let terms = resume_terms(scan, endpoint, &nvext).filter(|_| !is_off);
    let follow = terms.is_some_and(|terms| terms.obstacle.is_none());
    let hide = match (stream, scan.include_usage()) {
        (true, false) => HiddenUsage::All,
        (true, true) if follow && !scan.continuous_usage() => HiddenUsage::Chunks,
        _ => HiddenUsage::None,
    };
    let mut headers = headers::to_engine(asked.parts.headers, app.via(), &asked.arrived.name);
    record.trace_to(&mut headers);
    let body = outgoing::body(scan, &asked.body, &nvext, endpoint, follow);
    let forward = Forward {
        app: Arc::clone(app),
        model: Arc::clone(model),
        method: asked.parts.method,
        path: engine_path(endpoint, &asked.parts.uri),
        headers,
        body: match body.as_ptr() == asked.body.as_ptr() {
            true => body,
            // A copy, which takes room as well.
            false => app.http().bodies.hold(body),
        },
        urgency: nvext.hints.priority,
        kind: Kind::Completion {
            stream,
            hide,
            extra_fields: ExtraFields::of(model, &nvext, scan),
            terms,
            prefill_next_turn: nvext.hints.speculative_prefill
                && endpoint == Endpoint::Chat
                && scan.n() == 1,
        },
        received: record.received(),
        notes,
        tells_bypass: stream && nvext.wants(bypass::ANNOTATION),
    };
    kvasir_text::recycle_tokens(reading.tokens);
    let took = app.clock().now() - began;
    model.placements.stage_took(Stage::Preprocess, took);
    drop(preprocess);
    // In a box: as a value it would have its room in each of the futures that it goes through.
    Ok(Box::new(PreparedRequest {
        forward: Arc::new(forward),
        arrival,
        blocks,
        record,
        query: query.map(Box::new),
        prefill,
        batch: None,
    }))
}

fn path_of(uri: &Uri) -> PathAndQuery {
    let path = uri.path_and_query().cloned();
    path.unwrap_or(PathAndQuery::from_static("/"))
}

/// Where engines have an endpoint, wherever we do.
fn engine_path(endpoint: Endpoint, uri: &Uri) -> PathAndQuery {
    let path = match endpoint {
        Endpoint::Chat => "/v1/chat/completions",
        Endpoint::Completions => "/v1/completions",
    };
    moved_to(path, uri)
}

/// An engine's path with the client's query.
fn moved_to(path: &'static str, uri: &Uri) -> PathAndQuery {
    if uri.path() == path {
        return path_of(uri);
    }
    let with_query = uri.query().map(|query| format!("{path}?{query}"));
    let moved = with_query.and_then(|path| PathAndQuery::try_from(path).ok());
    moved.unwrap_or(PathAndQuery::from_static(path))
}

/// What the client says to the router, headers laid over the body.
fn extension(
    app: &App,
    scan: &Scan<'_>,
    headers: &HeaderMap,
) -> Result<(Nvext, HeaderHints), ApiError> {
    if !app.options().nvext_enabled {
        return Ok(Default::default());
    }
    let mut nvext = Nvext::of_scan(scan)?;
    let hints = HeaderHints::read(ask::header_pairs(headers));
    hints.apply(&mut nvext);
    Ok((nvext, hints))
}

/// On which terms an answer may be resumed at another worker; none where it may not.
fn resume_terms(scan: &Scan<'_>, endpoint: Endpoint, nvext: &Nvext) -> Option<ResumeTerms> {
    if !scan.stream() {
        return None;
    }
    let pinned = nvext.pinned_worker().map(|_| "pinned");
    Some(ResumeTerms {
        endpoint,
        max_tokens: tokens_wanted(scan, endpoint),
        obstacle: pinned.or_else(|| obstacle(scan, endpoint)),
    })
}

impl Forward {
    /// Whether its answer is to be a stream.
    pub(crate) fn is_stream(&self) -> bool {
        matches!(self.kind, Kind::Completion { stream: true, .. })
    }

    /// Whether the next turn is to be prefilled.
    fn prefills_next_turn(&self) -> bool {
        matches!(
            self.kind,
            Kind::Completion {
                prefill_next_turn: true,
                ..
            }
        )
    }

    /// The state of an answer that may be resumed at another worker.
    fn resume_state(&self) -> Option<Box<ResumeState>> {
        match self.kind {
            Kind::Completion {
                terms: Some(ResumeTerms { obstacle: None, .. }),
                ..
            } => Some(Box::default()),
            _ => None,
        }
    }

    /// How the answer with this head is to be read.
    fn form(&self, head: &Head, extras: impl FnOnce() -> Option<Extras>) -> Form {
        let Kind::Completion { stream, hide, .. } = self.kind else {
            // What is not told as it comes about can be kept back until it is whole, and had from another if it breaks off.
            return match headers::is_sized(&head.headers) {
                true => Form::Whole(None),
                false => Form::Opaque,
            };
        };
        let success = head.status.is_success();
        let extras = success.then(extras).flatten();
        if !headers::is_event_stream(&head.headers) {
            return Form::Whole(extras.map(Box::new));
        }
        if !stream || !head.status.is_success() {
            return Form::Opaque;
        }
        Form::Events {
            hide,
            extras: extras.map(Box::new),
            until_close: headers::is_until_close(&head.headers),
        }
    }

    /// The reply that passes an answer on. Its worker has no booking if other workers were tried since.
    pub(crate) fn reply(
        self: Arc<Self>,
        answer: EngineAnswer,
        (target, booking): (WorkerRank, Option<Booking>),
        record: RequestRecord,
        (arrival, attempts): (Arrival, Attempts),
    ) -> Reply {
        let EngineAnswer {
            dispatched,
            prefill,
            bypassed,
            head,
            source,
            first,
        } = answer;
        let completion = matches!(self.kind, Kind::Completion { .. });
        let began = self.app.clock().now();
        if let Some(booking) = booking
            .as_ref()
            .filter(|_| completion && head.status.is_success())
        {
            let waited = (began - dispatched, source.is_events());
            let (tokens, block) = (arrival.isl_tokens as usize, self.model.block_size);
            if source.is_events() && prefill.is_none() {
                let uncached = arrival
                    .isl_tokens
                    .saturating_sub(booking.placement().cached_tokens);
                let times = self.model.host.prefill_times();
                times.learn(target, uncached, waited.0);
            }
            let meters = &self.model.placements;
            meters.begun(booking.placement(), tokens, block, waited);
        }
        let mut headers = headers::to_client(head.headers);
        if source.is_edited() {
            headers.remove(header::CONTENT_LENGTH);
        }
        let cause = match head.status.is_success() {
            true => FailureCause::EngineFailed,
            false => cause_of_status(head.status),
        };
        let start = AnswerStart {
            failure: attempts.outcome(cause),
            dispatched,
            first: began,
            status: head.status,
            block_size: completion.then_some(self.model.block_size),
            is_stream: completion && source.is_events(),
            is_transferred: prefill.is_some(),
            target,
        };
        let accounting = Accounting::begin(booking, record, self.app.clock(), &start);
        let forward = self;
        let next = forward.prefills_next_turn().then(|| NextTurn {
            forward: Arc::clone(&forward),
            target,
        });
        let body = match first {
            FirstBytes::Whole(bytes) => {
                accounting.close(&source);
                let said = next.as_ref().and_then(|_| answer_text(&bytes));
                if let (Some(next), Some(said)) = (next, said) {
                    next.prefill(&said);
                }
                ReplyBody::from(bytes)
            }
            FirstBytes::Partial(held) => {
                let held = match source.is_events() {
                    true => forward.noted(held, bypassed),
                    false => held,
                };
                let limits = &forward.app.options().limits;
                let timeouts = Timeouts {
                    comment: limits.keep_alive,
                    silence: limits.stream_silence,
                };
                let resume = forward.resume(&source, (arrival, attempts));
                let mut relay = Relay::new(source, held, accounting, timeouts, resume);
                relay.then(next);
                ReplyBody::stream(Box::new(relay))
            }
        };
        let mut reply = Response::new(body);
        *reply.status_mut() = head.status;
        *reply.headers_mut() = headers;
        reply
    }

    /// The beginning of a stream, after the annotations that the client asked for.
    fn noted(&self, held: Bytes, bypassed: bool) -> Bytes {
        let tells_bypass = bypassed && self.tells_bypass;
        if self.notes.is_empty() && !tells_bypass {
            return held;
        }
        let mut out = BytesMut::from(&self.notes[..]);
        if tells_bypass {
            write_annotation(&mut out, bypass::ANNOTATION, "true");
        }
        out.extend_from_slice(&held);
        out.freeze()
    }

    fn resume(
        self: Arc<Self>,
        source: &Source,
        attempts: (Arrival, Attempts),
    ) -> Option<Box<Resume>> {
        match self.kind {
            Kind::Completion {
                terms: Some(terms), ..
            } if source.is_events() => Some(Box::new(Resume::new(self, terms, attempts))),
            _ => None,
        }
    }

    /// The extra fields that the client asked for.
    fn extra_fields(&self) -> ExtraFields {
        match self.kind {
            Kind::Completion { extra_fields, .. } => extra_fields,
            Kind::Opaque { .. } => ExtraFields::default(),
        }
    }

    /// That, as far as it is known when a worker is asked; `tokens` is the length of the prompt.
    fn extras(
        &self,
        sent: &Placement,
        tokens: u32,
        dispatched: Time,
        prefill: Option<PrefillSummary>,
    ) -> Option<Extras> {
        let extra_fields = self.extra_fields();
        if extra_fields.is_nothing() {
            return None;
        }
        let clock = self.app.clock();
        let mut ids = WorkerIds::aggregated(sent.target.worker.0, sent.target.rank.0);
        if let Some(prefill) = &prefill {
            ids.prefill_worker_id = Some(prefill.target.worker.0);
            ids.prefill_dp_rank = Some(prefill.target.rank.0);
        }
        let asked = prefill.map_or(dispatched, |prefill| prefill.dispatched);
        let found = || hit_rate(sent, tokens as usize, self.model.block_size);
        let each = ResponseNvext {
            worker_id: extra_fields.extra.worker_id.then_some(ids),
            ..Default::default()
        };
        let timing = extra_fields.extra.timing.then(|| Timing {
            request_received_ms: clock.unix_millis(self.received),
            prefill_wait_time_ms: Some((asked - self.received).as_secs_f64() * 1e3),
            kv_hit_rate: Some(prefill.map_or_else(found, |prefill| prefill.hit_rate)),
            router_queue_depth: Some(extra_fields.queue_depth.into()),
            ..Timing::default()
        });
        Some(Extras {
            last: ResponseNvext {
                timing,
                ..each.clone()
            },
            each,
            extra_fields,
            received: self.received,
            dispatched: asked,
            prefilled: prefill.and_then(|prefill| prefill.ended),
            first: None,
            clock,
        })
    }
}
