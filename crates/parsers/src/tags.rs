//! Calls as elements, one for each argument: Qwen3-Coder, MiniMax, DeepSeek V3.2, GLM.
//!
//! The arguments become a JSON object as they come. One that is text by its schema is passed on at once; the others wait for their end,
//! because their type is found out by reading them.

use crate::json_value::escape_into;
use crate::limits::{NAME_BYTES_MAX, VALUE_BYTES_MAX};
use crate::markers::{Begins, begins, find, partial};
use crate::schema::{ToolSchemas, Types};
use crate::tool_calls::{Calls, Grammar, Step, space};

/// How one family writes its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TagForm {
    /// Marks that open a section; one that opens a function at once is last.
    pub(crate) openers: &'static [&'static str],
    pub(crate) closers: &'static [&'static str],
    /// Before a function's name; empty: the name follows the section's mark.
    pub(crate) function_open: &'static str,
    pub(crate) function_close: &'static str,
    /// Before an argument's name.
    pub(crate) key_open: &'static str,
    /// After it.
    pub(crate) key_close: &'static str,
    /// Before its value, if that does not follow the name.
    pub(crate) value_open: &'static str,
    pub(crate) value_close: &'static str,
    /// A line break after the opening and before the closing mark of a value does not belong to it.
    pub(crate) has_lines: bool,
}

/// Reads such calls.
pub(crate) struct TagCalls {
    form: TagForm,
    schemas: ToolSchemas,
    place: Place,
    function: String,
    arguments: u32,
    types: Types,
    is_new_value: bool,
    /// A value whose type is found out at its end.
    value: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Section,
    FunctionName,
    Arguments,
    Key,
    ValueOpen,
    Value,
}

impl TagCalls {
    pub(crate) fn new(form: TagForm, schemas: &ToolSchemas) -> Self {
        Self {
            form,
            schemas: schemas.clone(),
            place: Place::Section,
            function: String::new(),
            arguments: 0,
            types: Types::TEXT,
            is_new_value: false,
            value: String::new(),
        }
    }

    /// Between two functions.
    fn section(&mut self, text: &str, at_end: bool) -> Step {
        if text.is_empty() && at_end {
            return Step::Leave(0);
        }
        if let Some(step) = space(text) {
            return step;
        }
        if self.form.function_open.is_empty() {
            return Step::Leave(0);
        }
        match begins(text, &[self.form.function_open], at_end) {
            Begins::With(_, bytes) => {
                self.place = Place::FunctionName;
                return Step::Take(bytes);
            }
            Begins::Unknown => return Step::More,
            Begins::No => {}
        }
        match begins(text, self.form.closers, at_end) {
            Begins::With(_, bytes) => Step::Leave(bytes),
            Begins::Unknown => Step::More,
            Begins::No => Step::Leave(0),
        }
    }

    fn function_name(&mut self, text: &str, calls: &mut Calls<'_>) -> Step {
        let is_named_by_mark = self.form.function_open.is_empty();
        let ends = match is_named_by_mark {
            true => &[self.form.key_open, self.form.function_close][..],
            false => &[">"],
        };
        let Some((at, _)) = find(text, ends) else {
            return match text.len() > 2 * NAME_BYTES_MAX {
                true => Step::Fail,
                false => Step::More,
            };
        };
        let name = unquoted(text.get(..at).unwrap_or_default());
        if !calls.start(name, None) {
            return Step::Fail;
        }
        calls.arguments("{");
        name.clone_into(&mut self.function);
        (self.place, self.arguments) = (Place::Arguments, 0);
        Step::Take(at + usize::from(!is_named_by_mark))
    }

