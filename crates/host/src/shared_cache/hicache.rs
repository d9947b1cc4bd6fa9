//! SGLang's hierarchical cache on a Mooncake store, known by the store's events.
//!
//! Answers one question: which pages of a prompt do the engines of a model have in their common store? Workers announce how theirs are
//! named ([`HicachePool::announce`]); the store's master publishes which objects come and go.
//!
//! What always holds: after a lost message, or a lost connection, nothing is known; at most [`KEYS_MAX`] objects are known of a store,
//! further ones are left out; models whose workers name their pages differently share nothing; prompts under a client's salt or an
//! adapter are not looked for, as their pages have other names.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use kvasir_index::SharedRanges;
use kvasir_telemetry::IntCounter;
use kvasir_transport::zmq::{Endpoint, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{SourceEvent, next_event};
use kvasir_wire::frame::Frame;
use kvasir_wire::mooncake::{PoolEvent, pool_events};
use serde_json::Value;
use tokio_util::sync::{CancellationToken, DropGuard};
use xxhash_rust::xxh3::xxh3_128;

use super::pages::HicacheLayout;
use super::{CachePool, PoolFuture, PoolPrompt};
use crate::context::HostContext;

/// Objects of a store that are known at once, some 30 bytes each.
const KEYS_MAX: usize = 1 << 22;
/// Events that are applied while nobody looks anything up.
const APPLIED_AT_ONCE: usize = 1024;

/// The stores of the models that are served.
#[derive(Debug)]
pub struct HicachePool {
    context: HostContext,
    /// Where all stores publish, whatever workers say.
    events_at: Option<String>,
    models: RwLock<BTreeMap<Arc<str>, ModelPages>>,
    stores: Mutex<Stores>,
}

/// How a model's pages are named, and what its store holds.
#[derive(Debug)]
struct ModelPages {
    layout: HicacheLayout,
    keys: Arc<StoreKeys>,
    /// That blocks and pages differ in size was said.
    said: AtomicBool,
}

#[derive(Debug, Default)]
struct Stores {
    by_endpoint: BTreeMap<String, (Arc<StoreKeys>, DropGuard)>,
    /// What was said of workers whose stores cannot be used.
    said: BTreeSet<String>,
}

impl HicachePool {
    /// No models yet. `events_at`: where the store publishes, if not where workers say.
    #[must_use]
    pub fn new(context: &HostContext, events_at: Option<String>) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            events_at,
            models: RwLock::default(),
            stores: Mutex::default(),
        })
    }

    /// These are the workers: a model's name, and the runtime data `sglang_hicache_mooncake` of its card. Replaces what was said before.
    pub fn announce<'a>(&self, workers: impl Iterator<Item = (&'a Arc<str>, &'a Value)>) {
        let mut notes = BTreeSet::new();
        let mut by_model: BTreeMap<&Arc<str>, Announced> = BTreeMap::new();
        for (model, data) in workers {
            match HicacheLayout::read(data) {
                Ok((layout, endpoint)) => {
                    let one = by_model.entry(model).or_default();
                    if !one.layouts.contains(&layout) {
                        one.layouts.push(layout);
                    }
                    one.endpoints.extend(endpoint);
                }
                Err(error) => drop(notes.insert(format!("model {model}: {error}"))),
            }
        }
        let mut stores = self.stores();
        let mut models = BTreeMap::new();
        let mut used = BTreeSet::new();
        for (model, announced) in by_model {
            match announced.settle(self.events_at.as_deref()) {
                Ok((layout, endpoint)) => match self.store(&mut stores, &endpoint) {
                    Ok(keys) => {
                        let said = AtomicBool::new(false);
                        let pages = ModelPages { layout, keys, said };
                        models.insert(Arc::clone(model), pages);
                        used.insert(endpoint);
                    }
                    Err(error) => drop(notes.insert(format!("model {model}: {error}"))),
                },
                Err(error) => drop(notes.insert(format!("model {model}: {error}"))),
            }
        }
        stores
            .by_endpoint
            .retain(|endpoint, _| used.contains(endpoint));
        for note in notes.difference(&stores.said) {
            tracing::warn!("the shared cache of workers is not used: {note}");
        }
        stores.said = notes;
        let mut known = self.models.write().unwrap_or_else(PoisonError::into_inner);
        for (model, pages) in &mut models {
            if let Some(before) = known.get(model).filter(|old| old.layout == pages.layout) {
                pages.said = AtomicBool::new(before.said.load(Ordering::Relaxed));
            }
        }
        *known = models;
    }

    /// What the store at `endpoint` holds, followed from now on.
    fn store(&self, stores: &mut Stores, endpoint: &str) -> Result<Arc<StoreKeys>, String> {
        if let Some((keys, _)) = stores.by_endpoint.get(endpoint) {
            return Ok(Arc::clone(keys));
        }
        let at: Endpoint = endpoint
            .parse()
            .map_err(|error| format!("{endpoint}: {error}"))?;
        let tasks = self.context.tasks.background();
        let source = ZmqSource::start(&tasks, ZmqSourceOptions::new(at, None));
        let keys = Arc::new(StoreKeys {
            known: RwLock::default(),
            errors: self.context.metrics.shared_cache_errors_total.clone(),
        });
        let stop = CancellationToken::new();
        let follow = follow(source, Arc::clone(&keys), endpoint.to_owned());
        tasks.spawn(stop.clone().run_until_cancelled_owned(follow));
        let entry = (Arc::clone(&keys), stop.drop_guard());
        stores.by_endpoint.insert(endpoint.to_owned(), entry);
        Ok(keys)
    }

    fn stores(&self) -> MutexGuard<'_, Stores> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn find_now(&self, prompt: &PoolPrompt) -> SharedRanges {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        let Some(pages) = models.get(&prompt.model) else {
            return SharedRanges::default();
        };
        if !prompt.salt.is_empty() || !prompt.lora.is_empty() {
            return SharedRanges::default();
        }
        if pages.layout.page_size != prompt.block_size {
            if !pages.said.swap(true, Ordering::Relaxed) {
                tracing::warn!(model = %prompt.model, page_size = pages.layout.page_size, block_size = prompt.block_size,
                    "the shared cache is not used: its pages and our blocks differ in size; see --kv-cache-block-size");
            }
            return SharedRanges::default();
        }
        let names = pages.layout.page_names(&prompt.tokens);
        let known = pages.keys.known.read();
        let known = known.unwrap_or_else(PoisonError::into_inner);
        let has = |key: &str| known.keys.contains(&xxh3_128(key.as_bytes()));
        let there = names.iter().enumerate();
        let there = there.filter(|(_, page)| pages.layout.is_there(page, has));
        SharedRanges::from_positions(there.filter_map(|(at, _)| u32::try_from(at).ok()))
    }
}

