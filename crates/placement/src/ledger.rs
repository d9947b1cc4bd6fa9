//! What each rank has been given to do and has not finished.
//!
//! Answers two questions: how many blocks do a rank's running requests hold, and how many prompt tokens
//! does it still have to compute? Predicted from what was booked, corrected by first tokens and ends.
//!
//! What always holds: a block that several requests of a rank share counts once; what is booked is freed
//! exactly once, so after any history in which every request ended all totals are 0; unknown ids are
//! no-ops. Weights are whole millionths of a block, so that sums come back to 0 exactly.
//!
//! Elsewhere: which rank is which slot (`fleet`), when a rank counts as busy (`busy`).

mod journal;
mod list;
mod prefix_trie;
mod running;
mod sign;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use kvasir_types::{RequestId, SequenceHash, Time};

use crate::map::FastMap;
pub use journal::{LedgerNote, RankState, TimedLoad};
pub use running::RunningRequest;
pub use sign::{Sign, SignChange};

use journal::{Journal, nanos};
use list::{Link, Links, List, NONE};
use prefix_trie::{ExclusiveChange, PrefixTrie};

/// One whole block, in the unit of weights.
const WHOLE: u64 = 1_000_000;

const BY_SLOT: usize = 0;
const BY_PREFILL: usize = 1;
const BY_AGE: usize = 2;

/// What to book for one request.
#[derive(Clone, Debug)]
pub struct Booking {
    /// Chained hashes of the prompt's complete blocks; empty where blocks are not tracked.
    pub sequence: Arc<[SequenceHash]>,
    /// Complete blocks of a prompt whose blocks have no names; they count where `sequence` is empty.
    pub unnamed_blocks: u32,
    /// Whether equal blocks of other requests on the rank are the same blocks.
    pub shares: bool,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// Prompt tokens that the rank has to compute; 0 books none.
    pub prefill_tokens: u32,
    /// How long that is expected to take; `None` keeps the charge until the first token.
    pub prefill_duration: Option<Duration>,
    /// Whether the charge shrinks as that time passes; if not, the time only counts in seconds.
    pub decays: bool,
    /// Tokens the client expects to be generated.
    pub osl: Option<u32>,
    /// Nothing will show when its prompt is computed: its answer comes in one piece.
    pub silent: bool,
}

/// A running request.
#[derive(Clone, Debug)]
struct BookingEntry {
    id: RequestId,
    slot: u32,
    links: [Link; 3],
    /// Node of the trie, or `NONE` where the blocks are its own.
    tail: u32,
    /// The last of its complete blocks, where they have names.
    last_block: Option<SequenceHash>,
    /// Tracked prompt blocks.
    blocks: u32,
    /// Of those, blocks that no other request of the rank has.
    exclusive: u32,
    /// Weight of exclusive and output blocks, at most [`WHOLE`].
    weight: u32,
    output_blocks: u32,
    /// Blocks of prompt and output when last looked at.
    total_blocks: u32,
    isl_tokens: u32,
    generated: u32,
    osl: Option<u32>,
    /// Prompt tokens still charged.
    prefill: u32,
    prefill_duration: Option<Duration>,
    decays: bool,
    silent: bool,
    sign: Sign,
    /// Prompts that were to be computed on the rank when it came.
    ahead: u32,
    booked_at: Time,
    /// Last activity.
    seen_at: Time,
}

/// One rank's work.
#[derive(Clone, Copy, Debug, Default)]
struct Rank {
    /// Distinct active prompt blocks.
    blocks: u64,
    /// Weight of output blocks.
    output: u64,
    /// Weight taken off exclusive prompt blocks.
    discount: u64,
    prefill: u64,
    /// How long the prompts not yet computed are expected to take.
    prefill_ns: u64,
    /// All tokens of those prompts.
    pending_tokens: u64,
    /// Of those prompts, the ones whose answers come in one piece.
    silent: u32,
    /// The oldest prompt not yet computed, copied here so that a read touches nothing else.
    oldest: OldestPrompt,
    waiting: List,
    running: List,
    /// Prompt and output tokens of requests past their first token.
    context: u64,
}