    /// Between two arguments.
    fn arguments(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            // The marks at the end did not come.
            if text.is_empty() && at_end {
                calls.arguments("}");
            }
            return step;
        }
        let marks = [self.form.key_open, self.form.function_close];
        let step = match begins(text, &marks, at_end) {
            Begins::With(0, bytes) => {
                self.place = Place::Key;
                return Step::Take(bytes);
            }
            Begins::With(_, bytes) if self.form.closers.contains(&self.form.function_close) => {
                Step::Leave(bytes)
            }
            Begins::With(_, bytes) => Step::Take(bytes),
            Begins::Unknown => return Step::More,
            Begins::No => Step::Take(0),
        };
        calls.arguments("}");
        calls.end();
        self.place = Place::Section;
        step
    }

    fn key(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        let Some((at, _)) = find(text, &[self.form.key_close]) else {
            if at_end || text.len() > 4 * NAME_BYTES_MAX {
                calls.arguments("}");
                calls.end();
                return Step::Fail;
            }
            return Step::More;
        };
        let head = text.get(..at).unwrap_or_default();
        let (key, attributes) = match head.trim_start().strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => (head.trim(), ""),
        };
        self.types = match attributes.trim() {
            "string=\"true\"" => Types::TEXT,
            "string=\"false\"" => Types::JSON,
            _ => self.schemas.types(&self.function, key),
        };
        let mut json = match self.arguments {
            0 => "\"".to_owned(),
            _ => ",\"".to_owned(),
        };
        escape_into(key, &mut json);
        json.push_str("\":");
        calls.arguments(&json);
        self.arguments += 1;
        let takes = at + self.form.key_close.len();
        match self.form.value_open.is_empty() {
            true => self.open_value(calls),
            false => self.place = Place::ValueOpen,
        }
        Step::Take(takes)
    }

    fn value_open(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            if text.is_empty() && at_end {
                calls.arguments("null}");
            }
            return step;
        }
        match begins(text, &[self.form.value_open], at_end) {
            Begins::With(_, bytes) => {
                self.open_value(calls);
                Step::Take(bytes)
            }
            Begins::Unknown => Step::More,
            Begins::No => {
                calls.arguments("null}");
                calls.end();
                Step::Fail
            }
        }
    }

    fn open_value(&mut self, calls: &mut Calls<'_>) {
        self.is_new_value = true;
        self.value.clear();
        self.place = Place::Value;
        if self.types.is_text() {
            calls.arguments("\"");
        }
    }

    fn value(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if self.is_new_value && (at_end || !text.is_empty()) {
            self.is_new_value = false;
            if self.form.has_lines && text.starts_with('\n') {
                return Step::Take(1);
            }
        }
        // Its own mark, and the function's, should its own be missing.
        let ends = [self.form.value_close, self.form.function_close];
        let (shown, used, is_over) = match find(text, &ends) {
            Some((at, 0)) => (at, at + self.form.value_close.len(), true),
            Some((at, _)) => (at, at, true),
            None if at_end => (text.len(), text.len(), true),
            None => {
                let shown = text.len() - partial(text, &ends);
                let certain = text.get(..shown).unwrap_or_default();
                let line = self.form.has_lines && certain.ends_with('\n');
                (shown - usize::from(line), shown - usize::from(line), false)
            }
        };
        let piece = text.get(..shown).unwrap_or_default();
        let piece = match self.form.has_lines && is_over {
            true => piece.strip_suffix('\n').unwrap_or(piece),
            false => piece,
        };
        self.add(piece, is_over, calls);
        match used {
            0 if !is_over => Step::More,
            used => Step::Take(used),
        }
    }

    /// More of a value.
    fn add(&mut self, piece: &str, is_over: bool, calls: &mut Calls<'_>) {
        let mut json = String::with_capacity(piece.len() + 2);
        if !self.types.is_text() {
            self.value.push_str(piece);
            if is_over {
                json = self.types.to_json(&self.value);
            } else if self.value.len() > VALUE_BYTES_MAX {
                // Too long to be looked at: a text.
                self.types = Types::TEXT;
                json.push('"');
                escape_into(&std::mem::take(&mut self.value), &mut json);
            }
        } else {
            escape_into(piece, &mut json);
            if is_over {
                json.push('"');
            }
        }
        calls.arguments(&json);
        if is_over {
            self.place = Place::Arguments;
        }
    }
}

fn unquoted(text: &str) -> &str {
    let text = text.trim();
    let inner = text
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    inner.unwrap_or(text)
}

impl Grammar for TagCalls {
    fn openers(&self) -> &[&'static str] {
        self.form.openers
    }

    fn enter(&mut self, opener: Option<usize>) {
        let mark = opener.and_then(|which| self.form.openers.get(which));
        let is_function = mark.is_some_and(|mark| *mark == self.form.function_open);
        self.place = match is_function || self.form.function_open.is_empty() {
            true => Place::FunctionName,
            false => Place::Section,
        };
    }

    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        match self.place {
            Place::Section => self.section(text, at_end),
            Place::FunctionName => self.function_name(text, calls),
            Place::Arguments => self.arguments(text, at_end, calls),
            Place::Key => self.key(text, at_end, calls),
            Place::ValueOpen => self.value_open(text, at_end, calls),
            Place::Value => self.value(text, at_end, calls),
        }
    }
}
