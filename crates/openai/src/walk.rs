//! The quick way through JSON text.
//!
//! Answers one question: where does the value that begins here end? Strings are passed over many bytes at a time, and
//! nothing is built. What is told is what `serde_json` would find; where this reader is not sure (bad syntax,
//! deep nesting, escapes in keys) it says so, and the caller asks `serde_json`, whose word and whose error count.
//!
//! Invariant: a value that ends at `end` here is well-formed JSON there, with the same end.

use memchr::memchr2;

/// Deepest nesting that is followed; one bit each.
const DEPTH_MAX: u32 = 64;
/// Strings that end within so many bytes, a multiple of eight, are looked through eight bytes at a time.
const SHORT: usize = 32;

/// A field of an object: its key between the quotes, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonField<'a> {
    pub(crate) key: &'a str,
    pub(crate) value: &'a str,
}

/// Calls `each` for the fields of the object that `json` is; `None` where `serde_json` must be asked. What was
/// called for before counts only if the end is reached.
pub(crate) fn fields<'a>(json: &'a str, each: impl FnMut(JsonField<'a>)) -> Option<()> {
    fields_with(json, |_, at| value(json.as_bytes(), at), each)
}

/// As [`fields`]; `end` finds the end of the value that begins there, which has this key.
pub(crate) fn fields_with<'a>(
    json: &'a str,
    end: impl FnMut(&'a str, usize) -> Option<usize>,
    each: impl FnMut(JsonField<'a>),
) -> Option<()> {
    let bytes = json.as_bytes();
    let at = object(json, blank(bytes, 0), end, each)?;
    (blank(bytes, at) == bytes.len()).then_some(())
}

/// The end of the object that begins at `at`, with its fields.
fn object<'a>(
    json: &'a str,
    at: usize,
    mut end: impl FnMut(&'a str, usize) -> Option<usize>,
    mut each: impl FnMut(JsonField<'a>),
) -> Option<usize> {
    let bytes = json.as_bytes();
    if *bytes.get(at)? != b'{' {
        return None;
    }
    let mut at = blank(bytes, at + 1);
    if *bytes.get(at)? == b'}' {
        return Some(at + 1);
    }
    loop {
        let start = at;
        at = key(bytes, at)?;
        let name = json.get(start + 1..at - 1)?;
        at = blank(bytes, at);
        if *bytes.get(at)? != b':' {
            return None;
        }
        let start = blank(bytes, at + 1);
        let end = end(name, start)?;
        each(JsonField {
            key: name,
            value: json.get(start..end)?,
        });
        at = blank(bytes, end);
        match *bytes.get(at)? {
            b',' => at = blank(bytes, at + 1),
            b'}' => return Some(at + 1),
            _ => return None,
        }
    }
}

/// The end of the list that begins at `at`. Calls `each` for the fields of every object in it, with its number; `other`
/// for each item that is none.
pub(crate) fn objects<'a>(
    json: &'a str,
    at: usize,
    mut each: impl FnMut(usize, JsonField<'a>),
    mut other: impl FnMut(),
) -> Option<usize> {
    let bytes = json.as_bytes();
    if *bytes.get(at)? != b'[' {
        return None;
    }
    let mut at = blank(bytes, at + 1);
    if *bytes.get(at)? == b']' {
        return Some(at + 1);
    }
    for number in 0.. {
        let end = match *bytes.get(at)? {
            b'{' => object(json, at, |_, at| value(bytes, at), |f| each(number, f))?,
            _ => {
                other();
                value(bytes, at)?
            }
        };
        at = blank(bytes, end);
        match *bytes.get(at)? {
            b',' => at = blank(bytes, at + 1),
            b']' => return Some(at + 1),
            _ => return None,
        }
    }
    None
}

/// The first value in the list that `json` is, and whether it is the only one; `None` where it is no list or has none.
pub(crate) fn first_item(json: &str) -> Option<(&str, bool)> {
    let bytes = json.as_bytes();
    let at = blank(bytes, 0);
    if *bytes.get(at)? != b'[' {
        return None;
    }
    let start = blank(bytes, at + 1);
    let end = value(bytes, start)?;
    let only = *bytes.get(blank(bytes, end))? == b']';
    Some((json.get(start..end)?, only))
}

/// The ids in the list that `json` is, at most `max` of them, and whether these are all; `None` if something else stands
/// before the end that was read to.
pub(crate) fn ids(json: &str, max: usize) -> Option<(Vec<u32>, bool)> {
    let bytes = json.as_bytes();
    let mut at = blank(bytes, 0);
    if *bytes.get(at)? != b'[' {
        return None;
    }
    let mut ids = Vec::new();
    at = blank(bytes, at + 1);
    if *bytes.get(at)? == b']' {
        return Some((ids, true));
    }
    loop {
        if ids.len() == max {
            return Some((ids, false));
        }
        let end = digits(bytes, at);
        ids.push(json.get(at..end)?.parse().ok()?);
        at = blank(bytes, end);
        match *bytes.get(at)? {
            b',' => at = blank(bytes, at + 1),
            b']' => return Some((ids, true)),
            _ => return None,
        }
    }
}

/// How many values `json` has in it, those inside others included, counted no further than one past `max`. It is taken to
/// be well-formed.
#[must_use]
pub fn count_values(json: &str, max: usize) -> usize {
    let bytes = json.as_bytes();
    let (mut at, mut values) = (0, 1usize);
    while let Some(byte) = bytes.get(at) {
        if values > max {
            break;
        }
        at = match byte {
            b'"' => match string(bytes, at) {
                Some(end) => end,
                None => break,
            },
            b',' | b'[' | b'{' => {
                values += 1;
                at + 1
            }
            _ => at + 1,
        };
    }
    values
}

/// The end of the value that begins at `at`.
pub(crate) fn value(bytes: &[u8], mut at: usize) -> Option<usize> {
    // One bit for each open bracket, the innermost lowest: 1 for an object.
    let (mut open, mut depth) = (0u64, 0u32);
    loop {
        match *bytes.get(at)? {
            bracket @ (b'{' | b'[') => {
                if depth == DEPTH_MAX {
                    return None;
                }
                let object = bracket == b'{';
                (open, depth) = (open << 1 | u64::from(object), depth + 1);
                at = blank(bytes, at + 1);
                let closing = if object { b'}' } else { b']' };
                if *bytes.get(at)? != closing {
                    at = if object { past_key(bytes, at)? } else { at };
                    continue;
                }
                (open, depth) = (open >> 1, depth - 1);
                at += 1;
            }
            b'"' => at = string(bytes, at)?,
            b't' => at = word(bytes, at, b"true")?,
            b'f' => at = word(bytes, at, b"false")?,
            b'n' => at = word(bytes, at, b"null")?,
            _ => at = number(bytes, at)?,
        }
        // A value ended: close what ends with it, then go on to the next.
        loop {
            if depth == 0 {
                return Some(at);
            }
            at = blank(bytes, at);
            let object = open & 1 == 1;
            match (*bytes.get(at)?, object) {
                (b',', true) => at = past_key(bytes, blank(bytes, at + 1))?,
                (b',', false) => at = blank(bytes, at + 1),
                (b'}', true) | (b']', false) => {
                    (open, depth) = (open >> 1, depth - 1);
                    at += 1;
                    continue;
                }
                _ => return None,
            }
            break;
        }
    }
}

/// Past a key and its colon, to the value.
fn past_key(bytes: &[u8], at: usize) -> Option<usize> {
    let at = blank(bytes, string(bytes, at)?);
    (*bytes.get(at)? == b':').then(|| blank(bytes, at + 1))
}

/// The end of a key without escapes.
fn key(bytes: &[u8], at: usize) -> Option<usize> {
    let end = string(bytes, at)?;
    let inner = bytes.get(at + 1..end - 1)?;
    (!inner.contains(&b'\\')).then_some(end)
}

/// The end of the string whose opening quote is at `at`.
pub(crate) fn string(bytes: &[u8], at: usize) -> Option<usize> {
    if *bytes.get(at)? != b'"' {
        return None;
    }
    let mut at = at + 1;
    loop {
        let stop = at + plain(bytes.get(at..)?)?;
        match *bytes.get(stop)? {
            b'"' => return Some(stop + 1),
            _ => at = escape(bytes, stop + 1)?,
        }
    }
}

/// Bytes before the next quote or backslash; `None` if there is none, or a control character before it.
fn plain(bytes: &[u8]) -> Option<usize> {
    let (words, tail) = bytes.get(..SHORT).unwrap_or(bytes).as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        let stops = stops(u64::from_le_bytes(*word));
        if stops != 0 {
            let at = at * 8 + stops.trailing_zeros() as usize / 8;
            return (*bytes.get(at)? >= 0x20).then_some(at);
        }
    }
    if bytes.len() <= SHORT {
        let at = tail
            .iter()
            .position(|b| matches!(b, b'"' | b'\\' | 0..0x20))?;
        return (*tail.get(at)? >= 0x20).then_some(bytes.len() - tail.len() + at);
    }
    let rest = bytes.get(SHORT..)?;
    let len = memchr2(b'"', b'\\', rest)?;
    // Lane by lane, which the compiler makes wide instructions of.
    let (blocks, tail) = rest.get(..len)?.as_chunks::<32>();
    let mut least = [u8::MAX; 32];
    for block in blocks {
        for (lane, byte) in least.iter_mut().zip(block) {
            *lane = (*lane).min(*byte);
        }
    }
    let printable = least.iter().chain(tail).all(|byte| *byte >= 0x20);
    printable.then_some(SHORT + len)
}

/// The high bits of bytes that are a quote, a backslash or a control character. The lowest is right; those above it
/// may be none.
fn stops(word: u64) -> u64 {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word & HIGH;
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    equal(b'"') | equal(b'\\') | below(word, 0x20)
}

/// Past what follows a backslash.
fn escape(bytes: &[u8], at: usize) -> Option<usize> {
    match *bytes.get(at)? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(at + 1),
        b'u' => {
            let digits = bytes.get(at + 1..at + 5)?;
            digits.iter().all(u8::is_ascii_hexdigit).then_some(at + 5)
        }
        _ => None,
    }
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let mut at = at + usize::from(*bytes.get(at)? == b'-');
    match *bytes.get(at)? {
        b'0' => at += 1,
        b'1'..=b'9' => at = digits(bytes, at),
        _ => return None,
    }
    if bytes.get(at) == Some(&b'.') {
        let end = digits(bytes, at + 1);
        if end == at + 1 {
            return None;
        }
        at = end;
    }
    if let Some(b'e' | b'E') = bytes.get(at) {
        let signed = matches!(bytes.get(at + 1), Some(b'+' | b'-'));
        let start = at + 1 + usize::from(signed);
        at = digits(bytes, start);
        if at == start {
            return None;
        }
    }
    Some(at)
}

fn digits(bytes: &[u8], at: usize) -> usize {
    let rest = bytes.get(at..).unwrap_or_default();
    at + rest.iter().take_while(|b| b.is_ascii_digit()).count()
}

fn word(bytes: &[u8], at: usize, word: &[u8]) -> Option<usize> {
    bytes.get(at..)?.starts_with(word).then(|| at + word.len())
}

/// The next byte that is no white space.
pub(crate) fn blank(bytes: &[u8], at: usize) -> usize {
    let rest = bytes.get(at..).unwrap_or_default();
    at + rest
        .iter()
        .take_while(|b| matches!(b, b' ' | b'\n' | b'\t' | b'\r'))
        .count()
}

#[cfg(test)]
pub(crate) mod tests;
