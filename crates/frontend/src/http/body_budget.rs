//! How many bytes the bodies of requests under way may take together.
//!
//! Answers one question: is there room for so many bytes more? A body is charged for what has come of it, in steps, and the
//! charge goes with its buffer: whoever drops the last of it gives the bytes back, once.
//!
//! What always holds: the sum of all charges that were asked for stays within the budget and, on top of it, a part for small
//! bodies, so that many long ones do not keep short requests out. Bodies of at most [`FREE_BYTES`] are neither charged nor
//! refused: connections hold as much by themselves, and are counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use memmap2::MmapMut;

/// A body of so many bytes costs nothing.
pub(crate) const FREE_BYTES: u64 = 4 << 10;
/// A body of so many bytes is small.
const SMALL_BYTES: u64 = 64 << 10;
/// Small bodies have this part of the budget for themselves, on top of it; when that is taken, they are charged as others.
const SMALL_SHARE: u64 = 8;
/// And at least so many bytes.
const SMALL_ROOM_MIN: u64 = 4 << 20;
/// What is charged at once, at most.
const CHARGE_STEP: u64 = 256 << 10;
/// A body that is longer has pages of its own.
const HEAP_BYTES_MAX: u64 = 1 << 20;

/// The budget. Clones are one.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget(Arc<BudgetState>);

#[derive(Debug)]
struct BudgetState {
    max: u64,
    used: AtomicU64,
    small_max: u64,
    small: AtomicU64,
}

/// Bytes that something takes of the budget; dropped, it gives them back.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    budget: BodyBudget,
    bytes: u64,
    /// They are taken of the part for small bodies.
    small: bool,
}

/// There is no room for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

impl BodyBudget {
    /// A budget of `max` bytes of which nothing is taken.
    pub(crate) fn new(max: u64) -> Self {
        Self(Arc::new(BudgetState {
            max,
            used: AtomicU64::new(0),
            small_max: (max / SMALL_SHARE).max(SMALL_ROOM_MIN),
            small: AtomicU64::new(0),
        }))
    }

    /// Bytes that are taken now, small bodies included.
    pub(crate) fn used(&self) -> u64 {
        let (large, small) = (self.count(false).0, self.count(true).0);
        large.load(Ordering::Relaxed) + small.load(Ordering::Relaxed)
    }

    /// Whether a body of so many bytes could be taken now.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        let fits = |small: bool| {
            let (used, max) = self.count(small);
            used.load(Ordering::Relaxed).saturating_add(bytes) <= max
        };
        bytes <= FREE_BYTES || bytes <= SMALL_BYTES && fits(true) || fits(false)
    }

    /// What is taken and what there is, of the part for small bodies or of all else.
    fn count(&self, small: bool) -> (&AtomicU64, u64) {
        match small {
            true => (&self.0.small, self.0.small_max),
            false => (&self.0.used, self.0.max),
        }
    }

    /// Counts bytes that are there already, such as a copy, whether there is room or not.
    pub(crate) fn hold(&self, bytes: Bytes) -> Bytes {
        let size = bytes.len() as u64;
        if size <= FREE_BYTES {
            return bytes;
        }
        let mut charge = self.charge();
        charge.small = size <= SMALL_BYTES;
        charge.bytes = size;
        let (used, _) = self.count(charge.small);
        used.fetch_add(size, Ordering::Relaxed);
        charge.keep_with(bytes)
    }

    /// Nothing yet.
    pub(crate) fn charge(&self) -> BodyCharge {
        BodyCharge {
            budget: self.clone(),
            bytes: 0,
            small: false,
        }
    }
}

impl BodyCharge {
    /// Takes as many as make `bytes` in all, if those are more than are free.
    pub(crate) fn grow_to(&mut self, bytes: u64) -> Result<(), NoRoom> {
        if bytes <= FREE_BYTES.max(self.bytes) {
            return Ok(());
        }
        if bytes <= SMALL_BYTES && (self.small || self.bytes == 0) && self.take(true, bytes).is_ok()
        {
            return Ok(());
        }
        self.take(false, bytes)
    }

