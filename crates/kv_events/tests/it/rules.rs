//! What counts and what does not: the rules by which an engine's events become index events.

use kvasir_hash::{Scope, local_hashes};
use kvasir_kv_events::{Skip, TranslateOptions, Translation, Translator};
use kvasir_types::{EngineHash, KvEvent, LocalHash, Tier, Token};
use kvasir_wire::engine::{
    Adapter, Attention, Batch, BlockMedia, Dialect, Event, Medium, Removed, Stored, encode_batch,
};

const SIZE: u32 = 4;
const OPTIONS: TranslateOptions = TranslateOptions {
    block_size: SIZE,
    image_token: None,
};

#[derive(Debug, PartialEq)]
enum Said {
    Event(KvEvent),
    Skipped(Skip),
}

fn say(translator: &mut Translator, events: &[Event<'_>]) -> Vec<Said> {
    let mut bytes = Vec::new();
    encode_batch(
        Dialect::Vllm24,
        1.0,
        events.iter().copied(),
        Some(0),
        &mut bytes,
    );
    let mut batch = Batch::new();
    batch.decode(&bytes).unwrap();
    collect(translator, &batch)
}

fn collect(translator: &mut Translator, batch: &Batch) -> Vec<Said> {
    let mut said = Vec::new();
    translator.translate(batch, |event| {
        said.push(match event {
            Translation::Event(event) => Said::Event(event.clone()),
            Translation::Skipped(skip) => Said::Skipped(skip),
        });
    });
    said
}

fn locals(said: &Said) -> Vec<LocalHash> {
    match said {
        Said::Event(KvEvent::Stored { blocks, .. }) => blocks.iter().map(|b| b.local).collect(),
        other => panic!("{other:?}"),
    }
}

const A: EngineHash = EngineHash(1 << 63);
const B: EngineHash = EngineHash(2);
const TOKENS: [Token; 4] = [1, 2, 3, 4];

fn stored<'a>(hashes: &'a [EngineHash], tokens: &'a [Token]) -> Stored<'a> {
    Stored {
        hashes,
        tokens,
        block_size: SIZE,
        ..Stored::default()
    }
}

fn plain(tokens: &[Token]) -> Vec<LocalHash> {
    local_hashes(tokens, SIZE as usize, &Scope::default())
}

fn salted(tokens: &[Token], salt: &str) -> Vec<LocalHash> {
    local_hashes(
        tokens,
        SIZE as usize,
        &Scope {
            salt,
            ..Scope::default()
        },
    )
}

#[test]
fn a_salt_reaches_the_children_of_the_block_that_named_it() {
    let mut translator = Translator::new(OPTIONS);
    let first = Stored {
        salt: Some("tenant-a"),
        ..stored(&[A], &TOKENS)
    };
    let said = say(&mut translator, &[Event::Stored(first)]);
    assert_eq!(locals(&said[0]), salted(&TOKENS, "tenant-a"));

    let child = Stored {
        parent: Some(A),
        ..stored(&[B], &[5, 6, 7, 8])
    };
    let said = say(&mut translator, &[Event::Stored(child)]);
    assert_eq!(locals(&said[0]), salted(&[5, 6, 7, 8], "tenant-a"));
    assert_eq!(translator.salted_blocks(), 2);

    let removed = Removed {
        hashes: &[B, A],
        ..Removed::default()
    };
    say(&mut translator, &[Event::Removed(removed)]);
    assert_eq!(translator.salted_blocks(), 0);
    let said = say(&mut translator, &[Event::Stored(child)]);
    assert_eq!(locals(&said[0]), plain(&[5, 6, 7, 8]));
}

/// Stored twice and removed once, a salted block is still there for its children.
#[test]
fn salts_are_counted_as_blocks_are() {
    let mut translator = Translator::new(OPTIONS);
    let first = Event::Stored(Stored {
        salt: Some("s"),
        ..stored(&[A], &TOKENS)
    });
    let removed = Event::Removed(Removed {
        hashes: &[A],
        ..Removed::default()
    });
    say(&mut translator, &[first, first, removed]);
    assert!(translator.is_salted(A));
    say(&mut translator, &[removed]);
    assert!(!translator.is_salted(A));
    say(&mut translator, &[first, Event::Cleared]);
    assert_eq!(translator.salted_blocks(), 0);
}

#[test]
fn an_adapter_known_only_by_number_never_names_a_base_block() {
    let mut translator = Translator::new(OPTIONS);
    let numbered = Stored {
        adapter: Adapter::Numbered(7),
        ..stored(&[A], &TOKENS)
    };
    let named = Stored {
        adapter: Adapter::Named("my-lora"),
        ..stored(&[A], &TOKENS)
    };
    let said = say(
        &mut translator,
        &[Event::Stored(numbered), Event::Stored(named)],
    );
    let lora = Scope {
        lora: "my-lora",
        ..Scope::default()
    };
    assert_ne!(locals(&said[0]), plain(&TOKENS));
    assert_eq!(locals(&said[1]), local_hashes(&TOKENS, 4, &lora));
}

#[test]
fn events_that_cannot_be_used_are_named() {
    let mut translator = Translator::new(OPTIONS);
    let good = stored(&[A], &TOKENS);
    let cases = [
        (
            Stored {
                block_size: 2,
                ..stored(&[A, B], &TOKENS)
            },
            Skip::BlockSize { engine: 2 },
        ),
        (
            Stored {
                medium: Medium::Unknown,
                ..good
            },
            Skip::Medium,
        ),
        (stored(&[A, B], &TOKENS), Skip::Shape),
        (stored(&[], &TOKENS), Skip::Shape),
        (
            Stored {
                attention: Attention::Other,
                ..good
            },
            Skip::Group,
        ),
        (
            Stored {
                group: Some(3),
                ..good
            },
            Skip::Group,
        ),
    ];
    for (event, skip) in cases {
        assert_eq!(
            say(&mut translator, &[Event::Stored(event)]),
            [Said::Skipped(skip)]
        );
    }
    assert_eq!(
        say(&mut translator, &[Event::Unknown]),
        [Said::Skipped(Skip::Unknown)]
    );
    assert_eq!(say(&mut translator, &[Event::Ignored]), []);
}

/// A hybrid model: the kind of a group is said once and holds for events that leave it out.
#[test]
fn the_kind_of_a_group_is_learned() {
    let mut translator = Translator::new(OPTIONS);
    let event = |group, attention| {
        Event::Stored(Stored {
            group: Some(group),
            attention,
            ..stored(&[A], &TOKENS)
        })
    };
    let removed = |group| {
        Event::Removed(Removed {
            hashes: &[A],
            group: Some(group),
            ..Removed::default()
        })
    };
    let counts = |said: Vec<Said>| -> Vec<bool> {
        said.iter().map(|s| matches!(s, Said::Event(_))).collect()
    };
    let before = say(
        &mut translator,
        &[event(0, Attention::Unsaid), removed(0), removed(1)],
    );
    assert_eq!(counts(before), [true, true, false]);
    say(
        &mut translator,
        &[event(0, Attention::Other), event(1, Attention::Full)],
    );
    let after = [
        event(0, Attention::Unsaid),
        event(1, Attention::Unsaid),
        removed(0),
        removed(1),
    ];
    let after = say(&mut translator, &after);
    assert_eq!(counts(after), [false, true, false, true]);

    let disk = Stored {
        medium: Medium::Known(Tier::Disk),
        group: Some(0),
        ..stored(&[A], &TOKENS)
    };
    let said = say(&mut translator, &[Event::Stored(disk)]);
    assert!(matches!(
        said[0],
        Said::Event(KvEvent::Stored {
            tier: Tier::Disk,
            ..
        })
    ));
}

#[test]
fn media_enter_the_hash_or_replace_the_placeholder() {
    let media = [BlockMedia {
        block: 1,
        hash: 0xDEAD_BEEF,
    }];
    let tokens = [9, 9, 9, 9, 1, 2, 3, 4];
    let event = Event::Stored(Stored {
        media: &media,
        ..stored(&[A, B], &tokens)
    });
    let said = say(&mut Translator::new(OPTIONS), &[event]);
    assert_eq!(locals(&said[0])[0], plain(&tokens)[0]);
    assert_eq!(locals(&said[0])[1], LocalHash(15207512089340001072));

    let options = TranslateOptions {
        image_token: Some(3),
        ..OPTIONS
    };
    let said = say(&mut Translator::new(options), &[event]);
    let pad = kvasir_hash::media_pad_token(0xDEAD_BEEF);
    assert_eq!(locals(&said[0]), plain(&[9, 9, 9, 9, 1, 2, pad, 4]));
}

#[test]
fn pairs_are_hashed_with_the_longer_window() {
    let tokens: Vec<Token> = (1..=9).collect();
    let event = Event::Stored(Stored {
        pairs: true,
        ..stored(&[A, B], &tokens)
    });
    let mut translator = Translator::new(OPTIONS);
    let said = say(&mut translator, &[event]);
    assert_eq!(
        locals(&said[0]),
        [1914873892905420881, 1929047464662796003].map(LocalHash)
    );
    assert!(translator.pairs_seen());
}

/// Keys of unknown meaning make a block unlike any text block, instead of being overlooked.
#[test]
fn an_unknown_extra_key_is_never_a_plain_block() {
    use kvasir_msgpack::Writer;
    let mut bytes = Vec::new();
    let mut w = Writer::new(&mut bytes);
    w.array(2);
    w.float(1.0);
    w.array(1);
    w.array(9);
    w.str("BlockStored");
    w.array(2);
    w.uint(A.0);
    w.uint(B.0);
    w.nil();
    w.array(8);
    (1..=8).for_each(|t| w.uint(t));
    w.uint(4);
    w.nil();
    w.nil();
    w.nil();
    w.array(2);
    w.array(1);
    w.str("dynamo-cache-salt:tenant-a");
    w.array(1);
    w.bin(b"embedding");
    let mut batch = Batch::new();
    batch.decode(&bytes).unwrap();
    let said = collect(&mut Translator::new(OPTIONS), &batch);
    let expected = salted(&[1, 2, 3, 4, 5, 6, 7, 8], "tenant-a");
    assert_eq!(locals(&said[0])[0], expected[0]);
    assert_ne!(locals(&said[0])[1], expected[1]);
}

/// SGLang 0.5.18 appends a map of named fields; an older relay sends objects before the group.
#[test]
fn odd_tails_of_the_positional_form_are_understood() {
    use kvasir_msgpack::Writer;
    let mut bytes = Vec::new();
    let mut w = Writer::new(&mut bytes);
    w.array(3);
    w.float(1.0);
    w.array(2);
    for tail in 0..2 {
        w.array(if tail == 0 { 8 } else { 12 });
        w.str("BlockStored");
        w.array(1);
        w.sint(-5);
        w.nil();
        w.array(4);
        (1..=4).for_each(|t| w.uint(t));
        w.uint(4);
        w.nil();
        w.str("GPU");
        if tail == 0 {
            w.map(2);
            w.str("cache_salt");
            w.str("s");
            w.str("new_field");
            w.array(1);
            w.nil();
        } else {
            w.nil();
            w.nil();
            w.array(1);
            w.map(1);
            w.str("mm_objects");
            w.array(1);
            w.map(2);
            w.str("offsets");
            w.nil();
            w.str("mm_hash");
            w.uint(0xDEAD_BEEF);
            w.uint(0);
            w.str("full_attention");
        }
    }
    w.uint(3);
    let mut batch = Batch::new();
    batch.decode(&bytes).unwrap();
    assert_eq!(batch.rank(), Some(3));
    let events: Vec<Event<'_>> = batch.events().collect();
    let (Event::Stored(first), Event::Stored(second)) = (events[0], events[1]) else {
        panic!("{events:?}");
    };
    assert_eq!(
        (first.salt, first.hashes),
        (Some("s"), &[EngineHash(-5i64 as u64)][..])
    );
    assert_eq!(
        second.media,
        [BlockMedia {
            block: 0,
            hash: 0xDEAD_BEEF
        }]
    );
    assert_eq!((second.group, second.attention), (Some(0), Attention::Full));
}
