//! The content of a store, as one watcher knows it.
//!
//! Answers one question: what has changed since the watcher last asked? A backend tells the mirror what it lists and hears; the
//! watcher takes changes out. A pure state machine: every backend has the same rules, which are tested here.
//!
//! Invariants:
//! - A watcher is told what each key is now, not every step on the way: at most one change of a key waits.
//! - A value that cannot be read leaves the one before it, until its key goes.
//! - A store that is lost takes nothing away; what changed meanwhile is found by the next listing.
//! - A store that is back without keys that it had is believed when [`Mirror::release`] says so and not before: its keys are
//!   written again by owners that live.
//! - At most [`KEYS_MAX`] keys are kept.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::record::{Bucket, KEY_BYTES_MAX, Record, RecordError, RecordKey};

/// Keys that a watcher keeps: some 2000 workers with 8 ranks each have fewer.
pub const KEYS_MAX: usize = 1 << 17;

/// What a watcher has to make true.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A record is there.
    Added(RecordKey, Arc<Record>),
    /// A record says something else.
    Updated(RecordKey, Arc<Record>),
    /// A record is gone.
    Removed(RecordKey),
    /// All that the store held at first has been told.
    Synced,
    /// The store is out of reach, and why. What is known stays true as far as anybody knows.
    Lost(String),
    /// The store is back, and all that changed meanwhile has been told or follows.
    Restored,
}

/// What became of a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Put {
    /// It counts.
    Taken,
    /// It says what was known.
    Same,
    /// It cannot be read, for the first time.
    Unreadable(RecordError),
    /// It still cannot be read, which was said.
    StillUnreadable,
    /// There are [`KEYS_MAX`] keys already, or the key is too long.
    Refused,
}

/// What is known of a store. See the module.
#[derive(Debug, Default)]
pub struct Mirror {
    entries: BTreeMap<RecordKey, Entry>,
    waiting: VecDeque<Note>,
    /// How many entries have a record.
    present: usize,
    /// The first listing is complete.
    is_synced: bool,
    /// Why the store is out of reach, if it is.
    lost: Option<String>,
    /// The watcher knows that it is.
    told_lost: bool,
    /// A change of the link waits to be told.
    link_waits: bool,
    /// How many entries the store did not have when it was back.
    missed: usize,
}

#[derive(Debug, Default)]
struct Entry {
    current: Option<Arc<Record>>,
    told: Option<Arc<Record>>,
    /// Names the last value that could not be read.
    unreadable: Option<u64>,
    waits: bool,
    /// The store did not have it when it was back.
    is_missed: bool,
}

#[derive(Debug)]
enum Note {
    Key(RecordKey),
    Synced,
    Link,
}

impl Mirror {
    /// Nothing is known yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A key has this value.
    pub fn put(&mut self, key: &RecordKey, value: &[u8]) -> Put {
        if let Some(entry) = self.entries.get_mut(key)
            && entry.unreadable == Some(digest(value))
        {
            self.missed -= usize::from(std::mem::take(&mut entry.is_missed));
            return Put::StillUnreadable;
        }
        let is_new = !self.entries.contains_key(key);
        if is_new && (self.entries.len() >= KEYS_MAX || key.key.len() > KEY_BYTES_MAX) {
            return Put::Refused;
        }
        let entry = self.entries.entry(key.clone()).or_default();
        self.missed -= usize::from(std::mem::take(&mut entry.is_missed));
        let record = match Record::parse(key.bucket, value) {
            Ok(record) => record,
            Err(error) => {
                entry.unreadable = Some(digest(value));
                return Put::Unreadable(error);
            }
        };
        entry.unreadable = None;
        if entry.current.as_deref() == Some(&record) {
            return Put::Same;
        }
        self.present += usize::from(entry.current.is_none());
        entry.current = Some(Arc::new(record));
        self.tell(key);
        Put::Taken
    }

