//! How the text of an answer is read: as content, reasoning, and calls of tools.
//!
//! What a request asks for and what the model's card says decide it once; each choice then has a reader of its own.

use kvasir_openai::{AnswerParts, CallPart, ChatRequest, ReasoningField, ToolChoice};
use kvasir_parsers::{
    AnswerEvent, AnswerForm, AnswerParser, CallForm, ReasoningFormat, TextParser as _, ToolFormat,
    ToolSchemas,
};
use kvasir_text::TextModel;
use kvasir_types::Token;
use serde_json::Value;

use crate::App;
use crate::models::answer_formats::AnswerFormats;

/// How the answers to a request are read. By default text is content.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerReading {
    calls: Option<AskedCalls>,
    reasoning: Option<ReasoningFormat>,
    reasoning_off: bool,
    prompt_end: Box<str>,
}

/// Which calls an answer may have.
#[derive(Clone, Debug)]
struct AskedCalls {
    form: AskedForm,
    schemas: ToolSchemas,
    /// More than one.
    parallel: bool,
}

#[derive(Clone, Debug)]
enum AskedForm {
    Native(ToolFormat),
    Named(String),
    Required,
}

impl AnswerReading {
    /// Of a conversation with a model whose workers write so.
    pub(crate) fn of(chat: &ChatRequest, formats: AnswerFormats) -> Self {
        let tools = chat.tools.as_ref();
        let calls = tools.and_then(|tools| {
            let native = || formats.tools.map(AskedForm::Native);
            let form = match &tools.choice {
                ToolChoice::None => None,
                ToolChoice::Named(name) if tools.is_forced => Some(AskedForm::Named(name.clone())),
                ToolChoice::Required if tools.is_forced => Some(AskedForm::Required),
                _ => native(),
            };
            Some(AskedCalls {
                form: form?,
                schemas: ToolSchemas::of_json(tools.list.as_str()),
                parallel: tools.parallel,
            })
        });
        let kwargs = chat
            .template_kwargs
            .as_ref()
            .filter(|_| formats.reasoning.is_some());
        Self {
            calls,
            reasoning: formats.reasoning,
            reasoning_off: kwargs.is_some_and(|kwargs| is_reasoning_off(kwargs.as_str())),
            prompt_end: Box::default(),
        }
    }

    /// After a prompt that ends so.
    pub(crate) fn after(&mut self, prompt_end: &str) {
        self.prompt_end = prompt_end.into();
    }

    /// Special tokens that have to be seen in the text.
    pub(crate) fn visible(&self, text: &TextModel) -> Vec<Token> {
        let calls = self.calls.as_ref().and_then(|calls| match calls.form {
            AskedForm::Native(format) => Some(format.special()),
            AskedForm::Named(_) | AskedForm::Required => None,
        });
        let reasoning = self.reasoning.map(ReasoningFormat::special);
        let marks = [calls, reasoning].into_iter().flatten().flatten();
        marks
            .filter_map(|mark| text.tokenizer().id_of(mark))
            .collect()
    }

    /// What reads one choice.
    pub(crate) fn reader(&self, field: ReasoningField) -> AnswerReader {
        let calls = self.calls.as_ref();
        let form = AnswerForm {
            tools: calls.map(|calls| match &calls.form {
                AskedForm::Native(format) => CallForm::Native(*format, &calls.schemas),
                AskedForm::Named(name) => CallForm::Named(name),
                AskedForm::Required => CallForm::Required(&calls.schemas),
            }),
            reasoning: self.reasoning,
            prompt_end: &self.prompt_end,
            reasoning_off: self.reasoning_off,
        };
        AnswerReader {
            parser: AnswerParser::new(&form).map(Box::new),
            calls_max: match calls.is_some_and(|calls| calls.parallel) {
                true => u32::MAX,
                false => 1,
            },
            field,
            events: Vec::new(),
        }
    }
}

/// Whether a template is told not to let the model think.
fn is_reasoning_off(kwargs: &str) -> bool {
    let kwargs: Value = serde_json::from_str(kwargs).unwrap_or_default();
    let is_off = |name: &str| kwargs.get(name).and_then(Value::as_bool) == Some(false);
    is_off("enable_thinking")
        || is_off("thinking")
        || kwargs.get("thinking_mode").and_then(Value::as_str) == Some("chat")
}

/// Reads the text of one choice.
pub(crate) struct AnswerReader {
    parser: Option<Box<AnswerParser>>,
    /// Calls that the client takes.
    calls_max: u32,
    field: ReasoningField,
    /// Kept to reuse its memory.
    events: Vec<AnswerEvent>,
}

impl AnswerReader {
    /// What more text means; `ended`: none follows.
    pub(crate) fn read(&mut self, text: String, ended: bool, app: &App) -> AnswerParts {
        let Some(parser) = &mut self.parser else {
            return AnswerParts::text(text);
        };
        parser.push(&text, &mut self.events);
        if ended {
            parser.finish(&mut self.events);
        }
        let mut parts = AnswerParts {
            reasoning_field: self.field,
            ..AnswerParts::default()
        };
        for event in self.events.drain(..) {
            match event {
                AnswerEvent::Content(text) => parts.content.push_str(&text),
                AnswerEvent::Reasoning(text) => parts.reasoning.push_str(&text),
                AnswerEvent::CallStart { index, id, name } if index < self.calls_max => {
                    let id =
                        id.unwrap_or_else(|| format!("call-{}", app.observer().new_request_id()));
                    parts.calls.push(CallPart {
                        index,
                        head: Some((id, name)),
                        arguments: String::new(),
                    });
                }
                AnswerEvent::Arguments { index, text } if index < self.calls_max => {
                    match parts.calls.last_mut() {
                        Some(last) if last.index == index => last.arguments.push_str(&text),
                        _ => parts.calls.push(CallPart {
                            index,
                            head: None,
                            arguments: text,
                        }),
                    }
                }
                AnswerEvent::CallEnd { index } if index < self.calls_max => {
                    parts.ended_calls.push(index);
                }
                _ => {}
            }
        }
        parts
    }
}
