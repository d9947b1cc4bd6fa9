//! Rows: parts of the router as services.

use std::time::Duration;

use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { SERVICES_ROWS, Group::Standalone, Scope::INDEXER;

    /// Engine to listen to from the start, as `id=tcp://host:port`.
    ///
    /// `id:rank=tcp://host:port` names a data-parallel rank. May be given several times.
    LISTEN: Vec<String> = "listen" =>
        env(&[var("KVASIR_INDEXER_LISTEN")]).space_separated().metavar("ID=ADDRESS").effective()
        .common();

    /// Model of the engines of `--listen`.
    LISTEN_MODEL: String = "listen-model" =>
        env(&[var("KVASIR_INDEXER_MODEL")]).default("default").metavar("NAME").effective().common();

    /// Routing group of the engines of `--listen`.
    LISTEN_GROUP: String = "listen-group" =>
        env(&[var("KVASIR_INDEXER_GROUP")]).default("default").metavar("NAME").effective();

    /// Services whose index is taken over at the start, as `http://host:port`, separated by commas.
    ///
    /// Indexers or selection services of Kvasir. The first that answers counts; if none does, the service begins empty.
    INDEXER_PEERS: Option<String> = "indexer-peers" =>
        scope(Scope::INDEXER.and(Scope::SELECT)).env(&[var("KVASIR_INDEXER_PEERS")])
        .aliases(&["peers"]).metavar("URLS").effective();

    /// Port on which other services of its kind are told of load; unset tells nobody.
    REPLICA_SYNC_PORT: Option<u16> = "replica-sync-port" =>
        scope(Scope::SLOT_TRACKER.and(Scope::SELECT)).env(&[var("KVASIR_REPLICA_SYNC_PORT")])
        .ints(0, 65_535).metavar("PORT").effective();

    /// Other services of its kind, as `tcp://host:port`, separated by commas: what they book counts here.
    ///
    /// Needs `--replica-sync-port`.
    REPLICA_SYNC_PEERS: Option<String> = "replica-sync-peers" =>
        scope(Scope::SLOT_TRACKER.and(Scope::SELECT)).env(&[var("KVASIR_REPLICA_SYNC_PEERS")])
        .metavar("PEERS").effective();

    /// Time for which a selection can be turned into a reservation.
    SELECTION_CACHE_TTL_SECS: Duration = "selection-cache-ttl-secs" =>
        scope(Scope::SELECT).env(&[var("KVASIR_SELECTION_CACHE_TTL_SECS")]).default("120")
        .metavar("SECONDS").effective();

    /// Number of selections kept for that.
    SELECTION_CACHE_MAX_ENTRIES: u32 = "selection-cache-max-entries" =>
        scope(Scope::SELECT).env(&[var("KVASIR_SELECTION_CACHE_MAX_ENTRIES")]).default("4096")
        .effective();

    /// Bytes of block hashes that those selections hold.
    SELECTION_CACHE_MAX_BYTES: u64 = "selection-cache-max-bytes" =>
        scope(Scope::SELECT).env(&[var("KVASIR_SELECTION_CACHE_MAX_BYTES")]).default("268435456")
        .effective();
}
