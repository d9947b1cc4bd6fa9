//! Who is a member, and which of the members may be chosen.
//!
//! Each (worker, rank) has a *slot*, a small number that stays its own while it is a member and is used
//! again later. The sets of live, ejected and busy slots, and the set that is left after taking the latter
//! two away, are kept up to date as things change, never computed for a request.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_types::{Device, DpRank, Time, TransportKind, WorkerId, WorkerRank};

use crate::WorkerSpec;
use crate::map::FastMap;
use crate::slot_set::SlotSet;

/// A worker of the fleet.
#[derive(Clone, Debug)]
pub struct Member {
    /// As it was announced.
    pub spec: WorkerSpec,
    slots: Vec<u32>,
    /// Ejected until then.
    ejected_until: Option<Time>,
    busy: bool,
    draining: bool,
}

impl Member {
    /// Its slots, lowest rank first.
    #[must_use]
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Whether it is over its busy thresholds on all ranks.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Until when it is ejected after failures.
    #[must_use]
    pub fn ejected_until(&self) -> Option<Time> {
        self.ejected_until
    }

    /// Whether it is draining: it finishes what it has and gets nothing new.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether it has an adapter loaded.
    #[must_use]
    pub fn has_lora(&self, name: &str) -> bool {
        self.spec.loras.iter().any(|lora| **lora == *name)
    }
}

/// What the choice reads of a slot.
#[derive(Clone, Copy, Debug)]
struct SlotInfo {
    rank: WorkerRank,
    member: u32,
    max_batched: u64,
    cpu: bool,
}

/// Position of a worker, with its slot inline where it has only one.
#[derive(Clone, Copy, Debug)]
struct WorkerEntry {
    member: u32,
    only_rank: DpRank,
    only_slot: Option<u32>,
}

/// The members.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    members: Vec<Option<Member>>,
    vacant_members: Vec<u32>,
    slots: Vec<Option<SlotInfo>>,
    vacant_slots: Vec<u32>,
    by_id: FastMap<WorkerId, WorkerEntry>,
    live: SlotSet,
    ejected: SlotSet,
    busy: SlotSet,
    up: SlotSet,
    open: SlotSet,
    /// Slots of the workers that serve a model, by its name.
    serving: BTreeMap<Arc<str>, SlotSet>,
    /// Slots of the workers that serve all models.
    serving_all: SlotSet,
    /// Slots of the workers that are reached by a request plane.
    on_plane: SlotSet,
}

impl Fleet {
    /// How many slots there have ever been; slots are below this.
    #[must_use]
    pub fn slot_end(&self) -> u32 {
        self.slots.len() as u32
    }

