//! How are connections accepted? One after another, so many at once and no more.
//!
//! One that is too many is closed at once. A listener that fails, for want of descriptors most likely, rests until some are closed.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// Rest after the listener failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener whose connections are counted.
pub(crate) struct BoundedListener {
    listener: TcpListener,
    room: Arc<Semaphore>,
}

impl BoundedListener {
    /// Has `connections_max` connections at once.
    pub(crate) fn new(listener: TcpListener, connections_max: usize) -> Self {
        let room = Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS)));
        Self { listener, room }
    }

    /// The next connection. It counts until the permit is dropped.
    pub(crate) async fn accept(&self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            let Ok((socket, _)) = self.listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            if let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() {
                return (socket, permit);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn one_too_many_is_closed_and_room_comes_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = BoundedListener::new(listener, 1);
        let _first = TcpStream::connect(address).await.unwrap();
        let (_, permit) = listener.accept().await;
        let mut second = TcpStream::connect(address).await.unwrap();
        let closed = async { second.read(&mut [0]).await };
        tokio::select! {
            read = closed => assert_eq!(read.unwrap_or(0), 0),
            _ = listener.accept() => panic!("there is no room for a second"),
        }
        drop(permit);
        let _client = TcpStream::connect(address).await.unwrap();
        let (_third, _permit) = listener.accept().await;
    }
}
