//! Records as files in a folder.
//!
//! Answers one question: who is there, where all processes share a file system? One file per record, `ROOT/v1/BUCKET/KEY`, as
//! Dynamo's file backend has it: the key is one file name in which every byte but letters and digits is `%XX`, the value is JSON.
//! An owner sets the time of its files again every third of [`TTL`]; a file that is older is nobody's, and whoever watches
//! deletes it.
//!
//! What always holds: a file appears whole (written aside, then linked to its name); names that begin with `.tmp_` are no
//! records; writers and sweepers hold the folder's lock.
//!
//! Why watching is polling: it sees what other machines write on a network file system, which the kernel's notices do not, and
//! costs four calls each [`POLL_EVERY`]: a folder's own time says whether anything came or went. (Decision 0107.)

mod lease;
mod scan;

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use rustix::fs::{FlockOperation, flock};

use self::lease::FileLease;
use self::scan::Scanner;
use crate::record::Bucket;
use crate::store::{Feed, Lease, Store, StoreError, StoreFuture, Watch, watch};

/// A file that its owner has not touched for so long is nobody's.
pub const TTL: Duration = Duration::from_secs(10);
/// Between two looks of a watcher.
pub const POLL_EVERY: Duration = Duration::from_millis(50);
/// Between two tries to get a folder's lock, and how many there are.
const LOCK_PAUSE: Duration = Duration::from_millis(10);
const LOCK_TRIES: u32 = 300;
/// What a file that is being written is called, before sixteen hexadecimal digits.
const TMP_PREFIX: &str = ".tmp_";

/// A store in a folder. Clones are one.
#[derive(Clone, Debug)]
pub struct FileStore {
    root: Arc<Path>,
    ttl: Duration,
    tasks: Tasks,
}

impl FileStore {
    /// The store in this folder, which is made when it is first needed. `tasks` keep it in step.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>, tasks: &Tasks) -> Self {
        Self {
            root: root.into().into(),
            ttl: TTL,
            tasks: tasks.background(),
        }
    }

    /// The same, with files that live for so long without their owner.
    #[must_use]
    pub fn with_ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    fn error(&self, error: &io::Error) -> StoreError {
        let address = self.address();
        let cause = error.to_string();
        match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                StoreError::Refused { address, cause }
            }
            _ => StoreError::Unreachable { address, cause },
        }
    }

    fn bucket_folder(&self, bucket: Bucket) -> PathBuf {
        self.root.join(bucket.path())
    }

    async fn feed(self, buckets: Vec<Bucket>, feed: Feed) {
        let mut scanner = Scanner::new(&self.root, &buckets, self.ttl);
        while !feed.is_closed() {
            let to = feed.clone();
            let looked = tokio::task::spawn_blocking(move || {
                let result = scanner.look(&to);
                (scanner, result)
            });
            let result;
            (scanner, result) = match looked.await {
                Ok(looked) => looked,
                Err(error) => {
                    tracing::error!(%error, store = %self.address(), "looking into the folder panicked");
                    feed.lost("looking into the folder panicked");
                    return;
                }
            };
            if let Err(error) = result {
                feed.lost(&error.to_string());
            }
            tokio::select! {
                () = tokio::time::sleep(POLL_EVERY) => {}
                () = feed.closed() => {}
            }
        }
    }
}

impl Store for FileStore {
    fn backend(&self) -> &'static str {
        "file"
    }

    fn address(&self) -> String {
        self.root.display().to_string()
    }

    fn watch(&self, buckets: &[Bucket]) -> Watch {
        let (feed, watch) = watch(&self.address());
        self.tasks.spawn(self.clone().feed(buckets.to_vec(), feed));
        watch
    }

    fn lease(&self) -> StoreFuture<'_, Result<Arc<dyn Lease>, StoreError>> {
        let lease: Arc<dyn Lease> = FileLease::start(self, random());
        Box::pin(std::future::ready(Ok(lease)))
    }
}

/// A number that nobody else draws. The standard library seeds its hashers from the system; nothing more is needed here.
fn random() -> u64 {
    RandomState::new().build_hasher().finish().max(1)
}

/// A key as one file name.
fn file_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len() * 2);
    for &byte in key.as_bytes() {
        match byte.is_ascii_alphanumeric() {
            true => name.push(char::from(byte)),
            false => name.push_str(&format!("%{byte:02X}")),
        }
    }
    name
}

/// The key that a file name stands for; none if it stands for none.
fn key_of(name: &str) -> Option<String> {
    if name.starts_with('.') {
        return None;
    }
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

/// Holds a folder's lock, until it is dropped.
struct FolderLock(#[expect(dead_code, reason = "the lock goes with the handle")] File);

impl FolderLock {
    /// Takes it, if nobody has it.
    fn try_take(folder: &Path) -> io::Result<Option<Self>> {
        let handle = File::open(folder)?;
        match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(handle))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Writes a value under a name of a folder, whole or not at all.
fn write(folder: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    let aside = folder.join(format!("{TMP_PREFIX}{:016x}", random()));
    let place = folder.join(name);
    fs::write(&aside, value)?;
    // A link fails where the name is taken: then the new file takes its place.
    match fs::hard_link(&aside, &place) {
        Ok(()) => fs::remove_file(&aside),
        Err(_) => fs::rename(&aside, &place).inspect_err(|_| {
            let _ = fs::remove_file(&aside);
        }),
    }
}

/// Does `work` while holding the lock of a folder, which is made if it is missing.
async fn with_lock<T: Send + 'static>(
    folder: PathBuf,
    work: impl Fn(&Path) -> io::Result<T> + Clone + Send + 'static,
) -> io::Result<T> {
    for _ in 0..LOCK_TRIES {
        let (folder, work) = (folder.clone(), work.clone());
        let tried = tokio::task::spawn_blocking(move || {
            fs::create_dir_all(&folder)?;
            match FolderLock::try_take(&folder)? {
                Some(_lock) => work(&folder).map(Some),
                None => Ok(None),
            }
        });
        if let Some(done) = tried.await.map_err(io::Error::other)?? {
            return Ok(done);
        }
        tokio::time::sleep(LOCK_PAUSE).await;
    }
    let text = format!("another process holds the lock of {}", folder.display());
    Err(io::Error::new(io::ErrorKind::TimedOut, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_file_names_as_recorded() {
        let key =
            "namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/c9ee364211a86";
        let name = "namespace%2Fdynamo%2Fcomponent%2Fbackend%2Fendpoint%2Fgenerate%2Ftopic%2Fkv%2Devents%2Fc9ee364211a86";
        assert_eq!(file_name(key), name);
        assert_eq!(key_of(name).as_deref(), Some(key));
        assert_eq!(file_name("a_b.ü"), "a%5Fb%2E%C3%BC");
        assert_eq!(key_of("a%5Fb%2E%C3%BC").as_deref(), Some("a_b.ü"));
        for bad in [".tmp_0123456789abcdef", "a%", "a%2", "a%zz", "%FF", "a%+1"] {
            assert_eq!(key_of(bad), None, "{bad}");
        }
    }
}
