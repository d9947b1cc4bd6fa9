//! Chat templates.
//!
//! Answers one question: which prompt does the model's own template make of a conversation? Templates are
//! Jinja as the `transformers` library runs it: blocks trimmed, Python's methods and its way of printing,
//! `raise_exception`, `strftime_now`, `tojson`.
//!
//! Invariants: a template is compiled once; rendering reads no clock and no file; what a template raises for the
//! client is told apart from its own failures. Templates come with a model, so they are input: parsing one takes a bounded
//! stack (`bounds`), running one a bounded number of steps, bytes and levels (`meter`, `guards`).

mod bounds;
mod guards;
mod meter;
mod program;
mod python;
mod shapes;
mod text_use;

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use crate::chat::{ChatInput, ContentStyle, Dialect, bad, messages, tools};
use crate::error::{LoadError, TextError};
use crate::pyvalue::{self, JsonStyle};
use crate::strftime;
pub use meter::Effort;
use program::Program;
pub use shapes::RenderedPrompt;
use shapes::ShapeCache;
use text_use::TextRequirements;

/// The name under which templates for requests with tools are kept.
const TOOL_USE: &str = "tool_use";
const DEFAULT: &str = "default";
/// Deepest indentation that `tojson` makes.
const INDENT_MAX: usize = 16;
/// Frames inside each other; a macro counts as several. What that takes of the stack, any thread has.
const RECURSION_MAX: usize = 200;
/// Marks the end of a message that is to be continued.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A model's template, compiled.
pub struct ChatTemplate {
    /// By name.
    programs: BTreeMap<String, Program>,
    /// For each [`Effort`].
    brief: Environment<'static>,
    full: Environment<'static>,
    style: ContentStyle,
    specials: Vec<(String, Value)>,
    /// For templates that do not look inside texts.
    shapes: Option<ShapeCache>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({:?})", self.style)
    }
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateException(String);

impl ChatTemplate {
    /// Compiles the templates of a model, by name; `specials` are its special tokens (`bos_token`, …).
    ///
    /// # Errors
    /// A template that does not parse.
    pub fn new(
        templates: Vec<(String, String)>,
        specials: Vec<(String, String)>,
    ) -> Result<Self, LoadError> {
        let mut environment = environment();
        let mut requirements = Some(TextRequirements::default());
        let mut programs = BTreeMap::new();
        for (name, source) in templates {
            let source = without_generation_marks(&source);
            let mut program =
                Program::compile(&source, &syntax()).map_err(|reason| LoadError::Parse {
                    path: format!("chat template `{name}`").into(),
                    reason,
                })?;
            requirements = requirements.and_then(|all| Some(all.and(program.requirements.take()?)));
            guards::add_for(&mut environment, &program);
            programs.insert(name, program);
        }
        let with_fuel = |effort: Effort| {
            let mut environment = environment.clone();
            environment.set_fuel(Some(effort.fuel()));
            environment
        };
        let specials = specials
            .into_iter()
            .map(|(key, token)| (key, Value::from(token)))
            .collect();
        let mut template = Self {
            programs,
            brief: with_fuel(Effort::Brief),
            full: with_fuel(Effort::Full),
            style: ContentStyle::Text,
            specials,
            shapes: requirements.map(ShapeCache::new),
        };
        template.style = template.detect_style();
        Ok(template)
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// The conversation is no JSON list of messages, the template refuses it, or it fails.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        self.rendered(input, Effort::Full)
            .map(RenderedPrompt::into_text)
    }

    /// As [`ChatTemplate::render`], with where texts begin, and with no more effort than this.
    pub(crate) fn rendered(
        &self,
        input: &ChatInput<'_>,
        effort: Effort,
    ) -> Result<RenderedPrompt, TextError> {
        let style = match (self.style, input.dialect) {
            (ContentStyle::Parts, Dialect::Vllm) => ContentStyle::PartsOnly,
            (style, _) => style,
        };
        let render = |messages: &str| self.render_messages(messages, style, input, effort);
        match &self.shapes {
            Some(shapes) if style != ContentStyle::PartsOnly => shapes.render(input, render),
            _ => render(input.messages).map(RenderedPrompt::from),
        }
    }

    /// Runs the template with these messages and everything else of `input`.
    fn render_messages(
        &self,
        json: &str,
        style: ContentStyle,
        input: &ChatInput<'_>,
        effort: Effort,
    ) -> Result<String, TextError> {
        let mut list = messages(json, style)?;
        if input.continue_final_message
            && let Some(last) = list.last_mut()
        {
            last.append(CONTINUE_TAG);
        }
        let list: Value = list.into_iter().map(|m| m.into_value()).collect();
        let context = self.context(input, list)?;
        let terms = (effort, input.bytes());
        let rendered = self.render_with(input.tools.is_some(), context, terms)?;
        Ok(if input.continue_final_message {
            cut_at_tag(rendered)
        } else {
            rendered
        })
    }