impl CachePool for HicachePool {
    fn find<'a>(&'a self, prompt: &'a PoolPrompt) -> PoolFuture<'a> {
        Box::pin(std::future::ready(Ok(self.find_now(prompt))))
    }
}

/// What the workers of a model said.
#[derive(Debug, Default)]
struct Announced {
    layouts: Vec<HicacheLayout>,
    endpoints: BTreeSet<String>,
}

impl Announced {
    /// What they agree on.
    fn settle(self, events_at: Option<&str>) -> Result<(HicacheLayout, String), &'static str> {
        let Ok([layout]) = <[HicacheLayout; 1]>::try_from(self.layouts) else {
            return Err("its workers name their pages differently: start them alike");
        };
        let mut endpoints = self.endpoints.into_iter();
        let endpoint = match (events_at, endpoints.next(), endpoints.next()) {
            (Some(at), ..) => at.to_owned(),
            (None, Some(at), None) => at,
            (None, Some(_), Some(_)) => {
                return Err(
                    "its workers name several addresses of the store's events: set --shared-cache-url",
                );
            }
            (None, None, _) => {
                return Err("no worker names the address of the store's events: set \
                     DYN_MOONCAKE_KV_EVENTS_ENDPOINT there, or --shared-cache-url here");
            }
        };
        Ok((layout, endpoint))
    }
}

/// Which objects a store holds.
#[derive(Debug)]
struct StoreKeys {
    known: RwLock<KnownKeys>,
    errors: IntCounter,
}

#[derive(Debug, Default)]
struct KnownKeys {
    /// Hashes of their names.
    keys: HashSet<u128>,
    /// The number of the last message.
    sequence: Option<u64>,
    /// That there are too many was said.
    is_full: bool,
}

impl StoreKeys {
    /// Nothing is known any more.
    fn forget(&self) {
        *self.write() = KnownKeys::default();
    }

    fn apply(&self, frame: &Frame<bytes::Bytes>, endpoint: &str) {
        let events = match pool_events(&frame.payload) {
            Ok(events) => events,
            Err(error) => {
                // What it said is lost.
                self.errors.inc();
                tracing::warn!(endpoint, %error, "a message of the shared cache cannot be read; what is known of it is forgotten");
                self.forget();
                return;
            }
        };
        let before = self.write().sequence.replace(frame.sequence);
        match before {
            Some(before) if before == frame.sequence => return,
            Some(before) if before.wrapping_add(1) != frame.sequence => {
                self.errors.inc();
                tracing::warn!(
                    endpoint,
                    before,
                    now = frame.sequence,
                    "messages of the shared cache are missing; what was known of it is forgotten"
                );
                self.write().keys.clear();
            }
            _ => {}
        }
        for some in events.chunks(APPLIED_AT_ONCE) {
            self.write().note(some, endpoint);
        }
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, KnownKeys> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownKeys {
    fn note(&mut self, events: &[PoolEvent<'_>], endpoint: &str) {
        for event in events.iter().filter(|event| event.is_default_tenant()) {
            let name = xxh3_128(event.key.as_bytes());
            if !event.stored {
                self.keys.remove(&name);
            } else if self.keys.len() < KEYS_MAX {
                self.keys.insert(name);
            } else if !std::mem::replace(&mut self.is_full, true) {
                tracing::warn!(
                    endpoint,
                    KEYS_MAX,
                    "the shared cache holds more objects than are followed; further ones are left out"
                );
            }
        }
    }
}

/// Follows the events of a store, for ever.
async fn follow(mut source: ZmqSource, keys: Arc<StoreKeys>, endpoint: String) {
    loop {
        match next_event(&mut source).await {
            SourceEvent::Connected => {
                keys.forget();
                tracing::info!(endpoint, "the events of the shared cache are followed");
            }
            SourceEvent::Disconnected(fault) => {
                keys.forget();
                keys.errors.inc();
                tracing::warn!(endpoint, %fault, "the events of the shared cache are lost; it is tried until they are back");
            }
            SourceEvent::Live(frame) => keys.apply(&frame, &endpoint),
            SourceEvent::Refused(error) => {
                keys.errors.inc();
                tracing::warn!(endpoint, %error, "what came from the shared cache's address is no event message");
            }
            _ => {}
        }
    }
}
