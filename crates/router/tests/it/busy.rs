//! Busy thresholds: per rank, all ranks, live changes, in every mode.

use super::*;
use kvasir_router::{LoadReport, Observation, ThresholdUpdate};

fn report(worker: u64, rank: u32, used: u64) -> Input {
    Input::Load(LoadReport {
        rank: WorkerRank::new(worker, rank),
        kv_used_blocks: Some(used),
        ..LoadReport::default()
    })
}

fn busy(worker: u64, busy: bool) -> Output {
    let worker = WorkerId(worker);
    Output::Observe(Observation::Busy { worker, busy })
}

#[test]
fn a_worker_is_busy_only_when_all_its_ranks_are() {
    let mut host = Host::kv(|c| c.active_decode_blocks_threshold = Some(0.5));
    host.join(1, |spec| {
        (spec.ranks, spec.kv_total_blocks) = (2, Some(100))
    });
    assert_eq!(host.input(report(1, 0, 51)), []);
    assert_eq!(host.input(report(1, 1, 51)), [busy(1, true)]);
    assert_eq!(host.input(report(1, 1, 60)), [], "said once");
    assert_eq!(host.input(report(1, 0, 49)), [busy(1, false)]);
}

#[test]
fn bookings_alone_make_and_unmake_a_worker_busy() {
    let mut host = Host::kv(|c| c.active_prefill_tokens_threshold = Some(100)).workers(1);
    let out = host.arrive(Arrival::new(RequestId(1), 101));
    assert!(out.contains(&busy(1, true)), "{out:?}");
    let error = host.refused(Arrival::new(RequestId(2), 1));
    assert_eq!(
        error,
        RouteError::AllEligibleWorkersOverloaded {
            workers: 1,
            retry_after_ms: None
        }
    );
    assert_eq!(host.first_token(1), [busy(1, false)]);
    host.sent(Arrival::new(RequestId(2), 1));
}

#[test]
fn batches_of_prompt_tokens_are_a_threshold_too() {
    let mut host = Host::kv(|c| c.active_prefill_tokens_threshold_frac = Some(0.5));
    host.join(1, |spec| spec.max_num_batched_tokens = Some(200));
    host.join(2, |_| {});
    let mut pin = Arrival::new(RequestId(1), 101);
    pin.pin.worker = Some(WorkerId(1));
    host.sent(pin.clone());
    pin.id = RequestId(2);
    pin.pin.worker = Some(WorkerId(2));
    pin.isl_tokens = 1_000_000;
    host.sent(pin);
    assert!(host.router.fleet().member(WorkerId(1)).unwrap().is_busy());
    assert!(
        !host.router.fleet().member(WorkerId(2)).unwrap().is_busy(),
        "batch size unknown"
    );
}

#[test]
fn new_thresholds_wait_for_the_next_load_and_leave_the_others_alone() {
    let mut host = Host::kv(|c| c.active_prefill_tokens_threshold = Some(7)).workers(1);
    host.join(2, |spec| spec.kv_total_blocks = Some(100));
    host.input(report(2, 0, 90));
    let update = |share| {
        Input::Thresholds(ThresholdUpdate {
            active_decode_blocks: Some(share),
            ..ThresholdUpdate::default()
        })
    };
    assert_eq!(host.input(update(Some(0.8))), [], "not at once");
    assert_eq!(host.router.thresholds().active_prefill_tokens, Some(7));
    assert_eq!(
        host.input(report(1, 0, 0)),
        [busy(2, true)],
        "any load applies them to all"
    );
    assert_eq!(host.input(update(None)), []);
    assert_eq!(host.input(Input::Tick), [busy(2, false)]);
    assert_eq!(host.router.thresholds().active_decode_blocks, None);
}

#[test]
fn every_mode_leaves_busy_workers_out() {
    for mode in [
        RouterMode::RoundRobin,
        RouterMode::Random,
        RouterMode::PowerOfTwo,
        RouterMode::LeastLoaded,
        RouterMode::DeviceAwareWeighted,
        RouterMode::Kv,
    ] {
        let mut host = Host::new(RouterConfig {
            router_mode: mode,
            active_decode_blocks_threshold: Some(0.5),
            ..RouterConfig::default()
        });
        for worker in [1, 2] {
            host.join(worker, |spec| spec.kv_total_blocks = Some(100));
        }
        host.input(report(1, 0, 90));
        for id in 0..10 {
            assert_eq!(host.worker(Arrival::new(RequestId(id), 16)), 2, "{mode}");
        }
        host.input(report(2, 0, 90));
        let error = host.refused(Arrival::new(RequestId(99), 16));
        assert_eq!(
            error,
            RouteError::AllEligibleWorkersOverloaded {
                workers: 2,
                retry_after_ms: None
            },
            "{mode}"
        );
    }
}

