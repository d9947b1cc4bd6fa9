//! Where a mark stands in a text, and where one may be beginning at its end.

/// The first of `marks` in `text`: where, and which. Of two at one place the longer.
pub(crate) fn find(text: &str, marks: &[&str]) -> Option<(usize, usize)> {
    let found = |(which, mark): (usize, &&str)| Some((text.find(*mark)?, which));
    let all = marks.iter().enumerate().filter_map(found);
    all.min_by_key(|&(at, which)| (at, usize::MAX - marks.get(which).map_or(0, |m| m.len())))
}

/// Bytes at the end of `text` with which one of `marks` may begin.
pub(crate) fn partial(text: &str, marks: &[&str]) -> usize {
    marks
        .iter()
        .map(|mark| partial_one(text, mark))
        .max()
        .unwrap_or(0)
}

fn partial_one(text: &str, mark: &str) -> usize {
    let longest = mark.len().saturating_sub(1).min(text.len());
    let begins = |&bytes: &usize| {
        let tail = text.as_bytes().get(text.len() - bytes..);
        tail.is_some_and(|tail| mark.as_bytes().starts_with(tail))
    };
    // A tail that is the head of a mark begins where a character begins.
    (1..=longest).rev().find(begins).unwrap_or(0)
}

/// Whether `text` begins with one of `marks`, or may when it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// With this one, which has so many bytes.
    With(usize, usize),
    /// It is too short to tell.
    Unknown,
    /// With none.
    No,
}

/// Which of `marks` is at the beginning of `text`; of several the longest.
pub(crate) fn begins(text: &str, marks: &[&str], at_end: bool) -> Begins {
    let whole = |(_, mark): &(usize, &&str)| text.starts_with(**mark);
    let with = marks.iter().enumerate().filter(whole);
    let could = |mark: &&str| mark.len() > text.len() && mark.starts_with(text);
    if !at_end && marks.iter().any(could) {
        return Begins::Unknown;
    }
    match with.max_by_key(|(_, mark)| mark.len()) {
        Some((which, mark)) => Begins::With(which, mark.len()),
        None => Begins::No,
    }
}

/// Bytes of white space at the beginning.
pub(crate) fn leading_space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_counts_and_the_longer_of_two() {
        assert_eq!(find("ab<x>", &["<x>", "b"]), Some((1, 1)));
        assert_eq!(find("<x><x>y", &["<x>", "<x><"]), Some((0, 1)));
        assert_eq!(find("", &["<x>"]), None);
    }

    #[test]
    fn a_mark_that_may_begin_is_held_back() {
        assert_eq!(partial("ab<", &["<x>"]), 1);
        assert_eq!(partial("ab<x", &["<x>", "b<xy"]), 3);
        assert_eq!(partial("<x>", &["<x>"]), 0);
        assert_eq!(partial("a\u{25c1}", &["\u{25c1}think\u{25b7}"]), 3);
        assert_eq!(begins("<", &["<x>"], false), Begins::Unknown);
        assert_eq!(begins("<", &["<x>"], true), Begins::No);
        assert_eq!(begins("<x>a", &["<x>"], false), Begins::With(0, 3));
    }
}
