//! What replicas tell each other: bookings, their ends, sessions.

use super::*;
use kvasir_router::{
    Observation, PEER_BOOKINGS_MAX, PeerChange, PeerEvent, PeerRecall, REPLICAS_MAX, ReplicaId,
    SessionAction, SessionEvent, SessionRequest,
};

const PEER: ReplicaId = ReplicaId(0xfe77_3984_52ee_09eb);

fn told(from: ReplicaId, id: u128, target: u64, change: PeerChange) -> Input {
    let (id, target) = (RequestId(id), WorkerRank::new(target, 0));
    Input::Peer {
        from,
        event: Box::new(PeerEvent { id, target, change }),
        recalled: false,
    }
}

fn recalled(input: Input) -> Input {
    match input {
        Input::Peer { from, event, .. } => Input::Peer {
            from,
            event,
            recalled: true,
        },
        other => other,
    }
}

fn add(words: &[u64], prefill_tokens: u32) -> PeerChange {
    PeerChange::Add {
        sequence: chain(words),
        prefill_tokens,
        prefill_duration: None,
        osl: None,
    }
}

/// What the last input told peers.
fn tells(host: &Host) -> Vec<PeerEvent> {
    let told = host.out.iter().filter_map(|out| match out {
        Output::Tell(event) => Some((**event).clone()),
        _ => None,
    });
    told.collect()
}

fn syncing(workers: u64) -> Host {
    Host::kv(|c| {
        c.router_replica_sync = true;
        c.router_session_affinity_ttl_secs = Some(60);
    })
    .workers(workers)
}

#[test]
fn what_replicas_book_counts_here_and_is_freed_by_them() {
    let mut host = Host::kv(|_| {}).workers(2);
    host.input(told(PEER, 77, 9, add(&[1, 2], 40)));
    assert_eq!(host.router.booked(), 0, "nobody we know");
    for _ in 0..2 {
        host.input(told(PEER, 77, 1, add(&[1, 2], 40)));
        assert_eq!(host.load(1), (40, 2), "told again, it counts once");
    }
    assert_eq!(host.worker(Arrival::new(RequestId(1), 16)), 2);
    host.finish(1);
    host.input(told(PEER, 77, 1, PeerChange::PrefillCompleted));
    assert_eq!(host.load(1), (0, 2));
    for _ in 0..2 {
        host.input(told(PEER, 77, 1, PeerChange::Free));
        assert!(host.router.is_idle());
    }
}

/// A client may give both replicas the same id: one's end is not the other's.
#[test]
fn requests_of_one_id_on_two_replicas_are_two() {
    let mut host = syncing(1);
    host.sent(prompt(77, &words(1, 4)));
    host.input(told(PEER, 77, 1, add(&words(2, 2), 32)));
    host.input(told(ReplicaId(3), 77, 1, add(&words(3, 1), 16)));
    assert_eq!(host.load(1), (64 + 32 + 16, 7));
    host.input(told(PEER, 77, 1, PeerChange::Free));
    assert_eq!(host.load(1), (64 + 16, 5));
    host.finish(77);
    assert_eq!(host.load(1), (16, 1));
    let replicas: Vec<_> = host.router.replicas().collect();
    assert_eq!(replicas, [(ReplicaId(3), 1), (PEER, 0)]);
}

/// The worker knows a request by its id alone.
#[test]
fn a_worker_says_for_all_replicas_that_a_prompt_is_computed() {
    let mut host = syncing(1);
    host.input(told(PEER, 77, 1, add(&words(2, 2), 32)));
    host.input(Input::Prefilled { id: RequestId(77) });
    assert_eq!(host.load(1), (0, 2));
    assert_eq!(tells(&host), [], "a peer's request is not told on");
}

