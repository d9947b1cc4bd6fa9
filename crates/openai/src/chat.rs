//! `/v1/chat/completions` for token workers.
//!
//! Answers one question: what did the client ask, every field known and checked? Messages and tools stay the
//! JSON text they were, for the chat template; their shape is checked here so that a template never meets a
//! message without a role.

mod tools;

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use self::tools::{CalledFunction, RawChoice, check_name, check_tools, forced_schema};
pub use self::tools::{ToolChoice, Tools};
use crate::nvext::Nvext;
use crate::object::Object;
use crate::options::{Options, guide, invalid, range};
use crate::strict::{Reader, Unknown, echo};
use crate::{ApiError, JsonError, JsonText};

/// What `response_format` `json_object` asks of an engine.
const ANY_OBJECT: &str = r#"{"json":{"type":"object"}}"#;

/// Messages in one request.
const MESSAGES_MAX: usize = 65_536;

/// A chat request whose every field has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The model's name; never empty.
    pub model: String,
    /// A JSON list of at least one message, each an object with a known `role`.
    pub messages: JsonText,
    /// Functions that the model may call.
    pub tools: Option<Tools>,
    /// A JSON object of variables for the chat template.
    pub template_kwargs: Option<JsonText>,
    /// A JSON list of documents for the chat template.
    pub documents: Option<JsonText>,
    /// End the prompt with the opening of an answer; true unless the client says no.
    pub add_generation_prompt: bool,
    /// Continue the last message and not begin a new one.
    pub continue_final_message: bool,
    /// How hard to think, for templates that know it.
    pub reasoning_effort: Option<String>,
    /// What chat and completions share.
    pub options: Options,
    /// The extension object; empty when absent.
    pub nvext: Nvext,
}

/// Fields of chat alone that are read past: nothing that we or a token worker do depends on them.
const ACCEPTED_WITHOUT_EFFECT: &[&str] = &[
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prediction",
    "verbosity",
    "web_search_options",
];

impl ChatRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// 400 with the field, what was expected, and where.
    pub fn parse(body: &[u8], unknown: Unknown) -> Result<Self, ApiError> {
        let object = Object::parse(body)?;
        let mut body = Reader::new(&object)?;
        let messages = Self::messages(&mut body)?;
        let model: String = body.need("model")?;
        let nvext = Nvext::take(&mut body)?;
        let raw = Options::read(&mut body)?;
        let limits = Limits::read(&mut body)?;
        let (tools, choice) = (
            body.list("tools")?,
            body.take::<RawChoice<'_>>("tool_choice")?,
        );
        let tools_text = body.json("tools");
        let parallel = body.take("parallel_tool_calls")?.unwrap_or(true);
        let mut request = Self {
            template_kwargs: kwargs(&mut body)?,
            documents: body.json("documents"),
            add_generation_prompt: body.take("add_generation_prompt")?.unwrap_or(true),
            continue_final_message: body.take("continue_final_message")?.unwrap_or(false),
            reasoning_effort: body.take("reasoning_effort")?,
            tools: check_tools(&body, tools, choice)?
                .zip(tools_text)
                .map(|(choice, list)| Tools {
                    list,
                    choice,
                    parallel,
                    is_forced: false,
                }),
            options: raw.check(limits.max_tokens, limits.logprobs()?, limits.guided()?)?,
            model: check_model(model)?,
            messages,
            nvext,
        };
        request.force_calls();
        for ignored in ACCEPTED_WITHOUT_EFFECT {
            body.raw(ignored);
        }
        check_modalities(&body.take::<Vec<String>>("modalities")?.unwrap_or_default())?;
        body.finish(unknown)?;
        Ok(request)
    }

    /// A call that is demanded is demanded of the engine: as a schema, unless the client has one of its own.
    fn force_calls(&mut self) {
        if let (Some(tools), None) = (&mut self.tools, &self.options.guided)
            && let Some(schema) = forced_schema(tools)
        {
            self.options.guided = Some(guide("json", &schema));
            tools.is_forced = true;
        }
    }

    fn messages(body: &mut Reader<'_, '_>) -> Result<JsonText, ApiError> {
        let list = body.list("messages")?;
        let (Some(list), Some(text)) = (list, body.json("messages")) else {
            return Err(body.missing("messages").into());
        };
        if list.is_empty() {
            return invalid(
                "The 'messages' field cannot be empty. At least one message is required.",
            );
        }
        if list.len() > MESSAGES_MAX {
            return invalid(format_args!(
                "a request may have {MESSAGES_MAX} messages, got {}",
                list.len()
            ));
        }
        for (i, raw) in list.iter().enumerate() {
            let message: Message<'_> = serde_json::from_str(raw.get())
                .map_err(|e| body.within(&format!("messages[{i}]"), raw.get(), &e))?;
            message.check(i)?;
        }
        Ok(text)
    }
}

/// Fields whose meaning chat defines its own way.
struct Limits<'a> {
    max_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    response_format: Option<ResponseFormat<'a>>,
}

