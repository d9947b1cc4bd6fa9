//! A log that routers read and shorten: nothing is lost, whoever dies when.

use kvasir_host::LogStep;
use kvasir_types::WorkerId;

use crate::rig::{Router, RouterSetup, ServerProcess, THRESHOLD, Worker};

/// A router that dies after any of its steps leaves the others all that they need: who starts next knows what the worker holds, takes a snapshot,
/// and who starts after that one knows it, too.
#[test]
fn a_router_that_dies_after_any_step_loses_nothing() {
    let (Some(nats), Some(etcd)) = (ServerProcess::nats(), ServerProcess::etcd()) else {
        return;
    };
    let setup = RouterSetup {
        nats: nats.port,
        etcd: Some(etcd.port),
        ..RouterSetup::default()
    };
    let dies_after = |step: LogStep| {
        let component = format!("dies-after-{step:?}");
        let mut worker = Worker::new(setup.nats, 1 + step as u64, &component);
        worker.work(THRESHOLD + 3);
        if step == LogStep::ConsumerRemoved {
            leave_consumer(setup, &component, &worker);
        }
        let is_reset = matches!(step, LogStep::ResetStream | LogStep::ResetSnapshots);
        let dying = RouterSetup {
            stop_at: Some(step),
            reset: is_reset,
            ..setup
        };
        let first = Router::start(dying, &component, &[&worker]);
        first.until_stopped();
        worker.work(2);
        first.crash();
        worker.work(2);
        let second = Router::start(setup, &component, &[&worker]);
        if is_reset {
            // What was there before was to be forgotten: less is known than there is, and no more.
            worker.restart();
            worker.change();
        }
        second.until_knows(&worker);
        worker.work(THRESHOLD + 3);
        second.until_knows(&worker);
        second.until_seen(LogStep::Purged);
        second.until(
            || worker.messages() <= THRESHOLD,
            || format!("{} messages", worker.messages()),
        );
        worker.work(3);
        second.crash();
        let third = Router::start(setup, &component, &[&worker]);
        third.until_knows(&worker);
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = LogStep::ALL
            .into_iter()
            .map(|step| (step, scope.spawn(move || dies_after(step))))
            .collect();
        for (step, running) in running {
            assert!(running.join().is_ok(), "after {step:?}");
        }
    });
}

/// A consumer of a router that is gone.
fn leave_consumer(setup: RouterSetup, component: &str, worker: &Worker) {
    let ghost = Router::start(setup, component, &[worker]);
    ghost.until_knows(worker);
    ghost.crash();
}

/// Messages that somebody takes away are missing for nobody who has read them, nor for who starts later.
#[test]
fn a_stream_that_is_purged_under_routers_costs_them_nothing() {
    let Some(nats) = ServerProcess::nats() else {
        return;
    };
    let setup = RouterSetup {
        nats: nats.port,
        ..RouterSetup::default()
    };
    let component = "purged";
    let mut worker = Worker::new(nats.port, 7, component);
    worker.work(5);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    router.forget_steps();
    let (jetstream, stream) = (worker.jetstream.clone(), worker.names.stream.clone());
    worker.block_on(async {
        jetstream.purge_stream(&stream, None).await.unwrap();
    });
    worker.work(2);
    router.until_knows(&worker);
    router.until_seen(LogStep::Published);
    let late = Router::start(setup, component, &[&worker]);
    late.until_knows(&worker);
    late.crash();
}

/// What the stream no longer holds and no snapshot tells is not known; nothing is known that is not there.
#[test]
fn what_nobody_read_before_it_was_purged_is_not_invented() {
    let Some(nats) = ServerProcess::nats() else {
        return;
    };
    let setup = RouterSetup {
        nats: nats.port,
        ..RouterSetup::default()
    };
    let component = "unread";
    let mut worker = Worker::new(nats.port, 7, component);
    worker.work(5);
    let (jetstream, stream) = (worker.jetstream.clone(), worker.names.stream.clone());
    worker.block_on(async { jetstream.purge_stream(&stream, None).await.unwrap() });
    let before = worker.truth();
    // Numbers 6 to 8: the last of them takes back what 7 stored.
    worker.work(2);
    let router = Router::start(setup, component, &[&worker]);
    let since: crate::rig::Blocks = worker.truth().difference(&before).copied().collect();
    router.until(
        || router.knows(worker.rank) == since,
        || format!("{:?}, not {since:?}", router.knows(worker.rank)),
    );
    // An engine that begins anew is known from its first event on.
    worker.restart();
    worker.work(2);
    router.until_knows(&worker);
}

/// Several routers and workers that come and go: one snapshot for all, and dead workers leave it.
#[test]
fn routers_agree_and_workers_that_left_are_forgotten() {
    let (Some(nats), Some(etcd)) = (ServerProcess::nats(), ServerProcess::etcd()) else {
        return;
    };
    let setup = RouterSetup {
        nats: nats.port,
        etcd: Some(etcd.port),
        ..RouterSetup::default()
    };
    let component = "several";
    let mut workers = [
        Worker::new(nats.port, 1, component),
        Worker::new(nats.port, 2, component),
    ];
    let routers: Vec<Router> = (0..2)
        .map(|_| Router::start(setup, component, &[&workers[0]]))
        .collect();
    workers[0].work(THRESHOLD + 3);
    workers[1].work(3);
    // The second worker is found late: what it wrote before counts.
    for router in &routers {
        router.add(&workers[1], component);
        workers.iter().for_each(|worker| router.until_knows(worker));
    }
    workers[0].work(THRESHOLD + 3);
    let messages = || workers[0].messages();
    routers[0].until(
        || messages() <= THRESHOLD,
        || format!("{} messages", messages()),
    );
    let late = Router::start(setup, component, &[&workers[0], &workers[1]]);
    for router in routers.iter().chain([&late]) {
        workers.iter().for_each(|worker| router.until_knows(worker));
    }
    late.remove(WorkerId(2));
    late.until(
        || late.knows(workers[1].rank).is_empty(),
        || "still known".to_owned(),
    );
    late.until_knows(&workers[0]);
}

/// The server goes away and comes back: what was written meanwhile waits, and arrives once.
#[test]
fn nats_that_comes_back_brings_what_was_written_meanwhile() {
    let Some(mut nats) = ServerProcess::nats() else {
        return;
    };
    let setup = RouterSetup {
        nats: nats.port,
        ..RouterSetup::default()
    };
    let component = "outage";
    let mut worker = Worker::new(nats.port, 7, component);
    worker.work(3);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    nats.kill();
    (0..40).for_each(|_| worker.change());
    nats.run();
    router.until_knows(&worker);
    worker.work(2);
    router.until_knows(&worker);
}
