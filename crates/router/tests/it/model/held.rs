//! What the model holds against workers: failures, errors and probes, each as the router must weigh them.

use std::time::Duration;

use super::*;
use kvasir_router::{
    BROKEN_MAX, ERRORS_MAX, FIRST_SPAN, FORGIVEN_AFTER, OUTWEIGHED_MAX, Probe, TokenProbe,
};

/// What is held against a worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    failures: u32,
    failed_at: Time,
    errors: u32,
    errors_since: Time,
    breaks: u32,
    breaks_since: Time,
    /// Ejected until then: the earliest, the latest, and what the router drew, once it shows.
    pub(super) until: Option<(Time, Time, Option<Time>)>,
    sick: bool,
    broken: bool,
}

impl Held {
    pub(super) fn is_down(&self) -> bool {
        self.sick || self.broken || self.until.is_some()
    }

    /// Probed and found sick come last, broken ones before them, by their failure; the others by the end of their span.
    pub(super) fn badness(&self) -> (bool, bool, Time) {
        let until = self.until.and_then(|(.., drawn)| drawn);
        (
            self.sick,
            self.broken,
            if self.sick || self.broken {
                self.failed_at
            } else {
                until.unwrap_or_default()
            },
        )
    }
}

impl Held {
    fn forgive(&mut self) {
        *self = Self {
            sick: self.sick,
            failed_at: self.failed_at,
            ..Self::default()
        };
    }

    fn count_error(&mut self, now: Time) -> (u32, Time) {
        if self.errors == 0 || now - self.errors_since > FORGIVEN_AFTER {
            (self.errors, self.errors_since) = (0, now);
        }
        self.errors += 1;
        (self.errors, self.errors_since)
    }

    fn count_break(&mut self, now: Time) -> u32 {
        if self.breaks == 0 || now - self.breaks_since > FORGIVEN_AFTER {
            (self.breaks, self.breaks_since) = (0, now);
        }
        self.breaks += 1;
        self.breaks
    }
}

impl Model {
    /// The router's mark on a worker is the one that it must have; how long it lasts is drawn.
    pub(super) fn compare_mark(&mut self, id: WorkerId) {
        let mark = self.marks.get(&id).copied();
        let held = &mut self.workers.get_mut(&id).unwrap().held;
        match (&mut held.until, held.sick || held.broken) {
            (_, true) => assert_eq!(mark, Some(Time::MAX), "{id} is sick or broken"),
            (None, false) => assert_eq!(mark, None, "nothing is held against {id}"),
            (Some((earliest, latest, drawn)), false) => {
                let mark = mark.unwrap_or_else(|| panic!("{id} is not ejected"));
                assert!(*earliest <= mark && mark <= *latest, "{id} until {mark:?}");
                assert!(
                    drawn.is_none_or(|before| before == mark),
                    "{id} is ejected anew"
                );
                *drawn = Some(mark);
            }
        }
    }

    /// Half a minute of tests never comes near the time after which failures are forgotten.
    pub(super) fn has_failed(&mut self, id: WorkerId, began: Option<Time>) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        let held = &mut worker.held;
        let stale = self.now - held.failed_at > FORGIVEN_AFTER;
        if held.failures == 0 || stale {
            held.failures = 0;
        } else if began.is_none_or(|began| began < held.failed_at) {
            return;
        }
        held.failures += 1;
        held.failed_at = self.now;
        let longest = Duration::from_secs_f64(self.config.runtime_inhibited_duration_secs);
        let span = longest.min(FIRST_SPAN * 2u32.pow((held.failures - 1).min(20)));
        let earliest = self.now + span.mul_f64(0.899);
        held.until = Some((earliest, self.now + span, None));
        self.compare_mark(id);
    }

    pub(super) fn has_erred(&mut self, id: WorkerId, began: Option<Time>) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        let (errors, since) = worker.held.count_error(self.now);
        let others = || self.workers.iter().filter(|(other, _)| **other != id);
        let is_serving = |other: &WorkerId| self.served.get(other).is_some_and(|at| *at >= since);
        let others_serve = others().any(|(other, _)| is_serving(other));
        let others_up = others().any(|(_, w)| !w.held.is_down());
        if errors >= ERRORS_MAX && others_serve && others_up {
            self.has_failed(id, began);
        }
    }

    pub(super) fn has_broken(&mut self, id: WorkerId, began: Option<Time>) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        let breaks = worker.held.count_break(self.now);
        let took = began.map(|began| self.now - began);
        let at_once = took.is_some_and(|took| self.fastest.get(&id).is_some_and(|f| took < *f));
        let mut others = self.workers.iter().filter(|(other, _)| **other != id);
        let others_up = others.any(|(_, w)| !w.held.is_down());
        if (at_once || breaks >= BROKEN_MAX) && others_up {
            let held = &mut self.workers.get_mut(&id).unwrap().held;
            if !held.broken {
                (held.broken, held.failed_at) = (true, self.now);
            }
        }
        self.compare_mark(id);
    }

    pub(super) fn generated(&mut self, probe: &TokenProbe) {
        let Some(worker) = self.workers.get_mut(&probe.worker) else {
            return;
        };
        let held = &mut worker.held;
        if probe.supported {
            if probe.asked >= held.failed_at {
                held.forgive();
            }
        } else if std::mem::take(&mut held.broken) {
            self.has_failed(probe.worker, Some(probe.asked));
        }
        self.compare_mark(probe.worker);
    }

    pub(super) fn has_served(&mut self, id: WorkerId, began: Time, completed: bool) {
        self.served.insert(id, self.now);
        let took = self.now - began;
        let fastest = self.fastest.entry(id).or_insert(took);
        *fastest = took.min(*fastest);
        let held = &mut self.workers.get_mut(&id).unwrap().held;
        if held.broken && began < held.failed_at {
            return self.compare_mark(id);
        }
        let (breaks, since) = (held.breaks, held.breaks_since);
        held.forgive();
        if !completed {
            (held.breaks, held.breaks_since) = (breaks, since);
        }
        self.compare_mark(id);
    }

    pub(super) fn probed(&mut self, probe: &Probe) {
        let Some(worker) = self.workers.get_mut(&probe.worker) else {
            return;
        };
        let held = &mut worker.held;
        if !probe.healthy {
            if !held.sick && held.failures == 0 {
                held.failed_at = self.now;
            }
            held.sick = true;
            return;
        }
        held.sick = false;
        let outweighs = probe.asked >= held.failed_at && held.failures <= OUTWEIGHED_MAX;
        if outweighs && held.errors < ERRORS_MAX {
            held.until = None;
        }
        let gone = |(.., latest, drawn): (Time, Time, Option<Time>)| {
            drawn.is_none() && latest > self.now && !self.marks.contains_key(&probe.worker)
        };
        if held.until.is_some_and(gone) {
            // It ended unseen while the worker was sick.
            held.until = held.until.filter(|(earliest, ..)| *earliest > self.now);
        }
        self.compare_mark(probe.worker);
    }
}
