//! Whether replicas hold the same of each rank, and what is done if they do not.
//!
//! A rank's stream numbers its messages, so two replicas that have applied the same last message must hold the same blocks. Each sums up
//! what it holds of a rank while the rank is quiet and tells the others; where the same message gave another sum, the replica that
//! began later takes the part of the other. What is never quiet is not compared: there the engine's own reports show what is wrong.
//!
//! What always holds: a part is taken over only if its stream stands at the very message that the part is of; a rank is mended at most
//! once in [`MEND_EVERY`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvasir_index::Index;
use kvasir_kv_events::Cursor;
use kvasir_router::ReplicaId;
use kvasir_types::{KvEvent, Tier, WorkerRank};
use kvasir_wire::native::{Encoding, RouterEvent, decode_router_events, encode_router_events};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::message::{LinkMessage, RankDigest};
use super::secure::Introduction;
use super::{PeerLinks, lock};
use crate::events::PauseGuard;
use crate::router_host::RouterHost;
use crate::view::CacheView;

/// Between two looks for ranks that are quiet.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Ranks that are summed up in one look.
const SUMS_MAX: usize = 16;
/// All is told again after so many looks: a peer may have come meanwhile.
const REPEAT_LOOKS: u32 = 10;
/// Between two takings over of one rank's part.
const MEND_EVERY: Duration = Duration::from_secs(60);
/// Events of a rank in one message.
const PART_EVENTS: usize = 256;
/// Events of a part that is being taken over.
const EVENTS_MAX: usize = 4 << 20;

/// A rank of a router.
type RankKey = (Arc<str>, WorkerRank);

/// What is known of who holds what.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    /// What this replica holds, as of when it was last quiet.
    own: BTreeMap<RankKey, RankDigest>,
    /// Where each rank's stream stood at the last look.
    stood: BTreeMap<RankKey, u64>,
    theirs: BTreeMap<(ReplicaId, RankKey), RankDigest>,
    /// Whether two hold the same, where they stood at the same message.
    verdicts: BTreeMap<(ReplicaId, RankKey), bool>,
    mended: BTreeMap<RankKey, Instant>,
    /// Parts that are on their way.
    parts: BTreeMap<RankKey, Vec<KvEvent>>,
}

impl Agreement {
    /// Ranks of which a peer holds the same, and ranks of which it does not.
    pub(super) fn counts(&self, peer: ReplicaId) -> (usize, usize) {
        let verdicts = self.verdicts.iter().filter(|((of, _), _)| *of == peer);
        let (agreed, differing): (Vec<bool>, Vec<bool>) =
            verdicts.map(|(_, same)| *same).partition(|same| *same);
        (agreed.len(), differing.len())
    }

    /// Ranks of which some peer holds something else.
    fn differing(&self) -> usize {
        self.verdicts.values().filter(|same| !**same).count()
    }

    pub(super) fn forget(&mut self, peer: ReplicaId) {
        self.theirs.retain(|(of, _), _| *of != peer);
        self.verdicts.retain(|(of, _), _| *of != peer);
    }

    /// Forgets ranks that are no more.
    fn keep(&mut self, known: impl Fn(&RankKey) -> bool) {
        self.own.retain(|key, _| known(key));
        self.stood.retain(|key, _| known(key));
        self.theirs.retain(|(_, key), _| known(key));
        self.verdicts.retain(|(_, key), _| known(key));
        self.mended.retain(|key, _| known(key));
        self.parts.retain(|key, _| known(key));
    }

    /// Whether a peer holds the same of a rank; nothing if they do not stand at the same message.
    fn judge(&mut self, peer: ReplicaId, key: &RankKey) -> Option<bool> {
        let at = (peer, key.clone());
        let (own, theirs) = (self.own.get(key)?, self.theirs.get(&at)?);
        if (own.sequence, own.message) != (theirs.sequence, theirs.message) {
            return None;
        }
        let same = own == theirs;
        let before = self.verdicts.insert(at, same);
        (before != Some(same)).then_some(same)
    }

    fn may_mend(&mut self, key: &RankKey) -> bool {
        let now = Instant::now();
        let lately = |at: &Instant| now.duration_since(*at) < MEND_EVERY;
        if self.mended.get(key).is_some_and(lately) {
            return false;
        }
        self.mended.insert(key.clone(), now);
        self.parts.insert(key.clone(), Vec::new());
        true
    }
}

/// A rank's stream that stands still, and where.
async fn held(view: &CacheView) -> Option<(Cursor, PauseGuard)> {
    let (kept, pause) = view.hold().await?;
    Some((kept?.cursor, pause))
}