/// The prompt that a rank is assumed to compute now.
#[derive(Clone, Copy, Debug, Default)]
struct OldestPrompt {
    tokens: u32,
    /// 0 for not modelled.
    duration_ns: u64,
    modelled: bool,
    since: Time,
}

/// A rank's load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Blocks that running requests hold, rounded.
    pub active_blocks: u64,
    /// Prompt tokens still to compute.
    pub prefill_tokens: u64,
    /// Requests running.
    pub requests: u32,
    /// Of those, the ones still before their first token.
    pub pending: u32,
    /// Prompt and output tokens of the others.
    pub context_tokens: u64,
    /// When the oldest pending one became the oldest.
    pub oldest_since: Option<Time>,
}

/// What the cost reads of a rank, as the cost computes: whole numbers, exact in floating point.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankTotals {
    pub(crate) active_blocks: f64,
    /// Before any decay.
    pub(crate) prefill_tokens: f64,
    pub(crate) requests: f64,
    /// Whether the prompt tokens decay with time, so that [`Ledger::prefill_tokens`] must be called.
    pub(crate) decays: bool,
}

/// A computed prompt: one sample for a predictor that learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillSample {
    /// Where.
    pub slot: u32,
    /// Prompt tokens computed.
    pub tokens: u32,
    /// Prompt tokens found in the cache.
    pub cached: u32,
    /// From when it was the oldest there until its first token; `None` if it never was.
    pub took: Option<Duration>,
}

/// A booking that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedBooking {
    /// The request.
    pub id: RequestId,
    /// Where it was.
    pub slot: u32,
    /// What had shown that its prompt was computed.
    pub sign: Sign,
}

/// The work of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    block_size: u32,
    ranks: Vec<Rank>,
    totals: Vec<RankTotals>,
    /// Ranks whose totals decay.
    modelled: u32,
    entries: BookingEntries,
    vacant: Vec<u32>,
    by_id: FastMap<RequestId, u32>,
    by_age: List,
    trie: PrefixTrie,
    changes: Vec<ExclusiveChange>,
    journal: Journal,
}

#[derive(Clone, Debug, Default)]
struct BookingEntries(Vec<BookingEntry>);

impl Links for BookingEntries {
    fn link(&mut self, at: u32, kind: usize) -> &mut Link {
        &mut self.0[at as usize].links[kind]
    }
}

