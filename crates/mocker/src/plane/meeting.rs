//! Where a mock engine that answers meets one that computes prompts.
//!
//! The one that answers connects and says the number of a room, eight bytes; when the prompt of that room is computed it gets one
//! byte. Either may come first. Nothing else is moved: a mock engine has no keys and values.
//!
//! What always holds: a room is forgotten when its prompt is given up or was fetched, or nobody came for it in time; there are at
//! most [`ROOMS_MAX`].

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_types::BootstrapRoom;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Rooms that are open at once.
const ROOMS_MAX: usize = 1 << 16;
/// Who comes to a meeting waits this long for the other.
const WAIT: Duration = Duration::from_secs(30);
/// What says that the prompt is there.
const READY: u8 = 1;

type Rooms = Mutex<HashMap<u64, watch::Sender<bool>>>;

/// The door of an engine that computes prompts.
#[derive(Debug)]
pub struct MeetingPoint {
    rooms: Arc<Rooms>,
    address: SocketAddr,
}

/// A room whose prompt is being computed; dropped before it is ready, it is given up.
#[derive(Debug)]
pub(crate) struct OpenRoom {
    rooms: Arc<Rooms>,
    room: u64,
}

impl MeetingPoint {
    /// Opens the door.
    pub async fn open_at(address: SocketAddr, tasks: &Tasks) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let rooms: Arc<Rooms> = Arc::default();
        let (own, spawner) = (Arc::clone(&rooms), tasks.clone());
        tasks.spawn(async move {
            loop {
                let accepted = tokio::select! {
                    () = spawner.draining() => return,
                    accepted = listener.accept() => accepted,
                };
                if let Ok((stream, _)) = accepted {
                    let (own, tasks) = (Arc::clone(&own), spawner.clone());
                    spawner.spawn(async move {
                        tokio::select! {
                            () = tasks.draining() => {}
                            () = serve(stream, own) => {}
                        }
                    });
                }
            }
        });
        Ok(Arc::new(Self { rooms, address }))
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A prompt for this room is being computed; none if there are too many.
    pub(crate) fn open(&self, room: u64) -> Option<OpenRoom> {
        enter(&self.rooms, room)?;
        Some(OpenRoom {
            rooms: Arc::clone(&self.rooms),
            room,
        })
    }
}

impl OpenRoom {
    /// The prompt is computed.
    pub(crate) fn ready(&self) {
        if let Some(told) = lock(&self.rooms).get(&self.room) {
            told.send_replace(true);
        }
    }
}

impl Drop for OpenRoom {
    fn drop(&mut self) {
        let mut rooms = lock(&self.rooms);
        let is_ready = |told: &watch::Sender<bool>| *told.borrow();
        // One that is ready stays until it was fetched.
        if rooms.get(&self.room).is_some_and(|told| !is_ready(told)) {
            rooms.remove(&self.room);
        }
    }
}

fn lock(rooms: &Rooms) -> MutexGuard<'_, HashMap<u64, watch::Sender<bool>>> {
    rooms.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The room of this number, opened if it is not; none if there are too many.
fn enter(rooms: &Rooms, room: u64) -> Option<watch::Receiver<bool>> {
    let mut rooms = lock(rooms);
    if rooms.len() >= ROOMS_MAX && !rooms.contains_key(&room) {
        // Whoever was fetched by nobody makes room.
        rooms.retain(|_, told| !*told.borrow());
        if rooms.len() >= ROOMS_MAX {
            return None;
        }
    }
    let told = rooms.entry(room).or_insert_with(|| watch::channel(false).0);
    Some(told.subscribe())
}

/// Answers one who came to fetch a prompt.
async fn serve(mut stream: TcpStream, rooms: Arc<Rooms>) {
    let mut number = [0; 8];
    let read = tokio::time::timeout(WAIT, stream.read_exact(&mut number)).await;
    if !matches!(read, Ok(Ok(_))) {
        return;
    }
    let room = u64::from_be_bytes(number);
    let Some(mut told) = enter(&rooms, room) else {
        return;
    };
    let ready = async { told.wait_for(|ready| *ready).await.is_ok() };
    let mut nothing = [0; 1];
    let is_ready = tokio::select! {
        ready = tokio::time::timeout(WAIT, ready) => ready == Ok(true),
        // Who came has left.
        _ = stream.read(&mut nothing) => false,
    };
    lock(&rooms).remove(&room);
    if is_ready {
        let _ = stream.write_all(&[READY]).await;
    }
}

/// Waits for the prompt of a room.
pub(crate) async fn meet(room: &BootstrapRoom) -> io::Result<()> {
    let met = async {
        let at = (&*room.address.host, room.address.port);
        let mut stream = TcpStream::connect(at).await?;
        stream.write_all(&room.room.to_be_bytes()).await?;
        let mut told = [0; 1];
        stream.read_exact(&mut told).await?;
        Ok(())
    };
    match tokio::time::timeout(WAIT, met).await {
        Ok(met) => met,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

#[cfg(test)]
mod tests {
    use kvasir_types::BootstrapAddress;

    use super::*;

    async fn point(tasks: &Tasks) -> (Arc<MeetingPoint>, BootstrapRoom) {
        let free = "127.0.0.1:0".parse().unwrap();
        let point = MeetingPoint::open_at(free, tasks).await.unwrap();
        let room = BootstrapRoom {
            address: BootstrapAddress {
                host: "127.0.0.1".into(),
                port: point.address().port(),
            },
            room: 7,
            handoff: None,
        };
        (point, room)
    }

    #[tokio::test]
    async fn either_comes_first_and_the_room_is_forgotten() {
        let tasks = Tasks::new();
        let (point, room) = point(&tasks).await;
        let open = point.open(7).unwrap();
        open.ready();
        drop(open);
        meet(&room).await.unwrap();
        assert!(lock(&point.rooms).is_empty());
        let waiting = tasks.spawn(async move { meet(&room).await });
        while lock(&point.rooms).is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let open = point.open(7).unwrap();
        open.ready();
        waiting.await.unwrap().unwrap().unwrap();
        assert!(lock(&point.rooms).is_empty());
    }

    #[tokio::test]
    async fn a_prompt_that_is_given_up_is_not_waited_for() {
        let tasks = Tasks::new();
        let (point, room) = point(&tasks).await;
        let open = point.open(7).unwrap();
        let waiting = tasks.spawn(async move { meet(&room).await });
        let is_watched = || {
            let rooms = lock(&point.rooms);
            rooms.get(&7).is_some_and(|told| told.receiver_count() > 0)
        };
        while !is_watched() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(open);
        assert!(waiting.await.unwrap().unwrap().is_err());
    }
}