/// Sums up what an index holds of a rank; the order in which it is told does not matter.
fn digest(index: &Index, rank: WorkerRank, cursor: Cursor) -> RankDigest {
    let (mut blocks, mut sum) = (0u64, 0u64);
    for (_, event) in index.dump_rank(rank) {
        let KvEvent::Stored {
            tier,
            parent,
            blocks: stored,
        } = event
        else {
            continue;
        };
        let mut before = parent.map_or(0, |parent| parent.0);
        for block in stored {
            let mut bytes = [0; 24];
            let parts = [before, block.engine.0, block.local.0];
            let parts = parts.iter().flat_map(|part| part.to_le_bytes());
            bytes
                .iter_mut()
                .zip(parts)
                .for_each(|(to, from)| *to = from);
            sum = sum.wrapping_add(xxh3_64_with_seed(&bytes, seed(tier)));
            (before, blocks) = (block.engine.0, blocks + 1);
        }
    }
    RankDigest {
        sequence: cursor.sequence,
        message: cursor.digest,
        blocks,
        digest: sum,
    }
}

fn seed(tier: Tier) -> u64 {
    tier as u64
}

impl PeerLinks {
    fn host(&self, router: &str) -> Option<Arc<RouterHost>> {
        let mut hosts = self.inner.replicas.hosts().into_iter();
        hosts.find(|host| **host.name() == *router)
    }

