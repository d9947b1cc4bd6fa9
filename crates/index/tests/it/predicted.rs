//! Predictions beside events: the larger match counts, and a prediction ends with its time.

use std::time::Duration;

use kvasir_index::{Index, IndexOptions, Matches};
use kvasir_types::{
    EngineHash, KvEvent, LocalHash, SequenceHash, StoredBlock, Tier, Time, WorkerRank,
};

const HEARD: WorkerRank = WorkerRank::new(1, 0);
const SENT: WorkerRank = WorkerRank::new(2, 0);

fn prompt(blocks: u64) -> (Vec<LocalHash>, Vec<SequenceHash>) {
    let locals = (1..=blocks).map(LocalHash).collect();
    (
        locals,
        (1..=blocks).map(|n| SequenceHash(1000 + n)).collect(),
    )
}

fn held(index: &Index, rank: WorkerRank) -> u32 {
    let mut found = Matches::new();
    index.find(&prompt(4).0, &mut found);
    found.get(rank).map_or(0, |m| m.device)
}

#[test]
fn the_larger_of_event_and_prediction_counts_until_the_prediction_ends() {
    let ttl = Duration::from_secs(5);
    let index = Index::with_options(&IndexOptions {
        predicted_ttl: Some(ttl),
        ..IndexOptions::default()
    });
    let block = |n| StoredBlock {
        engine: EngineHash(n),
        local: LocalHash(n),
    };
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        parent: None,
        blocks: vec![block(1), block(2)],
    };
    assert_eq!(index.apply(HEARD, &stored), Ok(()));

    let (locals, sequence) = prompt(3);
    index.record_routing(Time::ZERO, SENT, &locals, &sequence);
    index.record_routing(Time::ZERO, HEARD, &locals[..1], &sequence[..1]);
    assert_eq!(
        (held(&index, HEARD), held(&index, SENT)),
        (2, 3),
        "a shorter prediction takes nothing"
    );
    index.record_routing(Time::ZERO, HEARD, &locals, &sequence);
    assert_eq!(held(&index, HEARD), 3);

    index.expire(Time::ZERO + (ttl - Duration::from_millis(101)));
    assert_eq!(held(&index, SENT), 3, "too early");
    index.expire(Time::ZERO + ttl + Duration::from_millis(100));
    assert_eq!(
        (held(&index, HEARD), held(&index, SENT)),
        (2, 0),
        "what events said stays"
    );

    index.record_routing(Time::ZERO + ttl, SENT, &locals, &sequence);
    index.remove_worker(SENT.worker);
    assert_eq!(
        held(&index, SENT),
        0,
        "a worker that leaves takes its predictions along"
    );
}
