//! Reasoning between two marks.
//!
//! Text between an opening and a closing mark is reasoning, the rest is content. Some models are always inside at first, and some
//! templates put the opening mark (or both) at the end of the prompt, so that it is not in the answer. The marks are taken out, white
//! space stays as it is.

use crate::event::{AnswerEvent, TextParser};
use crate::markers::{Begins, begins, find, partial};

/// How reasoning is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    /// It begins after one of these.
    pub(crate) opens: &'static [&'static str],
    /// It ends with one of these.
    pub(crate) closes: &'static [&'static str],
    /// It ends before one of these too: they belong to what follows.
    pub(crate) breaks: &'static [&'static str],
    /// An answer begins with it, mark or no mark.
    pub(crate) is_first: bool,
    /// It stays in the content: this is put before the answer, and nothing is looked for.
    pub(crate) prepend: Option<&'static str>,
}

/// Splits reasoning from content.
pub(crate) struct Think {
    marks: Marks,
    is_inside: bool,
    /// Nothing was seen yet.
    is_new: bool,
    held: String,
}

/// What is found in a text.
#[derive(Clone, Copy)]
enum Mark {
    Open,
    Close,
    Break,
}

impl Think {
    /// After a prompt that ends so.
    pub(crate) fn new(marks: Marks, prompt_end: &str) -> Self {
        let prompt = prompt_end.trim_end();
        let ends = |list: &[&str]| list.iter().any(|mark| prompt.ends_with(mark));
        Self {
            held: marks.prepend.unwrap_or_default().to_owned(),
            is_inside: ends(marks.opens) || (marks.is_first && !ends(marks.closes)),
            marks,
            is_new: true,
        }
    }

    /// The first mark that means something here: where it is, how long, and what it is.
    fn first(&self) -> Option<(usize, usize, Mark)> {
        let found = |marks: &[&str], mark: Mark| {
            let (at, which) = find(&self.held, marks)?;
            Some((at, marks.get(which).map_or(0, |text| text.len()), mark))
        };
        let close = found(self.marks.closes, Mark::Close);
        let other = match self.is_inside {
            true => found(self.marks.breaks, Mark::Break),
            false => found(self.marks.opens, Mark::Open),
        };
        [close, other]
            .into_iter()
            .flatten()
            .min_by_key(|(at, ..)| *at)
    }

    /// Takes what is certain; says whether more may be.
    fn step(&mut self, at_end: bool, out: &mut Vec<AnswerEvent>) -> bool {
        if self.is_new && self.is_inside {
            // A model that is inside at first may still open it.
            match begins(&self.held, self.marks.opens, at_end) {
                Begins::Unknown => return false,
                Begins::With(_, bytes) => drop(self.held.drain(..bytes)),
                Begins::No => {}
            }
        }
        self.is_new = false;
        let Some((at, length, mark)) = self.first() else {
            let marks = [self.marks.opens, self.marks.closes, self.marks.breaks].concat();
            let held = match at_end {
                true => 0,
                false => partial(&self.held, &marks),
            };
            self.show(self.held.len() - held, out);
            return false;
        };
        self.show(at, out);
        match mark {
            Mark::Break => self.is_inside = false,
            // One that closes nothing is taken out too.
            Mark::Open | Mark::Close => {
                self.is_inside = matches!(mark, Mark::Open);
                self.held.drain(..length);
            }
        }
        true
    }

    fn show(&mut self, bytes: usize, out: &mut Vec<AnswerEvent>) {
        let text: String = self.held.drain(..bytes).collect();
        match self.is_inside {
            true => AnswerEvent::Reasoning(text),
            false => AnswerEvent::Content(text),
        }
        .append_to(out);
    }
}

impl TextParser for Think {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        self.held.push_str(text);
        if self.marks.prepend.is_some() {
            AnswerEvent::Content(std::mem::take(&mut self.held)).append_to(out);
            return;
        }
        while !self.held.is_empty() && self.step(false, out) {}
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        while !self.held.is_empty() && self.step(true, out) {}
    }
}
