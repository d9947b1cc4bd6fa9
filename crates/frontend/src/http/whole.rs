//! Serving programs that take requests whole and answer them at once: what beside the frontend uses the same server.
//!
//! What always holds: a body is read only as far as its limit, in the time that a client has, and within the budget of all bodies.

use std::error::Error;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request};
use hyper::body::Incoming;
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};

use crate::http::body;
use crate::http::context::HttpContext;
use crate::http::framing;
use crate::http::limits::Limits;
use crate::http::reply::Reply;
use crate::http::server::{Door, Service};

/// Status of an answer when this server is full.
const OVERLOAD_STATUS: u16 = 503;

/// Answers requests that came whole.
pub trait WholeApi: Send + Sync + 'static {
    /// Answers one.
    fn answer(&self, head: Parts, body: Bytes) -> impl Future<Output = Reply> + Send;

    /// Says why one could not be read.
    fn refuse(&self, status: u16, why: &str) -> Reply;
}

/// A [`WholeApi`] as the server serves it.
pub struct WholeService<A> {
    http: HttpContext,
    api: A,
}

impl<A: WholeApi> WholeService<A> {
    /// Serves `api`, with bodies of at most `body_limit_mb`.
    #[must_use]
    pub fn new(
        api: A,
        (limits, body_limit_mb): (Limits, u64),
        metrics: Metrics,
        clock: Clock,
        tasks: Tasks,
    ) -> Arc<Self> {
        let limits = (limits, body_limit_mb, OVERLOAD_STATUS);
        let http = HttpContext::new(limits, None, metrics, clock, tasks);
        Arc::new(Self { http, api })
    }
}

impl<A: WholeApi> Service for WholeService<A> {
    fn http(&self) -> &HttpContext {
        &self.http
    }

    async fn handle(self: &Arc<Self>, request: Request<Incoming>, _: Door) -> Reply {
        if let Err(error) = framing::check(&request) {
            let mut reply = self.api.refuse(error.status, &error.message);
            framing::close_after(&mut reply);
            return reply;
        }
        let ticket = self.http.in_flight.enter();
        if self.http.in_flight.count() > self.http.limits.requests_max {
            self.http.limit_reached("requests");
            return self
                .api
                .refuse(OVERLOAD_STATUS, "too many requests are under way");
        }
        let has_body = request.method() != Method::GET && request.method() != Method::HEAD;
        let (head, body) = request.into_parts();
        let body = match has_body {
            true => body::read_for(&self.http, &head, body).await,
            false => Ok(Bytes::new()),
        };
        let mut reply = match body {
            Ok(body) => self.api.answer(head, body).await,
            Err(error) => self.api.refuse(error.status, &error.message),
        };
        reply.body_mut().hold(ticket);
        reply
    }

    fn connection_failed(&self, error: &(dyn Error + 'static)) {
        tracing::debug!(%error, "connection ended early");
    }
}
