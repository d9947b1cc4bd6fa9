//! A long conversation pays only for what is new.
//!
//! Answers one question: which tokens does a text have, if most of it was tokenized before? The text is cut at
//! safe places about 2 KiB apart; what lies between two cuts has the same tokens in every text, so pieces are
//! kept by content; where the caller knows that something new begins, a piece ends. The tail after the last cut is
//! always tokenized afresh.
//!
//! Invariants: the tokens are those of plain tokenization (a hit compares the text, not only its hash); memory stays
//! under the budget; no lock is held while tokenizing.

mod near;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kvasir_types::Token;
use xxhash_rust::xxh3::xxh3_64;

use self::near::CacheId;
use crate::cuts::CutRules;
use crate::error::TextError;

/// Bytes after which the next safe cut is taken. 1 to 8 KiB measure alike.
const STEP_BYTES: usize = 2048;
/// A piece without a safe cut for this long is tokenized and not kept.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// What a kept piece costs beside its text and tokens: map entry, slot, three allocations.
const PIECE_OVERHEAD: usize = 144;
/// Locks, so that threads rarely wait for each other.
const SHARDS: usize = 16;

/// Tokenized pieces, by content.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    rules: CutRules,
    step: usize,
    shards: Vec<Mutex<Shard>>,
    shard_budget: usize,
    counts: Counts,
    id: CacheId,
}

#[derive(Debug, Default)]
struct Counts {
    hit_texts: AtomicU64,
    miss_texts: AtomicU64,
    hit_bytes: AtomicU64,
    miss_bytes: AtomicU64,
    hit_tokens: AtomicU64,
    miss_tokens: AtomicU64,
}

/// What a prefix cache has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Texts of which something was found.
    pub hit_texts: u64,
    /// Texts of which nothing was found, or that are too short to look.
    pub miss_texts: u64,
    /// Tokens that were found.
    pub hit_tokens: u64,
    /// Tokens that were made.
    pub miss_tokens: u64,
    /// Bytes of text whose tokens were found.
    pub hit_bytes: u64,
    /// Bytes of text that were tokenized.
    pub miss_bytes: u64,
    /// Bytes of memory in use.
    pub used_bytes: u64,
    /// Most bytes of memory.
    pub budget_bytes: u64,
}

/// One lock's worth of pieces. Evicts by the clock rule: a piece used since the hand last passed stays.
#[derive(Debug, Default)]
struct Shard {
    by_hash: HashMap<u64, usize>,
    slots: Vec<Slot>,
    hand: usize,
    used: usize,
}

#[derive(Debug)]
struct Slot {
    hash: u64,
    piece: Arc<Piece>,
    recent: bool,
}

/// A piece of text and its tokens.
#[derive(Debug)]
struct Piece {
    text: Box<str>,
    ids: Box<[Token]>,
}

impl Piece {
    fn cost(&self) -> usize {
        self.text.len() + size_of_val(&*self.ids) + PIECE_OVERHEAD
    }
}

impl Counts {
    /// One text: of its bytes and tokens, those found and those made.
    fn add(&self, bytes: (usize, usize), tokens: (usize, usize)) {
        let add = |count: &AtomicU64, more: usize| {
            count.fetch_add(more as u64, Ordering::Relaxed);
        };
        let texts = match bytes.0 {
            0 => &self.miss_texts,
            _ => &self.hit_texts,
        };
        add(texts, 1);
        add(&self.hit_bytes, bytes.0);
        add(&self.miss_bytes, bytes.1);
        add(&self.hit_tokens, tokens.0);
        add(&self.miss_tokens, tokens.1);
    }
}

impl PrefixCache {
    pub(crate) fn new(rules: CutRules, budget_bytes: usize) -> Self {
        Self::with_step(rules, budget_bytes, STEP_BYTES)
    }

    fn with_step(rules: CutRules, budget_bytes: usize, step: usize) -> Self {
        Self {
            rules,
            step,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            shard_budget: budget_bytes / SHARDS,
            counts: Counts::default(),
            id: CacheId::new(),
        }
    }

