//! Listening to an engine's cache events, for a service that was told where they are.

use kvasir_host::{EventStream, LoadedSnapshot, RouterHost};
use kvasir_kv_events::StreamOptions;
use kvasir_tasks::RuntimeThreads;
use kvasir_transport::zmq::{ZmqSource, ZmqSourceOptions};
use kvasir_trust::{CacheState, TrustRecord};
use kvasir_types::WorkerRank;

/// Where a rank's events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventAddress {
    pub(crate) events: String,
    pub(crate) replay: Option<String>,
}

impl EventAddress {
    /// The sockets, or what is wrong with their names.
    pub(crate) fn sockets(&self) -> Result<ZmqSourceOptions, String> {
        let bad = |name: &str, error: &dyn std::fmt::Display| format!("{name}: {error}");
        let events = self.events.parse();
        let events = events.map_err(|error| bad(&self.events, &error))?;
        let replay = self.replay.as_deref().map(str::parse).transpose();
        let replay = replay.map_err(|error| bad("replay_endpoint", &error))?;
        Ok(ZmqSourceOptions::new(events, replay))
    }

    /// Applies what comes from there to the index of `host` until the stream is stopped; what was loaded of the rank goes on.
    pub(crate) fn open(
        &self,
        host: &RouterHost,
        rank: WorkerRank,
        loaded: &LoadedSnapshot,
        threads: Option<&RuntimeThreads>,
    ) -> Result<Option<EventStream>, String> {
        let sockets = self.sockets()?;
        let mut options = StreamOptions::new(host.block_size());
        options.replay = sockets.replay.is_some();
        // Nobody reports here what engines found, so nothing could prove its events right: they count in full until one is lost.
        let exact = TrustRecord {
            state: CacheState::Exact,
            demotions: 0,
        };
        host.judge(rank, &self.events, None, Some(exact));
        let slot = threads.and_then(RuntimeThreads::slot);
        let _entered = slot.as_ref().map(|slot| slot.handle.enter());
        let checkpoint = loaded.resume(host.name(), rank);
        let (address, checkpoint) = (&self.events, checkpoint.as_ref());
        Ok(host.subscribe(rank, address, options, checkpoint, |tasks| {
            ZmqSource::start(tasks, sockets)
        }))
    }
}
