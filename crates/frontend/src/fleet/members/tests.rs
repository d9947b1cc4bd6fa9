//! Sources that come, change and go, against a plain model of what must be left.

use kvasir_upstream::{parse_api_key, parse_worker, set_api_key};
use proptest::prelude::*;

use super::*;

fn worker(text: &str) -> WorkerRecord {
    parse_worker(text).unwrap()
}

fn keyed(text: &str, key: &str) -> WorkerRecord {
    let mut record = worker(text);
    set_api_key(&mut record, parse_api_key(key).unwrap()).unwrap();
    record
}

fn source(members: &Members, kind: &'static str) -> WorkerSource {
    members.source(SourceName::new(kind, "test"))
}

fn told(changes: &mut Changes) -> Vec<Change> {
    std::iter::from_fn(|| changes.try_next()).collect()
}

fn joined(record: &WorkerRecord) -> Change {
    Change::Joined(Arc::new(record.clone()))
}

fn updated(record: &WorkerRecord) -> Change {
    Change::Updated(Arc::new(record.clone()))
}

fn kinds(member: &Member) -> Vec<&'static str> {
    member.sources.iter().map(|name| name.kind).collect()
}

#[test]
fn a_source_that_does_not_speak_of_a_key_does_not_take_it_away() {
    let members = Members::default();
    let mut changes = members.follow();
    let (flag, api) = (source(&members, "flag"), source(&members, "api"));
    let with_key = keyed("http://a:1", "secret");
    assert_eq!(flag.join(with_key.clone()), Ok(JoinOutcome::New));
    assert_eq!(api.join(worker("http://a:1")), Ok(JoinOutcome::Same));
    assert_eq!(flag.join(worker("http://a:1")), Ok(JoinOutcome::Same));
    assert_eq!(told(&mut changes), [joined(&with_key)]);
    // Its source takes its key along.
    drop(flag);
    assert_eq!(told(&mut changes), [updated(&worker("http://a:1"))]);
}

#[test]
fn a_worker_stays_as_long_as_a_source_has_it() {
    let members = Members::default();
    let mut changes = members.follow();
    let (flag, file) = (source(&members, "flag"), source(&members, "file"));
    let api = source(&members, "api");
    let plain = worker("http://a:1");
    let id = plain.id;
    assert_eq!(flag.join(plain.clone()), Ok(JoinOutcome::New));
    assert_eq!(file.join(plain.clone()), Ok(JoinOutcome::Same));
    assert_eq!(told(&mut changes), [joined(&plain)]);
    let said = worker("http://a:1,block-size=32");
    assert_eq!(file.join(said.clone()), Ok(JoinOutcome::Changed));
    assert_eq!(told(&mut changes), [updated(&said)]);
    assert_eq!(kinds(&members.get(id).unwrap()), ["flag", "file"]);
    assert!(!api.leave(id), "it never had it");
    assert!(!file.leave(id), "the flag has it");
    assert_eq!(told(&mut changes), [updated(&plain)], "as the flag says");
    assert!(flag.leave(id));
    let left = |force| Change::Left { worker: id, force };
    assert_eq!(told(&mut changes), [left(false)]);
    assert_eq!(members.get(id).unwrap().state, MemberState::Draining);
    // While it is leaving: asking again says nothing new, force does, and it can come back.
    assert_eq!(members.remove(id, false), Ok(true));
    assert_eq!(told(&mut changes), []);
    assert_eq!(members.remove(id, true), Ok(true));
    assert_eq!(told(&mut changes), [left(true)]);
    assert_eq!(api.join(plain.clone()), Ok(JoinOutcome::New));
    members.gone(id);
    assert!(members.get(id).is_some(), "it is a member again");
    assert_eq!(told(&mut changes), [joined(&plain)]);
    assert_eq!(members.remove(id, false), Ok(true));
    members.report(id, MemberState::Serving);
    assert_eq!(members.get(id).unwrap().state, MemberState::Draining);
    members.gone(id);
    assert_eq!(members.remove(id, false), Ok(false));
}

