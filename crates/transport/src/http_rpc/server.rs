//! The worker's side of requests over HTTP.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::Builder;
use kvasir_protocol::frame::Ack;
use kvasir_tasks::Tasks;
use tokio::net::TcpListener;

use super::{Background, RPC_ROOT};
use crate::listen::BoundedListener;
use crate::tcp::ServerOptions;
use crate::{Dispatcher, EndpointHandler, ServedEndpoint};

/// Takes requests over HTTP for the endpoints of one process. Clones are one; the listener ends with its tasks.
#[derive(Clone)]
pub struct HttpServer {
    dispatcher: Dispatcher,
    address: SocketAddr,
}

impl HttpServer {
    /// Listens. Of the options, all but TLS count.
    pub async fn bind(options: ServerOptions, tasks: &Tasks) -> io::Result<Self> {
        let listener = TcpListener::bind(options.bind).await?;
        let server = Self {
            dispatcher: Dispatcher::new(options.capacity, tasks),
            address: listener.local_addr()?,
        };
        let accepting = accept(listener, server.dispatcher.clone(), options, tasks.clone());
        tasks.background().spawn(accepting);
        Ok(server)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The endpoints and the calls under way.
    #[must_use]
    pub const fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Serves `/v1/rpc/{path}` until what it returns is dropped.
    #[must_use]
    pub fn serve(&self, path: &str, handler: Arc<dyn EndpointHandler>) -> ServedEndpoint {
        self.dispatcher.serve(path, handler)
    }
}

async fn accept(
    listener: TcpListener,
    dispatcher: Dispatcher,
    options: ServerOptions,
    tasks: Tasks,
) {
    let listener = BoundedListener::new(listener, options.connections_max);
    loop {
        let (socket, permit) = listener.accept().await;
        let (dispatcher, max) = (dispatcher.clone(), options.message_bytes_max);
        let builder = Builder::new(Background(tasks.clone()));
        tasks.background().spawn(async move {
            let service = service_fn(|request| {
                let dispatcher = dispatcher.clone();
                async move { Ok::<_, Infallible>(answer(&dispatcher, request, max).await) }
            });
            let serving = builder.serve_connection(TokioIo::new(socket), service);
            let _ = serving.await;
            drop(permit);
        });
    }
}

async fn answer(
    dispatcher: &Dispatcher,
    request: Request<Incoming>,
    max: usize,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().strip_prefix(RPC_ROOT);
    let Some(path) = path.map(str::to_owned) else {
        return say(StatusCode::NOT_FOUND, "");
    };
    if request.method() != Method::POST {
        return say(StatusCode::METHOD_NOT_ALLOWED, "");
    }
    let body = Limited::new(request.into_body(), max).collect().await;
    let Ok(body) = body else {
        return say(StatusCode::PAYLOAD_TOO_LARGE, "");
    };
    let ack = dispatcher.accept(&path, body.to_bytes());
    let status = match &ack {
        Ack::Accepted => StatusCode::ACCEPTED,
        Ack::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
        Ack::Unavailable(_) => StatusCode::NOT_FOUND,
    };
    say(status, &ack.text())
}

fn say(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}