    fn context(&self, input: &ChatInput<'_>, messages: Value) -> Result<Value, TextError> {
        let mut vars = self.specials.clone();
        let mut set = |key: &str, value: Value| vars.push((key.to_owned(), value));
        set("messages", messages);
        let prompt = input.add_generation_prompt && !input.continue_final_message;
        set("add_generation_prompt", Value::from(prompt));
        let tools = input.tools.map(|json| tools(json, input.dialect));
        set("tools", tools.transpose()?.unwrap_or_else(none));
        let documents = input.documents.map(serde_json::from_str::<Value>);
        let documents = documents.transpose().map_err(|e| bad("documents", &e))?;
        set("documents", documents.unwrap_or_else(none));
        if let Some(effort) = input.reasoning_effort {
            set("reasoning_effort", Value::from(effort));
        }
        let now = input.now_unix;
        let strftime = move |pattern: String| strftime::format(now, &pattern);
        set("strftime_now", Value::from_function(strftime));
        if let Some(kwargs) = input.kwargs {
            let kwargs: Value = serde_json::from_str(kwargs).map_err(|e| bad("kwargs", &e))?;
            for key in kwargs.try_iter().into_iter().flatten() {
                let value = kwargs.get_item(&key).unwrap_or_default();
                vars.push((key.to_string(), value));
            }
        }
        Ok(Value::from_pairs(vars))
    }

    fn render_with(
        &self,
        with_tools: bool,
        context: Value,
        (effort, bytes): (Effort, usize),
    ) -> Result<String, TextError> {
        let tool_use = self.programs.get(TOOL_USE).filter(|_| with_tools);
        let program = tool_use.or_else(|| self.programs.get(DEFAULT));
        let program = program.ok_or(TextError::NoTemplate)?;
        let environment = match effort {
            Effort::Brief => &self.brief,
            Effort::Full => &self.full,
        };
        let rendered = program.run(environment, context, effort, bytes);
        rendered.map_err(|e| failure(&e))
    }

    /// Shows the template a message in parts. If the text comes out whole and nothing of the parts' own
    /// structure does, the template reads parts.
    fn detect_style(&self) -> ContentStyle {
        const PROBE: &str = "kvasir-probe";
        let messages =
            format!(r#"[{{"role":"user","content":[{{"type":"text","text":"{PROBE}"}}]}}]"#);
        let input = ChatInput::default();
        let rendered = messages_as_parts(&messages)
            .and_then(|list| self.context(&input, list))
            .and_then(|context| self.render_with(false, context, (Effort::Full, messages.len())));
        match rendered {
            Ok(text) if text.contains(PROBE) && !text.contains("'text'") => ContentStyle::Parts,
            _ => ContentStyle::Text,
        }
    }
}

fn messages_as_parts(json: &str) -> Result<Value, TextError> {
    let list = messages(json, ContentStyle::Parts)?;
    Ok(list.into_iter().map(|m| m.into_value()).collect())
}

fn none() -> Value {
    Value::from(())
}

fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .unwrap_or_default()
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python::method);
    env.set_formatter(|out, _, value| {
        if let Some(text) = value.as_str() {
            meter::charge(text.len() as u64)?;
            return out.write_str(text).map_err(Error::from);
        }
        meter::charge_all(value)?;
        let mut text = String::new();
        pyvalue::print(&mut text, value);
        out.write_str(&text).map_err(Error::from)
    });
    env.set_recursion_limit(RECURSION_MAX);
    guards::add_to(&mut env);
    env.add_filter("tojson", to_json);
    env.add_filter("length", python::length);
    env.add_filter("count", python::length);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raised")
                .with_source(TemplateException(message)))
        },
    );
    env
}

#[expect(clippy::needless_pass_by_value, reason = "the form that filters have")]
fn to_json(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let given = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get("indent")?,
    };
    let indent = given
        .filter(|v| !v.is_none())
        .map(usize::try_from)
        .transpose()?;
    let style = JsonStyle {
        indent: indent.map(|i| i.min(INDENT_MAX)),
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    // Indentation may be more than what is indented.
    for _ in 0..=style.indent.unwrap_or(0) {
        meter::charge_all(value)?;
    }
    let mut out = String::new();
    pyvalue::json(&mut out, value, style, 0);
    Ok(Value::from_safe_string(out))
}

/// The text before the mark; a template that trims contents has taken the mark's own space away.
fn cut_at_tag(rendered: String) -> String {
    let Some(at) = rendered.rfind(CONTINUE_TAG.trim_end()) else {
        return rendered;
    };
    let head = &rendered[..at];
    if rendered[at..].starts_with(CONTINUE_TAG) {
        head.to_owned()
    } else {
        head.trim_end().to_owned()
    }
}

/// `transformers` marks the model's own words with a block of its own; it prints nothing.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        // Not in `{%}`, where one sign would be of both.
        let inside = open + 2;
        let Some(len) = rest[inside..].find("%}") else {
            break;
        };
        let end = inside + len + 2;
        let inner = rest[inside..end - 2].trim_matches(['-', '+', ' ', '\n', '\t']);
        out.push_str(&rest[..open]);
        if inner == "generation" || inner == "endgeneration" {
            let tag = &rest[open..end];
            let (left, right) = (tag.starts_with("{%-"), tag.ends_with("-%}"));
            out.push_str(match (left, right) {
                (true, true) => "{%- if false -%}{%- endif -%}",
                (true, false) => "{%- if false %}{% endif %}",
                (false, true) => "{% if false %}{% endif -%}",
                (false, false) => "{% if false %}{% endif %}",
            });
        } else {
            out.push_str(&rest[open..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

fn failure(error: &Error) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TooMuch(describe(error));
    }
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(TemplateException(message)) = inner.downcast_ref() {
            return TextError::Refused(message.clone());
        }
        source = inner.source();
    }
    TextError::Template(describe(error))
}

fn describe(error: &Error) -> String {
    match error.line() {
        Some(line) => format!("{error} (template line {line})"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
