//! What an engine tells routers of its cache: the one publisher of a process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_discovery::EndpointName;
use kvasir_embed::{EmbedError, ProcessPlanes, runtime, say_log_lines, settings_of};
use kvasir_hash::{BlockHasher, Scope};
use kvasir_types::{EngineHash, KvEvent, StoredBlock, Tier, WorkerRank};
use kvasir_worker::CachePublisher;

/// Whose cache it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublisherSpec {
    pub(crate) endpoint: EndpointName,
    pub(crate) block_size: u32,
    /// The worker that takes the requests; none for this process itself.
    pub(crate) worker: Option<u64>,
    pub(crate) rank: u32,
}

/// One rank's events.
pub(crate) struct Publisher {
    spec: PublisherSpec,
    planes: Arc<ProcessPlanes>,
    events: CachePublisher,
    rank: WorkerRank,
}

static CURRENT: Mutex<Option<Arc<Publisher>>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<Arc<Publisher>>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The publisher of this process.
pub(crate) fn get() -> Result<Arc<Publisher>, String> {
    let found = current().clone();
    found.ok_or_else(|| {
        "there is no publisher: call dynamo_llm_init or kvasir_publisher_init first".into()
    })
}

/// Opens the publisher. A second call with the same arguments changes nothing, one with others is refused.
pub(crate) fn open(spec: PublisherSpec) -> Result<(), String> {
    if spec.block_size == 0 {
        return Err("kv_block_size must be at least 1".into());
    }
    let mut current = current();
    if let Some(known) = &*current {
        return match known.spec == spec {
            true => Ok(()),
            false => Err("this process publishes for another endpoint, worker or block size; call dynamo_llm_shutdown first".into()),
        };
    }
    *current = Some(Arc::new(announce(spec).map_err(|error| error.to_string())?));
    Ok(())
}

fn announce(spec: PublisherSpec) -> Result<Publisher, EmbedError> {
    let (handle, _) = runtime()?;
    // Those of `kvasir mocker`, which publishes as a worker does.
    let settings = settings_of("mocker", &[])?;
    say_log_lines(&settings);
    let _entered = handle.enter();
    let planes = Arc::new(ProcessPlanes::open(settings)?);
    let opened = async {
        let member = planes.member(&spec.endpoint).await?;
        let rank = WorkerRank::new(spec.worker.unwrap_or(member.id().0), spec.rank);
        // A router that missed events asks what the cache holds.
        Ok::<_, EmbedError>((member.publish_cache(rank, true).await?, rank))
    };
    let (events, rank) = handle.block_on(opened)?;
    Ok(Publisher {
        spec,
        events,
        rank,
        planes,
    })
}

/// Takes back what was announced. Whether there was a publisher.
pub(crate) fn close() -> bool {
    let Some(publisher) = current().take() else {
        return false;
    };
    if let Ok((handle, _)) = runtime() {
        handle.block_on(async {
            // A store that is away forgets by itself.
            let _ = publisher.events.withdraw().await;
            publisher.planes.end().await;
        });
    }
    true
}

impl Publisher {
    /// Tokens in a block.
    pub(crate) const fn block_size(&self) -> u32 {
        self.spec.block_size
    }

    /// The id that routers know the cache under.
    pub(crate) const fn worker_id(&self) -> u64 {
        self.rank.worker.0
    }

    /// Full blocks were stored, one after the other; `names` are the engine's own.
    pub(crate) fn stored(&self, tokens: &[u32], names: &[u64], parent: Option<u64>, lora: &str) {
        let scope = Scope {
            lora,
            ..Scope::default()
        };
        let mut locals = Vec::new();
        BlockHasher::new(self.spec.block_size as usize, &scope).extend(tokens, &mut locals);
        let blocks: Vec<StoredBlock> = names
            .iter()
            .zip(locals)
            .map(|(name, local)| StoredBlock {
                engine: EngineHash(*name),
                local,
            })
            .collect();
        if !blocks.is_empty() {
            self.tell(KvEvent::Stored {
                tier: Tier::Device,
                parent: parent.map(EngineHash),
                blocks,
            });
        }
    }

    /// Blocks were removed.
    pub(crate) fn removed(&self, names: &[u64]) {
        if !names.is_empty() {
            self.tell(KvEvent::Removed {
                tier: Tier::Device,
                blocks: names.iter().copied().map(EngineHash).collect(),
            });
        }
    }

    /// The cache is empty.
    pub(crate) fn cleared(&self) {
        self.tell(KvEvent::Cleared { tier: None });
    }

    fn tell(&self, event: KvEvent) {
        self.events.push(event);
        self.events.flush();
    }
}
