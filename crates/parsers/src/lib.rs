//! Which part of an answer's text is content, reasoning, or a call of a tool.
//!
//! Models write calls and reasoning into their text, each family in its own form. An [`AnswerParser`] is given that text as it comes and
//! says what it means, as [`AnswerEvent`]s that can be sent on at once.
//!
//! What always holds: the events, joined, do not depend on how the text was cut into pieces; an answer without a call has all its text
//! as content and reasoning, and only the marks of the reasoning are taken out; text that looked like a call and is none becomes content; nothing is held back beyond [`limits`]; no text makes it panic.
//!
//! Elsewhere: tokens and stop strings (`text`), the bytes that a client gets (`openai`), which worker writes in which form (its card).

mod event;
mod forced;
mod formats;
mod gemma;
mod harmony;
mod json_calls;
mod json_value;
mod markers;
mod python;
mod schema;
mod sections;
mod tags;
mod think;
mod tool_calls;

pub use event::{AnswerEvent, TextParser};
pub use formats::{ReasoningFormat, ToolFormat};
pub use schema::ToolSchemas;

/// What is held back at most.
pub mod limits {
    /// Bytes of a text that may become a call, before it is known to be one. More is content.
    pub const HELD_BYTES_MAX: usize = 32 << 10;
    /// Bytes of one argument whose type has to be found out. A longer one is a string.
    pub const VALUE_BYTES_MAX: usize = 256 << 10;
    /// Bytes of a function's name.
    pub const NAME_BYTES_MAX: usize = 256;
    /// Calls in one answer. What follows is content.
    pub const CALLS_MAX: u32 = 128;
    /// White space before a call that has no mark.
    pub const SPACE_BYTES_MAX: usize = 256;
}

use think::Think;

/// How an answer is to be read.
#[derive(Clone, Debug, Default)]
pub struct AnswerForm<'a> {
    /// How calls are written; none if the request has no tools.
    pub tools: Option<CallForm<'a>>,
    /// How reasoning is written.
    pub reasoning: Option<ReasoningFormat>,
    /// The end of the prompt: it may have opened or closed the reasoning.
    pub prompt_end: &'a str,
    /// The request turned reasoning off: all text is content.
    pub reasoning_off: bool,
}

/// How calls are written.
#[derive(Clone, Debug)]
pub enum CallForm<'a> {
    /// As the model is used to; the schemas say of which type arguments are.
    Native(ToolFormat, &'a ToolSchemas),
    /// The worker was made to write nothing but the arguments of this function.
    Named(&'a str),
    /// The worker was made to write nothing but a JSON list of calls.
    Required(&'a ToolSchemas),
}

/// Reads one answer. See the crate.
pub struct AnswerParser {
    think: Option<Think>,
    calls: Option<Box<dyn TextParser>>,
    scratch: Vec<AnswerEvent>,
}

impl AnswerParser {
    /// A parser for an answer of this form; none if there is nothing to look for.
    #[must_use]
    pub fn new(form: &AnswerForm<'_>) -> Option<Self> {
        let is_forced = matches!(form.tools, Some(CallForm::Named(_) | CallForm::Required(_)));
        // A worker that was made to write JSON writes no reasoning.
        let reasoning = form.reasoning.filter(|_| !is_forced && !form.reasoning_off);
        let native = match &form.tools {
            Some(CallForm::Native(format, schemas)) => Some((*format, *schemas)),
            _ => None,
        };
        let is_harmony = reasoning == Some(ReasoningFormat::Harmony)
            || native.is_some_and(|(format, _)| format == ToolFormat::Harmony);
        if is_harmony {
            let harmony = harmony::Harmony::new(native.is_some(), reasoning.is_some());
            return Some(Self::of(None, Some(Box::new(harmony))));
        }
        let calls: Option<Box<dyn TextParser>> = match &form.tools {
            Some(CallForm::Native(format, schemas)) => format.parser(schemas),
            Some(CallForm::Named(name)) => Some(Box::new(forced::NamedCall::new(name))),
            Some(CallForm::Required(schemas)) => Some(forced::required(schemas)),
            None => None,
        };
        let think = reasoning.and_then(|format| {
            let marks = format.marks()?;
            Some(Think::new(marks, form.prompt_end))
        });
        (think.is_some() || calls.is_some()).then(|| Self::of(think, calls))
    }

    fn of(think: Option<Think>, calls: Option<Box<dyn TextParser>>) -> Self {
        Self {
            think,
            calls,
            scratch: Vec::new(),
        }
    }

    /// Hands what the first stage found to the second.
    fn forward(&mut self, out: &mut Vec<AnswerEvent>) {
        for event in self.scratch.drain(..) {
            match (event, &mut self.calls) {
                (AnswerEvent::Content(text), Some(calls)) => calls.push(&text, out),
                (event, _) => event.append_to(out),
            }
        }
    }
}

impl TextParser for AnswerParser {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        match (&mut self.think, &mut self.calls) {
            (Some(think), _) => {
                think.push(text, &mut self.scratch);
                self.forward(out);
            }
            (None, Some(calls)) => calls.push(text, out),
            (None, None) => AnswerEvent::Content(text.to_owned()).append_to(out),
        }
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        if let Some(think) = &mut self.think {
            think.finish(&mut self.scratch);
            self.forward(out);
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(out);
        }
    }
}
