//! Choosing a worker for a prompt, and saying what the choice was made of.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_host::Booking;
use kvasir_index::Matches;
use kvasir_router::{
    Arrival, Constraints, Hints, PeerChange, Pin, RouteError, SessionAction, SessionRequest,
};
use kvasir_types::{DpRank, LocalHash, RequestId, SequenceHash, WorkerId, WorkerRank};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::selections::Selection;
use super::{SelectGroup, Selector};
use crate::api::Answer;
use crate::group::{GroupKey, Named, Naming, is_name};
use crate::hints::{ConfigOverride, RoutingConstraints};
use crate::indexer::HeldTokens;
use crate::media::{BlockMedia, MediaPrompt};
use crate::overlap::OverlapReply;
use crate::reading::{AsksOfTokens, Hashes, TokenIds};
use crate::slots::PotentialRow;

/// Workers that a request may name.
const ALLOWED_MAX: usize = 4096;

/// A prompt, and what is wanted of its placement.
#[derive(Deserialize)]
pub(super) struct SelectAsk {
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    token_ids: Option<TokenIds>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    is_eagle: Option<bool>,
    mm_routing_info: Option<MediaPrompt>,
    block_mm_infos: Option<BlockMedia>,
    block_hashes: Option<Hashes>,
    sequence_hashes: Option<Hashes>,
    isl_tokens: Option<u32>,
    selection_id: Option<String>,
    session_id: Option<String>,
    expected_output_tokens: Option<u32>,
    priority_jump: Option<f64>,
    #[serde(default)]
    strict_priority: u32,
    pinned_worker: Option<PinnedWorker>,
    allowed_worker_ids: Option<Vec<u64>>,
    routing_constraints: Option<RoutingConstraints>,
    router_config_override: Option<ConfigOverride>,
}

impl AsksOfTokens for SelectAsk {
    fn put(&mut self, tokens: TokenIds) {
        self.token_ids = Some(tokens);
    }
}

#[derive(Clone, Copy, Deserialize)]
struct PinnedWorker {
    worker_id: u64,
    dp_rank: Option<u32>,
}

/// A prompt that was read.
pub(super) struct ReadPrompt {
    group: Arc<SelectGroup>,
    named: Named,
    isl_tokens: u32,
}

#[derive(Serialize)]
struct SelectionReply<'s> {
    selection_id: &'s str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<i64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    isl_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    track_prefill_tokens: Option<bool>,
    model_name: &'s str,
    routing_group: &'s str,
    worker_id: u64,
    dp_rank: u32,
    endpoint: String,
    block_size: u32,
    overlap: HeldTokens,
    effective_prefill_tokens: u32,
    potential_decode_blocks: u64,
}

impl SelectAsk {
    fn key(&self) -> GroupKey {
        GroupKey {
            model_name: self.model_name.clone(),
            routing_group: self.routing_group.clone(),
        }
    }

    /// The names of its blocks, and its length.
    fn prompt(&self, group: &SelectGroup) -> Result<(Named, u32), Answer> {
        let routed = self.mm_routing_info.as_ref();
        let tokens = routed.map(|routed| &routed.routing_token_ids);
        match (tokens.or(self.token_ids.as_ref()), &self.block_hashes) {
            (Some(tokens), None) => {
                let naming = Naming {
                    lora: self.lora_name.as_deref(),
                    salt: self.cache_salt.as_deref(),
                    eagle: self
                        .is_eagle
                        .unwrap_or(group.is_eagle.load(Ordering::Relaxed)),
                    media: routed
                        .map(|routed| &routed.block_mm_infos)
                        .or(self.block_mm_infos.as_ref()),
                };
                let named = Named::of_tokens(&tokens.0, group.model.block_size, naming);
                Ok((named, u32::try_from(tokens.0.len()).unwrap_or(u32::MAX)))
            }
            (None, Some(locals)) => {
                let sequence = self.sequence_hashes.clone().unwrap_or_default();
                let Some(isl) = self.isl_tokens else {
                    return Err(Answer::error(
                        400,
                        "block_hashes need isl_tokens and sequence_hashes",
                    ));
                };
                if sequence.0.len() != locals.0.len() {
                    let text = "block_hashes and sequence_hashes must have the same length";
                    return Err(Answer::error(400, text));
                }
                let named = Named {
                    locals: locals.named(LocalHash),
                    sequence: sequence.named(SequenceHash),
                };
                Ok((named, isl))
            }
            _ => Err(Answer::error(
                400,
                "either token_ids or block_hashes is required",
            )),
        }
    }