    /// Sums up ranks that are quiet and tells the others, for ever.
    pub(super) async fn keep_agreeing(self) {
        let mut looks = 0u32;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let is_alone = lock(&self.inner.open).is_empty();
            if is_alone {
                continue;
            }
            looks = looks.wrapping_add(1);
            let all = looks.is_multiple_of(REPEAT_LOOKS);
            let mut left = SUMS_MAX;
            let hosts = self.inner.replicas.hosts();
            for host in &hosts {
                self.look(host, all, &mut left).await;
            }
            let known = |key: &RankKey| {
                let mut of = hosts.iter().filter(|host| host.name() == &key.0);
                of.any(|host| host.views().get(key.1).is_some())
            };
            let mut agreement = lock(&self.inner.agreement);
            agreement.keep(known);
            let metrics = &self.inner.replicas.shared.context.metrics;
            metrics
                .replica_ranks_differing
                .set(agreement.differing() as f64);
        }
    }

    /// Sums up what is quiet of a router; tells what is new, or all.
    async fn look(&self, host: &Arc<RouterHost>, all: bool, left: &mut usize) {
        let mut told = Vec::new();
        for view in host.views().all() {
            let key = (Arc::clone(host.name()), view.rank());
            let Some(cursor) = view.cursor() else {
                continue;
            };
            let (quiet, known) = {
                let mut agreement = lock(&self.inner.agreement);
                let stood = agreement.stood.insert(key.clone(), cursor.sequence);
                let known = agreement.own.get(&key).copied();
                (stood == Some(cursor.sequence), known)
            };
            let is_current = known.is_some_and(|known| known.sequence == cursor.sequence);
            if is_current {
                told.extend(known.filter(|_| all).map(|known| (key.1, known)));
            } else if quiet && *left > 0 {
                *left -= 1;
                told.extend(self.sum_up(host, &view).await.map(|sum| (key.1, sum)));
            }
        }
        for ranks in told.chunks(PART_EVENTS) {
            self.send_all(&LinkMessage::Digests {
                router: host.name().to_string(),
                ranks: ranks.to_vec(),
            });
        }
    }

    async fn sum_up(&self, host: &Arc<RouterHost>, view: &CacheView) -> Option<RankDigest> {
        let rank = view.rank();
        let (cursor, pause) = held(view).await?;
        let index = Arc::clone(host.index());
        let summed = tokio::task::spawn_blocking(move || {
            let sum = digest(&index, rank, cursor);
            drop(pause);
            sum
        });
        let sum = summed.await.ok()?;
        let key = (Arc::clone(host.name()), rank);
        lock(&self.inner.agreement).own.insert(key.clone(), sum);
        let peers: Vec<Introduction> = lock(&self.inner.open).values().map(|l| l.peer).collect();
        peers.into_iter().for_each(|peer| self.judge(peer, &key));
        Some(sum)
    }

    /// What a peer holds of some ranks.
    pub(super) fn compare(
        &self,
        peer: Introduction,
        router: &str,
        ranks: &[(WorkerRank, RankDigest)],
    ) {
        let Some(host) = self.host(router) else {
            return;
        };
        for (rank, theirs) in ranks {
            if host.views().get(*rank).is_none() {
                continue; // Not one that both know.
            }
            let key = (Arc::clone(host.name()), *rank);
            let mut agreement = lock(&self.inner.agreement);
            agreement.theirs.insert((peer.id, key.clone()), *theirs);
            drop(agreement);
            self.judge(peer, &key);
        }
    }

    fn judge(&self, peer: Introduction, key: &RankKey) {
        let own = self.inner.own;
        let mut agreement = lock(&self.inner.agreement);
        let Some(same) = agreement.judge(peer.id, key) else {
            return;
        };
        let is_younger = (own.began, own.id) > (peer.began, peer.id);
        let mends = !same && is_younger && agreement.may_mend(key);
        drop(agreement);
        let (router, rank) = (key.0.to_string(), key.1);
        self.count_index(if same { "agreed" } else { "differed" });
        if !same {
            tracing::warn!(%rank, model = router, replica = peer.id.0, mends,
                "a replica holds something else of this rank: the one that began later takes the other's part");
        }
        if mends {
            self.send(peer.id, &LinkMessage::AskRank { router, rank });
        }
    }

    fn count_index(&self, outcome: &str) {
        let metrics = &self.inner.replicas.shared.context.metrics;
        let counter = &metrics.replica_index_checks_total;
        counter.with_label_values(&[outcome]).inc();
    }

    /// Tells a peer what this replica holds of a rank.
    pub(super) fn answer_rank(&self, peer: ReplicaId, router: String, rank: WorkerRank) {
        let links = self.clone();
        let tasks = self.inner.replicas.shared.context.tasks.background();
        tasks.spawn(async move {
            let host = links.host(&router)?;
            let view = host.views().get(rank)?;
            let (cursor, pause) = held(&view).await?;
            let index = Arc::clone(host.index());
            let dumped = tokio::task::spawn_blocking(move || {
                let dumped = (digest(&index, rank, cursor), index.dump_rank(rank));
                drop(pause);
                dumped
            });
            let (at, events) = dumped.await.ok()?;
            let count = events.len().div_ceil(PART_EVENTS).max(1);
            let mut events = events.into_iter().map(|(_, event)| event);
            for number in 0..count {
                let part = events.by_ref().take(PART_EVENTS).map(|event| RouterEvent {
                    rank,
                    id: 0,
                    residency: None,
                    position: None,
                    event,
                });
                let mut bytes = Vec::new();
                let part: Vec<RouterEvent> = part.collect();
                encode_router_events(Encoding::MessagePack, &part, &mut bytes);
                let message = LinkMessage::Rank {
                    router: router.clone(),
                    rank,
                    at,
                    last: number + 1 == count,
                    bytes,
                };
                if !links.send_waiting(peer, &message).await {
                    return None;
                }
            }
            Some(())
        });
    }

    /// Takes over a part of what a peer holds of a rank, and when it is whole all of it.
    pub(super) async fn mend(
        &self,
        peer: ReplicaId,
        router: &str,
        rank: WorkerRank,
        at: RankDigest,
        last: bool,
        bytes: &[u8],
    ) {
        let Some(host) = self.host(router) else {
            return;
        };
        let key = (Arc::clone(host.name()), rank);
        let mut events = Vec::new();
        let is_read = decode_router_events(Encoding::MessagePack, bytes, &mut events).is_ok();
        let events = events.into_iter().filter(|event| event.rank == rank);
        {
            let mut agreement = lock(&self.inner.agreement);
            let Some(part) = agreement.parts.get_mut(&key) else {
                return; // Nobody asked.
            };
            part.extend(events.map(|event| event.event));
            if !is_read || part.len() > EVENTS_MAX {
                agreement.parts.remove(&key);
                return;
            }
        }
        if !last {
            return;
        }
        let part = lock(&self.inner.agreement).parts.remove(&key);
        let (Some(part), Some(view)) = (part, host.views().get(rank)) else {
            return;
        };
        let Some((cursor, pause)) = held(&view).await else {
            return;
        };
        if (cursor.sequence, cursor.digest) != (at.sequence, at.message) {
            // It went on meanwhile: the next look says whether it still differs.
            lock(&self.inner.agreement).mended.remove(&key);
            return;
        }
        let index = Arc::clone(host.index());
        let replaced = tokio::task::spawn_blocking(move || {
            let refused = index.replace_rank(rank, &part).len();
            drop(pause);
            refused
        });
        let refused = replaced.await.unwrap_or_default();
        self.count_index("mended");
        tracing::info!(%rank, model = router, replica = peer.0, blocks = at.blocks, refused, "a rank's part of the index was taken over");
        self.sum_up(&host, &view).await;
    }
}