#[test]
fn a_worker_that_comes_back_starts_without_its_old_reports() {
    let mut host = Host::kv(|c| c.active_decode_blocks_threshold = Some(0.5));
    let join = |host: &mut Host| host.join(1, |spec| spec.kv_total_blocks = Some(100));
    join(&mut host);
    host.input(report(1, 0, 90));
    host.input(Input::Left(WorkerId(1)));
    join(&mut host);
    assert!(!host.router.fleet().member(WorkerId(1)).unwrap().is_busy());
}

const WITHOUT_CACHES: [RouterMode; 4] = [
    RouterMode::RoundRobin,
    RouterMode::Random,
    RouterMode::LeastLoaded,
    RouterMode::PowerOfTwo,
];

#[test]
fn prefill_thresholds_work_in_the_modes_that_ignore_caches() {
    for mode in WITHOUT_CACHES {
        for by_batches in [false, true] {
            let mut host = Host::new(RouterConfig {
                router_mode: mode,
                active_prefill_tokens_threshold: (!by_batches).then_some(100),
                active_prefill_tokens_threshold_frac: by_batches.then_some(0.5),
                ..RouterConfig::default()
            });
            host.join(1, |spec| spec.max_num_batched_tokens = Some(200));
            host.sent(Arrival::new(RequestId(1), 101));
            assert_eq!(
                host.load(1),
                (101, 6),
                "{mode:?}: 101 tokens are 6 blocks and a part"
            );
            let error = host.refused(Arrival::new(RequestId(2), 1));
            assert_eq!(
                error,
                RouteError::AllEligibleWorkersOverloaded {
                    workers: 1,
                    retry_after_ms: None
                },
                "{mode:?}"
            );
            host.first_token(1);
            host.sent(Arrival::new(RequestId(2), 1));
            host.finish(1);
            host.finish(2);
            assert_eq!(host.load(1), (0, 0), "{mode:?}");
            assert!(host.router.is_idle());
        }
    }
}

/// Prompts that share their blocks are counted apart where blocks have no names; an engine that says how many are in
/// use is believed instead.
#[test]
fn an_engine_that_reports_its_blocks_outweighs_blocks_without_names() {
    let mut host = Host::new(RouterConfig {
        active_decode_blocks_threshold: Some(0.5),
        ..RouterConfig::default()
    });
    host.join(1, |spec| spec.kv_total_blocks = Some(100));
    host.input(report(1, 0, 10));
    for id in 0..20 {
        host.sent(Arrival::new(RequestId(id), 160));
    }
    assert_eq!(host.load(1).1, 200);
    host.input(report(1, 0, 51));
    host.refused(Arrival::new(RequestId(99), 160));
}

/// Three answers in one piece; the engine says that it lets one request wait.
#[test]
fn an_engines_own_queue_frees_the_prompts_of_answers_in_one_piece() {
    let mut host = Host::kv(|c| c.active_prefill_tokens_threshold = Some(10_000)).workers(1);
    for id in 1..=3 {
        let unary = Arrival {
            silent: true,
            ..Arrival::new(RequestId(id), 4000)
        };
        host.at(id as u64).sent(unary);
    }
    host.refused(Arrival::new(RequestId(4), 4000));
    let waiting = |waiting, asked| {
        Input::Load(LoadReport {
            rank: WorkerRank::new(1, 0),
            waiting: Some(waiting),
            asked: Time::from_millis(asked),
            ..LoadReport::default()
        })
    };
    host.at(500).input(waiting(0, 500));
    assert_eq!(host.load(1).0, 12_000, "they may be in the middle of it");
    host.at(1500).input(waiting(1, 1500));
    assert_eq!(host.load(1).0, 4000);
    host.sent(Arrival::new(RequestId(4), 4000));
    host.at(2500).input(waiting(0, 2500));
    assert_eq!(host.load(1).0, 4000, "a stream shows its own first token");
}
