//! Calls as Python writes them: `[name(a=1, b="x"), other()]`.
//!
//! There is no mark, so the functions have to be those of the request. A call is passed on when it is complete.

use serde_json::{Map, Value};

use crate::limits::NAME_BYTES_MAX;
use crate::markers::{Begins, begins};
use crate::schema::ToolSchemas;
use crate::tool_calls::{Calls, Grammar, Step};

/// Deepest nesting of lists and dictionaries.
const DEPTH_MAX: u32 = 32;
const OPENERS: &[&str] = &["<|python_start|>"];
const CLOSERS: &[&str] = &["<|python_end|>"];

/// Reads such calls.
pub(crate) struct PythonCalls {
    schemas: ToolSchemas,
    place: Place,
    name: String,
    scan: ArgumentScan,
    /// Bytes of the arguments that were looked at.
    scanned: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Begin,
    Name,
    Arguments,
    Between,
    End,
}

/// Follows the text up to the parenthesis that closes it.
#[derive(Clone, Copy, Debug, Default)]
struct ArgumentScan {
    depth: u32,
    quote: Option<char>,
    escaped: bool,
}

impl ArgumentScan {
    /// Whether this character closes the call.
    fn is_end(&mut self, c: char) -> bool {
        if let Some(quote) = self.quote {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                _ if c == quote => self.quote = None,
                _ => {}
            }
            return false;
        }
        match c {
            '"' | '\'' => self.quote = Some(c),
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' if self.depth > 0 => self.depth -= 1,
            ')' => return true,
            _ => {}
        }
        false
    }
}

impl PythonCalls {
    pub(crate) fn new(schemas: &ToolSchemas) -> Self {
        Self {
            schemas: schemas.clone(),
            place: Place::Begin,
            name: String::new(),
            scan: ArgumentScan::default(),
            scanned: 0,
        }
    }

    fn name(&mut self, text: &str) -> Step {
        let Some(c) = text.chars().next() else {
            return Step::More;
        };
        match c {
            '(' if self.schemas.has(&self.name) => {
                (self.scan, self.scanned) = (ArgumentScan::default(), 0);
                self.place = Place::Arguments;
                Step::Take(1)
            }
            ' ' | '\n' if self.name.is_empty() => Step::Take(1),
            _ if (c.is_alphanumeric() || "_.-".contains(c)) && self.name.len() < NAME_BYTES_MAX => {
                self.name.push(c);
                Step::Take(c.len_utf8())
            }
            _ => Step::Fail,
        }
    }

    fn arguments(&mut self, text: &str, calls: &mut Calls<'_>) -> Step {
        let new = text.get(self.scanned..).unwrap_or_default();
        for (at, c) in new.char_indices() {
            if !self.scan.is_end(c) {
                continue;
            }
            let end = self.scanned + at;
            let inner = text.get(..end).unwrap_or_default();
            let Some(arguments) = Literal::new(inner).arguments() else {
                return Step::Fail;
            };
            if !calls.start(&self.name, None) {
                return Step::Fail;
            }
            calls.arguments(&Value::Object(arguments).to_string());
            calls.end();
            self.place = Place::Between;
            return Step::Take(end + 1);
        }
        self.scanned = text.len();
        Step::More
    }
}

impl Grammar for PythonCalls {
    fn openers(&self) -> &[&'static str] {
        OPENERS
    }

    fn bare(&self) -> &[char] {
        &['[']
    }

    fn enter(&mut self, _: Option<usize>) {
        self.place = Place::Begin;
    }

    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        let first = text.chars().next();
        match (self.place, first) {
            (Place::Between | Place::End, None) if at_end => Step::Leave(0),
            (_, None) => Step::More,
            (Place::Begin, Some('[')) => {
                self.name.clear();
                self.place = Place::Name;
                Step::Take(1)
            }
            (Place::Begin | Place::End, Some(c)) if c.is_whitespace() => Step::Take(c.len_utf8()),
            (Place::Begin, Some(_)) => Step::Fail,
            (Place::Name, _) => self.name(text),
            (Place::Arguments, _) => self.arguments(text, calls),
            (Place::Between, Some(',')) => {
                self.name.clear();
                self.place = Place::Name;
                Step::Take(1)
            }
            (Place::Between, Some(']')) => {
                self.place = Place::End;
                Step::Take(1)
            }
            (Place::Between, Some(c)) if c.is_whitespace() => Step::Take(c.len_utf8()),
            (Place::Between, Some(_)) => Step::Leave(0),
            (Place::End, Some(_)) => match begins(text, CLOSERS, at_end) {
                Begins::With(_, bytes) => Step::Leave(bytes),
                Begins::Unknown => Step::More,
                Begins::No => Step::Leave(0),
            },
        }
    }
}

/// Python's literals.
struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    /// `a=1, b="x"`, to its end.
    fn arguments(mut self) -> Option<Map<String, Value>> {
        let mut arguments = Map::new();
        loop {
            self.skip();
            if self.rest.is_empty() {
                return Some(arguments);
            }
            let (key, rest) = self.rest.split_once('=')?;
            let key = key.trim();
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            if key.is_empty() || !key.chars().all(is_name) {
                return None;
            }
            self.rest = rest;
            let value = self.value(DEPTH_MAX)?;
            arguments.insert(key.to_owned(), value);
            self.skip();
            if !self.eat(',') && !self.rest.is_empty() {
                return None;
            }
        }
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, c: char) -> bool {
        self.skip();
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: u32) -> Option<Value> {
        self.skip();
        let depth = depth.checked_sub(1)?;
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.dictionary(depth),
            _ => self.word(),
        }
    }

    fn list(&mut self, open: char, close: char, depth: u32) -> Option<Value> {
        self.eat(open);
        let mut items = Vec::new();
        loop {
            if self.eat(close) {
                return Some(Value::Array(items));
            }
            items.push(self.value(depth)?);
            if !self.eat(',') {
                return self.eat(close).then_some(Value::Array(items));
            }
        }
    }

    fn dictionary(&mut self, depth: u32) -> Option<Value> {
        self.eat('{');
        let mut items = Map::new();
        loop {
            if self.eat('}') {
                return Some(Value::Object(items));
            }
            let key = match self.value(depth)? {
                Value::String(key) => key,
                other => other.to_string(),
            };
            if !self.eat(':') {
                return None;
            }
            items.insert(key, self.value(depth)?);
            if !self.eat(',') {
                return self.eat('}').then_some(Value::Object(items));
            }
        }
    }

    fn word(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_alphanumeric() || "+-._".contains(c);
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            _ => {
                let number = word.replace('_', "");
                let number = number.strip_prefix('+').unwrap_or(&number).to_owned();
                serde_json::from_str(&number).ok().filter(Value::is_number)
            }
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut said = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.rest = self.rest.get(at + c.len_utf8()..)?;
                    return Some(said);
                }
                '\\' => match chars.next()?.1 {
                    'n' => said.push('\n'),
                    't' => said.push('\t'),
                    'r' => said.push('\r'),
                    '\n' => {}
                    c @ ('\\' | '\'' | '"') => said.push(c),
                    'u' => {
                        let digits: String = chars.by_ref().take(4).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&digits, 16).ok()?;
                        said.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    other => {
                        said.push('\\');
                        said.push(other);
                    }
                },
                c => said.push(c),
            }
        }
        None
    }
}