    /// Has `bytes` in all, of one part of the budget.
    fn take(&mut self, small: bool, bytes: u64) -> Result<(), NoRoom> {
        let has = if self.small == small { self.bytes } else { 0 };
        let (used, max) = self.budget.count(small);
        let more = bytes.saturating_sub(has);
        let add = |used: u64| used.checked_add(more).filter(|sum| *sum <= max);
        let relaxed = Ordering::Relaxed;
        used.fetch_update(relaxed, relaxed, add)
            .map_err(|_| NoRoom)?;
        if self.small != small {
            self.give_back();
        }
        (self.small, self.bytes) = (small, bytes);
        Ok(())
    }

    fn give_back(&mut self) {
        let (used, _) = self.budget.count(self.small);
        used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = 0;
    }

    /// The bytes that it is for; it goes with them.
    pub(crate) fn keep_with(self, bytes: Bytes) -> Bytes {
        if self.bytes == 0 {
            return bytes;
        }
        let _charge = self;
        Bytes::from_owner(ChargedBytes { bytes, _charge })
    }
}

impl Drop for BodyCharge {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Bytes with what they take of the budget.
struct ChargedBytes<T> {
    bytes: T,
    _charge: BodyCharge,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for ChargedBytes<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// A body that is put together from its pieces.
pub(crate) struct JoinedBody {
    buffer: BodyBuffer,
    charge: BodyCharge,
    /// What it can come to: as it said, or what is allowed.
    end: u64,
}

/// Where a body is. A long one has pages of its own, which take memory as they are written and give it back at once when it
/// goes; what an allocator gets back it keeps for a while.
enum BodyBuffer {
    Heap(Vec<u8>),
    Pages { pages: MmapMut, len: usize },
}

impl AsRef<[u8]> for BodyBuffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Pages { pages, len } => pages.get(..*len).unwrap_or_default(),
        }
    }
}

impl JoinedBody {
    /// An empty one.
    pub(crate) fn new(charge: BodyCharge, declared: u64, limit: u64) -> Self {
        Self {
            buffer: BodyBuffer::Heap(Vec::with_capacity(declared.min(HEAP_BYTES_MAX) as usize)),
            charge,
            end: if declared > 0 { declared } else { limit },
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.buffer {
            BodyBuffer::Heap(bytes) => bytes.len(),
            BodyBuffer::Pages { len, .. } => *len,
        }
    }

    /// Adds a piece, if there is room for it.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), NoRoom> {
        let need = (self.len() + piece.len()) as u64;
        if need > SMALL_BYTES && need > self.charge.bytes {
            let step = need.next_multiple_of(CHARGE_STEP);
            let step = step.min(self.end).max(need);
            let grown = self.charge.grow_to(step);
            grown.or_else(|_| self.charge.grow_to(need))?;
        } else {
            self.charge.grow_to(need)?;
        }
        if need > HEAP_BYTES_MAX {
            self.move_to_pages(need)?;
        }
        match &mut self.buffer {
            BodyBuffer::Heap(bytes) => bytes.extend_from_slice(piece),
            BodyBuffer::Pages { pages, len } => {
                let rest = pages.get_mut(*len..*len + piece.len()).ok_or(NoRoom)?;
                rest.copy_from_slice(piece);
                *len += piece.len();
            }
        }
        Ok(())
    }

    fn move_to_pages(&mut self, need: u64) -> Result<(), NoRoom> {
        let BodyBuffer::Heap(bytes) = &self.buffer else {
            return Ok(());
        };
        let room = usize::try_from(self.end.max(need)).map_err(|_| NoRoom)?;
        let mut pages = MmapMut::map_anon(room).map_err(|_| NoRoom)?;
        let len = bytes.len();
        let begin = pages.get_mut(..len).ok_or(NoRoom)?;
        begin.copy_from_slice(bytes);
        self.buffer = BodyBuffer::Pages { pages, len };
        Ok(())
    }

