//! Harmony, the form of gpt-oss: messages on channels.
//!
//! A message is a header, `<|message|>`, and a body up to a mark. The header names a channel and perhaps a recipient: `analysis` is
//! reasoning, a message to `functions.name` is a call whatever its channel, everything else is content.

use crate::event::{AnswerEvent, TextParser};
use crate::limits::{CALLS_MAX, NAME_BYTES_MAX};
use crate::markers::{Begins, begins, find, partial};

/// Longest header; what goes on without a message is content.
const HEADER_BYTES_MAX: usize = 4 * NAME_BYTES_MAX;
const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
/// Marks that end a body: those that belong to the next message are first.
const ENDS: &[&str] = &[START, CHANNEL, "<|end|>", "<|call|>", "<|return|>"];
/// How many of them do.
const NEXT_MESSAGE: usize = 2;

/// Marks of the form that tokenizers have as special tokens.
pub(crate) const SPECIAL: &[&str] = &[
    START,
    CHANNEL,
    MESSAGE,
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
];

/// Reads messages.
pub(crate) struct Harmony {
    finds_calls: bool,
    finds_reasoning: bool,
    place: Place,
    begun: u32,
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before a message, or text without one.
    Between,
    Header,
    Body(BodyKind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyKind {
    Content,
    Reasoning,
    Call(u32),
}

impl Harmony {
    pub(crate) fn new(finds_calls: bool, finds_reasoning: bool) -> Self {
        Self {
            finds_calls,
            finds_reasoning,
            place: Place::Between,
            begun: 0,
            held: String::new(),
        }
    }

    fn step(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        match self.place {
            Place::Between => match begins(&self.held, &[START, CHANNEL, MESSAGE], at_end) {
                Begins::Unknown => false,
                Begins::With(..) => {
                    self.place = Place::Header;
                    true
                }
                Begins::No => {
                    self.place = Place::Body(BodyKind::Content);
                    true
                }
            },
            Place::Header => self.header(at_end, out),
            Place::Body(kind) => self.body(kind, at_end, out),
        }
    }

    fn header(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        let end = find(&self.held, &[MESSAGE]).filter(|(at, _)| *at <= HEADER_BYTES_MAX);
        let Some((at, _)) = end else {
            let is_over = at_end || self.held.len() > HEADER_BYTES_MAX + MESSAGE.len();
            if is_over {
                // Not to be taken for a mark again.
                let first = self.held.chars().next().map_or(0, char::len_utf8);
                let text: String = self.held.drain(..first).collect();
                AnswerEvent::Content(text).append_to(out);
                self.place = Place::Body(BodyKind::Content);
            }
            return is_over;
        };
        let header = self.held.get(..at).unwrap_or_default();
        let name = recipient(header).filter(|_| self.finds_calls && self.begun < CALLS_MAX);
        let kind = match name {
            Some(name) => {
                let start = AnswerEvent::CallStart {
                    index: self.begun,
                    id: None,
                    name: name.to_owned(),
                };
                start.append_to(out);
                self.begun += 1;
                BodyKind::Call(self.begun - 1)
            }
            None if self.finds_reasoning && channel(header) == "analysis" => BodyKind::Reasoning,
            None => BodyKind::Content,
        };
        self.held.drain(..at + MESSAGE.len());
        self.place = Place::Body(kind);
        true
    }

    fn body(&mut self, kind: BodyKind, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        let end = find(&self.held, ENDS);
        let (shown, mark) = match end {
            Some((at, which)) if which < NEXT_MESSAGE => (at, 0),
            Some((at, which)) => (at, ENDS.get(which).map_or(0, |mark| mark.len())),
            None if at_end => (self.held.len(), 0),
            None => (self.held.len() - partial(&self.held, ENDS), 0),
        };
        let text: String = self.held.drain(..shown).collect();
        self.held.drain(..mark);
        match kind {
            BodyKind::Content => AnswerEvent::Content(text),
            BodyKind::Reasoning => AnswerEvent::Reasoning(text),
            BodyKind::Call(index) => AnswerEvent::Arguments { index, text },
        }
        .append_to(out);
        if end.is_some() {
            if let BodyKind::Call(index) = kind {
                AnswerEvent::CallEnd { index }.append_to(out);
            }
            self.place = Place::Between;
        }
        end.is_some()
    }
}

/// The function that a message is for.
fn recipient(header: &str) -> Option<&str> {
    let (_, after) = header.split_once("to=")?;
    let name = after.split([' ', '<', '\n', '\t']).next()?;
    let name = name.strip_prefix("functions.").unwrap_or(name);
    (!name.is_empty() && name.len() <= NAME_BYTES_MAX).then_some(name)
}

fn channel(header: &str) -> &str {
    let after = header.split_once(CHANNEL).map_or("", |(_, after)| after);
    let name = after.split([' ', '<', '\n', '\t']).next();
    name.unwrap_or_default()
}

impl TextParser for Harmony {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        self.held.push_str(text);
        while self.step(false, out) {}
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        while self.step(true, out) {}
        if let Place::Body(BodyKind::Call(index)) = self.place {
            AnswerEvent::CallEnd { index }.append_to(out);
        }
    }
}