impl Ledger {
    /// An empty ledger for blocks of `block_size` tokens.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self {
            block_size: block_size.max(1),
            ..Self::default()
        }
    }

    /// Makes room for slots below `count`.
    pub fn grow(&mut self, count: u32) {
        if self.ranks.len() < count as usize {
            self.ranks.resize(count as usize, Rank::default());
            self.totals.resize(count as usize, RankTotals::default());
        }
    }

    /// Requests booked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether nothing is booked and nothing is left of what was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
            && self.trie.nodes() == 0
            && self.ranks.iter().all(|r| {
                (r.blocks, r.output, r.discount, r.prefill, r.context) == (0, 0, 0, 0, 0)
                    && r.running.len() == 0
                    && r.waiting.len() == 0
            })
    }

    /// The slot a request is booked on.
    #[must_use]
    pub fn slot_of(&self, id: RequestId) -> Option<u32> {
        let at = *self.by_id.get(&id)?;
        self.entries.0.get(at as usize).map(|e| e.slot)
    }

    /// When a request was booked.
    #[must_use]
    pub fn booked_at(&self, id: RequestId) -> Option<Time> {
        let at = *self.by_id.get(&id)?;
        self.entries.0.get(at as usize).map(|e| e.booked_at)
    }

    /// A rank's load at `now`.
    #[must_use]
    pub fn load(&self, slot: u32, now: Time) -> Load {
        let Some(rank) = self.ranks.get(slot as usize) else {
            return Load::default();
        };
        Load {
            active_blocks: rank.active_blocks(),
            prefill_tokens: rank.prefill_at(now),
            requests: rank.running.len(),
            pending: rank.waiting.len(),
            context_tokens: rank.context,
            oldest_since: rank.waiting.head().map(|_| rank.oldest.since),
        }
    }

    /// What the cost reads of each slot, close together.
    pub(crate) fn totals(&self) -> &[RankTotals] {
        &self.totals
    }

    /// Whether any rank's prompt tokens decay with time.
    pub(crate) fn decays(&self) -> bool {
        self.modelled > 0
    }

    /// Brings a slot's totals up to date after its rank changed.
    fn refresh(&mut self, slot: u32) {
        self.journal.mark(slot);
        let at = slot as usize;
        if let (Some(rank), Some(totals)) = (self.ranks.get(at), self.totals.get_mut(at)) {
            self.modelled =
                self.modelled + u32::from(rank.oldest.modelled) - u32::from(totals.decays);
            *totals = RankTotals {
                active_blocks: rank.active_blocks() as f64,
                prefill_tokens: rank.prefill as f64,
                requests: f64::from(rank.running.len()),
                decays: rank.oldest.modelled,
            };
        }
    }

    /// Prompt tokens that a rank still has to compute at `now`.
    #[must_use]
    pub fn prefill_tokens(&self, slot: u32, now: Time) -> u64 {
        let rank = self.ranks.get(slot as usize);
        rank.map_or(0, |rank| rank.prefill_at(now))
    }

    /// Requests running on a rank.
    #[must_use]
    pub fn requests(&self, slot: u32) -> u32 {
        let rank = self.ranks.get(slot as usize);
        rank.map_or(0, |rank| rank.running.len())
    }

    /// Calls `found(slot, depth)` with how many leading blocks of `sequence` are active there, deepest
    /// first; `found` returns whether the slot was new to it.
    pub fn depths(&mut self, sequence: &[SequenceHash], found: impl FnMut(u32, u32) -> bool) {
        self.trie.depths(sequence, found);
    }

    /// Books a request. A known id is left as it is and `false` returned.
    pub fn book(&mut self, now: Time, id: RequestId, slot: u32, booking: &Booking) -> bool {
        if self.by_id.contains_key(&id) || slot as usize >= self.ranks.len() {
            return false;
        }
        let at = self.vacant.pop().unwrap_or(self.entries.0.len() as u32);
        let blocks = match booking.sequence.is_empty() {
            true => booking.unnamed_blocks,
            false => booking.sequence.len() as u32,
        };
        let mut entry = BookingEntry {
            id,
            slot,
            links: [Link::default(); 3],
            tail: NONE,
            last_block: booking.sequence.last().copied(),
            blocks,
            exclusive: blocks,
            weight: WHOLE as u32,
            output_blocks: 0,
            total_blocks: booking.isl_tokens.div_ceil(self.block_size),
            isl_tokens: booking.isl_tokens,
            generated: 0,
            osl: booking.osl,
            prefill: booking.prefill_tokens,
            prefill_duration: booking.prefill_duration,
            decays: booking.decays,
            silent: booking.silent,
            sign: Sign::Awaited,
            ahead: self.ranks[slot as usize].waiting.len(),
            booked_at: now,
            seen_at: now,
        };
        let mut active = blocks;
        if booking.shares && !booking.sequence.is_empty() {
            let sequence = &booking.sequence;
            let (tail, change) = self.trie.acquire(sequence, slot, at, &mut self.changes);
            (entry.tail, entry.exclusive, active) = (tail, change.exclusive, change.blocks);
        }
        match self.entries.0.get_mut(at as usize) {
            Some(place) => *place = entry,
            None => self.entries.0.push(entry),
        }
        self.by_id.insert(id, at);
        self.by_age.push_back(&mut self.entries, BY_AGE, at);
        let rank = &mut self.ranks[slot as usize];
        rank.blocks += u64::from(active);
        rank.running.push_back(&mut self.entries, BY_SLOT, at);
        if booking.prefill_tokens > 0 {
            rank.prefill += u64::from(booking.prefill_tokens);
            rank.pending_tokens += u64::from(booking.isl_tokens);
            rank.silent += u32::from(booking.silent);
            rank.prefill_ns += nanos(booking.prefill_duration);
            rank.waiting.push_back(&mut self.entries, BY_PREFILL, at);
            if rank.waiting.len() == 1 {
                rank.oldest = OldestPrompt::of(&self.entries.0[at as usize], now);
            }
            let state = rank.state();
            let at = now;
            self.journal.note(|| LedgerNote::Booked { slot, at, state });
        } else {
            rank.context += u64::from(booking.isl_tokens);
        }
        self.settle(slot);
        true
    }

    /// Applies what a change of the trie did to the other prompts of the slot; then refreshes its totals.
    fn settle(&mut self, slot: u32) {
        for (at, delta) in self.changes.drain(..) {
            let Some(entry) = self.entries.0.get_mut(at as usize) else {
                continue;
            };
            let before = entry.discount();
            entry.exclusive = u32::try_from(i64::from(entry.exclusive) + delta).unwrap_or(0);
            let after = entry.discount();
            let rank = &mut self.ranks[slot as usize];
            rank.discount = rank.discount + after - before;
        }
        self.refresh(slot);
    }

    /// The first token came: the prompt is computed. Again, or for an unknown id, a no-op.
    pub fn first_token(&mut self, now: Time, id: RequestId) -> Option<PrefillSample> {
        let at = *self.by_id.get(&id)?;
        self.touch(now, at);
        // What comes of a silent request is its whole answer.
        let seen = self.entries.0.get(at as usize).is_some_and(|e| !e.silent);
        self.prefill_done(now, at, seen)
    }

    /// Notes a sign of a request that had none as good. `None` for an unknown id, and if the sign is no news.
    pub fn sign(&mut self, id: RequestId, sign: Sign) -> Option<SignChange> {
        let at = *self.by_id.get(&id)?;
        let entry = self.entries.0.get_mut(at as usize)?;
        let news = match (entry.sign, sign) {
            (Sign::Awaited, new) => new != Sign::Awaited,
            (Sign::Presumed, new) => new == Sign::Seen,
            (Sign::Seen, _) => false,
        };
        news.then(|| SignChange {
            slot: entry.slot,
            before: std::mem::replace(&mut entry.sign, sign),
            sign,
            booked_at: entry.booked_at,
            ahead: entry.ahead,
            silent: entry.silent,
        })
    }

    /// The oldest request of a slot that is silent, has its prompt still charged, was booked before `before`, and is
    /// not among the newest `waiting` of those with a charge.
    #[must_use]
    pub fn computed_silently(&self, slot: u32, before: Time, waiting: u64) -> Option<RequestId> {
        let rank = self.ranks.get(slot as usize)?;
        let begun = u64::from(rank.waiting.len()).saturating_sub(waiting);
        let mut at = rank.waiting.head();
        for _ in 0..begun {
            let entry = self.entries.0.get(at? as usize)?;
            if entry.booked_at >= before {
                return None;
            }
            if entry.silent {
                return Some(entry.id);
            }
            at = entry.links[BY_PREFILL].next();
        }
        None
    }

    /// The prompt is computed by now, and nobody saw when.
    pub fn prefilled(&mut self, now: Time, id: RequestId) -> Option<PrefillSample> {
        let at = *self.by_id.get(&id)?;
        self.touch(now, at);
        self.prefill_done(now, at, false)
    }

    fn prefill_done(&mut self, now: Time, at: u32, seen: bool) -> Option<PrefillSample> {
        let entry = self.entries.0.get_mut(at as usize)?;
        let (slot, tokens) = (entry.slot, std::mem::take(&mut entry.prefill));
        if tokens == 0 {
            return None;
        }
        let cached = entry.isl_tokens.saturating_sub(tokens);
        let context = u64::from(entry.isl_tokens) + u64::from(entry.generated);
        let (id, isl_tokens, silent) = (entry.id, entry.isl_tokens, entry.silent);
        let duration = nanos(entry.prefill_duration);
        let rank = &mut self.ranks[slot as usize];
        let before = rank.state();
        let was_oldest = rank.waiting.head() == Some(at);
        rank.prefill -= u64::from(tokens);
        rank.pending_tokens -= u64::from(isl_tokens);
        rank.silent -= u32::from(silent);
        rank.prefill_ns -= duration;
        rank.context += context;
        rank.waiting.remove(&mut self.entries, BY_PREFILL, at);
        let took = (was_oldest && seen).then(|| now - rank.oldest.since);
        if was_oldest {
            rank.oldest = match rank.waiting.head() {
                Some(next) => OldestPrompt::of(&self.entries.0[next as usize], now),
                None => OldestPrompt::default(),
            };
        }
        let pending = rank.waiting.len();
        self.journal.note(|| match seen {
            true => LedgerNote::FirstToken {
                slot,
                at: now,
                id,
                new: tokens,
                cached,
                state: RankState { pending, ..before },
            },
            false => LedgerNote::Unseen {
                slot,
                at: now,
                new: tokens,
                cached,
                pending,
            },
        });
        self.refresh(slot);
        Some(PrefillSample {
            slot,
            tokens,
            cached,
            took,
        })
    }

    /// Tokens were generated, `generated` in all. With `track`, an item that raises the number of blocks
    /// adds one output block, however many borders it crosses.
    pub fn output(&mut self, now: Time, id: RequestId, generated: u32, track: bool) {
        let Some(&at) = self.by_id.get(&id) else {
            return;
        };
        self.touch(now, at);
        let block_size = self.block_size;
        let Some(entry) = self.entries.0.get_mut(at as usize) else {
            return;
        };
        let rank = &mut self.ranks[entry.slot as usize];
        let new = generated.saturating_sub(entry.generated);
        entry.generated += new;
        if entry.prefill == 0 {
            rank.context += u64::from(new);
            let (slot, state) = (entry.slot, rank.state());
            self.journal.mark(slot);
            self.journal.note(|| LedgerNote::Tokens {
                slot,
                at: now,
                id,
                generated,
                state,
            });
        }
        let total = entry
            .isl_tokens
            .saturating_add(entry.generated)
            .div_ceil(block_size);
        if !track || total <= entry.total_blocks {
            return;
        }
        entry.total_blocks = total;
        rank.output -= entry.output_weight();
        rank.discount -= entry.discount();
        entry.output_blocks += 1;
        if let Some(osl) = entry.osl {
            entry.weight = fraction_left(entry.generated, osl);
        }
        rank.output += entry.output_weight();
        rank.discount += entry.discount();
        let slot = entry.slot;
        self.refresh(slot);
    }

    fn touch(&mut self, now: Time, at: u32) {
        self.by_age.remove(&mut self.entries, BY_AGE, at);
        self.by_age.push_back(&mut self.entries, BY_AGE, at);
        if let Some(entry) = self.entries.0.get_mut(at as usize) {
            entry.seen_at = now;
        }
    }

    /// Frees a request; ends its prefill too. An unknown id is a no-op.
    pub fn free(&mut self, now: Time, id: RequestId) -> Option<FreedBooking> {
        let at = self.by_id.remove(&id)?;
        self.prefill_done(now, at, false);
        self.by_age.remove(&mut self.entries, BY_AGE, at);
        let entry = self.entries.0.get_mut(at as usize)?;
        let (slot, tail) = (entry.slot, entry.last_block);
        self.journal.note(|| LedgerNote::Freed {
            slot,
            at: now,
            id,
            tail,
        });
        let rank = &mut self.ranks[slot as usize];
        rank.context -= u64::from(entry.isl_tokens) + u64::from(entry.generated);
        rank.output -= entry.output_weight();
        rank.discount -= entry.discount();
        let (tail, blocks, sign) = (entry.tail, entry.blocks, entry.sign);
        entry.exclusive = 0;
        rank.running.remove(&mut self.entries, BY_SLOT, at);
        let gone = if tail == NONE {
            blocks
        } else {
            let changes = &mut self.changes;
            self.trie.release(tail, slot, at, changes).blocks
        };
        self.ranks[slot as usize].blocks -= u64::from(gone);
        self.vacant.push(at);
        self.settle(slot);
        Some(FreedBooking { id, slot, sign })
    }

    /// Frees everything on a slot.
    pub fn clear_slot(&mut self, now: Time, slot: u32, mut freed: impl FnMut(FreedBooking)) {
        while let Some(at) = self.ranks.get(slot as usize).and_then(|r| r.running.head()) {
            let Some(id) = self.entries.0.get(at as usize).map(|e| e.id) else {
                return;
            };
            let Some(gone) = self.free(now, id) else {
                return;
            };
            freed(gone);
        }
    }

    /// Frees the booking that has been inactive for longest, if that is at least `age`.
    pub fn expire(&mut self, now: Time, age: Duration) -> Option<FreedBooking> {
        let id = self.stalest().filter(|(_, seen)| *seen + age <= now)?.0;
        self.free(now, id)
    }

    /// The booking that has been inactive for longest, and since when.
    #[must_use]
    pub fn stalest(&self) -> Option<(RequestId, Time)> {
        let at = self.by_age.head()?;
        let entry = self.entries.0.get(at as usize)?;
        Some((entry.id, entry.seen_at))
    }
}

