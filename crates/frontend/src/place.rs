//! From tokens to a booking: name the blocks, ask the index, ask the router.

use std::sync::Arc;

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_index::Matches;
use kvasir_openai::ApiError;
use kvasir_router::{Arrival, Fault, RouteError, overlap_of};
use kvasir_telemetry::observe_ms;
use kvasir_types::{LocalHash, SequenceHash, Token};

use crate::App;
use crate::host::{Booking, Needs};
use crate::models::ServedModel;

/// The names of a prompt's blocks, as far as the router mode asks for them.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) locals: Arc<[LocalHash]>,
    pub(crate) sequence: Arc<[SequenceHash]>,
}

impl Blocks {
    /// Of a prompt that nobody has read.
    pub(crate) fn none() -> Self {
        Self {
            locals: Arc::from([]),
            sequence: Arc::from([]),
        }
    }
}

/// Names the blocks of `tokens` under a cache salt; empty means none.
pub(crate) fn name_blocks(app: &App, model: &ServedModel, tokens: &[Token], salt: &str) -> Blocks {
    let Needs { index, sequence } = model.host.needs();
    if !index && !sequence {
        return Blocks::none();
    }
    let clock = app.clock();
    let start = clock.now();
    let mut locals = Vec::new();
    let scope = Scope {
        salt,
        ..Scope::default()
    };
    BlockHasher::new(model.block_size as usize, &scope).extend(tokens, &mut locals);
    let hashed = clock.now();
    let sequence = if sequence {
        sequence_hashes(&locals)
    } else {
        Vec::new()
    };
    let metrics = app.metrics();
    observe_ms(&metrics.overhead_block_hashing_ms, hashed - start);
    observe_ms(&metrics.overhead_seq_hashing_ms, clock.now() - hashed);
    let locals = if index { locals.into() } else { Arc::from([]) };
    Blocks {
        locals,
        sequence: sequence.into(),
    }
}

/// Chooses a worker and books it; waits while the router holds the request back.
pub(crate) async fn book(
    app: &App,
    model: &ServedModel,
    mut arrival: Arrival,
    blocks: &Blocks,
) -> Result<Booking, RouteError> {
    let (clock, metrics) = (app.clock(), app.metrics());
    let start = clock.now();
    let index = model.host.index();
    if !blocks.locals.is_empty() {
        let mut matches = Matches::new();
        index.find(&blocks.locals, &mut matches);
        arrival.overlap = overlap_of(&matches);
    }
    arrival.sequence = Arc::clone(&blocks.sequence);
    let found = clock.now();
    let booking = model.host.route(arrival, &blocks.locals).await?;
    let end = clock.now();
    if booking.sent().record && model.predicts(booking.target().worker) {
        index.record_routing(end, booking.target(), &blocks.locals, &blocks.sequence);
    }
    observe_ms(&metrics.overhead_indexer_find_matches_ms, found - start);
    observe_ms(&metrics.overhead_scheduling_ms, end - found);
    observe_ms(&metrics.overhead_total_ms, end - start);
    Ok(booking)
}

/// What the client is told when the router has no worker for it.
pub(crate) fn refusal(app: &App, error: &RouteError) -> ApiError {
    let overload = app.options().overload_status;
    tracing::debug!(%error, "refused");
    match error {
        RouteError::QueueLimit {
            policy_class,
            limit_kind,
            current,
            limit,
        } => ApiError::queue_full(overload, policy_class, limit_kind.name(), *current, *limit),
        error if error.is_overload() => ApiError::overloaded(overload),
        RouteError::PinnedWorkerNotAllowed(_)
        | RouteError::PinnedWorkerUnknown(_)
        | RouteError::PinnedRankUnknown { .. } => ApiError::invalid_pin(),
        error if error.fault() == Fault::Client => ApiError::bad_request(error.to_string()),
        _ => ApiError::unavailable(),
    }
}
