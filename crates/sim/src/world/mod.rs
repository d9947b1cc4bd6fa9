//! The discrete-event loop.
//!
//! Everything that will happen stands in one queue by time, then by the order in which it was put there.
//! The router's inputs are a second, inner queue that is emptied before time goes on, so that an output
//! that causes an input (a full engine, a retry) needs no recursion.

mod clients;
mod engines;
mod pools;
mod queue;
mod request;
mod routers;

use std::collections::VecDeque;

use kvasir_engine::ConfigError;
use kvasir_router::{GAP_TOKENS, Input, Output, ReplicaId};
use kvasir_types::{Rng, Time};

use crate::prompt::PromptHasher;
use crate::report::Tally;
use crate::{Fleet, Policy, RunReport, Trace};

use clients::Clients;
use engines::SimulatedEngine;
use queue::{Event, Queue};
pub(crate) use request::{Leg, Request, State};
use routers::Replica;

/// Events between two calls of the progress function.
const PROGRESS_EVERY: u64 = 1 << 14;

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests that ended.
    pub done: u32,
    /// Requests of the trace.
    pub total: u32,
    /// Virtual time.
    pub now: Time,
}

/// What cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The engine makes no sense.
    #[error("engine: {0}")]
    Engine(#[from] ConfigError),
    /// Nobody is there.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// Hashes cannot be made anew for other blocks.
    #[error(
        "request {request} of the trace was recorded in blocks of {recorded} tokens and the engine's \
         have {engine}; set the block size to {recorded}"
    )]
    BlockSize {
        /// Which, from 1.
        request: usize,
        /// The trace's.
        recorded: u32,
        /// The engine's.
        engine: u32,
    },
    /// What two pools of workers cannot have.
    #[error("{0} cannot be simulated where some workers compute prompts and others answer")]
    Pools(&'static str),
    /// No time to divide by.
    #[error("speed is {0}; it must be a positive number")]
    Speed(f64),
}

/// Plays `trace` to `fleet` under `policy`. Calls `progress` now and then.
pub fn simulate(
    trace: &Trace,
    fleet: &Fleet,
    policy: &Policy,
    progress: &mut dyn FnMut(Progress),
) -> Result<RunReport, SimError> {
    check(trace, fleet)?;
    let mut world = World::new(trace, fleet, policy)?;
    world.run(progress);
    Ok(world.report())
}

fn check(trace: &Trace, fleet: &Fleet) -> Result<(), SimError> {
    fleet.engine.check()?;
    let counts = [
        ("workers", fleet.workers),
        ("ranks", fleet.ranks),
        ("replicas", fleet.replicas),
    ];
    if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
        return Err(SimError::Zero(name));
    }
    pools::check(fleet)?;
    match fleet.arrivals {
        crate::ArrivalMode::Closed { clients: 0, .. } => return Err(SimError::Zero("clients")),
        crate::ArrivalMode::Open { speed } if !speed.is_finite() || speed <= 0.0 => {
            return Err(SimError::Speed(speed));
        }
        _ => {}
    }
    let engine = fleet.engine.block_size;
    let recorded =
        |(at, r): (usize, &crate::TraceRequest)| Some((at, r.prompt.fixed_block_size()?));
    let mut fixed = trace.requests.iter().enumerate().filter_map(recorded);
    match fixed.find(|(_, size)| *size != engine) {
        Some((at, recorded)) => Err(SimError::BlockSize {
            request: at + 1,
            recorded,
            engine,
        }),
        None => Ok(()),
    }
}