#[test]
fn a_replica_that_is_gone_takes_its_bookings_along_and_no_others() {
    let mut host = syncing(2);
    for id in 1..=3 {
        host.input(told(PEER, id, 1, add(&words(id as u64, 2), 32)));
    }
    host.input(told(ReplicaId(3), 9, 2, add(&words(9, 2), 32)));
    host.input(Input::PeerGone(PEER));
    assert_eq!((host.load(1), host.load(2)), ((0, 0), (32, 2)));
    assert_eq!(tells(&host), []);
    host.input(told(PEER, 1, 1, PeerChange::Free));
    host.input(Input::PeerGone(PEER));
    assert_eq!(host.router.booked(), 1);
}

#[test]
fn what_no_replica_ends_expires() {
    let mut host = syncing(1);
    host.input(told(PEER, 1, 1, add(&words(1, 2), 32)));
    host.at(299_999).input(Input::Tick);
    assert_eq!(host.router.booked(), 1);
    host.at(300_000).input(Input::Tick);
    assert!(host.router.is_idle());
    let replicas: Vec<_> = host.router.replicas().collect();
    assert_eq!(replicas, [(PEER, 0)]);
}

/// A replica that asks may hear of an end before it hears of the request.
#[test]
fn an_end_outweighs_what_is_recalled_later() {
    let mut host = syncing(2);
    host.input(told(PEER, 1, 1, PeerChange::Free));
    host.input(recalled(told(PEER, 1, 1, add(&words(1, 2), 32))));
    assert!(host.router.is_idle());
    host.input(recalled(told(PEER, 2, 1, add(&words(2, 2), 32))));
    assert_eq!(host.load(1), (32, 2));
    // The same request again, sent elsewhere: its attempt was retried.
    host.input(told(PEER, 2, 2, add(&words(2, 2), 32)));
    assert_eq!((host.load(1), host.load(2)), ((0, 0), (32, 2)));
}

/// An end that was lost on the way is made good by the next answer; what began since the question is not in it.
#[test]
fn what_a_replica_does_not_recall_has_ended() {
    let mut host = syncing(2);
    host.at(10).input(told(PEER, 1, 1, add(&words(1, 2), 32)));
    host.input(told(PEER, 2, 1, add(&words(2, 2), 32)));
    host.input(told(PEER, 3, 2, add(&words(3, 2), 32)));
    host.input(told(ReplicaId(3), 1, 1, add(&words(4, 2), 32)));
    host.at(20).input(told(PEER, 5, 1, add(&words(5, 2), 32)));
    let recall = |workers: &[u64]| {
        Input::PeerRecalled(Box::new(PeerRecall {
            from: PEER,
            asked: Time::from_millis(15),
            workers: workers.iter().map(|id| WorkerId(*id)).collect(),
            requests: vec![RequestId(2), RequestId(8)],
        }))
    };
    host.at(30).input(recall(&[1]));
    assert_eq!(host.load(1), (96, 6), "2, 5 and the other's");
    assert_eq!(host.load(2), (32, 2), "of worker 2 nothing was said");
    host.input(recall(&[1, 2]));
    assert_eq!((host.load(1), host.load(2)), ((96, 6), (0, 0)));
}

#[test]
fn own_requests_are_told_from_booking_to_end() {
    let mut host = syncing(1);
    let event = |change| PeerEvent {
        id: RequestId(1),
        target: WorkerRank::new(1, 0),
        change,
    };
    let mut arrival = prompt(1, &words(1, 4));
    arrival.overlap = held(&[(1, 1)]);
    arrival.hints.osl = Some(9);
    let added = |prefill_tokens| PeerChange::Add {
        sequence: chain(&words(1, 4)),
        prefill_tokens,
        prefill_duration: None,
        osl: Some(9),
    };
    host.sent(arrival);
    assert_eq!(tells(&host), [event(added(48))]);
    assert_eq!(host.router.in_flight(), [event(added(48))]);
    host.first_token(1);
    assert_eq!(tells(&host), [event(PeerChange::PrefillCompleted)]);
    host.first_token(1);
    assert_eq!(tells(&host), []);
    assert_eq!(host.router.in_flight(), [event(added(0))]);
    host.finish(1);
    assert_eq!(tells(&host), [event(PeerChange::Free)]);
    host.finish(1);
    assert_eq!((tells(&host), host.router.in_flight()), (vec![], vec![]));
}