    /// A key is gone.
    pub fn delete(&mut self, key: &RecordKey) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        entry.unreadable = None;
        self.missed -= usize::from(std::mem::take(&mut entry.is_missed));
        self.present -= usize::from(entry.current.take().is_some());
        self.tell(key);
    }

    /// A bucket has these keys and no others. What a store no longer has that was lost is missed, and not gone yet.
    pub fn retain(&mut self, bucket: Bucket, keys: &BTreeSet<String>) {
        let first = RecordKey::new(bucket, "");
        let of_bucket = self.entries.range(first..);
        let gone: Vec<RecordKey> = of_bucket
            .map(|(key, _)| key)
            .take_while(|key| key.bucket == bucket)
            .filter(|key| !keys.contains(&key.key))
            .cloned()
            .collect();
        for key in gone {
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            match (self.lost.is_some(), entry.is_missed) {
                (_, true) => {}
                (true, false) => {
                    entry.is_missed = true;
                    self.missed += 1;
                }
                (false, false) => self.delete(&key),
            }
        }
    }

    /// Whether a store that is in reach misses keys that it had.
    #[must_use]
    pub const fn is_holding(&self) -> bool {
        self.missed > 0 && self.lost.is_none()
    }

    /// What the store misses is gone.
    pub fn release(&mut self) {
        let missed = self.entries.iter().filter(|(_, entry)| entry.is_missed);
        let missed: Vec<RecordKey> = missed.map(|(key, _)| key.clone()).collect();
        for key in missed {
            self.delete(&key);
        }
    }

    /// A listing of all buckets is complete: the store is in reach.
    pub fn synced(&mut self) {
        if !std::mem::replace(&mut self.is_synced, true) {
            self.waiting.push_back(Note::Synced);
        }
        if self.lost.take().is_some() {
            self.tell_link();
        }
    }

    /// The store is out of reach. Says whether that is news.
    pub fn lost(&mut self, why: &str) -> bool {
        let is_news = self.lost.is_none();
        self.lost = Some(why.into());
        if is_news {
            self.tell_link();
        }
        is_news
    }

    /// The next change, if one waits.
    #[must_use = "a change that is not acted on is lost"]
    pub fn next_change(&mut self) -> Option<Change> {
        while let Some(note) = self.waiting.pop_front() {
            let change = match note {
                Note::Key(key) => self.change_of(key),
                Note::Synced => Some(Change::Synced),
                Note::Link => self.link_change(),
            };
            if change.is_some() {
                return change;
            }
        }
        None
    }

    /// Whether a change waits.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// How many records there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.present
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.present == 0
    }

    fn change_of(&mut self, key: RecordKey) -> Option<Change> {
        let entry = self.entries.get_mut(&key)?;
        entry.waits = false;
        let told = entry.told.take();
        entry.told.clone_from(&entry.current);
        let now = entry.current.clone();
        if now.is_none() && entry.unreadable.is_none() {
            self.entries.remove(&key);
        }
        match (told, now) {
            (None, Some(now)) => Some(Change::Added(key, now)),
            (Some(told), Some(now)) => (told != now).then_some(Change::Updated(key, now)),
            (Some(_), None) => Some(Change::Removed(key)),
            (None, None) => None,
        }
    }

    fn link_change(&mut self) -> Option<Change> {
        self.link_waits = false;
        let was_lost = std::mem::replace(&mut self.told_lost, self.lost.is_some());
        match (&self.lost, was_lost) {
            (Some(why), false) => Some(Change::Lost(why.clone())),
            (None, true) => Some(Change::Restored),
            _ => None,
        }
    }

    fn tell(&mut self, key: &RecordKey) {
        if let Some(entry) = self.entries.get_mut(key)
            && !std::mem::replace(&mut entry.waits, true)
        {
            self.waiting.push_back(Note::Key(key.clone()));
        }
    }

    fn tell_link(&mut self) {
        if !std::mem::replace(&mut self.link_waits, true) {
            self.waiting.push_back(Note::Link);
        }
    }
}

