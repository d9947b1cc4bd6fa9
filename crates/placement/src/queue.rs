//! Requests that wait for a rank to open.
//!
//! Answers one question: who goes next? Inside a class the highest strict priority, then the highest
//! urgency, then the earliest; between classes deficit round robin. Requests bound to one rank, and those of
//! each model, wait in a lane of their own, so that closed ranks do not block requests that may go elsewhere.
//!
//! What always holds: a request is in at most once and leaves exactly once; keys are fixed when it is put
//! in; counts per class equal what is in it.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_types::{RequestId, Time, WorkerRank};

use crate::PolicyClass;
use crate::map::FastMap;

/// Where a request stands in its lane: smaller goes first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    strict_priority: u32,
    urgency: f64,
    seq: u64,
}

impl Eq for Key {}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        other
            .strict_priority
            .cmp(&self.strict_priority)
            .then_with(|| other.urgency.total_cmp(&self.urgency))
            .then_with(|| self.seq.cmp(&other.seq))
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A request to be put in.
#[derive(Clone, Debug)]
pub struct QueueEntry<T> {
    /// Which one.
    pub id: RequestId,
    /// Index of its class.
    pub class: usize,
    /// The requested model, where not every worker serves every model.
    pub model: Option<Arc<str>>,
    /// The one rank that may serve it.
    pub rank: Option<WorkerRank>,
    /// Tiers: a higher one always goes first.
    pub strict_priority: u32,
    /// Higher goes first inside a tier.
    pub urgency: f64,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// Of those, cached on some eligible rank.
    pub cached_tokens: u32,
    /// Whatever the caller needs when it comes out.
    pub payload: T,
}

/// Who waits behind whom: those of one model that are bound to the same rank, or to none.
type Lane = (Option<Arc<str>>, Option<WorkerRank>);

impl<T> QueueEntry<T> {
    fn lane(&self) -> Lane {
        (self.model.clone(), self.rank)
    }
}

#[derive(Clone, Debug)]
struct Item<T> {
    key: Key,
    entered: Time,
    entry: QueueEntry<T>,
}

/// What waits in a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub raw_isl_tokens: u64,
    /// Of those, cached somewhere eligible.
    pub cached_tokens: u64,
}

/// Which bound of a class was hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueLimit {
    /// Requests waiting.
    Requests,
    /// Prompt tokens waiting.
    RawIslTokens,
    /// Cached prompt tokens waiting.
    CachedTokens,
}

/// A bound that keeps a request out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// Which.
    pub limit_kind: QueueLimit,
    /// Where it stands.
    pub current: u64,
    /// Where it ends.
    pub limit: u64,
}

#[derive(Clone, Debug)]
struct Class {
    config: PolicyClass,
    lanes: BTreeMap<Lane, BTreeMap<Key, RequestId>>,
    stats: QueueStats,
    deficit: u64,
    /// It had its quantum of this round already, with whole rounds that were added at once.
    credited: bool,
}

impl Class {
    fn is_empty(&self) -> bool {
        self.stats.requests == 0
    }

    fn quantum(&self) -> u64 {
        self.config.quantum.max(1)
    }

    /// Heads of all lanes.
    fn heads(&self) -> impl Iterator<Item = (Key, RequestId)> {
        let lanes = self.lanes.values();
        lanes.filter_map(|lane| lane.first_key_value().map(|(key, id)| (*key, *id)))
    }
}

/// The queue. `T` is what the caller needs back.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    classes: Vec<Class>,
    items: FastMap<RequestId, Item<T>>,
    by_age: BTreeMap<u64, RequestId>,
    seq: u64,
    cursor: usize,
    /// A class that has credit left from its last turn.
    carry: Option<usize>,
}

impl<T> Queue<T> {
    /// An empty queue with these classes; without any, one that allows everything.
    #[must_use]
    pub fn new(classes: Vec<PolicyClass>) -> Self {
        let class = |config| Class {
            config,
            lanes: BTreeMap::new(),
            stats: QueueStats::default(),
            deficit: 0,
            credited: false,
        };
        Self {
            classes: classes.into_iter().map(class).collect(),
            items: FastMap::default(),
            by_age: BTreeMap::new(),
            seq: 0,
            cursor: 0,
            carry: None,
        }
    }

    /// Requests waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether a request waits.
    #[must_use]
    pub fn contains(&self, id: RequestId) -> bool {
        self.items.contains_key(&id)
    }

    /// A class's settings.
    #[must_use]
    pub fn class(&self, class: usize) -> Option<&PolicyClass> {
        self.classes.get(class).map(|c| &c.config)
    }

    /// What waits in a class.
    #[must_use]
    pub fn stats(&self, class: usize) -> QueueStats {
        self.classes.get(class).map(|c| c.stats).unwrap_or_default()
    }

