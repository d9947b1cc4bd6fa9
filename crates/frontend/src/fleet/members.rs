//! Who is to be a worker, and who says so.
//!
//! Answers one question: which engine servers are wanted now? Flags, the workers file and operators all write
//! into this one list; every change of it is told once, in order, as a [`Change`]. Whoever follows the changes
//! ([`Fleet`](crate::Fleet)) makes them true and reports what became of them.
//!
//! Invariants: a worker is wanted as long as somebody wants it; one that nobody wants stays in the list until
//! what runs there has ended; the list has at most [`Members::MAX`] rows.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_types::WorkerId;
use kvasir_upstream::WorkerAddress;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::Instant;

/// Changes that wait for their follower.
const CHANGES_MAX: usize = 2 * Members::MAX;

/// Who wants a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// `--worker`.
    Flag,
    /// `--workers-file`.
    File,
    /// `POST /workers`.
    Api,
}

impl Origin {
    /// Its name for operators.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Flag => "flag",
            Self::File => "file",
            Self::Api => "api",
        }
    }
}

/// What happened to the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One more is wanted, or one that was leaving is wanted again.
    Joined(WorkerAddress),
    /// What its user says about one has changed.
    Updated(WorkerAddress),
    /// Nobody wants it any more.
    Left {
        /// Which.
        worker: WorkerId,
        /// Whether what runs there is cut off, too.
        force: bool,
    },
}

/// How far a wanted worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not answered yet.
    Joining,
    /// It serves its models.
    Serving,
    /// It serves its models, but says that it is not well, or does not say that it is.
    Unhealthy,
    /// It does not answer.
    Unreachable,
    /// It ends what it has and gets nothing new.
    Draining,
}

impl State {
    /// All there are.
    pub const ALL: [Self; 5] = [
        Self::Joining,
        Self::Serving,
        Self::Unhealthy,
        Self::Unreachable,
        Self::Draining,
    ];

    /// Its name for operators.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Serving => "serving",
            Self::Unhealthy => "unhealthy",
            Self::Unreachable => "unreachable",
            Self::Draining => "draining",
        }
    }
}

/// What a join did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It is new, or back while it was leaving.
    New,
    /// It was there; what is said about it is new.
    Changed,
    /// It was there, just so.
    Same,
}

/// Why the list cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// Nobody follows.
    #[error("the workers of this server cannot be changed at run time")]
    Fixed,
    /// Too many rows.
    #[error("there are {} workers already, which is the limit", Members::MAX)]
    Full,
    /// The follower is far behind.
    #[error("too many changes of workers wait; try again")]
    Behind,
}

/// One row of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it is and what is said about it.
    pub address: WorkerAddress,
    /// Who wants it; nobody, once it is leaving.
    pub origins: BTreeSet<Origin>,
    /// How far it is.
    pub state: State,
    /// Whether it has ever served a model.
    pub has_served: bool,
    /// When it was named.
    named: Instant,
}

/// The list. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Members {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    rows: BTreeMap<WorkerId, Member>,
    changes: Option<Sender<Change>>,
}

impl Members {
    /// Workers in the list, those that are leaving included.
    pub const MAX: usize = 4096;
    /// How long a worker that has never answered may still be loading its model, beside others that serve.
    pub const AWAITED: Duration = Duration::from_secs(30 * 60);

    /// Every change from now on. The list is for one follower: a second takes it over.
    pub fn follow(&self) -> Receiver<Change> {
        let (sender, receiver) = mpsc::channel(CHANGES_MAX);
        self.lock().changes = Some(sender);
        receiver
    }

    /// `origin` wants this worker.
    pub fn join(&self, origin: Origin, address: WorkerAddress) -> Result<Joined, MembersError> {
        let mut inner = self.lock();
        let full = inner.rows.len() >= Self::MAX;
        let Inner { rows, changes } = &mut *inner;
        let changes = changes.as_ref().ok_or(MembersError::Fixed)?;
        match rows.entry(address.id()) {
            Entry::Vacant(_) if full => Err(MembersError::Full),
            Entry::Vacant(place) => {
                tell(changes, Change::Joined(address.clone()))?;
                place.insert(Member {
                    address,
                    origins: BTreeSet::from([origin]),
                    state: State::Joining,
                    has_served: false,
                    named: Instant::now(),
                });
                Ok(Joined::New)
            }
            Entry::Occupied(mut place) => {
                let row = place.get_mut();
                let mut address = address;
                if address.api_key.is_none() {
                    // Whoever does not speak of the key does not take it away.
                    address.api_key.clone_from(&row.address.api_key);
                }
                let joined = match (row.origins.is_empty(), row.address == address) {
                    (true, _) => Joined::New,
                    (false, false) => Joined::Changed,
                    (false, true) => Joined::Same,
                };
                match joined {
                    Joined::New => tell(changes, Change::Joined(address.clone()))?,
                    Joined::Changed => tell(changes, Change::Updated(address.clone()))?,
                    Joined::Same => {}
                }
                row.origins.insert(origin);
                row.address = address;
                Ok(joined)
            }
        }
    }

