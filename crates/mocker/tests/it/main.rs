//! Mock workers on the request plane, on a paused clock.

mod plane;
