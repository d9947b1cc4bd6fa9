//! Who may ask: keys that clients show as `authorization: Bearer KEY`, or as `x-api-key: KEY`.

use std::fmt;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};

/// Keys that are accepted at once: a request is compared with each of them.
const KEYS_MAX: usize = 4096;
/// Longest key.
const KEY_BYTES_MAX: usize = 1024;

/// Why a list of keys is not taken. No key is ever shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeysError {
    /// A line has several words.
    #[error(
        "line {0}: one key stands on a line, without spaces in it; a comment after it begins with #"
    )]
    Words(usize),
    /// A key that no header carries, or a long one.
    #[error("line {0}: a key has at most {KEY_BYTES_MAX} characters, all visible ASCII")]
    Key(usize),
    /// There are too many.
    #[error("it has more than {KEYS_MAX} keys")]
    TooMany,
}

/// The keys that are accepted; without any, everybody may ask. Clones are one set.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Arc<[Box<[u8]>]>,
}

/// Says how many there are and none of them.
impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.keys.len())
    }
}

impl ApiKeys {
    /// One key a line; what follows a `#` at the beginning or after a space is a comment.
    ///
    /// ```
    /// # use kvasir_frontend::ApiKeys;
    /// let keys = ApiKeys::parse("# team a\nsecret\n\nsecret#2 # team b\n")?;
    /// assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    /// assert!(ApiKeys::parse("two words").is_err());
    /// # Ok::<(), kvasir_frontend::KeysError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let mut keys: Vec<Box<[u8]>> = Vec::new();
        for (text, line) in text.lines().zip(1..) {
            let mut words = text.split_ascii_whitespace();
            let Some(key) = words.next().filter(|word| !word.starts_with('#')) else {
                continue;
            };
            if words.next().is_some_and(|word| !word.starts_with('#')) {
                return Err(KeysError::Words(line));
            }
            if key.len() > KEY_BYTES_MAX || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeysError::Key(line));
            }
            if keys.len() >= KEYS_MAX {
                return Err(KeysError::TooMany);
            }
            keys.push(key.as_bytes().into());
        }
        Ok(Self { keys: keys.into() })
    }

    /// The first of them.
    #[must_use]
    pub fn first(&self) -> Option<&str> {
        std::str::from_utf8(self.keys.first()?).ok()
    }

    /// One key alone.
    #[must_use]
    pub fn one(key: &str) -> Self {
        Self {
            keys: Arc::from([key.trim().as_bytes().into()]),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether a request with these headers may pass. Takes as long for a key that is nearly right as for one
    /// that is not.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> bool {
        if self.is_empty() {
            return true;
        }
        let shown = headers.get(AUTHORIZATION).map_or(&[][..], |v| v.as_bytes());
        let shown = match shown.split_at_checked(BEARER.len()) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(BEARER) => key.trim_ascii(),
            _ => match headers.get(API_KEY) {
                Some(key) => key.as_bytes().trim_ascii(),
                None => return false,
            },
        };
        let matches = |key: &[u8]| u8::from(same(key, shown));
        self.keys.iter().fold(0, |found, key| found | matches(key)) != 0
    }
}

const BEARER: &[u8] = b"bearer ";
/// Where Anthropic's clients show theirs.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Compares without stopping at the first difference; only the length can be told from the time.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = |sum: u8, (a, b): (&u8, &u8)| std::hint::black_box(sum | (a ^ b));
    a.len() == b.len() && a.iter().zip(b).fold(0, differ) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(keys: &str, shown: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(shown) = shown {
            headers.insert(AUTHORIZATION, shown.parse().unwrap());
        }
        ApiKeys::parse(keys).unwrap().admit(&headers)
    }

    #[test]
    fn a_key_is_needed_once_there_is_one() {
        assert!(admits("# none\n\n", None));
        assert!(!admits("k1\nk2", None));
        assert!(admits("k1\nk2", Some("Bearer k2")));
        assert!(admits("k1", Some("bearer  k1 ")));
        for wrong in [
            "Bearer k",
            "Bearer k11",
            "Bearer ",
            "Basic k1",
            "k1",
            "Bearer k2 x",
        ] {
            assert!(!admits("k1\nk2", Some(wrong)), "{wrong}");
        }
    }

    #[test]
    fn a_key_may_be_followed_by_a_comment() {
        assert!(admits("k1 # team a\nk2\t#team b", Some("Bearer k2")));
        assert!(admits(
            "k#1 # not a comment before the space",
            Some("Bearer k#1")
        ));
        assert!(!admits("k1 # team a", Some("Bearer k1 # team a")));
    }

    #[test]
    fn keys_that_nobody_could_show_are_refused() {
        assert_eq!(
            ApiKeys::parse("k\nsecret word").unwrap_err(),
            KeysError::Words(2)
        );
        assert_eq!(ApiKeys::parse("schlüssel").unwrap_err(), KeysError::Key(1));
        assert_eq!(
            ApiKeys::parse(&"k".repeat(KEY_BYTES_MAX + 1)).unwrap_err(),
            KeysError::Key(1)
        );
        let many = |count| ApiKeys::parse(&"k\n".repeat(count));
        assert!(many(KEYS_MAX).is_ok());
        assert_eq!(many(KEYS_MAX + 1).unwrap_err(), KeysError::TooMany);
    }

    #[test]
    fn a_key_is_never_shown() {
        let keys = ApiKeys::parse("secret").unwrap();
        assert_eq!(format!("{keys:?}"), "ApiKeys(1)");
        let refused = ApiKeys::parse("secret words").unwrap_err();
        assert!(!refused.to_string().contains("secret"));
    }
}
