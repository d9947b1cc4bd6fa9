//! When a rank is too busy to be chosen at all.
//!
//! Answers one question: is this rank over a configured threshold? A worker is busy only if all its ranks
//! are. Without thresholds no rank is ever busy.
//!
//! The decode check is latched: it trips on either signal (blocks that the worker reports as used, blocks its
//! running requests hold) and clears only when both are back.

use crate::Load;

/// The thresholds; `None` switches one off. All comparisons are strict.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Thresholds {
    /// Share of a rank's KV blocks.
    pub active_decode_blocks: Option<f64>,
    /// Prompt tokens not yet computed.
    pub active_prefill_tokens: Option<u64>,
    /// The same in batches.
    pub active_prefill_tokens_frac: Option<f64>,
}

impl Thresholds {
    /// Whether any is configured.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.active_decode_blocks.is_some()
            || self.active_prefill_tokens.is_some()
            || self.active_prefill_tokens_frac.is_some()
    }
}

/// The last load report of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedLoad {
    /// Blocks that running requests hold, as its publisher counts them.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens not yet computed.
    pub active_prefill_tokens: Option<u64>,
    /// KV blocks in use.
    pub kv_used_blocks: Option<u64>,
}

impl ReportedLoad {
    /// Applies a newer report; fields that it leaves out stay.
    pub fn update(&mut self, newer: &Self) {
        let Self {
            active_decode_blocks,
            active_prefill_tokens,
            kv_used_blocks,
        } = newer;
        self.active_decode_blocks = active_decode_blocks.or(self.active_decode_blocks);
        self.active_prefill_tokens = active_prefill_tokens.or(self.active_prefill_tokens);
        self.kv_used_blocks = kv_used_blocks.or(self.kv_used_blocks);
    }
}

/// One rank's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankBusy {
    /// Its last load report.
    pub reported: ReportedLoad,
    decode_latched: bool,
}

impl RankBusy {
    /// Whether the rank is busy, given what the router booked there. Updates the latch.
    pub fn check(
        &mut self,
        thresholds: &Thresholds,
        booked: &Load,
        kv_total_blocks: Option<u64>,
        max_batched: u64,
    ) -> bool {
        let decode = match (thresholds.active_decode_blocks, kv_total_blocks) {
            (Some(share), Some(total)) if total > 0 => {
                self.decode_over(share * total as f64, booked.active_blocks)
            }
            _ => false,
        };
        self.decode_latched = decode;
        let reported = self.reported.active_prefill_tokens.unwrap_or(0);
        let prefill = booked.prefill_tokens.max(reported);
        let over = thresholds
            .active_prefill_tokens
            .is_some_and(|t| prefill > t);
        let over_frac = thresholds
            .active_prefill_tokens_frac
            .is_some_and(|frac| prefill as f64 > frac * max_batched as f64);
        decode || over || over_frac
    }

    /// Trips when either signal is over; holds until both are below. Nothing at all is below any limit, so
    /// that an idle rank does not stay busy.
    fn decode_over(&self, limit: f64, booked_blocks: u64) -> bool {
        let published = self.reported.active_decode_blocks.unwrap_or(0);
        let held = booked_blocks.max(published) as f64;
        let used = self.reported.kv_used_blocks.map(|used| used as f64);
        let tripped = held > limit || used.is_some_and(|used| used > limit);
        let under = |blocks: f64| blocks < limit || blocks == 0.0;
        let below = under(held) && used.is_none_or(under);
        tripped || self.decode_latched && !below
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn booked(active_blocks: u64, prefill_tokens: u64) -> Load {
        Load {
            active_blocks,
            prefill_tokens,
            ..Load::default()
        }
    }

    fn used(blocks: u64) -> ReportedLoad {
        ReportedLoad {
            kv_used_blocks: Some(blocks),
            ..ReportedLoad::default()
        }
    }

    const DECODE: Thresholds = Thresholds {
        active_decode_blocks: Some(0.75),
        active_prefill_tokens: None,
        active_prefill_tokens_frac: None,
    };

    #[test]
    fn no_threshold_no_busy() {
        let mut rank = RankBusy::default();
        rank.reported.update(&used(u64::MAX));
        assert!(!rank.check(
            &Thresholds::default(),
            &booked(u64::MAX, u64::MAX),
            Some(1),
            1
        ));
    }

    #[test]
    fn an_idle_rank_is_free_again_even_at_a_limit_of_nothing() {
        let nothing = Thresholds {
            active_decode_blocks: Some(0.0),
            ..DECODE
        };
        let mut rank = RankBusy::default();
        rank.reported.update(&used(3));
        assert!(rank.check(&nothing, &booked(0, 0), Some(100), 1));
        rank.reported.update(&used(0));
        assert!(rank.check(&nothing, &booked(1, 0), Some(100), 1));
        assert!(!rank.check(&nothing, &booked(0, 0), Some(100), 1));
    }

    #[test]
    fn each_check_is_strict() {
        for (blocks, busy) in [(74, false), (75, false), (76, true)] {
            let got = RankBusy::default().check(&DECODE, &booked(blocks, 0), Some(100), 1);
            assert_eq!(got, busy, "{blocks} of 100 blocks");
        }
        let tokens = Thresholds {
            active_prefill_tokens: Some(1000),
            ..Thresholds::default()
        };
        let frac = Thresholds {
            active_prefill_tokens_frac: Some(0.5),
            ..Thresholds::default()
        };
        for (waiting, busy) in [(999, false), (1000, false), (1001, true)] {
            let load = booked(0, waiting);
            assert_eq!(RankBusy::default().check(&tokens, &load, None, 1), busy);
            assert_eq!(RankBusy::default().check(&frac, &load, None, 2000), busy);
        }
    }

    #[test]
    fn an_unknown_capacity_switches_the_decode_check_off() {
        assert!(!RankBusy::default().check(&DECODE, &booked(1_000_000, 0), None, 1));
        assert!(!RankBusy::default().check(&DECODE, &booked(1_000_000, 0), Some(0), 1));
    }

    #[test]
    fn a_reported_prefill_counts_as_much_as_a_booked_one() {
        let tokens = Thresholds {
            active_prefill_tokens: Some(10),
            ..Thresholds::default()
        };
        let mut rank = RankBusy::default();
        rank.reported.active_prefill_tokens = Some(11);
        assert!(rank.check(&tokens, &booked(0, 0), None, 1));
    }

    /// Limit 75 of 100 blocks. Either signal trips; both must be *below* to clear.
    #[test]
    fn the_decode_check_is_latched() {
        let mut rank = RankBusy::default();
        for (booked_blocks, used_blocks, busy) in [
            (10, 10, false),
            (76, 10, true),
            (10, 75, true),
            (75, 10, true),
            (10, 10, false),
            (10, 76, true),
            (74, 74, false),
        ] {
            rank.reported.update(&used(used_blocks));
            let got = rank.check(&DECODE, &booked(booked_blocks, 0), Some(100), 1);
            assert_eq!(got, busy, "booked {booked_blocks}, used {used_blocks}");
        }
    }

    #[test]
    fn a_report_leaves_what_it_does_not_mention() {
        let mut reported = used(5);
        reported.update(&ReportedLoad {
            active_prefill_tokens: Some(1),
            ..ReportedLoad::default()
        });
        assert_eq!(reported.kv_used_blocks, Some(5));
        assert_eq!(reported.active_prefill_tokens, Some(1));
    }
}
