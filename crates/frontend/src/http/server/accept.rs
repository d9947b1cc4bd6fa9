//! Letting clients in: as many as there are places and descriptors for.
//!
//! What always holds: who connects takes the place of one that is idle, and waits if none is; a shortage of descriptors stops
//! nobody for good.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::RuntimeThreads;
use kvasir_transport::is_local_error;
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
    loop {
        let accepted = tokio::select! {
            () = tasks.draining() => return,
            accepted = listener.accept() => accepted,
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
            place = find_place(http, &places, door) => place,
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
) -> Option<OwnedSemaphorePermit> {
    if let Ok(place) = Arc::clone(places).try_acquire_owned() {
        return Some(place);
    }
    http.limit_reached("connections");
    let at_once = (door.connections_max(&http.limits) / SHED_SHARE).max(1);
    loop {
        http.connections.shed(at_once, |other| other == door);
        let place = Arc::clone(places).acquire_owned();
        if let Ok(place) = tokio::time::timeout(PLACE_LOOK, place).await {
            return place.ok();
        }
    }
}

/// A client that has connected.
pub(super) struct Client {
    pub(super) open: OpenConnection,
    pub(super) door: Door,
    _place: OwnedSemaphorePermit,
}