impl<'a> Limits<'a> {
    fn read(body: &mut Reader<'_, 'a>) -> Result<Self, JsonError> {
        let old: Option<u32> = body.take("max_tokens")?;
        let new: Option<u32> = body.take("max_completion_tokens")?;
        Ok(Self {
            max_tokens: new.or(old),
            logprobs: body.take("logprobs")?,
            top_logprobs: body.take("top_logprobs")?,
            response_format: body.take("response_format")?,
        })
    }

    fn logprobs(&self) -> Result<Option<u32>, ApiError> {
        range("Top_logprobs", self.top_logprobs, 0..=20)?;
        match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => Ok(Some(top.unwrap_or(0))),
            (_, Some(1..)) => invalid("`top_logprobs` needs `logprobs` to be true"),
            _ => Ok(None),
        }
    }

    fn guided(&self) -> Result<Option<JsonText>, ApiError> {
        let Some(format) = &self.response_format else {
            return Ok(None);
        };
        match format.kind {
            FormatKind::Text => Ok(None),
            FormatKind::JsonObject => Ok(Some(JsonText::from_checked(ANY_OBJECT))),
            FormatKind::JsonSchema => {
                let schema = format.json_schema.as_ref();
                if schema.is_none_or(|s| s.name.as_deref().unwrap_or_default().is_empty()) {
                    return invalid("`response_format.json_schema.name` cannot be empty");
                }
                let Some(schema) = schema.and_then(|s| s.schema) else {
                    return invalid(
                        "`response_format.json_schema.schema` is required for type `json_schema`",
                    );
                };
                let schema = JsonText::from_checked(schema.get());
                Ok(Some(guide("json", &schema)))
            }
        }
    }
}

#[derive(Deserialize)]
struct ResponseFormat<'a> {
    #[serde(rename = "type")]
    kind: FormatKind,
    #[serde(borrow, default)]
    json_schema: Option<JsonSchema<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum FormatKind {
    Text,
    JsonObject,
    JsonSchema,
}

#[derive(Deserialize)]
struct JsonSchema<'a> {
    #[serde(borrow, default)]
    name: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

/// The shape of a message; unknown fields of a message are the template's business.
#[derive(Deserialize)]
#[serde(expecting = "a message object")]
struct Message<'a> {
    role: Role,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<ToolCall<'a>>>,
}

#[derive(Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Role {
    Developer,
    System,
    User,
    Assistant,
    Tool,
    Function,
}

#[derive(Deserialize)]
struct ToolCall<'a> {
    #[serde(borrow)]
    function: CalledFunction<'a>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
}

impl Message<'_> {
    fn check(&self, i: usize) -> Result<(), ApiError> {
        for call in self.tool_calls.iter().flatten() {
            check_name(&call.function.name)?;
        }
        let text = self.content.map_or("null", RawValue::get);
        match text.as_bytes().first() {
            Some(b'"') => Ok(()),
            Some(b'[') => check_parts(i, text),
            Some(b'n') if self.role == Role::Assistant => Ok(()),
            Some(b'n') => invalid(format_args!("messages[{i}].content is required")),
            _ => invalid(format_args!(
                "messages[{i}].content must be a string or a list of parts"
            )),
        }
    }
}

fn check_parts(i: usize, text: &str) -> Result<(), ApiError> {
    let parts: Vec<Part<'_>> = match serde_json::from_str(text) {
        Ok(parts) => parts,
        Err(_) => {
            return invalid(format_args!(
                "messages[{i}].content must be a list of objects with a `type`"
            ));
        }
    };
    for part in parts {
        match &*part.kind {
            "text" | "refusal" | "thinking" => {
                if part.kind == "text" && !part.text.is_some_and(|t| t.get().starts_with('"')) {
                    return invalid(format_args!(
                        "messages[{i}].content has a text part without `text`"
                    ));
                }
            }
            other => {
                return invalid(format_args!(
                    "messages[{i}].content has a part of type `{}`; workers of this model take text",
                    echo(other)
                ));
            }
        }
    }
    Ok(())
}

pub(crate) fn check_model(model: String) -> Result<String, ApiError> {
    if model.trim().is_empty() {
        return invalid("Model cannot be empty");
    }
    Ok(model)
}

fn check_modalities(wanted: &[String]) -> Result<(), ApiError> {
    match wanted.iter().find(|m| *m != "text") {
        Some(other) => invalid(format_args!(
            "modalities may hold `text` only, got `{}`",
            echo(other)
        )),
        None => Ok(()),
    }
}

/// `chat_template_kwargs`, or the peer's older name for it.
fn kwargs(body: &mut Reader<'_, '_>) -> Result<Option<JsonText>, ApiError> {
    let new = body.json("chat_template_kwargs");
    let kwargs = body.json("chat_template_args").or(new);
    if kwargs
        .as_ref()
        .is_some_and(|k| !k.as_str().starts_with('{'))
    {
        return invalid("chat_template_kwargs must be an object");
    }
    Ok(kwargs)
}
