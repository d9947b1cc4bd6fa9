//! Requests for token workers: token ids go out, tokens come back and become text here.

pub(crate) mod answer;
pub(crate) mod bypass;
pub(crate) mod job;
pub(crate) mod lane;
pub(crate) mod reading;
pub(crate) mod two_step;
