//! Tools of a chat request: which there are, and which must be called.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::options::invalid;
use crate::strict::{Reader, echo};
use crate::{ApiError, JsonText};

/// Tools in one request.
const TOOLS_MAX: usize = 1536;
/// Length of a function's name.
const NAME_CHARS_MAX: usize = 96;

/// Functions that the model may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tools {
    /// A JSON list of `{"type":"function","function":{…}}`.
    pub list: JsonText,
    /// `auto`, `none`, `required`, or the name of one function.
    pub choice: ToolChoice,
    /// Whether more than one may be called.
    pub parallel: bool,
    /// The worker is made to write the calls as JSON: the choice demands one.
    pub is_forced: bool,
}

/// Whether and which function must be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None may be called.
    None,
    /// Some function must be called.
    Required,
    /// This function must be called.
    Named(String),
}

/// A function by its name.
#[derive(Deserialize)]
pub(super) struct CalledFunction<'a> {
    #[serde(borrow)]
    pub(super) name: Cow<'a, str>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected `none`, `auto`, `required` or a named function"
)]
pub(super) enum RawChoice<'a> {
    Word(Cow<'a, str>),
    Named {
        #[serde(borrow)]
        function: CalledFunction<'a>,
    },
}

#[derive(Deserialize)]
#[serde(expecting = "a tool object")]
struct Tool<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    function: CalledFunction<'a>,
}

/// A tool as a schema is made from it; the schema's own text is kept, for its order matters to engines.
#[derive(Deserialize)]
struct ToolSchema<'a> {
    #[serde(borrow)]
    function: FunctionSchema<'a>,
}

#[derive(Deserialize)]
struct FunctionSchema<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
}

impl FunctionSchema<'_> {
    fn parameters(&self) -> &str {
        match self.parameters.map(RawValue::get) {
            None | Some("null") => r#"{"type":"object","properties":{}}"#,
            Some(schema) => schema,
        }
    }

    /// A call of it.
    fn call(&self) -> String {
        let name = serde_json::Value::from(&*self.name);
        format!(
            r#"{{"properties":{{"name":{{"type":"string","enum":[{name}]}},"parameters":{}}},"required":["name","parameters"]}}"#,
            self.parameters()
        )
    }
}

/// What an answer must be like for a choice that demands a call: the arguments of one function, or a list of calls.
pub(super) fn forced_schema(tools: &Tools) -> Option<JsonText> {
    let list: Vec<ToolSchema<'_>> = match &tools.choice {
        ToolChoice::Auto | ToolChoice::None => return None,
        _ => serde_json::from_str(tools.list.as_str()).ok()?,
    };
    if let ToolChoice::Named(name) = &tools.choice {
        let named = list.iter().find(|tool| tool.function.name == *name)?;
        return Some(JsonText::from_checked(named.function.parameters()));
    }
    let calls: Vec<String> = list.iter().map(|tool| tool.function.call()).collect();
    Some(JsonText::from_checked(&format!(
        r#"{{"type":"array","minItems":1,"items":{{"type":"object","anyOf":[{}]}}}}"#,
        calls.join(",")
    )))
}

pub(super) fn check_tools(
    body: &Reader<'_, '_>,
    tools: Option<Vec<&RawValue>>,
    choice: Option<RawChoice<'_>>,
) -> Result<Option<ToolChoice>, ApiError> {
    let tools = tools.unwrap_or_default();
    if tools.len() > TOOLS_MAX {
        return invalid(format_args!(
            "a request may have {TOOLS_MAX} tools, got {}",
            tools.len()
        ));
    }
    let mut names = Vec::with_capacity(tools.len());
    for (i, raw) in tools.iter().enumerate() {
        let tool: Tool<'_> = serde_json::from_str(raw.get())
            .map_err(|e| body.within(&format!("tools[{i}]"), raw.get(), &e))?;
        if tool.kind != "function" {
            return invalid(format_args!("tools[{i}].type must be `function`"));
        }
        check_name(&tool.function.name)?;
        names.push(tool.function.name.into_owned());
    }
    let choice = check_choice(choice, &names)?;
    Ok((!tools.is_empty()).then_some(choice))
}

fn check_choice(choice: Option<RawChoice<'_>>, names: &[String]) -> Result<ToolChoice, ApiError> {
    let choice = match choice {
        None => return Ok(ToolChoice::Auto),
        Some(RawChoice::Word(word)) => match &*word {
            "auto" => return Ok(ToolChoice::Auto),
            "none" => return Ok(ToolChoice::None),
            "required" => ToolChoice::Required,
            other => {
                return invalid(format_args!(
                    "tool_choice must be `none`, `auto`, `required` or a named function, got `{}`",
                    echo(other)
                ));
            }
        },
        Some(RawChoice::Named { function }) => {
            if !names.iter().any(|n| *n == function.name) {
                return invalid(format_args!(
                    "tool_choice names `{}`, which is not in `tools`",
                    echo(&function.name)
                ));
            }
            ToolChoice::Named(function.name.into_owned())
        }
    };
    if names.is_empty() {
        return invalid("tool_choice needs `tools`");
    }
    Ok(choice)
}

pub(super) fn check_name(name: &str) -> Result<(), ApiError> {
    if name.is_empty() || name.chars().count() > NAME_CHARS_MAX {
        return invalid(format_args!(
            "a function's name must have 1 to {NAME_CHARS_MAX} characters, got `{}`",
            echo(name)
        ));
    }
    Ok(())
}
