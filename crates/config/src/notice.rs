//! What a user should hear at start although nothing is wrong enough to stop.
//!
//! Answers: which of the given options do nothing yet, are on their way out, or lost to another?
//! Only options that a person set are spoken of.

use std::fmt;

use crate::settings::Settings;
use crate::spec::Effect;

/// Why something is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeKind {
    /// The option's feature is not built yet, or only in part.
    NoEffectYet,
    /// The option still works and will go.
    Deprecated,
    /// The option does nothing any more.
    Ignored,
    /// Another option decided against the given value.
    Overridden,
    /// A variable looks like a misspelled one of ours.
    UnknownVariable,
    /// A key of the file belongs to another command.
    OtherCommand,
}

/// One sentence for the user, to be logged as a warning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Why it is said.
    pub kind: NoticeKind,
    /// The option concerned.
    pub option: Option<&'static str>,
    /// The sentence, without a full stop.
    pub text: String,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Notices that follow from the status of the options that a person set.
pub(crate) fn of_status(settings: &Settings) -> Vec<Notice> {
    let mut notices = Vec::new();
    for (spec, setting) in settings
        .iter()
        .filter(|(_, setting)| setting.origin.is_user())
    {
        let (name, origin) = (spec.name, setting.origin.place(spec.name));
        let mut say = |kind, text| {
            notices.push(Notice {
                kind,
                option: Some(name),
                text,
            })
        };
        match (spec.effect, spec.deprecated) {
            (_, None) => {}
            (Effect::Never, Some(note)) => {
                say(
                    NoticeKind::Ignored,
                    format!("--{name} ({origin}) is ignored: {note}"),
                );
            }
            (_, Some(note)) => {
                say(
                    NoticeKind::Deprecated,
                    format!("--{name} ({origin}) is deprecated: {note}"),
                );
            }
        }
        match spec.effect {
            Effect::Now | Effect::Never => {}
            Effect::Partly(note) => {
                say(
                    NoticeKind::NoEffectYet,
                    format!("--{name} ({origin}) works in part: {note}"),
                );
            }
            Effect::NotYet => {
                let text = format!(
                    "--{name} ({origin}) has no effect yet: this version accepts it and does not \
                     act on it"
                );
                say(NoticeKind::NoEffectYet, text);
            }
        }
    }
    notices
}
