//! The `nvext` of an answer.
//!
//! Answers one question: what did the client ask to be told, and how is it written? Only what
//! `extra_fields` named is written; an object with nothing in it is left out.

use bytes::BytesMut;

use crate::json::{Fields, JsonText, write_float, write_ints};

/// What a client wants in the answer's `nvext`. Unknown names are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// Which workers served it; on every chunk.
    pub worker_id: bool,
    /// How long each part took; on the last chunk.
    pub timing: bool,
    /// The prompt's tokens, for a query that runs nothing.
    pub token_ids: bool,
    /// The answer's tokens.
    pub completion_token_ids: bool,
    /// Which stop ended it.
    pub stop_reason: bool,
    /// What the engine added of its own.
    pub engine_data: bool,
    /// Experts by layer, where the engine says.
    pub routed_experts: bool,
    /// Log probabilities of the prompt, where the engine says.
    pub prompt_logprobs: bool,
}

impl Extra {
    pub(crate) fn from_names(names: &[String]) -> Self {
        let has = |name: &str| names.iter().any(|n| n == name);
        Self {
            worker_id: has("worker_id"),
            timing: has("timing"),
            token_ids: has("token_ids"),
            completion_token_ids: has("completion_token_ids"),
            stop_reason: has("stop_reason"),
            engine_data: has("engine_data"),
            routed_experts: has("routed_experts"),
            prompt_logprobs: has("prompt_logprobs"),
        }
    }

    /// Whether something is wanted that only the engine's own answer can tell.
    #[must_use]
    pub fn is_of_engine(&self) -> bool {
        self.completion_token_ids || self.stop_reason || self.routed_experts || self.prompt_logprobs
    }
}

/// The `nvext` of an answer or of one chunk; absent parts are not written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseNvext {
    /// Who served it.
    pub worker_id: Option<WorkerIds>,
    /// The prompt's tokens.
    pub token_ids: Option<Vec<u32>>,
    /// The tokens of the answer, or of this chunk.
    pub completion_token_ids: Option<Vec<u32>>,
    /// How long each part took.
    pub timing: Option<Timing>,
    /// The stop string or token that ended it.
    pub stop_reason: Option<JsonText>,
    /// Experts by layer.
    pub routed_experts: Option<JsonText>,
    /// Log probabilities of the prompt.
    pub prompt_logprobs: Option<JsonText>,
    /// What the engine added.
    pub engine_data: Option<JsonText>,
}

/// Who served a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerIds {
    /// Worker of the prompt.
    pub prefill_worker_id: Option<u64>,
    /// Its rank.
    pub prefill_dp_rank: Option<u32>,
    /// Worker of the answer.
    pub decode_worker_id: Option<u64>,
    /// Its rank.
    pub decode_dp_rank: Option<u32>,
}

impl WorkerIds {
    /// One worker and rank for both parts.
    #[must_use]
    pub fn aggregated(worker: u64, rank: u32) -> Self {
        Self {
            prefill_worker_id: Some(worker),
            prefill_dp_rank: Some(rank),
            decode_worker_id: Some(worker),
            decode_dp_rank: Some(rank),
        }
    }
}

/// How long each part of a request took, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Arrival, Unix milliseconds.
    pub request_received_ms: u64,
    /// From arrival to dispatch.
    pub prefill_wait_time_ms: Option<f64>,
    /// From dispatch to the first token.
    pub prefill_time_ms: Option<f64>,
    /// From arrival to the first token.
    pub ttft_ms: Option<f64>,
    /// From arrival to the end.
    pub total_time_ms: Option<f64>,
    /// Share of the prompt's blocks that the worker had, 0 to 1.
    pub kv_hit_rate: Option<f64>,
    /// Requests that waited in the router when this one came.
    pub router_queue_depth: Option<u64>,
    /// Expected time to move the cache between workers.
    pub kv_transfer_estimated_latency_ms: Option<f64>,
}

