//! A log that routers read and shorten: nothing is lost, whoever dies when.

use kvasir_host::LogStep;
use kvasir_types::WorkerId;

use crate::rig::{Router, RouterSetup, Servers, THRESHOLD, Worker};

/// A router that dies after any of its steps leaves the others all that they need: who starts next knows what the worker holds, takes a snapshot,
/// and who starts after that one knows it, too.
#[test]
fn a_router_that_dies_after_any_step_loses_nothing() {
    let Some(servers) = Servers::nats_and_etcd() else {
        return;
    };
    let setup = servers.setup();
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
    let Some(servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "purged";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(5);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    router.forget_steps();
    worker.purge_stream();
    worker.work(2);
    router.until_knows(&worker);
    router.until_seen(LogStep::Published);
    let late = Router::start(setup, component, &[&worker]);
    late.until_knows(&worker);
    late.crash();
}

/// A stream that somebody deletes is made anew, with the consumers of those that read it. They know on, and so does who starts later: what the new
/// stream does not tell is stored.
#[test]
fn a_stream_that_is_deleted_under_routers_costs_them_nothing() {
    let Some(servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "deleted";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(5);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    let other = Router::start(setup, component, &[&worker]);
    other.until_knows(&worker);
    // Once before any snapshot was stored, then with one of the stream that is gone.
    for _ in 0..2 {
        router.forget_steps();
        other.forget_steps();
        worker.delete_stream();
        router.until_seen(LogStep::ConsumerReady);
        other.until_seen(LogStep::ConsumerReady);
        router.until(
            || worker.has_snapshot(),
            || "none stored what it knows".to_owned(),
        );
        let late = Router::start(setup, component, &[&worker]);
        late.until_knows(&worker);
        late.crash();
        worker.work(4);
        router.until_knows(&worker);
        other.until_knows(&worker);
        let late = Router::start(setup, component, &[&worker]);
        late.until_knows(&worker);
        late.crash();
    }
}

/// A bucket that somebody deletes is made anew by who began with what was in it.
#[test]
fn a_bucket_that_is_deleted_under_a_router_is_filled_again() {
    let Some(servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "bucket";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(THRESHOLD + 3);
    let first = Router::start(setup, component, &[&worker]);
    first.until_seen(LogStep::Purged);
    first.crash();
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    worker.delete_bucket();
    router.until(
        || worker.has_snapshot(),
        || "what it knows is not stored".to_owned(),
    );
    let late = Router::start(setup, component, &[&worker]);
    late.until_knows(&worker);
}

/// A consumer that somebody deletes is made anew, and begins where the router was.
#[test]
fn a_consumer_that_is_deleted_is_made_anew() {
    let Some(servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "consumer";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(3);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    router.forget_steps();
    worker.delete_consumers();
    worker.work(4);
    router.until_seen(LogStep::ConsumerReady);
    router.until_knows(&worker);
}

/// What the stream no longer holds and no snapshot tells is not known; nothing is known that is not there.
#[test]
fn what_nobody_read_before_it_was_purged_is_not_invented() {
    let Some(servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "unread";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(5);
    worker.purge_stream();
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
    let Some(servers) = Servers::nats_and_etcd() else {
        return;
    };
    let setup = servers.setup();
    let component = "several";
    let mut workers = [
        Worker::new(setup.nats, 1, component),
        Worker::new(setup.nats, 2, component),
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
    let Some(mut servers) = Servers::nats() else {
        return;
    };
    let setup = servers.setup();
    let component = "outage";
    let mut worker = Worker::new(setup.nats, 7, component);
    worker.work(3);
    let router = Router::start(setup, component, &[&worker]);
    router.until_knows(&worker);
    servers.nats.kill();
    (0..40).for_each(|_| worker.change());
    servers.nats.run();
    router.until_knows(&worker);
    worker.work(2);
    router.until_knows(&worker);
}
