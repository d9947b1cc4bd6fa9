//! Which requests run, one row each: what another process has to know to count them, too.

use kvasir_types::{RequestId, SequenceHash};

use super::list::NONE;
use super::{BookingEntry, Ledger};

/// One request that is booked and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningRequest {
    /// The request.
    pub id: RequestId,
    /// Where it is.
    pub slot: u32,
    /// Names of its prompt's blocks, as far as they count; of its own making where nobody has named them. Empty unless asked for.
    pub sequence: Vec<SequenceHash>,
    /// Prompt tokens still to compute.
    pub prefill_tokens: u32,
    /// Tokens its client expects to be generated.
    pub osl: Option<u32>,
}

impl Ledger {
    /// Every request that runs, in no order; with the names of its blocks where `names` says so.
    pub fn running(
        &self,
        mut names: impl FnMut(RequestId) -> bool,
    ) -> impl Iterator<Item = RunningRequest> {
        self.by_id.values().filter_map(move |at| {
            let entry = self.entries.0.get(*at as usize)?;
            let sequence = match names(entry.id) {
                true => self.names_of(entry),
                false => Vec::new(),
            };
            Some(RunningRequest {
                id: entry.id,
                slot: entry.slot,
                sequence,
                prefill_tokens: entry.prefill,
                osl: entry.osl,
            })
        })
    }

    fn names_of(&self, entry: &BookingEntry) -> Vec<SequenceHash> {
        if entry.tail != NONE {
            return self.trie.sequence(entry.tail);
        }
        // Blocks that are its own: names that nobody else has count the same.
        let own = (entry.id.0 as u64) ^ ((entry.id.0 >> 64) as u64);
        let name = |at: u32| SequenceHash(own.wrapping_add(u64::from(at)));
        (0..entry.blocks).map(name).collect()
    }
}
