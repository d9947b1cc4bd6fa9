//! Calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[true]}<tool_call|>`.
//!
//! Arguments look like JSON without quotes: names stand alone, and a text stands between two marks in which any sign may be. They become
//! JSON as they come; a text is passed on at once, a number or a word waits for its end.

use crate::json_value::escape_into;
use crate::limits::{NAME_BYTES_MAX, VALUE_BYTES_MAX};
use crate::markers::{Begins, begins, find, partial};
use crate::schema::Types;
use crate::tool_calls::{Calls, Grammar, Step, space};

const OPENERS: &[&str] = &["<|tool_call>"];
const CLOSE: &str = "<tool_call|>";
const HEAD: &str = "call:";
/// Before and after a text.
const QUOTE: &str = "<|\"|>";
/// Bytes of an argument's name.
const KEY_BYTES_MAX: usize = 4 * NAME_BYTES_MAX;
/// Lists and objects inside of each other.
const DEPTH_MAX: usize = 32;

/// Marks that a tokenizer may have as special tokens.
pub(crate) const SPECIAL: &[&str] = &["<|tool_call>", CLOSE, QUOTE];

/// Reads such calls.
pub(crate) struct GemmaCalls {
    place: Place,
    /// What is open, and whether it has something in it.
    open: Vec<(Bracket, bool)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    Object,
    List,
}

