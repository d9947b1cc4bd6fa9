//! How does an event of `tracing` reach the log?
//!
//! The event is written into a buffer of its thread as one whole line, and the line is handed on. There is nothing
//! else between an event and its line: no layers and no spans. (Which events are logged at all is the filter's,
//! which stands before this; `tracing` remembers its verdict for each place in the code, so a line that is switched
//! off costs one comparison.)

use std::cell::Cell;

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

use super::{Format, json, text};
use crate::clock;

/// Buffers that a long line made larger than this are not kept.
const BUFFER_BYTES_MAX: usize = 4 << 10;

thread_local! {
    /// The line that this thread is writing. Taken out while in use: a value that logs while it is written gets another.
    static BUFFER: Cell<String> = const { Cell::new(String::new()) };
}

/// Writes each event as one line and gives the line to `sink`.
#[derive(Debug)]
pub(super) struct LineSubscriber<S> {
    format: Format,
    /// Whether lines of text have colours.
    ansi: bool,
    sink: S,
}

impl<S: Fn(&str)> LineSubscriber<S> {
    pub(super) fn new(format: Format, ansi: bool, sink: S) -> Self {
        Self { format, ansi, sink }
    }
}

impl<S: Fn(&str) + 'static> Subscriber for LineSubscriber<S> {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match metadata.is_span() {
            true => Interest::never(),
            false => Interest::always(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span()
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = BUFFER.take();
        line.clear();
        match self.format {
            Format::Text => text::write(&mut line, self.ansi, clock::unix_now(), event),
            Format::Json => json::write(&mut line, clock::unix_now(), event),
        }
        (self.sink)(&line);
        if line.capacity() > BUFFER_BYTES_MAX {
            line = String::new();
        }
        BUFFER.set(line);
    }

    // No span is enabled; one that is made all the same has this name.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The lines that `log` writes.
    pub(in super::super) fn lines(format: Format, ansi: bool, log: impl FnOnce()) -> Vec<String> {
        let seen: Arc<Mutex<String>> = Arc::default();
        let sink = Arc::clone(&seen);
        let subscriber = LineSubscriber::new(format, ansi, move |line: &str| {
            sink.lock().unwrap().push_str(line)
        });
        tracing::subscriber::with_default(subscriber, log);
        let text = seen.lock().unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// A value that writes a line of its own while it is written.
    struct Chatty;

    impl std::fmt::Display for Chatty {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let mut inner = BUFFER.take();
            inner.push_str("inner");
            BUFFER.set(inner);
            f.write_str("value")
        }
    }

    #[test]
    fn a_value_that_logs_while_it_is_written_spoils_no_line() {
        let seen = lines(Format::Text, false, || {
            tracing::info!(a = %Chatty, "outer");
            tracing::info!("after");
        });
        let ends: Vec<_> = seen.iter().map(|line| &line[34..]).collect();
        assert_eq!(ends, ["outer a=value", "after"]);
    }

    /// `enabled!` asks with metadata that is neither an event's nor a span's.
    #[test]
    fn whether_an_event_would_be_logged_can_be_asked() {
        let mut asked = (false, true);
        lines(Format::Text, false, || {
            let event = tracing::enabled!(target: "some", tracing::Level::DEBUG);
            asked = (event, tracing::span_enabled!(tracing::Level::ERROR));
        });
        assert_eq!(asked, (true, false));
    }

    #[test]
    fn a_long_line_leaves_no_large_buffer() {
        let long = "x".repeat(3 * BUFFER_BYTES_MAX);
        let seen = lines(Format::Json, false, || tracing::info!(a = long, "m"));
        assert!(seen[0].len() > long.len());
        let kept = BUFFER.take();
        assert!(kept.capacity() <= BUFFER_BYTES_MAX);
    }
}