    /// `origin` wants this worker no longer; it leaves when nobody does. Says whether it leaves.
    pub fn leave(&self, origin: Origin, worker: WorkerId) -> Result<bool, MembersError> {
        let mut inner = self.lock();
        let Some(row) = inner.rows.get_mut(&worker) else {
            return Ok(false);
        };
        if !row.origins.contains(&origin) {
            return Ok(false);
        }
        if row.origins.len() > 1 {
            row.origins.remove(&origin);
            return Ok(false);
        }
        inner.let_go(worker, false)
    }

    /// It leaves, whoever wants it. Says whether it was there; one that is leaving already can still be cut.
    pub fn remove(&self, worker: WorkerId, force: bool) -> Result<bool, MembersError> {
        let mut inner = self.lock();
        let Some(row) = inner.rows.get(&worker) else {
            return Ok(false);
        };
        if row.origins.is_empty() && !force {
            return Ok(true);
        }
        inner.let_go(worker, force)
    }

    /// The rows, by id.
    #[must_use]
    pub fn list(&self) -> Vec<(WorkerId, Member)> {
        let inner = self.lock();
        let rows = inner.rows.iter();
        rows.map(|(id, row)| (*id, row.clone())).collect()
    }

    /// The row of a worker.
    #[must_use]
    pub fn get(&self, worker: WorkerId) -> Option<Member> {
        self.lock().rows.get(&worker).cloned()
    }

    /// The follower says how far a worker is. One that is leaving stays so.
    pub(crate) fn report(&self, worker: WorkerId, state: State) {
        if let Some(row) = self.lock().rows.get_mut(&worker)
            && !row.origins.is_empty()
        {
            row.state = state;
            row.has_served |= matches!(state, State::Serving | State::Unhealthy);
        }
    }

    /// The wanted workers that have not served anything yet and may still bring a model that nobody knows.
    ///
    /// While nobody has served, all of them are waited for; beside workers that serve, each for [`Self::AWAITED`].
    #[must_use]
    pub fn awaited(&self) -> Vec<WorkerAddress> {
        let inner = self.lock();
        let alone = !inner.rows.values().any(|row| row.has_served);
        let is_awaited = |row: &&Member| {
            let in_time = alone || row.named.elapsed() < Self::AWAITED;
            !row.has_served && !row.origins.is_empty() && in_time
        };
        let rows = inner.rows.values().filter(is_awaited);
        rows.map(|row| row.address.clone()).collect()
    }

