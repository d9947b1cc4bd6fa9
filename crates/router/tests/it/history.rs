//! Random histories through the router and the naive model: same choices, same refusals, same order out of
//! the queue, same ledger after every step; nothing lost, nothing served twice, nothing left at the end.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::model::{BLOCK, Model};
use super::*;
use kvasir_router::{LoadReport, Probe, QueuePolicy, RankOverlap, ThresholdUpdate, TokenProbe};
use kvasir_types::DpRank;

/// One thing that happens. Small numbers, so that ids, workers and prompts meet often.
#[derive(Clone, Debug)]
enum Op {
    Join {
        worker: u64,
        ranks: u32,
        batch: Option<u64>,
        total: Option<u64>,
        taint: bool,
        update: bool,
    },
    Leave {
        worker: u64,
    },
    Arrive(Box<Ask>),
    First {
        id: u128,
    },
    Tokens {
        id: u128,
        generated: u32,
    },
    Finish {
        id: u128,
        on: u8,
        outcome: u8,
    },
    Load {
        worker: u64,
        rank: u32,
        used: u64,
    },
    Thresholds {
        decode: Option<Option<u8>>,
        prefill: Option<Option<u64>>,
    },
    Probe {
        worker: u64,
        /// How long ago it was sent.
        ago: u64,
        healthy: bool,
    },
    Generated {
        worker: u64,
        ago: u64,
        supported: bool,
    },
    Tick,
    Later {
        millis: u64,
    },
}

#[derive(Clone, Debug)]
struct Ask {
    id: u128,
    words: Vec<u64>,
    tail: u32,
    overlap: Vec<(u64, u32, u32)>,
    pin: Option<(u64, Option<u32>)>,
    allowed: Option<Vec<u64>>,
    taint: bool,
    priority: i32,
    strict: u32,
    osl: Option<u32>,
    failed: Vec<u64>,
    again: bool,
    own_reuse: Option<bool>,
}

