//! The cache that workers share, from options.

use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{Settings, SharedCacheType, keys};
use kvasir_frontend::HttpPool;
use kvasir_host::{HicachePool, HostContext, SharedCache};
use kvasir_transport::zmq::Endpoint;
use kvasir_upstream::WorkerTls;

use crate::wiring::BadConfig;

/// What routers ask, and what discovered workers are announced to.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) cache: Option<Arc<SharedCache>>,
    pub(crate) hicache: Option<Arc<HicachePool>>,
}

/// The cache that the options name, if any; an error names the option and its value.
pub(crate) fn of(
    settings: &Settings,
    context: &HostContext,
    tls: &WorkerTls,
) -> Result<Shared, BadConfig> {
    let kind = settings.get(keys::SHARED_CACHE_TYPE);
    let url = settings.get(keys::SHARED_CACHE_URL);
    let timeout = settings.get(keys::SHARED_CACHE_TIMEOUT_MS);
    let timeout = Duration::from_millis(timeout.into());
    let bad = |url: &str, error: &dyn std::fmt::Display| {
        BadConfig(format!("--shared-cache-url {url}: {error}"))
    };
    match kind {
        SharedCacheType::None => Ok(Shared::default()),
        SharedCacheType::Http => {
            let Some(url) = url else {
                return Err(BadConfig(
                    "--shared-cache-type http needs --shared-cache-url, such as http://pool:9000/find"
                        .into(),
                ));
            };
            let pool = HttpPool::new(&url, tls).map_err(|error| bad(&url, &error))?;
            tracing::info!(url, "prompts are asked for at the shared cache");
            Ok(Shared {
                cache: Some(SharedCache::new(Arc::new(pool), timeout)),
                hicache: None,
            })
        }
        SharedCacheType::HiCache => {
            if let Some(url) = &url {
                url.parse::<Endpoint>().map_err(|error| bad(url, &error))?;
            }
            let pool = HicachePool::new(context, url);
            Ok(Shared {
                cache: Some(SharedCache::new(Arc::clone(&pool) as _, timeout)),
                hicache: Some(pool),
            })
        }
    }
}
