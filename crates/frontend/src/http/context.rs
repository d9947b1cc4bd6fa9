//! What listeners and body readers share: limits, the certificate, what is under way, and whether the server is
//! leaving.
//!
//! What always holds: a server that drains is leaving; neither is ever taken back. One that is *handed over* is neither: another process
//! accepts connections at the same sockets, this one serves those that it has, and accepts again if the other one fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::http::body::MIB;
use crate::http::body_budget::BodyBudget;
use crate::http::in_flight::InFlight;
use crate::http::limits::Limits;
use crate::http::long_work::LongWork;
use crate::http::server::connections::ClientConnections;
use crate::http::shortage::Shortage;
use crate::http::tls::ServerTls;

/// Settings of a server and its state. One per process.
#[derive(Debug)]
pub struct HttpContext {
    pub(crate) limits: Limits,
    /// Largest body, in MiB.
    pub(crate) body_limit_mb: u64,
    /// Room for the bodies of all requests under way.
    pub(crate) bodies: BodyBudget,
    /// Status of an overload answer.
    pub(crate) overload_status: u16,
    pub(crate) tls: Option<ServerTls>,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Clock,
    pub(crate) tasks: Tasks,
    /// The connections of clients.
    pub(crate) connections: Arc<ClientConnections>,
    /// Whether this machine is short of what connections need.
    pub(crate) shortage: Shortage,
    /// Requests under way.
    pub(crate) in_flight: InFlight,
    /// Where long work goes.
    pub(crate) long_work: LongWork,
    /// Whether another process accepts connections in our place.
    handed_over: watch::Sender<bool>,
    leaving: CancellationToken,
    /// The same as `leaving`, read without its lock.
    is_leaving: AtomicBool,
    draining: AtomicBool,
}

impl HttpContext {
    /// A server that is not leaving.
    pub(crate) fn new(
        (limits, body_limit_mb, overload_status): (Limits, u64, u16),
        tls: Option<ServerTls>,
        metrics: Metrics,
        clock: Clock,
        tasks: Tasks,
    ) -> Self {
        let connections = Arc::new(ClientConnections::new(clock));
        // The largest body that is allowed has room when there is no other.
        let room = limits.body_bytes_max.max(body_limit_mb.saturating_mul(MIB));
        Self {
            shortage: Shortage::new(Arc::clone(&connections), metrics.clone(), clock),
            connections,
            limits,
            body_limit_mb,
            bodies: BodyBudget::new(room),
            overload_status,
            tls,
            metrics,
            clock,
            tasks,
            in_flight: InFlight::default(),
            long_work: LongWork::default(),
            handed_over: watch::Sender::new(false),
            leaving: CancellationToken::new(),
            is_leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        }
    }

    /// Says on the health page that nobody is to send new work, and serves what comes.
    pub(crate) fn start_leaving(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
        self.leaving.cancel();
    }

    /// Whether the server is about to end.
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Waits until the server is about to end.
    pub(crate) async fn leaving(&self) {
        self.leaving.cancelled().await;
    }

    /// Another process accepts connections in our place from now on, or no longer does.
    pub(crate) fn set_handed_over(&self, handed_over: bool) {
        self.handed_over.send_replace(handed_over);
    }

    /// Whether another process accepts connections, as it changes.
    pub(crate) fn handed_over(&self) -> watch::Receiver<bool> {
        self.handed_over.subscribe()
    }

    /// Whether clients are to come back on another connection.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_leaving() || *self.handed_over.borrow()
    }

    /// Waits until clients are to come back on another connection.
    pub(crate) async fn closing(&self) {
        let mut handed_over = self.handed_over();
        tokio::select! {
            () = self.leaving() => {}
            _ = handed_over.wait_for(|handed_over| *handed_over) => {}
        }
    }

    /// Refuses new work from now on.
    pub(crate) fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.start_leaving();
    }

    /// Whether new work is refused.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// A client did not take its answer in time: the answer ends.
    pub(crate) fn client_stalled(&self, what: &str) {
        self.limit_reached("client_time");
        tracing::debug!("client stalled: {what}");
    }

    /// Counts that a limit of the server was reached.
    pub(crate) fn limit_reached(&self, limit: &'static str) {
        let reached = &self.metrics.limit_reached_total;
        reached.with_label_values(&[limit]).inc();
    }
}