fn ask() -> impl Strategy<Value = Ask> {
    let shape = (0..24u128, prop::collection::vec(0..3u64, 0..6), 0..BLOCK);
    let found = prop::collection::vec((1..5u64, 0..6u32, 0..3u32), 0..4);
    let pin = prop::option::weighted(0.2, (1..5u64, prop::option::of(0..3u32)));
    let allowed = prop::option::weighted(0.2, prop::collection::vec(1..5u64, 0..3));
    let hints = (-1..4i32, 0..2u32, prop::option::of(0..60u32));
    let failed = (prop::collection::vec(1..5u64, 0..2), any::<bool>());
    let rest = (
        prop::bool::weighted(0.1),
        prop::option::weighted(0.2, any::<bool>()),
    );
    (shape, found, pin, allowed, hints, failed, rest).prop_map(
        |(
            (id, words, tail),
            overlap,
            pin,
            allowed,
            (priority, strict, osl),
            (failed, again),
            (taint, own_reuse),
        )| Ask {
            id,
            words,
            tail,
            overlap,
            pin,
            allowed,
            taint,
            priority,
            strict,
            osl,
            failed,
            again,
            own_reuse,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let join = (
        1..5u64,
        1..3u32,
        prop::option::of(20..60u64),
        prop::option::of(5..20u64),
        any::<bool>(),
        any::<bool>(),
    );
    prop_oneof![
        3 => join.prop_map(|(worker, ranks, batch, total, taint, update)| Op::Join { worker, ranks, batch, total, taint, update }),
        1 => (1..5u64).prop_map(|worker| Op::Leave { worker }),
        12 => ask().prop_map(|ask| Op::Arrive(Box::new(ask))),
        6 => (0..26u128).prop_map(|id| Op::First { id }),
        4 => (0..26u128, 0..60u32).prop_map(|(id, generated)| Op::Tokens { id, generated }),
        8 => (0..26u128, 0..3u8, 0..6u8).prop_map(|(id, on, outcome)| Op::Finish { id, on, outcome }),
        2 => (1..5u64, 0..3u32, 0..25u64).prop_map(|(worker, rank, used)| Op::Load { worker, rank, used }),
        1 => (prop::option::of(prop::option::of(0..10u8)), prop::option::of(prop::option::of(0..200u64)))
            .prop_map(|(decode, prefill)| Op::Thresholds { decode, prefill }),
        2 => (1..5u64, 0..300u64, any::<bool>()).prop_map(|(worker, ago, healthy)| Op::Probe { worker, ago, healthy }),
        2 => (1..5u64, 0..300u64, any::<bool>()).prop_map(|(worker, ago, supported)| Op::Generated { worker, ago, supported }),
        1 => Just(Op::Tick),
        3 => (0..400u64).prop_map(|millis| Op::Later { millis }),
        3 => (0..6000u64).prop_map(|millis| Op::Later { millis }),
    ]
}

fn config() -> impl Strategy<Value = RouterConfig> {
    let queue = (
        prop::option::weighted(0.8, prop_oneof![Just(0.5), Just(1.0), Just(2.0)]),
        prop_oneof![
            Just(QueuePolicy::Fcfs),
            Just(QueuePolicy::Lcfs),
            Just(QueuePolicy::Wspt)
        ],
        prop_oneof![Just(3u32), Just(100)],
        prop_oneof![Just(4.0), Just(600.0)],
    );
    let track = (
        any::<bool>(),
        any::<bool>(),
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.8),
    );
    let cost = (
        prop_oneof![Just(0.0), Just(1.0), Just(2.0)],
        prop_oneof![3 => Just(0.0), 1 => Just(0.8)],
    );
    let busy = (prop::option::of(0.2..0.9f64), prop::option::of(0..150u64));
    (queue, track, cost, busy, any::<u64>()).prop_map(|(queue, track, cost, busy, seed)| {
        RouterConfig {
            router_mode: RouterMode::Kv,
            kv_cache_block_size: BLOCK,
            router_queue_threshold: queue.0,
            router_queue_policy: queue.1,
            router_queue_max_requests: queue.2,
            router_queue_max_wait_secs: queue.3,
            router_overlap_refresh_after_secs: 0.0,
            router_assume_kv_reuse: track.0,
            router_track_output_blocks: track.1,
            router_track_active_blocks: track.2,
            router_track_prefill_tokens: track.3,
            router_prefill_load_scale: cost.0,
            router_temperature: cost.1,
            active_decode_blocks_threshold: busy.0,
            active_prefill_tokens_threshold: busy.1,
            router_active_request_expiry_secs: 20.0,
            router_seed: seed,
            ..RouterConfig::default()
        }
    })
}

fn arrival(ask: &Ask) -> Arrival {
    let mut arrival = prompt(ask.id, &ask.words);
    arrival.isl_tokens += ask.tail;
    let mut seen = std::collections::BTreeSet::new();
    let found = ask
        .overlap
        .iter()
        .filter(|(worker, ..)| seen.insert(*worker));
    arrival.overlap.ranks = found
        .map(|&(worker, device, host)| RankOverlap {
            rank: WorkerRank::new(worker, 0),
            device: f64::from(device.min(arrival.isl_tokens / BLOCK)),
            host,
            disk: 0,
        })
        .collect();
    if let Some((worker, rank)) = ask.pin {
        arrival.pin.worker = Some(WorkerId(worker));
        arrival.pin.rank = rank.map(DpRank);
    }
    let workers = |ids: &[u64]| ids.iter().map(|id| WorkerId(*id)).collect();
    arrival.constraints.allowed = ask.allowed.as_deref().map(workers);
    if ask.taint {
        arrival.constraints.required_taints = vec![Arc::from("t")];
    }
    arrival.hints.priority = Some(ask.priority);
    arrival.hints.strict_priority = ask.strict;
    arrival.hints.osl = ask.osl;
    arrival.failed = workers(&ask.failed);
    arrival.again = ask.again;
    arrival.overrides.assume_kv_reuse = ask.own_reuse;
    arrival
}

fn input(op: &Op, now: Time, targets: &BTreeMap<RequestId, WorkerRank>) -> Input {
    let outcome = |n: u8| match n {
        0 => Outcome::Cancelled,
        1 => Outcome::Unreachable,
        2 => Outcome::Overloaded,
        3 => Outcome::Failed,
        4 => Outcome::Broken,
        5 => Outcome::NotSent,
        _ => Outcome::Completed { output_tokens: 3 },
    };
    match op {
        Op::Join {
            worker,
            ranks,
            batch,
            total,
            taint,
            update,
        } => {
            let mut spec = WorkerSpec::new(WorkerId(*worker));
            spec.ranks = *ranks;
            spec.max_num_batched_tokens = *batch;
            spec.kv_total_blocks = *total;
            spec.taints = taint.then(|| Arc::from("t")).into_iter().collect();
            match update {
                true => Input::Updated(spec),
                false => Input::Joined(spec),
            }
        }
        Op::Leave { worker } => Input::Left(WorkerId(*worker)),
        Op::Arrive(ask) => Input::Arrived(Box::new(arrival(ask))),
        Op::First { id } => Input::FirstToken { id: RequestId(*id) },
        Op::Tokens { id, generated } => Input::Tokens {
            id: RequestId(*id),
            generated: *generated,
        },
        Op::Finish {
            id,
            on,
            outcome: how,
        } => {
            let id = RequestId(*id);
            let on = match on {
                0 => None,
                1 => targets.get(&id).copied(),
                _ => Some(WorkerRank::new(4, 1)),
            };
            Input::Finished {
                id,
                on,
                outcome: outcome(*how),
            }
        }
        Op::Load { worker, rank, used } => Input::Load(LoadReport {
            rank: WorkerRank::new(*worker, *rank),
            kv_used_blocks: Some(*used),
            ..LoadReport::default()
        }),
        Op::Thresholds { decode, prefill } => Input::Thresholds(ThresholdUpdate {
            active_decode_blocks: decode.map(|d| d.map(|d| f64::from(d) / 10.0)),
            active_prefill_tokens: *prefill,
            active_prefill_tokens_frac: None,
        }),
        Op::Probe {
            worker,
            ago,
            healthy,
        } => {
            let ago = std::time::Duration::from_millis(*ago);
            Input::Probed(Probe {
                worker: WorkerId(*worker),
                asked: Time::ZERO + (now - Time::ZERO).saturating_sub(ago),
                healthy: *healthy,
            })
        }
        Op::Generated {
            worker,
            ago,
            supported,
        } => {
            let ago = std::time::Duration::from_millis(*ago);
            Input::Generated(TokenProbe {
                worker: WorkerId(*worker),
                asked: Time::ZERO + (now - Time::ZERO).saturating_sub(ago),
                supported: *supported,
            })
        }
        Op::Tick | Op::Later { .. } => Input::Tick,
    }
}

/// One history; returns everything the router said, for the comparison of two runs.
fn run(config: &RouterConfig, ops: &[Op]) -> String {
    let mut host = Host::new(config.clone());
    let mut model = Model::new(config.clone());
    let mut targets = BTreeMap::new();
    let mut log = String::new();
    for op in ops {
        if let Op::Later { millis } = op {
            host.now += std::time::Duration::from_millis(*millis);
        }
        let input = input(op, host.now, &targets);
        step(&mut host, &mut model, &input, &mut targets, &mut log);
    }
    drain(&mut host, &mut model, &mut targets, &mut log);
    log
}

fn step(
    host: &mut Host,
    model: &mut Model,
    input: &Input,
    targets: &mut BTreeMap<RequestId, WorkerRank>,
    log: &mut String,
) {
    host.input(input.clone());
    for said in &host.out {
        *log += &format!("{:?} {said:?}\n", host.now);
        if let Output::Send(sent) = said {
            targets.insert(sent.id, sent.target);
        }
    }
    let marks = host.router.fleet().members();
    let marks = marks.filter_map(|m| Some((m.spec.id, m.ejected_until()?)));
    model.step(host.now, input, &host.out, marks.collect());
    assert_eq!(host.router.queued().0, model.waiting());
    assert_eq!(host.router.booked(), model.booked().len());
    for rank in model.ranks() {
        let load = host.router.load(rank).unwrap();
        let expected = (
            model.prefill(rank),
            model.active_blocks(rank),
            model.requests(rank),
        );
        assert_eq!(
            (load.prefill_tokens, load.active_blocks, load.requests),
            expected,
            "{rank}"
        );
        let member = host.router.fleet().member(rank.worker).unwrap();
        assert_eq!(member.is_busy(), model.is_busy(rank.worker), "{rank} busy");
    }
}

/// Ends every request, whoever that lets go, until nothing runs and nobody waits.
fn drain(
    host: &mut Host,
    model: &mut Model,
    targets: &mut BTreeMap<RequestId, WorkerRank>,
    log: &mut String,
) {
    for _ in 0..200 {
        let Some(id) = model.booked().first().copied() else {
            break;
        };
        let outcome = Outcome::Completed { output_tokens: 1 };
        let end = Input::Finished {
            id,
            on: None,
            outcome,
        };
        step(host, model, &end, targets, log);
    }
    assert_eq!(
        host.router.queued().0,
        0,
        "with nothing running nobody has a reason to wait"
    );
    assert!(host.router.is_idle());
}

fn settings(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 4000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(settings(400, 4))]

    /// The router says what the model says it must, and its books are the model's after every step.
    #[test]
    fn the_router_is_its_model(config in config(), ops in prop::collection::vec(op(), 1..120)) {
        run(&config, &ops);
    }
}

proptest! {
    #![proptest_config(settings(40, 5))]

    /// The same inputs give the same outputs, byte for byte.
    #[test]
    fn two_runs_are_one(config in config(), ops in prop::collection::vec(op(), 1..120)) {
        prop_assert_eq!(run(&config, &ops), run(&config, &ops));
    }
}
