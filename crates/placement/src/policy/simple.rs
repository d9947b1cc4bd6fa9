//! Modes that do not look at caches: in turn, at random, by requests in flight.

use kvasir_types::Rng;

use super::{FleetView, PlacementRequest, Policy};
use crate::choice::LowestCost;
use crate::{Candidate, SlotSet, WinReason};

/// Each free rank in turn: a counter modulo the number of free ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin {
    turn: u64,
}

impl Policy for RoundRobin {
    fn choose(
        &mut self,
        _: &mut FleetView<'_>,
        _: &PlacementRequest<'_>,
        eligible: &SlotSet,
        _: &mut Rng,
        _: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        let place = self.turn.checked_rem(u64::from(eligible.count()))?;
        self.turn = self.turn.wrapping_add(1);
        Some((eligible.nth(place as u32)?, WinReason::Rule))
    }
}

/// Any free rank with the same chance.
#[derive(Clone, Copy, Debug, Default)]
pub struct Random;

impl Policy for Random {
    fn choose(
        &mut self,
        _: &mut FleetView<'_>,
        _: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        _: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        let place = rng.below(u64::from(eligible.count()));
        Some((eligible.nth(place as u32)?, WinReason::Rule))
    }
}

/// Two different ranks at random, the one with fewer requests in flight; the first drawn on a tie.
#[derive(Clone, Copy, Debug, Default)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn choose(
        &mut self,
        view: &mut FleetView<'_>,
        _: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        _: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        let count = eligible.count();
        let first = rng.below(u64::from(count)) as u32;
        let one = eligible.nth(first)?;
        if count == 1 {
            return Some((one, WinReason::Rule));
        }
        let other = rng.below(u64::from(count - 1)) as u32;
        let two = eligible.nth(if other >= first { other + 1 } else { other })?;
        let fewer = view.ledger.requests(two) < view.ledger.requests(one);
        Some((if fewer { two } else { one }, WinReason::Rule))
    }
}

/// Fewest requests in flight; any of them on a tie.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastLoaded;

impl Policy for LeastLoaded {
    fn choose(
        &mut self,
        view: &mut FleetView<'_>,
        _: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        _: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        least(view, eligible.iter(), rng)
    }
}

fn least(
    view: &FleetView<'_>,
    slots: impl Iterator<Item = u32>,
    rng: &mut Rng,
) -> Option<(u32, WinReason)> {
    let mut lowest = LowestCost::new();
    for slot in slots {
        lowest.offer(f64::from(view.ledger.requests(slot)), slot, rng);
    }
    lowest.won().map(|(slot, _)| (slot, WinReason::Rule))
}

/// CPUs and GPUs in proportion to their worth, then fewest in flight inside the group.
///
/// A CPU is taken only while `cpus' requests < floor(gpus' requests * cpus /
/// (ratio * gpus))`, so that an idle fleet uses its GPUs.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAware {
    /// How much more a GPU is worth; at least 1.
    pub ratio: u32,
}

impl Policy for DeviceAware {
    fn choose(
        &mut self,
        view: &mut FleetView<'_>,
        request: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        _: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        let (mut cpus, mut gpus) = ((0u64, 0u64), (0u64, 0u64));
        for slot in eligible.iter() {
            let group = if view.fleet.is_cpu(slot) {
                &mut cpus
            } else {
                &mut gpus
            };
            group.0 += 1;
            group.1 += u64::from(view.ledger.requests(slot));
        }
        if cpus.0 == 0 || gpus.0 == 0 {
            return least(view, eligible.iter(), rng);
        }
        if let Some(slot) = fully_cached(view, request, eligible) {
            return Some((slot, WinReason::Rule));
        }
        let worth = u64::from(self.ratio.max(1)) * gpus.0;
        let cpu = cpus.1 < gpus.1 * cpus.0 / worth;
        let fleet = view.fleet;
        let group = eligible.iter().filter(|slot| fleet.is_cpu(*slot) == cpu);
        least(view, group, rng)
    }
}

/// The first rank that holds the whole prompt (for an encoder: all its media), if any does.
fn fully_cached(
    view: &FleetView<'_>,
    request: &PlacementRequest<'_>,
    eligible: &SlotSet,
) -> Option<u32> {
    let blocks = request
        .prompt
        .isl_tokens
        .div_ceil(request.weights.block_size.max(1));
    let whole = request
        .prompt
        .overlap
        .ranks
        .iter()
        .filter(|found| found.device >= f64::from(blocks));
    let slots = whole.filter_map(|found| view.fleet.slot(found.rank));
    slots.filter(|slot| eligible.has(*slot)).min()
}
