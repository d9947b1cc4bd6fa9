//! What does a log line look like to a program?
//!
//! One event is one JSON object on one line: `timestamp`, `level`, then the event's own fields with `message` first,
//! then `target`. Numbers and booleans are themselves; all else is a string, escaped as JSON asks.

use std::fmt::{self, Write};
use std::time::Duration;

use tracing::Event;
use tracing::field::{Field, Visit};

use super::digits::{push_number, push_time};

/// Appends the line of `event`.
pub(super) fn write(out: &mut String, unix: Duration, event: &Event<'_>) {
    out.push_str("{\"timestamp\":\"");
    push_time(out, unix);
    out.push_str("\",\"level\":\"");
    out.push_str(event.metadata().level().as_str());
    out.push('"');
    event.record(&mut Fields { out });
    out.push_str(",\"target\":");
    push_string(out, event.metadata().target());
    out.push_str("}\n");
}

struct Fields<'a> {
    out: &'a mut String,
}

impl Fields<'_> {
    fn name(&mut self, field: &Field) {
        self.out.push(',');
        push_string(self.out, field.name());
        self.out.push(':');
    }

    fn value(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        self.name(field);
        // Writing into a string does not fail.
        let _ = self.out.write_fmt(value);
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.name(field);
        self.out.push('"');
        let _ = write!(Escaped(self.out), "{value:?}");
        self.out.push('"');
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.name(field);
        push_string(self.out, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        push_number(self.out, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.value(field, format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.value(field, format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.value(field, format_args!("{value:?}")),
            false => self.value(field, format_args!("null")),
        }
    }
}

/// Passes text on as the inside of a JSON string.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        push_escaped(self.0, text);
        Ok(())
    }
}

fn push_string(out: &mut String, text: &str) {
    out.push('"');
    push_escaped(out, text);
    out.push('"');
}

fn push_escaped(out: &mut String, mut text: &str) {
    let special = |byte: u8| byte < 0x20 || byte == b'"' || byte == b'\\';
    while let Some(at) = text.bytes().position(special) {
        // What is special is one byte of ASCII, so a character ends before it and after it.
        let (plain, rest) = text.split_at(at);
        let (one, rest) = rest.split_at(1);
        out.push_str(plain);
        match one {
            "\"" => out.push_str("\\\""),
            "\\" => out.push_str("\\\\"),
            "\n" => out.push_str("\\n"),
            "\r" => out.push_str("\\r"),
            "\t" => out.push_str("\\t"),
            "\u{8}" => out.push_str("\\b"),
            "\u{c}" => out.push_str("\\f"),
            other => {
                let code = other.bytes().next().unwrap_or_default();
                let _ = write!(out, "\\u{code:04x}");
            }
        }
        text = rest;
    }
    out.push_str(text);
}

#[cfg(test)]
mod tests {
    use super::super::subscriber::tests::lines;
    use super::*;
    use crate::log::Format;

    #[test]
    fn an_event_is_an_object_of_time_level_message_fields_and_target() {
        let seen = lines(Format::Json, false, || {
            tracing::info!(
                workers = 2, name = "a \"b\"", worker = %"x:1", none = None::<u32>, kind = ?Some(1),
                left = -3, yes = true, share = 0.25, odd = f64::NAN, "joined {}", 1
            );
            tracing::error!(target: "elsewhere", "late");
        });
        let bare: Vec<_> = seen.iter().map(|line| &line[43..]).collect();
        assert_eq!(
            bare,
            [
                "\"level\":\"INFO\",\"message\":\"joined 1\",\"workers\":2,\"name\":\"a \\\"b\\\"\",\
                 \"worker\":\"x:1\",\"kind\":\"Some(1)\",\"left\":-3,\"yes\":true,\"share\":0.25,\"odd\":null,\
                 \"target\":\"kvasir_telemetry::log::json::tests\"}",
                "\"level\":\"ERROR\",\"message\":\"late\",\"target\":\"elsewhere\"}"
            ]
        );
        assert!(seen[0].starts_with("{\"timestamp\":\"2"), "{}", seen[0]);
    }

    #[test]
    fn strings_are_escaped_as_serde_json_does() {
        let all: String = (0..0x250).filter_map(char::from_u32).collect();
        let texts = [
            "",
            "plain",
            "\"\\",
            "a\nb\r\t\u{8}\u{c}\u{1b}\u{7f}é\u{2028}😀",
            &all,
        ];
        for text in texts {
            let mut out = String::new();
            push_string(&mut out, text);
            assert_eq!(out, serde_json::to_string(text).unwrap());
        }
    }

    #[test]
    fn no_field_makes_a_second_line() {
        let evil = "zz\n{\"level\":\"INFO\"}\r\u{1b}[2J";
        let seen = lines(
            Format::Json,
            false,
            || tracing::info!(a = %evil, b = evil, "m {evil}"),
        );
        let [line] = &seen[..] else {
            panic!("{} lines", seen.len())
        };
        let read: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&read["a"], &read["b"]), (&evil.into(), &evil.into()));
        assert_eq!(read["message"], format!("m {evil}"));
    }
}
