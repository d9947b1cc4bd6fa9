//! Values written as Python writes them.
//!
//! Answers one question: what text does a template's value become? Templates were made for Jinja in Python,
//! where `{{ true }}` is `True`, a list is printed with single quotes, and `tojson` puts a space after commas.

use std::fmt::Write as _;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Appends what `{{ value }}` prints.
pub(crate) fn print(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(out, value),
    }
}

/// Appends what Python's `repr` gives.
fn repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(out, value),
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &key);
                out.push_str(": ");
                repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Single quotes, unless the text has those and no double ones.
fn quote(out: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if c.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

fn number(out: &mut String, value: &Value) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(float) => python_float(out, float),
        Err(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

/// The shortest digits that read back, with an exponent outside 1e-4 to 1e16, as Python chooses.
fn python_float(out: &mut String, float: f64) {
    let size = float.abs();
    if float.is_nan() {
        out.push_str("NaN");
    } else if float.is_infinite() {
        out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
    } else if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(e) => ('-', e),
            None => ('+', exponent),
        };
        let _ = write!(out, "{digits}e{sign}{exponent:0>2}");
    } else {
        let _ = write!(out, "{float:?}");
    }
}

/// What `tojson` was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JsonStyle {
    pub(crate) indent: Option<usize>,
    pub(crate) ascii: bool,
    pub(crate) sort_keys: bool,
}

/// Appends JSON as Python's `json.dumps` writes it.
pub(crate) fn json(out: &mut String, value: &Value, style: JsonStyle, depth: usize) {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(out, value),
        ValueKind::String => json_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter().into_iter().flatten();
            bracket(out, ('[', ']'), style, depth, items, |out, item| {
                json(out, &item, style, depth + 1);
            });
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            if style.sort_keys {
                keys.sort();
            }
            bracket(
                out,
                ('{', '}'),
                style,
                depth,
                keys.into_iter(),
                |out, key| {
                    let name = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
                    json_string(out, &name, style.ascii);
                    out.push_str(": ");
                    json(
                        out,
                        &value.get_item(&key).unwrap_or_default(),
                        style,
                        depth + 1,
                    );
                },
            );
        }
        _ => json_string(out, &value.to_string(), style.ascii),
    }
}

fn bracket(
    out: &mut String,
    (open, close): (char, char),
    style: JsonStyle,
    depth: usize,
    items: impl Iterator<Item = Value>,
    mut write: impl FnMut(&mut String, Value),
) {
    out.push(open);
    let mut empty = true;
    for item in items {
        if !empty {
            out.push_str(if style.indent.is_some() { "," } else { ", " });
        }
        empty = false;
        new_line(out, style, depth + 1);
        write(out, item);
    }
    if !empty {
        new_line(out, style, depth);
    }
    out.push(close);
}

fn new_line(out: &mut String, style: JsonStyle, depth: usize) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn json_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || (ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    fn dumps(text: &str, style: JsonStyle) -> String {
        let mut out = String::new();
        json(&mut out, &value(text), style, 0);
        out
    }

    /// Right-hand sides are what CPython 3.11 prints for these.
    #[test]
    fn json_is_pythons() {
        let plain = JsonStyle::default();
        assert_eq!(
            dumps(r#"{"b":[1,2.0,true,null],"a":"é\"\u0001/<>&'"}"#, plain),
            r#"{"b": [1, 2.0, true, null], "a": "é\"\u0001/<>&'"}"#
        );
        assert_eq!(
            dumps(r#"[1e16, 1e-5, 0.0001, 123456789.5, -0.0]"#, plain),
            "[1e+16, 1e-05, 0.0001, 123456789.5, -0.0]"
        );
        let indented = JsonStyle {
            indent: Some(4),
            ..plain
        };
        assert_eq!(
            dumps(r#"{"a":[1],"b":{},"c":[]}"#, indented),
            "{\n    \"a\": [\n        1\n    ],\n    \"b\": {},\n    \"c\": []\n}"
        );
        let ascii = JsonStyle {
            ascii: true,
            sort_keys: true,
            ..plain
        };
        assert_eq!(
            dumps(r#"{"b":"é😀","a":1}"#, ascii),
            r#"{"a": 1, "b": "\u00e9\ud83d\ude00"}"#
        );
    }

    #[test]
    fn printing_is_pythons() {
        let shown = |text: &str| {
            let mut out = String::new();
            print(&mut out, &value(text));
            out
        };
        assert_eq!(shown("true"), "True");
        assert_eq!(shown("null"), "None");
        assert_eq!(shown("1.0"), "1.0");
        assert_eq!(shown(r#""a'b""#), "a'b");
        assert_eq!(
            shown(r#"{"a":["it's","q\"'",1,false,null]}"#),
            r#"{'a': ["it's", 'q"\'', 1, False, None]}"#
        );
    }
}
