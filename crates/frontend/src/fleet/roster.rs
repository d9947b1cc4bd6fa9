//! Which models there are, and by whose word.
//!
//! A worker that lists a model claims it, and the claim stays while the worker is merely out of reach: its model is then
//! not ready, but known. A model that nobody claims any more, because its workers say that they serve others or are no
//! longer wanted, is forgotten.
//!
//! What always holds: models that one engine calls the same share a router from the first on, so that each sees the
//! others' load; there are at most [`Models::MAX`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

use kvasir_host::{ModelEntry, ModelSpec, RouterHost, Routers};
use kvasir_router::{Input, RouterMode, ThresholdUpdate};
use kvasir_types::{Role, TransportKind, WorkerId};

use super::Fleet;
use crate::models::tokenize::TokenSources;
use crate::models::{Models, ServedModel, model_of_prefill_pool, prefill_pool_name};

/// Who claims which model, among those who answer and among those who compute prompts for others.
pub(super) type Claims = BTreeMap<(Pool, Arc<str>), BTreeSet<WorkerId>>;

/// Where the workers of a model are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pool {
    /// Among those who answer its requests.
    Answer,
    /// Among those who compute its prompts for others.
    Prefill,
}

impl Pool {
    /// That of workers of this role.
    pub(super) const fn of(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Aggregated | Role::Decode => Self::Answer,
        }
    }

    /// What a model is called there.
    pub(super) fn name(self, model: &str) -> Arc<str> {
        match self {
            Self::Answer => model.into(),
            Self::Prefill => prefill_pool_name(model).into(),
        }
    }
}

/// The routers of both lists.
pub(super) struct RoutersOfPools(pub(super) Arc<Models>, pub(super) Arc<Models>);

impl Routers for RoutersOfPools {
    fn all(&self) -> Vec<Arc<RouterHost>> {
        let mut all = Routers::all(&*self.0);
        all.extend(Routers::all(&*self.1));
        all
    }

    fn named(&self, name: &str) -> Option<Arc<RouterHost>> {
        self.0.named(name).or_else(|| self.1.named(name))
    }
}

impl Fleet {
    /// The models of these names, made if they are new, and claimed by `worker`. `family` is what one engine serves from
    /// the same weights: the new ones share the router of those that are there. `None` for those that cannot be served.
    pub(super) fn claim(
        &self,
        worker: WorkerId,
        place: (Pool, TransportKind, Option<RouterMode>),
        family: &[ModelSpec],
    ) -> Vec<Option<Arc<ServedModel>>> {
        let pool = place.0;
        let mut claims = self.claims();
        let mut beside = self.there_already(pool, family);
        let mut claimed = Vec::with_capacity(family.len());
        for new in family {
            let known = self.listed(pool).get(&new.name);
            let served = known.or_else(|| self.make(new, beside.as_ref(), place));
            if let Some(model) = &served {
                beside.get_or_insert_with(|| Arc::clone(model));
                let claims = claims.entry((pool, Arc::clone(&new.name))).or_default();
                claims.insert(worker);
            }
            claimed.push(served);
        }
        claimed
    }

    /// `worker` does not serve these models, or is not wanted any more.
    pub(super) fn disclaim(
        &self,
        worker: WorkerId,
        pool: Pool,
        names: impl IntoIterator<Item = Arc<str>>,
    ) {
        let (models, mut forgotten) = (self.listed(pool), Vec::new());
        let mut claims = self.claims();
        for name in names {
            let key = (pool, Arc::clone(&name));
            let Some(of_model) = claims.get_mut(&key) else {
                continue;
            };
            of_model.remove(&worker);
            if of_model.is_empty() {
                claims.remove(&key);
                tracing::info!(model = %name, "nobody serves it any more: model forgotten");
                forgotten.extend(models.take(&name));
            }
        }
        let routers: BTreeSet<&str> = forgotten.iter().map(|m| &**m.host.name()).collect();
        for router in routers {
            if models.named(router).is_none() {
                self.snapshot.router_gone(router);
            }
        }
        drop(claims);
        if !forgotten.is_empty() {
            models.retire(forgotten, &self.context.host.metrics);
        }
    }

