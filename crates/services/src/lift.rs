//! The token ids of a body, read before the rest of it.
//!
//! Answers one question: which ids stand in the body's list `token_ids`? The list is nearly all of a body, and a reader of JSON that
//! looks at each byte twice took half of a call's time. What is taken out is what `serde_json` would read; where this reader is not sure
//! it takes nothing, and `serde_json` reads the whole body.

const NAME: &[u8] = b"\"token_ids\"";
/// Parts of a list that are read side by side.
const PARTS: usize = 2;
/// A list whose parts would be shorter is not cut.
const PART_BYTES_MIN: usize = 64;
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
    let inner = text.strip_prefix(b"[")?;
    let (inner, tail) = inner.split_at_checked(memchr::memchr(b']', inner)?)?;
    let tail = tail.strip_prefix(b"]")?;
    if unblank(inner).is_empty() {
        return Some((Vec::new(), tail));
    }
    let mut parts = Items::split(inner);
    // Where a number begins is known when the one before it was read: so several are read at once.
    while parts.iter_mut().fold(true, |all, part| part.quick() & all) {}
    for part in &mut parts {
        part.finish()?;
    }
    let ids: Vec<&[u32]> = parts.iter().map(|part| &part.ids[..]).collect();
    Some((ids.concat(), tail))
}

/// Items of a list with a comma between each two of them, of which some were read.
#[derive(Default)]
struct Items<'t> {
    rest: &'t [u8],
    ids: Vec<u32>,
}

impl<'t> Items<'t> {
    /// Cuts a list into parts of about the same length. One that is empty has no items; the first is never.
    fn split(inner: &'t [u8]) -> [Self; PARTS] {
        let mut parts: [Self; PARTS] = Default::default();
        let (mut rest, length) = (inner, inner.len() / PARTS);
        for (number, part) in parts.iter_mut().enumerate() {
            let is_last = number + 1 == PARTS;
            let comma = match is_last || length < PART_BYTES_MIN {
                true => None,
                false => rest
                    .get(length..)
                    .and_then(|late| memchr::memchr(b',', late)),
            };
            let (own, left) = match comma {
                Some(comma) => rest.split_at(length + comma),
                None => (rest, &[][..]),
            };
            *part = Self {
                rest: unblank(own),
                // Three bytes and more for each id, nearly always.
                ids: Vec::with_capacity(own.len() / 4),
            };
            rest = left.strip_prefix(b",").unwrap_or(left);
        }
        parts
    }

    /// Reads the next item, if that is as easy as nearly always: digits, a comma, a blank or none, and more.
    #[inline(always)]
    fn quick(&mut self) -> bool {
        let Some(bytes) = self.rest.first_chunk() else {
            return false;
        };
        let word = u64::from_le_bytes(*bytes);
        let Some((id, digits)) = leading_id(word).filter(|(_, digits)| *digits < 7) else {
            return false;
        };
        // What follows is in the word, too.
        let after = word >> (8 * digits);
        let is_blank = (after >> 8) & 0xff == u64::from(b' ');
        if after & 0xff != u64::from(b',') {
            return false;
        }
        let Some(rest) = self.rest.get(digits + 1 + usize::from(is_blank)..) else {
            return false;
        };
        self.rest = rest;
        self.ids.push(id);
        true
    }

    /// Reads all that are left.
    fn finish(&mut self) -> Option<()> {
        if self.rest.is_empty() && self.ids.is_empty() {
            return Some(());
        }
        loop {
            while self.quick() {}
            let rest = unblank(self.rest);
            let (id, digits) = leading_id(first_eight(rest))?;
            self.ids.push(id);
            self.rest = match unblank(rest.get(digits..)?) {
                [] => return Some(()),
                [b',', next @ ..] => next,
                _ => return None,
            };
        }
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

    /// A long list is read in parts: wherever something else stands in it, and wherever it ends too early, nothing is taken.
    #[test]
    fn what_is_wrong_is_noticed_at_every_place() {
        let good: Vec<String> = (0..120u32).map(|n| (n * 37).to_string()).collect();
        let of = |items: &[String]| {
            let body = format!("{{\"token_ids\":[{}]}}", items.join(", "));
            Lifted::of(body.as_bytes())
        };
        assert!(of(&good).is_some());
        for at in 0..good.len() {
            for wrong in ["", " ", "-1", "1 2", "x", "01", "12345678", "null", "[1]"] {
                let mut items = good.clone();
                items[at] = wrong.to_owned();
                assert_eq!(of(&items), None, "{wrong:?} at {at}");
            }
        }
        let whole = format!("{{\"token_ids\":[{}]}}", good.join(","));
        let end = whole.len() - 2;
        assert!((0..=end).all(|end| Lifted::of(&whole.as_bytes()[..end]).is_none()));
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
