//! Does the index answer as the oracle does, whatever the history? The first byte says which kind: events of
//! few names, long chains with gaps, or routing decisions.
#![no_main]

use kvasir_index::{check_event_history, check_gap_history, check_routing_history};
use libfuzzer_sys::fuzz_target;

/// Longer histories take long and find little: the oracle's cost grows with their square.
const HISTORY_MAX: usize = 1_500;

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, history)) = bytes.split_first() else {
        return;
    };
    let history = &history[..history.len().min(HISTORY_MAX)];
    match kind % 4 {
        0 | 1 => check_event_history(history),
        2 => check_gap_history(history),
        _ => check_routing_history(history),
    }
});
