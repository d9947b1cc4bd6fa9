//! What every service keeps apart: a model, and a group of workers that serve it.

use std::fmt;
use std::sync::Arc;

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_host::{PromptBlocks, RouterHost};
use kvasir_types::{LocalHash, SequenceHash};
use serde::Deserialize;

use crate::reading::TokenIds;

/// Groups that a service keeps at once.
pub(crate) const GROUPS_MAX: usize = 1024;
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
}

/// The names of a prompt's blocks.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) locals: Arc<[LocalHash]>,
    pub(crate) sequence: Arc<[SequenceHash]>,
}

impl Named {
    /// Of its tokens.
    pub(crate) fn of_tokens(tokens: &TokenIds, block_size: u32, naming: Naming<'_>) -> Self {
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
pub(crate) fn locals_of(tokens: &TokenIds, block_size: u32, naming: Naming<'_>) -> Vec<LocalHash> {
    let scope = Scope {
        salt: naming.salt.unwrap_or_default(),
        lora: naming.lora.unwrap_or_default(),
        eagle: naming.eagle,
    };
    let most = (block_size as usize).saturating_mul(BLOCKS_MAX);
    let tokens = tokens.0.get(..most).unwrap_or(&tokens.0);
    let mut locals = Vec::new();
    BlockHasher::new(block_size as usize, &scope).extend(tokens, &mut locals);
    locals
}
