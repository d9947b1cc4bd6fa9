//! What one worker has announced in a folder, kept alive by touching its files.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};

use super::{FileStore, file_name, with_lock, write};
use crate::record::{Record, RecordKey};
use crate::store::{Lease, Store, StoreError, StoreFuture};

/// The records of one worker.
pub(super) struct FileLease {
    id: u64,
    store: FileStore,
    content: Mutex<Announced>,
}

#[derive(Default)]
struct Announced {
    values: BTreeMap<RecordKey, Arc<[u8]>>,
    has_ended: bool,
}

impl FileLease {
    pub(super) fn start(store: &FileStore, id: u64) -> Arc<Self> {
        let lease = Arc::new(Self {
            id,
            store: store.clone(),
            content: Mutex::default(),
        });
        let keeper = keep_alive(Arc::downgrade(&lease), store.ttl / 3);
        store.tasks.spawn(keeper);
        lease
    }

    fn content(&self) -> MutexGuard<'_, Announced> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a record is kept alive from now on: not if the lease ended while it was written.
    fn is_kept(&self, key: &RecordKey, value: Arc<[u8]>) -> bool {
        let mut content = self.content();
        if !content.has_ended {
            content.values.insert(key.clone(), value);
        }
        !content.has_ended
    }

    fn path(&self, key: &RecordKey) -> PathBuf {
        let folder = self.store.bucket_folder(key.bucket);
        folder.join(file_name(&key.key))
    }

    async fn write(&self, key: &RecordKey, value: Arc<[u8]>) -> io::Result<()> {
        let name = file_name(&key.key);
        let folder = self.store.bucket_folder(key.bucket);
        with_lock(folder, move |folder| write(folder, &name, &value)).await
    }

    async fn delete(&self, key: &RecordKey) -> io::Result<()> {
        let path = self.path(key);
        let deleted = tokio::task::spawn_blocking(move || std::fs::remove_file(path));
        match deleted.await.map_err(io::Error::other)? {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Touches every file; one that is gone is written again.
    async fn touch(&self) {
        let values = self.content().values.clone();
        for (key, value) in values {
            let path = self.path(&key);
            let touched = tokio::task::spawn_blocking(move || touch(&path)).await;
            let error = match touched {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error,
                Err(error) => io::Error::other(error),
            };
            let is_ours = self.content().values.contains_key(&key);
            if !is_ours {
                continue;
            }
            let store = self.store.address();
            tracing::warn!(%key, store, %error, "a record of ours is gone: it is announced again");
            if let Err(error) = self.write(&key, value).await {
                tracing::warn!(%key, store, %error, "a record of ours cannot be announced; it is tried again");
            }
            // Taken back while it was written.
            let is_ours = self.content().values.contains_key(&key);
            if !is_ours {
                let _ = self.delete(&key).await;
            }
        }
    }
}

/// Keeps the files of a lease alive as long as it is.
async fn keep_alive(lease: Weak<FileLease>, every: std::time::Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(lease) = lease.upgrade() else {
            return;
        };
        if lease.content().has_ended {
            return;
        }
        lease.touch().await;
    }
}

/// Sets the time of a file to now.
fn touch(path: &Path) -> io::Result<()> {
    let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps {
        last_access: at(UTIME_OMIT),
        last_modification: at(UTIME_NOW),
    };
    Ok(utimensat(CWD, path, &times, AtFlags::empty())?)
}

impl Lease for FileLease {
    fn id(&self) -> u64 {
        self.id
    }

    fn put(&self, record: Record) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let (key, value): (_, Arc<[u8]>) = (record.key(), record.to_bytes().into());
            if self.content().has_ended {
                return Err(StoreError::Ended);
            }
            let written = self.write(&key, Arc::clone(&value)).await;
            written.map_err(|error| self.store.error(&error))?;
            if self.is_kept(&key, value) {
                return Ok(());
            }
            let _ = self.delete(&key).await;
            Err(StoreError::Ended)
        })
    }

    fn remove(&self, key: RecordKey) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.content().values.remove(&key);
            let deleted = self.delete(&key).await;
            deleted.map_err(|error| self.store.error(&error))
        })
    }

    fn revoke(&self) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let values = {
                let mut content = self.content();
                content.has_ended = true;
                std::mem::take(&mut content.values)
            };
            let mut failed = None;
            for key in values.keys() {
                if let Err(error) = self.delete(key).await {
                    failed = Some(self.store.error(&error));
                }
            }
            failed.map_or(Ok(()), Err)
        })
    }
}
