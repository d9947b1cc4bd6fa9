//! Calls between marks of their own, with JSON arguments: DeepSeek V3 and V3.1, Kimi K2.
//!
//! A mark opens a section, in which each call has a mark at its beginning, one between what it calls and the arguments, and one at its end.

use crate::json_value::{Fed, ValueScan};
use crate::limits::NAME_BYTES_MAX;
use crate::markers::{Begins, begins, find};
use crate::tool_calls::{Calls, Grammar, Step, space};

/// How one family writes its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SectionForm {
    /// Marks that open a section; one that opens a call at once is last.
    pub(crate) openers: &'static [&'static str],
    pub(crate) closers: &'static [&'static str],
    pub(crate) call_open: &'static str,
    pub(crate) separator: &'static str,
    pub(crate) call_close: &'static str,
    pub(crate) head: HeadForm,
}

/// What stands before and after the separator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadForm {
    /// The name, then the arguments.
    Name,
    /// The kind of tool, then the name on a line of its own and the arguments in a code fence.
    KindThenName,
    /// `functions.name:0`, which is the call's id.
    Id,
}

/// Reads such calls.
pub(crate) struct SectionCalls {
    form: SectionForm,
    place: Place,
    name: String,
    id: Option<String>,
    scan: ValueScan,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Calls,
    Head,
    NameLine,
    BeforeArguments,
    Arguments,
    CallEnd,
}

impl SectionCalls {
    pub(crate) fn new(form: SectionForm) -> Self {
        Self {
            form,
            place: Place::Calls,
            name: String::new(),
            id: None,
            scan: ValueScan::default(),
        }
    }

    /// Between two calls.
    fn calls(&mut self, text: &str, at_end: bool) -> Step {
        if text.is_empty() && at_end {
            return Step::Leave(0);
        }
        if let Some(step) = space(text) {
            return step;
        }
        match begins(text, &[self.form.call_open], at_end) {
            Begins::With(_, bytes) => {
                self.place = Place::Head;
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

    /// Up to the separator.
    fn head(&mut self, text: &str) -> Step {
        let Some((at, _)) = find(text, &[self.form.separator]) else {
            return until_name_ends(text);
        };
        let head = text.get(..at).unwrap_or_default().trim();
        self.place = Place::BeforeArguments;
        self.id = None;
        match self.form.head {
            HeadForm::Name => self.name = head.to_owned(),
            HeadForm::KindThenName => self.place = Place::NameLine,
            HeadForm::Id => {
                let name = head.strip_prefix("functions.").unwrap_or(head);
                let name = match name.rsplit_once(':') {
                    Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
                    _ => name,
                };
                self.name = name.to_owned();
                self.id = Some(head.to_owned());
            }
        }
        Step::Take(at + self.form.separator.len())
    }

    fn name_line(&mut self, text: &str) -> Step {
        let Some(at) = text.find('\n') else {
            return until_name_ends(text);
        };
        text.get(..at)
            .unwrap_or_default()
            .trim()
            .clone_into(&mut self.name);
        self.place = Place::BeforeArguments;
        Step::Take(at + 1)
    }

    fn before_arguments(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        if text.starts_with('{') {
            if !calls.start(&self.name, self.id.as_deref()) {
                return Step::Fail;
            }
            self.scan = ValueScan::default();
            self.place = Place::Arguments;
            return Step::Take(0);
        }
        match begins(text, &["```json", "```", self.form.call_close], at_end) {
            Begins::With(2, _) if calls.start(&self.name, self.id.as_deref()) => {
                calls.arguments("{}");
                self.place = Place::CallEnd;
                Step::Take(0)
            }
            Begins::With(0 | 1, bytes) if self.form.head == HeadForm::KindThenName => {
                Step::Take(bytes)
            }
            Begins::Unknown => Step::More,
            _ => Step::Fail,
        }
    }

    fn arguments(&mut self, text: &str, calls: &mut Calls<'_>) -> Step {
        for (at, c) in text.char_indices() {
            let used = match self.scan.feed(c) {
                Fed::Part => continue,
                Fed::Last => at + c.len_utf8(),
                Fed::Before | Fed::Bad => at,
            };
            calls.arguments(text.get(..used).unwrap_or_default());
            self.place = Place::CallEnd;
            return Step::Take(used);
        }
        calls.arguments(text);
        match text.is_empty() {
            true => Step::More,
            false => Step::Take(text.len()),
        }
    }

    fn call_end(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        if let Some(step) = space(text) {
            return step;
        }
        let fence = self.form.head == HeadForm::KindThenName;
        if fence && text.starts_with('`') {
            return Step::Take(1);
        }
        let step = match begins(text, &[self.form.call_close], at_end) {
            Begins::With(_, bytes) => Step::Take(bytes),
            Begins::Unknown => return Step::More,
            Begins::No => Step::Take(0),
        };
        calls.end();
        self.place = Place::Calls;
        step
    }
}

/// No name is so long.
fn until_name_ends(text: &str) -> Step {
    match text.len() > 2 * NAME_BYTES_MAX {
        true => Step::Fail,
        false => Step::More,
    }
}

impl Grammar for SectionCalls {
    fn openers(&self) -> &[&'static str] {
        self.form.openers
    }

    fn enter(&mut self, opener: Option<usize>) {
        let mark = opener.and_then(|which| self.form.openers.get(which));
        self.place = match mark {
            Some(mark) if *mark == self.form.call_open => Place::Head,
            _ => Place::Calls,
        };
    }

    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step {
        match self.place {
            Place::Calls => self.calls(text, at_end),
            Place::Head => self.head(text),
            Place::NameLine => self.name_line(text),
            Place::BeforeArguments => self.before_arguments(text, at_end, calls),
            Place::Arguments => self.arguments(text, calls),
            Place::CallEnd => self.call_end(text, at_end, calls),
        }
    }
}