impl Rank {
    fn active_blocks(&self) -> u64 {
        (self.blocks * WHOLE + self.output - self.discount + WHOLE / 2) / WHOLE
    }

    /// Only the oldest prompt decays, from when it became the oldest.
    #[inline]
    fn prefill_at(&self, now: Time) -> u64 {
        if self.oldest.modelled {
            self.prefill - u64::from(self.oldest.tokens) + self.oldest.remaining(now)
        } else {
            self.prefill
        }
    }
}

impl OldestPrompt {
    fn of(entry: &BookingEntry, since: Time) -> Self {
        let duration = entry.prefill_duration;
        Self {
            tokens: entry.prefill,
            duration_ns: nanos(duration),
            modelled: duration.is_some() && entry.decays,
            since,
        }
    }

    fn remaining(&self, now: Time) -> u64 {
        let elapsed = now.as_nanos().saturating_sub(self.since.as_nanos());
        let left = self.duration_ns.saturating_sub(elapsed);
        if left == 0 {
            return 0;
        }
        let tokens = u128::from(self.tokens) * u128::from(left);
        tokens.div_ceil(u128::from(self.duration_ns)) as u64
    }
}

impl BookingEntry {
    fn output_weight(&self) -> u64 {
        u64::from(self.output_blocks) * u64::from(self.weight)
    }

    fn discount(&self) -> u64 {
        u64::from(self.exclusive) * (WHOLE - u64::from(self.weight))
    }
}

/// What is left of a block's weight after `generated` of `osl` expected tokens, in millionths.
fn fraction_left(generated: u32, osl: u32) -> u32 {
    let osl = u64::from(osl.max(1));
    let left = osl.saturating_sub(u64::from(generated));
    (left * WHOLE / osl) as u32
}
