//! The workers file: who is wanted, one line each, read again when it changes.
//!
//! A line is what `--worker` takes. Blank lines and lines that begin with `#` are left out. What always holds: a
//! file that cannot be read or understood changes nothing; a change counts once it has been seen twice, so that a
//! file that is being written is not taken for what it will be.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvasir_telemetry::Metrics;
use kvasir_transport::Tasks;
use kvasir_types::WorkerId;

use kvasir_upstream::{AddressError, WorkerAddress, WorkerKey};

use crate::members::{Members, MembersError, Origin};
use crate::settling::Settling;

/// Between two looks at the file. Looking is reading: dates lie on network file systems, and a mounted
/// configuration changes by a link.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longest file that is read.
const BYTES_MAX: u64 = 4 << 20;

/// Why a workers file is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkersFileError {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// It is too long.
    #[error("is longer than {BYTES_MAX} bytes")]
    TooLong,
    /// It is not text.
    #[error("is not UTF-8 text")]
    NotText,
    /// A line is not a worker.
    #[error("line {line}: {error}")]
    Line {
        /// From 1.
        line: usize,
        /// Why not.
        error: AddressError,
    },
    /// A worker stands there twice.
    #[error("line {line}: {url} stands on line {first} already")]
    Twice {
        /// The worker.
        url: String,
        /// The second line.
        line: usize,
        /// The first.
        first: usize,
    },
    /// There are too many.
    #[error("names more than {} workers", Members::MAX)]
    TooMany,
}

type Wanted = BTreeMap<WorkerId, WorkerAddress>;

/// A workers file, and what was last taken from it.
#[derive(Debug)]
pub struct WorkersFile {
    path: PathBuf,
    /// What is taken over.
    wanted: Wanted,
    /// What it holds.
    content: Settling<Result<Vec<u8>, WorkersFileError>>,
    /// The key of workers for which the file names none.
    key: Option<WorkerKey>,
}

impl WorkersFile {
    /// Reads the file for the first time; here an error is the caller's. Workers without a key get `key`.
    pub fn read(path: PathBuf, key: Option<WorkerKey>) -> Result<Self, WorkersFileError> {
        let bytes = read(&path)?;
        let wanted = parse(&bytes, key.as_ref())?;
        Ok(Self {
            path,
            wanted,
            content: Settling::on(Ok(bytes)),
            key,
        })
    }

    /// Wants the workers that it names, and follows the file from now on.
    pub fn start(mut self, members: &Members, metrics: &Metrics, tasks: &Tasks) {
        let (members, metrics) = (members.clone(), metrics.clone());
        for address in self.wanted.values() {
            joined(&members, address);
        }
        let ending = tasks.clone();
        tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = ending.draining() => return,
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
                let path = self.path.clone();
                let look = tokio::task::spawn_blocking(move || read(&path));
                let Ok(bytes) = look.await else { return };
                if self.look(bytes, &members) == Some(false) {
                    let rejected = &metrics.workers_file_rejected_total;
                    rejected.with_label_values::<&str>(&[]).inc();
                }
            }
        });
    }

    /// Takes note of what the file holds now. Says whether it is valid, if that was decided now.
    fn look(&mut self, now: Result<Vec<u8>, WorkersFileError>, members: &Members) -> Option<bool> {
        let parsed = match self.content.look(now)? {
            Ok(bytes) => parse(bytes, self.key.as_ref()),
            Err(error) => Err(error.clone()),
        };
        let path = self.path.display();
        match parsed {
            Ok(wanted) => {
                match wanted.is_empty() {
                    true => {
                        tracing::warn!(%path, "workers file has no worker left: all that it named leave")
                    }
                    false => {
                        tracing::info!(%path, workers = wanted.len(), "workers file taken over")
                    }
                }
                self.take(wanted, members);
                Some(true)
            }
            Err(error) => {
                let workers = self.wanted.len();
                tracing::error!(%path, workers, "workers file {error}; the workers stay as they were");
                Some(false)
            }
        }
    }

    /// Tells what changed in the file, and only that: a worker that an operator removed stays removed until its
    /// line changes.
    fn take(&mut self, wanted: Wanted, members: &Members) {
        for id in self.wanted.keys().filter(|id| !wanted.contains_key(id)) {
            if let Err(error) = members.leave(Origin::File, *id) {
                tracing::error!(worker = %id, %error, "worker of the workers file not removed");
            }
        }
        for (id, address) in &wanted {
            if self.wanted.get(id) != Some(address) {
                joined(members, address);
            }
        }
        self.wanted = wanted;
    }
}