    /// A model of the family, or one whose router has the name of one.
    fn there_already(&self, pool: Pool, family: &[ModelSpec]) -> Option<Arc<ServedModel>> {
        let models = self.listed(pool);
        let by_name = family.iter().find_map(|new| models.get(&new.name));
        by_name.or_else(|| {
            let names: BTreeSet<&str> = family.iter().map(|new| &*new.name).collect();
            let mut all = models.all().into_iter();
            all.find(|model| names.contains(&**model.host.name()))
        })
    }

    fn make(
        &self,
        new: &ModelSpec,
        beside: Option<&Arc<ServedModel>>,
        (pool, transport, mode): (Pool, TransportKind, Option<RouterMode>),
    ) -> Option<Arc<ServedModel>> {
        let models = self.listed(pool);
        if models.len() >= Models::MAX {
            tracing::debug!(model = %new.name, max = Models::MAX, "too many models");
            return None;
        }
        let fill = |model: &ServedModel| {
            match pool {
                Pool::Answer => model.host.link_sessions(Arc::clone(&self.sessions) as _),
                Pool::Prefill => self.seed_thresholds(model),
            }
            if beside.is_none_or(|other| !Arc::ptr_eq(&other.host, &model.host)) {
                let routers: Arc<dyn Routers> = Arc::clone(models) as _;
                self.snapshot.restore(&model.host, Arc::downgrade(&routers));
            }
        };
        let make = || {
            let beside = beside.map(|other| other.model());
            match pool {
                Pool::Answer => {
                    let model = self.setup.make(new, beside, &self.context.host);
                    ServedModel::new(model, self.tokens_of(new), transport)
                }
                Pool::Prefill => {
                    let mut setup = self.setup.for_prefill();
                    if let Some(mode) = mode {
                        setup.config.router_mode = mode;
                    }
                    let mut model = setup.make(new, beside, &self.context.host);
                    // Blocks are cached under the adapter's name, not under the pool's.
                    let name = model_of_prefill_pool(&new.name);
                    model.lora = model.lora.map(|_| name.into());
                    ServedModel::new(model, TokenSources::default(), transport)
                }
            }
        };
        Some(models.make(make, fill))
    }

    /// By the folder that the operator named, else by what the model's card names.
    fn tokens_of(&self, new: &ModelSpec) -> TokenSources {
        let parent = new.parent.as_deref();
        let folder = self.folders.of(&new.name, parent);
        let Some(card) = self.card_text(&new.name, parent) else {
            return folder.into();
        };
        let tokens = match folder {
            Some(text) => Some(text).into(),
            None => TokenSources::of_card(card.text, card.sum),
        };
        let (tools, reasoning) = card.parsers;
        tokens.with_formats(&new.name, tools.as_deref(), reasoning.as_deref())
    }

    /// A pool of prefill workers that comes late has the thresholds that operators have given its model.
    fn seed_thresholds(&self, pool: &ServedModel) {
        let name = model_of_prefill_pool(&pool.name);
        if let Some(model) = self.context.models.get(name) {
            let now = model.host.ask(|router| router.thresholds());
            pool.host.tell(Input::Thresholds(ThresholdUpdate {
                active_prefill_tokens: Some(now.active_prefill_tokens),
                active_prefill_tokens_frac: Some(now.active_prefill_tokens_frac),
                ..ThresholdUpdate::default()
            }));
        }
    }

    /// Where the models of a pool are listed.
    pub(super) fn listed(&self, pool: Pool) -> &Arc<Models> {
        match pool {
            Pool::Answer => &self.context.models,
            Pool::Prefill => &self.context.prefill_pools,
        }
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
