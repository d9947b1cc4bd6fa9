//! The workers file: one worker a line, read again when it changes.
//!
//! A line is what `--worker` takes. Blank lines and lines that begin with `#` are left out. What always holds: a
//! file that cannot be read or understood changes nothing; a change counts once it has been seen twice, so that a
//! file that is being written is not taken for what it will be; a file that lost all its workers changes nothing
//! unless it says so with the line `none`, so that a template that came out empty does not take a fleet away.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_telemetry::Metrics;
use kvasir_types::{ApiKey, WorkerId, WorkerRecord};
use kvasir_upstream::{AddressError, default_api_key, parse_worker};

use crate::fleet::members::{Members, MembersError, SourceName, WorkerSource};
use crate::http::debounce::Debounce;

/// Between two looks at the file. Looking is reading: dates lie on network file systems, and a mounted
/// configuration changes by a link.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most looks between two times that the list of workers is offered what it refused.
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

/// The workers of a file, by id.
type Workers = BTreeMap<WorkerId, WorkerRecord>;

/// What operators see of where a worker of a file comes from.
const KIND: &str = "file";

/// A workers file, and what was last taken from it.
#[derive(Debug)]
pub struct WorkersFile {
    path: PathBuf,
    /// What is taken over.
    workers: Workers,
    /// What it holds.
    content: Debounce<Result<Vec<u8>, WorkersFileError>>,
    /// The key of workers for which the file names none.
    key: Option<ApiKey>,
    retry: Retry,
}

/// When the list of workers is offered again what it refused.
#[derive(Debug, Default)]
struct Retry {
    /// Looks between the last two times that it was offered.
    pause: u32,
    /// Looks until it is offered again.
    looks: u32,
    /// Why it was refused last; that is logged once.
    cause: Option<MembersError>,
}

impl WorkersFile {
    /// Reads the file for the first time; here an error is the caller's. Workers without a key get `key`.
    pub fn read(path: PathBuf, key: Option<ApiKey>) -> Result<Self, WorkersFileError> {
        let bytes = read(&path)?;
        let workers = parse(&bytes, key.as_ref())?;
        Ok(Self {
            path,
            workers,
            content: Debounce::on(Ok(bytes)),
            key,
            retry: Retry::default(),
        })
    }

    /// The workers that a file of these bytes names, in the order of their ids.
    pub fn parse(bytes: &[u8]) -> Result<Vec<WorkerRecord>, WorkersFileError> {
        Ok(parse(bytes, None)?.into_values().collect())
    }

    /// Brings the workers that it names, and follows the file from now on.
    pub fn start(mut self, members: &Members, metrics: &Metrics, tasks: &Tasks) {
        let name = SourceName::new(KIND, self.path.display().to_string());
        let (source, metrics) = (members.source(name), metrics.clone());
        self.offer(&source);
        let ending = tasks.clone();
        tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = ending.draining() => return source.detach(),
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
                let path = self.path.clone();
                let look = tokio::task::spawn_blocking(move || read(&path));
                let Ok(bytes) = look.await else {
                    return source.detach();
                };
                if self.look(bytes, &source) == Some(false) {
                    let rejected = &metrics.workers_file_rejected_total;
                    rejected.inc();
                }
                self.try_again(&source);
            }
        });
    }

    /// Takes note of what the file holds now. Says whether it is valid, if that was decided now.
    fn look(
        &mut self,
        now: Result<Vec<u8>, WorkersFileError>,
        source: &WorkerSource,
    ) -> Option<bool> {
        let parsed = match self.content.look(now)? {
            Ok(bytes) => parse(bytes, self.key.as_ref()).and_then(|workers| {
                let meant = self.workers.is_empty() || says_none(bytes).is_some();
                (!workers.is_empty() || meant)
                    .then_some(workers)
                    .ok_or(WorkersFileError::Emptied)
            }),
            Err(error) => Err(error.clone()),
        };
        let path = self.path.display();
        match parsed {
            Ok(workers) => {
                match workers.is_empty() {
                    true => {
                        tracing::warn!(%path, "workers file wants no worker: all that it named leave")
                    }
                    false => {
                        tracing::info!(%path, workers = workers.len(), "workers file taken over")
                    }
                }
                self.workers = workers;
                self.offer(source);
                Some(true)
            }
            Err(error) => {
                let workers = self.workers.len();
                tracing::error!(%path, workers, "workers file {error}; the workers stay as they were");
                Some(false)
            }
        }
    }

    /// Offers the list what it refused, if it was given its time.
    fn try_again(&mut self, source: &WorkerSource) {
        if self.retry.cause.is_none() {
            return;
        }
        self.retry.looks = self.retry.looks.saturating_sub(1);
        if self.retry.looks == 0 {
            self.offer(source);
        }
    }

    /// Offers the list the workers of the file. Only what changed in the file acts: a worker that an operator removed stays
    /// removed until its line changes. What the list refuses is offered again.
    fn offer(&mut self, source: &WorkerSource) {
        let refused = source.replace(self.workers.values().cloned()).err();
        let cause = refused.map(|refused| refused.cause);
        let path = self.path.display();
        match refused {
            Some(refused) if self.retry.cause != cause => {
                let (error, workers) = (refused.cause, refused.records);
                tracing::error!(%path, %error, workers, "workers file not taken over wholly; it is tried again");
            }
            None if self.retry.cause.is_some() => {
                tracing::info!(%path, "workers file taken over wholly now");
            }
            _ => {}
        }
        self.retry.pause = match refused {
            Some(_) => (2 * self.retry.pause).clamp(1, PAUSE_MAX),
            None => 0,
        };
        (self.retry.looks, self.retry.cause) = (self.retry.pause, cause);
    }
}

