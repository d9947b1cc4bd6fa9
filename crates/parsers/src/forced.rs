//! Calls that a worker was made to write: its answer is JSON and nothing else.

use crate::event::{AnswerEvent, TextParser};
use crate::json_calls::{JsonCalls, JsonForm};
use crate::schema::ToolSchemas;
use crate::tool_calls::CallParser;

/// The answer is a list of calls.
const LIST: JsonForm = JsonForm {
    openers: &[],
    closers: &[],
    bare: &['[', '{'],
    name_first: None,
};

/// The answer is a list of calls of these functions.
pub(crate) fn required(schemas: &ToolSchemas) -> Box<dyn TextParser> {
    Box::new(CallParser::new(JsonCalls::new(LIST, schemas)))
}

/// The answer is the arguments of one function.
pub(crate) struct NamedCall {
    name: String,
    has_begun: bool,
}

impl NamedCall {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            has_begun: false,
        }
    }
}

impl TextParser for NamedCall {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        let text = match self.has_begun {
            true => text,
            false => text.trim_start(),
        };
        if text.is_empty() {
            return;
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            let start = AnswerEvent::CallStart {
                index: 0,
                id: None,
                name: std::mem::take(&mut self.name),
            };
            start.append_to(out);
        }
        let arguments = AnswerEvent::Arguments {
            index: 0,
            text: text.to_owned(),
        };
        arguments.append_to(out);
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        if self.has_begun {
            AnswerEvent::CallEnd { index: 0 }.append_to(out);
        }
    }
}