    /// Whether a class has a backlog that newcomers must not overtake.
    #[must_use]
    pub fn has_backlog(&self, class: usize) -> bool {
        self.classes.get(class).is_some_and(|c| !c.is_empty())
    }

    /// The bound that keeps another request out of a class, with this many workers. Tested before adding:
    /// the request that crosses a bound is let in, the next is not.
    #[must_use]
    pub fn full(&self, class: usize, workers: u32) -> Option<QueueFull> {
        let Class { config, stats, .. } = self.classes.get(class)?;
        let limits = [
            (
                QueueLimit::Requests,
                config.request_queue_limit_per_worker,
                stats.requests,
            ),
            (
                QueueLimit::RawIslTokens,
                config.raw_isl_token_queue_limit_per_worker,
                stats.raw_isl_tokens,
            ),
            (
                QueueLimit::CachedTokens,
                config.cached_token_queue_limit_per_worker,
                stats.cached_tokens,
            ),
        ];
        limits
            .into_iter()
            .find_map(|(limit_kind, per_worker, current)| {
                let limit = per_worker?.saturating_mul(u64::from(workers));
                (current >= limit).then_some(QueueFull {
                    limit_kind,
                    current,
                    limit,
                })
            })
    }

    /// Puts a request in; `false` if it is in already or its class does not exist.
    pub fn push(&mut self, now: Time, entry: QueueEntry<T>) -> bool {
        let id = entry.id;
        let Some(class) = self.classes.get_mut(entry.class) else {
            return false;
        };
        if self.items.contains_key(&id) {
            return false;
        }
        self.seq += 1;
        let key = Key {
            strict_priority: entry.strict_priority,
            urgency: entry.urgency,
            seq: self.seq,
        };
        let lane = class.lanes.entry(entry.lane()).or_default();
        lane.insert(key, id);
        class.stats.requests += 1;
        class.stats.raw_isl_tokens += u64::from(entry.isl_tokens);
        class.stats.cached_tokens += u64::from(entry.cached_tokens);
        self.by_age.insert(key.seq, id);
        let item = Item {
            key,
            entered: now,
            entry,
        };
        self.items.insert(id, item);
        true
    }

    /// Takes a request out, wherever it stands.
    pub fn remove(&mut self, id: RequestId) -> Option<QueueEntry<T>> {
        let Item { key, entry, .. } = self.items.remove(&id)?;
        self.by_age.remove(&key.seq);
        if let Some(class) = self.classes.get_mut(entry.class) {
            let name = entry.lane();
            if let Some(lane) = class.lanes.get_mut(&name) {
                lane.remove(&key);
                if lane.is_empty() {
                    class.lanes.remove(&name);
                }
            }
            class.stats.requests -= 1;
            class.stats.raw_isl_tokens -= u64::from(entry.isl_tokens);
            class.stats.cached_tokens -= u64::from(entry.cached_tokens);
            if class.is_empty() {
                (class.deficit, class.credited) = (0, false);
            }
        }
        Some(entry)
    }

    /// A waiting request and when it was put in.
    #[must_use]
    pub fn get(&self, id: RequestId) -> Option<(&QueueEntry<T>, Time)> {
        self.items.get(&id).map(|item| (&item.entry, item.entered))
    }

    /// The payload of a waiting request. Its place does not change.
    pub fn payload_mut(&mut self, id: RequestId) -> Option<&mut T> {
        self.items.get_mut(&id).map(|item| &mut item.entry.payload)
    }

    /// Requests of its lane and class that would go before this one.
    #[must_use]
    pub fn ahead(&self, entry: &QueueEntry<T>) -> usize {
        let class = self.classes.get(entry.class);
        let Some(lane) = class.and_then(|class| class.lanes.get(&entry.lane())) else {
            return 0;
        };
        let last = Key {
            strict_priority: entry.strict_priority,
            urgency: entry.urgency,
            seq: u64::MAX,
        };
        lane.range(..last).count()
    }

    /// The request that was put in first, and when.
    #[must_use]
    pub fn oldest(&self) -> Option<(RequestId, Time)> {
        let (_, id) = self.by_age.first_key_value()?;
        self.items.get(id).map(|item| (*id, item.entered))
    }

    /// Who goes next, given who could go now. Does not take it out: [`Queue::take`] does.
    pub fn next(
        &mut self,
        mut ready: impl FnMut(&PolicyClass, &QueueEntry<T>) -> bool,
    ) -> Option<RequestId> {
        if self.items.is_empty() {
            self.carry = None;
            return None;
        }
        let heads: Vec<Option<(RequestId, u64)>> = (0..self.classes.len())
            .map(|class| self.head(class, &mut ready))
            .collect();
        let at = self.turn(&heads)?;
        heads.get(at).copied().flatten().map(|(id, _)| id)
    }

