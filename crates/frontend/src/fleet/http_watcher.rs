//! Watching an engine server: what it serves, whether it answers, how busy it is.
//!
//! It is asked gently and for ever. A server that answers joins the models that it serves; one that does not answer several
//! times in a row leaves them and is asked again later.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_router::Input;
use kvasir_types::{BootstrapAddress, HttpEndpoint, Role, Transport, WorkerRecord};
use kvasir_upstream::{
    EngineKind, Facts, Pool, RankLoad, ServerPart, UpstreamError, page_text, read_load, read_loads,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::registration::Registration;
use super::silence::Silence;
use super::token_probe::TokenProber;
use super::{DRAIN_LOOK, Fleet, Goal, Goals, WatchEnd, health};
use crate::fleet::members::MemberState;
use crate::models::links::WorkerLink;

/// Questions about load between two about everything else.
const LOADS_PER_PROBE: u32 = 5;
/// Failures in a row after which a worker leaves.
const FAILURES_MAX: u32 = 3;

/// Watches one engine server.
pub(super) struct HttpWatcher {
    /// What is said about it; where it says more itself, the registration has that.
    told: Arc<WorkerRecord>,
    pub(super) registration: Registration,
    pub(super) pool: Pool,
    /// Earlier pools, from before its record changed, on which something may still run.
    pub(super) retired: Vec<Pool>,
    /// What it said of itself last.
    known: Facts,
    /// Questions in a row that it did not answer.
    pub(super) failures: u32,
    /// Times in a row that it was not well.
    pub(super) unwell: u32,
    /// Since when nothing came from it.
    pub(super) silence: Silence,
    /// A router may wait until it generates a token.
    pub(super) token_wanted: Arc<Notify>,
    /// It was said that it is not used.
    is_refused: bool,
}

impl HttpWatcher {
    pub(super) fn new(record: &Arc<WorkerRecord>, endpoint: &HttpEndpoint, fleet: &Fleet) -> Self {
        let pool = fleet.pool(endpoint);
        Self {
            told: Arc::clone(record),
            registration: Registration::new(record, WorkerLink::Http(pool.clone()), fleet),
            pool,
            retired: Vec::new(),
            known: Facts::default(),
            failures: 0,
            unwell: 0,
            silence: Silence::new(Instant::now()),
            is_refused: false,
            token_wanted: Arc::default(),
        }
    }

    /// Pursues each goal until the worker is gone, or is reached in another way.
    pub(super) async fn run(mut self, goals: &mut Goals) -> WatchEnd {
        let end = loop {
            let goal = goals.borrow_and_update().clone();
            match goal {
                Goal::Serve(record) => {
                    let Transport::Http(endpoint) = &record.transport else {
                        break WatchEnd::OtherTransport;
                    };
                    self.serve_as(&record, endpoint);
                    let registration = &self.registration;
                    let context = &registration.fleet.context;
                    let prober = TokenProber::new(context, registration.id, &self.token_wanted);
                    tokio::select! {
                        () = self.serve() => {}
                        () = prober.run() => {}
                        _ = goals.changed() => {}
                    }
                }
                Goal::Drain => tokio::select! {
                    () = self.drain() => break WatchEnd::Gone,
                    _ = goals.changed() => {}
                },
                Goal::Cut => {
                    self.pool.close();
                    self.retired.drain(..).for_each(|pool| pool.close());
                    break WatchEnd::Gone;
                }
            }
        };
        self.registration.end().await;
        end
    }

    /// Takes over what is said about the worker now. One that was on its way out is back.
    fn serve_as(&mut self, record: &Arc<WorkerRecord>, endpoint: &HttpEndpoint) {
        self.pool.set_draining(false);
        if self.told != *record {
            self.told = Arc::clone(record);
            let new = self.registration.fleet.pool(endpoint);
            // Until it has said what it is, it is taken for what it was.
            new.set_larger_first(self.pool.larger_first());
            new.set_returns_token_ids(self.pool.returns_token_ids());
            let old = std::mem::replace(&mut self.pool, new);
            self.retired.retain(|pool| pool.in_flight() > 0);
            self.retired.push(old);
            self.known = Facts::default();
            let link = WorkerLink::Http(self.pool.clone());
            self.registration.update(record, link);
        }
        self.registration.rejoin();
    }

    async fn serve(&mut self) {
        loop {
            let mut check = self.check().await;
            let facts = match check.mute.take() {
                // It would be as mute about what it is.
                Some(error) => Err(error),
                None => {
                    let told_events = self.registration.record.events.publish().is_some();
                    let question = self.registration.fleet.question;
                    self.pool.facts(&self.known, told_events, question).await
                }
            };
            match facts {
                Ok(facts) => {
                    self.known = facts;
                    self.failures = 0;
                    self.registration.settle_events().await;
                    self.join();
                }
                // What is known stays. Of one that does not serve nothing is, and the operator is told why.
                Err(error) if error.is_local() && self.registration.is_serving() => {
                    self.could_not_ask(&error)
                }
                Err(error) => self.failed(&error),
            }
            self.give_up_if_silent();
            self.tell_health(&check);
            let fleet = &self.registration.fleet;
            fleet.members().report(self.registration.id, self.state());
            self.look_on().await;
        }
    }

    /// Takes over what the worker said of itself last.
    fn join(&mut self) {
        self.pool.set_larger_first(self.known.larger_first());
        let is_vllm = self.known.kind == EngineKind::Vllm;
        self.pool.set_returns_token_ids(is_vllm);
        let record = with_part(&self.told, &self.known);
        let connector = self.known.info.unsupported_connector();
        if let Some(connector) = connector.filter(|_| record.role == Role::Prefill) {
            if !std::mem::replace(&mut self.is_refused, true) {
                tracing::error!(worker = %record.transport, connector, "a server for prompts is not used: its KV connector needs words from the router \
                    that Kvasir does not say; start it with NixlConnector, or one that finds prompts by their tokens");
            }
            return self.registration.leave();
        }
        if *self.registration.record != record {
            let link = WorkerLink::Http(self.pool.clone());
            self.registration.update(&Arc::new(record), link);
        }
        self.registration.join(&self.known);
    }

    /// Looks at the worker's load and health until it is time to ask everything again. One that does not
    /// answer is asked again soon: it stays no longer than it must.
    async fn look_on(&mut self) {
        let looks = match self.is_doubtful() {
            true => 1,
            false => LOADS_PER_PROBE,
        };
        for _ in 0..looks {
            if !self.pause(self.registration.fleet.every).await {
                return;
            }
            self.pool.sweep();
            if !self.registration.is_serving() || self.silence.is_doubtful() {
                return;
            }
            let asked = self.registration.fleet.context.host.clock.now();
            match self.load().await {
                Ok(load) => self.registration.report_load(&load, asked),
                Err(error) if error.is_answer() => {}
                Err(error) if error.is_local() => self.could_not_ask(&error),
                // It may only be slow to write that page.
                Err(_) => {
                    if !self.check_again().await {
                        return;
                    }
                }
            }
        }
    }

    /// How busy each rank says it is; SGLang says it without metrics, too, which it has only if told.
    async fn load(&self) -> Result<BTreeMap<u32, RankLoad>, UpstreamError> {
        let question = self.registration.fleet.question;
        let page = self.pool.get("/metrics", question).await;
        match page {
            Err(error) if self.known.kind == EngineKind::Sglang && error.is_answer() => {
                let page = self.pool.get("/v1/loads?include=core", question).await;
                page.map(|page| read_loads(&page))
            }
            page => page.map(|page| read_load(&page_text(&page))),
        }
    }

    fn state(&self) -> MemberState {
        match (self.registration.is_serving(), self.failures) {
            (true, _) if self.is_ejected() => MemberState::Unhealthy,
            (true, _) => MemberState::Serving,
            (false, 0) => MemberState::Joining,
            (false, _) => MemberState::Unreachable,
        }
    }

    /// Takes the worker out of every choice and waits until it has nothing left to do, or falls silent.
    async fn drain(&mut self) {
        tracing::info!(worker = %self.pool.endpoint(), "worker is draining");
        self.pool.set_draining(true);
        self.registration.tell(|spec| Input::Draining(spec.id));
        let every = self.registration.fleet.every;
        let mut next_check = Instant::now() + every;
        while self.registration.booked() > 0 || self.in_flight() > 0 {
            tokio::time::sleep(DRAIN_LOOK).await;
            if Instant::now() >= next_check {
                self.check().await;
                next_check = Instant::now() + every;
            }
            self.give_up_if_silent();
        }
    }

    fn failed(&mut self, error: &UpstreamError) {
        self.failures = self.failures.saturating_add(1);
        // It may be another when it is back.
        self.known.info.is_read = false;
        if self.failures == 1 && health::is_ourselves(error) {
            tracing::error!(worker = %self.pool.endpoint(),
                "this worker is this frontend itself, or a router that leads back to it: it is not used");
        } else if self.failures == 1 {
            tracing::warn!(worker = %self.pool.endpoint(), %error, "worker does not answer");
        }
        if self.failures >= FAILURES_MAX {
            self.known = Facts::default();
            self.registration.leave();
        }
    }
}

/// What is said about a server, and which part of requests it says itself that it computes: that it was started so cannot be changed by words.
fn with_part(told: &WorkerRecord, known: &Facts) -> WorkerRecord {
    let mut record = told.clone();
    match known.info.part {
        Some(ServerPart::Prefill(port)) => {
            record.role = Role::Prefill;
            let host = told.transport.http().map(|endpoint| &*endpoint.host);
            record.bootstrap = record.bootstrap.or(host.map(|host| BootstrapAddress {
                host: host.into(),
                port,
            }));
        }
        Some(ServerPart::Decode) => {
            record.role = Role::Decode;
            record.needs_prefill = true;
        }
        None => {}
    }
    record
}

#[cfg(test)]
mod tests {
    use kvasir_host::RouterSetup;
    use kvasir_tasks::Tasks;
    use kvasir_telemetry::{Clock, MetricOptions, Metrics};

    use super::*;
    use crate::{App, AppOptions};

    #[test]
    fn a_worker_of_which_other_things_are_said_is_taken_for_what_it_was() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let app = App::new(AppOptions::default(), metrics, Clock::new(), Tasks::new());
        let setup = RouterSetup::new(Default::default(), Default::default());
        let fleet = Fleet::new(app.fleet_context(), setup);
        let said = |text: &str| Arc::new(kvasir_upstream::parse_worker(text).unwrap());
        for is in [true, false] {
            let (plain, larger) = (
                said("http://127.0.0.1:9"),
                said("http://127.0.0.1:9,block-size=32"),
            );
            let endpoint = plain.transport.http().unwrap();
            let mut watcher = HttpWatcher::new(&plain, endpoint, &fleet);
            watcher.pool.set_larger_first(is);
            watcher.pool.set_returns_token_ids(is);
            watcher.serve_as(&larger, endpoint);
            let block_size = watcher.registration.record.block_size;
            assert_eq!((block_size, watcher.retired.len()), (Some(32), 1));
            assert_eq!(watcher.pool.larger_first(), is);
            assert_eq!(watcher.pool.returns_token_ids(), is);
        }
    }
}
