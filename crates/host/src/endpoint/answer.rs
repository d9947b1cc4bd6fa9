//! A request on its way to a worker of an endpoint, and the answer on its way back.

use std::sync::Arc;
use std::time::Duration;

use kvasir_msgpack::Value;
use kvasir_protocol::{
    Annotated, Finish, GenerateRequest, Output, Payload, RoutingHints, WorkerError, WorkerErrorKind,
};
use kvasir_router::{Arrival, AttemptLimits, Attempts, NextStep, Outcome, RouteError};
use kvasir_transport::{CallContext, CallStream, PlaneError};
use kvasir_types::{AttemptError, Fault, Time, WorkerRank};

use super::EndpointFleet;
use crate::booking::Booking;
use crate::place::PromptBlocks;
use crate::view::UsageReport;

/// A prompt on its way: what is asked of the router, and what its worker is sent.
#[derive(Debug)]
pub struct EndpointJob {
    /// What the router decides about.
    pub arrival: Box<Arrival>,
    /// What it is looked up by.
    pub blocks: PromptBlocks,
    /// What the worker gets; the chosen rank is written into it.
    pub request: GenerateRequest,
    /// What the caller's headers say to the worker, by name.
    pub metadata: Vec<(Arc<str>, Arc<str>)>,
    /// How often another worker is asked if one does not begin to answer.
    pub retries: u32,
}

/// Why a request has no answer, or no more of one.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// No worker.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The way to the worker, or back.
    #[error(transparent)]
    Plane(#[from] PlaneError),
    /// The worker says so.
    #[error("{}", .0.message)]
    Worker(WorkerError),
}

impl EndpointError {
    /// As a worker would say it to whoever asked.
    #[must_use]
    pub fn to_worker_error(&self) -> WorkerError {
        let kind = match self {
            Self::Worker(error) => return error.clone(),
            Self::Route(error) if error.fault() == Fault::Client => {
                WorkerErrorKind::InvalidArgument
            }
            Self::Route(error) if error.is_overload() => WorkerErrorKind::Overloaded,
            Self::Route(_) => WorkerErrorKind::Unavailable,
            Self::Plane(error) => match error {
                PlaneError::Rejected(_) => WorkerErrorKind::InvalidArgument,
                PlaneError::Overloaded(_) => WorkerErrorKind::Overloaded,
                PlaneError::Timeout { .. } => WorkerErrorKind::Timeout,
                PlaneError::Gone(_)
                | PlaneError::Connect { .. }
                | PlaneError::Refused { .. }
                | PlaneError::Disconnected(_) => WorkerErrorKind::Unavailable,
                _ => WorkerErrorKind::Unknown,
            },
        };
        let message = self.to_string();
        WorkerError {
            kind,
            public: (kind == WorkerErrorKind::InvalidArgument).then(|| message.clone()),
            message,
        }
    }
}

impl EndpointFleet {
    /// Finds a worker that begins to answer.
    pub async fn send(
        self: &Arc<Self>,
        job: &mut EndpointJob,
    ) -> Result<EndpointAnswer, EndpointError> {
        let limits = AttemptLimits {
            retries: job.retries,
            resumes: 0,
        };
        let mut attempts = Attempts::new(limits, true);
        let received = self.now();
        let queue_depth = self.model.host.ask(|router| router.queued().0);
        loop {
            let mut arrival = job.arrival.clone();
            attempts.describe(&mut arrival);
            let booking = self.model.book(arrival, &job.blocks).await?;
            let target = booking.target();
            let dispatched = self.now();
            self.model.placements.dispatched();
            let error = match self.call(job, target).await {
                Ok(call) => {
                    return Ok(EndpointAnswer {
                        fleet: Arc::clone(self),
                        booking: Some(booking),
                        call,
                        prompt_tokens: job.request.token_ids.len(),
                        received,
                        dispatched,
                        queue_depth,
                        seen: Seen::default(),
                    });
                }
                Err(error) => error,
            };
            let (outcome, next) = attempts.fail(target.worker, error.failure_cause());
            tracing::warn!(request = %job.arrival.id, worker = %target, %error, attempt = attempts.failures(), "attempt failed");
            booking.finish(outcome);
            if next != NextStep::TryNext || job.arrival.pin.worker.is_some() {
                return Err(error.into());
            }
        }
    }

