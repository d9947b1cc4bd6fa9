//! What befalls engines as a whole, and the router's descriptors, while requests run.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvasir_types::Rng;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::engine::Engine;
use crate::world::World;

/// Engines of which this share (one in so many) may be unwell at a time.
const UNWELL_SHARE: usize = 2;
/// Longer than the router waits for a sign of life.
const FREEZE: Duration = Duration::from_secs(14);
/// Engines that freeze for so long in one run.
const FREEZES_MAX: u32 = 3;
/// Between two times that descriptors are made scarce.
const SCARCE_EVERY: Duration = Duration::from_secs(12);

/// After the faults have ended nothing new befalls an engine later than this.
pub(crate) const BEFALLS_WITHIN: Duration = Duration::from_millis(600);

/// Lets things befall engines until the faults end.
pub(crate) async fn engines(world: Arc<World>, engines: Vec<Arc<Engine>>) {
    let mut rng = Rng::new(world.seed ^ 0xFA7E);
    let mut freezes = 0;
    while world.has_faults() {
        tokio::time::sleep(Duration::from_millis(60 + rng.below(400))).await;
        let unwell = engines.iter().filter(|engine| !is_well(engine)).count();
        let engine = Arc::clone(&engines[rng.below(engines.len() as u64) as usize]);
        if unwell >= engines.len() / UNWELL_SHARE || !is_well(&engine) || !world.has_faults() {
            continue;
        }
        let time = Duration::from_millis(100 + rng.below(1200));
        let what = match rng.below(100) {
            0..30 => Fate::Kill,
            30..55 => Fate::Drain,
            55..72 => Fate::Sick([500, 500, 502, 503][rng.below(4) as usize]),
            72..84 => Fate::CoreDead,
            84..98 => Fate::Stall(time),
            _ if freezes < FREEZES_MAX => {
                freezes += 1;
                Fate::Stall(FREEZE)
            }
            _ => Fate::Kill,
        };
        let name = format!("{what:?}");
        world.count(format!(
            "fate: {}",
            name.split('(').next().unwrap_or_default()
        ));
        tokio::spawn(befall(engine, what, time));
    }
}

/// Makes all engines well, and closes their idle connections.
pub(crate) fn heal(engines: &[Arc<Engine>]) {
    for engine in engines {
        engine.change(|now| {
            (now.listens, now.stalled) = (true, false);
            (now.sick, now.core_dead) = (None, false);
        });
    }
}

fn is_well(engine: &Engine) -> bool {
    let now = engine.condition();
    now.listens && !now.stalled && now.sick.is_none() && !now.core_dead
}

/// What happens to one engine.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// All its connections are reset; it is back after a time.
    Kill,
    /// It closes its listener and idle connections and goes on streaming.
    Drain,
    /// It answers everything with an error.
    Sick(u16),
    /// Its core dies: error events and 500s, then the server ends too.
    CoreDead,
    /// It says nothing for a time.
    Stall(Duration),
}

async fn befall(engine: Arc<Engine>, fate: Fate, time: Duration) {
    match fate {
        Fate::Kill => kill(&engine, time).await,
        Fate::Drain => {
            engine.change(|now| {
                now.listens = false;
                now.drains += 1;
            });
            tokio::time::sleep(time * 2).await;
            engine.change(|now| now.listens = true);
        }
        Fate::Sick(status) => {
            engine.change(|now| now.sick = Some(status));
            tokio::time::sleep(time / 3).await;
            engine.change(|now| now.sick = None);
        }
        Fate::CoreDead => {
            engine.change(|now| now.core_dead = true);
            tokio::time::sleep(time / 3).await;
            engine.change(|now| now.core_dead = false);
            kill(&engine, time).await;
        }
        Fate::Stall(time) => {
            engine.change(|now| now.stalled = true);
            tokio::time::sleep(time).await;
            engine.change(|now| now.stalled = false);
        }
    }
}

async fn kill(engine: &Engine, down: Duration) {
    engine.change(|now| {
        now.listens = false;
        now.kills += 1;
    });
    tokio::time::sleep(down).await;
    engine.change(|now| now.listens = true);
}

/// Now and then opens more connections to the router than it has descriptors for, and holds them a while.
pub(crate) async fn descriptors(world: Arc<World>, router: SocketAddr, count: u64) {
    let mut rng = Rng::new(world.seed ^ 0xFD);
    let mut wait = Duration::from_secs(2);
    while world.has_faults() {
        tokio::time::sleep(wait).await;
        wait = SCARCE_EVERY;
        if !world.has_faults() {
            return;
        }
        world.count("fate: descriptors scarce");
        world.mark_scarce();
        let mut held = Vec::new();
        for _ in 0..count {
            let connect = TcpStream::connect(router);
            let Ok(Ok(mut stream)) = tokio::time::timeout(Duration::from_secs(1), connect).await
            else {
                break;
            };
            if rng.below(3) == 0 {
                let _ = stream
                    .write_all(b"POST /v1/chat/completions HTTP/1.1\r\n")
                    .await;
            }
            held.push(stream);
        }
        for _ in 0..1 + rng.below(6) {
            world.mark_scarce();
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        drop(held);
        world.mark_scarce();
    }
}
