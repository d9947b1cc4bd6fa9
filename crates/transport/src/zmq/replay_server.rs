//! A ROUTER socket that answers replay requests, as engines do.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_wire::frame::{Frame, REPLAY_END, parse_replay_request};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::codec::Item;
use super::connection::{LinkError, Roles, handshake};
use super::{Endpoint, ZmqLimits};
use crate::listen::BoundedListener;

const ROUTER: Roles = Roles {
    own: "ROUTER",
    peers: &["DEALER", "REQ", "ROUTER"],
};

/// What can be replayed.
pub trait ReplayStore: Send + Sync {
    /// Messages from `start` on, oldest first; those that are gone are left out.
    fn messages_from(&self, start: u64) -> Vec<Frame<Bytes>>;
}

/// A bound replay socket. Dropping it closes it and its connections.
#[derive(Debug)]
pub struct ZmqReplayServer {
    address: SocketAddr,
    _stop: DropGuard,
}

impl ZmqReplayServer {
    /// Binds; port 0 takes a free one.
    pub async fn bind(
        tasks: &Tasks,
        endpoint: &Endpoint,
        limits: ZmqLimits,
        store: Arc<dyn ReplayStore>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(endpoint.bind_address()).await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let accept = accept(listener, tasks.clone(), limits, store, stop.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(accept));
        Ok(Self {
            address,
            _stop: stop.drop_guard(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn accept(
    listener: TcpListener,
    tasks: Tasks,
    limits: ZmqLimits,
    store: Arc<dyn ReplayStore>,
    stop: CancellationToken,
) {
    let listener = BoundedListener::new(listener, limits.peers_max);
    loop {
        let (stream, permit) = listener.accept().await;
        let (limits, store) = (limits.clone(), Arc::clone(&store));
        let serving = async move {
            let _permit = permit;
            let _ = serve(stream, &limits, store.as_ref()).await;
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(serving));
    }
}

async fn serve(
    stream: TcpStream,
    limits: &ZmqLimits,
    store: &dyn ReplayStore,
) -> Result<(), LinkError> {
    let (mut reader, mut writer) = handshake(stream, ROUTER, limits).await?;
    loop {
        match reader.next().await? {
            Item::Message(parts) => {
                // Without the empty part in front an engine does not answer either.
                let [delimiter, start] = parts.as_slice() else {
                    continue;
                };
                let Some(start) = parse_replay_request(start).filter(|_| delimiter.is_empty())
                else {
                    continue;
                };
                for frame in store.messages_from(start) {
                    let sequence = frame.sequence.to_be_bytes();
                    let parts: [&[u8]; 4] = [b"", b"", &sequence, &frame.payload];
                    writer.message(&parts).await?;
                }
                let end: [&[u8]; 4] = [b"", b"", &REPLAY_END.to_be_bytes(), b""];
                writer.message(&end).await?;
            }
            Item::Ping(context) => writer.pong(&context).await?,
            Item::Ready(_) | Item::Error(_) | Item::Pong | Item::Subscribe(..) | Item::Other => {}
        }
    }
}
