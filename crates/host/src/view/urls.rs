//! Where workers are, for people who read log lines.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use kvasir_types::WorkerId;
use tracing::field::{DisplayValue, display};

/// The URLs of workers that are judged. Clones are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerUrls(Arc<RwLock<HashMap<WorkerId, Arc<str>>>>);

impl WorkerUrls {
    /// Where a worker is; empty if nobody said.
    pub(crate) fn get(&self, worker: WorkerId) -> Arc<str> {
        let urls = self.0.read().unwrap_or_else(PoisonError::into_inner);
        urls.get(&worker).cloned().unwrap_or_default()
    }

    /// The same as a field of a log line, which lacks it if nobody said.
    pub(crate) fn field(&self, worker: WorkerId) -> Option<DisplayValue<Arc<str>>> {
        let url = self.get(worker);
        (!url.is_empty()).then(|| display(url))
    }

    pub(super) fn set(&self, worker: WorkerId, url: &str) {
        if *self.get(worker) != *url {
            let mut urls = self.0.write().unwrap_or_else(PoisonError::into_inner);
            urls.insert(worker, Arc::from(url));
        }
    }

    pub(super) fn remove(&self, worker: WorkerId) {
        let mut urls = self.0.write().unwrap_or_else(PoisonError::into_inner);
        urls.remove(&worker);
    }
}
