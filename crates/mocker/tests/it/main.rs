//! Mock workers on the request plane, on a paused clock; their event sockets and mock servers, on the real
//! one.

mod client;
mod events;
mod faults;
mod plane;
mod transfer;
mod vllm;
mod wire;
