//! Tests of the fast tokenizer against the reference one.

use proptest::prelude::*;

use super::*;
use crate::cuts::tests::hostile;

const JSON: &[u8] = include_bytes!("../builtin/tokenizer.json");
/// A tokenizer that knows one word.
const OTHER: &[u8] = br#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","unk_token":"a","vocab":{"a":0}}}"#;

fn pair() -> (Fast, Arc<Reference>) {
    let reference = Arc::new(Reference::new(JSON).unwrap());
    (Fast::load(JSON, &reference).unwrap(), reference)
}

fn sample(text: &str, ids: Vec<Token>) -> Sample {
    Sample {
        text: text.into(),
        add_special: false,
        ids,
    }
}

/// A stand-in that lies is found out at the next check, and never asked again.
#[test]
fn a_difference_ends_the_trust() {
    let (fast, reference) = pair();
    let reference = Arc::new(Arc::into_inner(reference).unwrap().rest());
    let honest = fast.encode("hello there", false, &reference).unwrap();
    fast.watched
        .check(&[sample("hello there", honest.clone())], &reference);
    assert_eq!((fast.is_trusted(), fast.checks()), (true, (1, 0)));
    let lies = [sample("hello there", vec![1, 2, 3]), sample("x", vec![9])];
    fast.watched.check(&lies, &reference);
    assert_eq!((fast.is_trusted(), fast.checks()), (false, (2, 1)));
    assert_eq!(fast.encode("hello there", false, &reference), Ok(honest));
    assert_eq!(fast.checks(), (2, 1));
}

/// One text in so many is kept, and a full set is compared by itself.
#[test]
fn texts_in_use_are_compared_by_themselves() {
    let (fast, reference) = pair();
    for _ in 0..CHECK_EVERY * (SAMPLES as u64 - 1) + 1 {
        fast.encode("a", false, &reference).unwrap();
    }
    let looks = (0..100_000_000u32).take_while(|_| fast.checks().0 < SAMPLES as u64);
    looks.for_each(|_| std::thread::yield_now());
    assert_eq!(fast.checks(), (SAMPLES as u64, 0));
    assert!(fast.samples.lock().unwrap().is_empty());
}

#[test]
fn a_file_it_cannot_read_is_an_error() {
    let other = Arc::new(Reference::new(OTHER).unwrap());
    assert!(Fast::load(b"{}", &other).is_err());
    assert!(Fast::load(JSON, &other).is_err_and(|e| e.contains("differs")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn hostile_texts_have_the_references_tokens(text in hostile(), special in any::<bool>()) {
        let (fast, reference) = shared();
        prop_assert_eq!(fast.watched.try_encode(&text, special), reference.encode(&text, special).ok());
    }
}

fn shared() -> &'static (Fast, Arc<Reference>) {
    static PAIR: std::sync::OnceLock<(Fast, Arc<Reference>)> = std::sync::OnceLock::new();
    PAIR.get_or_init(pair)
}
