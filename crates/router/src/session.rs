//! Which rank a session lives on.
//!
//! Answers one question: does this request belong to a session that is bound, and where? Two forms share
//! the map: `nvext.session_control` with a timeout of its own that each use restarts, and the session
//! header, whose idle time starts when the last of its requests ends.
//!
//! What always holds: at most `router-max-sessions` bindings, the one that would expire soonest making room;
//! a binding to a rank that is gone is never followed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::FastMap;
use kvasir_types::{RequestId, Time, WorkerRank};

/// How a session came to be, and so what its end means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BindingKind {
    /// The router alone knows it.
    Router,
    /// The engine holds a session too and must be told when it ends.
    Engine,
    /// Bound by the session header.
    Header,
}

#[derive(Clone, Debug)]
struct Binding {
    target: WorkerRank,
    kind: BindingKind,
    idle: Duration,
    /// Place in the order of expiry; `None` while requests hold it.
    due: Option<(Time, u64)>,
    /// Requests that hold it (header form).
    leases: u32,
    /// When it was bound.
    since: Time,
    /// Tells this binding from an earlier one of the same session.
    generation: u64,
}

/// A request of a header session.
#[derive(Clone, Debug)]
struct Lease {
    session: Arc<str>,
    target: WorkerRank,
    /// The generation of the binding that counts this request.
    held: Option<u64>,
}

/// The sessions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions {
    limit: usize,
    bindings: FastMap<Arc<str>, Binding>,
    by_due: BTreeSet<(Time, u64, Arc<str>)>,
    seq: u64,
    leases: FastMap<RequestId, Lease>,
}

/// A session as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRow {
    /// What its client calls it.
    pub id: Arc<str>,
    /// Where its requests go.
    pub target: WorkerRank,
    /// Whether the engine holds a session, too.
    pub in_engine: bool,
    /// Whether the session header bound it.
    pub by_header: bool,
    /// It ends when it is unused for so long.
    pub idle: Duration,
    /// When it ends unless it is used; `None` while requests hold it.
    pub due: Option<Time>,
    /// Requests that hold it.
    pub requests: u32,
    /// When it was bound.
    pub since: Time,
}

/// A session that is no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClosedSession {
    pub(crate) id: Arc<str>,
    pub(crate) target: WorkerRank,
    /// Whether the engine must be told.
    pub(crate) in_engine: bool,
}

