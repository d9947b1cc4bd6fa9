//! Requests and answers as the rest of the system speaks of them, to and from what travels.

use std::sync::Arc;

use bytes::Bytes;
use kvasir_types::{
    AgentSession, Codec, DpRank, FinishReason, Likelihood, RequestContext, RequestId, Sampling,
    TokenItem, TokenRequest, WorkerId, WorkerRank,
};

use crate::transfer::{
    BOOTSTRAP_INFO, PREFILL_RESULT, bootstrap_info, bootstrap_room, prefill_result,
    read_prefill_result,
};
use crate::{
    Finish, GenerateRequest, Output, OutputOptions, Payload, PayloadWriter, RoutingHints,
    SamplingOptions, StopConditions, TopLogprob, Usage,
};

/// A worker that was not told when to stop stops after this many tokens at the latest.
const MAX_TOKENS_UNTOLD: u32 = 1 << 20;

impl GenerateRequest {
    /// The request as it travels in MessagePack.
    #[must_use]
    pub fn of(request: &TokenRequest) -> Self {
        Self::of_as(request, Codec::MessagePack)
    }

    /// The request as it travels in messages of this codec.
    #[must_use]
    pub fn of_as(request: &TokenRequest, codec: Codec) -> Self {
        let context = &request.context;
        let sampling = &request.sampling;
        Self {
            model: request.model.as_ref().to_owned(),
            token_ids: Arc::clone(&request.tokens),
            stop: stop_conditions(sampling),
            sampling: sampling_options(sampling),
            output: OutputOptions {
                logprobs: sampling.logprobs,
                prompt_logprobs: context.prompt_logprobs,
                skip_special_tokens: context.skip_special_tokens,
                ..OutputOptions::default()
            },
            eos_token_ids: context.eos_tokens.to_vec(),
            mdc_sum: context.card_sum.as_deref().map(str::to_owned),
            annotations: owned(&context.annotations),
            routing: Some(routing_hints(request)),
            rest: rest(request, codec),
        }
    }

    /// The request as a worker of ours takes it. `id` and `metadata` come with the control message.
    #[must_use]
    pub fn into_token_request(self, id: RequestId, metadata: &[(String, String)]) -> TokenRequest {
        let session = self.session();
        let extra_args = self.rest("extra_args").and_then(json_text);
        let bootstrap = self.rest(BOOTSTRAP_INFO);
        let bootstrap = bootstrap.and_then(|info| bootstrap_room(&info.value().ok()?));
        let prefill_result = self.rest(PREFILL_RESULT).and_then(read_prefill_result);
        let routing = self.routing.unwrap_or_default();
        let metadata = metadata.iter();
        TokenRequest {
            id,
            model: self.model.into(),
            tokens: self.token_ids,
            sampling: sampling(self.stop, self.sampling, self.output.logprobs),
            rank: DpRank(routing.dp_rank.unwrap_or_default()),
            priority: routing.priority.unwrap_or_default(),
            lora: routing.lora_name.map(Into::into),
            salt: routing.cache_salt.map(Into::into),
            context: RequestContext {
                eos_tokens: self.eos_token_ids.into(),
                card_sum: self.mdc_sum.map(Into::into),
                annotations: self.annotations.into_iter().map(Into::into).collect(),
                expected_output_tokens: routing.expected_output_tokens,
                priority_jump: routing.priority_jump,
                strict_priority: routing.strict_priority,
                pinned: routing.backend_instance_id.map(WorkerId),
                session,
                extra_args,
                metadata: metadata
                    .map(|(name, value)| (name.as_str().into(), value.as_str().into()))
                    .collect(),
                prompt_logprobs: self.output.prompt_logprobs,
                skip_special_tokens: self.output.skip_special_tokens,
                prefill: routing.prefill_worker_id.map(|worker| WorkerRank {
                    worker: WorkerId(worker),
                    rank: DpRank(routing.prefill_dp_rank.unwrap_or_default()),
                }),
                bootstrap,
                prefill_result,
            },
        }
    }

