//! Calls as JSON objects with a name and arguments: Hermes, Llama, Mistral, Nemotron, Phi, Jamba.
//!
//! After a mark comes one object, several, or a list of them. The arguments are passed on as they come, unless they stand before the
//! name. Newer models of Mistral write the name outside of the object: `[TOOL_CALLS]name[ARGS]{…}`.

use crate::json_value::{Fed, Unescape, ValueScan};
use crate::limits::{HELD_BYTES_MAX, NAME_BYTES_MAX};
use crate::markers::{Begins, begins};
use crate::schema::ToolSchemas;
use crate::tool_calls::{Calls, Grammar, Step};

/// Longest number or word that may stand for arguments.
const LITERAL_BYTES_MAX: usize = 64;

/// How one family writes its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JsonForm {
    pub(crate) openers: &'static [&'static str],
    pub(crate) closers: &'static [&'static str],
    /// With what a call without a mark begins. Such a call must be of a function that the request has.
    pub(crate) bare: &'static [char],
    /// A name may stand before the object, up to one of these marks or the brace.
    pub(crate) name_first: Option<&'static [&'static str]>,
}

/// Reads calls that are JSON objects.
pub(crate) struct JsonCalls {
    form: JsonForm,
    schemas: ToolSchemas,
    place: Place,
    /// No mark was there: the function has to be known.
    is_bare: bool,
    object: CallObject,
    arguments: ArgumentText,
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Begin,
    Object,
    /// A name that stands before its arguments.
    Name,
    /// What stands between such a name and the arguments.
    NameMark,
    /// The arguments of such a name.
    Arguments,
    Between,
}

impl JsonCalls {
    pub(crate) fn new(form: JsonForm, schemas: &ToolSchemas) -> Self {
        Self {
            form,
            schemas: schemas.clone(),
            place: Place::Begin,
            is_bare: false,
            object: CallObject::default(),
            arguments: ArgumentText::default(),
            name: String::new(),
        }
    }

    fn begin(&mut self, text: &str, at_end: bool) -> Step {
        let Some(first) = text.chars().next() else {
            return Step::More;
        };
        match first {
            _ if first.is_whitespace() => Step::Take(first.len_utf8()),
            '[' if self.form.name_first.is_some()
                && begins(text, self.form.closers, at_end) == Begins::Unknown =>
            {
                Step::More
            }
            '[' => {
                self.place = Place::Between;
                Step::Take(1)
            }
            '{' => self.open(),
            _ if self.form.name_first.is_some() && is_name_part(first) => {
                self.name.clear();
                self.place = Place::Name;
                Step::Take(0)
            }
            _ => Step::Fail,
        }
    }

    fn open(&mut self) -> Step {
        self.object = CallObject::default();
        self.place = Place::Object;
        Step::Take(0)
    }

    fn object(&mut self, text: &str, calls: &mut Calls<'_>) -> Step {
        let known = self.is_bare.then_some(&self.schemas);
        for (at, c) in text.char_indices() {
            match self.object.feed(c, known, calls) {
                Fed::Part => {}
                Fed::Last => {
                    calls.end();
                    self.place = Place::Between;
                    return Step::Take(at + c.len_utf8());
                }
                Fed::Before | Fed::Bad if calls.is_open() => {
                    calls.end();
                    self.place = Place::Between;
                    return Step::Take(at);
                }
                Fed::Before | Fed::Bad => return Step::Fail,
            }
        }
        match text.is_empty() {
            true => Step::More,
            false => Step::Take(text.len()),
        }
    }

    fn name(&mut self, text: &str) -> Step {
        for (at, c) in text.char_indices() {
            if !is_name_part(c) {
                self.place = Place::NameMark;
                return Step::Take(at);
            }
            self.name.push(c);
            if self.name.len() > NAME_BYTES_MAX {
                return Step::Fail;
            }
        }
        match text.is_empty() {
            true => Step::More,
            false => Step::Take(text.len()),
        }
    }

    fn name_mark(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        match text.chars().next() {
            None => return Step::More,
            Some(c) if c.is_whitespace() => return Step::Take(c.len_utf8()),
            Some('{') if calls.start(&self.name, None) => {
                self.arguments = ArgumentText::default();
                self.place = Place::Arguments;
                return Step::Take(0);
            }
            Some(_) => {}
        }
        let marks = self.form.name_first.unwrap_or_default();
        match begins(text, marks, at_end) {
            Begins::With(_, bytes) => Step::Take(bytes),
            Begins::Unknown => Step::More,
            Begins::No => Step::Fail,
        }
    }

