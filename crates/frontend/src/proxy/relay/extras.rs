//! What is added to an engine's answer for a client that asked for it: `nvext`, and annotations.

use bytes::{Bytes, BytesMut};
use kvasir_openai::{Event, ResponseNvext, Usage, write_llm_metrics};
use kvasir_telemetry::Clock;
use kvasir_types::Time;

use crate::request::response_extras::ExtraFields;

/// Fields that are added to the engine's answer.
#[derive(Debug)]
pub(crate) struct Extras {
    /// On every chunk, and in `last` too.
    pub(crate) each: ResponseNvext,
    /// On the last chunk; its times are filled in when that comes.
    pub(crate) last: ResponseNvext,
    /// Which fields the client asked for.
    pub(crate) extra_fields: ExtraFields,
    /// When the request was received.
    pub(crate) received: Time,
    /// When it was sent to the worker; to that of the prompt, if that was another.
    pub(crate) dispatched: Time,
    /// When that other had answered.
    pub(crate) prefilled: Option<Time>,
    /// When the first event came.
    pub(crate) first: Option<Time>,
    /// Reads the time.
    pub(crate) clock: Clock,
}

impl Extras {
    /// An event with what the client asked for in it.
    pub(super) fn put_into_event(&mut self, event: &Event) -> Bytes {
        let Some(data) = event.data() else {
            return event.raw.clone();
        };
        let chunk = if has_finish(&data) {
            self.closing();
            put(&self.last, self.extra_fields, &data)
        } else {
            self.first.get_or_insert_with(|| self.clock.now());
            put(&self.each, self.extra_fields, &data)
        };
        let mut out = BytesMut::with_capacity(chunk.len() + 8);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&chunk);
        out.extend_from_slice(b"\n\n");
        out.freeze()
    }

    /// A whole answer with what the client asked for in it.
    pub(super) fn put_into_whole(&mut self, answer: &Bytes) -> Bytes {
        self.closing();
        put(&self.last, self.extra_fields, answer).freeze()
    }

    /// The end of the stream, after the `llm_metrics` annotation where the client asked for it.
    pub(super) fn end(&self, done: Bytes, usage: Usage) -> Bytes {
        // An engine without counts gives none.
        if !self.extra_fields.metrics || usage == Usage::default() {
            return done;
        }
        let mut out = BytesMut::new();
        write_llm_metrics(&mut out, &usage);
        out.extend_from_slice(&done);
        out.freeze()
    }

    /// Fills in the times that are known at the end.
    fn closing(&mut self) {
        let (now, received) = (self.clock.now(), self.received);
        let since = |at: Time| Some((at - received).as_secs_f64() * 1e3);
        if let Some(timing) = &mut self.last.timing {
            let ms = |from: Time, to: Time| (to - from).as_secs_f64() * 1e3;
            let prefilled = self.prefilled.or(self.first);
            timing.prefill_time_ms = prefilled.map(|end| ms(self.dispatched, end));
            let handed = self.prefilled.zip(self.first);
            timing.kv_transfer_estimated_latency_ms = handed.map(|(from, to)| ms(from, to));
            timing.ttft_ms = self.first.and_then(since);
            timing.total_time_ms = since(now);
        }
    }
}

/// An answer or a chunk with `nvext` added, with the fields that only the engine knows moved into it.
fn put(nvext: &ResponseNvext, fields: ExtraFields, json: &[u8]) -> BytesMut {
    if !fields.extra.is_of_engine() {
        return nvext.put_into(json);
    }
    let json = Bytes::copy_from_slice(json);
    let mut nvext = nvext.clone();
    let shown = nvext.lift(&json, fields.extra, fields.asks_ids());
    nvext.put_into(shown.as_ref().unwrap_or(&json))
}

/// Whether a chunk says why its choice ended.
fn has_finish(data: &[u8]) -> bool {
    const KEY: &[u8] = b"\"finish_reason\"";
    memchr::memmem::find_iter(data, KEY).any(|at| {
        let rest = data.get(at + KEY.len()..).unwrap_or_default();
        let value = rest.trim_ascii_start().strip_prefix(b":");
        value.is_some_and(|value| value.trim_ascii_start().starts_with(b"\""))
    })
}
