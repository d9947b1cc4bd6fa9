//! Engines in virtual time: steps that begin and end, workers that come and go.

use std::time::Duration;

use kvasir_engine::{AdmitError, ConfigError, Counters, Engine, EngineRequest, Load, Output, Step};
use kvasir_router::{Input, Outcome, PeerChange, PeerEvent};
use kvasir_types::{DpRank, Time, WorkerId, WorkerRank};

use super::queue::Event;
use super::routers::request_of;
use super::{Leg, State, World};
use crate::FleetChange;

/// One rank of one worker.
#[derive(Debug)]
pub(super) struct SimulatedEngine {
    pub(super) rank: WorkerRank,
    /// `None` while the worker is dead.
    engine: Option<Engine>,
    /// Counts deaths: what was planned for an earlier life does not happen.
    pub(super) life: u32,
    step: Step,
    stepping: bool,
    /// Requests in the engine.
    pub(super) in_flight: u32,
    /// Requests times seconds, until `settled`.
    pub(super) area: f64,
    settled: Time,
    /// Until when it sends or receives prompts.
    pub(super) link_until: Time,
}

impl SimulatedEngine {
    pub(super) fn is_alive(&self) -> bool {
        self.engine.is_some()
    }

    pub(super) fn load(&self) -> Option<(WorkerRank, Load)> {
        Some((self.rank, self.engine.as_ref()?.load()))
    }

    pub(super) fn counters(&self) -> Counters {
        self.engine
            .as_ref()
            .map_or_else(Counters::default, |engine| *engine.counters())
    }

    /// Accounts for the time since the last change of `in_flight`.
    pub(super) fn settle(&mut self, now: Time) {
        self.area += f64::from(self.in_flight) * (now - self.settled).as_secs_f64();
        self.settled = now;
    }
}

