//! A body with several prompts or answers where one engine computes prompts for another.
//!
//! Answers one question: how do requests for one answer each become the answer to all? An engine says where the first prompt of a body is and
//! fetches one prompt for all answers, so each answer goes its own way over two engines.
//!
//! What always holds: an answer is whole or it failed: when a part fails, the others are given up, their bookings end and their prompts are freed; the
//! client's request is counted once.

mod stream;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http_body::Body as _;
use kvasir_openai::{
    ApiError, BodyPart, Nvext, PartAnswer, Scan, answers_wanted, find_usage, has_plain_answers,
    join_answers, split_body,
};

use super::headers::is_event_stream;
use super::{PreparedRequest, prepare_one, two_step};
use crate::App;
use crate::http::reply::{Reply, ReplyBody};
use crate::models::ServedModel;
use crate::observe::request_record::{PartRoute, RequestRecord, Totals};
use crate::request::client_request::ClientRequest;
use stream::BatchStream;

/// Answers of one body that go their own ways; a body that asks for more goes to one engine.
const PARTS_MAX: usize = 128;
/// Longest answer to a part that is not streamed.
const PART_BYTES_MAX: usize = 64 << 20;

/// A request whose answers are asked for one by one.
pub(super) struct Batch {
    parts: Vec<Part>,
    /// The client's stream is to end with a usage.
    wants_usage: bool,
}

/// One answer.
struct Part {
    ready: Box<PreparedRequest>,
    choice: u32,
    /// Where the first answer to its prompt goes, if this is another: its prompt is cached then.
    leader: Option<PartRoute>,
}

/// The answer to a part, as far as it has come.
struct PartReply {
    reply: Reply,
    choice: u32,
    follows: bool,
}

/// Why there is none.
enum PartFailure {
    /// So the client is told.
    Error(ApiError),
    /// The engine's own words.
    Refused(Box<Reply>),
}

/// The parts of a body that two engines each are to compute; none if one is to compute all of it.
pub(super) fn split(
    app: &App,
    model: &ServedModel,
    asked: &ClientRequest,
    scan: &Scan<'_>,
) -> Option<Vec<BodyPart>> {
    if answers_wanted(scan, asked.endpoint) < 2 {
        return None;
    }
    let pool = two_step::active_pool(app, model)?;
    if !two_step::meets(model, Some(&pool)) && !has_plain_answers(scan) {
        return None;
    }
    if app.options().nvext_enabled {
        let nvext = Nvext::of_scan(scan).ok()?;
        if nvext.query_only() || nvext.token_data.is_some() {
            return None;
        }
    }
    split_body(scan, &asked.body, asked.endpoint, PARTS_MAX)
}

/// Reads what routing needs to know of each part.
pub(super) async fn prepare(
    app: &Arc<App>,
    asked: ClientRequest,
    model: &Arc<ServedModel>,
    record: RequestRecord,
    (parts, wants_usage): (Vec<BodyPart>, bool),
) -> Result<Box<PreparedRequest>, ApiError> {
    let mut prepared: Vec<Part> = Vec::with_capacity(parts.len());
    let (mut leader, mut first_route) = (PartRoute::default(), None);
    for part in parts {
        let route = PartRoute::default();
        let body = app.http().bodies.hold(part.body);
        let own = ClientRequest {
            arrived: asked.arrived.part(app.observer(), part.choice),
            body: body.clone(),
            ..asked.clone()
        };
        let ready = match Scan::parse(&body) {
            Ok(scan) => prepare_one(app, own, &scan, model, record.part(&route)).await,
            Err(_) => Err(ApiError::internal()),
        };
        let ready = match ready {
            Ok(ready) => ready,
            Err(error) => return Err(record.fail(error)),
        };
        if !part.follows {
            leader = route.clone();
        }
        first_route.get_or_insert(route);
        prepared.push(Part {
            ready,
            choice: part.choice,
            leader: part.follows.then(|| leader.clone()),
        });
    }
    let (Some(first), Some(route)) = (prepared.first(), first_route) else {
        return Err(record.fail(ApiError::internal()));
    };
    Ok(Box::new(PreparedRequest {
        forward: Arc::clone(&first.ready.forward),
        arrival: first.ready.arrival.clone(),
        blocks: first.ready.blocks.clone(),
        record,
        query: None,
        prefill: None,
        batch: Some((
            Box::new(Batch {
                parts: prepared,
                wants_usage,
            }),
            route,
        )),
    }))
}