    fn session(&self) -> Option<AgentSession> {
        let context = self.rest("agent_context")?.value().ok()?;
        let text = |name| context.get(name).and_then(|value| value.text());
        Some(AgentSession {
            id: text("session_id")?.into(),
            trigger: text("input_trigger").map(Into::into),
        })
    }
}

fn owned(texts: &[Arc<str>]) -> Vec<String> {
    texts.iter().map(|text| text.as_ref().to_owned()).collect()
}

fn stop_conditions(sampling: &Sampling) -> StopConditions {
    let stops = &sampling.stop_tokens;
    StopConditions {
        max_tokens: Some(sampling.max_tokens),
        stop_token_ids_hidden: (!stops.is_empty()).then(|| stops.clone()),
        min_tokens: (sampling.min_tokens > 0).then_some(sampling.min_tokens),
        ignore_eos: sampling.ignore_eos.then_some(true),
        ..StopConditions::default()
    }
}

fn sampling_options(sampling: &Sampling) -> SamplingOptions {
    SamplingOptions {
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        seed: sampling.seed.map(u64::cast_signed),
        guided_decoding: sampling.guided.as_deref().map(json_payload),
        logit_bias: sampling.logit_bias.clone(),
        ..SamplingOptions::default()
    }
}

fn sampling(stop: StopConditions, drawn: SamplingOptions, logprobs: Option<u32>) -> Sampling {
    let stops = [
        stop.stop_token_ids,
        stop.stop_token_ids_visible,
        stop.stop_token_ids_hidden,
    ];
    Sampling {
        max_tokens: stop.max_tokens.unwrap_or(MAX_TOKENS_UNTOLD),
        min_tokens: stop.min_tokens.unwrap_or_default(),
        stop_tokens: stops.into_iter().flatten().flatten().collect(),
        ignore_eos: stop.ignore_eos.unwrap_or_default(),
        temperature: drawn.temperature,
        top_p: drawn.top_p,
        top_k: drawn.top_k,
        min_p: drawn.min_p,
        frequency_penalty: drawn.frequency_penalty,
        presence_penalty: drawn.presence_penalty,
        repetition_penalty: drawn.repetition_penalty,
        logit_bias: drawn.logit_bias,
        guided: drawn.guided_decoding.as_ref().and_then(json_text),
        logprobs,
        seed: drawn.seed.map(i64::cast_unsigned),
    }
}

fn routing_hints(request: &TokenRequest) -> RoutingHints {
    let context = &request.context;
    let pinned = context.pinned.map(|worker| worker.0);
    RoutingHints {
        backend_instance_id: pinned,
        decode_worker_id: pinned,
        prefill_worker_id: context.prefill.map(|prefill| prefill.worker.0),
        prefill_dp_rank: context.prefill.map(|prefill| prefill.rank.0),
        dp_rank: Some(request.rank.0),
        expected_output_tokens: context.expected_output_tokens,
        lora_name: request.lora.as_deref().map(str::to_owned),
        cache_salt: request.salt.as_deref().map(str::to_owned),
        priority_jump: context.priority_jump,
        strict_priority: context.strict_priority,
        priority: (request.priority != 0).then_some(request.priority),
        ..RoutingHints::default()
    }
}

fn rest(request: &TokenRequest, codec: Codec) -> Vec<(String, Payload)> {
    let context = &request.context;
    let mut rest = vec![("router_config_override".to_owned(), nil())];
    if let Some(result) = &context.prefill_result {
        rest.push((PREFILL_RESULT.to_owned(), prefill_result(result, codec)));
    }
    if let Some(room) = &context.bootstrap {
        rest.push((BOOTSTRAP_INFO.to_owned(), bootstrap_info(room, codec)));
    }
    match (&context.extra_args, &request.salt) {
        (Some(text), _) => rest.push(("extra_args".to_owned(), json_payload(text))),
        (None, Some(salt)) => rest.push(("extra_args".to_owned(), salt_args(salt))),
        (None, None) => {}
    }
    if let Some(session) = &context.session {
        let mut w = PayloadWriter::new(Codec::MessagePack);
        w.map(1 + usize::from(session.trigger.is_some()));
        w.key("session_id");
        w.text(&session.id);
        if let Some(trigger) = &session.trigger {
            w.key("input_trigger");
            w.text(trigger);
        }
        w.end_map();
        rest.push(("agent_context".to_owned(), w.finish()));
        let mut w = PayloadWriter::new(Codec::MessagePack);
        w.text(&session.id);
        rest.push(("image_cache_scope".to_owned(), w.finish()));
    }
    rest
}

