//! Objects that one engine stores under an id: the engine that has it is searched for.
//!
//! An id does not name its engine, and it may be older than this process or come from another router. So all workers are asked at
//! once, and the first that has it answers. That holds for changes, too: to remove or to cancel what one does not have changes nothing, and
//! doing it twice is doing it once.
//!
//! What always holds: at most [`SOUGHT_MAX`] workers are asked, and the search ends in time; an error of one worker is the
//! answer only if no other has it; what nobody has is not found only if all could be asked.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::ApiError;
use kvasir_router::{Arrival, Attempts};
use kvasir_types::{DpRank, WorkerRank};
use kvasir_upstream::UpstreamError;

use super::pass::{read, unplaced};
use super::{EngineAnswer, Forward, Kind, headers};
use crate::App;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;
use crate::observe::outcomes::RequestIdentity;
use crate::observe::request_record::RequestRecord;
use crate::proxy::relay::{Form, Source};

/// Most workers that are asked for one thing.
const SOUGHT_MAX: usize = 64;
/// A worker has this long to say whether it has it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// All of them together have this long.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

/// What is said when it may be with a worker that could not be asked.
const NOT_ALL_ASKED: &str =
    "No worker that could be asked has it, and not all could be: try again later";
const NOT_FOUND: &str = "No worker has it";

/// Answers a request for something that one engine keeps at `path`.
pub(crate) async fn seek(app: &Arc<App>, request: Request<Incoming>, path: &str) -> Reply {
    let ticket = app.in_flight().enter();
    let (mut parts, incoming) = request.into_parts();
    let arrived = RequestIdentity::now(app.observer(), &mut parts.headers);
    let outcome = match engine_path(path, &parts) {
        Some(path) => match read(app, &parts, incoming).await {
            Ok(body) => seek_all(app, &arrived, &parts, &path, &body).await,
            Err(error) => Err(unplaced(app, &arrived, &parts, &path, error)),
        },
        None => Err(ApiError::route_not_found(
            parts.method.as_str(),
            parts.uri.path(),
        )),
    };
    let mut reply = outcome.unwrap_or_else(|error| reply::error(&error));
    arrived.tell(&mut reply);
    reply.body_mut().hold(ticket);
    reply
}

/// The engine's path with the client's query; none if an id has what no id has.
fn engine_path(path: &str, parts: &Parts) -> Option<PathAndQuery> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.:".contains(&byte);
    if !path.bytes().all(plain) || path.split('/').any(|part| part.starts_with('.')) {
        return None;
    }
    match parts.uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")).ok(),
        None => PathAndQuery::try_from(path).ok(),
    }
}

async fn seek_all(
    app: &Arc<App>,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    body: &Bytes,
) -> Result<Reply, ApiError> {
    let (sought, complete) = sought(app, arrived, parts, path, body);
    if !complete {
        app.http().limit_reached("workers_asked");
    }
    let mut search = Search {
        all: complete,
        found: None,
    };
    let searching = search.run(sought);
    if tokio::time::timeout(SEARCH_TIMEOUT, searching)
        .await
        .is_err()
    {
        search.all = false;
    }
    let Some((forward, target, answer)) = search.found else {
        let error = match search.all {
            true => ApiError::new(404, NOT_FOUND),
            false => ApiError::new(503, NOT_ALL_ASKED),
        };
        return Err(unplaced(app, arrived, parts, path, error));
    };
    let record = RequestRecord::start_at(
        app.observer(),
        arrived,
        &parts.headers,
        Some(&forward.model.meters),
        path.path(),
        false,
    );
    let attempts = (Arrival::new(arrived.id, 1), Attempts::default());
    Ok(forward.reply(answer, (target, None), record, attempts))
}

/// Whom to ask, and whether that is everybody.
fn sought(
    app: &Arc<App>,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    body: &Bytes,
) -> (Vec<(Arc<Forward>, WorkerRank)>, bool) {
    let (mut asked, mut sought) = (BTreeSet::new(), Vec::new());
    for model in app.models().all() {
        let forward = Arc::new(forward(app, arrived, parts, path, body, &model));
        for worker in model.links().http_workers() {
            // Adapters of one engine are models of their own.
            if !asked.insert(worker) {
                continue;
            }
            if sought.len() >= SOUGHT_MAX {
                return (sought, false);
            }
            let rank = DpRank(0);
            sought.push((Arc::clone(&forward), WorkerRank { worker, rank }));
        }
    }
    (sought, true)
}

