//! Requests of the request plane, as a mock engine takes them.

use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_transport::{PlaneError, TokenSink, TokenStream, token_stream};
use kvasir_types::{TokenItem, TokenRequest};
use kvasir_worker::{ClearFuture, TokenEngine};

use super::part::{self, Part};
use crate::{Faults, HttpFaultKind, Worker};

/// A mock engine behind the request plane.
pub struct PlaneEngine {
    worker: Worker,
    faults: Arc<Faults>,
    tasks: Tasks,
    requests_max: Option<usize>,
    part: Part,
}

impl PlaneEngine {
    /// Requests go to `worker`, unless one of `faults` strikes them.
    #[must_use]
    pub fn new(worker: Worker, faults: Arc<Faults>, tasks: &Tasks) -> Self {
        Self {
            worker,
            faults,
            tasks: tasks.clone(),
            requests_max: None,
            part: Part::Whole,
        }
    }

    /// The same, taking so many requests at once.
    #[must_use]
    pub fn with_requests_max(self, requests_max: Option<usize>) -> Self {
        Self {
            requests_max,
            ..self
        }
    }

    /// The same, computing this part of requests.
    #[must_use]
    pub fn computing(self, part: Part) -> Self {
        Self { part, ..self }
    }

    /// Takes a request for the part of it that is computed here.
    fn take(&self, request: TokenRequest, sink: TokenSink) {
        match &self.part {
            Part::Whole => self.worker.submit(&request, sink),
            Part::Prefill(part) => {
                let (inner, stream) = token_stream(self.worker.id());
                self.worker.submit(&request, inner);
                let prefill = part::prefill(part.clone(), request, stream, sink);
                self.tasks.spawn(prefill);
            }
            Part::Decode if !part::is_transferred(&request) => {
                self.worker.submit(&request, sink);
            }
            Part::Decode => match request.context.bootstrap.clone() {
                Some(room) => {
                    let worker = self.worker.clone();
                    let answer = part::answer_after_meeting(worker, room, request, sink);
                    self.tasks.spawn(answer);
                }
                None => self.worker.submit_transferred(&request, sink),
            },
        }
    }

    /// Answers as the worker does, but each item `pause` later, and with `tokens` tokens at most: then the connection breaks.
    fn bend(&self, request: TokenRequest, sink: TokenSink, pause: Duration, tokens: Option<u32>) {
        let (inner, stream) = token_stream(self.worker.id());
        self.take(request, inner);
        self.tasks.spawn(relay(stream, sink, pause, tokens));
    }
}

impl TokenEngine for PlaneEngine {
    fn submit(&self, request: TokenRequest, sink: TokenSink) {
        let id = self.worker.id();
        match self.faults.strike_with(|kind| kind != HttpFaultKind::Stall) {
            None => self.take(request, sink),
            Some(HttpFaultKind::Refuse | HttpFaultKind::Stall) => drop(sink),
            Some(HttpFaultKind::Slow(pause)) => self.bend(request, sink, pause, None),
            Some(HttpFaultKind::Die(tokens) | HttpFaultKind::Cut(tokens)) => {
                self.bend(request, sink, Duration::ZERO, Some(tokens));
            }
            Some(HttpFaultKind::Status(status)) => sink.fail(match status.as_u16() {
                429 | 503 | 529 => PlaneError::Overloaded(id),
                code if status.is_client_error() => {
                    PlaneError::Rejected(format!("status {code}, as this mock engine was told"))
                }
                code => PlaneError::Engine(format!("status {code}, as this mock engine was told")),
            }),
        }
    }

    fn requests_max(&self) -> Option<usize> {
        self.requests_max
    }

    fn clear_cache(&self) -> ClearFuture<'_> {
        Box::pin(self.worker.clear_cache())
    }

    /// A stalled request is taken, and whoever sent it is never called.
    fn is_silent(&self) -> bool {
        let stalls = |kind| kind == HttpFaultKind::Stall;
        self.faults.strike_with(stalls).is_some()
    }
}

/// Hands items on, late, until so many tokens were said; what is dropped then is a connection that breaks.
async fn relay(
    mut stream: TokenStream,
    sink: TokenSink,
    pause: Duration,
    mut tokens_left: Option<u32>,
) {
    loop {
        let item = tokio::select! {
            item = stream.next() => item,
            () = sink.closed() => return,
        };
        let mut item = match item {
            Some(Ok(item)) => item,
            Some(Err(error)) => return sink.fail(error),
            None => return,
        };
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        if let Some(left) = &mut tokens_left {
            item.tokens.truncate(*left as usize);
            *left -= item.tokens.len() as u32;
            if *left == 0 {
                sink.push(TokenItem {
                    finish: None,
                    ..item
                });
                return;
            }
        }
        if !sink.push(item) {
            return;
        }
    }
}
