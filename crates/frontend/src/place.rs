//! From tokens to a booking: name the blocks, ask the index, ask the router.

use std::sync::Arc;

use kvasir_hash::{BlockHasher, Scope, sequence_hashes};
use kvasir_index::Matches;
use kvasir_openai::ApiError;
use kvasir_router::{Arrival, Fault, RouteError};
use kvasir_telemetry::observe_ms;
use kvasir_types::{LocalHash, SequenceHash, Token, WorkerRank};

use crate::App;
use crate::host::{Booking, LookedUp, Needs};
use crate::models::ServedModel;
use crate::observe::meter::Stage;
use crate::picture::{Forecast, Foretold};

/// The names of a prompt's blocks, as far as the router mode asks for them.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) locals: Arc<[LocalHash]>,
    pub(crate) sequence: Arc<[SequenceHash]>,
    /// They are made of the text and not of tokens: no event of an engine will ever name them.
    pub(crate) guessed: bool,
    /// Tokens of the prompt as the engine must count them; `None` where it may count others.
    pub(crate) certain: Option<u32>,
}

impl Blocks {
    /// Of a prompt that nobody has read.
    pub(crate) fn none() -> Self {
        Self {
            locals: Arc::from([]),
            sequence: Arc::from([]),
            guessed: false,
            certain: None,
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
        lora: model.lora.as_deref().unwrap_or_default(),
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
        guessed: false,
        certain: None,
    }
}

/// Chooses a worker and books it; waits while the router holds the request back.
pub(crate) async fn book(
    app: &App,
    model: &ServedModel,
    mut arrival: Arrival,
    blocks: &Blocks,
) -> Result<Booking, RouteError> {
    let (clock, meters) = (app.clock(), &model.meters);
    let _inside = meters.enter(Stage::Route);
    let start = clock.now();
    let (index, pictures) = (model.host.index(), model.host.pictures());
    let looked_up = LookedUp {
        prompt: Arc::clone(&blocks.locals),
        routed: model.predict_heard || blocks.guessed,
    };
    let mut matches = Matches::new();
    if !blocks.locals.is_empty() {
        index.find(&blocks.locals, &mut matches);
        arrival.overlap = pictures.overlap(&matches, looked_up.routed);
    }
    arrival.sequence = Arc::clone(&blocks.sequence);
    arrival.model = model.asked_for();
    let found = match meters.by_cache() {
        true => clock.now(),
        false => start,
    };
    let record = looked_up.routed;
    let routed = model.host.route(arrival, looked_up).await;
    let refused = |error: &RouteError| meters.turned_away(model.host.name(), error);
    let mut booking = routed.inspect_err(refused)?;
    meters.chosen(booking.sent());
    let end = clock.now();
    let target = booking.target();
    if booking.sent().record && (record || pictures.is_doubted(target)) {
        index.record_routing(end, target, &blocks.locals, &blocks.sequence);
    }
    if !booking.sent().queued.is_zero() {
        // What was found has aged.
        index.find(&blocks.locals, &mut matches);
    }
    if let Some(forecast) = forecast(model, target, blocks, &matches) {
        booking.foretell(forecast);
    }
    meters.stage_took(Stage::Route, end - start);
    if meters.by_cache() {
        let metrics = meters.metrics();
        observe_ms(&metrics.overhead_indexer_find_matches_ms, found - start);
        observe_ms(&metrics.overhead_scheduling_ms, end - found);
        observe_ms(&metrics.overhead_total_ms, end - start);
    }
    Ok(booking)
}

/// What events foretell of a request on its way to `target`; `None` if nobody judges that rank, or if the engine
/// may see another prompt than we do.
fn forecast(
    model: &ServedModel,
    target: WorkerRank,
    blocks: &Blocks,
    matches: &Matches,
) -> Option<Forecast> {
    let prompt = blocks.certain.filter(|_| !blocks.locals.is_empty())?;
    let picture = model.host.pictures().get(target)?;
    let ours = matches.sources().find(|s| s.events.rank == target);
    let foretold = Foretold {
        locals: Arc::clone(&blocks.locals),
        prompt,
        blocks: ours.map_or(0, |s| s.events.disk_cumulative()),
    };
    Some(Forecast::new(picture, foretold))
}

/// The same after workers failed the request: `why` holds if there is nobody else to ask.
pub(crate) fn refusal_after(app: &App, error: &RouteError, why: ApiError) -> ApiError {
    match error {
        RouteError::FailedWorkersOverloaded
        | RouteError::FailedWorkersUnavailable
        | RouteError::NoEndpoints { .. } => why,
        error => refusal(app, error),
    }
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
        | RouteError::PinnedRankUnknown { .. } => ApiError::invalid_pin(error),
        error if error.fault() == Fault::Client => ApiError::bad_request(error.to_string()),
        _ => ApiError::unavailable(),
    }
}
