//! What callers on the request plane ask of the router, read from their messages.

use std::sync::Arc;

use kvasir_host::EndpointError;
use kvasir_msgpack::Value;
use kvasir_protocol::{GenerateRequest, Payload, RoutingHints, TOKENS_MAX};
use kvasir_router::{Arrival, Hints, Overrides, Pin, SessionAction, SessionRequest};
use kvasir_types::{DpRank, RequestId, Token, WorkerId};
use serde::de::DeserializeOwned;

use super::invalid;
use crate::group::{Naming, is_name};
use crate::hints::{ConfigOverride, RoutingConstraints};
use crate::media::{BlockMedia, MediaPrompt};

/// The model of a request that names none, as Dynamo's router has it.
const NO_MODEL: &str = "unknown";
/// Workers that a request may name.
const ALLOWED_MAX: usize = 4096;

/// What a request to `generate` asks of the router. A worker that it names counts if `is_there`; one that it insists on must be.
pub fn arrival(
    request: &mut GenerateRequest,
    id: RequestId,
    is_there: impl Fn(WorkerId) -> bool,
) -> Result<Box<Arrival>, EndpointError> {
    if request.model.is_empty() {
        NO_MODEL.clone_into(&mut request.model);
    }
    if request.routing.is_none() {
        // Older callers name the rank beside the rest.
        let rank = member(request, "dp_rank").and_then(|rank| rank.uint());
        request.routing = rank.map(|rank| RoutingHints {
            dp_rank: u32::try_from(rank).ok(),
            ..RoutingHints::default()
        });
    }
    let routing = request.routing.clone().unwrap_or_default();
    let insisted = routing.backend_instance_id.map(WorkerId);
    if let Some(id) = insisted.filter(|id| !is_there(*id)) {
        let text = format!("backend_instance_id={id} does not identify a known worker");
        return Err(invalid(text));
    }
    let named = [routing.decode_worker_id, routing.prefill_worker_id];
    let named = named.into_iter().flatten().map(WorkerId);
    let worker = insisted.or(named.into_iter().find(|id| is_there(*id)));
    let prompt = u32::try_from(request.token_ids.len()).unwrap_or(u32::MAX);
    let mut arrival = Box::new(Arrival::new(id, prompt));
    arrival.pin = Pin {
        worker,
        rank: routing.dp_rank.map(DpRank).filter(|_| worker.is_some()),
    };
    arrival.hints = Hints {
        priority: routing.priority,
        latency_sensitivity: routing.priority_jump,
        strict_priority: routing.strict_priority.unwrap_or(0),
        osl: routing.expected_output_tokens,
    };
    arrival.constraints.lora = routing.lora_name.as_deref().map(Into::into);
    if let Some(asked) = hint::<RoutingConstraints>(&routing, "routing_constraints")? {
        asked.apply(&mut arrival.constraints);
    }
    if let Some(allowed) = hint::<Vec<u64>>(&routing, "allowed_worker_ids")? {
        if allowed.len() > ALLOWED_MAX {
            return Err(invalid(format!("at most {ALLOWED_MAX} allowed_worker_ids")));
        }
        arrival.constraints.allowed = Some(allowed.into_iter().map(WorkerId).collect());
    }
    arrival.policy_class = hint::<String>(&routing, "policy_class")?.map(Into::into);
    if let Some(own) = member(request, "router_config_override") {
        arrival.overrides = overrides(&own)?;
    }
    let agent = member(request, "agent_context");
    let session = agent.as_ref().and_then(|agent| agent.get("session_id"));
    if let Some(session) = session.and_then(Value::text).filter(|name| is_name(name)) {
        arrival.session = Some(SessionRequest {
            id: session.into(),
            action: SessionAction::Header,
        });
    }
    Ok(arrival)
}

/// A member of a request that is there and not nil.
fn member(request: &GenerateRequest, name: &str) -> Option<Value> {
    let value = request.rest(name)?.value().ok()?;
    (value != Value::Nil).then_some(value)
}

/// A routing hint that is there and not nil.
fn hint<T: DeserializeOwned>(
    routing: &RoutingHints,
    name: &str,
) -> Result<Option<T>, EndpointError> {
    let found = routing.rest.iter().find(|(known, _)| known == name);
    let Some(value) = found.and_then(|(_, payload)| payload.value().ok()) else {
        return Ok(None);
    };
    read_as(&value, name)
}

