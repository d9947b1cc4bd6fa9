//! Rows: the standalone router.

use crate::command::Scope;
use crate::rule_text;
use crate::spec::{Group, options, var};

options! { STANDALONE_ROWS, Group::Standalone, Scope::ROUTER;

    /// Endpoint of the workers to route to, as `namespace.component.endpoint`; of a mock engine, its own.
    ENDPOINT: Option<String> = "endpoint" =>
        scope(Scope::ROUTER.and(Scope::MOCKER)).env(&[var("DYN_ROUTER_ENDPOINT")])
        .default_note("required; dynamo.backend.generate in mocker").rule(&rule_text::ENDPOINT)
        .common().effective();

    /// Tokens in a KV block; not taken from the model card.
    BLOCK_SIZE: u32 = "block-size" =>
        scope(Scope::ROUTER.and(Scope::INDEXER).and(Scope::REPLAY).and(Scope::MOCKER))
        .env(&[var("DYN_ROUTER_BLOCK_SIZE")]).aliases(&["router-block-size"]).default("128")
        .default_note("128; 16 in replay and mocker").ints(1, 1 << 20).effective().common();
}
