//! Answers to chat and completions, whole and streamed.
//!
//! Answers one question: which bytes tell the client what the model said? What repeats in every chunk of a
//! stream is formatted once; a chunk then costs two copies and the escaping of its text.
//!
//! Invariants: the first chunk of a chat choice carries the role; a choice's last chunk has an empty delta and
//! the finish reason; the usage chunk has no choice; every frame is complete.

use bytes::{Bytes, BytesMut};
use kvasir_types::{FinishReason, RequestId};

use crate::json::{Fields, write_int, write_json_str};
use crate::logprobs::{TokenLogprob, write_chat, write_completion};
use crate::nvext::ResponseNvext;
use crate::parts::AnswerParts;
use crate::usage::Usage;

/// Which API an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl-",
        }
    }
}

/// What every chunk of an answer repeats.
#[derive(Clone, Copy, Debug)]
pub struct AnswerHead<'a> {
    /// Which API.
    pub endpoint: Endpoint,
    /// The request.
    pub id: RequestId,
    /// The model's name as the client gave it.
    pub model: &'a str,
    /// When it was made, Unix seconds.
    pub created: u64,
}

impl AnswerHead<'_> {
    /// Appends `{"id":"…","choices":[`.
    fn open(&self, out: &mut BytesMut) {
        out.extend_from_slice(b"{\"id\":\"");
        out.extend_from_slice(self.endpoint.id_prefix().as_bytes());
        out.extend_from_slice(self.id.to_string().as_bytes());
        out.extend_from_slice(b"\",\"choices\":[");
    }

    /// Appends `],"created":…,"model":…,"object":…`, the brace still open.
    fn close_choices(&self, out: &mut BytesMut, streaming: bool) {
        out.extend_from_slice(b"],\"created\":");
        write_int(out, self.created);
        out.extend_from_slice(b",\"model\":");
        write_json_str(out, self.model);
        out.extend_from_slice(match (self.endpoint, streaming) {
            (Endpoint::Chat, true) => b",\"object\":\"chat.completion.chunk\"".as_slice(),
            (Endpoint::Chat, false) => b",\"object\":\"chat.completion\"",
            (Endpoint::Completions, _) => {
                b",\"system_fingerprint\":null,\"object\":\"text_completion\""
            }
        });
    }
}

/// One finished choice of a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The text, and what a chat choice has beside it; one without text has `null` content.
    pub parts: AnswerParts,
    /// Why it ended; none only for a query that ran nothing.
    pub finish: Option<FinishReason>,
    /// Log probabilities, when asked for and known.
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// Appends a whole answer; choices are numbered in order. A query that ran nothing has no usage.
pub fn write_unary(
    out: &mut BytesMut,
    head: &AnswerHead<'_>,
    choices: &[Choice],
    usage: Option<&Usage>,
    nvext: &ResponseNvext,
) {
    head.open(out);
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            out.extend_from_slice(b",");
        }
        write_choice(out, head.endpoint, index as u64, choice);
    }
    head.close_choices(out, false);
    if let Some(usage) = usage {
        out.extend_from_slice(b",\"usage\":");
        usage.write(out, head.endpoint);
    }
    nvext.write_field(out);
    out.extend_from_slice(b"}");
}

fn write_choice(out: &mut BytesMut, endpoint: Endpoint, index: u64, choice: &Choice) {
    let mut fields = Fields::open(out);
    if endpoint == Endpoint::Completions {
        fields.str("text", &choice.parts.content);
    }
    fields.int("index", index);
    if endpoint == Endpoint::Chat {
        let mut message = Fields::open(fields.key("message"));
        if choice.parts.content.is_empty() {
            message.raw("content", "null");
        } else {
            message.str("content", &choice.parts.content);
        }
        message.raw("refusal", "null");
        choice.parts.write_calls(&mut message, false);
        message.str("role", "assistant");
        choice.parts.write_reasoning(&mut message);
        message.close();
    }
    let has_calls = !choice.parts.calls.is_empty();
    write_finish(fields.key("finish_reason"), choice.finish, has_calls);
    let logprobs = fields.key("logprobs");
    match (&choice.logprobs, endpoint) {
        (None, _) => logprobs.extend_from_slice(b"null"),
        (Some(tokens), Endpoint::Chat) => write_chat(logprobs, tokens),
        (Some(tokens), Endpoint::Completions) => write_completion(logprobs, tokens, 0),
    }
    fields.close();
}

/// A cancelled answer reads as stopped, one that stopped after calls as made for them; an engine's failure is an error frame and not a
/// finish reason.
fn write_finish(out: &mut BytesMut, finish: Option<FinishReason>, has_calls: bool) {
    out.extend_from_slice(match finish {
        None => b"null".as_slice(),
        Some(FinishReason::Stop) if has_calls => b"\"tool_calls\"",
        Some(FinishReason::Length) => b"\"length\"",
        Some(FinishReason::Stop | FinishReason::Cancelled) => b"\"stop\"",
        Some(FinishReason::Error) => b"\"error\"",
    });
}

