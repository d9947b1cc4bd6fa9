//! Tokens over endpoints: requests for tokens as calls, on both sides.

use std::sync::Arc;
use std::task::{Context, Poll};

use kvasir_protocol::{
    Annotated, GenerateRequest, Output, Payload, TokenFrame, Usage, WorkerError, WorkerErrorKind,
};
use kvasir_types::{FinishReason, PlaneEndpoint, RequestId, TokenItem, TokenRequest, WorkerId};

use crate::plane::SendFuture;
use crate::stream::append;
use crate::{
    CallContext, CallStream, EndpointClient, EndpointHandler, HandlerFuture, IncomingCall,
    PlaneError, ReplySink, RequestPlane, TokenSink, TokenSource, TokenStream, token_stream,
};

/// Items that are made one before the reader gets them.
const ITEMS_AT_ONCE: usize = 256;
/// What clients are told if a worker refuses a request and does not say what they may know.
const INVALID_REQUEST: &str = "Invalid request";

/// A token worker behind an endpoint.
#[derive(Clone)]
pub struct TokenPlane {
    client: Arc<dyn EndpointClient>,
    endpoint: PlaneEndpoint,
}

impl TokenPlane {
    /// The worker at `endpoint`.
    #[must_use]
    pub const fn new(client: Arc<dyn EndpointClient>, endpoint: PlaneEndpoint) -> Self {
        Self { client, endpoint }
    }
}

impl RequestPlane for TokenPlane {
    fn send(&self, worker: WorkerId, request: TokenRequest) -> SendFuture<'_> {
        Box::pin(async move {
            let payload =
                GenerateRequest::of_as(&request, self.endpoint.codec).encode(self.endpoint.codec);
            let mut context = CallContext::new(worker, request.id);
            context.metadata = request.context.metadata;
            let call = self.client.call(&self.endpoint, payload, context).await?;
            Ok(TokenStream::from_source(Box::new(RemoteTokens::new(call))))
        })
    }
}

/// Tokens of an answer that comes over a socket.
struct RemoteTokens {
    call: CallStream,
    /// What frames look like that say nothing but one more token.
    known: Option<TokenFrame>,
    /// What came and was not taken yet.
    pending: Option<TokenItem>,
    /// Why it ended, held back until the answer is.
    finish: Option<FinishReason>,
    /// What the worker said about its cache and was not handed on yet: an item without tokens is no item.
    cached_tokens: Option<u32>,
    /// Likewise of where the prompt is, which only prefill workers say.
    disaggregated_params: Option<Arc<str>>,
    /// It has said so.
    is_prefilled: bool,
    /// Why nothing more comes; told behind what came.
    failed: Option<PlaneError>,
    ended: bool,
}

impl RemoteTokens {
    const fn new(call: CallStream) -> Self {
        Self {
            call,
            known: None,
            pending: None,
            finish: None,
            cached_tokens: None,
            disaggregated_params: None,
            is_prefilled: false,
            failed: None,
            ended: false,
        }
    }

    /// Takes in what the worker sent.
    fn take(&mut self, next: Option<Result<Payload, PlaneError>>) {
        let data = match next {
            Some(Ok(data)) => data,
            Some(Err(error)) => return self.fail(error),
            None => return self.end(),
        };
        let worker = self.call.worker();
        let item = match Annotated::decode(&data) {
            Ok(item) => item,
            Err(error) => {
                let why = error.to_string();
                return self.fail(PlaneError::Protocol { worker, why });
            }
        };
        self.known = self.call.token_frame(&item).or(self.known.take());
        if let Some(error) = item.error {
            return self.fail(worker_error(worker, error));
        }
        let Some(output) = item.data else { return };
        let (mut item, failed) = output.into_item();
        if let Some(text) = failed {
            return self.fail(PlaneError::Engine(text));
        }
        // Its tokens go on at once; that it was the last is told when the answer is.
        self.finish = item.finish.take().or(self.finish);
        self.cached_tokens = item.cached_tokens.or(self.cached_tokens);
        if item.disaggregated_params.is_some() {
            self.disaggregated_params = item.disaggregated_params.take();
            self.is_prefilled = true;
        }
        if !item.tokens.is_empty() {
            item.cached_tokens = self.cached_tokens.take();
            item.disaggregated_params = self.disaggregated_params.take();
            self.push(item);
        }
    }

    /// Takes in what needs no reading.
    fn take_known(&mut self) {
        if let Some(known) = &self.known {
            let mut tokens = Vec::new();
            self.call.take_tokens(known, &mut tokens);
            if !tokens.is_empty() {
                let cached_tokens = self.cached_tokens.take();
                self.push(TokenItem {
                    tokens,
                    cached_tokens,
                    ..TokenItem::default()
                });
            }
        }
    }

    fn push(&mut self, item: TokenItem) {
        match &mut self.pending {
            Some(pending) => append(pending, item),
            None => self.pending = Some(item),
        }
    }

    fn fail(&mut self, error: PlaneError) {
        if self.finish.is_some() && matches!(error, PlaneError::Disconnected(_)) {
            // All of it came, with its reason; only the mark behind it is missing.
            return self.end();
        }
        self.ended = true;
        self.failed = Some(error);
    }

