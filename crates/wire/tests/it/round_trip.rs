//! Whatever an engine can say, encoded and decoded, is the same; in every dialect that can say it.

use kvasir_types::{EngineHash, Tier};
use kvasir_wire::engine::{
    Adapter, Attention, Batch, BlockMedia, Dialect, Event, Medium, Removed, Stored, encode_batch,
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Owned {
    Stored {
        blocks: Vec<(u64, Option<u64>)>,
        parent: Option<u64>,
        size: u32,
        first: u32,
        pairs: bool,
        tier: Option<Tier>,
        name: Option<String>,
        salt: Option<String>,
        group: Option<u32>,
        full: Option<bool>,
    },
    Removed(Vec<u64>, Option<Tier>, Option<u32>),
    Cleared,
}

fn tier() -> impl Strategy<Value = Option<Tier>> {
    let tiers = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];
    proptest::option::of(proptest::sample::select(tiers.to_vec()))
}

fn event() -> impl Strategy<Value = Owned> {
    let block = (any::<u64>(), proptest::option::weighted(0.1, any::<u64>()));
    let stored = (
        (
            proptest::collection::vec(block, 0..5),
            proptest::option::of(any::<u64>()),
        ),
        (1u32..6, 0u32..3_000_000_000, any::<bool>(), tier()),
        (
            proptest::option::of("[a-z/-]{1,12}"),
            proptest::option::of("[A-Z]{1,40}"),
            proptest::option::of(0u32..4),
            proptest::option::of(any::<bool>()),
        ),
    );
    prop_oneof![
        4 => stored.prop_map(|((blocks, parent), (size, first, pairs, tier), (name, salt, group, full))| {
            Owned::Stored { blocks, parent, size, first, pairs, tier, name, salt, group, full }
        }),
        2 => (proptest::collection::vec(any::<u64>(), 0..4), tier(), proptest::option::of(0u32..4))
            .prop_map(|(names, tier, group)| Owned::Removed(names, tier, group)),
        1 => Just(Owned::Cleared),
    ]
}

/// The event as `dialect` can say it.
fn view<'a>(owned: &'a Owned, dialect: Dialect, buffers: &'a mut Buffers) -> Event<'a> {
    let keys = dialect.has_extra_keys();
    let medium = |tier: &Option<Tier>| match (dialect, tier) {
        (Dialect::Vllm09, _) | (_, None) => Medium::Unsaid,
        (_, Some(tier)) => Medium::Known(*tier),
    };
    match owned {
        Owned::Cleared => Event::Cleared,
        Owned::Removed(names, tier, group) => {
            buffers.names = names.iter().copied().map(EngineHash).collect();
            Event::Removed(Removed {
                hashes: &buffers.names,
                medium: medium(tier),
                group: group.filter(|_| keys),
                remote: false,
            })
        }
        Owned::Stored {
            blocks,
            parent,
            size,
            first,
            pairs,
            tier,
            name,
            salt,
            group,
            full,
        } => {
            buffers.names = blocks.iter().map(|(name, _)| EngineHash(*name)).collect();
            let media = blocks.iter().zip(0..).filter(|_| keys);
            let media =
                media.filter_map(|((_, m), block)| m.map(|hash| BlockMedia { block, hash }));
            buffers.media = media.collect();
            let pairs = *pairs && !blocks.is_empty();
            let tokens = blocks.len() as u32 * size + u32::from(pairs);
            buffers.tokens = (*first..first + tokens).collect();
            let named = keys || dialect == Dialect::SglangMap;
            let says_salt = match dialect {
                Dialect::SglangMap => true,
                _ => keys && parent.is_none() && !blocks.is_empty(),
            };
            let kind = keys && dialect != Dialect::Vllm20;
            Event::Stored(Stored {
                hashes: &buffers.names,
                parent: parent.map(EngineHash),
                tokens: &buffers.tokens,
                pairs,
                block_size: *size,
                medium: medium(tier),
                adapter: match name {
                    Some(name) if named => Adapter::Named(name),
                    _ => Adapter::Base,
                },
                salt: salt.as_deref().filter(|_| says_salt),
                media: &buffers.media,
                group: group.filter(|_| keys),
                attention: match full {
                    Some(true) if kind => Attention::Full,
                    Some(false) if kind => Attention::Other,
                    _ => Attention::Unsaid,
                },
                remote: false,
            })
        }
    }
}

#[derive(Default)]
struct Buffers {
    names: Vec<EngineHash>,
    tokens: Vec<u32>,
    media: Vec<BlockMedia>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_batch_survives_every_dialect(
        events in proptest::collection::vec(event(), 0..6),
        rank in proptest::option::of(0u32..64),
        at in 0.0f64..1e10,
    ) {
        let mut batch = Batch::new();
        for dialect in Dialect::ALL {
            let mut buffers: Vec<Buffers> = events.iter().map(|_| Buffers::default()).collect();
            let views: Vec<Event<'_>> = events
                .iter()
                .zip(&mut buffers)
                .map(|(event, buffers)| view(event, dialect, buffers))
                .collect();
            let mut bytes = Vec::new();
            encode_batch(dialect, at, views.iter().copied(), rank, &mut bytes);
            batch.decode(&bytes).unwrap();
            prop_assert_eq!(batch.at(), at);
            prop_assert_eq!(batch.rank(), rank);
            let decoded: Vec<Event<'_>> = batch.events().collect();
            prop_assert_eq!(decoded, views, "{:?}", dialect);
        }
    }
}
