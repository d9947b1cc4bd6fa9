//! Lists of numbers, which are most of what a request is: read without a value for each.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::value::RawValue;

/// The tokens of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

/// What is asked of a prompt that may come as its tokens.
pub(crate) trait AsksOfTokens {
    /// Puts them where the body had an empty list.
    fn put(&mut self, tokens: TokenIds);
}

/// Hashes, which others write with a sign or without.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Hashes(pub(crate) Vec<u64>);

impl Hashes {
    /// As names of some kind.
    pub(crate) fn named<N>(&self, name: impl Fn(u64) -> N) -> Arc<[N]> {
        self.0.iter().map(|hash| name(*hash)).collect()
    }
}

impl<'de> Deserialize<'de> for Hashes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(from)?;
        let read = numbers(raw.get(), |number, negative| match negative {
            false => Some(number),
            true => (number <= 1 << 63).then(|| number.wrapping_neg()),
        });
        read.map(Self)
            .ok_or_else(|| Error::custom("a list of whole numbers of 64 bits is expected"))
    }
}

/// The numbers of a list of whole ones; `None` if it is something else, or `keep` refuses one.
fn numbers<N>(text: &str, keep: impl Fn(u64, bool) -> Option<N>) -> Option<Vec<N>> {
    let inner = text.trim_ascii().strip_prefix('[')?.strip_suffix(']')?;
    // At least two bytes a number.
    let mut out = Vec::with_capacity(inner.len() / 4 + 1);
    let mut bytes = inner.bytes().peekable();
    let skip_space = |bytes: &mut std::iter::Peekable<std::str::Bytes<'_>>| {
        while bytes.next_if(u8::is_ascii_whitespace).is_some() {}
    };
    skip_space(&mut bytes);
    if bytes.peek().is_none() {
        return Some(out);
    }
    loop {
        skip_space(&mut bytes);
        let negative = bytes.next_if_eq(&b'-').is_some();
        let first = bytes.next_if(u8::is_ascii_digit)?;
        let mut number = u64::from(first - b'0');
        while let Some(digit) = bytes.next_if(u8::is_ascii_digit) {
            number = number
                .checked_mul(10)?
                .checked_add(u64::from(digit - b'0'))?;
        }
        out.push(keep(number, negative)?);
        skip_space(&mut bytes);
        match bytes.next() {
            Some(b',') => {}
            None => return Some(out),
            Some(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_have_a_sign_or_none() {
        let read = |text: &str| {
            serde_json::from_str::<Hashes>(text)
                .ok()
                .map(|hashes| hashes.0)
        };
        let all = read("[-583561804111958748,17863182269597592868,-9223372036854775808,0]");
        assert_eq!(
            all.unwrap(),
            [
                17_863_182_269_597_592_868,
                17_863_182_269_597_592_868,
                1 << 63,
                0
            ]
        );
        assert_eq!(read("[-9223372036854775809]"), None);
        assert_eq!(read("[18446744073709551616]"), None);
    }
}
