//! What every service keeps apart: a model, and a group of workers that serve it, each with a router of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_host::{HostContext, Model, ModelSpec, PromptBlocks, RouterHost, RouterSetup, Routers};
use kvasir_types::{LocalHash, SequenceHash, Token};
use serde::Deserialize;

use crate::api::Answer;
use crate::media::BlockMedia;

/// Groups that a service keeps at once.
const GROUPS_MAX: usize = 1024;
/// Workers of one service.
pub(crate) const WORKERS_MAX: usize = 4096;
/// Bytes of a name from outside: it stands in answers, series and log lines.
pub(crate) const NAME_BYTES_MAX: usize = 256;
/// Blocks of a prompt that are looked up; what follows them changes no choice.
const BLOCKS_MAX: usize = 1 << 17;
/// Tokens in a block at most.
pub(crate) const BLOCK_SIZE_MAX: u32 = 1 << 20;

/// Which model, and which group of its workers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub(crate) struct GroupKey {
    pub(crate) model_name: String,
    #[serde(default = "default_group")]
    pub(crate) routing_group: String,
}

/// The group of those that name none.
pub(crate) fn default_group() -> String {
    "default".to_owned()
}

impl GroupKey {
    /// Whether answers, series and log lines can carry it.
    pub(crate) fn is_sound(&self) -> bool {
        [&self.model_name, &self.routing_group]
            .iter()
            .all(|name| is_name(name))
    }

    /// What its router is called.
    pub(crate) fn router_name(&self) -> String {
        match self.routing_group == default_group() {
            true => self.model_name.clone(),
            false => format!("{}:{}", self.model_name, self.routing_group),
        }
    }
}

impl fmt::Display for GroupKey {
    /// As errors name it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "model={} routing_group={}",
            self.model_name, self.routing_group
        )
    }
}

/// What a service knows of a group.
pub(crate) trait Group {
    /// Its router.
    fn host(&self) -> &Arc<RouterHost>;
}

/// Groups by their names.
pub(crate) type GroupMap<G> = BTreeMap<GroupKey, Arc<G>>;

/// The groups of a service. Each has a router of its own, made when its first worker comes.
pub(crate) struct Groups<G> {
    setup: RouterSetup,
    context: HostContext,
    by_key: RwLock<GroupMap<G>>,
}

impl<G: Group> Groups<G> {
    /// None yet; `setup` says how their routers are made.
    pub(crate) fn new(setup: RouterSetup, context: HostContext) -> Self {
        Self {
            setup,
            context,
            by_key: RwLock::default(),
        }
    }

    /// How their routers are made.
    pub(crate) const fn setup(&self) -> &RouterSetup {
        &self.setup
    }

    /// All of them, which nobody changes meanwhile.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, GroupMap<G>> {
        self.by_key.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, GroupMap<G>> {
        self.by_key.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group of this name.
    pub(crate) fn get(&self, key: &GroupKey) -> Option<Arc<G>> {
        self.all().get(key).cloned()
    }

    /// The group of this name, made of a new router if there is none; blocks of another size are refused.
    pub(crate) fn get_or_make(
        &self,
        key: &GroupKey,
        block_size: u32,
        make: impl FnOnce(Model) -> G,
    ) -> Result<Arc<G>, Answer> {
        let mut groups = self.write();
        if let Some(group) = groups.get(key) {
            let existing = group.host().block_size();
            return match existing == block_size {
                true => Ok(Arc::clone(group)),
                false => {
                    let text = format!(
                        "block_size mismatch for {key}: existing={existing}, requested={block_size}"
                    );
                    Err(Answer::error(409, text))
                }
            };
        }
        if groups.len() >= GROUPS_MAX {
            let text = format!("there are {GROUPS_MAX} groups already");
            return Err(Answer::error(409, text));
        }
        let spec = ModelSpec {
            name: key.router_name().into(),
            block_size,
            context_length: u32::MAX,
            parent: None,
            migration_limit: 0,
        };
        let group = Arc::new(make(self.setup.make(&spec, None, &self.context)));
        groups.insert(key.clone(), Arc::clone(&group));
        Ok(group)
    }

    /// Nobody is in this group any more.
    pub(crate) fn remove(&self, key: &GroupKey) {
        self.write().remove(key);
    }
}

impl<G: Group + Send + Sync> Routers for Groups<G> {
    fn all(&self) -> Vec<Arc<RouterHost>> {
        let groups = self.all();
        groups
            .values()
            .map(|group| Arc::clone(group.host()))
            .collect()
    }

    fn named(&self, name: &str) -> Option<Arc<RouterHost>> {
        let groups = self.all();
        let mut hosts = groups.values().map(|group| group.host());
        hosts.find(|host| **host.name() == *name).cloned()
    }
}

/// Whether a text from outside may be a name.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control)
}

/// How a prompt's blocks are named.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Naming<'t> {
    pub(crate) lora: Option<&'t str>,
    pub(crate) salt: Option<&'t str>,
    pub(crate) eagle: bool,
    pub(crate) media: Option<&'t BlockMedia>,
}

/// The names of a prompt's blocks.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) locals: Arc<[LocalHash]>,
    pub(crate) sequence: Arc<[SequenceHash]>,
}

impl Named {
    /// Of its tokens.
    pub(crate) fn of_tokens(tokens: &[Token], block_size: u32, naming: Naming<'_>) -> Self {
        let locals = locals_of(tokens, block_size, naming);
        Self {
            sequence: sequence_hashes(&locals).into(),
            locals: locals.into(),
        }
    }

    /// For the router.
    pub(crate) fn blocks(&self, host: &RouterHost) -> PromptBlocks {
        host.named_blocks(Arc::clone(&self.locals), Arc::clone(&self.sequence))
    }
}

/// The local hashes of a prompt's complete blocks.
pub(crate) fn locals_of(tokens: &[Token], block_size: u32, naming: Naming<'_>) -> Vec<LocalHash> {
    let scope = Scope {
        salt: naming.salt.unwrap_or_default(),
        lora: naming.lora.unwrap_or_default(),
        eagle: naming.eagle,
    };
    let most = (block_size as usize).saturating_mul(BLOCKS_MAX);
    let tokens = tokens.get(..most).unwrap_or(tokens);
    let mut locals = Vec::new();
    let hasher = BlockHasher::new(block_size as usize, &scope);
    match naming.media {
        None => hasher.extend(tokens, &mut locals),
        Some(media) => hasher.extend_with_media(tokens, |block| media.of_block(block), &mut locals),
    }
    locals
}
