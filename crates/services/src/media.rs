//! Images and other objects in a prompt, as clients name them: they are part of the names of the blocks that they stand in.

use serde::Deserialize;
use serde::de::{Deserializer, Error};

use crate::reading::TokenIds;

/// `block_mm_infos`: for each block none, or the objects in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BlockMedia(Vec<Vec<u64>>);

impl BlockMedia {
    /// Hashes of the objects in a block.
    pub(crate) fn of_block(&self, block: usize) -> &[u64] {
        self.0.get(block).map_or(&[], Vec::as_slice)
    }
}

/// `mm_routing_info`: a prompt as it is routed, with a place for each token of an object.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct MediaPrompt {
    #[serde(default)]
    pub(crate) routing_token_ids: TokenIds,
    #[serde(default)]
    pub(crate) block_mm_infos: BlockMedia,
}

#[derive(Deserialize)]
struct BlockInfo {
    #[serde(default)]
    mm_objects: Vec<MediaObject>,
}

#[derive(Deserialize)]
struct MediaObject {
    mm_hash: SignedOrNot,
}

/// A hash, which others write with a sign or without.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum SignedOrNot {
    Unsigned(u64),
    Signed(i64),
}

impl<'de> Deserialize<'de> for BlockMedia {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let blocks = Option::<Vec<Option<BlockInfo>>>::deserialize(from).map_err(|error| {
            let expected = r#"for each block null or {"mm_objects": [{"mm_hash": number}]}"#;
            D::Error::custom(format_args!("{expected} is expected: {error}"))
        })?;
        let hash = |object: MediaObject| match object.mm_hash {
            SignedOrNot::Unsigned(hash) => hash,
            SignedOrNot::Signed(hash) => hash.cast_unsigned(),
        };
        let of_block = |info: Option<BlockInfo>| {
            let objects = info.map(|info| info.mm_objects).unwrap_or_default();
            objects.into_iter().map(hash).collect()
        };
        let blocks = blocks.unwrap_or_default();
        Ok(Self(blocks.into_iter().map(of_block).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_by_block_and_garbage_is_refused() {
        let read = |text: &str| serde_json::from_str::<BlockMedia>(text).ok();
        let media = read(
            r#"[null, {"mm_objects": [{"mm_hash": -1, "offsets": [[0, 3]]}, {"mm_hash": 7}]}, {}]"#,
        );
        let media = media.unwrap();
        assert_eq!(media.of_block(0), [0; 0]);
        assert_eq!(media.of_block(1), [u64::MAX, 7]);
        assert_eq!((media.of_block(2).len(), media.of_block(9).len()), (0, 0));
        assert_eq!(read("null"), Some(BlockMedia::default()));
        assert_eq!(
            (read("[7]"), read(r#"[{"mm_objects":[{}]}]"#)),
            (None, None)
        );
    }
}
