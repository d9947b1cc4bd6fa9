//! Whether something that is looked at again and again has come to rest.

/// What was seen last, and whether it counts. A change counts once it has been seen twice in a row: a file that
/// is being written, or one of two that belong together, is not taken for what it will be.
#[derive(Debug)]
pub(crate) struct Debounce<T> {
    seen: T,
    settled: bool,
}

impl<T: PartialEq> Debounce<T> {
    /// Rests on this.
    pub(crate) fn on(seen: T) -> Self {
        Self {
            seen,
            settled: true,
        }
    }

    /// Takes note of what is there now; gives it if it has just come to rest.
    pub(crate) fn look(&mut self, now: T) -> Option<&T> {
        if now != self.seen {
            (self.seen, self.settled) = (now, false);
            return None;
        }
        let news = !std::mem::replace(&mut self.settled, true);
        news.then_some(&self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_seen_twice_counts_and_only_once() {
        let mut settling = Debounce::on(1);
        let seen = [1, 2, 3, 3, 3, 1, 1].map(|now| settling.look(now).copied());
        assert_eq!(seen, [None, None, None, Some(3), None, None, Some(1)]);
    }
}
