//! The router behind the request plane: `generate`, `best_worker_id` and `get_overlap_scores`.
//!
//! Answers one question: what do processes get that call the router as they call a worker? A request to `generate` goes to the best
//! worker of an endpoint, whose answer comes back as it is; the other two only ask. Messages are those of Dynamo 1.6.1's standalone
//! router.
//!
//! What always holds: an answer begins before a worker is chosen, so that a caller who waits in the queue knows that it is heard; one
//! that leaves ends its worker's work and its booking; what went wrong is an error item, and the answer ends after it.
//!
//! Elsewhere: the workers and their router (`kvasir_host`: [`EndpointFleet`]), sockets (`kvasir-transport`), who announces the
//! endpoints (`kvasir-cli`).

mod ask;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_hash::Scope;
use kvasir_host::{EndpointError, EndpointFleet, EndpointJob, PromptBlocks};
use kvasir_protocol::{Annotated, GenerateRequest, Payload, PayloadWriter, WorkerError};
use kvasir_router::{Arrival, RouteError};
use kvasir_transport::{EndpointHandler, HandlerFuture, IncomingCall, ReplySink};
use kvasir_types::{Codec, RequestId, WorkerId};
use serde::Serialize;

use crate::group::{Named, locals_of};
use crate::overlap::OverlapReply;
use ask::{PromptAsk, PromptText};

pub use ask::arrival as request_arrival;

/// Tokens of a prompt above which its blocks are named on another thread.
const LONG_PROMPT: usize = 1 << 15;

/// The router of one endpoint's workers, for callers on the request plane. Clones are one.
#[derive(Clone, Debug)]
pub struct PlaneRouter {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    fleet: Arc<EndpointFleet>,
    /// How often another worker is asked.
    retries: u32,
    /// What calls are named by whose callers gave no name: the first half of their ids, and how many there were.
    name: u64,
    calls: AtomicU64,
}

impl PlaneRouter {
    /// Routes to `fleet`, and asks up to `retries` other workers if one does not begin to answer. `seed` tells the names of calls of
    /// one process from those of another.
    #[must_use]
    pub fn new(fleet: Arc<EndpointFleet>, retries: u32, seed: u64) -> Self {
        Self {
            shared: Arc::new(Shared {
                fleet,
                retries,
                name: seed,
                calls: AtomicU64::new(0),
            }),
        }
    }

