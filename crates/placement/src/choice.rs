//! Which of the scored candidates is taken.
//!
//! At temperature 0 the cheapest, and among exact ties any with the same chance: always taking the first
//! would herd requests while all costs are equal. Above 0 a softmax over costs scaled to the span between
//! cheapest and dearest, so that a temperature means the same for small and large costs.

use kvasir_types::Rng;

/// Why a candidate won.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WinReason {
    /// Its cost was lowest.
    LowestCost,
    /// Its cost was lowest together with others'.
    Tie {
        /// How many shared it.
        among: u32,
    },
    /// The policy's own rule, which has no cost: its turn, its draw, fewest in flight.
    Rule,
    /// It was drawn.
    Sampled {
        /// Its share.
        probability: f64,
    },
}

/// The running lowest cost, with reservoir sampling among ties: the k-th one replaces with chance 1/k.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowestCost {
    pub(crate) cost: f64,
    pub(crate) slot: u32,
    ties: u32,
}

impl LowestCost {
    pub(crate) fn new() -> Self {
        Self {
            cost: f64::INFINITY,
            slot: u32::MAX,
            ties: 0,
        }
    }

    #[inline]
    pub(crate) fn offer(&mut self, cost: f64, slot: u32, rng: &mut Rng) {
        if cost > self.cost {
            return;
        }
        if cost < self.cost || self.ties == 0 {
            (self.cost, self.slot, self.ties) = (cost, slot, 1);
        } else {
            self.ties += 1;
            if rng.below(u64::from(self.ties)) == 0 {
                self.slot = slot;
            }
        }
    }

    pub(crate) fn won(&self) -> Option<(u32, WinReason)> {
        match self.ties {
            0 => None,
            1 => Some((self.slot, WinReason::LowestCost)),
            among => Some((self.slot, WinReason::Tie { among })),
        }
    }
}

/// Draws among `costs` (cost, slot) with a softmax at `temperature` > 0. Costs become weights in place.
pub(crate) fn draw(
    costs: &mut [(f64, u32)],
    temperature: f64,
    rng: &mut Rng,
) -> Option<(u32, WinReason)> {
    let lowest = costs.iter().map(|c| c.0).fold(f64::INFINITY, f64::min);
    let highest = costs.iter().map(|c| c.0).fold(f64::NEG_INFINITY, f64::max);
    let span = (highest - lowest) * temperature;
    let mut total = 0.0;
    for (cost, _) in costs.iter_mut() {
        *cost = if highest > lowest {
            (-(*cost - lowest) / span).exp()
        } else {
            1.0
        };
        total += *cost;
    }
    let wanted = rng.unit();
    let mut reached = 0.0;
    for (weight, slot) in costs.iter() {
        let probability = weight / total;
        reached += probability;
        if reached >= wanted {
            return Some((*slot, WinReason::Sampled { probability }));
        }
    }
    costs.last().map(|(weight, slot)| {
        let probability = weight / total;
        (*slot, WinReason::Sampled { probability })
    })
}

#[cfg(test)]
mod tests;