/// One run.
struct World<'a> {
    trace: &'a Trace,
    fleet: &'a Fleet,
    policy: &'a Policy,
    now: Time,
    queue: Queue,
    requests: Vec<Request>,
    /// Of each request, where sessions matter.
    conversations: Vec<u32>,
    clients: Clients,
    hosts: Vec<SimulatedEngine>,
    replicas: Vec<Replica>,
    inputs: VecDeque<(usize, Input)>,
    outputs: Vec<Output>,
    prompt_hasher: PromptHasher,
    losses: Rng,
    tally: Tally,
    /// Tokens of a stream after which its router is told.
    report_every: u32,
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, fleet: &'a Fleet, policy: &'a Policy) -> Result<Self, SimError> {
        let mut world = Self {
            trace,
            fleet,
            policy,
            now: Time::ZERO,
            queue: Queue::default(),
            requests: vec![Request::default(); trace.requests.len()],
            conversations: match policy.router.router_session_affinity_ttl_secs {
                Some(_) => trace.conversations(),
                None => Vec::new(),
            },
            clients: Clients::new(trace, fleet.arrivals),
            hosts: Vec::new(),
            replicas: Vec::new(),
            inputs: VecDeque::new(),
            outputs: Vec::new(),
            prompt_hasher: PromptHasher::new(fleet.engine.block_size),
            losses: Rng::new(fleet.seed ^ 0x105E),
            tally: Tally::default(),
            report_every: match policy.router.learns_seconds() {
                true => fleet.engine.block_size.min(GAP_TOKENS),
                false => fleet.engine.block_size,
            },
        };
        world.add_routers();
        for worker in 0..fleet.workers + pools::prefill_workers(fleet) {
            world.join(worker)?;
        }
        for (at, change) in fleet.changes.iter().enumerate() {
            world.queue.push(change.at(), Event::Change(at));
        }
        world.queue.push(Time::ZERO, Event::Sample);
        world.begin_clients();
        Ok(world)
    }

    fn run(&mut self, progress: &mut dyn FnMut(Progress)) {
        let mut events = 0u64;
        while self.clients.left > 0 {
            let Some((at, event)) = self.queue.pop() else {
                break; // a request waits for something that will never happen: the report says so
            };
            debug_assert!(at >= self.now, "time went back");
            self.now = at;
            self.happen(event);
            events += 1;
            if events.is_multiple_of(PROGRESS_EVERY) {
                progress(self.progress());
            }
        }
        self.tally.events = events;
        progress(self.progress());
    }

    fn progress(&self) -> Progress {
        let total = self.requests.len() as u32;
        Progress {
            done: total - self.clients.left,
            total,
            now: self.now,
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::Transferred { target, admission } => self.transferred(target, *admission),
            Event::StepEnd { host, life } => self.step_end(host, life),
            Event::Deliver {
                replica,
                host,
                life,
                events,
            } => {
                self.deliver(replica, host, life, &events);
            }
            Event::Peer { replica, event } => {
                // Requests of all replicas have ids of their own here.
                let from = ReplicaId(u64::MAX);
                let recalled = false;
                let told = Input::Peer {
                    from,
                    event,
                    recalled,
                };
                self.inputs.push_back((replica, told));
            }
            Event::Tick(replica) => self.tick(replica),
            Event::Change(at) => self.change(at),
            Event::Sample => self.sample(),
        }
        self.pump();
    }

    /// Lets the routers act on everything that is waiting for them.
    fn pump(&mut self) {
        while let Some((replica, input)) = self.inputs.pop_front() {
            let mut outputs = std::mem::take(&mut self.outputs);
            self.replicas[replica]
                .router
                .step(self.now, input, &mut outputs);
            for output in outputs.drain(..) {
                self.obey(replica, output);
            }
            self.outputs = outputs;
            self.plan_tick(replica);
        }
    }

    fn sample(&mut self) {
        let loads = self.hosts.iter().map(|host| host.in_flight);
        let every = self.tally.series.sample(loads);
        self.queue.push(self.now + every, Event::Sample);
    }

    fn report(mut self) -> RunReport {
        for host in &mut self.hosts {
            host.settle(self.now);
        }
        let preempted = |host: &SimulatedEngine| host.counters().preemptions;
        self.tally.preemptions += self.hosts.iter().map(preempted).sum::<u64>();
        let areas: Vec<f64> = self.hosts.iter().map(|host| host.area).collect();
        self.tally
            .report(self.trace, self.fleet, self.policy, &self.requests, &areas)
    }
}
