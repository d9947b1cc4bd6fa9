//! Reads an engine's answer and makes the bytes for the client.
//!
//! What always holds: the client gets the engine's bytes in the engine's order. Only four things change them:
//! usage and tokens that we asked for and the client did not are left out, names of caches become `null`, `nvext` and
//! annotations are added where the client asked for them, and the chunks of a resumed answer take over the id of its first part. However the engine's bytes are split
//! into reads, the client gets whole events. A stream of a completion ends with `[DONE]`: what comes after it is not read.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes, BytesMut};
use kvasir_openai::resume::{ChunkKind, Graft, Progress};
use kvasir_openai::{
    Event, EventParser, TransferFilter, Usage, WorkerIds, find_usage, without_transfer,
    without_usage, write_done,
};
use kvasir_types::WorkerRank;
use kvasir_upstream::{UpstreamBody, UpstreamError};

use super::extras::Extras;

/// Largest event that is looked into; of a larger one only names of caches are taken out.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// Longest answer that is kept back until it is complete; a longer one passes as it comes.
const HELD_BYTES_MAX: usize = 4 << 20;

/// Whether an event says that the engine failed. Only what begins as an error is parsed.
fn is_failure(event: &Event) -> bool {
    let begins = |with: &[u8]| event.raw.starts_with(with);
    let may_be = begins(b"data: {\"error\"") || begins(b"data:{\"error\"");
    let kind = || Some(Progress::default().add_chunk(&event.data()?));
    may_be && kind() == Some(ChunkKind::Failure)
}

/// Which usage the client did not ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HiddenUsage {
    /// None: the client gets all.
    None,
    /// That of each chunk; the last one's is the client's.
    Chunks,
    /// All.
    All,
}

/// What is needed to resume an answer at another engine.
#[derive(Debug, Default)]
pub(crate) struct ResumeState {
    /// What the client has received.
    pub(crate) progress: Progress,
    /// Fits chunks of this engine to those of the engine that failed.
    graft: Option<Graft>,
}

impl ResumeState {
    /// Whether the answer was resumed.
    pub(crate) fn is_grafted(&self) -> bool {
        self.graft.is_some()
    }

    /// The state for another engine, which goes on with the answer or starts over; none if nothing has come that could be resumed.
    /// Where nothing but comments came there is nothing to go on from: the next answer is passed on as it is.
    pub(crate) fn grafted(self, starts_over: bool) -> Option<Self> {
        if starts_over && self.progress.is_empty() {
            return Some(self);
        }
        let graft = match starts_over {
            true => Graft::starting_over(&self.progress),
            false => Graft::new(&self.progress),
        };
        Some(Self {
            graft: Some(graft?),
            progress: self.progress,
        })
    }
}

/// How an answer is read.
#[derive(Debug)]
pub(crate) enum Form {
    /// Server-sent events of a completion.
    Events {
        /// The usage that the client did not ask for.
        hide: HiddenUsage,
        /// What is put into each.
        extras: Option<Box<Extras>>,
        /// The connection's end is the only end of the body.
        until_close: bool,
    },
    /// A completion in one piece.
    Whole(Option<Box<Extras>>),
    /// Any other body, which is not parsed.
    Opaque,
}

impl Form {
    /// Another worker resumes the answer: the client is told which.
    pub(crate) fn served_by(&mut self, target: WorkerRank) {
        let (Self::Events { extras, .. } | Self::Whole(extras)) = self else {
            return;
        };
        if let Some(extras) = extras {
            let ids = WorkerIds::aggregated(target.worker.0, target.rank.0);
            for nvext in [&mut extras.each, &mut extras.last] {
                nvext.worker_id = nvext.worker_id.is_some().then_some(ids);
            }
        }
    }

    /// Whether the connection's end is the only end of the body.
    pub(crate) fn set_until_close(&mut self, only: bool) {
        if let Self::Events { until_close, .. } = self {
            *until_close = only;
        }
    }
}

/// The first bytes for the client.
#[derive(Debug)]
pub(crate) enum FirstBytes {
    /// The whole answer.
    Whole(Bytes),
    /// Its beginning; the rest comes from [`Source::poll_bytes`].
    Partial(Bytes),
}

