//! The pieces that a thread used last, without a lock.
//!
//! Answers one question: has this thread just used this piece? A system prompt is in every request, so all threads would
//! take the same few locks of the shared cache and write to the same lines of memory for each of its pieces. Here each has
//! its own table of references to them.
//!
//! What always holds: a thread refers to at most [`PIECES`] pieces of at most [`PIECE_BYTES_MAX`] each, so what the shared
//! cache has dropped stays for at most so long; one use in [`USES_PER_REPORT`] is reported, so that the shared cache knows
//! what is in use.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Piece;

/// Pieces that a thread refers to: 256 KiB of text with pieces of 2 KiB.
const PIECES: usize = 128;
/// A larger piece is looked up in the shared cache each time.
const PIECE_BYTES_MAX: usize = 8 << 10;
/// The shared cache hears of the first use and then of one in so many.
const USES_PER_REPORT: u32 = 32;

/// Tells one cache of a process from the others.
#[derive(Debug)]
pub(super) struct CacheId(u64);

impl CacheId {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

struct Entry {
    cache: u64,
    hash: u64,
    piece: Arc<Piece>,
    uses: u32,
}

thread_local! {
    static ENTRIES: RefCell<Vec<Option<Entry>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `with` with the piece of this hash and text if this thread has just used it. False if it has not, or if the
/// shared cache is to hear of this use.
pub(super) fn find(cache: &CacheId, hash: u64, text: &str, with: impl FnOnce(&Piece)) -> bool {
    let found = ENTRIES.try_with(|entries| {
        let mut entries = entries.borrow_mut();
        let entry = entries.get_mut(place(hash))?.as_mut()?;
        let same = entry.hash == hash && entry.cache == cache.0 && *entry.piece.text == *text;
        if !same || entry.uses >= USES_PER_REPORT {
            return None;
        }
        entry.uses += 1;
        with(&entry.piece);
        Some(())
    });
    matches!(found, Ok(Some(())))
}

/// Remembers a piece that this thread has found in the shared cache.
pub(super) fn keep(cache: &CacheId, hash: u64, piece: &Arc<Piece>) {
    if piece.text.len() > PIECE_BYTES_MAX {
        return;
    }
    let _ = ENTRIES.try_with(|entries| {
        let mut entries = entries.borrow_mut();
        entries.resize_with(PIECES, || None);
        entries[place(hash)] = Some(Entry {
            cache: cache.0,
            hash,
            piece: Arc::clone(piece),
            uses: 0,
        });
    });
}

/// The shared cache goes by the highest bits of a hash, this by the lowest.
fn place(hash: u64) -> usize {
    hash as usize % PIECES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(text: &str) -> Arc<Piece> {
        Arc::new(Piece {
            text: text.into(),
            ids: [7].into(),
        })
    }

    #[test]
    fn a_thread_finds_what_it_used_by_cache_hash_and_text() {
        let (cache, other) = (CacheId::new(), CacheId::new());
        keep(&cache, 5, &piece("abc"));
        let found = |cache: &CacheId, hash, text: &str| {
            let mut ids = Vec::new();
            find(cache, hash, text, |piece| {
                ids.extend_from_slice(&piece.ids);
            })
            .then_some(ids)
        };
        assert_eq!(found(&cache, 5, "abc"), Some(vec![7]));
        assert_eq!(found(&cache, 5, "abd"), None, "another text, the same hash");
        assert_eq!(found(&other, 5, "abc"), None, "another tokenizer");
        assert_eq!(found(&cache, 5 + PIECES as u64, "abc"), None);
        keep(&cache, 5 + PIECES as u64, &piece("def"));
        assert_eq!(found(&cache, 5, "abc"), None, "its place was needed");
        keep(&cache, 6, &piece(&"x".repeat(PIECE_BYTES_MAX + 1)));
        assert_eq!(found(&cache, 6, &"x".repeat(PIECE_BYTES_MAX + 1)), None);
    }

    #[test]
    fn the_shared_cache_hears_of_a_piece_now_and_then() {
        let cache = CacheId::new();
        keep(&cache, 9, &piece("abc"));
        let uses = (0..2 * USES_PER_REPORT)
            .filter(|_| find(&cache, 9, "abc", |_| ()))
            .count();
        assert_eq!(uses, USES_PER_REPORT as usize);
        keep(&cache, 9, &piece("abc"));
        assert!(find(&cache, 9, "abc", |_| ()));
    }
}
