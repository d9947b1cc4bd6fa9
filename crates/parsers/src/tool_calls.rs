//! Calls between content: the part that all forms have in common.
//!
//! A [`Grammar`] knows one form. It says after which marks calls may follow and is then given the text until it says that the calls are
//! over, or that there were none. This module finds the marks, keeps what was taken until it is certain that a call began, and gives it
//! back as content if none did.

use crate::event::{AnswerEvent, TextParser};
use crate::limits::{CALLS_MAX, HELD_BYTES_MAX, NAME_BYTES_MAX, SPACE_BYTES_MAX};
use crate::markers::{find, leading_space, partial};

/// Steps in a row in which a grammar may take nothing; each changes its state.
const IDLE_STEPS_MAX: u8 = 16;

/// What a grammar does with the text that it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It cannot say before there is more.
    More,
    /// It has used so many bytes and goes on.
    Take(usize),
    /// So many bytes, and the calls are over.
    Leave(usize),
    /// This is no call, or no further one.
    Fail,
}

/// One form of calls.
pub(crate) trait Grammar: Send {
    /// Marks after which calls may follow.
    fn openers(&self) -> &[&'static str];

    /// An answer that begins with one of these may be a call without a mark.
    fn bare(&self) -> &[char] {
        &[]
    }

    /// One of the openers was found, or the answer begins as a bare call does.
    fn enter(&mut self, opener: Option<usize>);

    /// Looks at all text that it has not taken, and never at where pieces were cut. `at_end`: no more follows; then it is not `More`
    /// while something can be taken.
    fn step(&mut self, text: &str, at_end: bool, calls: &mut Calls<'_>) -> Step;
}

/// Whether no function has this in its name.
fn is_foreign(c: char) -> bool {
    c.is_whitespace() || c.is_control() || "{}[]()<>\"'`".contains(c)
}

/// What is known of the calls of an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    begun: u32,
    is_open: bool,
}

/// Where a grammar tells of calls.
pub(crate) struct Calls<'a> {
    progress: &'a mut Progress,
    out: &'a mut Vec<AnswerEvent>,
}

impl Calls<'_> {
    /// A call begins; false if its name cannot be one, or there are too many.
    #[must_use]
    pub(crate) fn start(&mut self, name: &str, id: Option<&str>) -> bool {
        let fits = !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && !name.contains(is_foreign)
            && self.progress.begun < CALLS_MAX;
        if fits {
            self.end();
            let start = AnswerEvent::CallStart {
                index: self.progress.begun,
                id: id.map(Into::into),
                name: name.to_owned(),
            };
            start.append_to(self.out);
            self.progress.begun += 1;
            self.progress.is_open = true;
        }
        fits
    }

    /// More of the arguments of the call that is open.
    pub(crate) fn arguments(&mut self, more: &str) {
        if !self.progress.is_open {
            return;
        }
        let open = self.progress.begun - 1;
        match self.out.last_mut() {
            Some(AnswerEvent::Arguments { index, text }) if *index == open => text.push_str(more),
            _ => AnswerEvent::Arguments {
                index: open,
                text: more.to_owned(),
            }
            .append_to(self.out),
        }
    }

    /// The call that is open is complete.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.progress.is_open) {
            let index = self.progress.begun - 1;
            AnswerEvent::CallEnd { index }.append_to(self.out);
        }
    }

    /// Whether one is open.
    pub(crate) fn is_open(&self) -> bool {
        self.progress.is_open
    }
}

/// White space, which means nothing here; also that there is no text.
pub(crate) fn space(text: &str) -> Option<Step> {
    match text.chars().next() {
        None => Some(Step::More),
        Some(c) if c.is_whitespace() => Some(Step::Take(c.len_utf8())),
        Some(_) => None,
    }
}

/// Finds calls of one form.
pub(crate) struct CallParser<G> {
    grammar: G,
    progress: Progress,
    /// Text that was not taken yet.
    held: String,
    /// Text that the grammar took since it was last certain of a call: content, if none follows.
    taken: String,
    is_inside: bool,
    /// Calls that had begun when the last mark was found.
    entered: u32,
    /// Steps in a row that took nothing.
    idle: u8,
    /// Nothing was seen yet but white space.
    is_new: bool,
}

impl<G: Grammar> CallParser<G> {
    pub(crate) fn new(grammar: G) -> Self {
        Self {
            grammar,
            progress: Progress::default(),
            held: String::new(),
            taken: String::new(),
            is_inside: false,
            entered: 0,
            idle: 0,
            is_new: true,
        }
    }

    /// Takes what is certain; says whether more may be.
    fn advance(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        match self.is_inside {
            true => self.inside(at_end, out),
            false => self.outside(at_end, out),
        }
    }

