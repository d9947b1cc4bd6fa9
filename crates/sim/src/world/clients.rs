//! Who sends what when: recorded times, conversations, clients that wait for answers.

use std::collections::VecDeque;
use std::time::Duration;

use kvasir_types::Time;

use super::queue::Event;
use super::{State, World};
use crate::{ArrivalMode, Trace};

/// The senders' side.
#[derive(Debug)]
pub(super) struct Clients {
    /// Requests not yet ended.
    pub(super) left: u32,
    /// Requests that wait for another one's end, by that one.
    followers: Vec<Vec<u32>>,
    /// Closed loop: requests that no client has taken yet.
    untaken: VecDeque<u32>,
}

impl Clients {
    pub(super) fn new(trace: &Trace, arrivals: ArrivalMode) -> Self {
        let mut followers = vec![Vec::new(); trace.requests.len()];
        let mut untaken = VecDeque::new();
        for (at, request) in (0u32..).zip(&trace.requests) {
            match request.follows {
                Some((before, _)) => match followers.get_mut(before as usize) {
                    Some(list) => list.push(at),
                    None => untaken.push_back(at),
                },
                None => untaken.push_back(at),
            }
        }
        if let ArrivalMode::Open { .. } = arrivals {
            untaken.clear();
        }
        Self {
            left: trace.requests.len() as u32,
            followers,
            untaken,
        }
    }
}

impl World<'_> {
    pub(super) fn begin_clients(&mut self) {
        match self.fleet.arrivals {
            ArrivalMode::Open { speed } => {
                let start = self
                    .trace
                    .requests
                    .iter()
                    .map(|r| r.at)
                    .min()
                    .unwrap_or_default();
                for (at, request) in (0u32..).zip(&self.trace.requests) {
                    if request.follows.is_none() {
                        let since = (request.at - start).as_secs_f64() / speed;
                        self.queue
                            .push(Time::from_secs_f64(since), Event::Arrive(at));
                    }
                }
            }
            ArrivalMode::Closed { clients, .. } => {
                for _ in 0..clients {
                    self.take_next(Time::ZERO);
                }
            }
        }
    }

    fn take_next(&mut self, at: Time) {
        if let Some(request) = self.clients.untaken.pop_front() {
            self.queue.push(at, Event::Arrive(request));
        }
    }

    /// A request is over; what depends on it comes, or never will.
    pub(super) fn end(&mut self, request: u32, state: State) {
        let slot = &mut self.requests[request as usize];
        slot.state = state;
        slot.prompt = None;
        self.clients.left -= 1;
        let followers = std::mem::take(&mut self.clients.followers[request as usize]);
        let goes_on = state == State::Completed && !followers.is_empty();
        for follower in followers {
            if state == State::Completed {
                let at = self.now + self.pause(follower);
                self.queue.push(at, Event::Arrive(follower));
            } else {
                self.end(follower, State::Dropped);
            }
        }
        if let ArrivalMode::Closed { think, .. } = self.fleet.arrivals
            && !goes_on
            && state != State::Dropped
        {
            self.take_next(self.now + think);
        }
    }

    fn pause(&self, request: u32) -> Duration {
        let trace = &self.trace.requests[request as usize];
        let delay = trace.follows.map_or(Duration::ZERO, |(_, delay)| delay);
        match self.fleet.arrivals {
            ArrivalMode::Open { .. } => delay,
            ArrivalMode::Closed { think, .. } => delay.max(think),
        }
    }
}
