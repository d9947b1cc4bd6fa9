//! Where a mock vLLM server with a KV connector keeps prompts for others, and where these fetch them.
//!
//! One who fetches connects and says, as a line of JSON, which engine and which request it means; it gets a line back. Nothing else is moved: a mock engine has no
//! keys and values. As vLLM with NIXL does, an engine keeps a prompt for [`LEASE`] and then forgets it; who asks for another engine is refused; who asks for
//! a request that is not there is let through, and nothing is freed.
//!
//! What always holds: there are at most [`KEPT_MAX`] prompts.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_tasks::Tasks;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// A prompt that nobody fetches is kept so long.
const LEASE: Duration = Duration::from_secs(30);
/// Prompts that are kept at once; of more, the oldest go first.
const KEPT_MAX: usize = 1 << 16;
/// One who does not answer is waited for so long.
const WAIT: Duration = Duration::from_secs(5);
/// Longest line.
const LINE_BYTES_MAX: u64 = 4096;

/// A prompt that is kept.
#[derive(Clone, Copy, Debug)]
struct Kept {
    blocks: u32,
    until: Instant,
}

/// The prompts that one server keeps, and the door to them.
#[derive(Debug)]
pub struct SideChannel {
    engine_id: String,
    address: SocketAddr,
    kept: Mutex<HashMap<String, Kept>>,
    expired: AtomicU64,
    failed: AtomicU64,
}

/// What one who fetches says.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Fetch {
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
}

/// What it is told.
#[derive(Debug, Deserialize, Serialize)]
struct Fetched {
    engine_id: String,
    known: bool,
}

impl SideChannel {
    /// Opens the door.
    pub async fn open_at(
        address: SocketAddr,
        engine_id: String,
        tasks: &Tasks,
    ) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind(address).await?;
        let channel = Arc::new(Self {
            engine_id,
            address: listener.local_addr()?,
            kept: Mutex::default(),
            expired: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let (own, spawner) = (Arc::clone(&channel), tasks.clone());
        tasks.spawn(async move {
            loop {
                let accepted = tokio::select! {
                    () = spawner.draining() => return,
                    accepted = listener.accept() => accepted,
                };
                if let Ok((stream, _)) = accepted {
                    let own = Arc::clone(&own);
                    spawner.spawn(async move {
                        let _ = tokio::time::timeout(WAIT, own.serve(stream)).await;
                    });
                }
            }
        });
        Ok(channel)
    }

    /// Where it is.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the engine is called.
    pub(crate) fn engine_id(&self) -> &str {
        &self.engine_id
    }

    /// Keeps the prompt of a request, in so many blocks.
    pub(crate) fn keep(&self, request_id: &str, blocks: u32) {
        let mut kept = self.lock();
        if kept.len() >= KEPT_MAX {
            let oldest = kept.iter().min_by_key(|(_, kept)| kept.until);
            let oldest = oldest.map(|(id, _)| id.clone());
            kept.remove(&oldest.unwrap_or_default());
        }
        let until = Instant::now() + LEASE;
        kept.insert(request_id.to_owned(), Kept { blocks, until });
    }

    /// Blocks that are kept now.
    pub(crate) fn kept_blocks(&self) -> u64 {
        self.lock()
            .values()
            .map(|kept| u64::from(kept.blocks))
            .sum()
    }

    /// Prompts that nobody fetched in time.
    pub(crate) fn expired(&self) -> u64 {
        drop(self.lock());
        self.expired.load(Ordering::Relaxed)
    }

    /// Prompts of others that could not be fetched.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Fetches a prompt that another keeps.
    pub(crate) async fn fetch(&self, at: (&str, u16), wanted: &Fetch) -> io::Result<()> {
        let fetched = tokio::time::timeout(WAIT, fetch(at, wanted)).await;
        let fetched = fetched.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        if fetched.is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        fetched
    }

    async fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let (line, mut stream) = line_of(stream).await?;
        let wanted: Fetch = serde_json::from_str(&line)?;
        let known =
            wanted.engine_id == self.engine_id && self.lock().remove(&wanted.request_id).is_some();
        let told = Fetched {
            engine_id: self.engine_id.clone(),
            known,
        };
        stream.write_all(&as_line(&told)?).await
    }

    /// Those that are kept still.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, before) = (Instant::now(), kept.len());
        kept.retain(|_, kept| kept.until > now);
        let expired = (before - kept.len()) as u64;
        self.expired.fetch_add(expired, Ordering::Relaxed);
        kept
    }
}

async fn fetch(at: (&str, u16), wanted: &Fetch) -> io::Result<()> {
    let mut stream = TcpStream::connect(at).await?;
    stream.write_all(&as_line(wanted)?).await?;
    let (line, _) = line_of(stream).await?;
    let told: Fetched = serde_json::from_str(&line)?;
    match told.engine_id == wanted.engine_id {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn as_line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

async fn line_of(stream: TcpStream) -> io::Result<(String, TcpStream)> {
    use tokio::io::AsyncReadExt as _;
    let mut line = String::new();
    let mut bounded = BufReader::new(stream).take(LINE_BYTES_MAX);
    bounded.read_line(&mut line).await?;
    Ok((line, bounded.into_inner().into_inner()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn channel(tasks: &Tasks) -> Arc<SideChannel> {
        let free = "127.0.0.1:0".parse().unwrap();
        SideChannel::open_at(free, "e".to_owned(), tasks)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn who_fetches_a_prompt_frees_it_and_a_wrong_name_frees_nothing() {
        let tasks = Tasks::new();
        let channel = channel(&tasks).await;
        channel.keep("r", 3);
        let port = channel.address().port();
        let ask = async |engine: &str, request: &str| {
            let wanted = Fetch {
                engine_id: engine.to_owned(),
                request_id: request.to_owned(),
            };
            channel.fetch(("127.0.0.1", port), &wanted).await.is_ok()
        };
        assert!(!ask("other", "r").await, "another engine is refused");
        assert!(ask("e", "nope").await, "nothing is checked");
        assert_eq!((channel.kept_blocks(), channel.failed()), (3, 1));
        assert!(ask("e", "r").await);
        assert_eq!((channel.kept_blocks(), channel.expired()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_that_nobody_fetches_is_kept_for_the_lease() {
        let tasks = Tasks::new();
        let channel = channel(&tasks).await;
        channel.keep("r", 3);
        tokio::time::advance(LEASE - Duration::from_secs(1)).await;
        assert_eq!((channel.kept_blocks(), channel.expired()), (3, 0));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((channel.kept_blocks(), channel.expired()), (0, 1));
    }
}
