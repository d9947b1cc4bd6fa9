//! How the routers of a process are made: what its options say, read once, and applied to each model.

use std::sync::Arc;
use std::time::Duration;

use kvasir_index::IndexOptions;
use kvasir_router::{Role, RouterConfig, RouterMode, RouterPolicy};

use crate::context::HostContext;
use crate::model::{Model, ModelSpec};
use crate::policy_file::PolicyFile;
use crate::remote_index::RemoteIndex;
use crate::router_host::{HostOptions, RouterHost};
use crate::shared_cache::SharedCache;

/// What routers are made from.
#[derive(Clone, Debug)]
pub struct RouterSetup {
    /// The settings of every router; block size and policy classes are those of its model.
    pub config: RouterConfig,
    /// What every index remembers.
    pub index: IndexOptions,
    /// Policy classes, where a file names them.
    pub policies: Option<PolicyFile>,
    /// Tokens in a block, whatever workers say.
    pub block_size: Option<u32>,
    /// Predict a rank that publishes no events by what is sent there, for so long.
    pub silent_rank_ttl: Option<Duration>,
    /// A cache that all workers share; it counts where requests are routed by cache.
    pub shared_cache: Option<Arc<SharedCache>>,
    /// Indexes of other routers, which are asked instead of one of its own.
    pub remote_index: Option<RemoteIndex>,
    /// What a placement costs among workers that compute prompts for others, if not the same as elsewhere.
    pub prefill_policy: Option<RouterPolicy>,
}

impl RouterSetup {
    /// Routers with these settings, and nothing beside them.
    #[must_use]
    pub fn new(config: RouterConfig, index: IndexOptions) -> Self {
        Self {
            config,
            index,
            policies: None,
            block_size: None,
            silent_rank_ttl: None,
            shared_cache: None,
            remote_index: None,
            prefill_policy: None,
        }
    }

    /// The same for workers that compute prompts for others: what they keep of them is no load.
    #[must_use]
    pub fn for_prefill(&self) -> Self {
        let mut setup = self.clone();
        setup.config.router_role = Role::Prefill;
        setup.config.router_track_active_blocks = false;
        setup.config.active_decode_blocks_threshold = None;
        if let Some(policy) = self.prefill_policy {
            setup.config.router_policy = policy;
        }
        setup
    }

    /// How workers of `model` are chosen, for blocks of `block_size` tokens.
    #[must_use]
    pub fn config(&self, model: &str, block_size: u32) -> RouterConfig {
        let policies = self.policies.as_ref();
        RouterConfig {
            kv_cache_block_size: block_size,
            router_policy_config: policies.map(|file| file.of_model(model)),
            ..self.config.clone()
        }
    }

    /// Makes a model. It shares the router of `beside`, which the same engines serve, unless its own would have other
    /// settings.
    #[must_use]
    pub fn make(&self, spec: &ModelSpec, beside: Option<&Model>, context: &HostContext) -> Model {
        let block_size = self.block_size.unwrap_or(spec.block_size);
        let config = self.config(&spec.name, block_size);
        let mut options = HostOptions::new(config, self.index.clone());
        if let Some(ttl) = self.silent_rank_ttl {
            options = options.predicting_silent_ranks(ttl);
        }
        let by_cache = options.config.router_mode == RouterMode::Kv;
        options.shared_cache = self.shared_cache.clone().filter(|_| by_cache);
        options.remote_index = self.remote_index.clone().filter(|_| by_cache);
        let alike = |other: &&Model| other.host.ask(|router| *router.config() == options.config);
        let host = match beside.filter(alike) {
            Some(other) => Arc::clone(&other.host),
            None => RouterHost::start(&spec.name, options, context),
        };
        Model::new(spec, host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::context;

    fn setup() -> RouterSetup {
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        };
        RouterSetup::new(config, IndexOptions::default())
    }

    fn spec(name: &str, block_size: u32) -> ModelSpec {
        ModelSpec {
            name: name.into(),
            block_size,
            context_length: 100,
            parent: None,
            migration_limit: 0,
        }
    }

    #[test]
    fn workers_that_compute_prompts_may_be_placed_by_another_policy() {
        let mut setup = setup();
        assert_eq!(setup.for_prefill().config.router_policy, RouterPolicy::Kv);
        setup.prefill_policy = Some(RouterPolicy::Time);
        assert_eq!(setup.for_prefill().config.router_policy, RouterPolicy::Time);
        assert_eq!(setup.config.router_policy, RouterPolicy::Kv);
    }

    #[tokio::test]
    async fn models_share_a_router_unless_its_settings_would_differ() {
        let (setup, context) = (setup(), context());
        let first = setup.make(&spec("a", 16), None, &context);
        let alike = setup.make(&spec("b", 16), Some(&first), &context);
        assert!(Arc::ptr_eq(&first.host, &alike.host));
        let other = setup.make(&spec("c", 32), Some(&first), &context);
        assert!(!Arc::ptr_eq(&first.host, &other.host));
        assert_eq!((first.block_size, other.block_size), (16, 32));
        let fixed = RouterSetup {
            block_size: Some(16),
            ..setup
        };
        let fixed = fixed.make(&spec("d", 32), Some(&first), &context);
        assert!(Arc::ptr_eq(&first.host, &fixed.host) && fixed.block_size == 16);
    }

    /// A rank without events is predicted in an index that events fill, and only such a rank.
    #[tokio::test]
    async fn silent_ranks_are_predicted_without_predicting_all() {
        let ttl = Duration::from_secs(120);
        let setup = RouterSetup {
            silent_rank_ttl: Some(ttl),
            ..setup()
        };
        let made = |setup: &RouterSetup| setup.make(&spec("m", 16), None, &context());
        let ttl_of = |model: &Model| {
            let ttl = |router: &kvasir_router::Router| router.config().router_predicted_ttl_secs;
            model.host.ask(ttl)
        };
        let heard = made(&setup);
        assert!(!heard.host.predicts_all());
        assert_eq!(ttl_of(&heard), Some(ttl.as_secs_f64()));
        let mut asked = setup;
        asked.config.router_predicted_ttl_secs = Some(9.0);
        let asked = made(&asked);
        assert!(asked.host.predicts_all());
        assert_eq!(ttl_of(&asked), Some(9.0));
    }
}