#[test]
fn nobody_is_told_unless_replicas_are_in_step() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 4)));
    assert_eq!(tells(&host), []);
    host.finish(1);
    assert_eq!((tells(&host), host.router.in_flight()), (vec![], vec![]));
}

#[test]
fn a_worker_that_leaves_takes_all_bookings_along() {
    let mut host = syncing(2);
    host.sent(prompt(1, &words(1, 4)));
    host.input(told(PEER, 2, 1, add(&words(2, 2), 32)));
    host.input(told(PEER, 3, 2, add(&words(3, 2), 32)));
    for worker in 1..=2 {
        host.input(Input::Left(WorkerId(worker)));
    }
    assert!(host.router.is_idle() && host.router.in_flight().is_empty());
    let replicas: Vec<_> = host.router.replicas().collect();
    assert_eq!(replicas, [(PEER, 0)]);
}

#[test]
fn replicas_and_their_bookings_have_bounds() {
    let mut host = syncing(1);
    let refused = |replica| Output::Observe(Observation::PeerRefused { replica });
    for id in 0..PEER_BOOKINGS_MAX as u128 {
        host.input(told(PEER, id, 1, add(&[], 1)));
    }
    assert_eq!(host.router.booked(), PEER_BOOKINGS_MAX);
    let out = host.input(told(PEER, u128::MAX, 1, add(&[], 1)));
    assert_eq!(out, [refused(PEER)]);
    host.input(Input::PeerGone(PEER));
    for replica in 0..REPLICAS_MAX as u64 {
        host.input(told(ReplicaId(replica), 1, 1, add(&[], 1)));
    }
    let out = host.input(told(PEER, 1, 1, add(&[], 1)));
    assert_eq!(out, [refused(PEER)]);
    assert_eq!(host.router.booked(), REPLICAS_MAX);
}

fn bound(worker: u64, since: u64) -> Input {
    Input::Session(SessionEvent::PeerBound {
        id: Arc::from("h"),
        target: WorkerRank::new(worker, 0),
        since: Time::from_millis(since),
    })
}

fn header(id: u128) -> Arrival {
    Arrival {
        session: Some(SessionRequest {
            id: Arc::from("h"),
            action: SessionAction::Header,
        }),
        ..Arrival::new(RequestId(id), 16)
    }
}

/// Whoever hears the same bindings in another order comes to the same.
#[test]
fn the_older_live_binding_of_a_session_counts() {
    for order in [[(3, 10), (1, 20)], [(1, 20), (3, 10)]] {
        let mut host = syncing(3);
        host.at(100).input(bound(9, 5));
        assert_eq!(host.router.sessions(), 0, "nobody we know");
        for (worker, since) in order {
            host.input(bound(worker, since));
        }
        assert_eq!(host.worker(header(1)), 3);
        host.input(Input::Left(WorkerId(3)));
        host.input(bound(1, 200));
        assert_eq!(host.worker(header(2)), 1);
    }
}

#[test]
fn the_use_of_a_session_is_told_twice_a_request_and_keeps_it_at_peers() {
    let mut host = syncing(2);
    let worker = host.worker(header(1));
    let used = |host: &Host| {
        let bound = Observation::SessionBound {
            id: Arc::from("h"),
            target: WorkerRank::new(worker, 0),
            since: Time::from_millis(5),
        };
        host.out.contains(&Output::Observe(bound))
    };
    host.at(5).first_token(1);
    assert!(used(&host));
    host.at(9).finish(1);
    assert!(used(&host));
    host.at(1000).sent(header(2));
    host.first_token(2);
    assert!(used(&host));
    let mut peer = syncing(2);
    peer.at(10).input(bound(worker, 5));
    peer.at(50_000).input(bound(worker, 5));
    peer.at(100_000).input(Input::Tick);
    assert_eq!(peer.router.sessions(), 1);
    peer.at(110_000).input(Input::Tick);
    assert_eq!(peer.router.sessions(), 0);
}
