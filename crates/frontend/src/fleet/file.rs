//! The workers file: who is wanted, one line each, read again when it changes.
//!
//! A line is what `--worker` takes. Blank lines and lines that begin with `#` are left out. What always holds: a
//! file that cannot be read or understood changes nothing; a change counts once it has been seen twice, so that a
//! file that is being written is not taken for what it will be; a file that lost all its workers changes nothing
//! unless it says so with the line `none`, so that a template that came out empty does not take a fleet away.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use kvasir_telemetry::Metrics;
use kvasir_transport::Tasks;
use kvasir_types::WorkerId;

use kvasir_upstream::{AddressError, WorkerAddress, WorkerKey};

use crate::fleet::members::{Members, MembersError, Origin};
use crate::http::settling::Settling;

/// Between two looks at the file. Looking is reading: dates lie on network file systems, and a mounted
/// configuration changes by a link.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most looks between two times that the list of workers is told what it refused.
const PAUSE_MAX: u32 = 60;
/// Longest file that is read.
const BYTES_MAX: u64 = 4 << 20;

/// The line of a file that wants no workers at all.
const NONE: &str = "none";

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
    /// It is of another kind.
    #[error(
        "line {line}: this looks like {kind}; write one URL a line, such as http://10.0.0.7:8000"
    )]
    OtherFormat {
        /// From 1.
        line: usize,
        /// Which.
        kind: &'static str,
    },
    /// It named workers and names none now.
    #[error("has no worker left; write the line `{NONE}` if that is meant")]
    Emptied,
    /// It wants none and some.
    #[error("line {0}: `{NONE}` stands beside workers; leave one of them out")]
    NoneAndSome(usize),
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
    /// What the list of workers has still to be told.
    owed: Owed,
}