impl Bracket {
    const fn close(self) -> char {
        match self {
            Self::Object => '}',
            Self::List => ']',
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before `call:`, and its name.
    Name,
    /// Before an argument's name, or the end of an object.
    Key,
    /// Before a value, or the end of a list.
    Value,
    /// Inside of a text.
    Text,
    /// After a value.
    After,
    /// After the arguments.
    End,
}

impl GemmaCalls {
    pub(crate) const fn new() -> Self {
        Self {
            place: Place::Name,
            open: Vec::new(),
        }
    }

    fn name(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        match begins(text, &[HEAD], at_end) {
            Begins::With(..) => {}
            Begins::Unknown => return Step::More,
            Begins::No => return Step::Fail,
        }
        let Some((at, _)) = find(text, &["{"]) else {
            return match at_end || text.len() > 2 * NAME_BYTES_MAX {
                true => Step::Fail,
                false => Step::More,
            };
        };
        let name = text.get(HEAD.len()..at).unwrap_or_default().trim();
        if !calls.start(name, None) {
            return Step::Fail;
        }
        self.open.clear();
        self.enter_bracket(Bracket::Object, calls);
        Step::Take(at + 1)
    }

    fn enter_bracket(&mut self, bracket: Bracket, calls: &mut Calls<'_>) {
        self.open.push((bracket, false));
        let (place, sign) = match bracket {
            Bracket::Object => (Place::Key, "{"),
            Bracket::List => (Place::Value, "["),
        };
        self.place = place;
        calls.arguments(sign);
    }

    /// The innermost of what is open ends, if `sign` ends it.
    fn leave_bracket(&mut self, sign: char, calls: &mut Calls<'_>) -> bool {
        let Some(&(bracket, _)) = self.open.last().filter(|(open, _)| open.close() == sign) else {
            return false;
        };
        self.open.pop();
        calls.arguments(bracket.close().encode_utf8(&mut [0; 4]));
        self.place = match self.open.is_empty() {
            true => Place::End,
            false => Place::After,
        };
        true
    }

    /// A comma, unless this is the first of its list or object.
    fn separate(&mut self, calls: &mut Calls<'_>) {
        if let Some((_, has_some)) = self.open.last_mut()
            && std::mem::replace(has_some, true)
        {
            calls.arguments(",");
        }
    }

    fn key(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        if text.starts_with('}') && self.leave_bracket('}', calls) {
            return Step::Take(1);
        }
        let (skipped, mark) = match begins(text, &[QUOTE], at_end) {
            Begins::With(_, bytes) => (bytes, QUOTE),
            Begins::Unknown => return Step::More,
            Begins::No => (0, ":"),
        };
        let rest = text.get(skipped..).unwrap_or_default();
        let at = match find(rest, &[mark]) {
            Some((at, _)) if at <= KEY_BYTES_MAX => at,
            None if !at_end && rest.len() <= KEY_BYTES_MAX => return Step::More,
            _ => return give_up(calls),
        };
        let mut after = skipped + at;
        if mark == QUOTE {
            after += QUOTE.len();
            // The colon follows.
            match text.get(after..).and_then(|rest| rest.chars().next()) {
                Some(':') => {}
                None if !at_end => return Step::More,
                _ => return give_up(calls),
            }
        }
        self.separate(calls);
        let mut json = String::from("\"");
        escape_into(rest.get(..at).unwrap_or_default().trim(), &mut json);
        json.push_str("\":");
        calls.arguments(&json);
        self.place = Place::Value;
        Step::Take(after + 1)
    }

    fn value(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        let in_list = matches!(self.open.last(), Some((Bracket::List, _)));
        if in_list && text.starts_with(']') && self.leave_bracket(']', calls) {
            return Step::Take(1);
        }
        let quote = match begins(text, &[QUOTE], at_end) {
            Begins::With(_, bytes) => Some(bytes),
            Begins::Unknown => return Step::More,
            Begins::No => None,
        };
        let bracket = match text.chars().next() {
            Some('{') => Some(Bracket::Object),
            Some('[') => Some(Bracket::List),
            _ => None,
        };
        let word = match quote.is_none() && bracket.is_none() {
            true => match find(text, &[",", "}", "]", CLOSE]) {
                Some((at, _)) if at <= VALUE_BYTES_MAX => Some(at),
                None if text.len() <= VALUE_BYTES_MAX && at_end => Some(text.len()),
                None if text.len() <= VALUE_BYTES_MAX => return Step::More,
                _ => return give_up(calls),
            },
            false => None,
        };
        if in_list {
            self.separate(calls);
        }
        if let Some(bytes) = quote {
            calls.arguments("\"");
            self.place = Place::Text;
            return Step::Take(bytes);
        }
        if let Some(bracket) = bracket {
            if self.open.len() >= DEPTH_MAX {
                return give_up(calls);
            }
            self.enter_bracket(bracket, calls);
            return Step::Take(1);
        }
        let bytes = word.unwrap_or_default();
        let word = text.get(..bytes).unwrap_or_default().trim();
        calls.arguments(&match word.is_empty() {
            true => "null".to_owned(),
            false => Types::JSON.to_json(word),
        });
        self.place = Place::After;
        Step::Take(bytes)
    }

    fn text(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        let (shown, used) = match find(text, &[QUOTE]) {
            Some((at, _)) => (at, at + QUOTE.len()),
            None if at_end => (text.len(), text.len()),
            None => {
                let shown = text.len() - partial(text, &[QUOTE]);
                (shown, shown)
            }
        };
        let mut json = String::with_capacity(shown + 1);
        escape_into(text.get(..shown).unwrap_or_default(), &mut json);
        if used > shown {
            json.push('"');
            self.place = Place::After;
        }
        calls.arguments(&json);
        match used {
            0 => Step::More,
            used => Step::Take(used),
        }
    }

    fn after(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        match begins(text, &[CLOSE], at_end) {
            Begins::With(_, bytes) => {
                // What is open was not closed.
                while let Some(&(bracket, _)) = self.open.last() {
                    self.leave_bracket(bracket.close(), calls);
                }
                calls.end();
                return Step::Leave(bytes);
            }
            Begins::Unknown => return Step::More,
            Begins::No => {}
        }
        let inside = self.open.last().map(|(bracket, _)| *bracket);
        match (text.chars().next(), inside) {
            (Some(','), Some(Bracket::Object)) => self.place = Place::Key,
            (Some(','), Some(Bracket::List)) => self.place = Place::Value,
            (Some(sign @ ('}' | ']')), _) if self.leave_bracket(sign, calls) => {}
            _ => return give_up(calls),
        }
        Step::Take(1)
    }

    /// The closing mark.
    fn end(text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        let step = match begins(text, &[CLOSE], at_end) {
            Begins::With(_, bytes) => Step::Leave(bytes),
            Begins::Unknown => return Step::More,
            Begins::No => Step::Leave(0),
        };
        calls.end();
        step
    }
}

/// The call ends here, with what came of it; what follows is none.
fn give_up(calls: &mut Calls<'_>) -> Step {
    calls.end();
    Step::Fail
}

impl Grammar for GemmaCalls {
    fn openers(&self) -> &[&'static str] {
        OPENERS
    }

    fn enter(&mut self, _: Option<usize>) {
        self.place = Place::Name;
    }

    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        match self.place {
            Place::Name => self.name(text, at_end, calls),
            Place::Key => self.key(text, at_end, calls),
            Place::Value => self.value(text, at_end, calls),
            Place::Text => self.text(text, at_end, calls),
            Place::After => self.after(text, at_end, calls),
            Place::End => Self::end(text, at_end, calls),
        }
    }
}
