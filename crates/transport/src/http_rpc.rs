//! Requests over HTTP: a request is a `POST` under `/v1/rpc/`, and its status is the acknowledgement.
//!
//! Answers come home over TCP as on every plane. Dynamo had this plane in its 1.0 and has it no more in 1.6. Requests go as HTTP/2
//! over one connection to each worker, and a worker takes HTTP/1.1 too.

mod client;
mod server;

pub use client::HttpClient;
pub use server::HttpServer;

use hyper::rt::Executor;
use kvasir_tasks::Tasks;

/// What stands before the path of an endpoint.
pub const RPC_ROOT: &str = "/v1/rpc/";

/// Runs what a connection needs to run beside it.
#[derive(Clone)]
struct Background(Tasks);

impl<F: Future + Send + 'static> Executor<F> for Background
where
    F::Output: Send,
{
    fn execute(&self, future: F) {
        self.0.background().spawn(future);
    }
}
