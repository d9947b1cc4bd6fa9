//! Workers that say all that they hold.

use expect_test::expect;
use kvasir_trust::{CacheState, Cause, Evidence, Trust, TrustOptions, TrustRecord};

use crate::{BLOCK, Worker, cached};

/// A worker that can be asked what it holds, and was, needs to prove nothing; one that was wrong before does.
#[test]
fn a_worker_that_said_all_it_holds_is_exact_until_it_is_wrong() {
    let mut worker = Worker::new();
    worker
        .show("no events", 1, Evidence::Unusable(Some(Cause::NoEvents)))
        .show("said while they are not heard", 1, Evidence::Whole)
        .show("events", 1, Evidence::Unusable(None))
        .show("said", 2, Evidence::Whole)
        .show("evicted", 12, cached(320, 0))
        .show("said again", 3, Evidence::Whole);
    worker.check(&expect![[r#"
        no events 1: Approximate no_events
        events 1: Approximate starting
        said 1: Exact
        evicted 1: ask
        evicted 3: ask
        evicted 4: resynchronise
        evicted 7: ask
        evicted 8: forget
        evicted 8: Discounted silent_eviction
        evicted 12: forget
        evicted 12: Approximate silent_eviction
    "#]]);
    let (options, state) = (TrustOptions::new(BLOCK), CacheState::Exact);
    let record = TrustRecord {
        state: CacheState::Approximate,
        demotions: 1,
    };
    let mut worker = Worker {
        trust: Trust::resume(options, record),
        ..Worker::new()
    };
    worker.show("said", 1, Evidence::Whole);
    assert_ne!(worker.trust.level().state, state);
}