    fn arrival(
        &self,
        id: RequestId,
        isl_tokens: u32,
        query_only: bool,
    ) -> Result<Box<Arrival>, Answer> {
        let mut arrival = Box::new(Arrival::new(id, isl_tokens));
        if let Some(pinned) = self.pinned_worker {
            arrival.pin = Pin {
                worker: Some(WorkerId(pinned.worker_id)),
                rank: pinned.dp_rank.map(DpRank),
            };
        }
        arrival.constraints = self.constraints()?;
        arrival.hints = Hints {
            priority: None,
            latency_sensitivity: self.priority_jump,
            strict_priority: self.strict_priority,
            osl: self.expected_output_tokens,
        };
        if let Some(own) = &self.router_config_override {
            arrival.overrides = own.overrides();
        }
        if let Some(session) = &self.session_id {
            if !is_name(session) {
                return Err(Answer::error(
                    400,
                    "session_id has 1 to 256 bytes without control characters",
                ));
            }
            arrival.session = Some(SessionRequest {
                id: session.as_str().into(),
                action: SessionAction::Header,
            });
        }
        arrival.query_only = query_only;
        Ok(arrival)
    }

    fn constraints(&self) -> Result<Constraints, Answer> {
        let allowed = self.allowed_worker_ids.as_ref();
        if allowed.is_some_and(|allowed| allowed.len() > ALLOWED_MAX) {
            let text = format!("at most {ALLOWED_MAX} allowed_worker_ids");
            return Err(Answer::error(400, text));
        }
        let mut constraints = Constraints {
            allowed: allowed.map(|ids| ids.iter().map(|id| WorkerId(*id)).collect()),
            ..Constraints::default()
        };
        if let Some(asked) = &self.routing_constraints {
            asked.apply(&mut constraints);
        }
        Ok(constraints)
    }
}

impl Selector {
    fn read_prompt(&self, ask: &SelectAsk) -> Result<ReadPrompt, Answer> {
        let key = ask.key();
        let groups = self.groups();
        let ready = groups.get(&key).filter(|group| group.model.is_ready());
        let Some(group) = ready.cloned() else {
            let any = groups.values().any(|group| group.model.is_ready());
            return Err(match any {
                true => Answer::error(503, format_args!("no schedulable workers for {key}")),
                false => Answer::error(503, "no schedulable workers are available"),
            });
        };
        drop(groups);
        let (named, isl_tokens) = ask.prompt(&group)?;
        Ok(ReadPrompt {
            group,
            named,
            isl_tokens,
        })
    }

    /// Chooses, and books nothing.
    pub(super) async fn select(&self, ask: &SelectAsk) -> Result<Answer, Answer> {
        let prompt = self.read_prompt(ask)?;
        let (id, selection_id) = self.names(ask)?;
        let booking = choose(&prompt, ask.arrival(id, prompt.isl_tokens, true)?).await?;
        let placed = booking.placement();
        let prefill = prompt.isl_tokens.saturating_sub(placed.cached_tokens);
        let selection = Selection {
            group: Arc::clone(&prompt.group),
            target: placed.target,
            sequence: Arc::clone(&prompt.named.sequence),
            prefill_tokens: prefill,
            osl: ask.expected_output_tokens,
        };
        let now = self.context.clock.now();
        self.selections().put(now, &selection_id, selection);
        Ok(prompt.reply(&selection_id, placed.target, prefill, false))
    }

    /// Chooses and books.
    pub(super) async fn select_and_reserve(&self, ask: &SelectAsk) -> Result<Answer, Answer> {
        let prompt = self.read_prompt(ask)?;
        let (id, selection_id) = self.names(ask)?;
        self.check_free(&selection_id)?;
        let booking = choose(&prompt, ask.arrival(id, prompt.isl_tokens, false)?).await?;
        let placed = booking.placement();
        let prefill = prompt.isl_tokens.saturating_sub(placed.cached_tokens);
        let answer = prompt.reply(&selection_id, placed.target, prefill, true);
        let target = placed.target;
        self.keep(&selection_id, Arc::clone(&prompt.group), booking)?;
        let change = PeerChange::Add {
            sequence: Arc::clone(&prompt.named.sequence),
            prefill_tokens: prefill,
            prefill_duration: None,
            osl: ask.expected_output_tokens,
        };
        self.tell_peers(&prompt.group, (&selection_id, target), &change);
        Ok(answer)
    }

