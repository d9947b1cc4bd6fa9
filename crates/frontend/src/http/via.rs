//! Whether a request has been here before: how we name ourselves to engines (RFC 9110, section 7.6.3).
//!
//! A gateway must sign what it passes on. The name is that of one process, so that routers may stand behind one
//! another, but none behind itself.

use http::header::{HeaderMap, HeaderValue, VIA};
use kvasir_openai::ApiError;
use kvasir_types::RequestId;

/// What is said of a request that comes back.
const LOOP: &str = "This request has been here before: this frontend is one of its own workers. Remove it from --worker, --workers-file or POST /workers";
/// The status for it (RFC 5842).
const LOOP_DETECTED: u16 = 508;
/// What our protocol and name begin with.
const OURS: &str = "1.1 kvasir-";

/// Our signature.
#[derive(Clone, Debug)]
pub(crate) struct Via(HeaderValue);

impl Via {
    /// One that nobody else has; `chance` is drawn.
    pub(crate) fn new(chance: RequestId) -> Self {
        let name = format!("{OURS}{:08x}", chance.0 as u32);
        Self(HeaderValue::try_from(name).unwrap_or(HeaderValue::from_static("1.1 kvasir")))
    }

    /// As a header says it.
    pub(crate) fn field(&self) -> &HeaderValue {
        &self.0
    }

    /// Refuses what we have signed ourselves.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let ours = |entry: &[u8]| entry.trim_ascii().starts_with(self.0.as_bytes());
        let signed = |value: &HeaderValue| value.as_bytes().split(|b| *b == b',').any(ours);
        match headers.get_all(VIA).iter().any(signed) {
            true => Err(ApiError::new(LOOP_DETECTED, LOOP)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_signature_is_refused() {
        let (us, other) = (Via::new(RequestId(7)), Via::new(RequestId(8)));
        assert_eq!(us.field(), "1.1 kvasir-00000007");
        let mut headers = HeaderMap::new();
        assert!(us.check(&headers).is_ok());
        headers.append(VIA, other.field().clone());
        headers.append(VIA, HeaderValue::from_static("1.0 fred, 1.1 p.example"));
        assert!(us.check(&headers).is_ok());
        headers.append(
            VIA,
            HeaderValue::from_static("1.1 a, 1.1 kvasir-00000007 (x)"),
        );
        assert_eq!(us.check(&headers).unwrap_err().status, 508);
    }
}