fn read(path: &std::path::Path) -> Result<Vec<u8>, WorkersFileError> {
    use std::io::Read;
    let unreadable = |error: std::io::Error| WorkersFileError::Unreadable(error.to_string());
    // A pipe would be waited for, now and at every look.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(WorkersFileError::Unreadable("it is not a file".into()));
    }
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

/// The line that says that there are to be no workers.
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

fn parse(bytes: &[u8], key: Option<&ApiKey>) -> Result<Workers, WorkersFileError> {
    let text = std::str::from_utf8(bytes).map_err(|_| WorkersFileError::NotText)?;
    let mut workers: BTreeMap<WorkerId, (WorkerRecord, usize)> = BTreeMap::new();
    for (text, line) in lines(text).filter(|(text, _)| *text != NONE) {
        let mut worker = parse_worker(text).map_err(|error| match other_format(text) {
            Some(kind) => WorkersFileError::OtherFormat { line, kind },
            None => WorkersFileError::Line { line, error },
        })?;
        default_api_key(&mut worker, key);
        if let Some((first, at)) = workers.insert(worker.id, (worker, line)) {
            return Err(WorkersFileError::Twice {
                url: first.transport.to_string(),
                line,
                first: at,
            });
        }
    }
    if workers.len() > Members::MAX {
        return Err(WorkersFileError::TooMany);
    }
    if let Some(line) = says_none(bytes).filter(|_| !workers.is_empty()) {
        return Err(WorkersFileError::NoneAndSome(line));
    }
    let rows = workers.into_iter();
    Ok(rows.map(|(id, (worker, _))| (id, worker)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::members::{Change, Changes, JoinOutcome};

    fn file(text: &str) -> WorkersFile {
        WorkersFile {
            path: "workers".into(),
            workers: parse(text.as_bytes(), None).unwrap(),
            content: Debounce::on(Ok(text.into())),
            key: None,
            retry: Retry::default(),
        }
    }

    fn worker(text: &str) -> WorkerRecord {
        parse_worker(text).unwrap()
    }

    fn source(members: &Members, kind: &'static str) -> WorkerSource {
        members.source(SourceName::new(kind, "test"))
    }

    fn told(changes: &mut Changes) -> Vec<Change> {
        std::iter::from_fn(|| changes.try_next()).collect()
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
        let mut told = move || told(&mut changes);
        let mut file = file("http://a:1\nhttp://b:1");
        let source = source(&members, KIND);
        file.offer(&source);
        assert_eq!(told().len(), 2);
        let mut look = |text: &str| {
            let bytes = Ok(text.as_bytes().to_vec());
            file.look(bytes, &source)
        };
        let next = "http://a:1,block-size=32\nhttp://c:1";
        assert_eq!(look(next), None, "it may still be written");
        assert_eq!(told(), []);
        assert_eq!(look(next), Some(true));
        let (a, b, c) = (
            worker("http://a:1,block-size=32"),
            worker("http://b:1"),
            worker("http://c:1"),
        );
        let mut all = told();
        let left = Change::Left {
            worker: b.id,
            force: false,
        };
        assert_eq!(all.remove(0), left);
        all.sort_by_key(|change| matches!(change, Change::Joined(_)));
        assert_eq!(all, [Change::Updated(a.into()), Change::Joined(c.into())]);
        assert_eq!(look(next), None);
        // A bad file, or none, changes nothing; it is said once.
        assert_eq!(
            (look("rubbish"), look("rubbish"), look("rubbish")),
            (None, Some(false), None)
        );
        let gone = || Err(WorkersFileError::Unreadable("gone".into()));
        assert_eq!(file.look(gone(), &source), None);
        assert_eq!(file.look(gone(), &source), Some(false));
        assert_eq!(told(), []);
        // What it held before is no news when it is back.
        let mut look = |text: &str| file.look(Ok(text.into()), &source);
        assert_eq!((look(next), look(next)), (None, Some(true)));
        assert_eq!(told(), []);
    }

    #[test]
    fn a_file_that_lost_its_workers_keeps_them_unless_it_says_none() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut told = move || told(&mut changes);
        let mut file = file("http://a:1\nhttp://b:1");
        let source = source(&members, KIND);
        file.offer(&source);
        told();
        let mut look = |text: &str| {
            file.look(Ok(text.into()), &source);
            file.look(Ok(text.into()), &source)
        };
        assert_eq!(look(""), Some(false));
        assert_eq!(look("# http://a:1\n"), Some(false));
        assert_eq!(look("http://a:1\nnone\n"), Some(false));
        assert_eq!(told(), []);
        assert_eq!(look("# all go\n none \n"), Some(true));
        assert_eq!(told().len(), 2);
        // Where there is nobody, an empty file is no news.
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

    /// As many workers of an operator as the list takes.
    fn fill(api: &WorkerSource) {
        for n in 1..=Members::MAX {
            let other = worker(&format!("http://other:{n}"));
            assert_eq!(api.join(other), Ok(JoinOutcome::New));
        }
    }

    #[test]
    fn what_the_full_list_refuses_is_tried_again_less_and_less_often() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut told = move || told(&mut changes);
        let (api, source) = (source(&members, "api"), source(&members, KIND));
        fill(&api);
        told();
        let mut file = file("http://a:1\nhttp://b:1");
        file.offer(&source);
        assert_eq!(file.retry.cause, Some(MembersError::Full));
        // Looks after which it was offered again: the pause doubles up to its bound.
        let mut times = Vec::new();
        for look in 1..=200 {
            let before = file.retry.looks;
            file.try_again(&source);
            if file.retry.looks >= before {
                times.push(look);
            }
        }
        assert_eq!(times, [1, 3, 7, 15, 31, 63, 123, 183]);
        assert_eq!(told(), []);
        // One place: one of the two is taken, the other stays; then there is place for it, too.
        let free = |n| {
            let other = worker(&format!("http://other:{n}"));
            assert_eq!(members.remove(other.id, false), Ok(true));
            members.gone(other.id);
        };
        let here = |file: &WorkersFile| {
            let ids = file.workers.keys();
            ids.filter(|id| members.get(**id).is_some()).count()
        };
        let mut look_until = |file: &mut WorkersFile, taken: usize| {
            for _ in 0..=PAUSE_MAX {
                file.try_again(&source);
                if here(file) == taken {
                    break;
                }
            }
            assert_eq!(here(file), taken);
            let joined = told()
                .into_iter()
                .filter(|c| matches!(c, Change::Joined(_)));
            assert_eq!(joined.count(), 1);
        };
        free(1);
        look_until(&mut file, 1);
        free(2);
        look_until(&mut file, 2);
        assert_eq!((file.retry.cause, file.retry.pause), (None, 0));
    }

    #[test]
    fn what_is_offered_again_follows_the_file() {
        let members = Members::default();
        let _changes = members.follow();
        let (api, source) = (source(&members, "api"), source(&members, KIND));
        fill(&api);
        let mut file = file("http://a:1");
        file.offer(&source);
        assert_eq!(file.retry.cause, Some(MembersError::Full));
        // Its line is gone before there was place: nobody waits for it any more.
        file.workers.clear();
        file.offer(&source);
        assert_eq!(file.retry.cause, None);
        // A worker of somebody else's leaves only the file.
        let other = worker("http://other:1");
        file.workers = BTreeMap::from([(other.id, other.clone())]);
        file.offer(&source);
        assert_eq!(members.get(other.id).unwrap().sources.len(), 2);
        file.workers.clear();
        file.offer(&source);
        assert_eq!(members.get(other.id).unwrap().sources.len(), 1);
    }
}
