//! One look into the folder of a store after another.
//!
//! Answers one question: which files came, changed or went since the last look? A folder's own time changes when a name comes or
//! goes, so a look at a quiet folder is one call. Every third of the files' lifetime all of them are looked at: what nobody touches
//! any more is deleted, and what a look may have missed is found.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::{FolderLock, TMP_PREFIX, key_of};
use crate::record::{Bucket, RecordKey, VALUE_BYTES_MAX};
use crate::store::Feed;

/// A file aside that was not linked to its name within so many lifetimes never will be.
const ASIDE_TTLS: u32 = 6;

/// What is known of a store's folder.
pub(super) struct Scanner {
    root: PathBuf,
    ttl: Duration,
    folders: Vec<Folder>,
    /// When all files were last looked at.
    swept: Option<Instant>,
}

struct Folder {
    bucket: Bucket,
    path: PathBuf,
    /// Its time at the last listing.
    changed: Option<SystemTime>,
    /// Times of folders are coarse: after a change it is listed once more.
    again: bool,
    files: BTreeMap<String, FileId>,
}

/// Tells a file from another that took its name. Its time does not: its owner sets that again and again.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileId {
    inode: u64,
    born: Option<SystemTime>,
}

impl Scanner {
    pub(super) fn new(root: &Path, buckets: &[Bucket], ttl: Duration) -> Self {
        let folder = |&bucket: &Bucket| Folder {
            bucket,
            path: root.join(bucket.path()),
            changed: None,
            again: false,
            files: BTreeMap::new(),
        };
        Self {
            root: root.into(),
            ttl,
            folders: buckets.iter().map(folder).collect(),
            swept: None,
        }
    }

    /// Tells a watcher what is new. An error means that the store cannot be read; what was told stays true.
    pub(super) fn look(&mut self, feed: &Feed) -> io::Result<()> {
        if self.swept.is_none() {
            fs::create_dir_all(&self.root)?;
        }
        // A folder that is gone is a store that is gone, not an empty one.
        fs::metadata(&self.root)?;
        let since = self.swept.map(|at| at.elapsed());
        let sweep = since.is_none_or(|since| since >= self.ttl / 3);
        // Whoever stood still himself does not know who else did.
        let stood_still = since.is_some_and(|since| since >= self.ttl * 2 / 3);
        let lifetime = (sweep && !stood_still).then_some(self.ttl);
        for folder in &mut self.folders {
            folder.look(sweep, lifetime, feed)?;
        }
        if sweep {
            self.swept = Some(Instant::now());
        }
        feed.synced();
        Ok(())
    }
}

impl Folder {
    fn look(&mut self, sweep: bool, lifetime: Option<Duration>, feed: &Feed) -> io::Result<()> {
        let changed = match fs::metadata(&self.path) {
            Ok(metadata) => metadata.modified().ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.empty(feed);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let is_new = changed.is_none() || changed != self.changed;
        if !is_new && !self.again && !sweep {
            return Ok(());
        }
        (self.changed, self.again) = (changed, is_new);
        self.list(sweep, lifetime, feed)
    }

    /// The folder is not there (any more): it holds nothing.
    fn empty(&mut self, feed: &Feed) {
        self.changed = None;
        if !self.files.is_empty() {
            self.files.clear();
            feed.retain(self.bucket, &BTreeSet::new());
        }
    }

    fn list(&mut self, sweep: bool, lifetime: Option<Duration>, feed: &Feed) -> io::Result<()> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                continue;
            };
            if let Some(lifetime) = lifetime
                && is_expired(&entry, name, lifetime)
                && is_swept(&self.path, &entry, name, lifetime)
            {
                continue;
            }
            let Some(key) = key_of(name) else {
                continue;
            };
            if let Some(id) = self.read(&entry, key.clone(), sweep, feed) {
                found.insert(key, id);
            }
        }
        self.files = found;
        let keys = self.files.keys().cloned().collect();
        feed.retain(self.bucket, &keys);
        Ok(())
    }

    /// Reads a file, if it is not the one that was read before. None if it is gone.
    fn read(&self, entry: &DirEntry, key: String, sweep: bool, feed: &Feed) -> Option<FileId> {
        let known = self.files.get(&key);
        if let Some(known) = known
            && known.inode == entry.ino()
            && !sweep
        {
            return Some(*known);
        }
        let id = FileId {
            inode: entry.ino(),
            born: entry
                .metadata()
                .ok()
                .and_then(|metadata| metadata.created().ok()),
        };
        if known == Some(&id) {
            return Some(id);
        }
        let mut value = Vec::new();
        let file = File::open(entry.path()).ok()?;
        let mut file = file.take(VALUE_BYTES_MAX as u64 + 1);
        file.read_to_end(&mut value).ok()?;
        feed.put(&RecordKey::new(self.bucket, key), &value);
        Some(id)
    }
}

/// Whether nobody has touched a file for its lifetime.
fn is_expired(entry: &DirEntry, name: &str, lifetime: Duration) -> bool {
    entry
        .metadata()
        .is_ok_and(|metadata| is_old(&metadata, name, lifetime))
}

fn is_old(metadata: &Metadata, name: &str, lifetime: Duration) -> bool {
    let lifetime = match name.starts_with(TMP_PREFIX) {
        true => lifetime * ASIDE_TTLS,
        false => lifetime,
    };
    #[expect(
        clippy::disallowed_methods,
        reason = "times of files are those of the system's clock"
    )]
    let now = SystemTime::now();
    let modified = metadata.modified();
    modified.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > lifetime))
}

/// Deletes a file that expired; says whether it is to be taken for gone. Its owner may have touched it meanwhile.
fn is_swept(folder: &Path, entry: &DirEntry, name: &str, lifetime: Duration) -> bool {
    // Whoever has the lock sweeps or writes: the next look is soon enough.
    let Ok(Some(_lock)) = FolderLock::try_take(folder) else {
        return true;
    };
    let path = entry.path();
    match fs::metadata(&path) {
        Ok(metadata) if is_old(&metadata, name, lifetime) => {
            if let Err(error) = fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "an expired record cannot be deleted");
            }
            true
        }
        Ok(_) => false,
        Err(_) => true,
    }
}
