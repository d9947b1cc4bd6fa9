//! What a request says about where it goes, as it travels.

use bytes::Bytes;
use kvasir_msgpack::Reader;

use crate::read::{self, Result, map, option};
use crate::request::{keep, write_rest};
use crate::{Payload, PayloadWriter};

/// What a request says about where it goes. Only what is set travels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingHints {
    /// The worker that the client asked for.
    pub backend_instance_id: Option<u64>,
    /// The worker of the prompt.
    pub prefill_worker_id: Option<u64>,
    /// The worker of the answer.
    pub decode_worker_id: Option<u64>,
    /// The data-parallel rank.
    pub dp_rank: Option<u32>,
    /// The rank of the prompt.
    pub prefill_dp_rank: Option<u32>,
    /// How many tokens the client expects.
    pub expected_output_tokens: Option<u32>,
    /// LoRA adapter.
    pub lora_name: Option<String>,
    /// Cache namespace.
    pub cache_salt: Option<String>,
    /// Seconds by which it jumps the queue.
    pub priority_jump: Option<f64>,
    /// Goes before everything of a lower number.
    pub strict_priority: Option<u32>,
    /// Larger is more urgent.
    pub priority: Option<i32>,
    /// All other members.
    pub rest: Vec<(String, Payload)>,
}

impl RoutingHints {
    pub(crate) fn read(reader: &mut Reader<'_>, all: &Bytes) -> Result<Self> {
        let mut hints = Self::default();
        map(reader, |reader, name| {
            match name {
                b"backend_instance_id" => {
                    hints.backend_instance_id = read::u64(reader, "backend_instance_id")?;
                }
                b"prefill_worker_id" => {
                    hints.prefill_worker_id = read::u64(reader, "prefill_worker_id")?;
                }
                b"decode_worker_id" => {
                    hints.decode_worker_id = read::u64(reader, "decode_worker_id")?;
                }
                b"dp_rank" => hints.dp_rank = read::u32(reader, "dp_rank")?,
                b"prefill_dp_rank" => hints.prefill_dp_rank = read::u32(reader, "dp_rank")?,
                b"expected_output_tokens" => {
                    hints.expected_output_tokens = read::u32(reader, "expected_output_tokens")?;
                }
                b"lora_name" => hints.lora_name = read::text(reader)?,
                b"cache_salt" => hints.cache_salt = read::text(reader)?,
                b"priority_jump" => hints.priority_jump = option(reader, Reader::float)?,
                b"strict_priority" => {
                    hints.strict_priority = read::u32(reader, "strict_priority")?;
                }
                b"priority" => hints.priority = read::i32(reader, "priority")?,
                _ => keep(&mut hints.rest, reader, name, all)?,
            }
            Ok(())
        })?;
        Ok(hints)
    }

    pub(crate) fn write(&self, w: &mut PayloadWriter) {
        let numbers = [
            ("backend_instance_id", self.backend_instance_id),
            ("prefill_worker_id", self.prefill_worker_id),
            ("decode_worker_id", self.decode_worker_id),
            ("dp_rank", self.dp_rank.map(u64::from)),
            ("prefill_dp_rank", self.prefill_dp_rank.map(u64::from)),
            (
                "expected_output_tokens",
                self.expected_output_tokens.map(u64::from),
            ),
        ];
        let texts = [
            ("lora_name", &self.lora_name),
            ("cache_salt", &self.cache_salt),
        ];
        let set = numbers.iter().filter(|(_, value)| value.is_some()).count()
            + texts.iter().filter(|(_, value)| value.is_some()).count()
            + usize::from(self.priority_jump.is_some())
            + usize::from(self.strict_priority.is_some())
            + usize::from(self.priority.is_some());
        w.map(set + self.rest.len());
        for (name, value) in numbers {
            if let Some(value) = value {
                w.key(name);
                w.uint(value);
            }
        }
        for (name, value) in texts {
            if let Some(value) = value {
                w.key(name);
                w.text(value);
            }
        }
        if let Some(jump) = self.priority_jump {
            w.key("priority_jump");
            w.float(jump);
        }
        if let Some(tier) = self.strict_priority {
            w.key("strict_priority");
            w.uint(u64::from(tier));
        }
        if let Some(priority) = self.priority {
            w.key("priority");
            w.sint(i64::from(priority));
        }
        write_rest(w, &self.rest);
        w.end_map();
    }
}
