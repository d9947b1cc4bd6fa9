//! Cost, booking and choice in kv mode.

use super::*;
use expect_test::expect;
use kvasir_router::Reason;

/// The example of Dynamo's documentation: a 10-block prompt; decode loads 10, 5, 9; overlaps 2, 5, 8.
fn example_a(change: impl FnOnce(&mut RouterConfig)) -> (u64, String) {
    let mut host = Host::kv(change).workers(3);
    for (worker, blocks) in [(1, 10), (2, 5), (3, 9)] {
        let mut load = prompt(u128::from(100 + worker), &words(worker, blocks));
        load.pin.worker = Some(WorkerId(worker));
        host.sent(load);
        host.first_token(u128::from(100 + worker));
    }
    let mut asked = Arrival::new(RequestId(1), 160);
    asked.overlap = held(&[(1, 2), (2, 5), (3, 8)]);
    let worker = host.worker(asked);
    let decision = host.router.explain(RequestId(1)).unwrap();
    let mut lines: Vec<String> = decision.formulas().map(|f| f.to_string()).collect();
    lines.sort();
    (worker, lines.join("\n"))
}

#[test]
fn the_worked_example_in_its_three_settings() {
    let (worker, lines) = example_a(|_| {});
    assert_eq!(worker, 2);
    expect![[r#"
        Formula for worker_1: 18.0 = 1.0 * 8.0 + 10.0 (cached_blocks: 2)
        Formula for worker_2: 10.0 = 1.0 * 5.0 + 5.0 (cached_blocks: 5)
        Formula for worker_3: 11.0 = 1.0 * 2.0 + 9.0 (cached_blocks: 8)"#]]
    .assert_eq(&lines);
    let (worker, lines) = example_a(|c| c.router_prefill_load_scale = 2.0);
    assert_eq!(worker, 3);
    expect![[r#"
        Formula for worker_1: 26.0 = 2.0 * 8.0 + 10.0 (cached_blocks: 2)
        Formula for worker_2: 15.0 = 2.0 * 5.0 + 5.0 (cached_blocks: 5)
        Formula for worker_3: 13.0 = 2.0 * 2.0 + 9.0 (cached_blocks: 8)"#]]
    .assert_eq(&lines);
    let (worker, lines) = example_a(|c| c.router_kv_overlap_score_credit = 0.0);
    assert_eq!(worker, 2);
    expect![[r#"
        Formula for worker_1: 20.0 = 1.0 * 10.0 + 10.0 (cached_blocks: 2)
        Formula for worker_2: 15.0 = 1.0 * 10.0 + 5.0 (cached_blocks: 5)
        Formula for worker_3: 19.0 = 1.0 * 10.0 + 9.0 (cached_blocks: 8)"#]]
    .assert_eq(&lines);
}

/// What a choice gives up is told: the blocks that a candidate with more of the prompt holds beyond the chosen one.
#[test]
fn a_choice_says_what_overlap_it_gave_up() {
    let mut host = Host::kv(|_| {}).workers(3);
    let mut load = prompt(100, &words(3, 9));
    load.pin.worker = Some(WorkerId(3));
    let pinned = host.sent(load);
    assert_eq!((pinned.overlap_lost, pinned.best_cached_tokens), (0.0, 0));
    host.first_token(100);
    let mut asked = Arrival::new(RequestId(1), 160);
    asked.overlap = held(&[(1, 2), (2, 5), (3, 8)]);
    let sent = host.sent(asked.clone());
    assert_eq!(sent.target.worker, WorkerId(2));
    assert_eq!((sent.overlap_lost, sent.cached_tokens), (3.0, 80));
    assert_eq!(sent.best_cached_tokens, 128);
    // One that may not be chosen is no loss, and neither is any other to a request that names its worker.
    asked.id = RequestId(2);
    asked.constraints.allowed = Some([WorkerId(1), WorkerId(2)].into_iter().collect());
    let sent = host.sent(asked.clone());
    assert!(sent.best_cached_tokens <= 80, "{sent:?}");
    asked.id = RequestId(3);
    asked.constraints.allowed = None;
    asked.pin.worker = Some(WorkerId(1));
    let sent = host.sent(asked);
    assert_eq!((sent.overlap_lost, sent.best_cached_tokens), (0.0, 32));
    let received: Vec<_> = host.router.received().collect();
    assert_eq!(received, [("default", 4)]);
}

/// A prefix that another request is computing there is cached when this one comes to it; what the index says and what
/// requests under way add are told apart, and the cost goes by the index as ever.
#[test]
fn a_prefix_under_way_counts_in_the_prediction() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 10)));
    let mut longer = words(1, 10);
    longer.extend(words(2, 4));
    let mut second = prompt(2, &longer);
    second.overlap = held(&[(1, 3)]);
    let sent = host.sent(second);
    assert_eq!((sent.cached_tokens, sent.predicted.total()), (48, 160));
    assert_eq!(
        (sent.predicted.indexed, sent.predicted.in_flight),
        (48, 112)
    );
    let decision = host.router.explain(RequestId(2)).unwrap();
    assert_eq!(decision.predicted, sent.predicted);
    let alone = host.sent(prompt(3, &words(3, 10)));
    assert_eq!(alone.predicted.total(), 0);
    let mut unshared = Host::kv(|c| c.router_assume_kv_reuse = false).workers(1);
    unshared.sent(prompt(1, &words(1, 10)));
    let sent = unshared.sent(prompt(2, &words(1, 10)));
    assert_eq!(sent.predicted.total(), 0);
}

/// Blocks of requests under way hold nothing else: what is cached beside them is at most what is left.
#[test]
fn a_full_rank_cannot_keep_what_its_requests_need() {
    let mut host = Host::kv(|_| {});
    host.join(1, |spec| spec.kv_total_blocks = Some(20));
    host.sent(prompt(1, &words(1, 14)));
    let mut second = prompt(2, &words(2, 10));
    second.overlap = held(&[(1, 9)]);
    let sent = host.sent(second);
    assert_eq!((sent.cached_tokens, sent.predicted.total()), (144, 96));
    assert_eq!(sent.predicted.evicted, 48);
}

#[test]
fn with_a_scale_of_0_only_decode_counts() {
    let (worker, lines) = example_a(|c| c.router_prefill_load_scale = 0.0);
    assert_eq!(worker, 2);
    expect![[r#"
        Formula for worker_1: 10.0 = 0.0 * 8.0 + 10.0 (cached_blocks: 2)
        Formula for worker_2: 5.0 = 0.0 * 5.0 + 5.0 (cached_blocks: 5)
        Formula for worker_3: 9.0 = 0.0 * 2.0 + 9.0 (cached_blocks: 8)"#]]
    .assert_eq(&lines);
}

#[test]
fn a_booking_is_charged_until_the_first_token_and_gone_after_the_end() {
    let mut host = Host::kv(|_| {}).workers(1);
    let mut asked = prompt(1, &words(1, 10));
    asked.overlap = held(&[(1, 4)]);
    let sent = host.sent(asked);
    assert_eq!(
        (sent.overlap_blocks, sent.cached_tokens, sent.booked),
        (4, 64, true)
    );
    assert_eq!(host.load(1), (96, 10));
    host.first_token(1);
    assert_eq!(host.load(1), (0, 10));
    host.first_token(1);
    host.finish(1);
    assert_eq!(host.load(1), (0, 0));
    host.finish(1);
    assert!(host.router.is_idle());
}

#[test]
fn ties_are_drawn_and_the_record_says_so() {
    let mut host = Host::kv(|_| {}).workers(4);
    let mut seen = std::collections::BTreeSet::new();
    for id in 0..64 {
        seen.insert(host.worker(Arrival::new(RequestId(id), 16)));
        let decision = host.router.explain(RequestId(id)).unwrap();
        assert!(matches!(
            decision.winner,
            Some((_, Reason::Tie { among: 4 }))
        ));
        host.finish(id);
    }
    assert_eq!(seen.len(), 4, "64 draws among 4 equal workers reach all");
}

/// A policy of the caller's own: always the highest rank, held while anything runs there.
#[derive(Debug, Default)]
struct Last {
    prefilled: u32,
    ended: Vec<u32>,
}

impl kvasir_router::Policy for Last {
    fn choose(
        &mut self,
        _: &mut kvasir_placement::FleetView<'_>,
        _: &kvasir_placement::PlacementRequest<'_>,
        eligible: &kvasir_placement::SlotSet,
        _: &mut kvasir_types::Rng,
        _: &mut Vec<kvasir_router::Candidate>,
    ) -> Option<(u32, kvasir_placement::WinReason)> {
        let last = eligible.iter().last()?;
        Some((last, kvasir_placement::WinReason::Rule))
    }

    fn is_open(
        &self,
        view: &kvasir_placement::FleetView<'_>,
        _: &kvasir_placement::PlacementRequest<'_>,
        slot: u32,
    ) -> bool {
        view.ledger.requests(slot) == 0
    }

    fn urgency(&self, hold: &kvasir_placement::WaitingRequest) -> f64 {
        f64::from(hold.isl_tokens)
    }

    fn weighs_load(&self) -> bool {
        true
    }

    fn observe(&mut self, feedback: &kvasir_placement::Feedback) {
        match feedback {
            kvasir_placement::Feedback::FirstToken(_) => self.prefilled += 1,
            kvasir_placement::Feedback::Ended { output_tokens, .. } => {
                self.ended.push(*output_tokens);
                assert!(self.prefilled as usize >= self.ended.len());
            }
        }
    }
}

#[test]
fn a_policy_of_ones_own_chooses_holds_orders_and_hears() {
    let config = RouterConfig {
        router_mode: RouterMode::Kv,
        ..RouterConfig::default()
    };
    let mut host = Host {
        router: Router::with_policy(config, Box::new(Last::default())),
        now: Time::ZERO,
        out: Vec::new(),
    }
    .workers(1);
    assert_eq!(host.worker(Arrival::new(RequestId(1), 16)), 1);
    for (id, tokens) in [(2, 10), (3, 30)] {
        host.arrive(Arrival::new(RequestId(id), tokens));
    }
    assert_eq!(host.router.queued().0, 2, "held because the policy says so");
    for (end, next) in [(1, [3]), (3, [2])] {
        host.first_token(end);
        host.finish(end);
        assert_eq!(host.released(), next, "the longest prompt goes first");
    }
}

/// What is said to have decided is the term that differs most between the winner and the next.
#[test]
fn the_term_that_decided_is_named() {
    use kvasir_router::DecidingTerm;
    let decided = |host: &Host, id| host.router.explain(RequestId(id)).unwrap().deciding_term();
    let mut host = Host::kv(|config| config.router_temperature = 0.0).workers(2);
    let mut cached = prompt(1, &words(1, 10));
    cached.overlap = held(&[(2, 10)]);
    assert_eq!(host.worker(cached), 2);
    assert_eq!(decided(&host, 1), Some(DecidingTerm::Cache));
    // Nobody holds it: the prompt that waits on 2 decides, and what runs there once that has been computed.
    assert_eq!(host.worker(prompt(2, &words(50, 4))), 1);
    assert_eq!(decided(&host, 2), Some(DecidingTerm::Decode));
    let mut alone = Host::kv(|_| {}).workers(1);
    alone.sent(prompt(1, &words(1, 10)));
    assert_eq!(decided(&alone, 1), None, "there was no other");
    let mut equal = Host::kv(|_| {}).workers(2);
    equal.sent(prompt(1, &words(1, 10)));
    assert_eq!(decided(&equal, 1), None, "drawn among equals");
}

/// The record of one decision with every part of it, as `why` prints it.
#[test]
fn the_record_is_compact_and_complete() {
    let mut host = Host::kv(|_| {}).workers(20);
    let mut asked = prompt(1, &words(1, 10));
    asked.overlap = held(&[(7, 10)]);
    asked.constraints.allowed = Some((1..=15).map(WorkerId).collect());
    host.sent(asked);
    let decision = host.router.explain(RequestId(1)).unwrap();
    assert_eq!((decision.eligible, decision.excluded.count), (15, 5));
    assert_eq!(
        decision.candidates.len(),
        kvasir_router::Decision::CANDIDATES_MAX
    );
    assert_eq!(decision.chosen().unwrap().rank.worker, WorkerId(7));
    assert_ne!(decision.runner_up().unwrap().rank.worker, WorkerId(7));
    assert_eq!((decision.isl_tokens, decision.request_blocks), (160, 10));
    let bytes = size_of_val(decision)
        + size_of_val(&decision.candidates[..])
        + size_of_val(&decision.excluded.named[..]);
    assert!(bytes <= 1952, "{bytes} bytes");
    let mut refused = prompt(2, &words(1, 10));
    refused.constraints.allowed = Some(vec![]);
    host.refused(refused);
    let decision = host.router.explain(RequestId(2)).unwrap();
    assert_eq!(decision.winner, None);
    assert!(matches!(
        decision.error,
        Some(RouteError::NoEndpoints { .. })
    ));
}

/// More ties than are kept: the winner is in the record whichever was drawn.
#[test]
fn the_winner_is_always_in_the_record() {
    let mut host = Host::kv(|_| {}).workers(30);
    for id in 0..50 {
        let target = host.sent(Arrival::new(RequestId(id), 16)).target;
        let decision = host.router.explain(RequestId(id)).unwrap();
        assert_eq!(decision.chosen().unwrap().rank, target);
        host.finish(id);
    }
}

#[cfg(feature = "serde")]
#[test]
fn the_record_is_serialisable() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 2)));
    let decision = host.router.explain(RequestId(1)).unwrap();
    let text = serde_json::to_string(decision).unwrap();
    expect![[r#"{"id":"00000000-0000-0000-0000-000000000001","failed_before":0,"resumed":false,"at":0,"queued":{"secs":0,"nanos":0},"mode":"kv","isl_tokens":32,"request_blocks":2,"prefill_load_scale":1.0,"temperature":0.0,"eligible":1,"candidates":[{"rank":{"worker":1,"rank":0},"terms":{"raw_prefill_blocks":2.0,"credit_blocks":0.0,"shared_blocks":0.0,"prefill_blocks":2.0,"decode_blocks":2.0,"request_cost":0.0,"taint_factor":1.0,"cached_blocks":0.0,"cost":4.0}}],"excluded":{"count":0,"named":[]},"predicted":{"indexed":0,"in_flight":0,"evicted":0},"winner":[{"worker":1,"rank":0},"lowest_cost"],"error":null}"#]].assert_eq(&text);
}
