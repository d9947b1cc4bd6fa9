//! One run from start to report: warm up, faults, rest, then requests without faults, and what must hold after each.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::router::Router;
use crate::world::World;
use crate::{Options, client, fate};

/// Everything has this long to come to rest after the last request.
const REST_MAX: Duration = Duration::from_secs(45);
/// Of the requests with faults so many (one in) come before memory and descriptors are first measured.
const WARM_SHARE: u64 = 5;
/// One request without faults follows for so many with.
const CLEAN_SHARE: u64 = 50;
/// Between two looks at the memory while requests run.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Memory may grow by this much after the warm-up, in KiB.
const GROWTH_KIB_MAX: u64 = 48 << 10;
/// Descriptors that may be open beyond those after the warm-up: kept connections to engines.
const DESCRIPTORS_MORE_MAX: u64 = 24;
/// Share of requests by clients without faults that must have a whole answer, in per cent; otherwise a run tests little.
const WHOLE_MIN_PERCENT: u64 = 75;

/// The router at rest.
struct Rest {
    kib: u64,
    descriptors: u64,
    /// What the index says that it holds, in KiB.
    index_kib: u64,
}

pub(crate) async fn run(options: &Options) -> io::Result<bool> {
    let clean = options.requests / CLEAN_SHARE;
    let all = options.requests + clean;
    println!(
        "kvasir-faults --seed {} --requests {} --clients {} --engines {} --descriptors {}",
        options.seed, options.requests, options.clients, options.engines, options.descriptors
    );
    let world = Arc::new(World::new(options.seed, all, Instant::now()));
    let mut engines = Vec::new();
    for place in 0..options.engines {
        engines.push(Engine::start(place, Arc::clone(&world)).await?);
    }
    let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
    let router = Router::start(
        &options.binary,
        &addresses,
        options.descriptors,
        &options.log,
        &world,
    )?;
    rest(&router, &engines, &world, "start").await;

    faults(
        options,
        &world,
        &router,
        &engines,
        options.requests / WARM_SHARE,
    )
    .await;
    let before = rest(&router, &engines, &world, "warm-up").await;
    faults(options, &world, &router, &engines, options.requests).await;
    rest(&router, &engines, &world, "faults").await;
    world.faults.store(false, Ordering::SeqCst);
    let whole = whole(&world);
    requests(options, &world, &router, all).await;
    if self::whole(&world) - whole != clean {
        let good = self::whole(&world) - whole;
        let what = "requests without faults that had no answer";
        world.violation(what, format!("{good} of {clean} had one"));
    }
    let after = rest(&router, &engines, &world, "requests without faults").await;
    check_usage(&world, &before, &after);
    let page = router.page("/metrics")?;
    let (code, log) = router.stop()?;
    if code != Some(0) {
        world.violation("the router ended with an error", format!("code {code:?}"));
    }
    for line in log.panics.iter().take(3) {
        world.violation("a panic", line);
    }
    let wrong = world.wrong_ends();
    if let Some((n, times)) = wrong.first() {
        let count = wrong.len();
        let what = "answered requests that did not end once by the log";
        world.violation(what, format!("{count}; the first is {n}, {times} times"));
    }
    let counts = world.counts();
    for (what, count) in &counts {
        println!("{count:>8}  {what}");
    }
    println!(
        "{:>8}  attempts at most for one request",
        world.attempts_max()
    );
    let moved = Router::metric(&page, "dynamo_frontend_model_migration_total");
    println!("{moved:>8}  retries and continuations, by the router's count");
    println!(
        "log: {} lines, {} KiB, {} warnings, {} errors",
        log.lines,
        log.bytes >> 10,
        log.warnings,
        log.errors
    );
    println!(
        "memory {} -> {} KiB, of that the index {} -> {} KiB, descriptors {} -> {}",
        before.kib,
        after.kib,
        before.index_kib,
        after.index_kib,
        before.descriptors,
        after.descriptors
    );
    let looks = world.memory();
    let looks: Vec<_> = looks
        .iter()
        .map(|(at, kib)| format!("{at} s {kib}"))
        .collect();
    println!("memory over time, KiB: {}", looks.join(", "));
    Ok(verdict(&world, options))
}

/// The last lines.
fn verdict(world: &World, options: &Options) -> bool {
    let violations = world.violations();
    let count: u64 = violations.iter().map(|(count, _)| count).sum();
    for (count, first) in &violations {
        println!("VIOLATION, {count} times: {first}");
    }
    let seconds = world.started.elapsed().as_secs_f64();
    let word = if count == 0 { "passed" } else { "FAILED" };
    println!(
        "{word}: {} requests, seed {}, {seconds:.0} s, {count} violations",
        options.requests, options.seed
    );
    count == 0
}

