//! What an index holds, as the events that would make it: for looking, comparing, and for another index to start from.
//!
//! The shape is that of Dynamo's standalone indexer. It is written while it is read, a rank at a time.

use std::io;

use kvasir_index::Index;
use kvasir_types::KvEvent;
use kvasir_wire::native::RouterEvent;

/// Names in one event that takes blocks back.
const REMOVED_MAX: usize = 1024;

/// Hands the events to `write`, in JSON with commas between them. On a thread that may wait.
pub fn dump_index(index: &Index, mut write: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut ids = 1..;
    for rank in index.ranks() {
        for (_, event) in index.dump_rank(rank) {
            for event in in_pieces(event) {
                let id = ids.next().unwrap_or(u64::MAX);
                if id > 1 {
                    write(b",")?;
                }
                let event = RouterEvent {
                    rank,
                    id,
                    residency: None,
                    position: None,
                    event,
                };
                write(event.to_value().to_json().to_string().as_bytes())?;
            }
        }
    }
    Ok(())
}

/// Events of a bounded size that say the same.
fn in_pieces(event: KvEvent) -> Vec<KvEvent> {
    match event {
        KvEvent::Removed { tier, blocks } => blocks
            .chunks(REMOVED_MAX)
            .map(|names| KvEvent::Removed {
                tier,
                blocks: names.to_vec(),
            })
            .collect(),
        event => vec![event],
    }
}
