//! Changes that follow each other, joined into one event.

use kvasir_types::KvEvent;

/// Blocks of one joined event. A change that has more by itself goes out as it is.
pub const COALESCED_BLOCKS_MAX: usize = 128;

/// The event that later changes may still join.
#[derive(Debug, Default)]
pub(super) struct Coalescer(Option<KvEvent>);

impl Coalescer {
    pub(super) const fn is_some(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn take(&mut self) -> Option<KvEvent> {
        self.0.take()
    }

    /// Takes a change; returns what waited before, if the two cannot be one.
    pub(super) fn push(&mut self, event: KvEvent) -> Option<KvEvent> {
        let Some(mut before) = self.0.take() else {
            self.0 = Some(event);
            return None;
        };
        match join(&mut before, event) {
            Ok(()) => {
                self.0 = Some(before);
                None
            }
            Err(event) => {
                self.0 = Some(event);
                Some(before)
            }
        }
    }
}

/// Adds `event` to the one before it, or gives it back: same kind, same tier, and a chain without a break.
fn join(before: &mut KvEvent, event: KvEvent) -> Result<(), KvEvent> {
    match (before, event) {
        (
            KvEvent::Stored {
                tier: own, blocks, ..
            },
            KvEvent::Stored {
                tier,
                parent: Some(parent),
                blocks: more,
            },
        ) if *own == tier
            && blocks.last().is_some_and(|last| last.engine == parent)
            && blocks.len() + more.len() <= COALESCED_BLOCKS_MAX =>
        {
            blocks.extend(more);
            Ok(())
        }
        (KvEvent::Removed { tier: own, blocks }, KvEvent::Removed { tier, blocks: more })
            if *own == tier && blocks.len() + more.len() <= COALESCED_BLOCKS_MAX =>
        {
            blocks.extend(more);
            Ok(())
        }
        (_, event) => Err(event),
    }
}