    fn now(&self) -> Time {
        self.model.host.context().clock.now()
    }

    async fn call(
        &self,
        job: &mut EndpointJob,
        target: WorkerRank,
    ) -> Result<CallStream, PlaneError> {
        let worker = target.worker;
        let endpoint = self.address(worker).ok_or(PlaneError::Gone(worker))?;
        let client = self.clients.get(&*endpoint.plane);
        let client = client.ok_or_else(|| PlaneError::Connect {
            worker,
            why: format!("no request plane is called {}", endpoint.plane),
        })?;
        // The worker is told which of its ranks is meant.
        let routing = job
            .request
            .routing
            .get_or_insert_with(RoutingHints::default);
        routing.dp_rank = Some(target.rank.0);
        let payload = job.request.encode(endpoint.codec);
        let context = CallContext {
            metadata: job.metadata.clone(),
            ..CallContext::new(worker, job.arrival.id)
        };
        client.call(&endpoint, payload, context).await
    }
}

/// What was seen of an answer.
#[derive(Debug, Default)]
struct Seen {
    generated: u32,
    cached: Option<u32>,
    first_token: Option<Time>,
    last_token: Time,
    /// Share of the prompt's blocks that the worker was expected to hold.
    hit_rate: f64,
    /// It was said who answers.
    is_named: bool,
}

/// The answer of a worker, item by item. Dropped, it ends the worker's work and the booking.
#[derive(Debug)]
pub struct EndpointAnswer {
    fleet: Arc<EndpointFleet>,
    /// None after the end.
    booking: Option<Booking>,
    call: CallStream,
    prompt_tokens: usize,
    received: Time,
    dispatched: Time,
    /// Requests that waited when it came.
    queue_depth: usize,
    seen: Seen,
}

impl EndpointAnswer {
    /// The next item as the worker sent it; the first one also says who answers, the last one how long that took. None at the end, an
    /// error at most once.
    pub async fn next(&mut self) -> Option<Result<Payload, EndpointError>> {
        self.booking.as_ref()?;
        let payload = match self.call.next().await {
            Some(Ok(payload)) => payload,
            Some(Err(error)) => return Some(Err(self.failed(error))),
            None => {
                self.complete();
                return None;
            }
        };
        let item = match Annotated::decode(&payload) {
            Ok(item) => item,
            Err(error) => {
                let worker = self.target()?.worker;
                let why = error.to_string();
                return Some(Err(self.failed(PlaneError::Protocol { worker, why })));
            }
        };
        if let Some(error) = item.error {
            self.end(match error.kind {
                WorkerErrorKind::Overloaded => Outcome::Overloaded,
                WorkerErrorKind::Unavailable => Outcome::Unreachable,
                _ => Outcome::Failed,
            });
            return Some(Err(EndpointError::Worker(error)));
        }
        let Some(output) = item.data else {
            return Some(Ok(payload));
        };
        let target = self.target();
        self.note(&output);
        let mut told = Vec::new();
        if !std::mem::replace(&mut self.seen.is_named, true) {
            told.extend(target.map(|target| ("worker_id".to_owned(), worker_id(target))));
        }
        if output.finish_reason.is_some() {
            told.push(("timing".to_owned(), self.timing()));
        }
        Some(Ok(match told.is_empty() {
            true => payload,
            false => with_routing_data(payload, told),
        }))
    }

    /// Where the answer comes from; none after its end.
    #[must_use]
    pub fn target(&self) -> Option<WorkerRank> {
        self.booking.as_ref().map(Booking::target)
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(booking) = self.booking.take() {
            booking.finish(outcome);
        }
    }

    fn failed(&mut self, error: PlaneError) -> EndpointError {
        self.end(Outcome::of_failure(error.failure_cause()));
        error.into()
    }