    /// The follower says that a worker that was leaving is gone; its row stays if it is wanted again.
    pub(crate) fn gone(&self, worker: WorkerId) {
        if let Entry::Occupied(row) = self.lock().rows.entry(worker)
            && row.get().origins.is_empty()
        {
            row.remove();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn let_go(&mut self, worker: WorkerId, force: bool) -> Result<bool, MembersError> {
        let changes = self.changes.as_ref().ok_or(MembersError::Fixed)?;
        tell(changes, Change::Left { worker, force })?;
        if let Some(row) = self.rows.get_mut(&worker) {
            row.origins.clear();
            row.state = State::Draining;
        }
        Ok(true)
    }
}

fn tell(changes: &Sender<Change>, change: Change) -> Result<(), MembersError> {
    use mpsc::error::TrySendError;
    changes.try_send(change).map_err(|error| match error {
        TrySendError::Full(_) => MembersError::Behind,
        TrySendError::Closed(_) => MembersError::Fixed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> WorkerAddress {
        WorkerAddress::parse(text).unwrap()
    }

    fn told(changes: &mut Receiver<Change>) -> Vec<Change> {
        std::iter::from_fn(|| changes.try_recv().ok()).collect()
    }

    #[test]
    fn who_does_not_speak_of_a_key_does_not_take_it_away() {
        let members = Members::default();
        let mut changes = members.follow();
        let mut keyed = address("http://a:1");
        keyed.api_key = Some(kvasir_upstream::WorkerKey::new("secret").unwrap());
        assert_eq!(members.join(Origin::Flag, keyed.clone()), Ok(Joined::New));
        let again = members.join(Origin::Api, address("http://a:1"));
        assert_eq!(again, Ok(Joined::Same));
        assert_eq!(told(&mut changes), [Change::Joined(keyed)]);
    }

    #[test]
    fn a_worker_stays_as_long_as_somebody_wants_it() {
        let members = Members::default();
        let mut changes = members.follow();
        let plain = address("http://a:1");
        let id = plain.id();
        assert_eq!(members.join(Origin::Flag, plain.clone()), Ok(Joined::New));
        assert_eq!(members.join(Origin::File, plain.clone()), Ok(Joined::Same));
        assert_eq!(told(&mut changes), [Change::Joined(plain.clone())]);
        let said = address("http://a:1,block-size=32");
        assert_eq!(
            members.join(Origin::File, said.clone()),
            Ok(Joined::Changed)
        );
        assert_eq!(told(&mut changes), [Change::Updated(said)]);
        assert_eq!(
            members.leave(Origin::Api, id),
            Ok(false),
            "it never wanted it"
        );
        assert_eq!(members.leave(Origin::File, id), Ok(false), "the flag does");
        assert_eq!(members.leave(Origin::Flag, id), Ok(true));
        let left = |force| Change::Left { worker: id, force };
        assert_eq!(told(&mut changes), [left(false)]);
        assert_eq!(members.get(id).unwrap().state, State::Draining);
        // While it is leaving: asking again says nothing new, force does, and it can come back.
        assert_eq!(members.remove(id, false), Ok(true));
        assert_eq!(told(&mut changes), []);
        assert_eq!(members.remove(id, true), Ok(true));
        assert_eq!(told(&mut changes), [left(true)]);
        assert_eq!(members.join(Origin::Api, plain.clone()), Ok(Joined::New));
        members.gone(id);
        assert!(members.get(id).is_some(), "it is wanted again");
        assert_eq!(told(&mut changes), [Change::Joined(plain)]);
        assert_eq!(members.remove(id, false), Ok(true));
        members.report(id, State::Serving);
        assert_eq!(members.get(id).unwrap().state, State::Draining);
        members.gone(id);
        assert_eq!(members.remove(id, false), Ok(false));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_not_served_yet_is_awaited() {
        let members = Members::default();
        let _changes = members.follow();
        assert!(members.awaited().is_empty(), "nobody is named");
        let (one, two) = (address("http://a:1"), address("http://b:1"));
        members.join(Origin::Flag, one.clone()).unwrap();
        members.join(Origin::Flag, two.clone()).unwrap();
        tokio::time::advance(2 * Members::AWAITED).await;
        members.report(one.id(), State::Unreachable);
        assert_eq!(members.awaited().len(), 2, "without them there is nothing");
        members.report(one.id(), State::Serving);
        assert!(members.awaited().is_empty(), "the other has had its time");
        let late = address("http://c:1");
        members.join(Origin::Api, late.clone()).unwrap();
        assert_eq!(members.awaited(), std::slice::from_ref(&late));
        members.report(one.id(), State::Unreachable);
        assert_eq!(
            members.awaited(),
            std::slice::from_ref(&late),
            "what served once is known"
        );
        members.leave(Origin::Api, late.id()).unwrap();
        assert!(members.awaited().is_empty());
    }

    #[test]
    fn without_a_follower_and_beyond_the_bound_nothing_changes() {
        let members = Members::default();
        let at = |n: usize| address(&format!("http://a:{n}"));
        assert_eq!(members.join(Origin::Api, at(1)), Err(MembersError::Fixed));
        let changes = members.follow();
        for n in 1..=Members::MAX {
            assert_eq!(members.join(Origin::Api, at(n)), Ok(Joined::New));
        }
        let one_more = at(Members::MAX + 1);
        assert_eq!(members.join(Origin::Api, one_more), Err(MembersError::Full));
        assert_eq!(members.list().len(), Members::MAX);
        drop(changes);
        assert_eq!(members.remove(at(1).id(), false), Err(MembersError::Fixed));
        assert_eq!(members.get(at(1).id()).unwrap().state, State::Joining);
    }
}