    /// The endpoints by their names.
    #[must_use]
    pub fn endpoints(&self) -> [(&'static str, Arc<dyn EndpointHandler>); 3] {
        let (generate, best, overlap) = (self.clone(), self.clone(), self.clone());
        let generate = move |call| -> HandlerFuture { Box::pin(generate.clone().generate(call)) };
        let best = move |call| -> HandlerFuture { Box::pin(best.clone().best_worker_id(call)) };
        let overlap = move |call| -> HandlerFuture { Box::pin(overlap.clone().overlap(call)) };
        [
            ("generate", Arc::new(generate)),
            ("best_worker_id", Arc::new(best)),
            ("get_overlap_scores", Arc::new(overlap)),
        ]
    }

    fn next_id(&self) -> RequestId {
        let call = self.shared.calls.fetch_add(1, Ordering::Relaxed);
        RequestId(u128::from(self.shared.name) << 64 | u128::from(call))
    }

    /// Sends a request to the best worker, and its answer back.
    async fn generate(self, call: IncomingCall) {
        let mut reply = call.reply;
        if !reply.start().await {
            return;
        }
        let stopped = reply.cancellation();
        let sending = async {
            let mut job = self.job(&call.id, &call.payload, call.metadata).await?;
            let sent = self.shared.fleet.send(&mut job).await;
            if !matches!(
                sent,
                Err(EndpointError::Route(RouteError::DuplicateRequest))
            ) {
                return sent;
            }
            // The caller names two by one id, or has let the first one go a moment ago.
            job.arrival.id = self.next_id();
            self.shared.fleet.send(&mut job).await
        };
        let sent = tokio::select! {
            sent = sending => sent,
            () = stopped.cancelled() => return,
        };
        let mut answer = match sent {
            Ok(answer) => answer,
            Err(error) => return fail(reply, error.to_worker_error()).await,
        };
        loop {
            let item = tokio::select! {
                item = answer.next() => item,
                () = stopped.cancelled() => return,
            };
            match item {
                Some(Ok(item)) => {
                    if !reply.send(&item).await {
                        return;
                    }
                }
                Some(Err(error)) => return fail(reply, error.to_worker_error()).await,
                None => return reply.finish().await,
            }
        }
    }

    /// What is asked of the router, and what a worker gets.
    async fn job(
        &self,
        id: &str,
        payload: &Payload,
        metadata: Vec<(String, String)>,
    ) -> Result<EndpointJob, EndpointError> {
        let mut request = GenerateRequest::decode(payload)
            .map_err(|error| invalid(format!("the request cannot be read: {error}")))?;
        let id = RequestId::parse(id).unwrap_or_else(|| self.next_id());
        let mut arrival = ask::arrival(&mut request, id, |worker| self.is_there(worker))?;
        let prompt = PromptText::of(&request)?;
        arrival.isl_tokens = prompt.len();
        // What an engine makes of an image is not known here.
        let certain_tokens = prompt.media.is_none().then(|| prompt.len());
        let mut blocks = self.blocks(prompt).await;
        blocks.certain_tokens = certain_tokens;
        let pairs = metadata.into_iter();
        Ok(EndpointJob {
            arrival,
            blocks,
            request,
            metadata: pairs
                .map(|(name, text)| (name.into(), text.into()))
                .collect(),
            retries: self.shared.retries,
        })
    }

    fn is_there(&self, worker: WorkerId) -> bool {
        self.shared.fleet.address(worker).is_some()
    }

    async fn blocks(&self, prompt: PromptText) -> PromptBlocks {
        let fleet = Arc::clone(&self.shared.fleet);
        let is_long = prompt.tokens.len() > LONG_PROMPT;
        let name = move || {
            let (model, naming) = (&fleet.model, prompt.naming());
            if naming.media.is_some() {
                let named = Named::of_tokens(&prompt.tokens, model.block_size, naming);
                return named.blocks(&model.host);
            }
            let scope = Scope {
                lora: naming.lora.unwrap_or_default(),
                salt: naming.salt.unwrap_or_default(),
                eagle: naming.eagle,
            };
            model.name_blocks_in(&prompt.tokens, &scope)
        };
        match is_long {
            false => name(),
            true => {
                let named = tokio::task::spawn_blocking(name).await;
                named.unwrap_or_else(|_| PromptBlocks::none())
            }
        }
    }

    /// Says which worker a prompt would go to. Books nothing.
    async fn best_worker_id(self, call: IncomingCall) {
        let chosen = async {
            let ask = PromptAsk::read(&call.payload)?;
            let mut arrival = Box::new(Arrival::new(self.next_id(), ask.prompt.len()));
            arrival.overrides = ask.overrides;
            arrival.constraints.lora = ask.prompt.lora.as_deref().map(Into::into);
            arrival.query_only = true;
            let blocks = self.blocks(ask.prompt).await;
            let booking = self.shared.fleet.model.book(arrival, &blocks).await?;
            Ok(booking.target().worker.0)
        };
        let chosen = chosen.await;
        answer(call.reply, chosen).await;
    }

    /// Says how much of a prompt each rank holds.
    async fn overlap(self, call: IncomingCall) {
        let found = PromptAsk::read(&call.payload).map(|PromptAsk { prompt, .. }| {
            let model = &self.shared.fleet.model;
            let locals = locals_of(&prompt.tokens, model.block_size, prompt.naming());
            OverlapReply::of(model, &locals)
        });
        answer(call.reply, found).await;
    }
}

/// Answers with one value, or with what went wrong.
async fn answer(mut reply: ReplySink, value: Result<impl Serialize, EndpointError>) {
    if !reply.start().await {
        return;
    }
    let value = match value {
        Ok(value) => value,
        Err(error) => return fail(reply, error.to_worker_error()).await,
    };
    // What is written here has no keys that are no text, the one thing that fails.
    let text = serde_json::to_vec(&value).unwrap_or_default();
    let value = Payload::new(Codec::Json, text.into());
    let item = |writer: &mut PayloadWriter| {
        writer.map(1);
        writer.key("data");
        writer.payload(&value);
        writer.end_map();
    };
    if reply.send_with(item).await {
        reply.finish().await;
    }
}

/// Ends an answer with an error.
async fn fail(mut reply: ReplySink, error: WorkerError) {
    let item = Annotated::of_error(error);
    if reply.send_with(|writer| item.write(writer)).await {
        reply.finish().await;
    }
}

/// The caller is to ask otherwise.
fn invalid(message: String) -> EndpointError {
    EndpointError::Worker(WorkerError {
        kind: kvasir_protocol::WorkerErrorKind::InvalidArgument,
        public: Some(message.clone()),
        message,
    })
}