fn digest(value: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: u64) -> RecordKey {
        RecordKey::new(Bucket::Instances, format!("n/c/e/{id:x}"))
    }

    fn value(id: u64, address: &str) -> Vec<u8> {
        format!(
            r#"{{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n","instance_id":{id},"transport":{{"tcp":"{address}"}}}}"#
        )
        .into_bytes()
    }

    fn changes(mirror: &mut Mirror) -> Vec<String> {
        std::iter::from_fn(|| mirror.next_change())
            .map(|change| match change {
                Change::Added(key, _) => format!("+{}", key.key),
                Change::Updated(key, _) => format!("~{}", key.key),
                Change::Removed(key) => format!("-{}", key.key),
                Change::Synced => "synced".into(),
                Change::Lost(why) => format!("lost: {why}"),
                Change::Restored => "restored".into(),
            })
            .collect()
    }

    #[test]
    fn a_watcher_hears_the_snapshot_then_what_differs() {
        let mut mirror = Mirror::new();
        mirror.put(&key(1), &value(1, "a"));
        mirror.put(&key(2), &value(2, "a"));
        mirror.synced();
        assert_eq!(changes(&mut mirror), ["+n/c/e/1", "+n/c/e/2", "synced"]);
        assert_eq!(mirror.put(&key(1), &value(1, "a")), Put::Same);
        mirror.put(&key(2), &value(2, "b"));
        mirror.put(&key(3), &value(3, "a"));
        assert_eq!(changes(&mut mirror), ["~n/c/e/2", "+n/c/e/3"]);
        mirror.delete(&key(9));
        mirror.retain(Bucket::Instances, &BTreeSet::from(["n/c/e/3".into()]));
        mirror.retain(Bucket::Models, &BTreeSet::new());
        assert_eq!(changes(&mut mirror), ["-n/c/e/1", "-n/c/e/2"]);
        assert_eq!((mirror.len(), mirror.entries.len()), (1, 1));
    }

    #[test]
    fn steps_that_cancel_out_are_not_told_and_one_change_of_a_key_waits() {
        let mut mirror = Mirror::new();
        for round in 0..100 {
            mirror.put(&key(1), &value(1, &round.to_string()));
            mirror.delete(&key(1));
        }
        assert_eq!(mirror.waiting.len(), 1);
        assert!(changes(&mut mirror).is_empty() && mirror.is_empty());
        mirror.put(&key(1), &value(1, "a"));
        assert_eq!(changes(&mut mirror), ["+n/c/e/1"]);
        mirror.delete(&key(1));
        mirror.put(&key(1), &value(1, "a"));
        assert!(changes(&mut mirror).is_empty());
        mirror.lost("x");
        mirror.synced();
        assert_eq!(changes(&mut mirror), ["synced"]);
    }

    #[test]
    fn an_unreadable_value_keeps_the_previous_one_and_is_said_once() {
        let mut mirror = Mirror::new();
        mirror.put(&key(1), &value(1, "a"));
        changes(&mut mirror);
        assert!(matches!(mirror.put(&key(1), b"{"), Put::Unreadable(_)));
        assert_eq!(mirror.put(&key(1), b"{"), Put::StillUnreadable);
        assert!(matches!(mirror.put(&key(1), b"[]"), Put::Unreadable(_)));
        assert!(changes(&mut mirror).is_empty());
        assert_eq!(mirror.put(&key(1), &value(1, "a")), Put::Same);
        assert!(matches!(mirror.put(&key(2), b"?"), Put::Unreadable(_)));
        mirror.delete(&key(2));
        assert!(changes(&mut mirror).is_empty());
        assert_eq!(mirror.entries.len(), 1);
    }

    #[test]
    fn a_lost_store_takes_nothing_away_and_the_next_listing_tells_what_changed() {
        let mut mirror = Mirror::new();
        mirror.put(&key(1), &value(1, "a"));
        mirror.put(&key(2), &value(2, "a"));
        mirror.synced();
        changes(&mut mirror);
        assert!(mirror.lost("refused"));
        assert!(!mirror.lost("refused again"));
        assert_eq!(changes(&mut mirror), ["lost: refused again"]);
        assert_eq!(mirror.len(), 2);
        mirror.put(&key(3), &value(3, "a"));
        mirror.retain(
            Bucket::Instances,
            &BTreeSet::from(["n/c/e/2".into(), "n/c/e/3".into()]),
        );
        mirror.synced();
        assert_eq!(changes(&mut mirror), ["+n/c/e/3", "restored"]);
        // Its owner may live and announce it again.
        assert!(mirror.is_holding());
        mirror.release();
        assert_eq!(changes(&mut mirror), ["-n/c/e/1"]);
        assert!(!mirror.is_holding() && mirror.entries.len() == 2);
    }

    #[test]
    fn what_a_store_forgot_is_gone_when_it_is_let_go_of_or_deleted_and_not_when_it_is_written_again()
     {
        let mut mirror = Mirror::new();
        for id in 1..=4 {
            mirror.put(&key(id), &value(id, "a"));
        }
        mirror.put(&key(4), b"?");
        mirror.synced();
        changes(&mut mirror);
        mirror.lost("gone");
        mirror.retain(Bucket::Instances, &BTreeSet::new());
        assert!(!mirror.is_holding(), "it is not back yet");
        mirror.synced();
        // Listings that follow say the same.
        mirror.retain(Bucket::Instances, &BTreeSet::new());
        assert!(changes(&mut mirror).is_empty() && mirror.is_holding());
        mirror.put(&key(1), &value(1, "a"));
        mirror.put(&key(2), &value(2, "b"));
        mirror.delete(&key(3));
        assert!(mirror.is_holding());
        assert_eq!(mirror.put(&key(4), b"?"), Put::StillUnreadable);
        assert!(!mirror.is_holding());
        assert_eq!(changes(&mut mirror), ["~n/c/e/2", "-n/c/e/3"]);
        mirror.release();
        assert!(changes(&mut mirror).is_empty() && mirror.len() == 3);
    }

    #[test]
    fn keys_are_bounded() {
        let mut mirror = Mirror::new();
        let long = RecordKey::new(Bucket::Instances, "x".repeat(KEY_BYTES_MAX + 1));
        assert_eq!(mirror.put(&long, &value(1, "a")), Put::Refused);
        for id in 0..KEYS_MAX as u64 {
            mirror.entries.insert(key(id), Entry::default());
        }
        let one_more = key(KEYS_MAX as u64);
        assert_eq!(mirror.put(&one_more, &value(1, "a")), Put::Refused);
        assert_eq!(mirror.put(&key(1), &value(1, "a")), Put::Taken);
    }
}
