//! What an answer consists of beside its text: reasoning and calls of tools.
//!
//! Answers one question: how does a client see them, whole and as deltas? A call begins with its index, id and name; what follows has the
//! index and more of the arguments.

use bytes::BytesMut;

use crate::json::{Fields, write_int};

/// Response field that carries reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningField {
    /// `reasoning_content`, as most engines name it.
    #[default]
    ReasoningContent,
    /// `reasoning`, as newer clients expect it.
    Reasoning,
}

impl ReasoningField {
    const fn name(self) -> &'static str {
        match self {
            Self::ReasoningContent => "reasoning_content",
            Self::Reasoning => "reasoning",
        }
    }
}

/// New parts of one choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerParts {
    /// Text for the user.
    pub content: String,
    /// Text that the model wrote for itself.
    pub reasoning: String,
    /// The field that carries it.
    pub reasoning_field: ReasoningField,
    /// Calls that begin or go on.
    pub calls: Vec<CallPart>,
    /// Numbers of calls that are complete. Clients see it by what follows.
    pub ended_calls: Vec<u32>,
}

/// A call that begins or goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallPart {
    /// Its number in the answer.
    pub index: u32,
    /// Its id and the function's name, where it begins.
    pub head: Option<(String, String)>,
    /// More of its arguments.
    pub arguments: String,
}

impl AnswerParts {
    /// Nothing but text.
    #[must_use]
    pub fn text(content: String) -> Self {
        Self {
            content,
            ..Self::default()
        }
    }

    /// Whether there is nothing to tell.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// Adds what came next.
    pub fn extend(&mut self, more: Self) {
        self.content.push_str(&more.content);
        self.reasoning.push_str(&more.reasoning);
        self.reasoning_field = more.reasoning_field;
        self.ended_calls.extend(more.ended_calls);
        for part in more.calls {
            match self.calls.last_mut() {
                Some(last) if last.index == part.index && part.head.is_none() => {
                    last.arguments.push_str(&part.arguments);
                }
                _ => self.calls.push(part),
            }
        }
    }

    /// Writes all fields of a delta but its role.
    pub(crate) fn write_delta(&self, delta: &mut Fields<'_>) {
        let is_other = !self.reasoning.is_empty() || !self.calls.is_empty();
        if !self.content.is_empty() || !is_other {
            delta.str("content", &self.content);
        }
        self.write_calls(delta, true);
        self.write_reasoning(delta);
    }

    /// Writes what a whole message has beside its content.
    pub(crate) fn write_calls(&self, message: &mut Fields<'_>, is_delta: bool) {
        if self.calls.is_empty() {
            return;
        }
        let out = message.key("tool_calls");
        out.extend_from_slice(b"[");
        for (at, call) in self.calls.iter().enumerate() {
            if at > 0 {
                out.extend_from_slice(b",");
            }
            call.write(out, is_delta);
        }
        out.extend_from_slice(b"]");
    }

    pub(crate) fn write_reasoning(&self, fields: &mut Fields<'_>) {
        if !self.reasoning.is_empty() {
            fields.str(self.reasoning_field.name(), &self.reasoning);
        }
    }
}

impl CallPart {
    fn write(&self, out: &mut BytesMut, is_delta: bool) {
        let mut fields = Fields::open(out);
        if is_delta {
            write_int(fields.key("index"), u64::from(self.index));
        }
        if let Some((id, _)) = &self.head {
            fields.str("id", id);
            fields.str("type", "function");
        }
        let mut function = Fields::open(fields.key("function"));
        if let Some((_, name)) = &self.head {
            function.str("name", name);
        }
        function.str("arguments", &self.arguments);
        function.close();
        fields.close();
    }
}