fn overrides(own: &Value) -> Result<Overrides, EndpointError> {
    let own: Option<ConfigOverride> = read_as(own, "router_config_override")?;
    Ok(own.map_or_else(Overrides::default, |own| own.overrides()))
}

/// A value as what it is to be; none if it is nil.
fn read_as<T: DeserializeOwned>(value: &Value, name: &str) -> Result<Option<T>, EndpointError> {
    serde_json::from_value(value.to_json()).map_err(|error| invalid(format!("{name}: {error}")))
}

/// A prompt that is only asked about.
#[derive(Debug)]
pub(super) struct PromptAsk {
    pub(super) prompt: PromptText,
    pub(super) overrides: Overrides,
}

/// What the blocks of a prompt are named by.
#[derive(Debug)]
pub(super) struct PromptText {
    pub(super) tokens: Arc<[Token]>,
    pub(super) lora: Option<String>,
    pub(super) salt: Option<String>,
    pub(super) media: Option<BlockMedia>,
}

impl PromptText {
    /// Of a request to `generate`: its tokens, or those that it is to be routed by.
    pub(super) fn of(request: &GenerateRequest) -> Result<Self, EndpointError> {
        let routing = request.routing.as_ref();
        let mut prompt = Self {
            tokens: Arc::clone(&request.token_ids),
            lora: routing.and_then(|routing| routing.lora_name.clone()),
            salt: routing.and_then(|routing| routing.cache_salt.clone()),
            media: None,
        };
        if let Some(routed) = member(request, "mm_routing_info")
            && let Some(routed) = read_as::<MediaPrompt>(&routed, "mm_routing_info")?
        {
            prompt.tokens = routed.routing_token_ids.0.into();
            prompt.media = Some(routed.block_mm_infos);
        }
        Ok(prompt)
    }

    pub(super) fn naming(&self) -> Naming<'_> {
        Naming {
            lora: self.lora.as_deref(),
            salt: self.salt.as_deref(),
            eagle: false,
            media: self.media.as_ref(),
        }
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

impl PromptAsk {
    /// Reads a list of tokens, or a map that has one as `token_ids`.
    pub(super) fn read(payload: &Payload) -> Result<Self, EndpointError> {
        let asked = payload.value();
        let asked =
            asked.map_err(|error| invalid(format!("the request cannot be read: {error}")))?;
        let tokens = match &asked {
            Value::List(_) => Some(&asked),
            asked => asked.get("token_ids"),
        };
        let tokens = tokens.and_then(Value::list).and_then(read_tokens);
        let tokens = tokens.ok_or_else(|| {
            invalid("a list of tokens is expected, or a map with token_ids".to_owned())
        })?;
        let media = asked.get("block_mm_infos");
        let media = media.map(|infos| read_as(infos, "block_mm_infos"));
        let text = |name: &str| asked.get(name).and_then(Value::text).map(ToOwned::to_owned);
        let own = asked.get("router_config_override");
        Ok(Self {
            overrides: own.map(overrides).transpose()?.unwrap_or_default(),
            prompt: PromptText {
                tokens,
                lora: text("lora_name"),
                salt: text("cache_namespace"),
                media: media.transpose()?.flatten(),
            },
        })
    }
}

fn read_tokens(list: &[Value]) -> Option<Arc<[Token]>> {
    if list.len() > TOKENS_MAX {
        return None;
    }
    let token = |value: &Value| value.uint().and_then(|token| Token::try_from(token).ok());
    list.iter().map(token).collect()
}

#[cfg(test)]
mod tests {
    use kvasir_protocol::PayloadWriter;
    use kvasir_types::Codec;

    use super::*;

    fn json(text: &str) -> Payload {
        Payload::new(Codec::Json, text.as_bytes().to_vec().into())
    }

    fn arrive(text: &str) -> Result<Box<Arrival>, EndpointError> {
        let mut request = GenerateRequest::decode(&json(text)).unwrap();
        arrival(&mut request, RequestId(1), |worker| worker.0 < 10)
    }

