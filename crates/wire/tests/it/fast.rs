//! Roads taken for speed lead where the plain ones lead: many numbers at once, keys compared as bytes, a `type`
//! that comes first.

use kvasir_msgpack::{DecodeError, Reader, Writer};
use kvasir_types::Rng;
use kvasir_wire::engine;
use kvasir_wire::engine::{Batch, Event};
use proptest::prelude::*;

/// Reads the numbers one by one.
fn plainly(bytes: &[u8], len: usize) -> Result<(Vec<u32>, usize), DecodeError> {
    let mut reader = Reader::new(bytes);
    let values: Result<Vec<u32>, _> = (0..len).map(|_| reader.u32("x")).collect();
    Ok((values?, reader.position()))
}

/// Reads them all at once, after one that is there already.
fn at_once(bytes: &[u8], len: usize) -> Result<(Vec<u32>, usize), DecodeError> {
    let mut reader = Reader::new(bytes);
    let mut out = vec![7];
    reader.u32s(len, "x", &mut out)?;
    assert_eq!(out.remove(0), 7);
    Ok((out, reader.position()))
}

/// Mostly of 16 bits, as tokens are, with all others in between.
fn token() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 256..65_536u32,
        1 => 0..128u32,
        1 => 128..256u32,
        1 => 65_536..u32::MAX,
        1 => prop::sample::select(vec![0, 127, 128, 255, 256, 65_535, 65_536, u32::MAX]),
    ]
}

proptest! {
    #[test]
    fn many_numbers_at_once_are_what_they_are_one_by_one(
        tokens in prop::collection::vec(token(), 0..80),
        more in 0usize..4,
        cut in 0usize..400,
        damage in prop::option::of((0usize..400, any::<u8>())),
    ) {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        for token in &tokens {
            writer.uint(u64::from(*token));
        }
        prop_assert_eq!(at_once(&bytes, tokens.len()).unwrap(), (tokens.clone(), bytes.len()));
        if let Some((at, byte)) = damage {
            let len = bytes.len().max(1);
            if let Some(slot) = bytes.get_mut(at % len) {
                *slot = byte;
            }
        }
        bytes.truncate(cut);
        let len = tokens.len() + more;
        match (plainly(&bytes, len), at_once(&bytes, len)) {
            (Ok(plain), Ok(quick)) => prop_assert_eq!(plain, quick),
            (Err(_), Err(_)) => {}
            (plain, quick) => prop_assert!(false, "{:?} and {:?}", plain, quick),
        }
    }
}

/// A claimed length does not make room for itself.
#[test]
fn a_claimed_length_is_not_believed() {
    let mut out = Vec::new();
    let refused = Reader::new(&[0xcd, 1, 2]).u32s(usize::MAX, "x", &mut out);
    assert_eq!(refused, Err(DecodeError::Truncated { at: 3 }));
    assert_eq!(out.capacity(), 0);
}

/// One batch with one event whose fields come in the given order.
fn batch_of(keys: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes);
    writer.array(2);
    writer.float(1.5);
    writer.array(1);
    writer.map(keys.len());
    for key in keys {
        writer.str(key);
        match *key {
            "type" => writer.str("BlockStored"),
            "block_hashes" => {
                writer.array(2);
                // All 64 bits, and fewer.
                writer.uint(u64::MAX - 1);
                writer.uint(5);
            }
            "parent_block_hash" => writer.uint(77),
            "token_ids" => {
                writer.array(4);
                (1..=4).for_each(|token| writer.uint(token * 60_000));
            }
            "block_size" => writer.uint(2),
            "medium" => writer.str("gpu"),
            "kv_cache_spec_kind" => writer.str("mla_attention"),
            "group_idx" => writer.uint(3),
            _ => writer.str("whatever"),
        }
    }
    bytes
}

/// The order of a map's keys says nothing, and keys like known ones are not those.
#[test]
fn keys_come_in_any_order_among_strangers() {
    let mut keys = vec![
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "medium",
        "group_idx",
        "kv_cache_spec_kind",
        "block_hashez",
        "token_idz",
        "lora_ix",
        "Medium",
        "",
        "session_id",
    ];
    let mut rng = Rng::new(3);
    let mut batch = Batch::new();
    for _ in 0..200 {
        batch.decode(&batch_of(&keys)).unwrap();
        let events: Vec<Event<'_>> = batch.events().collect();
        let [Event::Stored(stored)] = events.as_slice() else {
            panic!("{events:?}")
        };
        let names: Vec<u64> = stored.hashes.iter().map(|name| name.0).collect();
        assert_eq!(names, [u64::MAX - 1, 5]);
        assert_eq!(stored.parent.map(|p| p.0), Some(77));
        assert_eq!(stored.tokens, [60_000, 120_000, 180_000, 240_000]);
        assert_eq!((stored.block_size, stored.group), (2, Some(3)));
        assert_eq!(stored.attention, engine::Attention::Full);
        assert_eq!(stored.medium, engine::Medium::from_name("GPU"));
        let (a, b) = (rng.below(keys.len() as u64), rng.below(keys.len() as u64));
        keys.swap(a as usize, b as usize);
    }
}

/// A key, a kind or a place that is no text is refused, wherever it stands.
#[test]
fn what_must_be_text_is_text() {
    let good = batch_of(&[
        "type",
        "block_hashes",
        "token_ids",
        "block_size",
        "medium",
        "stranger",
    ]);
    Batch::new().decode(&good).unwrap();
    for word in [&b"stranger"[..], b"BlockStored", b"gpu"] {
        let at = good.windows(word.len()).position(|w| w == word).unwrap();
        let mut bad = good.clone();
        bad[at] = 0xff;
        let refused = Batch::new().decode(&bad);
        assert!(
            matches!(refused, Err(DecodeError::Utf8 { .. })),
            "{refused:?}"
        );
    }
}