#[test]
fn a_lost_source_takes_back_what_it_brought_and_nothing_else() {
    let members = Members::default();
    let mut changes = members.follow();
    let (flag, etcd) = (source(&members, "flag"), source(&members, "etcd"));
    let (a, b) = (worker("http://a:1"), worker("http://b:1"));
    let larger = worker("http://b:1,block-size=32");
    flag.join(a.clone()).unwrap();
    flag.join(b.clone()).unwrap();
    let c = worker("http://c:1");
    etcd.replace([larger, c.clone()]).unwrap();
    told(&mut changes);
    drop(etcd);
    let left = Change::Left {
        worker: c.id,
        force: false,
    };
    let mut all = told(&mut changes);
    all.sort_by_key(|change| matches!(change, Change::Left { .. }));
    assert_eq!(all, [updated(&b), left]);
    assert_eq!(kinds(&members.get(a.id).unwrap()), ["flag"]);
    assert_eq!(kinds(&members.get(b.id).unwrap()), ["flag"]);
    assert!(members.get(c.id).unwrap().sources.is_empty());
    // A backend that is back is a new source.
    let etcd = source(&members, "etcd");
    etcd.replace([c.clone()]).unwrap();
    assert_eq!(told(&mut changes), [joined(&c)]);
    etcd.withdraw();
    members.gone(c.id);
    assert!(members.get(c.id).is_none());
}

