//! Histories of long chains that lose blocks here and there and get them back.
//!
//! Chains are longer than a word of bits and share trunks of different lengths, so that gaps, refills,
//! branches in the middle of a gap and ends that are taken off meet in one run.

use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

use super::Oracle;
use super::history::{Source, check_copies, check_empty, check_step, name_of};
use crate::Index;

const CHAINS: u8 = 3;
const LEN: u8 = 150;
/// Where a chain leaves the first one.
const FORKS: [usize; CHAINS as usize] = [0, 40, 97];

/// The blocks of a chain.
fn chain(number: usize) -> Vec<LocalHash> {
    let at = |i: usize| {
        let own = if i < FORKS[number] { 0 } else { number };
        LocalHash((own * 1_000 + i) as u64)
    };
    (0..usize::from(LEN)).map(at).collect()
}

fn span(source: &mut Source<'_>) -> std::ops::Range<usize> {
    let from = source.below(LEN);
    let len = match source.below(4) {
        0 => source.below(LEN - from),
        _ => source.below(6).min(LEN - from - 1),
    };
    usize::from(from)..usize::from(from + len) + 1
}

/// Any event of a chain, often of blocks that the rank holds already or does not hold.
pub(super) fn event(source: &mut Source<'_>) -> KvEvent {
    let chain = chain(usize::from(source.below(CHAINS)));
    let name = |i: usize| name_of(&chain[..=i], 0);
    let tier = match source.below(8) {
        0 => Tier::HostPinned,
        _ => Tier::Device,
    };
    match source.below(32) {
        0 => KvEvent::Cleared { tier: None },
        // From the start, so that there is something to lose.
        1..=5 => {
            let len = 1 + usize::from(source.below(LEN));
            stored(tier, &chain, 0..len)
        }
        6..=15 => {
            let span = span(source);
            stored(tier, &chain, span)
        }
        16..=23 => {
            let count = 1 + source.below(20);
            let at = |_| name(usize::from(source.below(LEN)));
            let blocks: Vec<EngineHash> = (0..count).map(at).collect();
            KvEvent::Removed { tier, blocks }
        }
        _ => {
            let mut blocks: Vec<EngineHash> = span(source).map(name).collect();
            if source.below(2) == 0 {
                blocks.reverse();
            }
            KvEvent::Removed { tier, blocks }
        }
    }
}

/// An event as an engine sends it that stores what it does not hold and removes what it holds.
pub(super) fn orderly_event(source: &mut Source<'_>, oracle: &Oracle, rank: WorkerRank) -> KvEvent {
    let tier = Tier::Device;
    let chain = chain(usize::from(source.below(CHAINS)));
    let name = |i: usize| name_of(&chain[..=i], 0);
    let held = oracle.held.get(&(rank, tier));
    let holds = |i: &usize| held.is_some_and(|held| held.contains_key(&name(*i)));
    let all = 0..usize::from(LEN);
    let gap = all.clone().find(|i| !holds(i));
    let most = 1 + usize::from(source.below(40));
    let mut blocks: Vec<usize> = all.clone().rev().filter(holds).collect();
    match (source.below(16), gap) {
        (0..=8, Some(gap)) => {
            let free = (gap..all.end).take_while(|i| !holds(i)).take(most);
            stored(tier, &chain, gap..gap + free.count())
        }
        (9, _) if source.below(4) == 0 => KvEvent::Cleared { tier: None },
        (0..=13, _) => {
            blocks.truncate(most);
            let blocks = blocks.into_iter().map(name).collect();
            KvEvent::Removed { tier, blocks }
        }
        _ => {
            let step = 1 + usize::from(source.below(30));
            let blocks = blocks.into_iter().step_by(step).take(most);
            let blocks = blocks.map(name).collect();
            KvEvent::Removed { tier, blocks }
        }
    }
}

/// Asks for every chain.
pub(super) fn check_chains(index: &Index, oracle: &Oracle) {
    check_step(index, oracle, (0..usize::from(CHAINS)).map(chain));
}

fn stored(tier: Tier, chain: &[LocalHash], span: std::ops::Range<usize>) -> KvEvent {
    KvEvent::Stored {
        tier,
        parent: (span.start > 0).then(|| name_of(&chain[..span.start], 0)),
        blocks: span
            .map(|i| StoredBlock {
                engine: name_of(&chain[..=i], 0),
                local: chain[i],
            })
            .collect(),
    }
}

/// Plays a history of long chains with gaps that `bytes` stand for.
///
/// # Panics
/// If the index and the oracle disagree, or the index contradicts itself.
pub fn check_gap_history(bytes: &[u8]) {
    let (index, mut oracle) = (Index::new(), Oracle::default());
    let floor = index.stats().bytes;
    let mut source = Source::new(bytes);
    while !source.is_over() {
        let rank = WorkerRank::new(source.below(3).into(), 0);
        let event = event(&mut source);
        let expected = oracle.apply(rank, &event);
        assert_eq!(index.apply(rank, &event), expected, "{rank} {event:?}");
        check_chains(&index, &oracle);
    }
    check_copies(&index, &oracle, &mut source);
    check_empty(&index, floor);
}