fn nil() -> Payload {
    Payload::new(Codec::MessagePack, Bytes::from_static(&[0xc0]))
}

/// `{"nvext":{"cache_salt":salt}}`: engines look for it there.
fn salt_args(salt: &str) -> Payload {
    let mut w = PayloadWriter::new(Codec::MessagePack);
    w.map(1);
    w.key("nvext");
    w.map(1);
    w.key("cache_salt");
    w.text(salt);
    w.end_map();
    w.end_map();
    w.finish()
}

pub(crate) fn json_payload(text: &str) -> Payload {
    Payload::new(Codec::Json, Bytes::copy_from_slice(text.as_bytes()))
}

pub(crate) fn json_text(payload: &Payload) -> Option<Arc<str>> {
    let text = match payload.codec {
        Codec::Json => String::from_utf8(payload.bytes.to_vec()).ok()?,
        Codec::MessagePack => payload.value().ok()?.to_json().to_string(),
    };
    (text != "null").then(|| text.into())
}

impl Output {
    /// An item as it travels. `usage` is told in the first and the last one.
    #[must_use]
    pub fn of(item: TokenItem, usage: Option<Usage>) -> Self {
        let likely = &item.logprobs;
        Self {
            token_ids: item.tokens,
            log_probs: (!likely.is_empty())
                .then(|| likely.iter().map(|one| f64::from(one.logprob)).collect()),
            top_logprobs: (!likely.is_empty()).then(|| likely.iter().map(top_logprobs).collect()),
            finish_reason: item.finish.map(|finish| match finish {
                FinishReason::Stop => Finish::Stop,
                FinishReason::Length => Finish::Length,
                FinishReason::Cancelled => Finish::Cancelled,
                FinishReason::Error => Finish::Error("the engine failed".to_owned()),
            }),
            disaggregated_params: item.disaggregated_params.as_deref().map(json_payload),
            usage,
            ..Self::default()
        }
    }

    /// The item that it is for whoever reads tokens, and the engine's words if it failed.
    #[must_use]
    pub fn into_item(self) -> (TokenItem, Option<String>) {
        let tops = self.top_logprobs.unwrap_or_default();
        let likely = self.log_probs.unwrap_or_default().into_iter();
        let mut tops = tops.into_iter();
        let logprobs = likely.map(|logprob| Likelihood {
            logprob: logprob as f32,
            top: tops.next().map(top).unwrap_or_default(),
        });
        let mut failed = None;
        let finish = self.finish_reason.map(|finish| match finish {
            Finish::Eos | Finish::Stop | Finish::ContentFilter => FinishReason::Stop,
            Finish::Length => FinishReason::Length,
            Finish::Cancelled => FinishReason::Cancelled,
            Finish::Error(text) => {
                failed = Some(text);
                FinishReason::Error
            }
        });
        let item = TokenItem {
            tokens: self.token_ids,
            logprobs: logprobs.collect(),
            cached_tokens: self.usage.and_then(|usage| usage.cached_tokens),
            disaggregated_params: self.disaggregated_params.as_ref().and_then(json_text),
            finish,
        };
        (item, failed)
    }
}

fn top_logprobs(likely: &Likelihood) -> Vec<TopLogprob> {
    let ranks = 1..;
    let top = likely.top.iter().zip(ranks);
    top.map(|((token_id, logprob), rank)| TopLogprob {
        rank,
        token_id: *token_id,
        logprob: f64::from(*logprob),
    })
    .collect()
}

fn top(top: Vec<TopLogprob>) -> Vec<(u32, f32)> {
    let top = top.into_iter();
    top.map(|one| (one.token_id, one.logprob as f32)).collect()
}

#[cfg(test)]
mod tests {
    use kvasir_types::{BootstrapAddress, BootstrapRoom, PrefillResult};

    use super::*;

