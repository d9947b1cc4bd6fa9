//! Cost, booking and choice in kv mode.

use super::*;
use expect_test::expect;
use kvasir_router::Reason;

/// The seeds' example: a 10-block prompt; decode loads 10, 5, 9; overlaps 2, 5, 8.
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