    /// How many workers there are.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.by_id.len() as u32
    }

    /// Slots of all members.
    #[must_use]
    pub fn live(&self) -> &SlotSet {
        &self.live
    }

    /// Slots of members that are neither ejected nor draining.
    #[must_use]
    pub fn up(&self) -> &SlotSet {
        &self.up
    }

    /// Those of them that are not busy.
    #[must_use]
    pub fn open(&self) -> &SlotSet {
        &self.open
    }

    /// Slots of busy members.
    #[must_use]
    pub fn busy(&self) -> &SlotSet {
        &self.busy
    }

    /// Leaves those slots in `set` whose workers serve the model of this name.
    pub fn keep_serving(&self, set: &mut SlotSet, model: &str) {
        match self.serving.get(model) {
            Some(named) => set.intersect_either(named, &self.serving_all),
            None => set.intersect(&self.serving_all),
        }
    }

    /// Whether the worker of a slot serves the model of this name.
    #[must_use]
    pub fn serves(&self, slot: u32, model: &str) -> bool {
        let named = self.serving.get(model);
        named.is_some_and(|named| named.has(slot)) || self.serving_all.has(slot)
    }

    /// The worker with this id.
    #[must_use]
    pub fn member(&self, id: WorkerId) -> Option<&Member> {
        let entry = self.by_id.get(&id)?;
        self.members.get(entry.member as usize)?.as_ref()
    }

    /// The worker that a slot belongs to.
    #[must_use]
    pub fn member_of(&self, slot: u32) -> Option<&Member> {
        let info = self.slots.get(slot as usize)?.as_ref()?;
        self.members.get(info.member as usize)?.as_ref()
    }

    /// The workers, in the order of their places in memory: the same for the same history.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten()
    }

    /// The slot of a rank.
    #[must_use]
    pub fn slot(&self, rank: WorkerRank) -> Option<u32> {
        let entry = self.by_id.get(&rank.worker)?;
        if entry.only_slot.is_some() {
            return entry.only_slot.filter(|_| rank.rank == entry.only_rank);
        }
        let member = self.members.get(entry.member as usize)?.as_ref()?;
        let index = rank.rank.0.checked_sub(member.spec.first_rank.0)?;
        member.slots.get(index as usize).copied()
    }

    /// The rank of a slot.
    #[must_use]
    pub fn rank(&self, slot: u32) -> Option<WorkerRank> {
        self.slots.get(slot as usize)?.as_ref().map(|p| p.rank)
    }

    /// Tokens that a slot computes per step.
    #[must_use]
    pub fn max_batched(&self, slot: u32) -> u64 {
        let info = self.slots.get(slot as usize).and_then(Option::as_ref);
        info.map_or(WorkerSpec::UNKNOWN_BATCH, |p| p.max_batched)
    }

    /// Whether a slot computes on a CPU.
    #[must_use]
    pub fn is_cpu(&self, slot: u32) -> bool {
        let info = self.slots.get(slot as usize).and_then(Option::as_ref);
        info.is_some_and(|p| p.cpu)
    }

    /// Leaves those slots in `set` whose workers are reached this way.
    pub fn keep_reached_by(&self, set: &mut SlotSet, transport: TransportKind) {
        match transport {
            TransportKind::Http => set.subtract(&self.on_plane),
            TransportKind::Plane => set.intersect(&self.on_plane),
        }
    }

    /// Whether the worker of a slot is reached this way.
    #[must_use]
    pub fn is_reached_by(&self, slot: u32, transport: TransportKind) -> bool {
        self.on_plane.has(slot) == (transport == TransportKind::Plane)
    }

    /// Whether the worker of a slot carries a taint.
    #[must_use]
    pub fn carries(&self, slot: u32, taint: &str) -> bool {
        let member = self.member_of(slot);
        member.is_some_and(|m| m.spec.taints.iter().any(|t| **t == *taint))
    }

    /// Adds a worker, or replaces what is known of it. Ranks that it keeps keep their slots. `gone` is
    /// called with each slot it no longer has, before that slot can be used again.
    pub fn put(&mut self, spec: WorkerSpec, mut gone: impl FnMut(u32)) {
        let at = match self.by_id.get(&spec.id) {
            Some(entry) => entry.member,
            None => self.vacant_members.pop().unwrap_or_else(|| {
                self.members.push(None);
                self.members.len() as u32 - 1
            }),
        };
        let old = self.members.get_mut(at as usize).and_then(Option::take);
        let (ejected_until, busy, draining) = old.as_ref().map_or((None, false, false), |m| {
            (m.ejected_until, m.busy, m.draining)
        });
        let mut kept: Vec<(DpRank, u32)> = Vec::new();
        for (rank, slot) in old.iter().flat_map(|m| m.spec.rank_iter().zip(&m.slots)) {
            if spec.rank_iter().any(|r| r.rank == rank.rank) {
                kept.push((rank.rank, *slot));
            } else {
                gone(*slot);
                self.vacate(*slot);
            }
        }
        let mut slots = Vec::with_capacity(spec.rank_count() as usize);
        for rank in spec.rank_iter() {
            let known = kept.iter().find(|(r, _)| *r == rank.rank);
            let slot = known.map_or_else(|| self.new_slot(), |(_, slot)| *slot);
            self.slots[slot as usize] = Some(SlotInfo {
                rank,
                member: at,
                max_batched: spec
                    .max_num_batched_tokens
                    .unwrap_or(WorkerSpec::UNKNOWN_BATCH),
                cpu: spec.device == Device::Cpu,
            });
            slots.push(slot);
        }
        let entry = WorkerEntry {
            member: at,
            only_rank: spec.first_rank,
            only_slot: slots.first().copied().filter(|_| slots.len() == 1),
        };
        self.by_id.insert(spec.id, entry);
        self.serve(&spec.serves, &slots);
        for &slot in &slots {
            let on_plane = spec.transport == TransportKind::Plane;
            self.on_plane.set(slot, on_plane);
        }
        self.members[at as usize] = Some(Member {
            spec,
            slots,
            ejected_until,
            busy,
            draining,
        });
        self.mark(at);
    }

    /// The workers of these slots serve these models and no others.
    fn serve(&mut self, models: &[Arc<str>], slots: &[u32]) {
        for &slot in slots {
            self.serve_nothing(slot);
            self.serving_all.set(slot, models.is_empty());
            for model in models {
                let named = self.serving.entry(Arc::clone(model)).or_default();
                named.set(slot, true);
            }
        }
        self.serving.retain(|_, named| !named.is_empty());
    }

    fn serve_nothing(&mut self, slot: u32) {
        self.serving_all.set(slot, false);
        for named in self.serving.values_mut() {
            named.set(slot, false);
        }
    }

    fn new_slot(&mut self) -> u32 {
        self.vacant_slots.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        })
    }

    fn vacate(&mut self, slot: u32) {
        if let Some(info) = self.slots.get_mut(slot as usize) {
            *info = None;
            self.vacant_slots.push(slot);
        }
        for set in [
            &mut self.live,
            &mut self.ejected,
            &mut self.busy,
            &mut self.up,
            &mut self.open,
            &mut self.on_plane,
        ] {
            set.set(slot, false);
        }
        self.serve_nothing(slot);
    }

    /// Removes a worker. `gone` is called with each of its slots.
    pub fn remove(&mut self, id: WorkerId, mut gone: impl FnMut(u32)) -> bool {
        let Some(WorkerEntry { member: at, .. }) = self.by_id.remove(&id) else {
            return false;
        };
        let member = self.members.get_mut(at as usize).and_then(Option::take);
        for slot in member.iter().flat_map(|m| &m.slots) {
            gone(*slot);
            self.vacate(*slot);
        }
        self.serving.retain(|_, named| !named.is_empty());
        self.vacant_members.push(at);
        true
    }

    /// Ejects a worker until then, or readmits it; returns whether that changed anything.
    pub fn set_ejected(&mut self, id: WorkerId, until: Option<Time>) -> bool {
        self.change(id, |member| {
            let changed = member.ejected_until.is_some() != until.is_some();
            member.ejected_until = until;
            changed
        })
    }

    /// Marks a worker as busy or not; returns whether that changed anything.
    pub fn set_busy(&mut self, id: WorkerId, busy: bool) -> bool {
        self.change(id, |member| {
            std::mem::replace(&mut member.busy, busy) != busy
        })
    }

    /// Marks a worker as draining or not; returns whether that changed anything.
    pub fn set_draining(&mut self, id: WorkerId, draining: bool) -> bool {
        self.change(id, |member| {
            std::mem::replace(&mut member.draining, draining) != draining
        })
    }

    fn change(&mut self, id: WorkerId, change: impl FnOnce(&mut Member) -> bool) -> bool {
        let Some(&WorkerEntry { member: at, .. }) = self.by_id.get(&id) else {
            return false;
        };
        let member = self.members.get_mut(at as usize).and_then(Option::as_mut);
        let changed = member.is_some_and(change);
        self.mark(at);
        changed
    }

    /// Brings the sets up to date for one worker.
    fn mark(&mut self, at: u32) {
        let Some(member) = self.members.get(at as usize).and_then(Option::as_ref) else {
            return;
        };
        let (ejected, busy) = (member.ejected_until.is_some(), member.busy);
        let up = !ejected && !member.draining;
        for &slot in &member.slots {
            self.live.set(slot, true);
            self.ejected.set(slot, ejected);
            self.busy.set(slot, busy);
            self.up.set(slot, up);
            self.open.set(slot, up && !busy);
        }
    }
}
