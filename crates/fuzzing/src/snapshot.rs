//! Files of the index: what is read is what would be written, and what is refused leaves nothing behind.

use kvasir_host::rewrite_snapshot;
use kvasir_index::Index;
use kvasir_types::KvEvent;
use xxhash_rust::xxh3::xxh3_64;

const CHECKSUM: usize = 8;

/// An input that ends with this byte keeps its checksum.
const UNSUMMED: u8 = 0xEE;

/// Bytes with a right checksum.
fn summed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some(end) = bytes.len().checked_sub(CHECKSUM)
        && bytes.last() != Some(&UNSUMMED)
    {
        let sum = xxh3_64(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}

pub(crate) fn check(bytes: &[u8]) -> bool {
    let bytes = summed(bytes);
    let Ok(again) = rewrite_snapshot(&bytes) else {
        return false;
    };
    assert_eq!(again, bytes, "what was read is not what would be written");
    true
}

pub(crate) fn check_index(bytes: &[u8]) -> bool {
    let bytes = summed(bytes);
    let index = Index::new();
    if index.restore(&bytes).is_err() {
        assert!(
            index.dump().is_empty(),
            "a refused file left something behind"
        );
        return false;
    }
    let written = index.snapshot();
    assert!(written.is_ok());
    let (second, written) = (Index::new(), written.unwrap_or_default());
    assert!(
        second.restore(&written).is_ok(),
        "what was written cannot be read"
    );
    assert_eq!(dumped(&second), dumped(&index));
    true
}

/// What an index holds. Which of two branches comes first, and how a block without a name is called, is its own affair.
fn dumped(index: &Index) -> Vec<String> {
    let events = index.dump().into_iter();
    let mut stored: Vec<_> = events
        .filter_map(|(rank, event)| match event {
            KvEvent::Stored { tier, blocks, .. } => {
                let locals: Vec<_> = blocks.iter().map(|block| block.local).collect();
                Some(format!("{rank:?} {tier:?} {locals:?}"))
            }
            _ => None,
        })
        .collect();
    stored.sort_unstable();
    stored
}
