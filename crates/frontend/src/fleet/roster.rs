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

use kvasir_host::{ModelEntry, ModelSpec, Routers};
use kvasir_types::{TransportKind, WorkerId};

use super::Fleet;
use crate::models::tokenize::TokenSources;
use crate::models::{Models, ServedModel};

/// Who claims which model.
pub(super) type Claims = BTreeMap<Arc<str>, BTreeSet<WorkerId>>;

impl Fleet {
    /// The models of these names, made if they are new, and claimed by `worker`. `family` is what one engine serves from
    /// the same weights: the new ones share the router of those that are there. `None` for those that cannot be served.
    pub(super) fn claim(
        &self,
        worker: WorkerId,
        transport: TransportKind,
        family: &[ModelSpec],
    ) -> Vec<Option<Arc<ServedModel>>> {
        let mut claims = self.claims();
        let mut beside = self.there_already(family);
        let mut claimed = Vec::with_capacity(family.len());
        for new in family {
            let known = self.context.models.get(&new.name);
            let served = known.or_else(|| self.make(new, beside.as_ref(), transport));
            if let Some(model) = &served {
                beside.get_or_insert_with(|| Arc::clone(model));
                let claims = claims.entry(Arc::clone(&new.name)).or_default();
                claims.insert(worker);
            }
            claimed.push(served);
        }
        claimed
    }

    /// `worker` does not serve these models, or is not wanted any more.
    pub(super) fn disclaim(&self, worker: WorkerId, names: impl IntoIterator<Item = Arc<str>>) {
        let (models, mut forgotten) = (&self.context.models, Vec::new());
        let mut claims = self.claims();
        for name in names {
            let Some(of_model) = claims.get_mut(&name) else {
                continue;
            };
            of_model.remove(&worker);
            if of_model.is_empty() {
                claims.remove(&name);
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
    fn there_already(&self, family: &[ModelSpec]) -> Option<Arc<ServedModel>> {
        let models = &self.context.models;
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
        transport: TransportKind,
    ) -> Option<Arc<ServedModel>> {
        let models = &self.context.models;
        if models.len() >= Models::MAX {
            tracing::debug!(model = %new.name, max = Models::MAX, "too many models");
            return None;
        }
        let fill = |model: &ServedModel| {
            model.host.link_sessions(Arc::clone(&self.sessions) as _);
            if beside.is_none_or(|other| !Arc::ptr_eq(&other.host, &model.host)) {
                let routers: Arc<dyn Routers> = Arc::clone(models) as _;
                self.snapshot.restore(&model.host, Arc::downgrade(&routers));
            }
        };
        let make = || {
            let beside = beside.map(|other| other.model());
            let model = self.setup.make(new, beside, &self.context.host);
            ServedModel::new(model, self.tokens_of(new), transport)
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

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
