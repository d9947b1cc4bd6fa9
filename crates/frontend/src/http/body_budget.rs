//! How many bytes the bodies of requests under way may take together.
//!
//! Answers one question: is there room for so many bytes more? A body is charged for what has come of it, in steps, and the
//! charge goes with its buffer: whoever drops the last of it gives the bytes back, once.
//!
//! What always holds: the sum of all charges that were asked for stays within the budget. Bodies of at most
//! [`FREE_BYTES`] are neither charged nor refused: connections hold as much by themselves, and are counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use memmap2::MmapMut;

/// A body of so many bytes costs nothing: a connection's own buffer is as large.
pub(crate) const FREE_BYTES: u64 = 64 << 10;
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
}

/// Bytes that something takes of the budget; dropped, it gives them back.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    budget: BodyBudget,
    bytes: u64,
}

/// There is no room for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

impl BodyBudget {
    /// A budget of `max` bytes of which nothing is taken.
    pub(crate) fn new(max: u64) -> Self {
        let used = AtomicU64::new(0);
        Self(Arc::new(BudgetState { max, used }))
    }

    /// Bytes that are taken now.
    pub(crate) fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Whether a body of so many bytes could be taken now.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        bytes <= FREE_BYTES || self.used().saturating_add(bytes) <= self.0.max
    }

    /// Counts bytes that are there already, such as a copy, whether there is room or not.
    pub(crate) fn hold(&self, bytes: Bytes) -> Bytes {
        let size = bytes.len() as u64;
        if size <= FREE_BYTES {
            return bytes;
        }
        self.0.used.fetch_add(size, Ordering::Relaxed);
        let budget = self.clone();
        let _charge = BodyCharge {
            budget,
            bytes: size,
        };
        Bytes::from_owner(ChargedBytes { bytes, _charge })
    }

    fn charge(&self) -> BodyCharge {
        BodyCharge {
            budget: self.clone(),
            bytes: 0,
        }
    }
}

impl BodyCharge {
    /// Takes as many more as make `bytes` in all.
    fn grow_to(&mut self, bytes: u64) -> Result<(), NoRoom> {
        let more = bytes.saturating_sub(self.bytes);
        let state = &self.budget.0;
        let add = |used: u64| used.checked_add(more).filter(|sum| *sum <= state.max);
        let relaxed = Ordering::Relaxed;
        (state.used.fetch_update(relaxed, relaxed, add)).map_err(|_| NoRoom)?;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for BodyCharge {
    fn drop(&mut self) {
        let used = &self.budget.0.used;
        used.fetch_sub(self.bytes, Ordering::Relaxed);
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
    pub(crate) fn new(budget: &BodyBudget, declared: u64, limit: u64) -> Self {
        Self {
            buffer: BodyBuffer::Heap(Vec::with_capacity(declared.min(HEAP_BYTES_MAX) as usize)),
            charge: budget.charge(),
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
        if need > FREE_BYTES && need > self.charge.bytes {
            let step = need.next_multiple_of(CHARGE_STEP);
            let step = step.min(self.end).max(need);
            let grown = self.charge.grow_to(step);
            grown.or_else(|_| self.charge.grow_to(need))?;
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
        let mut body = JoinedBody::new(budget, declared, 64 << 20);
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
            let mut body = JoinedBody::new(&budget, declared as u64, 6 << 20);
            sent.chunks(piece)
                .for_each(|piece| body.push(piece).unwrap());
            assert!(budget.used() >= len as u64 && budget.used() <= len as u64 + CHARGE_STEP);
            assert!(body.freeze() == sent, "{declared} {piece}");
            assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn small_bodies_are_free_even_when_there_is_no_room() {
        let budget = BodyBudget::new(0);
        assert_eq!(body(&budget, 64 << 10, 4).unwrap().len(), 64 * KIB);
        assert_eq!(body(&budget, 0, 4).unwrap().len(), 64 * KIB);
        assert!(body(&budget, 0, 5).is_err());
        assert!(budget.has_room_for(FREE_BYTES) && !budget.has_room_for(FREE_BYTES + 1));
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