/// What the list of workers did not take yet: it was full, or changes waited.
#[derive(Debug, Default)]
struct Owed {
    joins: BTreeSet<WorkerId>,
    leaves: BTreeSet<WorkerId>,
    /// Looks between the last two times that it was told.
    pause: u32,
    /// Looks until it is told again.
    looks: u32,
    /// Why it was refused last; that is said once.
    why: Option<MembersError>,
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
            owed: Owed::default(),
        })
    }

    /// Wants the workers that it names, and follows the file from now on.
    pub fn start(mut self, members: &Members, metrics: &Metrics, tasks: &Tasks) {
        let (members, metrics) = (members.clone(), metrics.clone());
        self.owed.joins = self.wanted.keys().copied().collect();
        self.settle(&members);
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
                    rejected.inc();
                }
                self.try_again(&members);
            }
        });
    }

    /// Takes note of what the file holds now. Says whether it is valid, if that was decided now.
    fn look(&mut self, now: Result<Vec<u8>, WorkersFileError>, members: &Members) -> Option<bool> {
        let parsed = match self.content.look(now)? {
            Ok(bytes) => parse(bytes, self.key.as_ref()).and_then(|wanted| {
                let meant = self.wanted.is_empty() || says_none(bytes).is_some();
                (!wanted.is_empty() || meant)
                    .then_some(wanted)
                    .ok_or(WorkersFileError::Emptied)
            }),
            Err(error) => Err(error.clone()),
        };
        let path = self.path.display();
        match parsed {
            Ok(wanted) => {
                match wanted.is_empty() {
                    true => {
                        tracing::warn!(%path, "workers file wants no worker: all that it named leave")
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
        let owed = std::mem::take(&mut self.owed);
        let gone = owed.leaves.iter().chain(self.wanted.keys());
        self.owed.leaves = gone
            .filter(|id| !wanted.contains_key(id))
            .copied()
            .collect();
        let news = wanted.iter().filter(|(id, address)| {
            owed.joins.contains(id) || self.wanted.get(id) != Some(address)
        });
        self.owed.joins = news.map(|(id, _)| *id).collect();
        self.wanted = wanted;
        self.settle(members);
    }

    /// Tells the list what it did not take, if it was given its time.
    fn try_again(&mut self, members: &Members) {
        if self.owed.why.is_none() {
            return;
        }
        self.owed.looks = self.owed.looks.saturating_sub(1);
        if self.owed.looks == 0 {
            self.settle(members);
        }
    }

    /// Tells the list what it has to be told; what it refuses stays owed.
    fn settle(&mut self, members: &Members) {
        let mut refused = None;
        let mut done = |told: Result<(), MembersError>| {
            refused = told.err().or(refused);
            told.is_err()
        };
        let Owed { joins, leaves, .. } = &mut self.owed;
        leaves.retain(|id| done(members.leave(Origin::File, *id).map(drop)));
        joins.retain(|id| match self.wanted.get(id) {
            Some(address) => done(members.join(Origin::File, address.clone()).map(drop)),
            None => false,
        });
        let path = self.path.display();
        let (joins, leaves) = (joins.len(), leaves.len());
        match refused {
            Some(error) if self.owed.why != refused => {
                tracing::error!(%path, %error, joins, leaves, "workers file not taken over wholly; it is tried again");
            }
            None if self.owed.why.is_some() => {
                tracing::info!(%path, "workers file taken over wholly now");
            }
            _ => {}
        }
        self.owed.pause = match refused {
            Some(_) => (2 * self.owed.pause).clamp(1, PAUSE_MAX),
            None => 0,
        };
        (self.owed.looks, self.owed.why) = (self.owed.pause, refused);
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

/// The lines that say something, with their numbers.
fn lines(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let lines = text.lines().map(str::trim).zip(1..);
    lines.filter(|(text, _)| !text.is_empty() && !text.starts_with('#'))
}

/// The line that says that no workers are wanted.
fn says_none(bytes: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(bytes).ok()?;
    lines(text)
        .find(|(text, _)| *text == NONE)
        .map(|(_, line)| line)
}

/// What a line is written in, if that is plainly something else.
fn other_format(text: &str) -> Option<&'static str> {
    match text.chars().next()? {
        '{' | '[' | '"' => Some("JSON"),
        '-' => Some("YAML"),
        _ if text.ends_with(':') || text.starts_with("url:") || text.starts_with("workers:") => {
            Some("YAML")
        }
        _ => None,
    }
}

fn parse(bytes: &[u8], key: Option<&WorkerKey>) -> Result<Wanted, WorkersFileError> {
    let text = std::str::from_utf8(bytes).map_err(|_| WorkersFileError::NotText)?;
    let mut wanted: BTreeMap<WorkerId, (WorkerAddress, usize)> = BTreeMap::new();
    for (text, line) in lines(text).filter(|(text, _)| *text != NONE) {
        let mut address = WorkerAddress::parse(text).map_err(|error| match other_format(text) {
            Some(kind) => WorkersFileError::OtherFormat { line, kind },
            None => WorkersFileError::Line { line, error },
        })?;
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
    if let Some(line) = says_none(bytes).filter(|_| !wanted.is_empty()) {
        return Err(WorkersFileError::NoneAndSome(line));
    }
    let rows = wanted.into_iter();
    Ok(rows.map(|(id, (address, _))| (id, address)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::members::{Change, Joined};

    fn file(text: &str) -> WorkersFile {
        WorkersFile {
            path: "workers".into(),
            wanted: parse(text.as_bytes(), None).unwrap(),
            content: Settling::on(Ok(text.into())),
            key: None,
            owed: Owed::default(),
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
            let joined = members.join(Origin::File, address.clone());
            assert_eq!(joined, Ok(Joined::New));
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

    #[test]
    fn a_file_that_lost_its_workers_keeps_them_unless_it_says_none() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut told = move || std::iter::from_fn(|| changes.try_recv().ok()).collect::<Vec<_>>();
        let mut file = file("http://a:1\nhttp://b:1");
        for address in file.wanted.values() {
            members.join(Origin::File, address.clone()).unwrap();
        }
        told();
        let mut look = |text: &str| {
            file.look(Ok(text.into()), &members);
            file.look(Ok(text.into()), &members)
        };
        assert_eq!(look(""), Some(false));
        assert_eq!(look("# http://a:1\n"), Some(false));
        assert_eq!(look("http://a:1\nnone\n"), Some(false));
        assert_eq!(told(), []);
        assert_eq!(look("# all go\n none \n"), Some(true));
        assert_eq!(told().len(), 2);
        // Where nobody is wanted, an empty file is no news.
        assert_eq!(look(""), Some(true));
        assert_eq!(told(), []);
    }

    #[test]
    fn a_file_of_another_kind_is_called_by_its_name() {
        let error = |text: &str| parse(text.as_bytes(), None).unwrap_err().to_string();
        let yaml =
            "line 1: this looks like YAML; write one URL a line, such as http://10.0.0.7:8000";
        assert_eq!(error("workers:\n  - http://a:1\n"), yaml);
        assert_eq!(error("- http://a:1"), yaml);
        assert!(error("[\"http://a:1\"]").contains("looks like JSON"));
        assert!(error("gpu-2:8000").contains("is not a URL"));
    }

    #[test]
    fn what_the_full_list_refuses_is_tried_again_less_and_less_often() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut told = move || std::iter::from_fn(|| changes.try_recv().ok()).collect::<Vec<_>>();
        let other = |n: usize| address(&format!("http://other:{n}"));
        for n in 1..=Members::MAX {
            assert_eq!(members.join(Origin::Api, other(n)), Ok(Joined::New));
        }
        told();
        let mut file = file("");
        let wanted = parse(b"http://a:1\nhttp://b:1", None).unwrap();
        file.take(wanted.clone(), &members);
        assert_eq!(file.owed.why, Some(MembersError::Full));
        // Looks after which it was told again: the pause doubles up to its bound.
        let mut times = Vec::new();
        for look in 1..=200 {
            let before = file.owed.looks;
            file.try_again(&members);
            if file.owed.looks >= before {
                times.push(look);
            }
        }
        assert_eq!(times, [1, 3, 7, 15, 31, 63, 123, 183]);
        assert_eq!(told(), []);
        // One place: one of the two is taken, the other stays owed; then there is place for it, too.
        let free = |n| {
            assert_eq!(members.remove(other(n).id(), false), Ok(true));
            members.gone(other(n).id());
        };
        let mut look_until = |file: &mut WorkersFile, left: usize| {
            for _ in 0..=PAUSE_MAX {
                file.try_again(&members);
                if file.owed.joins.len() == left {
                    break;
                }
            }
            assert_eq!(file.owed.joins.len(), left);
            let joined = told()
                .into_iter()
                .filter(|c| matches!(c, Change::Joined(_)));
            assert_eq!(joined.count(), 1);
        };
        free(1);
        look_until(&mut file, 1);
        free(2);
        look_until(&mut file, 0);
        assert_eq!((file.owed.why, file.owed.pause), (None, 0));
        assert!(wanted.keys().all(|id| members.get(*id).is_some()));
    }

    #[test]
    fn what_is_owed_follows_the_file() {
        let members = Members::default();
        let mut changes = members.follow();
        for n in 1..=Members::MAX {
            let other = address(&format!("http://other:{n}"));
            members.join(Origin::Api, other).unwrap();
        }
        let mut file = file("");
        file.take(parse(b"http://a:1", None).unwrap(), &members);
        // Its line is gone before there was place: nobody waits for it any more.
        file.take(Wanted::new(), &members);
        assert_eq!((file.owed.joins.len(), file.owed.why), (0, None));
        while changes.try_recv().is_ok() {}
        // A leave that finds the changes waiting is owed as well.
        let other = address("http://other:1");
        members.join(Origin::File, other.clone()).unwrap();
        members.leave(Origin::Api, other.id()).unwrap();
        file.wanted = BTreeMap::from([(other.id(), other.clone())]);
        let mut size = 0;
        while members.join(Origin::Api, busy(size)).is_ok() {
            size += 1;
        }
        file.take(Wanted::new(), &members);
        assert_eq!(file.owed.why, Some(MembersError::Behind));
        while changes.try_recv().is_ok() {}
        file.try_again(&members);
        let left = Change::Left {
            worker: other.id(),
            force: false,
        };
        assert_eq!(changes.try_recv(), Ok(left));
        assert_eq!(file.owed.why, None);
    }

    /// A worker of which something new is said each time.
    fn busy(size: u32) -> WorkerAddress {
        address(&format!("http://other:2,block-size={}", size + 1))
    }
}