    fn arguments(&mut self, text: &str, calls: &mut Calls<'_>) -> Step {
        let mut more = String::new();
        for (at, c) in text.char_indices() {
            let used = match self.arguments.feed(c, &mut more) {
                Fed::Part => continue,
                Fed::Last => at + c.len_utf8(),
                Fed::Before | Fed::Bad => at,
            };
            calls.arguments(&more);
            calls.end();
            self.place = Place::Between;
            return Step::Take(used);
        }
        calls.arguments(&more);
        match text.is_empty() {
            true => Step::More,
            false => Step::Take(text.len()),
        }
    }

    fn between(&mut self, text: &str, at_end: bool) -> Step {
        let Some(first) = text.chars().next() else {
            return over(at_end);
        };
        match begins(text, self.form.closers, at_end) {
            Begins::With(_, bytes) => return Step::Leave(bytes),
            Begins::Unknown => return Step::More,
            Begins::No => {}
        }
        match first {
            ',' | ';' | ']' => Step::Take(1),
            _ if first.is_whitespace() => Step::Take(first.len_utf8()),
            '{' => self.open(),
            _ => Step::Leave(0),
        }
    }
}

/// No text is left: nothing more is expected, should nothing come.
fn over(at_end: bool) -> Step {
    match at_end {
        true => Step::Leave(0),
        false => Step::More,
    }
}

fn is_name_part(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

impl Grammar for JsonCalls {
    fn openers(&self) -> &[&'static str] {
        self.form.openers
    }

    fn bare(&self) -> &[char] {
        self.form.bare
    }

    fn enter(&mut self, opener: Option<usize>) {
        self.place = Place::Begin;
        self.is_bare = opener.is_none();
    }

    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        match self.place {
            Place::Begin => self.begin(text, at_end),
            Place::Object => self.object(text, calls),
            Place::Name => self.name(text),
            Place::NameMark => self.name_mark(text, at_end, calls),
            Place::Arguments => self.arguments(text, calls),
            Place::Between => self.between(text, at_end),
        }
    }
}

/// Arguments as text: JSON as it is, or what a JSON string says.
#[derive(Clone, Debug, Default)]
struct ArgumentText {
    scan: ValueScan,
    kind: Option<ArgumentKind>,
    literal: String,
    unescape: Unescape,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentKind {
    /// An object or a list.
    Json,
    /// A string that has the JSON in it.
    Text,
    /// A number or a word.
    Literal,
}

impl ArgumentText {
    fn feed(&mut self, c: char, out: &mut String) -> Fed {
        let kind = *self.kind.get_or_insert(match c {
            '{' | '[' => ArgumentKind::Json,
            '"' => ArgumentKind::Text,
            _ => ArgumentKind::Literal,
        });
        match kind {
            ArgumentKind::Json => {
                let fed = self.scan.feed(c);
                if matches!(fed, Fed::Part | Fed::Last) {
                    out.push(c);
                }
                fed
            }
            ArgumentKind::Text => self.text(c, out),
            ArgumentKind::Literal => self.literal(c, out),
        }
    }

    fn text(&mut self, c: char, out: &mut String) -> Fed {
        if self.literal.is_empty() {
            // The opening quote.
            self.literal.push(c);
            return Fed::Part;
        }
        match self.unescape.feed(c, out) {
            true => Fed::Part,
            false => Fed::Last,
        }
    }

