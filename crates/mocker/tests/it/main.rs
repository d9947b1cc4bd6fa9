//! Mock workers on the request plane, on a paused clock; and their event sockets, on the real one.

mod events;
mod plane;
