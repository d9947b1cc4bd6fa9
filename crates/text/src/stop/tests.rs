//! Tests of stop strings at every place of a stream.

use proptest::prelude::*;

use super::*;

/// Feeds `pieces` and gives what was shown and which stop ended it.
fn run(stops: &[&str], pieces: &[&str], unarmed: usize, keep: bool) -> (String, Option<usize>) {
    let mut matcher = Stops::new(stops.iter().map(|s| (*s).to_owned()).collect());
    let mut out = String::new();
    for (i, piece) in pieces.iter().enumerate() {
        if let Some(which) = matcher.push(piece, i >= unarmed, keep, &mut out) {
            return (out, Some(which));
        }
    }
    matcher.finish(&mut out);
    (out, None)
}

#[test]
fn a_stop_across_pieces_is_never_shown() {
    assert_eq!(
        run(&["END"], &["one E", "N", "D two"], 0, false),
        ("one ".into(), Some(0))
    );
    assert_eq!(
        run(&["END"], &["one E", "N", "D two"], 0, true),
        ("one END".into(), Some(0))
    );
    assert_eq!(
        run(&["END"], &["one E", "N", "d"], 0, false),
        ("one ENd".into(), None)
    );
    assert_eq!(
        run(&["END"], &["one EN"], 0, false),
        ("one EN".into(), None)
    );
}

#[test]
fn the_first_to_complete_counts_then_the_longest() {
    assert_eq!(
        run(&["abcd", "bc"], &["xabcd"], 0, false),
        ("xa".into(), Some(1))
    );
    assert_eq!(
        run(&["c", "abc"], &["xabc"], 0, false),
        ("x".into(), Some(1))
    );
}

/// Text from before the stops are armed may begin a stop string and may not end one.
#[test]
fn early_text_completes_nothing() {
    assert_eq!(run(&["aa"], &["aa", "x"], 1, false), ("aax".into(), None));
    assert_eq!(run(&["aa"], &["aa", "ax"], 1, false), ("a".into(), Some(0)));
    assert_eq!(
        run(&["ab"], &["a", "b"], 1, false),
        (String::new(), Some(0))
    );
    assert_eq!(run(&["é"], &["aé", "é"], 1, false), ("aé".into(), Some(0)));
}

/// The definition, one character at a time over the whole text.
fn oracle(stops: &[String], text: &str) -> (String, Option<usize>) {
    for (end, c) in text.char_indices() {
        let head = &text[..end + c.len_utf8()];
        let hit = (0..stops.len())
            .filter(|i| head.ends_with(&*stops[*i]))
            .max_by_key(|i| (stops[*i].len(), std::cmp::Reverse(*i)));
        if let Some(hit) = hit {
            return (head[..head.len() - stops[hit].len()].to_owned(), Some(hit));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn any_cut_agrees_with_the_definition(
        stops in proptest::collection::vec("[abé]{1,4}", 1..4),
        pieces in proptest::collection::vec("[abéc]{0,4}", 0..12),
    ) {
        let stop_refs: Vec<&str> = stops.iter().map(|s| &**s).collect();
        let piece_refs: Vec<&str> = pieces.iter().map(|s| &**s).collect();
        let got = run(&stop_refs, &piece_refs, 0, false);
        let want = oracle(&stops, &pieces.concat());
        prop_assert_eq!(&got.0, &want.0);
        prop_assert_eq!(got.1.map(|i| &stops[i]), want.1.map(|i| &stops[i]));
    }
}
