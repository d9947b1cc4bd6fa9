//! Tests of the prefix cache: cached and plain encoding agree, within the budget.

use std::cell::Cell;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::Tokenizer;
use crate::cuts::tests::hostile;

const JSON: &[u8] = include_bytes!("../builtin/tokenizer.json");
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(JSON).unwrap());

fn cache(budget: usize, step: usize) -> PrefixCache {
    PrefixCache::with_step(CutRules::of(JSON).unwrap(), budget, step)
}

fn plain(text: &str) -> Result<Vec<Token>, TextError> {
    TOKENIZER.encode(text, false)
}

fn check(cache: &PrefixCache, text: &str) {
    check_at(cache, text, &[]);
}

fn check_at(cache: &PrefixCache, text: &str, places: &[usize]) {
    let mut ids = Vec::new();
    cache.encode(text, places, plain, &mut ids).unwrap();
    assert_eq!(ids, plain(text).unwrap(), "{text:?}");
    let stats = cache.stats();
    assert!(stats.used_bytes <= stats.budget_bytes, "{stats:?}");
}

/// A change to a text: at a place, some bytes gone, a piece put in.
type Edit = (prop::sample::Index, usize, String);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// Texts that are edited at random and tokenized after each edit, with steps from 4 B and budgets from nothing
    /// to plenty: always the plain tokens, never over the budget.
    #[test]
    fn edited_texts_have_plain_tokens(
        start in proptest::collection::vec(hostile(), 1..5),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..60, hostile()), 1..12),
        step in prop_oneof![4usize..40, 40usize..1024],
        budget in prop_oneof![Just(0usize), 1000usize..20_000, Just(1 << 20)],
        mut places in proptest::collection::vec(0usize..400, 0..6),
    ) {
        places.sort_unstable();
        let cache = cache(budget, step);
        let mut text = start.join(" and then 7 more words\n");
        check(&cache, &text);
        let edits: Vec<Edit> = edits;
        for (at, gone, put) in edits {
            let at = floor(&text, at.index(text.len() + 1));
            let end = floor(&text, (at + gone).min(text.len()));
            text.replace_range(at..end, &put);
            check_at(&cache, &text, &places);
        }
    }
}

fn floor(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn words(n: usize) -> String {
    (0..n).map(|i| format!("word{i} ")).collect()
}

/// A text that grows at its end: only the end is tokenized.
#[test]
fn a_longer_text_pays_for_its_end() {
    let cache = cache(1 << 20, 256);
    let tokenized = Cell::new(0);
    let count = |text: &str| {
        tokenized.set(tokenized.get() + text.len());
        plain(text)
    };
    let (long, tail) = (words(2000), words(50));
    cache.encode(&long, &[], count, &mut Vec::new()).unwrap();
    assert_eq!(tokenized.take(), long.len());
    let longer = long.clone() + &tail;
    let mut ids = Vec::new();
    cache.encode(&longer, &[], count, &mut ids).unwrap();
    assert_eq!(ids, plain(&longer).unwrap());
    assert!(tokenized.get() < tail.len() + 600, "{}", tokenized.get());
    let stats = cache.stats();
    assert!(stats.hit_bytes as usize > long.len() - 600);
    assert_eq!((stats.miss_texts, stats.hit_texts), (1, 1));
    let made = plain(&long).unwrap().len() + ids.len();
    assert_eq!(stats.hit_tokens + stats.miss_tokens, made as u64);
    let afresh = plain(&longer[stats.hit_bytes as usize..]).unwrap().len();
    assert_eq!(stats.hit_tokens as usize, ids.len() - afresh);
}

/// Two pieces with one hash: the text decides.
#[test]
fn a_collision_is_no_hit() {
    let cache = cache(1 << 20, 4);
    cache.keep(7, "one", vec![1]);
    let mut ids = Vec::new();
    assert!(!cache.look_up(7, "two", &mut ids));
    cache.keep(7, "two", vec![2]);
    assert!(cache.look_up(7, "two", &mut ids));
    assert!(!cache.look_up(7, "one", &mut ids));
    assert_eq!(ids, [2]);
}

/// At the budget something goes, and what was used lately stays.
#[test]
fn the_budget_holds_and_used_pieces_stay() {
    let mut shard = Shard::default();
    let sized = |hash, bytes| Slot {
        hash,
        piece: Arc::new(Piece {
            text: "x".repeat(bytes).into(),
            ids: vec![0; 25].into(),
        }),
        recent: false,
    };
    let slot = |hash| sized(hash, 88);
    let each = slot(0).piece.cost();
    for hash in 0..10 {
        shard.insert(slot(hash), each * 10);
    }
    assert_eq!((shard.used, shard.slots.len()), (each * 10, 10));
    let at = shard.by_hash[&3];
    shard.slots[at].recent = true;
    for hash in 10..18 {
        shard.insert(slot(hash), each * 10);
        assert!(shard.used <= each * 10);
    }
    assert!(shard.by_hash.contains_key(&3));
    assert!(shard.by_hash.contains_key(&17));
    assert_eq!(shard.slots.len(), 10);
    shard.insert(sized(99, each * 11), each * 10);
    assert!(!shard.by_hash.contains_key(&99), "larger than the budget");
}

/// What lies before a place where something new begins is kept, however short it is.
#[test]
fn a_known_beginning_is_tokenized_once() {
    let cache = cache(1 << 20, 256);
    let tokenized = Cell::new(0);
    let count = |text: &str| {
        tokenized.set(tokenized.get() + text.len());
        plain(text)
    };
    let head = "<|im_start|>user\n";
    for (text, fresh) in [("Hello", 22), ("Hallo", 5), (" Hallo", 23)] {
        tokenized.set(0);
        let (whole, mut ids) = (format!("{head}{text}"), Vec::new());
        cache
            .encode(&whole, &[head.len()], count, &mut ids)
            .unwrap();
        assert_eq!(ids, plain(&whole).unwrap());
        assert_eq!(tokenized.get(), fresh, "{text}");
    }
}