    /// Tokens came.
    fn note(&mut self, output: &Output) {
        let Some(booking) = &self.booking else {
            return;
        };
        let (model, now) = (&self.fleet.model, self.fleet.now());
        if let Some(cached) = output.usage.and_then(|usage| usage.cached_tokens) {
            self.seen.cached = Some(cached);
        }
        let tokens = u32::try_from(output.token_ids.len()).unwrap_or(u32::MAX);
        if tokens > 0 {
            match self.seen.first_token {
                None => {
                    booking.first_token();
                    self.seen.first_token = Some(now);
                    let waited = (now - self.dispatched, true);
                    let (prompt, block) = (self.prompt_tokens, model.block_size);
                    let placement = booking.placement();
                    let share = model.placements.begun(placement, prompt, block, waited);
                    self.seen.hit_rate = share;
                }
                Some(_) => {
                    let gap = (now - self.seen.last_token).as_secs_f64();
                    model.placements.between_tokens(gap / f64::from(tokens));
                }
            }
            self.seen.last_token = now;
            self.seen.generated = self.seen.generated.saturating_add(tokens);
            booking.tokens(self.seen.generated);
        }
        if matches!(output.finish_reason, Some(Finish::Error(_))) {
            self.end(Outcome::Failed);
        }
    }

    /// The worker said all.
    fn complete(&mut self) {
        let Some(mut booking) = self.booking.take() else {
            return;
        };
        let prompt = u32::try_from(self.prompt_tokens).unwrap_or(u32::MAX);
        let (output, cached) = (self.seen.generated, self.seen.cached);
        booking.reported(UsageReport {
            prompt,
            cached,
            output,
        });
        let placements = &self.fleet.model.placements;
        placements.answered(prompt, output, cached);
        let latencies = self.seen.first_token.map(|first| {
            let gaps = f64::from(output.saturating_sub(1).max(1));
            let first_after: Duration = first - self.dispatched;
            let rest: Duration = self.seen.last_token - first;
            (first_after.as_secs_f64(), rest.as_secs_f64() / gaps)
        });
        placements.ended(booking.target(), prompt, latencies);
        booking.finish(Outcome::Completed {
            output_tokens: output,
        });
    }

    /// How long the answer took, as Dynamo's router says it.
    fn timing(&self) -> Value {
        let clock = self.fleet.model.host.context().clock;
        let ms = |span: Duration| Value::Float(span.as_secs_f64() * 1000.0);
        let first = self.seen.first_token.unwrap_or(self.dispatched);
        let received = clock.unix_nanos(self.received) / 1_000_000;
        let depth = u64::try_from(self.queue_depth).unwrap_or(u64::MAX);
        let members = [
            ("request_received_ms", Value::Uint(received)),
            ("prefill_wait_time_ms", ms(self.dispatched - self.received)),
            ("prefill_time_ms", ms(first - self.dispatched)),
            ("ttft_ms", ms(first - self.received)),
            ("total_time_ms", ms(self.fleet.now() - self.received)),
            ("kv_hit_rate", Value::Float(self.seen.hit_rate)),
            ("router_queue_depth", Value::Uint(depth)),
        ];
        Value::Map(members.map(|(name, value)| (name.to_owned(), value)).into())
    }
}

/// Who answers: a worker that computes prompts and generates.
fn worker_id(target: WorkerRank) -> Value {
    let (worker, rank) = (target.worker.0, target.rank.0.into());
    let members = [
        ("prefill_worker_id", worker),
        ("prefill_dp_rank", rank),
        ("decode_worker_id", worker),
        ("decode_dp_rank", rank),
    ];
    let members = members.map(|(name, value)| (name.to_owned(), Value::Uint(value)));
    Value::Map(members.into())
}

/// The same item with `routing_data` in its data; as it was if it has none.
fn with_routing_data(payload: Payload, told: Vec<(String, Value)>) -> Payload {
    let Ok(Value::Map(mut members)) = payload.value() else {
        return payload;
    };
    let data = members.iter_mut().find(|(name, _)| name == "data");
    let Some((_, Value::Map(data))) = data else {
        return payload;
    };
    data.retain(|(name, _)| name != "routing_data");
    data.push(("routing_data".into(), Value::Map(told)));
    Payload::of_value(payload.codec, &Value::Map(members))
}
