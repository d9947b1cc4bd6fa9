//! Log lines about one other side, at most one of a kind per minute.
//!
//! Answers one question: may this line be written, and how many like it were not? A port that speaks nonsense, or a
//! connection that comes and goes, would fill a disk otherwise.

use std::time::Duration;

use kvasir_types::Time;

/// Between two lines of one kind.
const PAUSE: Duration = Duration::from_secs(60);

/// What was written of late. As many kinds as the program has words for.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    kinds: Vec<LoggedKind>,
}

#[derive(Debug)]
struct LoggedKind {
    name: &'static str,
    at: Time,
    withheld: u64,
}

impl LogLimit {
    /// Whether a line of this kind may be written now; then how many were not since the last one.
    pub(crate) fn admit(&mut self, now: Time, name: &'static str) -> Option<u64> {
        let Some(kind) = self.kinds.iter_mut().find(|kind| kind.name == name) else {
            let (at, withheld) = (now, 0);
            self.kinds.push(LoggedKind { name, at, withheld });
            return Some(0);
        };
        if now - kind.at < PAUSE {
            kind.withheld += 1;
            return None;
        }
        kind.at = now;
        Some(std::mem::take(&mut kind.withheld))
    }

    /// Kinds whose minute is over and of which lines were withheld: how many. Each is told once.
    pub(crate) fn due(&mut self, now: Time) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let over = move |kind: &&mut LoggedKind| kind.withheld > 0 && now - kind.at >= PAUSE;
        let kinds = self.kinds.iter_mut().filter(over);
        kinds.map(move |kind| {
            kind.at = now;
            (kind.name, std::mem::take(&mut kind.withheld))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::from_millis(secs * 1000)
    }

    #[test]
    fn one_line_of_a_kind_per_minute_and_the_rest_is_counted() {
        let mut limit = LogLimit::default();
        assert_eq!(limit.admit(at(1), "unreadable"), Some(0));
        for _ in 0..300 {
            assert_eq!(limit.admit(at(2), "unreadable"), None);
        }
        assert_eq!(limit.admit(at(2), "gap"), Some(0), "another kind");
        assert_eq!(limit.due(at(60)).next(), None);
        assert_eq!(limit.admit(at(61), "unreadable"), Some(300));
        assert_eq!(limit.admit(at(62), "unreadable"), None);
        let due: Vec<_> = limit.due(at(121)).collect();
        assert_eq!(due, [("unreadable", 1)]);
        assert_eq!(limit.due(at(190)).next(), None);
        assert_eq!(limit.admit(at(150), "unreadable"), None);
    }
}
