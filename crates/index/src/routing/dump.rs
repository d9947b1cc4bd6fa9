//! What routing decisions taught, as events that would teach it.
//!
//! Answers one question: which blocks is a rank believed to hold? A span at a time, so that nobody has to hold the lock
//! for long: a span that is there hangs on spans that were there, and were as long, when they were asked for before it.

use kvasir_types::{EngineHash, StoredBlock, WorkerRank};

use super::spans::SpanId;
use super::{RoutingTree, device};

impl RoutingTree {
    /// The spans of a rank, those that others hang on first.
    pub(super) fn spans_by_depth(&self, rank: WorkerRank) -> Vec<SpanId> {
        let slot = self.slots.get(&rank);
        let Some(heads) = slot.and_then(|slot| self.heads.get(*slot as usize)) else {
            return Vec::new();
        };
        let mut spans: Vec<SpanId> = heads.values().copied().collect();
        spans.sort_by_key(|id| self.spans.get(*id).map(|span| (span.start, span.names[0])));
        spans
    }

    /// A span as what it hangs on and its blocks; `None` if it is gone.
    pub(super) fn dump(&self, id: SpanId) -> Option<(Option<EngineHash>, Vec<StoredBlock>)> {
        let span = self.spans.get(id)?;
        let parent = match span.parent.and_then(|id| self.spans.get(id)) {
            None => None,
            Some(above) => {
                let at = span.start.checked_sub(above.start + 1)?;
                Some(EngineHash(*above.names.get(at as usize)?))
            }
        };
        let block = |&name: &u64| {
            let local = self.tree.local_of(device(span.slot), name)?;
            let engine = EngineHash(name);
            Some(StoredBlock { engine, local })
        };
        let blocks: Vec<StoredBlock> = span.names.iter().map_while(block).collect();
        (!blocks.is_empty()).then_some((parent, blocks))
    }
}
