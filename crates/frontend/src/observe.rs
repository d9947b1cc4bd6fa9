//! What is known of a request afterwards: series, spans, the log line, the record of its end.

pub(crate) mod feed;
pub(crate) mod meter;
pub(crate) mod observer;
pub(crate) mod outcomes;
pub(crate) mod request_record;
pub(crate) mod spans;
pub(crate) mod token_source;
pub(crate) mod traffic;