    /// The whole body.
    pub(crate) fn freeze(self) -> Bytes {
        match self.buffer {
            BodyBuffer::Heap(bytes) if self.charge.bytes == 0 => bytes.into(),
            bytes => Bytes::from_owner(ChargedBytes {
                bytes,
                _charge: self.charge,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;

    fn body(budget: &BodyBudget, declared: u64, pieces: usize) -> Result<Bytes, NoRoom> {
        let mut body = JoinedBody::new(budget.charge(), declared, 64 << 20);
        let mut pieces = (0..pieces).map(|_| body.push(&[7; 16 * KIB]));
        pieces.try_for_each(|pushed| pushed)?;
        Ok(body.freeze())
    }

    #[test]
    fn bytes_are_given_back_once_with_the_last_of_the_body() {
        let budget = BodyBudget::new(1 << 20);
        let whole = body(&budget, 256 << 10, 16).unwrap();
        assert_eq!(budget.used(), 256 << 10);
        let (part, copy) = (whole.slice(10..20), whole.clone());
        drop(whole);
        drop(copy);
        assert_eq!(budget.used(), 256 << 10, "a part keeps all of it");
        drop(part);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_body_that_does_not_fit_leaves_nothing_behind() {
        let budget = BodyBudget::new(300 << 10);
        let first = body(&budget, 0, 8).unwrap();
        assert_eq!(first.len(), 128 * KIB);
        let steps = budget.used();
        assert!((128 << 10..=256 << 10).contains(&steps));
        assert_eq!(body(&budget, 0, 16).unwrap_err(), NoRoom);
        assert_eq!(budget.used(), steps, "what the other took is back");
        drop(first);
        assert_eq!(budget.used(), 0);
        assert_eq!(body(&budget, 0, 16).unwrap().len(), 256 * KIB);
    }

    #[test]
    fn a_long_body_is_whole_however_it_came() {
        let (budget, len) = (BodyBudget::new(64 << 20), 5 * 1000 * 1000 + 7);
        let sent: Vec<u8> = (0..len).map(|n: usize| (n * 31 % 251) as u8).collect();
        for (declared, piece) in [(len, 1000), (0, 65_536), (len, len), (0, 300_000)] {
            let mut body = JoinedBody::new(budget.charge(), declared as u64, 6 << 20);
            sent.chunks(piece)
                .for_each(|piece| body.push(piece).unwrap());
            assert!(budget.used() >= len as u64 && budget.used() <= len as u64 + CHARGE_STEP);
            assert!(body.freeze() == sent, "{declared} {piece}");
            assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn small_bodies_have_room_of_their_own() {
        let budget = BodyBudget::new(0);
        let one = body(&budget, 64 << 10, 4).unwrap();
        assert_eq!((one.len(), budget.used()), (64 * KIB, 64 << 10));
        drop(one);
        assert_eq!(budget.used(), 0);
        assert!(body(&budget, 0, 5).is_err());
        assert_eq!(budget.used(), 0, "what it took while it was small is back");
        assert!(budget.has_room_for(SMALL_BYTES) && !budget.has_room_for(SMALL_BYTES + 1));
    }

    /// Thousands of small ones are as much as a few long ones.
    #[test]
    fn the_sum_of_small_bodies_is_bounded() {
        let (room, max) = (SMALL_ROOM_MIN, 1 << 20);
        let budget = BodyBudget::new(max);
        let most = (room + max) / SMALL_BYTES;
        let held: Vec<Bytes> = (0..most).map(|_| body(&budget, 0, 4).unwrap()).collect();
        assert_eq!(budget.used(), room + max);
        assert_eq!(body(&budget, 0, 4).unwrap_err(), NoRoom);
        assert!(!budget.has_room_for(SMALL_BYTES) && budget.has_room_for(FREE_BYTES));
        let tiny = JoinedBody::new(budget.charge(), 10, 64 << 20).push(b"0123456789");
        assert_eq!(tiny, Ok(()), "the smallest are free");
        drop(held);
        assert_eq!(budget.used(), 0);
        assert_eq!(BodyBudget::new(1 << 30).0.small_max, 128 << 20);
    }

    #[test]
    fn a_body_that_came_whole_counts_as_well() {
        let budget = BodyBudget::new(1 << 20);
        let charged = |bytes: usize| {
            let mut charge = budget.charge();
            charge.grow_to(bytes as u64).unwrap();
            charge.keep_with(vec![1; bytes].into())
        };
        let (free, small, large) = (charged(4 * KIB), charged(5 * KIB), charged(100 * KIB));
        assert_eq!(budget.used(), 105 << 10);
        drop((free, small, large));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_copy_counts_whether_there_is_room_or_not() {
        let budget = BodyBudget::new(0);
        let held = budget.hold(vec![1; 100 * KIB].into());
        assert_eq!((budget.used(), held.len()), (100 << 10, 100 * KIB));
        drop(budget.hold(held.slice(..10)));
        drop(held);
        assert_eq!(budget.used(), 0);
    }
}
