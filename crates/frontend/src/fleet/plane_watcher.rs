//! Watching a worker on a request plane: it serves what its record says, from when it joins until it leaves.
//!
//! Nobody asks it anything: whoever announces it says whether it lives, and a request that it fails ejects it for a while.

use std::sync::Arc;

use kvasir_router::Input;
use kvasir_types::{Transport, WorkerRecord};
use kvasir_upstream::Facts;

use super::registration::Registration;
use super::{DRAIN_LOOK, Fleet, Goal, Goals, WatchEnd};
use crate::fleet::members::MemberState;
use crate::models::links::WorkerLink;

/// Watches one token worker.
pub(super) struct PlaneWatcher {
    registration: Registration,
}

impl PlaneWatcher {
    pub(super) fn new(record: &Arc<WorkerRecord>, link: WorkerLink, fleet: &Fleet) -> Self {
        Self {
            registration: Registration::new(record, link, fleet),
        }
    }

    /// Pursues each goal until the worker is gone, or is reached in another way.
    pub(super) async fn run(mut self, goals: &mut Goals) -> WatchEnd {
        let end = loop {
            let goal = goals.borrow_and_update().clone();
            match goal {
                Goal::Serve(record) => {
                    if !self.serve_as(&record).await {
                        break WatchEnd::OtherTransport;
                    }
                    let _ = goals.changed().await;
                }
                Goal::Drain => tokio::select! {
                    () = self.drain() => break WatchEnd::Gone,
                    _ = goals.changed() => {}
                },
                // What runs there ends as it would: a plane has no connections that could be closed.
                Goal::Cut => break WatchEnd::Gone,
            }
        };
        self.registration.end().await;
        end
    }

    /// Serves what the record says. False if it is reached in another way now.
    async fn serve_as(&mut self, record: &Arc<WorkerRecord>) -> bool {
        let fleet = self.registration.fleet.clone();
        let Transport::Plane(endpoint) = &record.transport else {
            return false;
        };
        if self.registration.record != *record {
            match fleet.connect(record.id, endpoint) {
                Some(link) => self.registration.update(record, link),
                None => return false,
            }
        }
        self.registration.rejoin();
        self.registration.settle_events().await;
        self.registration.join(&Facts::default());
        let state = match self.registration.is_serving() {
            true => MemberState::Serving,
            false => MemberState::Joining,
        };
        fleet.members().report(record.id, state);
        true
    }

    /// Takes the worker out of every choice and waits until it has nothing left to do.
    async fn drain(&self) {
        tracing::info!(worker = %self.registration.record.transport, "worker is draining");
        self.registration.tell(|spec| Input::Draining(spec.id));
        while self.registration.booked() > 0 {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    }
}
