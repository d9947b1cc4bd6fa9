//! Who may ask: keys that clients show as `authorization: Bearer KEY`, or as `x-api-key: KEY`.

use std::fmt;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};

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
    /// One key a line; blank lines and lines that begin with `#` are left out.
    ///
    /// ```
    /// # use kvasir_frontend::ApiKeys;
    /// let keys = ApiKeys::parse("# team a\nsecret\n\n");
    /// assert_eq!(format!("{keys:?}"), "ApiKeys(1)");
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self {
            keys: keys.map(|key| key.as_bytes().into()).collect(),
        }
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
        ApiKeys::parse(keys).admit(&headers)
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
    fn a_key_is_never_shown() {
        assert_eq!(format!("{:?}", ApiKeys::parse("secret")), "ApiKeys(1)");
    }
}