    /// The best ready head of a class and what it costs.
    fn head(
        &self,
        class: usize,
        ready: &mut impl FnMut(&PolicyClass, &QueueEntry<T>) -> bool,
    ) -> Option<(RequestId, u64)> {
        let class = self.classes.get(class)?;
        let mut may = |id: RequestId| {
            let item = self.items.get(&id);
            item.is_some_and(|item| ready(&class.config, &item.entry))
        };
        let (_, id) = class
            .heads()
            .filter(|(_, id)| may(*id))
            .min_by_key(|(key, _)| *key)?;
        self.items.get(&id).map(|item| (id, cost(&item.entry)))
    }

    /// Whose turn it is. A class with credit left goes on; then each in turn gets a quantum; if none can
    /// afford its head, as many whole rounds are added at once as the first to afford it needs. While nobody
    /// may go, the turn stays where it is: capacity often comes back for one request at a time.
    fn turn(&mut self, heads: &[Option<(RequestId, u64)>]) -> Option<usize> {
        if heads.iter().all(Option::is_none) {
            return None;
        }
        let count = self.classes.len();
        let affordable = |classes: &[Class], at: usize| match (heads.get(at), classes.get(at)) {
            (Some(Some((_, cost))), Some(class)) => *cost <= class.deficit,
            _ => false,
        };
        if let Some(at) = self.carry.filter(|at| affordable(&self.classes, *at)) {
            return Some(at);
        }
        self.carry = None;
        let start = self.cursor;
        let ring = (0..count).map(move |offset| (start + offset) % count);
        for at in ring.clone() {
            if heads.get(at).copied().flatten().is_none() {
                continue;
            }
            let able = affordable(&self.classes, at);
            let class = self.classes.get_mut(at)?;
            let credited = std::mem::take(&mut class.credited);
            if able {
                return Some(at);
            }
            if !credited {
                class.deficit = class.deficit.saturating_add(class.quantum());
            }
            if affordable(&self.classes, at) {
                return Some(at);
            }
        }
        self.fast_forward(heads)?;
        for at in ring {
            self.classes.get_mut(at)?.credited = false;
            if affordable(&self.classes, at) {
                return Some(at);
            }
        }
        None
    }

    fn fast_forward(&mut self, heads: &[Option<(RequestId, u64)>]) -> Option<()> {
        let rounds = heads.iter().zip(&self.classes).filter_map(|(head, class)| {
            let missing = head.as_ref()?.1.saturating_sub(class.deficit);
            Some(missing.div_ceil(class.quantum()))
        });
        let rounds = rounds.min()?;
        for (head, class) in heads.iter().zip(&mut self.classes) {
            if head.is_some() {
                let credit = class.quantum().saturating_mul(rounds);
                class.deficit = class.deficit.saturating_add(credit);
                class.credited = true;
            }
        }
        Some(())
    }

    /// The same among requests that are known to be able to go, best first.
    pub fn next_among(&mut self, ready: &[RequestId]) -> Option<RequestId> {
        if ready.is_empty() {
            // Nobody can go: the class that has credit left keeps its turn.
            return None;
        }
        let mut heads: Vec<Option<(RequestId, u64)>> = vec![None; self.classes.len()];
        for id in ready {
            let item = self.items.get(id);
            let head = item.and_then(|item| Some((item, heads.get_mut(item.entry.class)?)));
            if let Some((item, head @ None)) = head {
                *head = Some((*id, cost(&item.entry)));
            }
        }
        let at = self.turn(&heads)?;
        heads.get(at).copied().flatten().map(|(id, _)| id)
    }

    /// All that wait and since when, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (&QueueEntry<T>, Time)> {
        let ids = self.by_age.values();
        ids.filter_map(|id| self.items.get(id).map(|item| (&item.entry, item.entered)))
    }

    /// Classes in which somebody waits.
    #[must_use]
    pub fn classes_waiting(&self) -> usize {
        self.classes
            .iter()
            .filter(|class| !class.is_empty())
            .count()
    }

    /// Takes out the request that [`Queue::next`] named, and charges its class.
    pub fn take(&mut self, id: RequestId) -> Option<(QueueEntry<T>, Time)> {
        let entered = self.items.get(&id)?.entered;
        let entry = self.remove(id)?;
        let count = self.classes.len().max(1);
        self.cursor = (entry.class + 1) % count;
        self.carry = None;
        if let Some(class) = self.classes.get_mut(entry.class)
            && !class.is_empty()
        {
            class.deficit = class.deficit.saturating_sub(cost(&entry));
            self.carry = (class.deficit > 0).then_some(entry.class);
        }
        Some((entry, entered))
    }
}

/// What dispatching a request costs its class: the tokens that are cached nowhere, at least 1.
fn cost<T>(entry: &QueueEntry<T>) -> u64 {
    u64::from(entry.isl_tokens.saturating_sub(entry.cached_tokens)).max(1)
}

#[cfg(test)]
mod tests;
