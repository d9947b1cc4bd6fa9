//! What a worker publishes and answers: coalescing, counted removals, the six answers.

use kvasir_index::Index;
use kvasir_kv_events::publisher::{COALESCED_BLOCKS_MAX, RING_EVENTS, RankPublisher};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use kvasir_wire::native::{RecoveryReply, RecoveryRequest, RouterEvent};

const RANK: WorkerRank = WorkerRank {
    worker: kvasir_types::WorkerId(9),
    rank: kvasir_types::DpRank(1),
};

fn stored(tier: Tier, parent: Option<u64>, names: std::ops::Range<u64>) -> KvEvent {
    let blocks = names.map(|name| StoredBlock {
        engine: EngineHash(name),
        local: LocalHash(name),
    });
    KvEvent::Stored {
        tier,
        parent: parent.map(EngineHash),
        blocks: blocks.collect(),
    }
}

fn removed(tier: Tier, names: &[u64]) -> KvEvent {
    KvEvent::Removed {
        tier,
        blocks: names.iter().copied().map(EngineHash).collect(),
    }
}

/// The events that go out for these changes, the last ones flushed.
fn published(publisher: &mut RankPublisher, changes: Vec<KvEvent>) -> Vec<KvEvent> {
    let mut out: Vec<RouterEvent> = Vec::new();
    let first = publisher.last_id() + 1;
    changes
        .into_iter()
        .for_each(|change| publisher.push(change, &mut out));
    publisher.flush(&mut out);
    let ids: Vec<u64> = out.iter().map(|event| event.id).collect();
    assert_eq!(ids, (first..first + out.len() as u64).collect::<Vec<_>>());
    assert!(out.iter().all(|event| event.rank == RANK));
    out.into_iter().map(|event| event.event).collect()
}

#[test]
fn what_follows_is_joined_up_to_the_limit() {
    const D: Tier = Tier::Device;
    let mut publisher = RankPublisher::new(RANK);
    let chain = published(
        &mut publisher,
        vec![
            stored(D, None, 1..3),
            stored(D, Some(2), 3..4),
            stored(D, Some(2), 7..8),
        ],
    );
    assert_eq!(chain, [stored(D, None, 1..4), stored(D, Some(2), 7..8)]);
    let tiers = vec![stored(D, Some(7), 8..9), stored(Tier::Disk, Some(8), 9..10)];
    assert_eq!(published(&mut publisher, tiers.clone()), tiers);
    let kinds = vec![
        removed(D, &[8]),
        removed(D, &[7]),
        removed(Tier::Disk, &[9]),
    ];
    let joined = [removed(D, &[8, 7]), removed(Tier::Disk, &[9])];
    assert_eq!(published(&mut publisher, kinds), joined);
    // At the limit, and one past it.
    let max = COALESCED_BLOCKS_MAX as u64;
    let long = |blocks: u64| {
        let single = |name: u64| stored(D, (name > 100).then(|| name - 1), name..name + 1);
        (100..100 + blocks).map(single).collect::<Vec<_>>()
    };
    assert_eq!(published(&mut publisher, long(max)).len(), 1);
    assert_eq!(published(&mut publisher, long(max + 1)).len(), 2);
}

/// A block goes with its last copy; a removal that says nothing uses no number.
#[test]
fn copies_are_counted_by_tier() {
    const D: Tier = Tier::Device;
    let mut publisher = RankPublisher::new(RANK);
    let twice = vec![
        stored(D, None, 1..2),
        stored(D, None, 1..2),
        stored(Tier::Disk, None, 1..2),
    ];
    assert_eq!(
        published(&mut publisher, twice).len(),
        3,
        "stores always pass"
    );
    assert_eq!(published(&mut publisher, vec![removed(D, &[1])]), []);
    assert_eq!(
        published(&mut publisher, vec![removed(D, &[1])]),
        [removed(D, &[1])]
    );
    assert_eq!(
        published(&mut publisher, vec![removed(D, &[1, 77])]),
        [removed(D, &[1, 77])],
        "what is not known passes"
    );
    let cleared = KvEvent::Cleared { tier: Some(D) };
    let again = vec![stored(D, None, 1..2), stored(D, None, 1..2), cleared];
    published(&mut publisher, again);
    assert_eq!(published(&mut publisher, vec![removed(D, &[1])]).len(), 1);
    let disk = removed(Tier::Disk, &[1]);
    assert_eq!(published(&mut publisher, vec![disk.clone()]), [disk]);
}

#[test]
fn each_of_the_answers_is_given_when_it_should_be() {
    let mut publisher = RankPublisher::new(RANK);
    let ask = |publisher: &RankPublisher, start, end| {
        publisher.answer(&RecoveryRequest {
            end,
            ..RecoveryRequest::new(RANK, start)
        })
    };
    let empty = RecoveryReply::TreeDump {
        events: vec![],
        last: 0,
    };
    assert_eq!(ask(&publisher, None, None), empty);
    assert_eq!(ask(&publisher, Some(1), None), empty, "an empty ring");
    for name in 1..=3 {
        let parent = (name > 1).then(|| name - 1);
        published(
            &mut publisher,
            vec![stored(Tier::Device, parent, name..name + 1)],
        );
    }
    let dump = |start, end, publisher: &RankPublisher| match ask(publisher, start, end) {
        RecoveryReply::TreeDump { events, last } => (events, last),
        other => panic!("{other:?}"),
    };
    assert_eq!(dump(None, None, &publisher).1, 3);
    assert_eq!(dump(Some(0), None, &publisher).1, 3);
    assert_eq!(
        dump(None, Some(2), &publisher).1,
        3,
        "an end alone asks for all"
    );
    let RecoveryReply::Events { events, last } = ask(&publisher, Some(2), Some(2)) else {
        panic!("the ring has it");
    };
    let ids: Vec<u64> = events.iter().map(|event| event.id).collect();
    assert_eq!((ids, last), (vec![2, 3], 3), "an end is only checked");
    let (start, end, newest) = (4, 3, 3);
    let too_new = RecoveryReply::TooNew { start, end, newest };
    assert_eq!(ask(&publisher, Some(4), None), too_new);
    let (start, end) = (3, 1);
    let invalid = RecoveryReply::InvalidRange { start, end };
    assert_eq!(ask(&publisher, Some(3), Some(1)), invalid);
    let other = RecoveryRequest::new(WorkerRank::new(9, 0), None);
    assert!(matches!(publisher.answer(&other), RecoveryReply::Error(_)));
    let silent = RankPublisher::unanswering(RANK);
    assert!(matches!(ask(&silent, None, None), RecoveryReply::Error(_)));
}

/// At the ring's end one number decides between the events and the whole state, and both lead to the same.
#[test]
fn the_ring_keeps_so_many_events_and_no_more() {
    let mut publisher = RankPublisher::new(RANK);
    for name in 1..=RING_EVENTS as u64 + 5 {
        let parent = (name > 1).then(|| name - 1);
        published(
            &mut publisher,
            vec![stored(Tier::Device, parent, name..name + 1)],
        );
    }
    let ask = |start| publisher.answer(&RecoveryRequest::new(RANK, Some(start)));
    let RecoveryReply::Events { events, .. } = ask(6) else {
        panic!("the ring begins at 6");
    };
    assert_eq!(events.len(), RING_EVENTS);
    let RecoveryReply::TreeDump { events, last } = ask(5) else {
        panic!("5 is gone");
    };
    assert_eq!(last, RING_EVENTS as u64 + 5);
    let index = Index::new();
    for event in &events {
        index.apply(RANK, &event.event).unwrap();
    }
    assert_eq!(index.stats().entries, last);
}