    fn request() -> TokenRequest {
        TokenRequest {
            id: RequestId(7),
            model: "m".into(),
            tokens: [1, 2, 70_000].into(),
            sampling: Sampling {
                max_tokens: 9,
                min_tokens: 1,
                stop_tokens: vec![5],
                temperature: Some(0.5),
                top_k: Some(-1),
                logit_bias: vec![(5, 2.0)],
                guided: Some(r#"{"regex":"a+"}"#.into()),
                logprobs: Some(2),
                seed: Some(u64::MAX),
                ..Sampling::default()
            },
            rank: DpRank(3),
            priority: -2,
            lora: Some("a".into()),
            salt: Some("s".into()),
            context: RequestContext {
                eos_tokens: [5].into(),
                card_sum: Some("00".into()),
                annotations: vec!["token_ids".into()],
                expected_output_tokens: Some(4),
                priority_jump: Some(1.5),
                strict_priority: Some(1),
                pinned: Some(WorkerId(u64::MAX)),
                session: Some(AgentSession {
                    id: "s-1".into(),
                    trigger: Some("user_message".into()),
                }),
                extra_args: Some(r#"{"nvext":{"cache_salt":"s"}}"#.into()),
                metadata: vec![("team".into(), "blue".into())],
                prompt_logprobs: Some(1),
                skip_special_tokens: Some(false),
                prefill: Some(WorkerRank {
                    worker: WorkerId(7),
                    rank: DpRank(1),
                }),
                bootstrap: Some(BootstrapRoom {
                    address: BootstrapAddress {
                        host: "10.0.0.1".into(),
                        port: 8998,
                    },
                    room: u64::MAX >> 1,
                    handoff: Some(0x88c0_eaf6_4d59_4477_b610_fa9a_dda1_c4bc),
                }),
                prefill_result: Some(PrefillResult {
                    disaggregated_params: r#"{"remote_block_ids":[[1,2]]}"#.into(),
                    cached_tokens: Some(16),
                }),
            },
        }
    }

    #[test]
    fn a_request_survives_its_journey_in_both_codecs() {
        let meta = [("team".to_owned(), "blue".to_owned())];
        let small = TokenRequest {
            sampling: Sampling::default(),
            context: RequestContext::default(),
            salt: None,
            ..request()
        };
        for codec in [Codec::Json, Codec::MessagePack] {
            for (request, meta) in [(request(), &meta[..]), (small.clone(), &[])] {
                let payload = GenerateRequest::of_as(&request, codec).encode(codec);
                let read = GenerateRequest::decode(&payload).unwrap();
                assert_eq!(read.into_token_request(request.id, meta), request);
            }
        }
    }

    #[test]
    fn an_item_survives_its_journey_in_both_codecs() {
        let item = TokenItem {
            tokens: vec![1, 2],
            logprobs: vec![
                Likelihood {
                    logprob: -0.5,
                    top: vec![(1, -0.5), (9, -2.0)],
                },
                Likelihood::default(),
            ],
            cached_tokens: Some(16),
            disaggregated_params: None,
            finish: Some(FinishReason::Length),
        };
        let usage = Usage {
            prompt_tokens: 20,
            completion_tokens: 2,
            total_tokens: 22,
            cached_tokens: Some(16),
        };
        let output = Output::of(item.clone(), Some(usage));
        let annotated = crate::Annotated::of_output(output);
        for codec in [Codec::Json, Codec::MessagePack] {
            let mut w = PayloadWriter::new(codec);
            annotated.write(&mut w);
            let read = crate::Annotated::decode(&w.finish()).unwrap();
            assert_eq!(read, annotated);
            assert_eq!(read.data.unwrap().into_item(), (item.clone(), None));
        }
        let prefilled = TokenItem {
            disaggregated_params: Some(r#"{"a":[1]}"#.into()),
            ..item
        };
        let annotated = crate::Annotated::of_output(Output::of(prefilled.clone(), Some(usage)));
        for codec in [Codec::Json, Codec::MessagePack] {
            let mut w = PayloadWriter::new(codec);
            annotated.write(&mut w);
            let read = crate::Annotated::decode(&w.finish()).unwrap();
            assert_eq!(read.data.unwrap().into_item(), (prefilled.clone(), None));
        }
    }
}
