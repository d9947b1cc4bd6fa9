//! How requests and events travel between the router and its workers.
//!
//! Answers one question: given a worker's id, how does a request reach it and its answer come back? The
//! request plane is one trait with one module per way of travelling; what a token or an event means is
//! not known here.
//!
//! Invariants: a sender never waits for a slow reader (answers pile up as one item, bounded by the
//! answer's own length); dropping the reading end cancels the request; a sending end that vanishes is
//! seen as a disconnection, never as a quiet end.

#[cfg(feature = "tcp")]
mod call_home;
#[cfg(feature = "tcp")]
mod endpoint;
pub mod event_plane;
mod events;
#[cfg(feature = "http")]
pub mod http_rpc;
#[cfg(feature = "nats")]
pub mod jetstream;
#[cfg(any(feature = "tcp", feature = "zmq"))]
mod listen;
mod local_error;
mod memory;
#[cfg(feature = "nats")]
pub mod nats;
mod plane;
mod stream;
#[cfg(feature = "tcp")]
pub mod tcp;
#[cfg(feature = "tcp")]
mod tokens;
#[cfg(feature = "zmq")]
pub mod zmq;

#[cfg(feature = "tcp")]
pub use call_home::{
    CallStream, HomeCounts, ResponseOptions, ResponseServer, SharedHome, local_address,
};
#[cfg(feature = "tcp")]
pub use endpoint::{
    CallContext, CallFuture, CallObserver, CallPlace, CallWatch, Dispatcher, EndpointClient,
    EndpointHandler, HandlerFuture, IncomingCall, ReplySink, ServedEndpoint,
};
pub use events::{
    EventPublisher, EventSource, MEMORY_QUEUE_MAX, MemoryPublisher, MemorySource, ReplayRequest,
    memory_source, next_event, worker_events,
};
pub use kvasir_wire::{SourceEvent, SourceFault};
pub use local_error::{is_local_error, is_out_of_descriptors};
pub use memory::{Call, MemoryPlane, WorkerInbox};
pub use plane::{AnswerStep, PlaneError, RequestPlane, SendFuture};
pub use stream::{TokenSink, TokenSource, TokenStream, token_stream};
#[cfg(feature = "tcp")]
pub use tokens::{TokenEndpoint, TokenPlane};
