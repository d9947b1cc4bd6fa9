//! Objects that one engine stores under an id: the engine that has it is searched for.
//!
//! An id does not name its engine, and it may be older than this process or come from another router. So the workers are asked one
//! after another, and the first that knows the id answers.
//!
//! What always holds: at most [`SOUGHT_MAX`] workers are asked; what nobody has is not found only if all could be
//! asked.

use std::collections::BTreeSet;
use std::sync::Arc;
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
    let mut asked = BTreeSet::new();
    let mut all = true;
    for model in app.models().all() {
        let forward = forward(app, arrived, parts, path, body, &model);
        for worker in model.links().http_workers() {
            // Adapters of one engine are models of their own.
            if asked.len() >= SOUGHT_MAX || !asked.insert(worker) {
                all &= asked.contains(&worker);
                continue;
            }
            let target = WorkerRank {
                worker,
                rank: DpRank(0),
            };
            match tokio::time::timeout(TIMEOUT, forward.open_stored(target)).await {
                Ok(Ok(answer)) if has_it(answer.head.status) => {
                    let path = path.path();
                    let headers = &parts.headers;
                    let record = RequestRecord::start_at(
                        app.observer(),
                        arrived,
                        headers,
                        Some(&model.meters),
                        path,
                        false,
                    );
                    let attempts = (Arrival::new(arrived.id, 1), Attempts::default());
                    return Ok(Arc::new(forward).reply(answer, (target, None), record, attempts));
                }
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => all = false,
            }
        }
    }
    if asked.len() >= SOUGHT_MAX && !all {
        app.http().limit_reached("workers_asked");
    }
    let error = match all {
        true => ApiError::new(404, NOT_FOUND),
        false => ApiError::new(503, NOT_ALL_ASKED),
    };
    Err(unplaced(app, arrived, parts, path, error))
}

/// Whether this is the answer of one that has it: others do not know the id, or not even the route.
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
    }
}

impl Forward {
    /// Asks one worker, and waits for the beginning of its answer.
    async fn open_stored(&self, target: WorkerRank) -> Result<EngineAnswer, UpstreamError> {
        let dispatched = self.app.clock().now();
        let (head, body) = self.send(target, &self.body).await?.into_parts();
        let mut source = Source::new(body, Form::Opaque, None);
        Ok(EngineAnswer {
            dispatched,
            first: source.first_bytes().await?,
            head,
            source,
        })
    }
}
