//! What did they mean?
//!
//! Answers: which known name is nearest to a word that is none? Used for flags, keys, variables,
//! commands and the names of choices alike.

/// The candidate nearest to `word`, if one is near enough to be a slip of the finger, or is the
/// word with a prefix such as `router-` left out.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let plain = fold(word);
    if plain.is_empty() {
        return None;
    }
    let allowed = 1 + plain.chars().count() / 5;
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let folded = fold(candidate);
        let distance = if folded.ends_with(&format!("-{plain}")) && plain.len() > 2 {
            1
        } else {
            distance(&plain, &folded)
        };
        // Ties go to the first, so that the answer does not depend on anything but the table.
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Case and the two kinds of separator are no difference.
fn fold(word: &str) -> String {
    word.trim().to_ascii_lowercase().replace('_', "-")
}

/// Edits that lead from one word to the other: insert, delete, replace, swap neighbours.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let same = a[i - 1] == b[j - 1];
            let mut cost = (last[j] + 1)
                .min(row[j - 1] + 1)
                .min(last[j - 1] + usize::from(!same));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                cost = cost.min(before_last[j - 2] + 1);
            }
            row.push(cost);
        }
        before_last = last;
        last = row;
    }
    last.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, edits) in [
            ("", "", 0),
            ("a", "", 1),
            ("kv", "vk", 1),
            ("kitten", "sitting", 3),
            ("abc", "abc", 0),
        ] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
        }
    }

    #[test]
    fn slips_are_found_and_strangers_are_not() {
        let names = ["router-mode", "router-temperature", "http-port", "worker"];
        assert_eq!(
            nearest("router-temprature", names),
            Some("router-temperature")
        );
        assert_eq!(nearest("ROUTER_MODE", names), Some("router-mode"));
        assert_eq!(nearest("temperature", names), Some("router-temperature"));
        assert_eq!(nearest("wroker", names), Some("worker"));
        assert_eq!(nearest("banana", names), None);
        assert_eq!(nearest("", names), None);
    }
}
