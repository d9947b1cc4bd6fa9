//! What frontends call the requests of a worker: any text, where engines take an id.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_types::RequestId;

/// The requests under way, by the id that the engine has for them.
#[derive(Debug, Default)]
pub(crate) struct RequestNames {
    names: Mutex<HashMap<RequestId, Arc<str>>>,
    hasher: RandomState,
}

/// A request under way; dropped, its name is forgotten.
#[derive(Debug)]
pub(crate) struct NamedRequest {
    names: Arc<RequestNames>,
    pub(crate) id: RequestId,
}

impl RequestNames {
    /// Notes a request of this name. Its id is the name where that is a UUID and no other request under way has it.
    pub(crate) fn note(self: &Arc<Self>, name: &str) -> NamedRequest {
        let mut names = self.lock();
        let mut id = RequestId::parse(name).unwrap_or_else(|| self.made_up(name, 0));
        let mut tries = 0u64;
        while names.contains_key(&id) {
            tries += 1;
            id = self.made_up(name, tries);
        }
        names.insert(id, name.into());
        NamedRequest {
            names: Arc::clone(self),
            id,
        }
    }

    /// The name of a request under way.
    pub(crate) fn name(&self, id: RequestId) -> Option<Arc<str>> {
        self.lock().get(&id).cloned()
    }

    fn made_up(&self, name: &str, tries: u64) -> RequestId {
        let half = |which: u64| u128::from(self.hasher.hash_one((name, tries, which)));
        RequestId(half(0) << 64 | half(1))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Arc<str>>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NamedRequest {
    fn drop(&mut self) {
        self.names.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_under_way_has_an_id_of_its_own() {
        let names = Arc::new(RequestNames::default());
        let text = "3F2504E0-4f89-41d3-9a0c-0305e82c3301";
        let first = names.note(text);
        assert_eq!(Some(first.id), RequestId::parse(text));
        assert_eq!(
            names.name(first.id).as_deref(),
            Some(text),
            "as it was given"
        );
        let again = names.note(text);
        assert_ne!(first.id, again.id);
        let odd = names.note("no uuid");
        assert_eq!(names.name(odd.id).as_deref(), Some("no uuid"));
        let (id, gone) = (odd.id, drop(odd));
        assert_eq!((names.name(id), gone), (None, ()));
        assert_eq!(names.name(first.id).as_deref(), Some(text));
    }
}
