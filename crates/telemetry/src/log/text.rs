//! What does a log line look like to a person, and what can a field do to it?
//!
//! One event is one line: `time LEVEL message name=value …`. A field that holds a line break, a terminal's escape
//! sequence or a megabyte changes none of that: control characters are shown escaped and a line ends at
//! [`LINE_BYTES_MAX`]. (JSON lines are escaped by their own grammar.)

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Longest line of text; what is beyond is cut and marked with `…`.
pub(super) const LINE_BYTES_MAX: usize = 16 << 10;

/// Lines of text, with colours or without.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    pub(super) ansi: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = *event.metadata().level();
        if self.ansi {
            out.write_str("\x1b[2m")?;
            SystemTime.format_time(&mut out)?;
            write!(out, "\x1b[0m \x1b[{}m{level:>5}\x1b[0m", colour(level))?;
        } else {
            SystemTime.format_time(&mut out)?;
            write!(out, " {level:>5}")?;
        }
        let mut fields = Fields {
            out: Escaped {
                out: &mut out,
                left: LINE_BYTES_MAX,
            },
            ansi: self.ansi,
            result: Ok(()),
        };
        event.record(&mut fields);
        let (left, result) = (fields.out.left, fields.result);
        result?;
        if left == 0 {
            out.write_char('…')?;
        }
        out.write_char('\n')
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
struct Fields<'a, W> {
    out: Escaped<'a, W>,
    ansi: bool,
    result: fmt::Result,
}

impl<W: Write> Fields<'_, W> {
    fn write(&mut self, field: &Field, value: fmt::Arguments<'_>) -> fmt::Result {
        self.out.out.write_char(' ')?;
        match (field.name(), self.ansi) {
            ("message", _) => {}
            (name, false) => write!(self.out.out, "{name}=")?,
            (name, true) => write!(self.out.out, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
        }
        self.out.write_fmt(value)
    }
}

impl<W: Write> Visit for Fields<'_, W> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.result.is_ok() && self.out.left > 0 {
            self.result = self.write(field, format_args!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.record_debug(field, &format_args!("{value}"));
        } else {
            self.record_debug(field, &value);
        }
    }
}

/// Passes text on, control characters as escapes, until nothing is left of the line.
struct Escaped<'a, W> {
    out: &'a mut W,
    left: usize,
}

impl<W: Write> Write for Escaped<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(misleads) {
            let (plain, from) = rest.split_at(at);
            self.plain(plain)?;
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
        self.plain(rest)
    }
}

impl<W: Write> Escaped<'_, W> {
    fn plain(&mut self, text: &str) -> fmt::Result {
        let cut = text.floor_char_boundary(self.left);
        self.left = match text.len() < self.left {
            true => self.left - text.len(),
            false => 0,
        };
        self.out.write_str(text.get(..cut).unwrap_or_default())
    }
}

/// Whether a character could break a line, drive a terminal or turn the order of what follows.
fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt as layer;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Seen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What `log` writes, without the times.
    fn lines(ansi: bool, log: impl FnOnce()) -> Vec<String> {
        let seen = Seen::default();
        let writer = seen.clone();
        let to = layer::layer()
            .event_format(Lines { ansi })
            .with_writer(move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(to);
        tracing::subscriber::with_default(subscriber, log);
        let bytes = seen.0.lock().unwrap().clone();
        let text = String::from_utf8(bytes).unwrap();
        let skip = "2026-11-15T14:09:08.123456Z".len() + if ansi { 8 } else { 0 };
        text.lines().map(|line| line[skip..].to_owned()).collect()
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