impl Sessions {
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            limit: limit as usize,
            ..Self::default()
        }
    }

    /// Bindings there are.
    pub(crate) fn len(&self) -> usize {
        self.bindings.len()
    }

    /// Up to `most` of them: first those that requests hold, then the ones that last longest.
    pub(crate) fn rows(&self, most: usize) -> Vec<SessionRow> {
        let row = |(id, binding): (&Arc<str>, &Binding)| SessionRow {
            id: Arc::clone(id),
            target: binding.target,
            in_engine: binding.kind == BindingKind::Engine,
            by_header: binding.kind == BindingKind::Header,
            idle: binding.idle,
            due: binding.due.map(|(at, _)| at),
            requests: binding.leases,
            since: binding.since,
        };
        let held = self.bindings.iter().filter(|(_, b)| b.due.is_none());
        let idle = self.by_due.iter().rev();
        let idle = idle.filter_map(|(_, _, id)| self.bindings.get_key_value(id));
        held.chain(idle).take(most).map(row).collect()
    }

    /// Where a session lives.
    pub(crate) fn find(&self, id: &str) -> Option<WorkerRank> {
        self.bindings.get(id).map(|b| b.target)
    }

    /// Where a session lives, and since when.
    pub(crate) fn bound(&self, id: &str) -> Option<(WorkerRank, Time)> {
        self.bindings.get(id).map(|b| (b.target, b.since))
    }

    /// A session was bound earlier than is known here.
    pub(crate) fn set_since(&mut self, id: &str, since: Time) {
        if let Some(binding) = self.bindings.get_mut(id) {
            binding.since = since;
        }
    }

    /// The header session that a request holds.
    pub(crate) fn held_by(&self, request: RequestId) -> Option<Arc<str>> {
        let lease = self.leases.get(&request)?;
        let binding = self.bindings.get(&lease.session)?;
        (lease.held == Some(binding.generation)).then(|| Arc::clone(&lease.session))
    }

    /// Whether an engine holds it.
    pub(crate) fn is_in_engine(&self, id: &str) -> bool {
        self.bindings
            .get(id)
            .is_some_and(|b| b.kind == BindingKind::Engine)
    }

    /// A use of a session: its idle time starts again.
    pub(crate) fn touch(&mut self, now: Time, id: &Arc<str>) {
        let Some(binding) = self.bindings.get(id) else {
            return;
        };
        if binding.due.is_some() {
            let due = now + binding.idle;
            self.schedule(id, Some(due));
        }
    }

    fn schedule(&mut self, id: &Arc<str>, due: Option<Time>) {
        let Some(binding) = self.bindings.get_mut(id) else {
            return;
        };
        if let Some((at, seq)) = binding.due.take() {
            self.by_due.remove(&(at, seq, Arc::clone(id)));
        }
        if let Some(at) = due {
            self.seq += 1;
            binding.due = Some((at, self.seq));
            self.by_due.insert((at, self.seq, Arc::clone(id)));
        }
    }

    /// Binds a session, replacing what it was bound to. Returns the one that had to make room.
    pub(crate) fn bind(
        &mut self,
        now: Time,
        id: &Arc<str>,
        target: WorkerRank,
        kind: BindingKind,
        idle: Duration,
    ) -> Option<ClosedSession> {
        if self.limit == 0 {
            return None;
        }
        self.unbind(id);
        let evicted = if self.bindings.len() >= self.limit {
            let (_, _, soonest) = self.by_due.first().cloned()?;
            self.unbind(&soonest)
        } else {
            None
        };
        self.seq += 1;
        let binding = Binding {
            target,
            kind,
            idle,
            due: None,
            leases: 0,
            since: now,
            generation: self.seq,
        };
        self.bindings.insert(Arc::clone(id), binding);
        self.schedule(id, Some(now + idle));
        evicted
    }

    /// Forgets a session.
    pub(crate) fn unbind(&mut self, id: &Arc<str>) -> Option<ClosedSession> {
        self.schedule(id, None);
        let binding = self.bindings.remove(id)?;
        Some(ClosedSession {
            id: Arc::clone(id),
            target: binding.target,
            in_engine: binding.kind == BindingKind::Engine,
        })
    }

    /// The first session that has expired, taken out.
    pub(crate) fn expire(&mut self, now: Time) -> Option<ClosedSession> {
        let (due, _, id) = self.by_due.first()?;
        if *due > now {
            return None;
        }
        let id = Arc::clone(id);
        self.unbind(&id)
    }

    /// When the next one expires.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.by_due.first().map(|(due, ..)| *due)
    }

    /// A request of a header session was sent to `target`. It holds the binding, if there is one there.
    pub(crate) fn lease(&mut self, request: RequestId, session: &Arc<str>, target: WorkerRank) {
        let mut lease = Lease {
            session: Arc::clone(session),
            target,
            held: None,
        };
        self.hold(&mut lease);
        self.leases.insert(request, lease);
    }

    fn hold(&mut self, lease: &mut Lease) {
        let Some(binding) = self.bindings.get_mut(&lease.session) else {
            return;
        };
        if binding.target == lease.target && lease.held != Some(binding.generation) {
            binding.leases += 1;
            lease.held = Some(binding.generation);
            self.schedule(&lease.session, None);
        }
    }

    /// A request's dispatch succeeded: its header session is bound unless it is already. Returns the
    /// session if it was bound now, and the one that had to make room.
    pub(crate) fn dispatched(
        &mut self,
        now: Time,
        request: RequestId,
        idle: Duration,
    ) -> (Option<Arc<str>>, Option<ClosedSession>) {
        let Some(mut lease) = self.leases.remove(&request) else {
            return (None, None);
        };
        let (mut bound, mut evicted) = (None, None);
        if !self.bindings.contains_key(&lease.session) {
            evicted = self.bind(now, &lease.session, lease.target, BindingKind::Header, idle);
            bound = self
                .bindings
                .contains_key(&lease.session)
                .then(|| Arc::clone(&lease.session));
        }
        self.hold(&mut lease);
        self.leases.insert(request, lease);
        (bound, evicted)
    }

    /// A request ended. If it failed, the binding it used goes; else its idle time starts with the last.
    pub(crate) fn release(&mut self, now: Time, request: RequestId, failed: bool) {
        let Some(lease) = self.leases.remove(&request) else {
            return;
        };
        let Some(binding) = self.bindings.get_mut(&lease.session) else {
            return;
        };
        let held = lease.held == Some(binding.generation);
        if held {
            binding.leases -= 1;
        }
        if failed && binding.target == lease.target {
            self.unbind(&lease.session);
        } else if held && binding.leases == 0 {
            let due = now + binding.idle;
            self.schedule(&lease.session, Some(due));
        }
    }
}
