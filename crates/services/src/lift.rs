//! The token ids of a body, read before the rest of it.
//!
//! Answers one question: which ids stand in the body's list `token_ids`? The list is nearly all of a body, and a reader of JSON that
//! looks at each byte twice took half of a call's time. What is taken out is what `serde_json` would read; where this reader is not sure
//! it takes nothing, and `serde_json` reads the whole body.

const NAME: &[u8] = b"\"token_ids\"";
const ONES: u64 = u64::from_le_bytes([1; 8]);
const HIGH: u64 = ONES << 7;

/// A body without its ids, and the ids.
#[derive(Debug, PartialEq)]
pub(crate) struct Lifted {
    /// The body, with an empty list in the place of the ids.
    pub(crate) rest: Vec<u8>,
    pub(crate) ids: Vec<u32>,
}

impl Lifted {
    /// Takes the ids out of an object. `None` if a value before them is no plain string, number or word, if an id has more than seven
    /// digits, or if the list is none of ids.
    pub(crate) fn of(body: &[u8]) -> Option<Self> {
        let (head, list) = before_list(body)?;
        let (ids, tail) = list_of_ids(list)?;
        let rest = [head, b"[]", tail].concat();
        Some(Self { rest, ids })
    }
}

/// What stands before the list of ids, and the rest.
fn before_list(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut rest = past(body, b'{')?;
    loop {
        if let Some(after) = rest.strip_prefix(NAME) {
            let list = past(after, b':')?;
            return Some((body.get(..body.len() - list.len())?, list));
        }
        rest = past(after_string(rest)?, b':')?;
        rest = match rest.first()? {
            b'"' => after_string(rest)?,
            b'{' | b'[' => return None,
            _ => rest.get(rest.iter().position(|byte| matches!(byte, b',' | b'}'))?..)?,
        };
        rest = past(rest, b',')?;
    }
}

/// Past blanks, this byte, and blanks again.
fn past(text: &[u8], byte: u8) -> Option<&[u8]> {
    unblank(text).strip_prefix(&[byte]).map(unblank)
}

/// Without the blanks before it. JSON's, which are fewer than the library's `trim`.
fn unblank(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..] = text {
        text = rest;
    }
    text
}

/// Past a string without escapes.
fn after_string(text: &[u8]) -> Option<&[u8]> {
    let inner = text.strip_prefix(b"\"")?;
    let end = memchr::memchr2(b'"', b'\\', inner)?;
    inner.get(end..)?.strip_prefix(b"\"")
}

/// The ids of the list that `text` begins with, and what follows it.
fn list_of_ids(text: &[u8]) -> Option<(Vec<u32>, &[u8])> {
    let mut rest = text.strip_prefix(b"[")?;
    // Three bytes and more for each id, nearly always.
    let mut ids = Vec::with_capacity(rest.len() / 4);
    if let Some(tail) = unblank(rest).strip_prefix(b"]") {
        return Some((ids, tail));
    }
    rest = unblank(rest);
    loop {
        let word = first_eight(rest);
        let Some((id, digits)) = leading_id(word) else {
            // More blanks than one after the comma.
            match unblank(rest) {
                next if next.len() < rest.len() => rest = next,
                _ => return None,
            }
            continue;
        };
        ids.push(id);
        // What follows is in the word, too: at most seven bytes are digits.
        let after = word >> (8 * digits);
        if after & 0xff == u64::from(b',') && digits < 7 {
            let blank = (after >> 8) & 0xff == u64::from(b' ');
            rest = rest.get(digits + 1 + usize::from(blank)..)?;
            continue;
        }
        rest = match unblank(rest.get(digits..)?) {
            [b',', next @ ..] => unblank(next),
            [b']', tail @ ..] => return Some((ids, tail)),
            _ => return None,
        };
    }
}

/// The first eight bytes, the first lowest; blanks where there are fewer.
fn first_eight(text: &[u8]) -> u64 {
    if let Some(bytes) = text.first_chunk() {
        return u64::from_le_bytes(*bytes);
    }
    let mut bytes = [b' '; 8];
    for (to, from) in bytes.iter_mut().zip(text) {
        *to = *from;
    }
    u64::from_le_bytes(bytes)
}

/// The number that these bytes begin with, of one to seven digits, and how many those are.
fn leading_id(word: u64) -> Option<(u32, usize)> {
    let values = word ^ (ONES * u64::from(b'0'));
    // The high bit of each byte that is no digit. The lowest is right, those above it may not be.
    let others = (values.wrapping_add(ONES * 0x76) | values) & HIGH;
    let digits = others.trailing_zeros() / 8;
    let leading_zero = values.trailing_zeros() >= 8;
    if digits == 0 || digits == 8 || (leading_zero && digits > 1) {
        return None;
    }
    // Digits at the top, zeros before them: pairs are joined, then fours, then all eight.
    let values = values << (64 - 8 * digits);
    let pairs = (values & (ONES * 0x0f)).wrapping_mul(10 * 256 + 1) >> 8;
    let fours = (pairs & 0x00ff_00ff_00ff_00ff).wrapping_mul(100 * 65_536 + 1) >> 16;
    let eight = (fours & 0x0000_ffff_0000_ffff).wrapping_mul((10_000 << 32) + 1) >> 32;
    Some((eight as u32, digits as usize))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_slice, json};

    use super::Lifted;

    #[test]
    fn ids_are_those_that_the_library_reads() {
        let many: Vec<u32> = (0..3000u32)
            .map(|n| n.wrapping_mul(2_654_435_761) % 9_999_999)
            .collect();
        for ids in [vec![], vec![0], vec![7, 0, 10, 9_999_999], many] {
            for body in [
                json!({"token_ids": ids, "model_name": "m"}).to_string(),
                json!({"a": "b", "n": -1.5e3, "token_ids": ids}).to_string(),
                format!(" {{ \"model_name\" : \"m\" , \"token_ids\" : {ids:?} , \"x\": {{}} }} "),
                format!(
                    "{{\"token_ids\":[ {} ]}}",
                    ids.iter()
                        .map(u32::to_string)
                        .collect::<Vec<_>>()
                        .join(" ,\n ")
                ),
            ] {
                let lifted = Lifted::of(body.as_bytes()).unwrap();
                assert_eq!(lifted.ids, ids, "{body}");
                let mut whole: Value = from_slice(body.as_bytes()).unwrap();
                whole["token_ids"] = json!([]);
                assert_eq!(from_slice::<Value>(&lifted.rest).unwrap(), whole);
            }
        }
    }

    #[test]
    fn what_is_not_sure_is_left_to_the_library() {
        for body in [
            "",
            "{}",
            "[1]",
            "{\"token_ids\":null}",
            "{\"token_ids\":[1,]}",
            "{\"token_ids\":[,1]}",
            "{\"token_ids\":[1 2]}",
            "{\"token_ids\":[-1]}",
            "{\"token_ids\":[1.5]}",
            "{\"token_ids\":[01]}",
            "{\"token_ids\":[00]}",
            "{\"token_ids\":[1e3]}",
            "{\"token_ids\":[1,\u{c}2]}",
            "{\"token_ids\":[12345678]}",
            "{\"token_ids\":[1",
            "{\"token_ids\":[",
            "{\"token_ids\":[\"1\"]}",
            "{\"x\":{\"token_ids\":[1]}}",
            "{\"x\":[1],\"token_ids\":[1]}",
            "{\"a\\\"token_ids\":[1]}",
            "{\"a\":\"\\\"token_ids\",\"token_ids\":[1]}",
        ] {
            assert_eq!(Lifted::of(body.as_bytes()), None, "{body}");
        }
    }
}