/// Pieces and events of an answer that are worth one unit of the runtime's budget for a task: an engine that sends
/// millions of tiny ones must not keep the thread to itself.
const PIECES_PER_UNIT: u32 = 64;
/// Events that are looked into before what came of them is passed on.
const EVENTS_AT_ONCE: u32 = 4096;
/// Events of a stream that may carry no token: the role, the end, the usage.
const EVENTS_WITHOUT_TOKEN: u32 = 3;

/// Bytes of events after which no more are waited for that were read with them.
const GATHERED_BYTES_MAX: usize = 64 << 10;

/// Bytes that go on together: one piece as it came, or a copy of several.
#[derive(Default)]
struct Gathered {
    single: Bytes,
    joined: BytesMut,
}

impl Gathered {
    fn add(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.single = piece;
            return;
        }
        self.joined
            .extend_from_slice(&std::mem::take(&mut self.single));
        self.joined.extend_from_slice(&piece);
    }

    fn len(&self) -> usize {
        self.single.len() + self.joined.len()
    }

    fn into_bytes(self) -> Bytes {
        match self.single.is_empty() {
            true => self.joined.freeze(),
            false => self.single,
        }
    }
}

/// Whether the client got an event unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unchanged(bool);

/// Reads an engine's answer.
pub(crate) struct Source {
    body: UpstreamBody,
    form: Form,
    parser: EventParser,
    /// What the engine counted.
    pub(crate) usage: Usage,
    /// Takes names of caches out of what is not looked into otherwise; none where the answer is no text.
    filter: Option<Box<TransferFilter>>,
    /// They were taken out of an answer in one piece, or may be out of one that is passed on as it comes.
    pub(crate) is_cleaned: bool,
    /// An event was too large to be looked into.
    is_oversized: bool,
    /// Events that came, `[DONE]` not counted.
    pub(crate) events: u32,
    /// Pieces and events since the last unit of the task's budget.
    pieces: u32,
    /// More events have come than were looked into.
    has_more_events: bool,
    /// Why nothing more comes, while the client gets what came before.
    broken: Option<UpstreamError>,
    /// `[DONE]` came.
    done: bool,
    /// An event said that the engine failed, and was passed on.
    failed: bool,
    /// The last event ended with CR: an LF that comes now is its end, too. It is passed on if the CR was.
    half_end: Option<Unchanged>,
    /// The event with the usage of the whole answer was passed on.
    sent_usage: bool,
    /// What is needed to resume it elsewhere; none if it cannot be.
    pub(crate) resume: Option<Box<ResumeState>>,
    /// The text so far, where the next turn is to be prefilled.
    text: Option<Box<Progress>>,
    /// The error event of the engine, held back while another engine may resume the answer.
    pub(crate) error_event: Option<Bytes>,
}

impl Source {
    /// Reads `body` as `form` says; `resume` keeps what is needed to resume it elsewhere.
    pub(crate) fn new(body: UpstreamBody, form: Form, resume: Option<Box<ResumeState>>) -> Self {
        Self {
            resume,
            sent_usage: false,
            text: None,
            error_event: None,
            body,
            form,
            parser: EventParser::new(EVENT_BYTES_MAX),
            usage: Usage::default(),
            filter: None,
            is_cleaned: false,
            is_oversized: false,
            events: 0,
            pieces: 0,
            has_more_events: false,
            broken: None,
            done: false,
            failed: false,
            half_end: None,
        }
    }

    /// The answer is text, in which an engine may name caches. Call it before the first bytes.
    pub(crate) fn filter_text(&mut self, is_text: bool) {
        self.filter = is_text.then(Box::default);
    }

    /// Bytes that are not looked into otherwise, as the client gets them.
    fn filtered(&mut self, bytes: Bytes) -> Bytes {
        match &mut self.filter {
            Some(filter) => filter.push(bytes),
            None => bytes,
        }
    }

    /// Keeps the text of the answer, if `keep`. Call it before the first bytes.
    pub(crate) fn keep_text(&mut self, keep: bool) {
        self.text = (keep && self.is_events()).then(Box::default);
    }

    /// The text of the answer, if it was kept, is complete and is text alone.
    pub(crate) fn kept_text(&self) -> Option<&str> {
        let text = self.text.as_ref()?;
        let whole = text.is_finished() && text.obstacle().is_none();
        whole.then(|| text.text())
    }