/// Where a choice of a stream stands.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    started: bool,
    has_calls: bool,
    chars: usize,
}

/// Writes the frames of one streamed answer, for all its choices.
#[derive(Clone, Debug)]
pub struct StreamWriter {
    endpoint: Endpoint,
    /// `data: {"id":"…","choices":[`
    lead: Bytes,
    /// `],"created":…,"object":"…"`
    tail: Bytes,
    choices: Vec<Progress>,
}

impl StreamWriter {
    /// A writer for an answer of `choices` choices.
    #[must_use]
    pub fn new(head: &AnswerHead<'_>, choices: u32) -> Self {
        let mut lead = BytesMut::from(&b"data: "[..]);
        head.open(&mut lead);
        let mut tail = BytesMut::new();
        head.close_choices(&mut tail, true);
        Self {
            endpoint: head.endpoint,
            lead: lead.freeze(),
            tail: tail.freeze(),
            choices: vec![Progress::default(); choices as usize],
        }
    }

    /// Appends a frame with new parts of choice `index`. They may be empty when the frame is for its `nvext`.
    pub fn parts(
        &mut self,
        out: &mut BytesMut,
        index: u32,
        parts: &AnswerParts,
        logprobs: Option<&[TokenLogprob]>,
        nvext: &ResponseNvext,
    ) {
        self.frame(out, index, Some(parts), None, logprobs, nvext);
    }

    /// Appends the frame that ends choice `index`.
    pub fn finish(
        &mut self,
        out: &mut BytesMut,
        index: u32,
        reason: FinishReason,
        nvext: &ResponseNvext,
    ) {
        self.frame(out, index, None, Some(reason), None, nvext);
    }

    /// Appends the one frame of a query that ran nothing: a role and the answer's `nvext`.
    pub fn query(&mut self, out: &mut BytesMut, nvext: &ResponseNvext) {
        self.frame(out, 0, None, None, None, nvext);
    }

    /// Appends the usage frame, which has no choice.
    pub fn usage(&self, out: &mut BytesMut, usage: &Usage, nvext: &ResponseNvext) {
        out.extend_from_slice(&self.lead);
        out.extend_from_slice(&self.tail);
        out.extend_from_slice(b",\"usage\":");
        usage.write(out, self.endpoint);
        nvext.write_field(out);
        out.extend_from_slice(b"}\n\n");
    }

    fn frame(
        &mut self,
        out: &mut BytesMut,
        index: u32,
        parts: Option<&AnswerParts>,
        finish: Option<FinishReason>,
        logprobs: Option<&[TokenLogprob]>,
        nvext: &ResponseNvext,
    ) {
        let text = parts.map(|parts| parts.content.as_str());
        let before = match self.choices.get_mut(index as usize) {
            Some(progress) => {
                let before = *progress;
                progress.started = true;
                progress.has_calls |= parts.is_some_and(|parts| !parts.calls.is_empty());
                progress.chars += text.map_or(0, |t| t.chars().count());
                before
            }
            None => Progress::default(),
        };
        out.reserve(self.lead.len() + self.tail.len() + text.map_or(0, str::len) + 96);
        out.extend_from_slice(&self.lead);
        match self.endpoint {
            Endpoint::Chat => write_delta(out, index, parts, !before.started),
            Endpoint::Completions => write_piece(out, index, text.unwrap_or_default()),
        }
        out.extend_from_slice(b",\"finish_reason\":");
        write_finish(out, finish, before.has_calls);
        out.extend_from_slice(b",\"logprobs\":");
        match (logprobs, self.endpoint) {
            (None, _) => out.extend_from_slice(b"null"),
            (Some(tokens), Endpoint::Chat) => write_chat(out, tokens),
            (Some(tokens), Endpoint::Completions) => write_completion(out, tokens, before.chars),
        }
        out.extend_from_slice(b"}");
        out.extend_from_slice(&self.tail);
        nvext.write_field(out);
        out.extend_from_slice(b"}\n\n");
    }
}

/// Appends `{"index":0,"delta":{…}`, the outer brace still open.
fn write_delta(out: &mut BytesMut, index: u32, parts: Option<&AnswerParts>, first: bool) {
    out.extend_from_slice(b"{\"index\":");
    write_int(out, u64::from(index));
    out.extend_from_slice(b",\"delta\":");
    let mut delta = Fields::open(out);
    if let Some(parts) = parts {
        parts.write_delta(&mut delta);
    }
    if first {
        delta.str("role", "assistant");
    }
    delta.close();
}

/// Appends `{"text":"…","index":0`, the brace still open.
fn write_piece(out: &mut BytesMut, index: u32, text: &str) {
    out.extend_from_slice(b"{\"text\":");
    write_json_str(out, text);
    out.extend_from_slice(b",\"index\":");
    write_int(out, u64::from(index));
}
