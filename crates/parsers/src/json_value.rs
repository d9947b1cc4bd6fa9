//! Where a JSON value ends, and what a JSON string says, as characters come.
//!
//! No value is built: its text is passed on as it is.

/// Deepest nesting that is followed.
const DEPTH_MAX: u32 = 256;

/// What a character does to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fed {
    /// It is part of the value.
    Part,
    /// It is the last part.
    Last,
    /// The value ended before it.
    Before,
    /// No JSON has it there.
    Bad,
}

/// Follows one value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ValueScan {
    depth: u32,
    in_string: bool,
    escaped: bool,
    in_literal: bool,
}

impl ValueScan {
    /// The next character. White space before the value is not fed.
    pub(crate) fn feed(&mut self, c: char) -> Fed {
        if self.in_string {
            return self.string(c);
        }
        if self.depth == 0 && self.in_literal {
            return match c {
                'a'..='z' | 'A'..='Z' | '0'..='9' | '+' | '-' | '.' => Fed::Part,
                _ => Fed::Before,
            };
        }
        match c {
            '"' => {
                self.in_string = true;
                Fed::Part
            }
            '{' | '[' if self.depth < DEPTH_MAX => {
                self.depth += 1;
                Fed::Part
            }
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                match self.depth {
                    0 => Fed::Last,
                    _ => Fed::Part,
                }
            }
            'a'..='z' | 'A'..='Z' | '0'..='9' | '+' | '-' | '.' => {
                self.in_literal = self.depth == 0;
                Fed::Part
            }
            ',' | ':' | ' ' | '\n' | '\t' | '\r' if self.depth > 0 => Fed::Part,
            _ => Fed::Bad,
        }
    }

    fn string(&mut self, c: char) -> Fed {
        match (self.escaped, c) {
            (true, _) => self.escaped = false,
            (false, '\\') => self.escaped = true,
            (false, '"') => {
                self.in_string = false;
                if self.depth == 0 {
                    return Fed::Last;
                }
            }
            _ => {}
        }
        Fed::Part
    }
}

/// What a JSON string says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unescape {
    /// An escape that is not complete.
    escape: String,
    /// The first half of a character.
    high: Option<u32>,
}

impl Unescape {
    /// The next character between the quotes; false at the closing quote.
    pub(crate) fn feed(&mut self, c: char, out: &mut String) -> bool {
        if self.escape.is_empty() {
            match c {
                '"' => {
                    self.flush(out);
                    return false;
                }
                '\\' => self.escape.push(c),
                _ => {
                    self.flush(out);
                    out.push(c);
                }
            }
            return true;
        }
        self.escape.push(c);
        let digits = self.escape.strip_prefix("\\u");
        match digits {
            Some(digits) if digits.len() < 4 && c.is_ascii() => return true,
            Some(digits) => {
                let code = u32::from_str_radix(digits, 16).ok();
                self.unit(code, out);
            }
            None => self.simple(c, out),
        }
        self.escape.clear();
        true
    }

    fn simple(&mut self, c: char, out: &mut String) {
        self.flush(out);
        match c {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            '"' | '\\' | '/' => out.push(c),
            // No JSON has it: as it is.
            _ => out.push_str(&self.escape),
        }
    }

    fn unit(&mut self, code: Option<u32>, out: &mut String) {
        let Some(code) = code else {
            self.flush(out);
            out.push_str(&self.escape);
            return;
        };
        match (self.high.take(), code) {
            (Some(high), 0xdc00..=0xdfff) => {
                let joined = 0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00);
                out.push(char::from_u32(joined).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            (lost, 0xd800..=0xdbff) => {
                if lost.is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                self.high = Some(code);
            }
            (lost, code) => {
                if lost.is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
        }
    }

    /// The other half of a character did not come.
    fn flush(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends the text between the quotes of a JSON string.
pub(crate) fn escape_into(text: &str, out: &mut String) {
    let quoted = serde_json::Value::from(text).to_string();
    let inner = quoted.strip_prefix('"').and_then(|q| q.strip_suffix('"'));
    out.push_str(inner.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of(text: &str) -> (usize, Fed) {
        let mut scan = ValueScan::default();
        for (at, c) in text.char_indices() {
            match scan.feed(c) {
                Fed::Part => {}
                fed => return (at, fed),
            }
        }
        (text.len(), Fed::Part)
    }

    #[test]
    fn values_end_where_json_says() {
        assert_eq!(end_of(r#"{"a":"}\"{"} x"#), (11, Fed::Last));
        assert_eq!(end_of("[1,[2]]x"), (6, Fed::Last));
        assert_eq!(end_of("12.5,"), (4, Fed::Before));
        assert_eq!(end_of("true}"), (4, Fed::Before));
        assert_eq!(end_of(r#""a\"b"x"#), (5, Fed::Last));
        assert_eq!(end_of("{\"a\":1 </t"), (7, Fed::Bad));
        assert_eq!(end_of("{\"a"), (3, Fed::Part));
    }

    #[test]
    fn strings_are_read_as_serde_reads_them() {
        for text in [
            r#""a\nb""#,
            r#""\u00e9\ud83d\ude00\\""#,
            r#""\"\/\b\f\r\t""#,
        ] {
            let mut said = String::new();
            let mut unescape = Unescape::default();
            for c in text.chars().skip(1) {
                if !unescape.feed(c, &mut said) {
                    break;
                }
            }
            assert_eq!(said, serde_json::from_str::<String>(text).unwrap());
        }
    }
}
