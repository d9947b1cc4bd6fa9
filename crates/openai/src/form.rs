//! A form with files (`multipart/form-data`, RFC 7578), as uploads to engines are.
//!
//! Answers one question: what does a field of it say? Files are passed over, not read. A form that cannot be read says
//! nothing; its engine judges it.

use std::borrow::Cow;

use memchr::memmem::Finder;

/// Fields of a form that are looked at.
const FIELDS_MAX: usize = 256;
/// Bytes of a field's own head.
const HEAD_MAX: usize = 4096;
/// Bytes of a field's value; a longer one is no name of a model.
const VALUE_MAX: usize = 1024;
/// Bytes of a boundary (RFC 2046, section 5.1.1).
const BOUNDARY_MAX: usize = 70;

/// A form.
///
/// ```
/// # use kvasir_openai::Form;
/// let body = b"--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--x--\r\n";
/// let form = Form::new("multipart/form-data; boundary=x", body).unwrap();
/// assert_eq!(form.field("model").as_deref(), Some("whisper"));
/// assert!(Form::new("application/json", b"{}").is_none());
/// ```
#[derive(Clone, Debug)]
pub struct Form<'a> {
    boundary: Vec<u8>,
    body: &'a [u8],
}

impl<'a> Form<'a> {
    /// A form, if the content type says that the body is one.
    #[must_use]
    pub fn new(content_type: &str, body: &'a [u8]) -> Option<Self> {
        let (essence, rest) = content_type.split_once(';')?;
        if !essence.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let boundary = parameter(rest, "boundary")?;
        let fits = (1..=BOUNDARY_MAX).contains(&boundary.len());
        fits.then(|| Self {
            boundary: [b"\r\n--", boundary.as_bytes()].concat(),
            body,
        })
    }

    /// What the first field of that name says, if it is short text and no file.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<Cow<'a, str>> {
        let finder = Finder::new(&self.boundary);
        // The first boundary may stand at the very beginning.
        let mut rest = match self.body.strip_prefix(&self.boundary[2..]) {
            Some(rest) => rest,
            None => after(self.body, &finder)?,
        };
        for _ in 0..FIELDS_MAX {
            let part = after_line(rest)?;
            let end = finder.find(part)?;
            if let Some(value) = value_of(&part[..end], name) {
                return Some(value);
            }
            rest = &part[end + self.boundary.len()..];
        }
        None
    }
}

fn after<'a>(bytes: &'a [u8], finder: &Finder<'_>) -> Option<&'a [u8]> {
    let at = finder.find(bytes)?;
    Some(&bytes[at + finder.needle().len()..])
}

/// What follows the line of a boundary; none after the last.
fn after_line(bytes: &[u8]) -> Option<&[u8]> {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let blanks = bytes.iter().take_while(|byte| blank(byte)).count();
    // Its line end stays: a part without a head of its own begins with an empty line.
    bytes[blanks..]
        .starts_with(b"\r\n")
        .then(|| &bytes[blanks..])
}

/// The value of a part, if it is the field of this name.
fn value_of<'a>(part: &'a [u8], name: &str) -> Option<Cow<'a, str>> {
    let near = &part[..part.len().min(HEAD_MAX)];
    let head_end = memchr::memmem::find(near, b"\r\n\r\n")?;
    let head = std::str::from_utf8(&part[..head_end]).ok()?;
    let value = &part[head_end + 4..];
    let fields = head.lines().filter_map(|line| line.split_once(':'));
    let mut dispositions = fields
        .filter(|(field, _)| field.trim().eq_ignore_ascii_case("content-disposition"))
        .filter_map(|(_, said)| said.split_once(';'));
    let (kind, said) = dispositions.next()?;
    let is_field = kind.trim().eq_ignore_ascii_case("form-data")
        && parameter(said, "name").as_deref() == Some(name)
        && parameter(said, "filename").is_none();
    let short = is_field && value.len() <= VALUE_MAX;
    short
        .then(|| std::str::from_utf8(value).ok())
        .flatten()
        .map(Cow::Borrowed)
}