/// Has all parts answered, and puts the answers together.
pub(super) async fn run(
    ready: Box<PreparedRequest>,
    batch: Batch,
    first_route: PartRoute,
) -> Result<Reply, ApiError> {
    let PreparedRequest {
        forward,
        mut record,
        ..
    } = *ready;
    let is_stream = forward.is_stream();
    let parts = batch.parts.into_iter();
    let parts = parts.map(|part| Some(Box::pin(part.run(is_stream)) as PartFuture));
    let replies = all(parts.collect()).await;
    record.placed_as(&first_route);
    let replies = match replies {
        Ok(replies) => replies,
        Err(PartFailure::Error(error)) => return Err(record.fail(error)),
        Err(PartFailure::Refused(reply)) => {
            record.refused(reply.status().as_u16());
            return Ok(*reply);
        }
    };
    if is_stream {
        record.first_token(forward.app.clock().now());
        return BatchStream::reply(forward, replies, batch.wants_usage, record);
    }
    match joined(replies).await {
        Ok((reply, totals)) => {
            record.succeed(&totals);
            Ok(reply)
        }
        Err(error) => Err(record.fail(error)),
    }
}

type PartFuture = Pin<Box<dyn Future<Output = Result<PartReply, PartFailure>> + Send>>;

/// Waits for all of them; the first that fails ends the others.
async fn all(mut parts: Vec<Option<PartFuture>>) -> Result<Vec<PartReply>, PartFailure> {
    let mut replies: Vec<Option<PartReply>> = parts.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut waits = false;
        for (part, reply) in parts.iter_mut().zip(&mut replies) {
            let Some(future) = part else {
                continue;
            };
            match future.as_mut().poll(cx) {
                Poll::Pending => waits = true,
                Poll::Ready(Ok(found)) => (*reply, *part) = (Some(found), None),
                Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
            }
        }
        match waits {
            true => Poll::Pending,
            false => Poll::Ready(Ok(())),
        }
    })
    .await?;
    Ok(replies.into_iter().flatten().collect())
}

impl Part {
    /// Has it answered: all of it, or the beginning of a stream.
    async fn run(self, is_stream: bool) -> Result<PartReply, PartFailure> {
        let follows = self.leader.is_some();
        if let Some(leader) = self.leader {
            leader.placed().await;
        }
        let reply = self.ready.run_one().await.map_err(PartFailure::Error)?;
        // What is no stream though one was asked for goes to the client as it is.
        let is_other = is_stream && !is_event_stream(reply.headers());
        if !reply.status().is_success() || is_other {
            return Err(PartFailure::Refused(Box::new(reply)));
        }
        let (head, body) = reply.into_parts();
        let body = match is_stream {
            true => body,
            false => ReplyBody::from(collect(body).await.map_err(PartFailure::Error)?),
        };
        Ok(PartReply {
            reply: Reply::from_parts(head, body),
            choice: self.choice,
            follows,
        })
    }
}

async fn collect(mut body: ReplyBody) -> Result<Bytes, ApiError> {
    let (mut single, mut joined) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(|_| ApiError::unavailable())?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        match single.is_empty() && joined.is_empty() {
            true => single = data,
            false => {
                joined.extend_from_slice(&std::mem::take(&mut single));
                joined.extend_from_slice(&data);
            }
        }
        if joined.len() > PART_BYTES_MAX {
            return Err(ApiError::unavailable());
        }
    }
    Ok(match single.is_empty() {
        true => joined.freeze(),
        false => single,
    })
}

/// The answers of all parts as one.
async fn joined(replies: Vec<PartReply>) -> Result<(Reply, Totals), ApiError> {
    let (mut head, mut answers) = (None, Vec::with_capacity(replies.len()));
    for part in replies {
        let (own, body) = part.reply.into_parts();
        head.get_or_insert(own);
        answers.push(PartAnswer {
            json: collect(body).await?,
            choice: part.choice,
            follows: part.follows,
        });
    }
    let answer = join_answers(&answers).ok_or_else(ApiError::internal)?;
    let mut head = head.ok_or_else(ApiError::internal)?;
    head.headers.remove(CONTENT_LENGTH);
    let usage = find_usage(&answer).map(|found| found.usage);
    let totals = totals(head.status.as_u16(), usage.unwrap_or_default());
    Ok((Reply::from_parts(head, ReplyBody::from(answer)), totals))
}

/// What all parts amount to; where they were answered the request's record knows.
fn totals(status: u16, usage: kvasir_openai::Usage) -> Totals {
    let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
    Totals {
        status,
        prompt_tokens: count(usage.prompt_tokens),
        cached_tokens: usage.cached_tokens.map(count),
        output_tokens: count(usage.completion_tokens),
        ..Totals::default()
    }
}