impl World<'_> {
    pub(super) fn host_of(&self, rank: WorkerRank) -> usize {
        rank.worker.0 as usize * self.fleet.ranks as usize + rank.rank.0 as usize
    }

    /// A worker comes, with empty engines.
    pub(super) fn join(&mut self, worker: u32) -> Result<(), ConfigError> {
        let ranks = self.fleet.ranks as usize;
        while self.hosts.len() < (worker as usize + 1) * ranks {
            let at = self.hosts.len();
            self.hosts.push(SimulatedEngine {
                rank: WorkerRank {
                    worker: WorkerId((at / ranks) as u64),
                    rank: DpRank((at % ranks) as u32),
                },
                engine: None,
                life: 0,
                step: Step::default(),
                stepping: false,
                in_flight: 0,
                area: 0.0,
                settled: self.now,
                link_until: Time::ZERO,
            });
        }
        for host in &mut self.hosts[worker as usize * ranks..(worker as usize + 1) * ranks] {
            if host.engine.is_none() {
                host.engine = Some(Engine::new(self.fleet.engine.clone())?);
            }
        }
        self.announce_worker(WorkerId(u64::from(worker)));
        Ok(())
    }

    /// A worker computes at `percent` of its configured speed from its next step on.
    fn slow(&mut self, worker: u32, percent: u32) {
        let ranks = self.fleet.ranks as usize;
        let speedup = self.fleet.engine.speedup * f64::from(percent.max(1)) / 100.0;
        let hosts = worker as usize * ranks..(worker as usize + 1) * ranks;
        for host in self.hosts.get_mut(hosts).into_iter().flatten() {
            if let Some(engine) = &mut host.engine {
                engine.set_speedup(speedup);
            }
        }
    }

    /// A worker's process dies.
    fn leave(&mut self, worker: u32) {
        let ranks = self.fleet.ranks as usize;
        let hosts = worker as usize * ranks..(worker as usize + 1) * ranks;
        let id = WorkerId(u64::from(worker));
        for host in self.hosts.get_mut(hosts.clone()).into_iter().flatten() {
            host.settle(self.now);
            self.tally.preemptions += host.counters().preemptions;
            (host.engine, host.stepping, host.in_flight) = (None, false, 0);
            host.life += 1;
        }
        self.forget_worker(id);
        for request in 0..self.requests.len() {
            if let State::Running { host } = self.requests[request].state
                && hosts.contains(&host)
            {
                let rank = self.hosts[host].rank;
                self.release(request as u32, rank, Outcome::Unreachable);
                self.retry(request as u32, id);
            }
        }
    }

    pub(super) fn change(&mut self, at: usize) {
        let Some(change) = self.fleet.changes.get(at).copied() else {
            return;
        };
        match change {
            FleetChange::Leaves { .. } => self.leave(change.worker()),
            FleetChange::Joins { .. } => {
                let joined = self.join(change.worker());
                debug_assert!(joined.is_ok(), "the engine was checked at the start");
            }
            FleetChange::Slows { percent, .. } => self.slow(change.worker(), percent),
        }
    }

    /// Hands a request to a rank and says which host that is.
    pub(super) fn admit(
        &mut self,
        target: WorkerRank,
        admission: EngineRequest,
    ) -> Result<usize, AdmitError> {
        let at = self.host_of(target);
        let now = self.now;
        let Some(host) = self.hosts.get_mut(at) else {
            return Err(AdmitError::QueueFull(0));
        };
        let Some(engine) = host.engine.as_mut() else {
            return Err(AdmitError::QueueFull(0)); // dead, and the router does not know yet
        };
        engine.admit(admission)?;
        host.settle(now);
        host.in_flight += 1;
        if !host.stepping {
            self.begin_step(at);
        }
        Ok(at)
    }

    fn begin_step(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let Some(engine) = host.engine.as_mut().filter(|engine| !engine.is_idle()) else {
            return;
        };
        engine.step(&mut host.step);
        host.stepping = true;
        let end = self.now + host.step.duration.max(Duration::from_nanos(1));
        self.queue.push(
            end,
            Event::StepEnd {
                host: at,
                life: host.life,
            },
        );
        for started in &host.step.started {
            let slot = &mut self.requests[request_of(started.id) as usize];
            if slot.cached.is_none() {
                slot.cached = Some(started.cached_tokens);
                slot.started = self.now;
            }
        }
    }

    pub(super) fn step_end(&mut self, at: usize, life: u32) {
        let host = &mut self.hosts[at];
        if host.life != life {
            return;
        }
        host.stepping = false;
        let mut step = std::mem::take(&mut host.step);
        self.publish(at, std::mem::take(&mut step.events));
        for output in &step.outputs {
            self.token(at, output);
        }
        self.hosts[at].step = step;
        self.report_load(at);
        self.begin_step(at);
    }

    /// One token reaches its client.
    fn token(&mut self, at: usize, output: &Output) {
        let request = request_of(output.id);
        if self.requests[request as usize].leg == Leg::Prefill {
            return self.prefilled(at, request);
        }
        let slot = &mut self.requests[request as usize];
        let (replica, target) = (slot.replica, self.hosts[at].rank);
        slot.generated += 1;
        if slot.generated == 1 {
            slot.first_token = self.now;
        } else {
            self.tally.gaps.record(self.now - slot.last_token);
        }
        slot.last_token = self.now;
        let (generated, id) = (slot.generated, output.id);
        if generated == slot.carried + 1 {
            self.inputs.push_back((replica, Input::FirstToken { id }));
            self.peer(
                replica,
                &PeerEvent {
                    id,
                    target,
                    change: PeerChange::PrefillCompleted,
                },
            );
        } else if generated.is_multiple_of(self.report_every) {
            self.inputs
                .push_back((replica, Input::Tokens { id, generated }));
        }
        if output.finish.is_some() {
            let host = &mut self.hosts[at];
            host.settle(self.now);
            host.in_flight -= 1;
            self.release(
                request,
                target,
                Outcome::Completed {
                    output_tokens: generated,
                },
            );
            self.end(request, State::Completed);
        }
    }
}
