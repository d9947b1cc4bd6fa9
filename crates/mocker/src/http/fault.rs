//! Faults on command.
//!
//! A fault strikes requests for answers, and only those: `/health`, `/metrics` and the control routes go on,
//! so that a test can see what it did. Of several faults the first one that strikes is used.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::StatusCode;
use kvasir_types::Rng;

/// Faults at a time; more are refused.
const FAULTS_MAX: usize = 64;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpFaultKind {
    /// The connection is closed without a word.
    Refuse,
    /// The request is taken and never answered.
    Stall,
    /// Every piece of the answer comes this much later.
    Slow(Duration),
    /// The connection is cut after so many tokens, between two events.
    Die(u32),
    /// The connection is cut after so many tokens, in the middle of an event.
    Cut(u32),
    /// The answer has this status.
    Status(StatusCode),
}

/// A fault, and whom it strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HttpFault {
    /// What goes wrong.
    pub kind: HttpFaultKind,
    /// The share of requests that it strikes.
    pub share: f64,
    /// How many more it strikes; `None` for any number.
    pub count: Option<u64>,
}

/// A text that is no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no fault: give refuse, stall, slow=MS, die=TOKENS, cut=TOKENS or status=CODE, then \
     :share=X or :count=N"
)]
pub struct HttpFaultError(pub String);

impl FromStr for HttpFault {
    type Err = HttpFaultError;

    /// ```
    /// # use kvasir_mocker::{HttpFault, HttpFaultKind};
    /// let fault: HttpFault = "die=3:share=0.5:count=2".parse()?;
    /// assert_eq!((fault.kind, fault.share, fault.count), (HttpFaultKind::Die(3), 0.5, Some(2)));
    /// assert!("explode".parse::<HttpFault>().is_err());
    /// # Ok::<(), kvasir_mocker::HttpFaultError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, HttpFaultError> {
        parse(text).ok_or_else(|| HttpFaultError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<HttpFault> {
    let mut parts = text.split(':');
    let (name, number) = setting(parts.next()?);
    let kind = match (name, number) {
        ("refuse", None) => HttpFaultKind::Refuse,
        ("stall", None) => HttpFaultKind::Stall,
        ("slow", Some(ms)) => {
            HttpFaultKind::Slow(Duration::try_from_secs_f64(ms.parse::<f64>().ok()? / 1e3).ok()?)
        }
        ("die", Some(tokens)) => HttpFaultKind::Die(tokens.parse().ok()?),
        ("cut", Some(tokens)) => HttpFaultKind::Cut(tokens.parse().ok()?),
        ("status", Some(code)) => {
            let status = StatusCode::from_u16(code.parse().ok()?).ok()?;
            HttpFaultKind::Status(
                Some(status).filter(|s| s.is_client_error() || s.is_server_error())?,
            )
        }
        _ => return None,
    };
    let mut fault = HttpFault {
        kind,
        share: 1.0,
        count: None,
    };
    for part in parts {
        match setting(part) {
            ("share", Some(share)) => {
                fault.share = share.parse().ok().filter(|s| (0.0..=1.0).contains(s))?;
            }
            ("count", Some(count)) => fault.count = Some(count.parse().ok().filter(|n| *n > 0)?),
            _ => return None,
        }
    }
    Some(fault)
}

fn setting(text: &str) -> (&str, Option<&str>) {
    match text.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (text.trim(), None),
    }
}

impl fmt::Display for HttpFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            HttpFaultKind::Refuse => write!(f, "refuse")?,
            HttpFaultKind::Stall => write!(f, "stall")?,
            HttpFaultKind::Slow(delay) => write!(f, "slow={}", delay.as_secs_f64() * 1e3)?,
            HttpFaultKind::Die(tokens) => write!(f, "die={tokens}")?,
            HttpFaultKind::Cut(tokens) => write!(f, "cut={tokens}")?,
            HttpFaultKind::Status(status) => write!(f, "status={}", status.as_u16())?,
        }
        if self.share < 1.0 {
            write!(f, ":share={}", self.share)?;
        }
        match self.count {
            Some(count) => write!(f, ":count={count}"),
            None => Ok(()),
        }
    }
}

/// The faults of one mock engine, whichever door its requests come through.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<(Vec<HttpFault>, Rng)>,
}

impl Faults {
    /// These faults; the share of requests that they strike follows from `seed`.
    #[must_use]
    pub fn new(faults: Vec<HttpFault>, seed: u64) -> Self {
        Self {
            state: Mutex::new((faults, Rng::new(seed))),
        }
    }

    /// Whether and how the next request is struck.
    pub(crate) fn strike(&self) -> Option<HttpFaultKind> {
        self.strike_with(|_| true)
    }

    /// Whether and how a fault of one of these kinds strikes the next request.
    pub(crate) fn strike_with(
        &self,
        counts: impl Fn(HttpFaultKind) -> bool,
    ) -> Option<HttpFaultKind> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (faults, rng) = &mut *state;
        let mut struck = None;
        for fault in faults.iter_mut() {
            if counts(fault.kind) && rng.unit() < fault.share {
                fault.count = fault.count.map(|count| count - 1);
                struck = Some(fault.kind);
                break;
            }
        }
        faults.retain(|fault| fault.count != Some(0));
        struck
    }

    /// Adds a fault; false if there are too many.
    pub(crate) fn add(&self, fault: HttpFault) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let room = state.0.len() < FAULTS_MAX;
        if room {
            state.0.push(fault);
        }
        room
    }

    /// Takes all back.
    pub(crate) fn clear(&self) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .clear();
    }

    /// What is set.
    pub(crate) fn list(&self) -> Vec<HttpFault> {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_read() {
        for text in [
            "refuse",
            "stall:share=0.25",
            "slow=50",
            "die=3:count=2",
            "cut=0",
            "status=503",
        ] {
            let fault: HttpFault = text.parse().unwrap();
            assert_eq!(fault.to_string(), text);
        }
        for text in [
            "",
            "die",
            "die=-1",
            "status=200",
            "refuse=1",
            "stall:share=2",
            "slow=-1",
            "cut=1:x=2",
        ] {
            assert!(text.parse::<HttpFault>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_counted_fault_strikes_so_often_and_the_next_one_after_it() {
        let faults = Faults::new(vec!["status=500:count=2".parse().unwrap()], 1);
        faults.add("refuse:share=0".parse().unwrap());
        let kinds: Vec<bool> = (0..4).map(|_| faults.strike().is_some()).collect();
        assert_eq!(kinds, [true, true, false, false]);
        assert_eq!(faults.list().len(), 1);
        faults.clear();
        assert!(faults.list().is_empty());
    }

    #[test]
    fn there_is_a_limit() {
        let faults = Faults::new(Vec::new(), 1);
        let added = (0..100)
            .filter(|_| faults.add("stall".parse().unwrap()))
            .count();
        assert_eq!(added, FAULTS_MAX);
    }
}
