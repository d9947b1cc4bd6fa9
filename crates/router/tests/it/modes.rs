//! The modes that do not look at caches.

use super::*;

fn host(mode: RouterMode, workers: u64) -> Host {
    Host::new(RouterConfig {
        router_mode: mode,
        ..RouterConfig::default()
    })
    .workers(workers)
}

fn run(host: &mut Host, ids: std::ops::Range<u128>) -> Vec<u64> {
    ids.map(|id| host.worker(Arrival::new(RequestId(id), 16)))
        .collect()
}

#[test]
fn round_robin_takes_each_free_worker_in_turn() {
    let mut host = host(RouterMode::RoundRobin, 3);
    assert_eq!(run(&mut host, 0..7), [1, 2, 3, 1, 2, 3, 1]);
    host.input(Input::Left(WorkerId(2)));
    assert_eq!(run(&mut host, 7..11), [3, 1, 3, 1]);
    assert_eq!(
        RouterConfig::default().router_mode,
        RouterMode::RoundRobin,
        "the default"
    );
}

#[test]
fn random_reaches_all_about_equally() {
    let mut host = host(RouterMode::Random, 4);
    let mut counts = [0; 5];
    for worker in run(&mut host, 0..4000) {
        counts[worker as usize] += 1;
    }
    assert!(
        counts[1..].iter().all(|c| (900..1100).contains(c)),
        "{counts:?}"
    );
}

#[test]
fn direct_needs_a_worker_id() {
    let mut host = host(RouterMode::Direct, 3);
    assert_eq!(
        host.refused(Arrival::new(RequestId(1), 16)),
        RouteError::WorkerIdMissing
    );
    let mut named = Arrival::new(RequestId(1), 16);
    named.pin.worker = Some(WorkerId(3));
    assert_eq!(host.worker(named), 3);
}

#[test]
fn least_loaded_counts_requests_from_dispatch_to_end() {
    let mut host = host(RouterMode::LeastLoaded, 3);
    let mut first = run(&mut host, 0..3);
    first.sort_unstable();
    assert_eq!(first, [1, 2, 3]);
    let mut pin = Arrival::new(RequestId(10), 16);
    pin.pin.worker = Some(WorkerId(1));
    host.sent(pin);
    for id in 20..24 {
        assert_ne!(host.worker(Arrival::new(RequestId(id), 16)), 1);
        host.finish(id);
    }
    host.first_token(10);
    assert_ne!(
        host.worker(Arrival::new(RequestId(30), 16)),
        1,
        "a first token is not the end"
    );
}

#[test]
fn least_loaded_draws_among_equals() {
    let mut host = host(RouterMode::LeastLoaded, 4);
    let mut seen = std::collections::BTreeSet::new();
    for id in 0..64 {
        seen.insert(host.worker(Arrival::new(RequestId(id), 16)));
        host.finish(id);
    }
    assert_eq!(seen.len(), 4);
}

/// With one worker far more loaded than the rest, power of two takes it only if it is drawn twice over.
#[test]
fn power_of_two_takes_the_less_loaded_of_two() {
    let mut host = host(RouterMode::PowerOfTwo, 3);
    for id in 0..50 {
        let mut pin = Arrival::new(RequestId(id), 16);
        pin.pin.worker = Some(WorkerId(2));
        host.sent(pin);
    }
    for id in 100..140 {
        assert_ne!(host.worker(Arrival::new(RequestId(id), 16)), 2);
    }
    let mut alone = host_with(RouterMode::PowerOfTwo);
    assert_eq!(run(&mut alone, 0..3), [1, 1, 1]);
}

fn host_with(mode: RouterMode) -> Host {
    host(mode, 1)
}

/// 2 accelerators, 2 processors, ratio 4: a processor is taken only while its group has fewer requests than
/// `floor(accelerators' * 2 / (4 * 2))`.
#[test]
fn device_aware_fills_accelerators_first_and_then_in_proportion() {
    let mut host = Host::new(RouterConfig {
        router_mode: RouterMode::DeviceAwareWeighted,
        encoder_cuda_to_cpu_ratio: 4,
        ..RouterConfig::default()
    });
    for worker in [1, 2] {
        host.join(worker, |_| {});
    }
    for worker in [3, 4] {
        host.join(worker, |spec| spec.device = kvasir_types::Device::Cpu);
    }
    let cpu: Vec<bool> = run(&mut host, 0..15).into_iter().map(|w| w > 2).collect();
    let taken: Vec<usize> = (0..15).filter(|i| cpu[*i]).collect();
    assert_eq!(
        taken,
        [4, 9, 14],
        "one processor request per four on accelerators"
    );
    let mut whole = Arrival::new(RequestId(99), 32);
    whole.overlap = held(&[(3, 2)]);
    assert_eq!(host.worker(whole), 3, "a full cache hit goes where it is");
}

#[test]
fn one_kind_of_device_is_least_loaded() {
    let mut host = host(RouterMode::DeviceAwareWeighted, 2);
    let mut two = run(&mut host, 0..2);
    two.sort_unstable();
    assert_eq!(two, [1, 2]);
}

#[test]
fn simple_modes_book_load_without_names_and_record_nothing() {
    for mode in [
        RouterMode::RoundRobin,
        RouterMode::Random,
        RouterMode::LeastLoaded,
        RouterMode::PowerOfTwo,
    ] {
        let mut host = host(mode, 1);
        let sent = host.sent(prompt(1, &words(1, 4)));
        assert!(sent.booked && !sent.record);
        assert_eq!(host.load(1), (64, 4));
        assert_eq!(host.router.booked(), 1);
        host.finish(1);
        assert!(host.router.is_idle());
    }
}

/// The settings of `--load-aware`.
#[test]
fn without_credit_only_load_counts() {
    let config = RouterConfig {
        router_mode: RouterMode::Kv,
        router_kv_overlap_score_credit: 0.0,
        router_kv_events: false,
        router_assume_kv_reuse: false,
        ..RouterConfig::default()
    };
    assert!(!config.needs_index() && !config.records_decisions());
    let mut host = Host::new(config).workers(2);
    let mut warm = prompt(1, &words(1, 8));
    warm.overlap = held(&[(1, 8)]);
    let first = host.worker(warm.clone());
    warm.id = RequestId(2);
    assert_ne!(host.worker(warm), first, "only load counts");
}

/// Workers join in the order in which they answer; the same seed draws the same ones nevertheless.
#[test]
fn the_order_of_joining_does_not_change_what_a_seed_draws() {
    for mode in [
        RouterMode::RoundRobin,
        RouterMode::Random,
        RouterMode::PowerOfTwo,
        RouterMode::LeastLoaded,
        RouterMode::Kv,
    ] {
        let drawn = |order: [u64; 5]| {
            let mut host = host(mode, 0);
            for id in order {
                host.join(id, |spec| spec.ranks = 1 + (id % 2) as u32);
                host.input(Input::Load(kvasir_router::LoadReport {
                    rank: WorkerRank::new(id, 0),
                    kv_used_blocks: Some(id),
                    ..kvasir_router::LoadReport::default()
                }));
            }
            let targets = (0..40).map(|id| host.sent(Arrival::new(RequestId(id), 16)).target);
            targets.collect::<Vec<_>>()
        };
        let first = drawn([1, 2, 3, 4, 5]);
        assert_eq!(drawn([5, 3, 1, 2, 4]), first, "{mode:?}");
        assert_eq!(drawn([2, 1, 5, 4, 3]), first, "{mode:?}");
    }
}
