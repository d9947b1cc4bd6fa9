//! Stop strings, found as the text grows.
//!
//! Answers one question: how much of the text may be shown, and has a stop string ended it? A stop string
//! counts at the character that completes it; of several that complete at one character the longest counts.
//! Text that might be the beginning of a stop string is held back.
//!
//! Invariant: what was shown never contains the beginning of a stop string that later completes, and the
//! outcome does not depend on the pieces in which the text came.

/// Looks for stop strings in growing text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stops {
    stops: Vec<String>,
    /// Shown text is gone from here; this is what is held back.
    held: String,
    /// Bytes at the beginning of `held` in which no stop string may end.
    immune: usize,
}

impl Stops {
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|s| !s.is_empty()).collect(),
            held: String::new(),
            immune: 0,
        }
    }

    /// Adds text. Text that came while `armed` was false cannot complete a stop string. Gives the number of
    /// the stop string that ended the text; nothing after it is ever shown.
    pub(crate) fn push(
        &mut self,
        text: &str,
        armed: bool,
        keep_stop: bool,
        out: &mut String,
    ) -> Option<usize> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        self.held.push_str(text);
        if !armed {
            self.immune = self.held.len();
        }
        if let Some((which, start, end)) = self.first() {
            out.push_str(&self.held[..if keep_stop { end } else { start }]);
            self.held.clear();
            return Some(which);
        }
        let shown = self.held.len() - self.undecided();
        out.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        self.immune = self.immune.saturating_sub(shown);
        None
    }

    /// The answer ended without a stop string: shows what was held back.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// The stop string that completes first: (number, start, end).
    fn first(&self) -> Option<(usize, usize, usize)> {
        let mut best: Option<(usize, usize, usize)> = None;
        for (which, stop) in self.stops.iter().enumerate() {
            let mut from = self.search_start(stop.len());
            while let Some(at) = self.held.get(from..).and_then(|h| h.find(&**stop)) {
                let (start, end) = (from + at, from + at + stop.len());
                if end > self.immune {
                    if best.is_none_or(|(_, s, e)| (end, start) < (e, s)) {
                        best = Some((which, start, end));
                    }
                    break;
                }
                from = start + self.held[start..].chars().next().map_or(1, char::len_utf8);
            }
        }
        best
    }

    /// A match that ends after the immune part cannot begin before here.
    fn search_start(&self, len: usize) -> usize {
        let mut from = (self.immune + 1).saturating_sub(len).min(self.held.len());
        while !self.held.is_char_boundary(from) {
            from -= 1;
        }
        from
    }

    /// Bytes at the end that are the beginning of some stop string.
    fn undecided(&self) -> usize {
        let longest = self.stops.iter().map(|stop| {
            let most = (stop.len() - 1).min(self.held.len());
            (1..=most)
                .rev()
                .filter(|n| stop.is_char_boundary(*n))
                .find(|n| self.held.as_bytes().ends_with(&stop.as_bytes()[..*n]))
                .unwrap_or(0)
        });
        longest.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
