//! Tests of the fast tokenizer against the reference one.

use proptest::prelude::*;

use super::*;
use crate::Tokenizer;
use crate::cuts::tests::hostile;

const JSON: &[u8] = include_bytes!("../builtin/tokenizer.json");

fn pair() -> (Fast, Tokenizer) {
    let reference = Tokenizer::reference_only(JSON).unwrap();
    let fast = Fast::load(JSON, |text| reference.encode(text, false)).unwrap();
    (fast, reference)
}

/// A stand-in that lies from some point on is found out at the next check, and never asked again.
#[test]
fn a_difference_ends_the_trust() {
    let (fast, reference) = pair();
    let wrong = || Ok(vec![1, 2, 3]);
    let honest = || reference.encode("hello there", false);
    assert_eq!(fast.encode("hello there", false, honest), honest());
    assert_eq!(fast.checks(), (1, 0));
    for _ in 1..CHECK_EVERY {
        assert_eq!(fast.encode("hello there", false, wrong), honest());
    }
    assert!(fast.is_trusted());
    assert_eq!(
        fast.encode("hello there", false, wrong),
        wrong(),
        "the check's answer counts"
    );
    assert!(!fast.is_trusted());
    assert_eq!(fast.checks(), (2, 1));
    assert_eq!(fast.encode("hello there", false, wrong), wrong());
}

#[test]
fn a_file_it_cannot_read_is_an_error() {
    assert!(Fast::load(b"{}", |_| Ok(Vec::new())).is_err());
    assert!(Fast::load(JSON, |_| Ok(vec![9])).is_err_and(|e| e.contains("differs")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn hostile_texts_have_the_references_tokens(text in hostile(), special in any::<bool>()) {
        let (fast, reference) = shared();
        prop_assert_eq!(fast.try_encode(&text, special), reference.encode(&text, special).ok());
    }
}

fn shared() -> &'static (Fast, Tokenizer) {
    static PAIR: std::sync::OnceLock<(Fast, Tokenizer)> = std::sync::OnceLock::new();
    PAIR.get_or_init(pair)
}
