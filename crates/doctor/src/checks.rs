//! The checks, each a function from what was seen to a verdict.
//!
//! Where one fault makes several checks fail, the one that names the fault fails and the others are skipped:
//! an operator should read one line for each thing to change.

mod cache;
mod engine;
mod events;
mod pair;
#[cfg(test)]
mod tests;

pub use pair::examine_pair;

use crate::finding::{Check, Finding, Verdict};
use crate::observations::Observations;

type CheckFn = fn(&Observations) -> Verdict;

const fn judge(check: Check) -> CheckFn {
    match check {
        Check::Reachable => engine::reachable,
        Check::Model => engine::model,
        Check::Version => engine::version,
        Check::BlockSize => engine::block_size,
        Check::PrefixCaching => engine::prefix_caching,
        Check::EventSocket => events::socket,
        Check::EventsArrive => events::arrive,
        Check::Replay => events::replay,
        Check::Tokens => cache::tokens,
        Check::CachedTokens => cache::cached_tokens,
        Check::Discovery | Check::Keys | Check::Cards | Check::Requests | Check::Recovery => {
            |_| Verdict::skip("an engine server is on no plane")
        }
        Check::Pair => |_| Verdict::skip("one server is no pair"),
    }
}

/// Judges one worker. If it does not answer, there is nothing more to say than that.
#[must_use]
pub fn examine(observed: &Observations) -> Vec<Finding> {
    let finding = |check: Check| {
        let verdict = match (check, &observed.models) {
            (Check::Reachable, _) | (_, Ok(_)) => judge(check)(observed),
            (_, Err(_)) => Verdict::skip("the worker does not answer"),
        };
        Finding {
            check,
            outcome: verdict.outcome,
            why: verdict.why,
            advice: verdict.advice,
        }
    };
    Check::ALL.into_iter().map(finding).collect()
}
