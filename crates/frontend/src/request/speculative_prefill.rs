//! `agent_hints.speculative_prefill`: after a turn, the engine computes what the next one will begin with.
//!
//! An agent's next prompt is its conversation and the answer it just got, rendered anew. A request for one token
//! of that, in the background, leaves it in the engine's cache while the agent is busy with its tools.
//!
//! What always holds: no client waits for it; few run at once ([`RUNNING_MAX`]); it is not begun, and is given up,
//! while anything waits or anything else is on the rank; it is booked and freed as any request is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvasir_host::Booking;
use kvasir_router::RouteError;
use kvasir_tasks::Tasks;
use kvasir_types::WorkerRank;

use crate::models::ServedModel;

/// Running at once, over all models.
const RUNNING_MAX: usize = 8;
/// Between two looks whether something else needs the worker.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The router has this long to place it: it does not wait in the queue.
const PLACE_TIMEOUT: Duration = Duration::from_millis(20);
/// Longest that one may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillOutcome {
    /// The engine has computed it.
    Done,
    /// It was not begun: too many run, or the worker is busy.
    Dropped,
    /// It was given up for other work.
    Cancelled,
    /// The engine did not answer, or what it would be could not be told.
    Failed,
}

impl PrefillOutcome {
    const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Dropped => "dropped",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// How many run. Dropping a slot ends one.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillSlots {
    running: Arc<AtomicUsize>,
}

struct PrefillSlot(Arc<AtomicUsize>);

impl PrefillSlots {
    fn take(&self) -> Option<PrefillSlot> {
        let taken = self.running.fetch_add(1, Ordering::AcqRel);
        let slot = PrefillSlot(Arc::clone(&self.running));
        (taken < RUNNING_MAX).then_some(slot)
    }
}

impl Drop for PrefillSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Runs `work` in the background, for a worker that just ended a turn, unless there is something better to do.
pub(crate) fn start(
    (slots, tasks): (&PrefillSlots, &Tasks),
    model: &Arc<ServedModel>,
    target: WorkerRank,
    work: impl Future<Output = PrefillOutcome> + Send + 'static,
) {
    let Some(slot) = slots.take().filter(|_| !is_loaded(model, target, 0)) else {
        return count(model, PrefillOutcome::Dropped);
    };
    let (draining, model) = (tasks.clone(), Arc::clone(model));
    tasks.spawn(async move {
        let _slot = slot;
        let end = tokio::select! {
            ended = tokio::time::timeout(TIMEOUT, work) => ended.unwrap_or(PrefillOutcome::Cancelled),
            () = until_loaded(&model, target) => PrefillOutcome::Cancelled,
            () = draining.draining() => PrefillOutcome::Cancelled,
        };
        count(&model, end);
    });
}

/// Waits until something else needs the worker; the booking of the work itself does not count.
async fn until_loaded(model: &ServedModel, target: WorkerRank) {
    while !is_loaded(model, target, 1) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn is_loaded(model: &ServedModel, target: WorkerRank, own: u32) -> bool {
    model.host.ask(|router| {
        let queued = router
            .queue_stats()
            .any(|(_, waiting)| waiting.requests > 0);
        let busy = router
            .fleet()
            .member(target.worker)
            .is_none_or(|member| member.is_busy());
        let running = router.load(target).map_or(0, |load| load.requests);
        queued || busy || running > own
    })
}

fn count(model: &ServedModel, end: PrefillOutcome) {
    tracing::debug!(model = %model.name, end = end.name(), "speculative prefill");
    let metrics = model.meters.metrics();
    metrics
        .speculative_prefills_total
        .with_label_values(&[&*model.name, end.name()])
        .inc();
}

/// Waits for a booking, but not in the queue.
pub(crate) async fn placed(
    booking: impl Future<Output = Result<Booking, RouteError>>,
) -> Option<Booking> {
    let placed = tokio::time::timeout(PLACE_TIMEOUT, booking).await;
    placed.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_places_and_they_come_back() {
        let slots = PrefillSlots::default();
        let taken: Vec<_> = (0..RUNNING_MAX).map(|_| slots.take()).collect();
        assert!(taken.iter().all(Option::is_some));
        assert!(slots.take().is_none() && slots.take().is_none());
        drop(taken);
        assert!(slots.take().is_some());
        assert_eq!(slots.running.load(Ordering::Acquire), 0);
    }
}