    fn literal(&mut self, c: char, out: &mut String) -> Fed {
        let fed = self.scan.feed(c);
        match fed {
            Fed::Part if self.literal.len() < LITERAL_BYTES_MAX => {
                self.literal.push(c);
                Fed::Part
            }
            Fed::Before => {
                // No arguments are an empty object.
                out.push_str(match self.literal.as_str() {
                    "null" | "None" => "{}",
                    other => other,
                });
                Fed::Before
            }
            _ => Fed::Bad,
        }
    }
}

/// One object that is a call.
#[derive(Clone, Debug, Default)]
struct CallObject {
    place: ObjectPlace,
    key: String,
    escaped: bool,
    scan: ValueScan,
    name: Option<String>,
    arguments: ArgumentText,
    /// Arguments that came before the name.
    early: Option<String>,
    has_begun: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ObjectPlace {
    #[default]
    Open,
    KeyOrEnd,
    Key,
    Colon,
    BeforeValue,
    Name,
    Arguments,
    Other,
    AfterValue,
}

impl CallObject {
    /// The next character; `known`: the function must be one of these.
    fn feed(&mut self, c: char, known: Option<&ToolSchemas>, calls: &mut Calls<'_>) -> Fed {
        let is_space = c.is_whitespace();
        match self.place {
            ObjectPlace::Open => self.turn(c == '{', ObjectPlace::KeyOrEnd),
            ObjectPlace::KeyOrEnd | ObjectPlace::AfterValue if is_space || c == ',' => Fed::Part,
            ObjectPlace::KeyOrEnd if c == '"' => {
                self.key.clear();
                self.turn(true, ObjectPlace::Key)
            }
            ObjectPlace::AfterValue if c == '"' => {
                self.key.clear();
                self.turn(true, ObjectPlace::Key)
            }
            ObjectPlace::KeyOrEnd | ObjectPlace::AfterValue if c == '}' => self.close(calls),
            ObjectPlace::KeyOrEnd | ObjectPlace::AfterValue => Fed::Bad,
            ObjectPlace::Key => self.key(c, known.is_some()),
            ObjectPlace::Colon | ObjectPlace::BeforeValue if is_space => Fed::Part,
            ObjectPlace::Colon => self.turn(c == ':', ObjectPlace::BeforeValue),
            ObjectPlace::BeforeValue => {
                self.place = self.kind_of_value(c);
                self.scan = ValueScan::default();
                let name = self.place == ObjectPlace::Name;
                self.key.clear();
                match name {
                    // The opening quote.
                    true => Fed::Part,
                    false => self.feed(c, known, calls),
                }
            }
            ObjectPlace::Name => self.name(c, known),
            ObjectPlace::Arguments => self.arguments(c, calls, known),
            ObjectPlace::Other => match self.scan.feed(c) {
                Fed::Part => Fed::Part,
                Fed::Last => self.turn(true, ObjectPlace::AfterValue),
                Fed::Before => {
                    self.place = ObjectPlace::AfterValue;
                    self.feed(c, known, calls)
                }
                Fed::Bad => Fed::Bad,
            },
        }
    }

    fn turn(&mut self, holds: bool, to: ObjectPlace) -> Fed {
        self.place = to;
        match holds {
            true => Fed::Part,
            false => Fed::Bad,
        }
    }

    fn key(&mut self, c: char, is_bare: bool) -> Fed {
        if c != '"' {
            self.key.push(c);
            return match self.key.len() > NAME_BYTES_MAX {
                true => Fed::Bad,
                false => Fed::Part,
            };
        }
        const KEYS: [&str; 5] = ["name", "arguments", "parameters", "type", "id"];
        let is_known = KEYS.contains(&self.key.as_str());
        self.turn(is_known || !is_bare, ObjectPlace::Colon)
    }

    fn kind_of_value(&self, first: char) -> ObjectPlace {
        let has_arguments = self.has_begun || self.early.is_some();
        match self.key.as_str() {
            "name" if first == '"' && self.name.is_none() => ObjectPlace::Name,
            "arguments" | "parameters" if !has_arguments => ObjectPlace::Arguments,
            _ => ObjectPlace::Other,
        }
    }

    /// A character of the name, whose quotes are not fed.
    fn name(&mut self, c: char, known: Option<&ToolSchemas>) -> Fed {
        match (self.escaped, c) {
            (false, '"') => {
                let quoted = format!("\"{}\"", self.key);
                let Ok(name) = serde_json::from_str::<String>(&quoted) else {
                    return Fed::Bad;
                };
                let is_known = known.is_none_or(|schemas| schemas.has(&name));
                self.name = Some(name);
                return self.turn(is_known, ObjectPlace::AfterValue);
            }
            (false, '\\') => self.escaped = true,
            _ => self.escaped = false,
        }
        self.key.push(c);
        match self.key.len() > NAME_BYTES_MAX {
            true => Fed::Bad,
            false => Fed::Part,
        }
    }

    fn arguments(&mut self, c: char, calls: &mut Calls<'_>, known: Option<&ToolSchemas>) -> Fed {
        if let (false, Some(name)) = (self.has_begun, &self.name) {
            if !calls.start(name, None) {
                return Fed::Bad;
            }
            self.has_begun = true;
        }
        let mut more = String::new();
        let fed = self.arguments.feed(c, &mut more);
        match self.has_begun {
            true => calls.arguments(&more),
            false => {
                let early = self.early.get_or_insert_default();
                early.push_str(&more);
                if early.len() > HELD_BYTES_MAX {
                    return Fed::Bad;
                }
            }
        }
        match fed {
            Fed::Last => self.turn(true, ObjectPlace::AfterValue),
            Fed::Before => {
                self.place = ObjectPlace::AfterValue;
                self.feed(c, known, calls)
            }
            fed => fed,
        }
    }

    fn close(&mut self, calls: &mut Calls<'_>) -> Fed {
        if self.has_begun {
            return Fed::Last;
        }
        let Some(name) = &self.name else {
            return Fed::Bad;
        };
        if !calls.start(name, None) {
            return Fed::Bad;
        }
        calls.arguments(self.early.as_deref().unwrap_or("{}"));
        Fed::Last
    }
}