    fn outside(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        if self.is_new && !self.grammar.bare().is_empty() {
            let space = leading_space(&self.held);
            match self.held.get(space..).and_then(|rest| rest.chars().next()) {
                None if !at_end && space <= SPACE_BYTES_MAX => return false,
                Some(first) if space <= SPACE_BYTES_MAX && self.grammar.bare().contains(&first) => {
                    self.is_new = false;
                    self.take(space);
                    self.enter(None);
                    return true;
                }
                _ => {}
            }
        }
        let openers = self.grammar.openers();
        if let Some((at, which)) = find(&self.held, openers) {
            let mark = openers.get(which).map_or(0, |mark| mark.len());
            let content: String = self.held.drain(..at).collect();
            self.is_new = false;
            AnswerEvent::Content(content).append_to(out);
            self.take(mark);
            self.enter(Some(which));
            return true;
        }
        let mut shown = self.held.len();
        if !at_end {
            shown -= partial(&self.held, openers);
        }
        let text: String = self.held.drain(..shown).collect();
        self.is_new &= text.trim().is_empty();
        AnswerEvent::Content(text).append_to(out);
        false
    }

    fn enter(&mut self, opener: Option<usize>) {
        self.grammar.enter(opener);
        self.is_inside = true;
        (self.entered, self.idle) = (self.progress.begun, 0);
    }

    fn take(&mut self, bytes: usize) {
        self.taken.extend(self.held.drain(..bytes));
    }

    fn inside(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        let before = self.progress;
        let mut calls = Calls {
            progress: &mut self.progress,
            out,
        };
        let step = self.grammar.step(&self.held, at_end, &mut calls);
        let is_call = before.is_open || self.progress.begun != before.begun;
        if is_call {
            self.taken.clear();
        }
        match step {
            Step::Take(bytes) => {
                let bytes = bytes.min(self.held.len());
                self.idle = match bytes {
                    0 => self.idle.saturating_add(1),
                    _ => 0,
                };
                match is_call {
                    true => drop(self.held.drain(..bytes)),
                    false => self.take(bytes),
                }
                if self.taken.len() > HELD_BYTES_MAX || self.idle > IDLE_STEPS_MAX {
                    self.leave(0, false, out);
                }
                bytes > 0 || at_end || !self.held.is_empty()
            }
            Step::Leave(bytes) => {
                self.leave(bytes, true, out);
                true
            }
            Step::Fail => {
                self.leave(0, false, out);
                true
            }
            Step::More if at_end => {
                let is_space = self.taken.trim().is_empty() && self.held.trim().is_empty();
                self.leave(0, self.progress.is_open || is_space, out);
                true
            }
            Step::More => {
                // A grammar bounds what it holds of a call that has begun.
                let is_too_long =
                    !self.progress.is_open && self.taken.len() + self.held.len() > HELD_BYTES_MAX;
                if is_too_long {
                    self.leave(0, false, out);
                }
                is_too_long
            }
        }
    }

    /// The calls are over. What was taken and is no call is content, unless it only closes calls.
    fn leave(&mut self, bytes: usize, is_over: bool, out: &mut Vec<AnswerEvent>) {
        let mut calls = Calls {
            progress: &mut self.progress,
            out,
        };
        calls.end();
        self.is_inside = false;
        let taken = std::mem::take(&mut self.taken);
        if is_over && self.progress.begun > self.entered {
            self.held.drain(..bytes.min(self.held.len()));
            return;
        }
        let opener = find(&taken, self.grammar.openers());
        let space = leading_space(&taken);
        // Not to be taken for a mark again.
        let first = opener.filter(|(at, _)| *at <= space).map_or(0, |(at, _)| {
            let first = taken.get(at..).and_then(|rest| rest.chars().next());
            at + first.map_or(0, char::len_utf8)
        });
        let (content, rest) = taken.split_at(first);
        AnswerEvent::Content(content.to_owned()).append_to(out);
        self.held.insert_str(0, rest);
    }
}

impl<G: Grammar> CallParser<G> {
    /// Bytes at the beginning of `text` that are content whatever follows.
    fn plain(&self, text: &str) -> usize {
        let is_certain = !self.is_inside && !self.is_new && self.held.is_empty();
        let begins_mark = |c: char| {
            self.grammar
                .openers()
                .iter()
                .any(|mark| mark.starts_with(c))
        };
        match is_certain {
            true => text.find(begins_mark).unwrap_or(text.len()),
            false => 0,
        }
    }
}

impl<G: Grammar> TextParser for CallParser<G> {
    /// One character after the other, so that where the text was cut cannot matter.
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let bytes = self.plain(rest).max(next.len_utf8());
            let (piece, after) = rest.split_at(bytes);
            self.held.push_str(piece);
            while self.advance(false, out) {}
            rest = after;
        }
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        while self.advance(true, out) {}
        let rest = std::mem::take(&mut self.held);
        AnswerEvent::Content(rest).append_to(out);
    }
}