/// The value of a parameter: a word, or quoted.
fn parameter(mut text: &str, name: &str) -> Option<String> {
    loop {
        let (key, rest) = text.split_once('=')?;
        let (value, rest) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let (word, rest) = rest.split_once(';').unwrap_or((rest, ""));
                (word.trim().to_owned(), rest)
            }
        };
        if key
            .trim_matches([' ', '\t', ';'])
            .eq_ignore_ascii_case(name)
        {
            return Some(value);
        }
        text = rest;
    }
}

/// What stands between quotes, and what follows them.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; charset=utf-8; boundary=\"a b\"";

    fn part(said: &str, value: &str) -> String {
        format!("--a b\r\nContent-Disposition: {said}\r\n\r\n{value}\r\n")
    }

    fn model(parts: &[String]) -> Option<String> {
        let body = [&*parts.concat(), "--a b--\r\n"].concat();
        let form = Form::new(TYPE, body.as_bytes()).unwrap();
        form.field("model").map(Cow::into_owned)
    }

    #[test]
    fn the_field_is_found_wherever_it_stands() {
        let file = part(
            "form-data; name=\"file\"; filename=\"x.wav\"",
            "\r\n--a \0\r\n",
        );
        let named = part("form-data; name=\"model\"", "whisper-1");
        let other = part("form-data; name=\"language\"", "model");
        for parts in [
            vec![named.clone()],
            vec![file.clone(), named.clone(), other.clone()],
            vec![other.clone(), named.clone(), file.clone()],
            vec![other.clone(), part("form-data;name=model", "whisper-1")],
            vec!["preamble\r\n".into(), named],
        ] {
            assert_eq!(model(&parts).as_deref(), Some("whisper-1"), "{parts:?}");
        }
        assert_eq!(model(&[file, other]), None);
    }

    #[test]
    fn what_only_looks_like_the_field_is_not_it() {
        for said in [
            "form-data; name=\"file\"; filename=\"; name=\\\"model\\\"\"",
            "form-data; name=\"model\"; filename=\"model\"",
            "form-data; name=\"models\"",
            "form-data; name=\"model",
            "attachment; name=\"model\"",
            "form-data",
        ] {
            assert_eq!(model(&[part(said, "x")]), None, "{said}");
        }
        let long = part("form-data; name=\"model\"", &"x".repeat(VALUE_MAX + 1));
        assert_eq!(model(&[long]), None);
        let many: Vec<_> = (0..FIELDS_MAX)
            .map(|n| part(&format!("form-data; name={n}"), ""))
            .collect();
        let named = part("form-data; name=\"model\"", "m");
        assert_eq!(model(&[many.concat(), named.clone()]), None);
        assert_eq!(model(&[many[1..].concat(), named]).as_deref(), Some("m"));
    }

    #[test]
    fn only_forms_are_forms() {
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/mixed; boundary=x",
            "application/json; boundary=x",
            "",
        ] {
            assert!(Form::new(kind, b"").is_none(), "{kind}");
        }
        let cut = b"--x\r\ncontent-disposition: form-data; name=model\r\n\r\nm";
        let form = Form::new("multipart/form-data;boundary=x", cut).unwrap();
        assert_eq!(form.field("model"), None, "its end is not there");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn no_bytes_panic(kind in "(multipart/form-data; boundary=x|.{0,40})", pieces in prop::collection::vec(prop_oneof![
            Just(b"--x".to_vec()), Just(b"\r\n".to_vec()), Just(b"content-disposition: form-data; name=\"model\"".to_vec()),
            Just(b"--".to_vec()), prop::collection::vec(any::<u8>(), 0..8)], 0..24)) {
            let body = pieces.concat();
            if let Some(form) = Form::new(&kind, &body) {
                let _ = form.field("model");
            }
        }
    }
}
