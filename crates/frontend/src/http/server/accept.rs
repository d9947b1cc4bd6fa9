//! Letting clients in: as many as there are places and descriptors for.
//!
//! What always holds: who connects takes the place of one that is idle, and waits if none is; a shortage of descriptors stops
//! nobody for good.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::RuntimeThreads;
use kvasir_transport::is_local_error;
use kvasir_types::Time;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::activity::Activity;
use super::connections::OpenConnection;
use super::{Door, Service, serve, serve_on};
use crate::http::context::HttpContext;
use crate::http::heads::Heads;
use crate::http::limits::Limits;

/// Pause after `accept` failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
/// Between two looks for connections that are idle while one waits for a place.
const PLACE_LOOK: Duration = Duration::from_millis(100);
/// At the limit one of so many connections makes room at once, if it is idle.
const SHED_SHARE: usize = 64;
/// While clients go on waiting for a place, four times as many make room for each of them, up to one of so many: one that has
/// sent a piece of a head takes a while to go, and those who wait would wait for each in turn.
const SHED_SHARE_MAX: usize = 2;
/// Nobody had to wait for so long: few make room again.
const PRESSURE_ENDS: Duration = Duration::from_secs(10);
/// Connections at the operators' own door.
const ADMIN_CONNECTIONS_MAX: usize = 256;

impl Door {
    /// Connections that are open there at once.
    fn connections_max(self, limits: &Limits) -> usize {
        match self {
            Self::Data => limits.connections_max,
            Self::Admin => limits.connections_max.min(ADMIN_CONNECTIONS_MAX),
        }
    }
}

/// Accepts connections until the server drains, and has them served.
pub(super) async fn accept_loop<S: Service>(
    listener: TcpListener,
    service: Arc<S>,
    door: Door,
    threads: Option<Arc<RuntimeThreads>>,
) {
    let http = service.http();
    let tasks = &http.tasks;
    let places = Arc::new(Semaphore::new(door.connections_max(&http.limits)));
    let mut pressure = Pressure::default();
    let mut elsewhere = http.handed_over();
    loop {
        let accepted = tokio::select! {
            () = tasks.draining() => return,
            _ = elsewhere.wait_for(|elsewhere| *elsewhere) => None,
            accepted = listener.accept() => Some(accepted),
        };
        let Some(accepted) = accepted else {
            // Another process accepts at this socket. It is kept: that one may fail.
            tokio::select! {
                () = tasks.draining() => return,
                _ = elsewhere.wait_for(|elsewhere| !*elsewhere) => continue,
            }
        };
        let stream = match accepted {
            Ok((stream, _peer)) => stream,
            Err(error) => {
                accept_failed(http, &error).await;
                continue;
            }
        };
        http.shortage.eased();
        let place = tokio::select! {
            () = tasks.draining() => return,
            place = find_place(http, &places, door, &mut pressure) => place,
        };
        let Some(place) = place else {
            return;
        };
        let _ = stream.set_nodelay(true);
        let heads = Arc::new(Heads::new(http.limits.header_bytes_max));
        let activity = Arc::new(Activity::new(heads, http.clock));
        let client = Client {
            open: http.connections.enter(door, activity),
            door,
            _place: place,
        };
        let service = Arc::clone(&service);
        match threads.as_deref().and_then(RuntimeThreads::slot) {
            None => tasks.spawn(serve(stream, service, client)),
            Some(slot) => {
                let runtime = slot.handle.clone();
                tasks.spawn_on(&runtime, serve_on(slot, stream, service, client))
            }
        };
    }
}

/// Waits a moment if descriptors or memory are short; a client that left before it was accepted is none.
async fn accept_failed(http: &HttpContext, error: &io::Error) {
    match is_local_error(error) {
        true => http.shortage.struck("accepting a connection", error),
        false => tracing::debug!(%error, "a connection could not be accepted"),
    }
    tokio::time::sleep(ACCEPT_BACKOFF).await;
}

/// A place for one more connection. If there is none, those that are idle make room; if none is idle, it waits.
async fn find_place(
    http: &HttpContext,
    places: &Arc<Semaphore>,
    door: Door,
    pressure: &mut Pressure,
) -> Option<OwnedSemaphorePermit> {
    if let Ok(place) = Arc::clone(places).try_acquire_owned() {
        return Some(place);
    }
    http.limit_reached("connections");
    let waited = pressure.wait(http.clock.now());
    let at_once = shed_at_once(door.connections_max(&http.limits), waited);
    loop {
        http.connections.shed(at_once, |other| other == door);
        let place = Arc::clone(places).acquire_owned();
        if let Ok(place) = tokio::time::timeout(PLACE_LOOK, place).await {
            return place.ok();
        }
    }
}

/// How many clients had to wait for a place, with no long pause between two.
#[derive(Debug, Default)]
struct Pressure {
    waited: u32,
    last: Time,
}

impl Pressure {
    /// One more has to wait. Says how many had to before it.
    fn wait(&mut self, now: Time) -> u32 {
        let before = match now - self.last > PRESSURE_ENDS {
            true => 0,
            false => self.waited,
        };
        (self.waited, self.last) = (before.saturating_add(1), now);
        before
    }
}

/// How many of at most `places` connections make room at once, if they are idle, after so many clients had to wait.
fn shed_at_once(places: usize, waited: u32) -> usize {
    let first = (places / SHED_SHARE).max(1);
    let most = (places / SHED_SHARE_MAX).max(1);
    let grown = first.checked_mul(4_usize.saturating_pow(waited));
    grown.unwrap_or(most).clamp(1, most)
}

/// A client that has connected.
pub(super) struct Client {
    pub(super) open: OpenConnection,
    pub(super) door: Door,
    _place: OwnedSemaphorePermit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_make_room_the_more_had_to_wait() {
        let shed: Vec<_> = (0..6).map(|waited| shed_at_once(640, waited)).collect();
        assert_eq!(shed, [10, 40, 160, 320, 320, 320]);
        assert_eq!(shed_at_once(640, u32::MAX), 320);
        assert_eq!((shed_at_once(2, 0), shed_at_once(2, 9)), (1, 1));
        let at = |secs: u64| Time::from_nanos(secs * 1_000_000_000);
        let mut pressure = Pressure::default();
        let waited = [1, 2, 11, 22, 23].map(|secs| pressure.wait(at(secs)));
        assert_eq!(waited, [0, 1, 2, 0, 1]);
    }
}