/// An answer, and whose.
type Found = (Arc<Forward>, WorkerRank, EngineAnswer);

/// How far a search has come.
struct Search {
    /// All could be asked until now.
    all: bool,
    /// The answer of one that has it; until then, that of one that may.
    found: Option<Found>,
}

impl Search {
    /// Asks all of them until one has it. Whoever has not answered by then is not waited for.
    async fn run(&mut self, sought: Vec<(Arc<Forward>, WorkerRank)>) {
        let ask = |(forward, target)| Box::pin(ask(forward, target)) as _;
        let mut asked: Vec<Pin<Box<dyn Future<Output = Asked> + Send>>> =
            sought.into_iter().map(ask).collect();
        while !asked.is_empty() {
            let told = poll_fn(|cx| {
                let ready = |one: &mut Pin<Box<dyn Future<Output = Asked> + Send>>| match one
                    .as_mut()
                    .poll(cx)
                {
                    Poll::Ready(told) => Some(told),
                    Poll::Pending => None,
                };
                let first = asked.iter_mut().map(ready).enumerate();
                let mut first = first.filter_map(|(at, told)| Some((at, told?)));
                first.next().map_or(Poll::Pending, Poll::Ready)
            });
            let (at, told) = told.await;
            drop(asked.swap_remove(at));
            match told {
                Asked::Answered(found) if is_success(found.2.head.status) => {
                    self.found = Some(*found);
                    return;
                }
                Asked::Answered(found) if has_it(found.2.head.status) => {
                    self.found.get_or_insert(*found);
                }
                Asked::Answered(_) => {}
                Asked::Silent => self.all = false,
            }
        }
    }
}

/// What a worker said.
enum Asked {
    Answered(Box<Found>),
    /// It could not be asked, or not in time.
    Silent,
}

async fn ask(forward: Arc<Forward>, target: WorkerRank) -> Asked {
    match tokio::time::timeout(TIMEOUT, forward.open_stored(target)).await {
        Ok(Ok(answer)) => Asked::Answered(Box::new((forward, target, answer))),
        Ok(Err(_)) | Err(_) => Asked::Silent,
    }
}

/// Whether this is surely the answer of one that has it.
fn is_success(status: StatusCode) -> bool {
    status.is_success() || status.is_redirection()
}

/// Whether this may be the answer of one that has it: others do not know the id, or not even the route.
fn has_it(status: StatusCode) -> bool {
    !matches!(
        status,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
    )
}

fn forward(
    app: &Arc<App>,
    arrived: &RequestIdentity,
    parts: &Parts,
    path: &PathAndQuery,
    body: &Bytes,
    model: &Arc<ServedModel>,
) -> Forward {
    Forward {
        app: Arc::clone(app),
        method: parts.method.clone(),
        path: path.clone(),
        headers: headers::to_engine(parts.headers.clone(), app.via(), &arrived.name),
        body: body.clone(),
        urgency: None,
        kind: Kind::Opaque { idempotent: true },
        received: arrived.at,
        model: Arc::clone(model),
        notes: Bytes::new(),
        tells_bypass: false,
    }
}

impl Forward {
    /// Asks one worker, and waits for the beginning of its answer.
    async fn open_stored(&self, target: WorkerRank) -> Result<EngineAnswer, UpstreamError> {
        let dispatched = self.app.clock().now();
        let (head, body) = self.send(target, &self.body).await?.into_parts();
        let is_text = headers::is_text(&head.headers);
        let form = match is_text {
            true => self.form(&head, || None),
            // A file, of any length.
            false => Form::Opaque,
        };
        let mut source = Source::new(body, form, None);
        source.filter_text(is_text);
        Ok(EngineAnswer {
            dispatched,
            prefill: None,
            bypassed: false,
            first: source.first_bytes().await?,
            head,
            source,
        })
    }
}