    /// Appends the tokens of `text`, tokenizing what is not kept with `encode`. `places` are those, in order, at which
    /// something new is likely to begin: where it is safe, a piece ends there.
    pub(crate) fn encode(
        &self,
        text: &str,
        places: &[usize],
        encode: impl Fn(&str) -> Result<Vec<Token>, TextError>,
        out: &mut Vec<Token>,
    ) -> Result<(), TextError> {
        let (mut hits, mut hit_tokens, mut from) = (0, 0, 0);
        let before = out.len();
        let mut places = places.iter().copied();
        while let Some(at) = self.next_cut(text, from, &mut places) {
            let piece = &text[from..at];
            from = at;
            if piece.len() > PIECE_BYTES_MAX {
                out.extend(encode(piece)?);
                continue;
            }
            let hash = xxh3_64(piece.as_bytes());
            let so_far = out.len();
            if self.look_up(hash, piece, out) {
                hits += piece.len();
                hit_tokens += out.len() - so_far;
            } else {
                let ids = encode(piece)?;
                out.extend_from_slice(&ids);
                self.keep(hash, piece, ids);
            }
        }
        out.extend(encode(&text[from..])?);
        let tokens = (hit_tokens, out.len() - before - hit_tokens);
        self.counts.add((hits, text.len() - hits), tokens);
        Ok(())
    }

    /// Where the piece that begins at `from` ends: at the next of `places` that is safe, or a step away.
    fn next_cut(
        &self,
        text: &str,
        from: usize,
        places: &mut (impl Iterator<Item = usize> + Clone),
    ) -> Option<usize> {
        let far = self.rules.next(text, from + self.step);
        loop {
            let place = places.clone().next();
            let Some(place) = place.filter(|place| far.is_none_or(|far| *place <= far)) else {
                return far;
            };
            places.next();
            if place > from && self.rules.is_safe(text, place) {
                return Some(place);
            }
        }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let used = self.shards.iter().map(|s| lock(s).used as u64).sum();
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        CacheStats {
            hit_texts: read(&counts.hit_texts),
            miss_texts: read(&counts.miss_texts),
            hit_tokens: read(&counts.hit_tokens),
            miss_tokens: read(&counts.miss_tokens),
            hit_bytes: read(&counts.hit_bytes),
            miss_bytes: read(&counts.miss_bytes),
            used_bytes: used,
            budget_bytes: (self.shard_budget * SHARDS) as u64,
        }
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        &self.shards[(hash >> 60) as usize % SHARDS]
    }

    fn look_up(&self, hash: u64, piece: &str, out: &mut Vec<Token>) -> bool {
        if near::find(&self.id, hash, piece, |found| {
            out.extend_from_slice(&found.ids);
        }) {
            return true;
        }
        let found = lock(self.shard(hash)).find(hash, piece);
        if let Some(found) = &found {
            out.extend_from_slice(&found.ids);
            near::keep(&self.id, hash, found);
        }
        found.is_some()
    }

    fn keep(&self, hash: u64, text: &str, ids: Vec<Token>) {
        let piece = Piece {
            text: text.into(),
            ids: ids.into_boxed_slice(),
        };
        let slot = Slot {
            hash,
            piece: Arc::new(piece),
            recent: false,
        };
        lock(self.shard(hash)).insert(slot, self.shard_budget);
    }
}

impl Shard {
    /// The piece of this hash and text, which is in use.
    fn find(&mut self, hash: u64, text: &str) -> Option<Arc<Piece>> {
        let at = *self.by_hash.get(&hash)?;
        let slot = self.slots.get_mut(at).filter(|s| *s.piece.text == *text)?;
        slot.recent = true;
        Some(Arc::clone(&slot.piece))
    }

    fn insert(&mut self, slot: Slot, budget: usize) {
        if slot.piece.cost() > budget {
            return;
        }
        if let Some(&at) = self.by_hash.get(&slot.hash) {
            self.remove(at);
        }
        self.used += slot.piece.cost();
        self.by_hash.insert(slot.hash, self.slots.len());
        self.slots.push(slot);
        while self.used > budget {
            self.evict();
        }
    }

    /// The hand goes round, takes the mark from recent pieces and stops at one without. The newest piece has
    /// the last slot, so it goes only when nothing else is left.
    fn evict(&mut self) {
        if self.hand + 1 >= self.slots.len() {
            self.hand = 0;
        }
        match self.slots.get_mut(self.hand) {
            Some(slot) if slot.recent => {
                slot.recent = false;
                self.hand += 1;
            }
            Some(_) => self.remove(self.hand),
            None => self.used = 0,
        }
    }

    fn remove(&mut self, at: usize) {
        if at >= self.slots.len() {
            return;
        }
        let gone = self.slots.swap_remove(at);
        self.used = self.used.saturating_sub(gone.piece.cost());
        self.by_hash.remove(&gone.hash);
        if let Some(moved) = self.slots.get(at) {
            self.by_hash.insert(moved.hash, at);
        }
    }
}

/// A panic elsewhere leaves at worst a piece less.
fn lock(shard: &Mutex<Shard>) -> std::sync::MutexGuard<'_, Shard> {
    shard
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
