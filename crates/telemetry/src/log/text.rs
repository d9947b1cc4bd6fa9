//! What does a log line look like to a person, and what can a field do to it?
//!
//! One event is one line: `time LEVEL message name=value …`. A field that holds a line break, a terminal's escape
//! sequence or a megabyte changes none of that: control characters are shown escaped and a line ends at
//! [`LINE_BYTES_MAX`]. (JSON lines are escaped by their own grammar.)

use std::fmt::{self, Write};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use super::digits::{push_number, push_time};

/// Longest line of text; what is beyond is cut and marked with `…`.
pub(super) const LINE_BYTES_MAX: usize = 16 << 10;
/// Most digits of a number.
const NUMBER_BYTES_MAX: usize = 20;

/// Appends the line of `event`, with colours or without.
pub(super) fn write(out: &mut String, ansi: bool, unix: Duration, event: &Event<'_>) {
    let level = *event.metadata().level();
    if ansi {
        out.push_str("\x1b[2m");
        push_time(out, unix);
        out.push_str("\x1b[0m \x1b[");
        out.push_str(colour(level));
        out.push('m');
        out.push_str(name(level));
        out.push_str("\x1b[0m");
    } else {
        push_time(out, unix);
        out.push(' ');
        out.push_str(name(level));
    }
    let mut fields = Fields {
        out: EscapingWriter {
            out,
            left: LINE_BYTES_MAX,
        },
        ansi,
    };
    event.record(&mut fields);
    if fields.out.left == 0 {
        out.push('…');
    }
    out.push('\n');
}

/// A level's name, all of them equally wide.
fn name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => " WARN",
        Level::INFO => " INFO",
        Level::DEBUG => "DEBUG",
        Level::TRACE => "TRACE",
    }
}

fn colour(level: Level) -> &'static str {
    match level {
        Level::ERROR => "31",
        Level::WARN => "33",
        Level::INFO => "32",
        Level::DEBUG => "34",
        Level::TRACE => "35",
    }
}

/// Writes the fields of an event, the message without its name.
struct Fields<'a> {
    out: EscapingWriter<'a>,
    ansi: bool,
}

impl Fields<'_> {
    fn name(&mut self, field: &Field) {
        let out = &mut *self.out.out;
        out.push(' ');
        match (field.name(), self.ansi) {
            ("message", _) => {}
            (name, false) => {
                out.push_str(name);
                out.push('=');
            }
            (name, true) => {
                out.push_str("\x1b[3m");
                out.push_str(name);
                out.push_str("\x1b[0m\x1b[2m=\x1b[0m");
            }
        }
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.out.left > 0 {
            self.name(field);
            // Writing into a string does not fail.
            let _ = write!(self.out, "{value:?}");
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.record_debug(field, &format_args!("{value}"));
        } else if self.out.has_room(value.len() + 2) && is_quotable(value) {
            self.name(field);
            self.out.take_plain("\"");
            self.out.take_plain(value);
            self.out.take_plain("\"");
        } else {
            self.record_debug(field, &value);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if self.out.has_room(NUMBER_BYTES_MAX) {
            self.name(field);
            let before = self.out.out.len();
            push_number(self.out.out, value);
            self.out.left -= self.out.out.len() - before;
        } else {
            self.record_debug(field, &value);
        }
    }
}

/// Passes text on, control characters as escapes, until nothing is left of the line.
struct EscapingWriter<'a> {
    out: &'a mut String,
    left: usize,
}

impl Write for EscapingWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.has_room(text.len()) && is_plain(text) {
            self.take_plain(text);
            return Ok(());
        }
        let mut rest = text;
        while let Some(at) = rest.find(misleads) {
            let (plain, from) = rest.split_at(at);
            self.plain(plain);
            let mut chars = from.chars();
            let escape = chars.next().map(char::escape_default);
            let length = escape.as_ref().map_or(0, |escape| escape.len());
            match escape {
                Some(escape) if length <= self.left => write!(self.out, "{escape}")?,
                _ => {
                    self.left = 0;
                    return Ok(());
                }
            }
            self.left -= length;
            rest = chars.as_str();
        }
        self.plain(rest);
        Ok(())
    }
}

impl EscapingWriter<'_> {
    /// Whether so many bytes are taken whole.
    fn has_room(&self, bytes: usize) -> bool {
        bytes < self.left
    }

    /// Takes text that is plain and has room.
    fn take_plain(&mut self, text: &str) {
        self.out.push_str(text);
        self.left -= text.len();
    }

    fn plain(&mut self, text: &str) {
        let cut = text.floor_char_boundary(self.left);
        self.left = match text.len() < self.left {
            true => self.left - text.len(),
            false => 0,
        };
        self.out.push_str(text.get(..cut).unwrap_or_default());
    }
}

/// Whether a text is shown as it is: printable ASCII, as nearly all are.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Whether a text in quotes is shown as it is.
fn is_quotable(text: &str) -> bool {
    let as_it_is = |byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    text.bytes().all(as_it_is)
}

/// Whether a character could break a line, drive a terminal or turn the order of what follows.
fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::subscriber::tests;
    use super::*;

    /// What `log` writes, without the times.
    fn lines(ansi: bool, log: impl FnOnce()) -> Vec<String> {
        let skip = "2026-11-15T14:09:08.123456Z".len() + if ansi { 8 } else { 0 };
        let lines = tests::lines(Format::Text, ansi, log);
        lines.iter().map(|line| line[skip..].to_owned()).collect()
    }

    #[test]
    fn an_event_is_a_line_of_time_level_message_and_fields() {
        let seen = lines(false, || {
            tracing::info!(workers = 2, name = "a b", worker = %"x:1", "joined {}", 1);
            tracing::error!("late");
        });
        assert_eq!(
            seen,
            [
                "  INFO joined 1 workers=2 name=\"a b\" worker=x:1",
                " ERROR late"
            ]
        );
        let seen = lines(true, || tracing::warn!(n = 1, "w"));
        assert_eq!(
            seen,
            [" \u{1b}[33m WARN\u{1b}[0m w \u{1b}[3mn\u{1b}[0m\u{1b}[2m=\u{1b}[0m1"]
        );
    }

    #[test]
    fn no_field_makes_a_second_line_or_drives_the_terminal() {
        let evil = "zz\n2026 INFO forged\r\u{1b}[2J\u{9b}\u{202e}é";
        let seen = lines(false, || tracing::info!(a = %evil, b = evil, "m {evil}"));
        let shown = "zz\\n2026 INFO forged\\r\\u{1b}[2J\\u{9b}\\u{202e}é";
        assert_eq!(seen, [format!("  INFO m {shown} a={shown} b=\"{shown}\"")]);
    }

    #[test]
    fn a_line_ends_at_its_bound() {
        let long = "é".repeat(LINE_BYTES_MAX);
        let seen = lines(false, || tracing::info!(a = %long, b = 1, "x"));
        let [line] = seen.as_slice() else {
            panic!("{} lines", seen.len())
        };
        assert!(line.starts_with("  INFO x a=éé"));
        assert!(line.ends_with("éé…"), "{line:.40}");
        assert!(line.len() < LINE_BYTES_MAX + 30);
        let long = "\u{1}é".repeat(LINE_BYTES_MAX);
        let [line] = &lines(false, || tracing::info!(a = %long, b = 1, "x"))[..] else {
            panic!("more than a line")
        };
        assert!(line.len() < LINE_BYTES_MAX + 30, "{}", line.len());
        assert!(line.ends_with('…'), "{line:.40}");
    }
}
