//! A run: consecutive blocks of one path, with who holds how much of them. What readers see of it.
//!
//! A published version of a run never changes, with two exceptions. While a single rank holds the end of a
//! leaf, blocks may be added after its last one or taken off its end, by writing `len`. The words of a run
//! are written once: a word is there before `len` covers it and is never written again, so a reader that
//! read `len` sees the blocks that were there at that moment whatever the writer does since. And a rank that
//! holds blocks behind a gap has a bit for each block, which is written in place (see `bits`).
//!
//! **(`end`, depth) names one path for ever.** `end` is the identity of a run's end. When a run is cut in
//! two, the tail keeps it, as it still ends there; when blocks are added, the depth grows; when other
//! blocks come in the place of some that were taken off, the run gets a new `end` and bits of its own. Edges are keyed by
//! `end` and checked against `start`, so a reader that stands at the end of an old version of a run finds
//! only runs that go on from just that path.

use std::sync::Arc;

use kvasir_types::LocalHash;

use crate::owners::{Coverage, Owners};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Tiers below the device, each further away than the one before.
pub(crate) const LOWER: usize = 3;

/// Blocks that can be added one by one before a run is copied.
pub(crate) const TAIL_MAX: usize = 32;

/// Words beyond the sealed ones, written once each.
pub(crate) type Tail = [AtomicU64; TAIL_MAX];

/// One published version of a run.
#[derive(Debug)]
pub(crate) struct Run {
    /// The identity of this run's end.
    pub(crate) end: u64,
    /// The identity of the end that this run follows.
    pub(crate) follows: u64,
    /// Depth of the first block.
    pub(crate) start: u32,
    /// How many blocks there are. At least one.
    len: AtomicU32,
    /// Local hashes from the first block on.
    sealed: Arc<[u64]>,
    /// Local hashes after the sealed ones.
    tail: Option<Arc<Tail>>,
    pub(crate) device: Owners,
    pub(crate) lower: Option<Box<[Owners; LOWER]>>,
}

impl Run {
    pub(crate) fn new(end: u64, follows: u64, start: u32, sealed: Arc<[u64]>) -> Self {
        Self {
            end,
            follows,
            start,
            len: AtomicU32::new(sealed.len() as u32),
            sealed,
            tail: None,
            device: Owners::default(),
            lower: None,
        }
    }

    /// The same run, to be changed before it is published.
    pub(crate) fn draft(&self) -> Self {
        Self {
            end: self.end,
            follows: self.follows,
            start: self.start,
            len: AtomicU32::new(self.len()),
            sealed: Arc::clone(&self.sealed),
            tail: self.tail.clone(),
            device: self.device.clone(),
            lower: self.lower.clone(),
        }
    }

    /// A draft with `locals` as its blocks.
    pub(crate) fn draft_with(&self, locals: Arc<[u64]>) -> Self {
        Self {
            len: AtomicU32::new(locals.len() as u32),
            sealed: locals,
            tail: None,
            ..self.draft()
        }
    }