    /// What the router calls a request, and what its client does.
    fn names(&self, ask: &SelectAsk) -> Result<(RequestId, String), Answer> {
        let id = self.next_id();
        match &ask.selection_id {
            None => Ok((id, id.to_string())),
            Some(name) if is_name(name) => Ok((id, name.clone())),
            Some(_) => Err(Answer::error(
                400,
                "selection_id has 1 to 256 bytes without control characters",
            )),
        }
    }

    pub(super) fn next_id(&self) -> RequestId {
        let number = self.last_id.fetch_add(1, Ordering::Relaxed);
        let clock = self.context.clock;
        let began = clock.unix_nanos(kvasir_types::Time::ZERO);
        RequestId(u128::from(began) << 64 | u128::from(number + 1))
    }

    pub(super) fn potential(&self, ask: &SelectAsk) -> Result<Answer, Answer> {
        let prompt = self.read_prompt(ask)?;
        let host = &prompt.group.model.host;
        let overlap = host.overlap(&prompt.named.blocks(host));
        let rows = PotentialRow::all(host, prompt.isl_tokens, &overlap, &prompt.named.sequence);
        Ok(Answer::json(200, &rows))
    }

    pub(super) fn overlap(&self, ask: &SelectAsk) -> Result<Answer, Answer> {
        let prompt = self.read_prompt(ask)?;
        let model = &prompt.group.model;
        let reply = OverlapReply::of(model, &prompt.named.locals);
        Ok(Answer::json(200, &reply))
    }
}

impl ReadPrompt {
    fn reply(&self, selection_id: &str, target: WorkerRank, prefill: u32, booked: bool) -> Answer {
        let (group, named) = (&self.group, &self.named);
        let host = &group.model.host;
        let mut found = Matches::new();
        host.index().find(&named.locals, &mut found);
        let mut held = HeldTokens::by_worker(&found, host.block_size());
        let held = held.remove(&target.worker.0);
        let blocks = match booked {
            true => host
                .ask(|router| router.load(target))
                .map_or(0, |load| load.active_blocks),
            false => host.potential_blocks(target, &named.sequence),
        };
        let signed = || {
            named
                .sequence
                .iter()
                .map(|name| name.0.cast_signed())
                .collect()
        };
        let tracks = || host.ask(|router| router.config().router_track_prefill_tokens);
        Answer::json(
            200,
            &SelectionReply {
                selection_id,
                sequence_hashes: booked.then(signed),
                isl_tokens: booked.then_some(self.isl_tokens),
                track_prefill_tokens: booked.then(tracks),
                model_name: &group.key.model_name,
                routing_group: &group.key.routing_group,
                worker_id: target.worker.0,
                dp_rank: target.rank.0,
                endpoint: group.endpoint_of(target.worker),
                block_size: host.block_size(),
                overlap: held.unwrap_or_else(|| HeldTokens::nothing(target.rank.0)),
                effective_prefill_tokens: prefill,
                potential_decode_blocks: blocks,
            },
        )
    }
}

async fn choose(prompt: &ReadPrompt, arrival: Box<Arrival>) -> Result<Booking, Answer> {
    let blocks = prompt.named.blocks(&prompt.group.model.host);
    let chosen = prompt.group.model.book(arrival, &blocks).await;
    chosen.map_err(|error| refusal(&error))
}

/// Why nobody was chosen, as Dynamo's service says it.
fn refusal(error: &RouteError) -> Answer {
    match error {
        RouteError::NoEndpoints { .. }
        | RouteError::PinnedWorkerUnknown(_)
        | RouteError::PinnedRankUnknown { .. } => {
            Answer::error(503, "no endpoints available to route work")
        }
        RouteError::QueueLimit {
            policy_class,
            limit_kind,
            current,
            limit,
            ..
        } => {
            let details = json!({
                "policy_class": policy_class,
                "limit_kind": limit_kind.name(),
                "current": current,
                "limit": limit,
            });
            Answer::json(
                503,
                &json!({ "error": error.to_string(), "details": details }),
            )
        }
        RouteError::DuplicateRequest => Answer::error(409, error),
        error if error.is_overload() => Answer::error(429, error),
        error => match error.fault() {
            kvasir_types::Fault::Client => Answer::error(400, error),
            _ => Answer::error(503, error),
        },
    }
}
