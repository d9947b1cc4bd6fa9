//! Calls to endpoints, whatever they carry: the general form of a request plane.
//!
//! A call is one payload to one endpoint of one worker; its answer is a stream of payloads. Requests for tokens are one kind
//! of it (`tokens`); questions about a worker's cache are another.

mod dispatch;
mod reply;

pub use dispatch::{
    CallObserver, CallPlace, CallWatch, Dispatcher, EndpointHandler, HandlerFuture, IncomingCall,
    ServedEndpoint,
};
pub use reply::ReplySink;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kvasir_protocol::Payload;
use kvasir_protocol::frame::Ack;
use kvasir_types::{PlaneEndpoint, RequestId, WorkerId};

use crate::{CallStream, PlaneError};

/// What [`EndpointClient::call`] returns.
pub type CallFuture<'a> = Pin<Box<dyn Future<Output = Result<CallStream, PlaneError>> + Send + 'a>>;

/// A way to call endpoints of workers.
pub trait EndpointClient: Send + Sync + 'static {
    /// Calls `endpoint` with `payload`. `Ok` means that the worker has begun its answer, whose items follow in the stream.
    /// Dropping the future or the stream cancels the call.
    fn call<'a>(
        &'a self,
        endpoint: &'a PlaneEndpoint,
        payload: Payload,
        context: CallContext,
    ) -> CallFuture<'a>;
}

/// What an acknowledgement means to whoever asked.
pub(crate) fn accepted(ack: Ack, worker: WorkerId) -> Result<(), PlaneError> {
    match ack {
        Ack::Accepted => Ok(()),
        Ack::Overloaded => Err(PlaneError::Overloaded(worker)),
        Ack::Unavailable(why) => Err(PlaneError::Refused { worker, why }),
    }
}

/// Who calls whom, and what is said beside the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallContext {
    /// Whom errors are about.
    pub worker: WorkerId,
    /// The call's name on the wire; the same for all attempts at one request.
    pub id: RequestId,
    /// What the caller itself calls it, if that is not its id: the worker sees this one.
    pub name: Option<Arc<str>>,
    /// What the client's headers say to the worker, by name.
    pub metadata: Vec<(Arc<str>, Arc<str>)>,
}

impl CallContext {
    /// A call about which nothing else is said.
    #[must_use]
    pub const fn new(worker: WorkerId, id: RequestId) -> Self {
        Self {
            worker,
            id,
            name: None,
            metadata: Vec::new(),
        }
    }
}
