//! Prompts that go past the workers for prompts (`--router-conditional-disagg`), however workers are reached.
//!
//! [`BypassTerms`] judges; here both routers are asked, without booking, where the prompt would go.

use kvasir_host::PromptBlocks;
use kvasir_router::{Arrival, BypassReason, BypassTerms, BypassView, WorkerSpec};
use kvasir_types::WorkerRank;

use crate::models::ServedModel;

/// What workers are told of a request that goes past the prefill workers, and clients who want to know. Only we say it.
pub(crate) const ANNOTATION: &str = "x-bypass-remote-prefill";

/// Where the prompt should be computed past the workers of `pool`, and why; none if it should not. `arrival` is that of a request to one
/// worker, and `pool_blocks` names the prompt's blocks as `pool` counts them.
pub(crate) async fn judge(
    terms: &BypassTerms,
    (model, pool): (&ServedModel, &ServedModel),
    mut arrival: Arrival,
    blocks: &PromptBlocks,
    pool_blocks: impl FnOnce() -> PromptBlocks,
) -> Option<(WorkerRank, BypassReason)> {
    let decode = model.peek(Box::new(arrival.clone()), blocks).await.ok()?;
    let target = decode.target;
    let mut view = BypassView {
        prompt_tokens: arrival.isl_tokens,
        cached_tokens: decode.cached_tokens,
        ..BypassView::default()
    };
    if terms.decode_busy.is_some() {
        let loads = model.potential_loads(arrival.isl_tokens, blocks);
        let load = loads.iter().find(|load| load.rank == target)?;
        view.decode_blocks = load.potential_decode_blocks;
        view.decode_blocks_total = model.spec_of(target.worker)?.kv_total_blocks;
    }
    if terms.asks_prefill() {
        arrival.pin = Default::default();
        arrival.session = None;
        let blocks = pool_blocks();
        let prefill = pool.peek(Box::new(arrival), &blocks).await.ok()?.target;
        let load = pool.host.ask(|router| router.load(prefill));
        let batch = pool.spec_of(prefill.worker)?.max_num_batched_tokens;
        view.prefill_tokens = load.map_or(0, |load| load.prefill_tokens);
        view.prefill_batch = batch.unwrap_or(WorkerSpec::UNKNOWN_BATCH);
    }
    Some((target, terms.judge(&view)?))
}
