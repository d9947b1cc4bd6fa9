//! How two workers that share a request find each other, as it travels.
//!
//! Two members of a request say it: `bootstrap_info` (they meet) and `prefill_result` (one says where the prompt is). What an
//! engine says of its own memory is handed on and not read.

use std::sync::Arc;

use kvasir_msgpack::Value;
use kvasir_types::{BootstrapAddress, BootstrapRoom, Codec, PrefillResult, RequestId};

use crate::tokens::{json_payload, json_text};
use crate::{Payload, PayloadWriter};

/// The member of a request that says where two workers meet.
pub(crate) const BOOTSTRAP_INFO: &str = "bootstrap_info";
/// The member of a request that says what a prefill worker said.
pub(crate) const PREFILL_RESULT: &str = "prefill_result";

/// A meeting as it travels. The id of the meeting is bytes in MessagePack and text in JSON.
pub(crate) fn bootstrap_info(room: &BootstrapRoom, codec: Codec) -> Payload {
    let mut pairs = vec![
        (
            "bootstrap_host".to_owned(),
            Value::Text(room.address.host.as_ref().to_owned()),
        ),
        (
            "bootstrap_port".to_owned(),
            Value::Uint(room.address.port.into()),
        ),
        ("bootstrap_room".to_owned(), Value::Uint(room.room)),
    ];
    if let Some(handoff) = room.handoff {
        let id = match codec {
            Codec::MessagePack => Value::Bytes(handoff.to_be_bytes().to_vec()),
            Codec::Json => Value::Text(RequestId(handoff).to_string()),
        };
        pairs.push(("handoff_id".to_owned(), id));
    }
    Payload::of_value(codec, &Value::Map(pairs))
}

/// A meeting, read from a member of a request.
pub(crate) fn bootstrap_room(info: &Value) -> Option<BootstrapRoom> {
    let port = info.get("bootstrap_port")?.uint()?;
    Some(BootstrapRoom {
        address: BootstrapAddress {
            host: info.get("bootstrap_host")?.text()?.into(),
            port: u16::try_from(port).ok()?,
        },
        room: info.get("bootstrap_room")?.uint()?,
        handoff: info.get("handoff_id").and_then(uuid),
    })
}

fn uuid(value: &Value) -> Option<u128> {
    match value {
        Value::Bytes(bytes) => Some(u128::from_be_bytes(bytes.as_slice().try_into().ok()?)),
        Value::Text(text) => RequestId::parse(text).map(|id| id.0),
        // Bytes that were written as JSON by who did not know what they are.
        Value::List(items) => {
            let bytes = items.iter().map(|item| u8::try_from(item.uint()?).ok());
            let bytes: Option<Vec<u8>> = bytes.collect();
            Some(u128::from_be_bytes(bytes?.try_into().ok()?))
        }
        _ => None,
    }
}

pub(crate) fn prefill_result(result: &PrefillResult, codec: Codec) -> Payload {
    let mut w = PayloadWriter::new(codec);
    w.map(1 + usize::from(result.cached_tokens.is_some()));
    w.key("disaggregated_params");
    w.payload(&json_payload(&result.disaggregated_params));
    if let Some(cached) = result.cached_tokens {
        w.key("prompt_tokens_details");
        w.map(2);
        w.key("audio_tokens");
        w.nil();
        w.key("cached_tokens");
        w.uint(cached.into());
        w.end_map();
    }
    w.end_map();
    w.finish()
}

pub(crate) fn read_prefill_result(payload: &Payload) -> Option<PrefillResult> {
    let value = payload.value().ok()?;
    let params = value.get("disaggregated_params")?;
    let params = json_text(&Payload::of_value(Codec::MessagePack, params));
    let details = value.get("prompt_tokens_details");
    let cached = details.and_then(|d| d.get("cached_tokens")?.uint());
    Some(PrefillResult {
        disaggregated_params: params.unwrap_or_else(|| Arc::from("null")),
        cached_tokens: cached.and_then(|cached| u32::try_from(cached).ok()),
    })
}