    /// Drops from a draft the lists of tiers below the device if they are empty.
    pub(crate) fn tidy(&mut self) {
        if self
            .lower
            .as_ref()
            .is_some_and(|lower| lower.iter().all(Owners::is_empty))
        {
            self.lower = None;
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// The local hash of the first block.
    #[inline]
    pub(crate) fn first(&self) -> u64 {
        self.sealed.first().copied().unwrap_or(0)
    }

    #[inline]
    pub(crate) fn local(&self, pos: usize) -> u64 {
        match self.sealed.get(pos) {
            Some(local) => *local,
            None => self.tail_word(pos - self.sealed.len()),
        }
    }

    #[inline]
    fn tail_word(&self, at: usize) -> u64 {
        let word = self.tail.as_ref().and_then(|tail| tail.get(at));
        word.map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Copies `from..to` of the local hashes.
    pub(crate) fn copy(&self, from: usize, to: usize, out: &mut Vec<u64>) {
        let sealed = to.min(self.sealed.len());
        out.extend_from_slice(self.sealed.get(from..sealed).unwrap_or(&[]));
        out.extend((sealed.max(from)..to).map(|pos| self.local(pos)));
    }

    /// How many of the first `len` blocks are the first ones of `prompt`.
    #[inline]
    pub(crate) fn common(&self, prompt: &[LocalHash], len: u32) -> usize {
        let len = len as usize;
        let sealed = &self.sealed[..len.min(self.sealed.len())];
        let mut matched = common(sealed, prompt);
        if matched == sealed.len() {
            while matched < len
                && prompt
                    .get(matched)
                    .is_some_and(|l| l.0 == self.local(matched))
            {
                matched += 1;
            }
        }
        matched
    }

    pub(crate) fn owners(&self, tier: usize) -> Option<&Owners> {
        match tier {
            0 => Some(&self.device),
            t => self.lower.as_ref().and_then(|lower| lower.get(t - 1)),
        }
    }

    pub(crate) fn owners_mut(&mut self, tier: usize) -> &mut Owners {
        match tier {
            0 => &mut self.device,
            t => &mut self.lower.get_or_insert_default()[t - 1],
        }
    }

    /// What a rank holds of it in one tier.
    #[inline]
    pub(crate) fn held(&self, tier: usize, slot: u32) -> Coverage<'_> {
        let owners = self.owners(tier);
        owners.map_or(Coverage::Head(0), |o| o.held(slot, self.len()))
    }

    /// Who holds something of it: tier, slot and what.
    pub(crate) fn each_owner(&self) -> impl Iterator<Item = (usize, u32, Coverage<'_>)> + '_ {
        let len = self.len();
        (0..=LOWER).flat_map(move |tier| {
            let held = self.owners(tier).into_iter().flat_map(move |o| o.iter(len));
            held.map(move |(slot, held)| (tier, slot, held))
        })
    }

    /// One more than the last position that anybody holds in any tier.
    pub(crate) fn reach(&self) -> u32 {
        let len = self.len();
        let tiers = (0..=LOWER).filter_map(|tier| self.owners(tier));
        tiers.map(|o| o.reach(len)).max().unwrap_or(0)
    }

    /// Gives a draft bits of its own, with room for `room` blocks.
    pub(crate) fn own_bits(&mut self, room: u32) {
        let len = self.len();
        self.device.own_bits(len, room);
        for owners in self.lower.iter_mut().flat_map(|lower| lower.iter_mut()) {
            owners.own_bits(len, room);
        }
    }

    /// Whether this rank holds something in this tier, and nobody else anything. Of a leaf, then, its end.
    pub(crate) fn is_sole(&self, tier: usize, slot: u32) -> bool {
        match (&self.lower, tier) {
            (None, 0) => self.device.is_sole(slot),
            (None, _) => false,
            (Some(_), _) => (0..=LOWER)
                .filter_map(|t| Some((t, self.owners(t)?)))
                .all(|(t, o)| {
                    if t == tier {
                        o.is_sole(slot)
                    } else {
                        o.is_empty()
                    }
                }),
        }
    }

    /// Takes blocks off the end of the published run. Only where nobody else holds anything of a leaf.
    pub(crate) fn shorten(&self, len: u32) {
        debug_assert!(0 < len && len <= self.len());
        self.len.store(len, Ordering::Release);
    }

    /// Adds blocks to the published run if their words were never written. Only where nobody else holds
    /// anything of a leaf whose words end at `len`.
    pub(crate) fn push(&self, locals: impl ExactSizeIterator<Item = u64>) -> bool {
        let len = self.len() as usize;
        let Some(tail) = &self.tail else { return false };
        let at = len - self.sealed.len().min(len);
        if len < self.sealed.len() || at + locals.len() > TAIL_MAX {
            return false;
        }
        let added = locals.len();
        for (word, local) in tail[at..].iter().zip(locals) {
            word.store(local, Ordering::Relaxed);
        }
        self.len.store((len + added) as u32, Ordering::Release);
        true
    }

    /// Gives a draft whose words are all sealed room for blocks to be added; says whether they are.
    pub(crate) fn open_tail(&mut self) -> bool {
        let open = self.tail.is_none() && self.sealed.len() == self.len() as usize;
        if open {
            self.tail = Some(Arc::new([const { 0u64 }; TAIL_MAX].map(AtomicU64::new)));
        }
        open
    }

    /// Changes the length of a draft.
    pub(crate) fn set_len(&mut self, len: u32) {
        self.len = AtomicU32::new(len);
    }

    /// Words that take memory.
    pub(crate) fn words(&self) -> usize {
        self.sealed.len() + self.tail.as_ref().map_or(0, |_| TAIL_MAX)
    }

    /// Bytes of this version and all it points to.
    pub(crate) fn bytes(&self) -> usize {
        let lower = self.lower.as_ref().map_or(0, |lower| {
            size_of::<[Owners; LOWER]>() + lower.iter().map(Owners::heap).sum::<usize>()
        });
        size_of::<Self>() + 16 + self.words() * 8 + self.device.heap() + lower
    }
}

/// Length of the common head. Whole groups are compared without a branch in them, as vectors.
#[inline]
fn common(a: &[u64], b: &[LocalHash]) -> usize {
    const GROUP: usize = 16;
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut matched = 0;
    for (x, y) in a.chunks_exact(GROUP).zip(b.chunks_exact(GROUP)) {
        if x.iter().zip(y).fold(0, |d, (x, y)| d | (x ^ y.0)) != 0 {
            break;
        }
        matched += GROUP;
    }
    while matched < n && a[matched] == b[matched].0 {
        matched += 1;
    }
    matched
}
