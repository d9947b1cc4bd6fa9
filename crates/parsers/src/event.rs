//! What a parser says, and what every parser is.

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEvent {
    /// Text for the user.
    Content(String),
    /// Text that the model wrote for itself.
    Reasoning(String),
    /// A call begins.
    CallStart {
        /// Its number in the answer, from 0.
        index: u32,
        /// The id that the model gave it, where its form has one.
        id: Option<String>,
        /// The function.
        name: String,
    },
    /// More of a call's arguments, which are JSON if the model wrote JSON.
    Arguments {
        /// Of which call.
        index: u32,
        /// The text.
        text: String,
    },
    /// A call is complete.
    CallEnd {
        /// Which one.
        index: u32,
    },
}

impl AnswerEvent {
    /// Appends it, joined to the last one where they are of one kind. Empty text is left out.
    pub fn append_to(self, out: &mut Vec<Self>) {
        match (self, out.last_mut()) {
            (Self::Content(text) | Self::Reasoning(text) | Self::Arguments { text, .. }, _)
                if text.is_empty() => {}
            (Self::Content(text), Some(Self::Content(last)))
            | (Self::Reasoning(text), Some(Self::Reasoning(last))) => last.push_str(&text),
            (
                Self::Arguments { index, text },
                Some(Self::Arguments {
                    index: at,
                    text: last,
                }),
            ) if *at == index => {
                last.push_str(&text);
            }
            (event, _) => out.push(event),
        }
    }
}

/// Reads text as it comes.
pub trait TextParser: Send {
    /// More text came: appends what is certain now.
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>);

    /// No more text comes: appends the rest. Nothing is to be pushed after that.
    fn finish(&mut self, out: &mut Vec<AnswerEvent>);
}