impl ResponseNvext {
    /// Whether nothing would be written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A JSON object's text with this put in as its last field; as it was if it is no object or there is
    /// nothing to put in.
    #[must_use]
    pub fn put_into(&self, object: &[u8]) -> BytesMut {
        let mut out = BytesMut::with_capacity(object.len() + 256);
        match object.trim_ascii_end().strip_suffix(b"}") {
            Some(open) if !self.is_empty() && open.trim_ascii() != b"{" => {
                out.extend_from_slice(open);
                self.write_field(&mut out);
                out.extend_from_slice(b"}");
            }
            _ => out.extend_from_slice(object),
        }
        out
    }

    /// Appends `,"nvext":{…}`, or nothing.
    pub(crate) fn write_field(&self, out: &mut BytesMut) {
        if self.is_empty() {
            return;
        }
        out.extend_from_slice(b",\"nvext\":");
        let mut fields = Fields::open(out);
        if let Some(ids) = &self.worker_id {
            ids.write(fields.key("worker_id"));
        }
        if let Some(ids) = &self.token_ids {
            write_ints(fields.key("token_ids"), ids);
        }
        if let Some(ids) = &self.completion_token_ids {
            write_ints(fields.key("completion_token_ids"), ids);
        }
        if let Some(timing) = &self.timing {
            timing.write(fields.key("timing"));
        }
        let engines = [
            ("stop_reason", &self.stop_reason),
            ("routed_experts", &self.routed_experts),
            ("prompt_logprobs", &self.prompt_logprobs),
            ("engine_data", &self.engine_data),
        ];
        for (key, value) in engines {
            if let Some(value) = value {
                fields.raw(key, value.as_str());
            }
        }
        fields.close();
    }
}

impl WorkerIds {
    fn write(&self, out: &mut BytesMut) {
        let mut fields = Fields::open(out);
        fields.opt_int("prefill_worker_id", self.prefill_worker_id);
        fields.opt_int("prefill_dp_rank", self.prefill_dp_rank);
        fields.opt_int("decode_worker_id", self.decode_worker_id);
        fields.opt_int("decode_dp_rank", self.decode_dp_rank);
        fields.close();
    }
}

impl Timing {
    fn write(&self, out: &mut BytesMut) {
        let mut fields = Fields::open(out);
        fields.int("request_received_ms", self.request_received_ms);
        fields.opt_float("prefill_wait_time_ms", self.prefill_wait_time_ms);
        fields.opt_float("prefill_time_ms", self.prefill_time_ms);
        fields.opt_float("ttft_ms", self.ttft_ms);
        fields.opt_float("total_time_ms", self.total_time_ms);
        if let Some(rate) = self.kv_hit_rate {
            write_float(fields.key("kv_hit_rate"), rate);
        }
        fields.opt_int("router_queue_depth", self.router_queue_depth);
        fields.opt_float(
            "kv_transfer_estimated_latency_ms",
            self.kv_transfer_estimated_latency_ms,
        );
        fields.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_put_into_an_object_and_into_nothing_else() {
        let nvext = ResponseNvext {
            worker_id: Some(WorkerIds::aggregated(7, 0)),
            ..ResponseNvext::default()
        };
        let put = |object: &str| String::from_utf8(nvext.put_into(object.as_bytes()).to_vec());
        let whole = put("{\"a\":{\"b\":1}} \n").unwrap();
        assert!(
            whole.starts_with("{\"a\":{\"b\":1},\"nvext\":{\"worker_id\":{"),
            "{whole}"
        );
        assert!(
            serde_json::from_str::<serde_json::Value>(&whole).is_ok(),
            "{whole}"
        );
        for other in ["[1]", "{}", "", "[DONE]"] {
            assert_eq!(put(other).unwrap(), other);
        }
        let nothing = ResponseNvext::default().put_into(b"{\"a\":1}");
        assert_eq!(&nothing[..], b"{\"a\":1}");
    }
}
