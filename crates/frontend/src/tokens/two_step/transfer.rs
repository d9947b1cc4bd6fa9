//! What the worker of an answer is told of a prompt that another has computed, and where it may be.

use kvasir_router::Constraints;
use kvasir_types::{BootstrapAddress, BootstrapRoom, PrefillResult, TransferRule, WorkerRank};

use crate::request::two_step;

/// Where a prompt is that another worker has computed, or computes.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    /// Who.
    pub(crate) prefill: WorkerRank,
    /// Where the two meet.
    pub(crate) bootstrap: Option<BootstrapRoom>,
    /// What it said.
    pub(crate) result: Option<PrefillResult>,
    /// Who may take it over, if not everybody.
    pub(crate) rule: Option<TransferRule>,
}

impl Transfer {
    /// Adds to where the answer may be computed, beside what its client says.
    pub(crate) fn constrain(&self, constraints: &mut Constraints) {
        two_step::constrain(self.rule.as_ref(), constraints);
    }
}

/// Whether what an engine says of its memory can be handed on: TensorRT-LLM says by a null id that it has kept nothing.
pub(super) fn is_usable(disaggregated_params: &str) -> bool {
    const ID: &str = "ctx_request_id";
    if !disaggregated_params.contains(ID) {
        return true;
    }
    let params: Result<serde_json::Value, _> = serde_json::from_str(disaggregated_params);
    params.is_ok_and(|params| !params.get(ID).is_some_and(serde_json::Value::is_null))
}

/// The meeting that an engine puts into what it says of its memory, if it does.
pub(super) fn bootstrap_in(disaggregated_params: &str) -> Option<BootstrapRoom> {
    let params: serde_json::Value = serde_json::from_str(disaggregated_params).ok()?;
    let port = params.get("bootstrap_port")?.as_u64()?;
    Some(BootstrapRoom {
        address: BootstrapAddress {
            host: params.get("bootstrap_host")?.as_str()?.into(),
            port: u16::try_from(port).ok()?,
        },
        room: params.get("bootstrap_room")?.as_u64()?,
        handoff: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_id_says_that_nothing_was_kept() {
        assert!(is_usable(r#"{"ctx_request_id":7}"#) && is_usable(r#"{"a":null}"#));
        assert!(!is_usable(r#"{"ctx_request_id":null}"#));
    }

    #[test]
    fn a_meeting_is_found_in_what_an_engine_says() {
        let said = r#"{"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":7,"x":[1]}"#;
        let room = bootstrap_in(said).unwrap();
        assert_eq!((&*room.address.host, room.address.port), ("h", 8998));
        assert_eq!((room.room, room.handoff), (7, None));
        for other in [
            r#""dummy""#,
            "{",
            "null",
            r#"{"bootstrap_host":"h"}"#,
            r#"{"bootstrap_host":"h","bootstrap_port":70000,"bootstrap_room":1}"#,
        ] {
            assert_eq!(bootstrap_in(other), None, "{other}");
        }
    }
}