fn joined(members: &Members, address: &WorkerAddress) {
    match members.join(Origin::File, address.clone()) {
        Ok(_) => {}
        Err(error @ (MembersError::Full | MembersError::Behind | MembersError::Fixed)) => {
            tracing::error!(worker = %address, %error, "worker of the workers file not added");
        }
    }
}

fn read(path: &std::path::Path) -> Result<Vec<u8>, WorkersFileError> {
    use std::io::Read;
    let unreadable = |error: std::io::Error| WorkersFileError::Unreadable(error.to_string());
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let mut bounded = file.take(BYTES_MAX + 1);
    bounded.read_to_end(&mut bytes).map_err(unreadable)?;
    match bytes.len() as u64 > BYTES_MAX {
        true => Err(WorkersFileError::TooLong),
        false => Ok(bytes),
    }
}

fn parse(bytes: &[u8], key: Option<&WorkerKey>) -> Result<Wanted, WorkersFileError> {
    let text = std::str::from_utf8(bytes).map_err(|_| WorkersFileError::NotText)?;
    let lines = text.lines().map(str::trim).zip(1..);
    let lines = lines.filter(|(text, _)| !text.is_empty() && !text.starts_with('#'));
    let mut wanted: BTreeMap<WorkerId, (WorkerAddress, usize)> = BTreeMap::new();
    for (text, line) in lines {
        let mut address =
            WorkerAddress::parse(text).map_err(|error| WorkersFileError::Line { line, error })?;
        if address.api_key.is_none() {
            address.api_key = key.cloned();
        }
        if let Some((first, at)) = wanted.insert(address.id(), (address, line)) {
            return Err(WorkersFileError::Twice {
                url: first.to_string(),
                line,
                first: at,
            });
        }
    }
    if wanted.len() > Members::MAX {
        return Err(WorkersFileError::TooMany);
    }
    let rows = wanted.into_iter();
    Ok(rows.map(|(id, (address, _))| (id, address)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::Change;

    fn file(text: &str) -> WorkersFile {
        WorkersFile {
            path: "workers".into(),
            wanted: parse(text.as_bytes(), None).unwrap(),
            content: Settling::on(Ok(text.into())),
            key: None,
        }
    }

    fn address(text: &str) -> WorkerAddress {
        WorkerAddress::parse(text).unwrap()
    }

    #[test]
    fn mistakes_name_their_line() {
        let error = |text: &str| parse(text.as_bytes(), None).unwrap_err().to_string();
        assert_eq!(parse(b"\n# none\n  \n", None).unwrap().len(), 0);
        assert!(error("http://a:1\n\nnonsense").starts_with("line 3: `nonsense` is not a URL"));
        assert!(error("http://a:1\nhttp://b:1\nhttp://A:1/").contains("line 3"));
        assert!(error("http://a:1\nhttp://b:1\nhttp://A:1/").contains("on line 1 already"));
        assert_eq!(parse(b"\xff", None), Err(WorkersFileError::NotText));
    }

    #[test]
    fn a_change_counts_when_it_is_seen_twice_and_only_what_changed_is_told() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut told = move || std::iter::from_fn(|| changes.try_recv().ok()).collect::<Vec<_>>();
        let mut file = file("http://a:1\nhttp://b:1");
        for address in file.wanted.values() {
            joined(&members, address);
        }
        told();
        let mut look = |text: &str| {
            let bytes = Ok(text.as_bytes().to_vec());
            file.look(bytes, &members)
        };
        let next = "http://a:1,block-size=32\nhttp://c:1";
        assert_eq!(look(next), None, "it may still be written");
        assert_eq!(told(), []);
        assert_eq!(look(next), Some(true));
        let (a, b, c) = (
            address("http://a:1,block-size=32"),
            address("http://b:1"),
            address("http://c:1"),
        );
        let mut all = told();
        let left = Change::Left {
            worker: b.id(),
            force: false,
        };
        assert_eq!(all.remove(0), left);
        all.sort_by_key(|change| matches!(change, Change::Joined(_)));
        assert_eq!(all, [Change::Updated(a), Change::Joined(c)]);
        assert_eq!(look(next), None);
        // A bad file, or none, changes nothing; it is said once.
        assert_eq!(
            (look("rubbish"), look("rubbish"), look("rubbish")),
            (None, Some(false), None)
        );
        let gone = || Err(WorkersFileError::Unreadable("gone".into()));
        assert_eq!(file.look(gone(), &members), None);
        assert_eq!(file.look(gone(), &members), Some(false));
        assert_eq!(told(), []);
        // What it held before is no news when it is back.
        let mut look = |text: &str| file.look(Ok(text.into()), &members);
        assert_eq!((look(next), look(next)), (None, Some(true)));
        assert_eq!(told(), []);
    }
}