    #[test]
    fn a_worker_that_is_insisted_on_must_be_there_and_others_may() {
        let pin = |text| arrive(text).unwrap().pin;
        let of = |worker: Option<u64>, rank: Option<u32>| Pin {
            worker: worker.map(WorkerId),
            rank: rank.map(DpRank),
        };
        assert_eq!(pin(r#"{"token_ids":[1]}"#), of(None, None));
        assert_eq!(pin(r#"{"token_ids":[1],"dp_rank":1}"#), of(None, None));
        let both = r#"{"token_ids":[1],"routing":{"decode_worker_id":70,"prefill_worker_id":7,"dp_rank":1}}"#;
        assert_eq!(pin(both), of(Some(7), Some(1)));
        let insisted = r#"{"token_ids":[1],"routing":{"backend_instance_id":70}}"#;
        let error = arrive(insisted).unwrap_err().to_worker_error();
        assert!(
            error.message.contains("backend_instance_id=70"),
            "{}",
            error.message
        );
    }

    #[test]
    fn hints_constraints_and_settings_reach_the_router() {
        let asked = arrive(
            r#"{"token_ids":[1,2],"router_config_override":{"router_temperature":0.5,"overlap_score_credit":null},
                "agent_context":{"session_id":"s"},
                "routing":{"priority":3,"priority_jump":1.5,"strict_priority":2,"expected_output_tokens":9,"lora_name":"l",
                    "allowed_worker_ids":[1,2],"routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":0.5}}}}"#,
        );
        let asked = asked.unwrap();
        assert_eq!(asked.overrides.router_temperature, Some(0.5));
        let hints = Hints {
            priority: Some(3),
            latency_sensitivity: Some(1.5),
            strict_priority: 2,
            osl: Some(9),
        };
        assert_eq!(asked.hints, hints);
        let constraints = &asked.constraints;
        assert_eq!(constraints.allowed.as_ref().map(|ids| ids.len()), Some(2));
        assert_eq!(constraints.required_taints.len(), 1);
        assert_eq!(constraints.preferred_taints.len(), 1);
        assert_eq!(constraints.lora.as_deref(), Some("l"));
        assert_eq!(
            asked.session.as_ref().map(|session| &*session.id),
            Some("s")
        );
        for wrong in [
            r#"{"token_ids":[1],"router_config_override":{"router_temperature":"warm"}}"#,
            r#"{"token_ids":[1],"router_config_override":7}"#,
            r#"{"token_ids":[1],"routing":{"allowed_worker_ids":"all"}}"#,
        ] {
            assert!(arrive(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_prompt_is_a_list_or_a_map_with_one() {
        let read = |text| PromptAsk::read(&json(text));
        assert_eq!(*read("[1,2]").unwrap().prompt.tokens, [1, 2]);
        let map = read(
            r#"{"token_ids":[3],"lora_name":"l","cache_namespace":"c","block_mm_infos":null}"#,
        );
        let map = map.unwrap().prompt;
        assert_eq!((&*map.tokens, map.lora.as_deref()), (&[3][..], Some("l")));
        assert_eq!(map.salt.as_deref(), Some("c"));
        let images = read(r#"{"token_ids":[3],"block_mm_infos":[{"mm_objects":[{"mm_hash":5}]}]}"#);
        let images = images.unwrap().prompt.media.unwrap();
        assert_eq!(images.of_block(0), [5]);
        let routed = json(
            r#"{"token_ids":[3],"mm_routing_info":{"routing_token_ids":[3,9,9],"block_mm_infos":[{"mm_objects":[{"mm_hash":5}]}]}}"#,
        );
        let routed = PromptText::of(&GenerateRequest::decode(&routed).unwrap()).unwrap();
        assert_eq!(
            (&*routed.tokens, routed.media),
            (&[3, 9, 9][..], Some(images))
        );
        for wrong in [
            "7",
            "{}",
            "[-1]",
            "[4294967296]",
            "[\"a\"]",
            r#"{"token_ids":[1],"block_mm_infos":[7]}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let mut writer = PayloadWriter::new(Codec::MessagePack);
        writer.tokens(&[5, 6]);
        let asked = PromptAsk::read(&writer.finish()).unwrap();
        assert_eq!(*asked.prompt.tokens, [5, 6]);
    }
}
