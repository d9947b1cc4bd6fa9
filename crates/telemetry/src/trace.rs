//! Traces: which spans a request has, and what is told about each when it ends.
//!
//! A request has two: one for its stay here, one for its stay at the engine. A caller's trace context (W3C
//! `traceparent`) is continued, and the engine gets ours as its parent. Spans are plain values that a [`SpanSink`]
//! takes when they end; without a sink nobody makes any.

use std::sync::{Arc, Mutex, PoisonError};

use kvasir_types::Rng;

/// Where a span stands in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace; never 0.
    pub trace_id: u128,
    /// The span; never 0.
    pub span_id: u64,
    /// Whether it is recorded.
    pub sampled: bool,
}

impl TraceContext {
    /// Reads a `traceparent` header; `None` for anything that is none, as the W3C asks.
    ///
    /// ```
    /// use kvasir_telemetry::TraceContext;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let context = TraceContext::parse(text).unwrap();
    /// assert_eq!((context.to_string().as_str(), context.sampled), (text, true));
    /// assert!(TraceContext::parse("00-0-0-01").is_none());
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut parts = text.split('-');
        let version = hex(parts.next()?, 2)?;
        let trace_id = hex(parts.next()?, 32)?;
        let span_id = u64::try_from(hex(parts.next()?, 16)?).ok()?;
        let flags = hex(parts.next()?, 2)?;
        // Later versions may add parts; version 0 has none, and 255 is no version.
        let fits = version != 0xff && (version != 0 || parts.next().is_none());
        (fits && trace_id != 0 && span_id != 0).then_some(Self {
            trace_id,
            span_id,
            sampled: flags & 1 == 1,
        })
    }
}

/// As the header carries it.
impl std::fmt::Display for TraceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags = u8::from(self.sampled);
        write!(
            f,
            "00-{:032x}-{:016x}-{flags:02x}",
            self.trace_id, self.span_id
        )
    }
}

fn hex(text: &str, digits: usize) -> Option<u128> {
    let lower = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let fits = text.len() == digits && text.as_bytes().iter().all(lower);
    fits.then(|| u128::from_str_radix(text, 16).ok())?
}

/// Whose work a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// Ours, for a client.
    Server,
    /// An engine's, for us.
    Client,
}

/// What an attribute may be.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
}

/// A span that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Where it stands.
    pub context: TraceContext,
    /// The span that caused it; 0 without one.
    pub parent_id: u64,
    /// Whether that one is another process's.
    pub parent_is_remote: bool,
    /// Whose work it is.
    pub kind: SpanKind,
    /// What was done.
    pub name: &'static str,
    /// When it began, in nanoseconds since 1970.
    pub start_unix_nanos: u64,
    /// When it ended.
    pub end_unix_nanos: u64,
    /// Whether it failed.
    pub failed: bool,
    /// What is to be known about it.
    pub attributes: Vec<(&'static str, Attribute)>,
}

/// Takes spans that have ended. Never waits: what cannot be kept is dropped.
pub trait SpanSink: std::fmt::Debug + Send + Sync {
    /// One more.
    fn finished(&self, span: Span);

    /// The process ends: what is left is sent. May wait for a while.
    fn flush(&self) {}
}

/// The two spans of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpans {
    /// The caller's, if it sent one.
    pub parent: Option<TraceContext>,
    /// Ours.
    pub server: TraceContext,
    /// The engine's parent.
    pub client: TraceContext,
}

/// Begins spans and hands them on when they end. Clones are one.
#[derive(Clone, Debug)]
pub struct Tracer {
    sink: Arc<dyn SpanSink>,
    rng: Arc<Mutex<Rng>>,
    share: f64,
}

impl Tracer {
    /// Spans go to `sink`. Of requests without a trace of their own the given `share` is recorded; others follow
    /// their caller.
    #[must_use]
    pub fn new(sink: Arc<dyn SpanSink>, share: f64, seed: u64) -> Self {
        Self {
            sink,
            rng: Arc::new(Mutex::new(Rng::new(seed))),
            share,
        }
    }

    /// A request came, with this `traceparent`.
    #[must_use]
    pub fn begin(&self, traceparent: Option<&str>) -> RequestSpans {
        let parent = traceparent.and_then(TraceContext::parse);
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let root = TraceContext {
            trace_id: u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64() | 1),
            span_id: 0,
            sampled: rng.next_u64() as f64 / u64::MAX as f64 <= self.share && self.share > 0.0,
        };
        let mut span = || TraceContext {
            span_id: rng.next_u64() | 1,
            ..parent.unwrap_or(root)
        };
        RequestSpans {
            parent,
            server: span(),
            client: span(),
        }
    }

    /// The process ends: what is left is sent. May wait, so not for a thread of a runtime.
    pub fn flush(&self) {
        self.sink.flush();
    }

    /// A span has ended.
    pub fn finish(&self, span: Span) {
        if span.context.sampled {
            self.sink.finished(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Kept(Mutex<Vec<Span>>);

    impl SpanSink for Kept {
        fn finished(&self, span: Span) {
            self.0.lock().unwrap().push(span);
        }
    }

    #[test]
    fn only_a_header_as_the_w3c_writes_it_is_one() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        assert!(!TraceContext::parse(good).unwrap().sampled);
        assert!(TraceContext::parse(&good.replacen("00", "cc", 1)).is_some());
        assert!(
            TraceContext::parse("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x")
                .is_some()
        );
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-é1",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_callers_trace_is_continued_and_its_wish_followed() {
        let kept = Arc::new(Kept::default());
        let tracer = Tracer::new(Arc::clone(&kept) as _, 1.0, 7);
        let of = |flags: &str| {
            let text = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
            tracer.begin(Some(&text))
        };
        for spans in [
            of("01"),
            of("00"),
            tracer.begin(None),
            tracer.begin(Some("x")),
        ] {
            assert_eq!(spans.server.trace_id, spans.client.trace_id);
            assert_ne!(spans.server.span_id, spans.client.span_id);
            tracer.finish(Span {
                context: spans.server,
                parent_id: spans.parent.map_or(0, |parent| parent.span_id),
                parent_is_remote: spans.parent.is_some(),
                kind: SpanKind::Server,
                name: "x",
                start_unix_nanos: 0,
                end_unix_nanos: 1,
                failed: false,
                attributes: Vec::new(),
            });
        }
        let kept = kept.0.lock().unwrap();
        let parents: Vec<u64> = kept.iter().map(|span| span.parent_id).collect();
        assert_eq!(parents, [0x00f0_67aa_0ba9_02b7, 0, 0]);
        assert_eq!(
            kept[0].context.trace_id,
            0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736
        );
    }

    #[test]
    fn a_share_of_zero_records_nothing_of_its_own() {
        let tracer = Tracer::new(Arc::new(Kept::default()), 0.0, 7);
        assert!((0..100).all(|_| !tracer.begin(None).server.sampled));
        let some = Tracer::new(Arc::new(Kept::default()), 0.5, 7);
        let sampled = (0..1000)
            .filter(|_| some.begin(None).server.sampled)
            .count();
        assert!((400..600).contains(&sampled), "{sampled}");
    }
}