/// Answers that were whole until now.
fn whole(world: &World) -> u64 {
    world.counts().get("answer: Whole").copied().unwrap_or(0)
}

/// Sends the requests up to `limit` while engines fare as they do.
async fn faults(
    options: &Options,
    world: &Arc<World>,
    router: &Router,
    engines: &[Arc<Engine>],
    limit: u64,
) {
    world.faults.store(true, Ordering::SeqCst);
    let fates = tokio::spawn(fate::engines(Arc::clone(world), engines.to_vec()));
    let hog = fate::descriptors(Arc::clone(world), router.address, options.descriptors);
    let hog = tokio::spawn(hog);
    requests(options, world, router, limit).await;
    hog.abort();
    fates.abort();
    let _ = (hog.await, fates.await);
}

/// Sends the requests up to `limit`.
async fn requests(options: &Options, world: &Arc<World>, router: &Router, limit: u64) {
    world.set_limit(limit);
    let run = |_| tokio::spawn(client::run(Arc::clone(world), router.address));
    let clients: Vec<_> = (0..options.clients).map(run).collect();
    let mut all = std::pin::pin!(async {
        for client in clients {
            if client.await.is_err() {
                world.violation("a client of this program panicked", "");
            }
        }
    });
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            () = &mut all => return,
            _ = looks.tick() => {
                if let Ok((kib, _)) = router.usage() {
                    world.saw_memory(kib);
                }
            }
        }
    }
}

/// Waits until all engines are well and serve, nothing is booked and nothing runs.
async fn rest(router: &Router, engines: &[Arc<Engine>], world: &World, after: &str) -> Rest {
    // What has begun to befall an engine goes on.
    tokio::time::sleep(fate::BEFALLS_WITHIN).await;
    let began = Instant::now();
    let mut state = String::new();
    while began.elapsed() < REST_MAX {
        fate::heal(engines);
        tokio::time::sleep(Duration::from_millis(200)).await;
        match is_at_rest(router, engines.len()) {
            Ok(Ok(())) => {
                // Idle connections are closed by engines now and then; what is left open then is nobody's.
                engines
                    .iter()
                    .for_each(|engine| engine.change(|now| now.drains += 1));
                return measured(router).await;
            }
            Ok(Err(what)) => state = what,
            Err(error) => state = format!("its pages cannot be read: {error}"),
        }
    }
    world.violation(
        "not at rest",
        format!("{REST_MAX:?} after {after}: {state}"),
    );
    measured(router).await
}

fn is_at_rest(router: &Router, engines: usize) -> io::Result<Result<(), String>> {
    let (well, booked) = router.workers()?;
    let page = router.page("/metrics")?;
    let running = Router::metric(&page, "dynamo_frontend_inflight_requests");
    let blocks = Router::metric(&page, "dynamo_frontend_worker_active_decode_blocks");
    let tokens = Router::metric(&page, "dynamo_frontend_worker_active_prefill_tokens");
    let quiet = running == 0.0 && blocks == 0.0 && tokens == 0.0;
    Ok(match well == engines && booked == 0 && quiet {
        true => Ok(()),
        false => Err(format!(
            "{well} of {engines} workers serve, booked {booked}, running {running}, blocks {blocks}, prefill tokens {tokens}"
        )),
    })
}

/// What the router holds when engines have closed its idle connections, which it notices within seconds.
async fn measured(router: &Router) -> Rest {
    let index = router.page("/metrics");
    let index = index.map(|page| Router::metric(&page, "kvasir_index_bytes"));
    let mut rest = Rest {
        kib: 0,
        descriptors: u64::MAX,
        index_kib: index.map_or(0, |bytes| bytes as u64 >> 10),
    };
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(250)).await;
        if let Ok((kib, descriptors)) = router.usage() {
            rest.kib = kib;
            rest.descriptors = rest.descriptors.min(descriptors);
        }
    }
    rest
}

fn check_usage(world: &World, before: &Rest, after: &Rest) {
    if after.kib > before.kib + GROWTH_KIB_MAX {
        let (from, to) = (before.kib, after.kib);
        world.violation("memory grew", format!("from {from} to {to} KiB"));
    }
    if after.descriptors > before.descriptors + DESCRIPTORS_MORE_MAX {
        let (from, to) = (before.descriptors, after.descriptors);
        world.violation("open descriptors", format!("{from} before, {to} after"));
    }
    let counts = world.counts();
    let of = |name: &str| {
        let rows = counts.iter().filter(|(what, _)| what.starts_with(name));
        rows.map(|(_, count)| count).sum::<u64>()
    };
    let (all, whole) = (of("answer:"), of("answer: Whole"));
    if whole * 100 < all * WHOLE_MIN_PERCENT {
        world.violation("few whole answers", format!("{whole} of {all}"));
    }
}
