//! The endpoint that takes requests for tokens, and the one that empties the cache.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kvasir_msgpack::Value;
use kvasir_protocol::Payload;
use kvasir_transport::{
    CallPlace, EndpointHandler, HandlerFuture, IncomingCall, TokenEndpoint, TokenSink,
};
use kvasir_types::{TokenRequest, WorkerId};
use tokio::sync::Semaphore;

use crate::names::RequestNames;

/// What [`TokenEngine::clear_cache`] returns.
pub type ClearFuture<'a> = Pin<Box<dyn Future<Output = bool> + Send + 'a>>;

/// An engine that takes tokens and makes tokens.
pub trait TokenEngine: Send + Sync + 'static {
    /// Takes a request; its tokens, or why there are none, go to `sink`. Must not wait.
    fn submit(&self, request: TokenRequest, sink: TokenSink);

    /// Empties the cache of every rank; false if that is not possible now.
    fn clear_cache(&self) -> ClearFuture<'_>;

    /// Requests that it takes at once; one more is told that the worker is at capacity.
    fn requests_max(&self) -> Option<usize> {
        None
    }

    /// Whether the next request is taken and its caller never called: for mock engines that break the protocol on command.
    fn is_silent(&self) -> bool {
        false
    }
}

type Submit = Box<dyn Fn(TokenRequest, TokenSink) + Send + Sync>;

/// `generate`: calls become requests to the engine.
pub(crate) struct Generate {
    tokens: TokenEndpoint<Submit>,
    engine: Arc<dyn TokenEngine>,
    names: Arc<RequestNames>,
    places: Option<Arc<Semaphore>>,
}

impl Generate {
    pub(crate) fn new(
        worker: WorkerId,
        engine: Arc<dyn TokenEngine>,
        names: Arc<RequestNames>,
    ) -> Self {
        let to = Arc::clone(&engine);
        let submit: Submit = Box::new(move |request, sink| to.submit(request, sink));
        let places = engine.requests_max();
        let places = places.map(|max| Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS))));
        Self {
            tokens: TokenEndpoint::new(worker, submit),
            engine,
            names,
            places,
        }
    }
}

impl EndpointHandler for Generate {
    fn handle(&self, mut call: IncomingCall) -> HandlerFuture {
        let named = self.names.note(&call.id);
        call.id = named.id.to_string();
        let answer = self.tokens.handle(call);
        Box::pin(async move {
            answer.await;
            drop(named);
        })
    }

    fn admit(&self) -> Option<CallPlace> {
        match &self.places {
            Some(places) => CallPlace::of(places),
            None => Some(CallPlace::default()),
        }
    }

    fn is_silent(&self) -> bool {
        self.engine.is_silent()
    }
}

/// `clear_kv_blocks`: empties the cache, and says whether that went well.
pub(crate) struct ClearBlocks(pub(crate) Arc<dyn TokenEngine>);

impl EndpointHandler for ClearBlocks {
    fn handle(&self, call: IncomingCall) -> HandlerFuture {
        let engine = Arc::clone(&self.0);
        Box::pin(async move {
            let mut reply = call.reply;
            if !reply.start().await {
                return;
            }
            let (status, message) = match engine.clear_cache().await {
                true => ("success", "KV cache cleared"),
                false => ("error", "requests are running: nothing was cleared"),
            };
            let text = |text: &str| Value::Text(text.to_owned());
            let told = Value::Map(vec![
                ("status".to_owned(), text(status)),
                ("message".to_owned(), text(message)),
            ]);
            let item = Value::Map(vec![("data".to_owned(), told)]);
            if reply.send(&Payload::of_value(reply.codec(), &item)).await {
                reply.finish().await;
            }
        })
    }
}