    /// How the answer is read; what comes from now on is not looked into.
    pub(crate) fn take_form(&mut self) -> Form {
        std::mem::replace(&mut self.form, Form::Opaque)
    }

    /// Tokens that have come, as the engine says or at least as many as its events show.
    pub(crate) fn tokens(&self) -> u32 {
        match self.usage.completion_tokens {
            0 => self.events.saturating_sub(EVENTS_WITHOUT_TOKEN),
            counted => u32::try_from(counted).unwrap_or(u32::MAX),
        }
    }

    /// Whether it was resumed: its counts are then those of the whole answer.
    pub(crate) fn is_grafted(&self) -> bool {
        self.resume.as_ref().is_some_and(|t| t.is_grafted())
    }

    /// Whether the client waits for a usage event that has not come.
    pub(crate) fn owes_usage(&self) -> bool {
        let Form::Events { hide, .. } = &self.form else {
            return false;
        };
        *hide != HiddenUsage::All && !self.sent_usage
    }

    /// Whether `[DONE]` came.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether an event that the client has got says that the engine failed.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed
    }

    /// Whether the first event was that one: the client could have all of the answer from another engine.
    pub(crate) fn begins_with_failure(&self) -> bool {
        self.failed && self.events == 1
    }

    /// The body as it comes from the engine.
    pub(crate) fn body(&self) -> &UpstreamBody {
        &self.body
    }

    /// Closes the connection: the engine stops working on this answer.
    pub(crate) fn close(&mut self) {
        self.body.close();
    }

    /// Whether the client has received all bytes of a body of known length.
    pub(crate) fn is_ended(&self) -> bool {
        !self.is_events() && self.body.is_ended()
    }

    /// Whether an error can be told in the client's stream.
    pub(crate) fn is_events(&self) -> bool {
        matches!(self.form, Form::Events { .. })
    }

    /// Whether the client may get other bytes than the engine sent.
    pub(crate) fn is_edited(&self) -> bool {
        match &self.form {
            Form::Events { .. } => true,
            Form::Whole(extras) => extras.is_some() || self.is_cleaned,
            Form::Opaque => self.filter.is_some(),
        }
    }

    /// Waits for the first bytes that the client can get: a first event, or all of a short answer. Until then another worker can
    /// answer instead.
    pub(crate) async fn first_bytes(&mut self) -> Result<FirstBytes, UpstreamError> {
        if let Form::Whole(_) = self.form {
            return self.hold().await;
        }
        match poll_fn(|cx| self.poll_bytes(cx)).await {
            Some(Ok(bytes)) => Ok(FirstBytes::Partial(bytes)),
            Some(Err(UpstreamError::ErrorEvent)) => Ok(FirstBytes::Whole(self.take_failure())),
            Some(Err(error)) => Err(error),
            None if self.is_events() => Err(UpstreamError::Unfinished),
            None => Ok(FirstBytes::Whole(Bytes::new())),
        }
    }

    /// Waits for the second event of a stream that began so: the first one has no token. An error is one here, whoever could resume the answer.
    pub(crate) async fn first_content(
        &mut self,
        first: FirstBytes,
    ) -> Result<FirstBytes, UpstreamError> {
        let FirstBytes::Partial(mut held) = first else {
            return Ok(first);
        };
        while self.is_events() && self.events < 2 && !self.done && !self.failed {
            match poll_fn(|cx| self.poll_bytes(cx)).await {
                Some(Ok(bytes)) => held = Bytes::from([&held[..], &bytes].concat()),
                Some(Err(error)) => return Err(error),
                None => return Err(UpstreamError::Unfinished),
            }
        }
        match self.failed {
            true => Err(UpstreamError::ErrorEvent),
            false => Ok(FirstBytes::Partial(held)),
        }
    }

    /// The error event that was held back, as the client gets it if nobody resumes the answer.
    pub(crate) fn take_failure(&mut self) -> Bytes {
        let mut out = BytesMut::from(&*self.error_event.take().unwrap_or_default());
        write_done(&mut out);
        (self.failed, self.done) = (true, true);
        self.close();
        out.freeze()
    }

    async fn hold(&mut self) -> Result<FirstBytes, UpstreamError> {
        let mut held = Gathered::default();
        while let Some(data) = poll_fn(|cx| self.body.poll_data(cx)).await {
            held.add(data?);
            if held.len() > HELD_BYTES_MAX {
                self.is_cleaned = self.filter.is_some();
                return Ok(FirstBytes::Partial(self.filtered(held.into_bytes())));
            }
        }
        let held = held.into_bytes();
        self.usage = find_usage(&held).map(|c| c.usage).unwrap_or_default();
        let shown = without_transfer(&held);
        self.is_cleaned = shown.is_some();
        let held = shown.unwrap_or(held);
        Ok(FirstBytes::Whole(match &mut self.form {
            Form::Whole(Some(extras)) => extras.put_into_whole(&held),
            _ => held,
        }))
    }

    /// The next bytes for the client, never empty; `None` at the end.
    pub(crate) fn poll_bytes(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        loop {
            if self.done {
                return Poll::Ready(None);
            }
            std::task::ready!(self.poll_budget(cx));
            if self.error_event.is_some() {
                return Poll::Ready(Some(Err(UpstreamError::ErrorEvent)));
            }
            if let Some(error) = self.broken.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if std::mem::take(&mut self.has_more_events) {
                let bytes = self.whole_events(Gathered::default()).into_bytes();
                if !bytes.is_empty() {
                    return Poll::Ready(Some(Ok(bytes)));
                }
                continue;
            }
            match std::task::ready!(self.body.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.pieces += 1;
                    let bytes = match self.form {
                        Form::Events { .. } => {
                            self.parser.push(data);
                            self.events_at_hand(cx)
                        }
                        _ => self.filtered(data),
                    };
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(self.end()),
            }
        }
    }

    /// Pays for the pieces and events that came; others are let in between where the task's budget is used up.
    fn poll_budget(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.pieces >= PIECES_PER_UNIT {
            let unit = std::task::ready!(tokio::task::coop::poll_proceed(cx));
            unit.made_progress();
            self.pieces -= PIECES_PER_UNIT;
        }
        Poll::Ready(())
    }

    /// What is left when the body has ended.
    fn end(&mut self) -> Option<Result<Bytes, UpstreamError>> {
        let until_close = matches!(
            self.form,
            Form::Events {
                until_close: true,
                ..
            }
        );
        if until_close && !self.done {
            return Some(Err(UpstreamError::Unfinished));
        }
        if self.resume.is_some() && !self.done {
            // A stream that can be resumed is not complete without `[DONE]`.
            return Some(Err(UpstreamError::Unfinished));
        }
        let rest = self.take_rest();
        let mut rest = self.filtered(rest);
        if let Some(filter) = &mut self.filter {
            rest = [&rest[..], &filter.finish()].concat().into();
        }
        (!rest.is_empty()).then_some(Ok(rest))
    }

    /// The whole events that came, as the client gets them; may be empty. What else was read with them goes with them: pieces that the
    /// client gets one by one cost it and us a write each.
    fn events_at_hand(&mut self, cx: &mut Context<'_>) -> Bytes {
        let mut events = self.whole_events(Gathered::default());
        while !self.done
            && self.error_event.is_none()
            && !self.has_more_events
            && self.pieces < EVENTS_AT_ONCE
            && events.len() < GATHERED_BYTES_MAX
            && self.body.has_unparsed()
        {
            match self.body.poll_data(cx) {
                Poll::Ready(Some(Ok(data))) => {
                    self.pieces += 1;
                    self.parser.push(data);
                    events = self.whole_events(events);
                }
                Poll::Ready(Some(Err(error))) => {
                    self.broken = Some(error);
                    break;
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        events.into_bytes()
    }

    /// Adds the whole events that came, as the client gets them.
    fn whole_events(&mut self, mut events: Gathered) -> Gathered {
        let most = self.pieces.saturating_add(EVENTS_AT_ONCE);
        while !self.done {
            if self.pieces >= most {
                self.has_more_events = true;
                break;
            }
            let raw = match self.parser.next_event() {
                Ok(Some(event)) => {
                    self.pieces += 1;
                    self.pass_on(event)
                }
                Ok(None) => break,
                // Too large to look into: it passes as it is.
                Err(_) => {
                    self.is_oversized = true;
                    Some(self.take_rest())
                }
            };
            let raw = match self.is_oversized {
                true => raw.map(|raw| self.filtered(raw)),
                false => raw,
            };
            if let Some(raw) = raw {
                events.add(raw);
            }
        }
        if self.done {
            self.finish();
        }
        events
    }

    /// `[DONE]` came: the connection is kept if nothing but the end of the body follows.
    fn finish(&mut self) {
        let rest = self.parser.take_rest();
        match rest.trim_ascii().is_empty() {
            true => self.body.finish(),
            false => self.body.close(),
        }
    }

    /// One event as the client gets it, and what was missing of the last one's end. A CR ends a line at once; the LF
    /// that belongs to it may come with the next bytes, when the event has been passed on, left out or written anew.
    fn pass_on(&mut self, event: Event) -> Option<Bytes> {
        let Event { mut raw } = event;
        let end = self.half_end.take().filter(|_| raw.starts_with(b"\n"));
        if end.is_some() {
            raw.advance(1);
        }
        let half = raw.ends_with(b"\r");
        let splits_line_end = half && memchr::memchr(b'\n', &raw).is_some();
        let mut out = self.look(Event { raw });
        if self.done && splits_line_end {
            // Nothing more is read: the other half is ours to write.
            out = out.map(|out| [&*out, b"\n"].concat().into());
        } else if half {
            let as_it_came = out.as_ref().is_some_and(|out| out.ends_with(b"\r"));
            self.half_end = Some(Unchanged(as_it_came));
        }
        match end {
            Some(Unchanged(true)) => Some([b"\n", &*out.unwrap_or_default()].concat().into()),
            _ => out,
        }
    }

    /// What is no whole event.
    fn take_rest(&mut self) -> Bytes {
        let mut rest = self.parser.take_rest();
        if self.half_end.take() == Some(Unchanged(false)) && rest.starts_with(b"\n") {
            rest.advance(1);
        }
        rest
    }

    /// One event as the client gets it; none if it is not for the client.
    fn look(&mut self, event: Event) -> Option<Bytes> {
        if !self.is_events() || self.error_event.is_some() || event.is_blank() {
            return (self.error_event.is_none()).then_some(event.raw);
        }
        if event.is_done() {
            self.done = true;
            return Some(self.last_event(event.raw));
        }
        self.events = self.events.saturating_add(1);
        self.failed |= self.resume.is_none() && is_failure(&event);
        let event = self.follow(event)?;
        let event = without_transfer(&event.raw).map_or(event, |raw| Event { raw });
        if let (Some(text), Some(data)) = (&mut self.text, event.data()) {
            text.add_chunk(&data);
        }
        let Form::Events { hide, extras, .. } = &mut self.form else {
            return Some(event.raw);
        };
        let found = event.data().and_then(|data| find_usage(&data));
        let mut shown = None;
        if let Some(chunk) = found {
            self.usage = chunk.usage;
            self.sent_usage |= chunk.only_usage;
            match (*hide, chunk.only_usage) {
                (HiddenUsage::All, true) => return None,
                (HiddenUsage::All | HiddenUsage::Chunks, false) => shown = without_usage(&event),
                (HiddenUsage::None | HiddenUsage::Chunks, _) => {}
            }
        }
        let event = shown.map_or(event, |raw| Event { raw });
        Some(match extras {
            Some(extras) => extras.put_into_event(&event),
            None => event.raw,
        })
    }

    /// `[DONE]` as the client gets it.
    fn last_event(&self, done: Bytes) -> Bytes {
        let Form::Events {
            extras: Some(extras),
            ..
        } = &self.form
        else {
            return done;
        };
        extras.end(done, self.usage)
    }

    /// Updates the state for resuming, where there is one; none if the event is not for the client.
    fn follow(&mut self, event: Event) -> Option<Event> {
        let Some(resume) = &mut self.resume else {
            return Some(event);
        };
        let event = match &mut resume.graft {
            Some(graft) => graft.event(event)?,
            None => event,
        };
        let seen = event.data().map(|data| resume.progress.add_chunk(&data));
        if seen == Some(ChunkKind::Failure) {
            self.error_event = Some(event.raw);
            return None;
        }
        Some(event)
    }
}