#[test]
fn what_an_operator_removed_stays_removed_until_its_source_says_something_else() {
    let members = Members::default();
    let mut changes = members.follow();
    let (file, api) = (source(&members, "file"), source(&members, "api"));
    let (a, b) = (worker("http://a:1"), worker("http://b:1"));
    file.replace([a.clone(), b.clone()]).unwrap();
    members.remove(a.id, false).unwrap();
    told(&mut changes);
    members.gone(a.id);
    file.replace([a.clone(), b.clone()]).unwrap();
    assert_eq!((told(&mut changes), members.get(a.id)), (vec![], None));
    // An operator's own word acts at once, and so does another word of the source.
    api.join(a.clone()).unwrap();
    assert_eq!(told(&mut changes), [joined(&a)]);
    assert_eq!(kinds(&members.get(a.id).unwrap()), ["api"]);
    let larger = worker("http://a:1,block-size=32");
    file.replace([larger.clone(), b.clone()]).unwrap();
    assert_eq!(told(&mut changes), [updated(&larger)]);
    file.replace([b.clone()]).unwrap();
    assert_eq!(told(&mut changes), [updated(&a)]);
    // What it left and has again is news.
    file.leave(b.id);
    file.replace([b.clone()]).unwrap();
    assert_eq!(members.get(b.id).unwrap().sources.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn who_has_not_served_yet_is_awaited() {
    let members = Members::default();
    let _changes = members.follow();
    let (flag, api) = (source(&members, "flag"), source(&members, "api"));
    assert!(members.awaited().is_empty(), "nobody is named");
    let (one, two) = (worker("http://a:1"), worker("http://b:1"));
    flag.join(one.clone()).unwrap();
    flag.join(two.clone()).unwrap();
    tokio::time::advance(2 * Members::AWAITED).await;
    members.report(one.id, MemberState::Unreachable);
    assert_eq!(members.awaited().len(), 2, "without them there is nothing");
    members.report(one.id, MemberState::Serving);
    assert!(members.awaited().is_empty(), "the other has had its time");
    let late = worker("http://c:1");
    api.join(late.clone()).unwrap();
    let awaited = || {
        let all = members.awaited().into_iter();
        all.map(|record| record.id).collect::<Vec<_>>()
    };
    assert_eq!(awaited(), [late.id]);
    members.report(one.id, MemberState::Unreachable);
    assert_eq!(awaited(), [late.id], "what served once is known");
    api.leave(late.id);
    assert!(members.awaited().is_empty());
}

#[test]
fn without_a_follower_and_beyond_the_bound_nothing_changes() {
    let members = Members::default();
    let (api, file) = (source(&members, "api"), source(&members, "file"));
    let at = |n: usize| worker(&format!("http://a:{n}"));
    assert_eq!(api.join(at(1)), Err(MembersError::Fixed));
    let mut changes = members.follow();
    for n in 1..=Members::MAX {
        assert_eq!(api.join(at(n)), Ok(JoinOutcome::New));
    }
    assert_eq!(api.join(at(Members::MAX + 1)), Err(MembersError::Full));
    // A snapshot is taken as far as there is room; the next one tries the rest again.
    let beyond = || (Members::MAX..Members::MAX + 3).map(at);
    let refused = SnapshotRefused {
        records: 2,
        cause: MembersError::Full,
    };
    assert_eq!(file.replace(beyond()), Err(refused));
    assert_eq!(members.list().len(), Members::MAX);
    assert_eq!(told(&mut changes).len(), Members::MAX, "one a row");
    members.remove(at(1).id, false).unwrap();
    members.remove(at(2).id, false).unwrap();
    assert_eq!(file.replace(beyond()), Err(refused), "they still drain");
    members.gone(at(1).id);
    members.gone(at(2).id);
    assert_eq!(file.replace(beyond()), Ok(()));
    assert_eq!(members.list().len(), Members::MAX);
    drop(changes);
    assert_eq!(members.remove(at(3).id, false), Err(MembersError::Fixed));
    assert_eq!(members.get(at(3).id).unwrap().state, MemberState::Joining);
}

#[test]
fn a_second_follower_takes_over_and_is_told_of_everybody() {
    let members = Members::default();
    let mut first = members.follow();
    let flag = source(&members, "flag");
    let a = worker("http://a:1");
    flag.join(a.clone()).unwrap();
    assert_eq!(told(&mut first), [joined(&a)]);
    let mut second = members.follow();
    assert_eq!(told(&mut second), [joined(&a)]);
    flag.leave(a.id);
    assert_eq!(told(&mut first), []);
    drop(first);
    assert_eq!(told(&mut second).len(), 1);
}

/// What can happen to the list; sources, workers and what is said of them by number.
#[derive(Clone, Debug)]
enum Step {
    Join(usize, usize, u32),
    Leave(usize, usize),
    Replace(usize, Vec<(usize, u32)>),
    Lose(usize),
    Remove(usize),
    Follow,
    End(usize),
}

const SOURCES: [&str; 3] = ["flag", "file", "etcd"];
const WORKERS: usize = 4;

fn step() -> impl Strategy<Value = Step> {
    let (source, worker) = (0..SOURCES.len(), 0..WORKERS);
    let said = (0..WORKERS, 1..4u32);
    prop_oneof![
        4 => (source.clone(), worker.clone(), 1..4u32).prop_map(|(s, w, n)| Step::Join(s, w, n)),
        2 => (source.clone(), worker.clone()).prop_map(|(s, w)| Step::Leave(s, w)),
        4 => (source.clone(), prop::collection::vec(said, 0..WORKERS)).prop_map(|(s, r)| Step::Replace(s, r)),
        1 => source.prop_map(Step::Lose),
        2 => worker.clone().prop_map(Step::Remove),
        3 => Just(Step::Follow),
        2 => worker.prop_map(Step::End),
    ]
}

fn record(worker_number: usize, said: u32) -> WorkerRecord {
    worker(&format!("http://w:{},block-size={said}", worker_number + 1))
}

/// What each source says, written down without any cleverness.
#[derive(Default)]
struct Model {
    clock: u32,
    /// By worker and source: when it was said, and what.
    said: BTreeMap<(usize, usize), (u32, u32)>,
    snapshots: BTreeMap<usize, BTreeMap<usize, u32>>,
}

impl Model {
    fn join(&mut self, source: usize, worker: usize, said: u32) {
        self.clock += 1;
        self.said.insert((worker, source), (self.clock, said));
    }

    fn replace(&mut self, source: usize, snapshot: BTreeMap<usize, u32>) {
        self.said
            .retain(|(worker, of), _| *of != source || snapshot.contains_key(worker));
        let before = self.snapshots.remove(&source).unwrap_or_default();
        for (worker, said) in &snapshot {
            if before.get(worker) != Some(said) {
                self.join(source, *worker, *said);
            }
        }
        self.snapshots.insert(source, snapshot);
    }

    fn forget(&mut self, source: usize, worker: usize) {
        self.snapshots.entry(source).or_default().remove(&worker);
    }

    fn counts(&self, worker: usize) -> Option<u32> {
        let of = self.said.iter().filter(|((w, _), _)| *w == worker);
        of.map(|(_, said)| *said).max().map(|(_, said)| said)
    }

    fn sources(&self, worker: usize) -> Vec<usize> {
        let of = self.said.keys().filter(|(w, _)| *w == worker);
        of.map(|(_, source)| *source).collect()
    }
}

proptest! {
    /// Whatever sources and operators do, the list holds what a plain model holds, and a follower that looks now and then
    /// ends with the same.
    #[test]
    fn the_list_is_what_its_sources_say(steps in prop::collection::vec(step(), 1..60)) {
        let members = Members::default();
        let mut changes = members.follow();
        let mut model = Model::default();
        // Lost sources come back last: in the list they stand in the order in which they came.
        let mut sources: Vec<Option<WorkerSource>> = SOURCES.map(|kind| Some(source(&members, kind))).into();
        let mut followed: BTreeMap<WorkerId, Arc<WorkerRecord>> = BTreeMap::new();
        for step in steps.into_iter().chain([Step::Follow]) {
            match step {
                Step::Join(s, w, said) => {
                    let of = sources[s].get_or_insert_with(|| source(&members, SOURCES[s]));
                    of.join(record(w, said)).unwrap();
                    model.forget(s, w);
                    model.join(s, w, said);
                }
                Step::Leave(s, w) => {
                    if let Some(of) = &sources[s] {
                        of.leave(record(w, 1).id);
                    }
                    model.forget(s, w);
                    model.said.remove(&(w, s));
                }
                Step::Replace(s, rows) => {
                    let snapshot: BTreeMap<usize, u32> = rows.into_iter().collect();
                    let of = sources[s].get_or_insert_with(|| source(&members, SOURCES[s]));
                    of.replace(snapshot.iter().map(|(w, said)| record(*w, *said))).unwrap();
                    model.replace(s, snapshot);
                }
                Step::Lose(s) => {
                    sources[s] = None;
                    model.replace(s, BTreeMap::new());
                    model.snapshots.remove(&s);
                }
                Step::Remove(w) => {
                    members.remove(record(w, 1).id, false).unwrap();
                    model.said.retain(|(worker, _), _| *worker != w);
                }
                Step::Follow => {
                    for change in told(&mut changes) {
                        match change {
                            Change::Joined(record) => {
                                prop_assert!(!followed.contains_key(&record.id), "joined twice");
                                followed.insert(record.id, record);
                            }
                            Change::Updated(record) => {
                                prop_assert!(followed.insert(record.id, record).is_some());
                            }
                            Change::Left { worker, .. } => {
                                followed.remove(&worker);
                            }
                        }
                    }
                    for w in 0..WORKERS {
                        let of = followed.get(&record(w, 1).id).map(|r| r.block_size.unwrap());
                        prop_assert_eq!(of, model.counts(w));
                    }
                }
                // The follower says that what ran there has ended.
                Step::End(w) => {
                    let id = record(w, 1).id;
                    if !followed.contains_key(&id) {
                        members.gone(id);
                    }
                }
            }
            for w in 0..WORKERS {
                let row = members.get(record(w, 1).id);
                let mut of: Vec<&str> = row.iter().flat_map(kinds).collect();
                let mut expected: Vec<&str> = model.sources(w).iter().map(|s| SOURCES[*s]).collect();
                of.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(of, expected);
                if let (Some(row), Some(said)) = (row, model.counts(w)) {
                    prop_assert_eq!(row.record.block_size, Some(said));
                }
            }
        }
    }
}