    fn end(&mut self) {
        self.ended = true;
        // Complete, and without a reason: the worker ended it itself, or has computed a prompt, which ends nothing.
        let unsaid = match self.is_prefilled {
            true => FinishReason::Length,
            false => FinishReason::Stop,
        };
        let last = TokenItem {
            cached_tokens: self.cached_tokens.take(),
            disaggregated_params: self.disaggregated_params.take(),
            finish: Some(self.finish.unwrap_or(unsaid)),
            ..TokenItem::default()
        };
        self.push(last);
    }
}

impl TokenSource for RemoteTokens {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<TokenItem, PlaneError>>> {
        for _ in 0..ITEMS_AT_ONCE {
            if self.ended {
                break;
            }
            self.take_known();
            match self.call.poll_next(cx) {
                Poll::Ready(next) => self.take(next),
                Poll::Pending => {
                    return match self.pending.take() {
                        Some(item) => Poll::Ready(Some(Ok(item))),
                        None => Poll::Pending,
                    };
                }
            }
        }
        match (self.pending.take(), self.failed.take()) {
            (Some(item), failed) => {
                self.failed = failed;
                Poll::Ready(Some(Ok(item)))
            }
            (None, Some(error)) => Poll::Ready(Some(Err(error))),
            (None, None) if self.ended => Poll::Ready(None),
            (None, None) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}

/// What a worker's error item means here.
fn worker_error(worker: WorkerId, error: WorkerError) -> PlaneError {
    match error.kind {
        WorkerErrorKind::InvalidArgument => {
            let public = error.public.unwrap_or_else(|| INVALID_REQUEST.to_owned());
            PlaneError::Rejected(public)
        }
        WorkerErrorKind::Overloaded => PlaneError::Overloaded(worker),
        WorkerErrorKind::Unavailable => PlaneError::Disconnected(worker),
        WorkerErrorKind::Timeout | WorkerErrorKind::Cancelled | WorkerErrorKind::Unknown => {
            PlaneError::Engine(error.message)
        }
    }
}

/// The error item that says this to a frontend; none where the connection is to break instead.
fn error_item(error: &PlaneError) -> Option<WorkerError> {
    let (kind, public) = match error {
        PlaneError::Rejected(text) => (WorkerErrorKind::InvalidArgument, Some(text.clone())),
        PlaneError::Overloaded(_) => (WorkerErrorKind::Overloaded, None),
        PlaneError::Engine(_) | PlaneError::Protocol { .. } => (WorkerErrorKind::Unknown, None),
        _ => return None,
    };
    Some(WorkerError {
        kind,
        message: error.to_string(),
        public,
    })
}

/// A token worker's `generate`: calls become requests, and what a sink gets becomes their answers.
pub struct TokenEndpoint<S> {
    worker: WorkerId,
    submit: Arc<S>,
}

impl<S: Fn(TokenRequest, TokenSink) + Send + Sync + 'static> TokenEndpoint<S> {
    /// Requests go to `submit`.
    #[must_use]
    pub fn new(worker: WorkerId, submit: S) -> Self {
        Self {
            worker,
            submit: Arc::new(submit),
        }
    }
}

impl<S: Fn(TokenRequest, TokenSink) + Send + Sync + 'static> EndpointHandler for TokenEndpoint<S> {
    fn handle(&self, call: IncomingCall) -> HandlerFuture {
        let (worker, submit) = (self.worker, Arc::clone(&self.submit));
        Box::pin(async move {
            let IncomingCall {
                id,
                payload,
                metadata,
                reply,
            } = call;
            let request = match GenerateRequest::decode(&payload) {
                Ok(request) => request,
                Err(error) => return reply.refuse(&error.to_string()).await,
            };
            let id = RequestId::parse(&id).unwrap_or(RequestId(0));
            let request = request.into_token_request(id, &metadata);
            let prompt = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
            let (sink, stream) = token_stream(worker);
            submit(request, sink);
            answer(reply, stream, prompt).await;
        })
    }
}

/// Sends what comes from a worker of this process to whoever called.
async fn answer(mut reply: ReplySink, mut stream: TokenStream, prompt_tokens: u32) {
    let cancelled = reply.cancellation();
    let mut usage = Usage {
        prompt_tokens,
        total_tokens: prompt_tokens,
        ..Usage::default()
    };
    let mut is_first = true;
    if !reply.start().await {
        return;
    }
    loop {
        let item = tokio::select! {
            item = stream.next() => item,
            () = cancelled.cancelled() => return,
        };
        let mut is_last = false;
        let annotated = match item {
            Some(Ok(item)) => {
                is_last = item.finish.is_some();
                usage.cached_tokens = usage.cached_tokens.or(item.cached_tokens);
                let new = u32::try_from(item.tokens.len()).unwrap_or(u32::MAX);
                usage.completion_tokens = usage.completion_tokens.saturating_add(new);
                usage.total_tokens = usage.total_tokens.saturating_add(new);
                let told = std::mem::take(&mut is_first) || item.finish.is_some();
                Annotated::of_output(Output::of(item, told.then_some(usage)))
            }
            Some(Err(error)) => match error_item(&error) {
                Some(error) => Annotated::of_error(error),
                None => return,
            },
            None => return reply.finish().await,
        };
        if is_last || annotated.error.is_some() {
            return reply.finish_with(|writer| annotated.write(writer)).await;
        }
        if !reply.send_with(|writer| annotated.write(writer)).await {
            return;
        }
    }
}
