//! Which part of requests a mock engine computes, and how the parts come together.
//!
//! An engine that computes prompts answers with one token and says where the prompt is; one that answers takes the prompt over
//! as computed, after it has met the other where the request says so.

use std::sync::Arc;
use std::time::Duration;

use kvasir_transport::{PlaneError, TokenSink, TokenStream};
use kvasir_types::{BootstrapRoom, TokenRequest};
use serde_json::json;

use super::meeting::{MeetingPoint, meet};
use crate::Worker;

/// The part of requests that a mock engine computes.
#[derive(Clone, Debug, Default)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// The prompt.
    Prefill(PrefillPart),
    /// The answer, where another has computed the prompt; else all of it.
    Decode,
}

/// How a mock engine hands prompts over.
#[derive(Clone, Debug, Default)]
pub struct PrefillPart {
    /// How long a token of the prompt takes.
    pub per_token: Duration,
    /// Where others meet it; none: it says in its answer where the prompt is.
    pub meeting: Option<Arc<MeetingPoint>>,
}

/// Whether the prompt of a request comes from elsewhere.
pub(super) fn is_transferred(request: &TokenRequest) -> bool {
    request.context.prefill_result.is_some() || request.context.bootstrap.is_some()
}

/// Waits for the prompt where the request says, and then answers it.
pub(super) async fn answer_after_meeting(
    worker: Worker,
    room: BootstrapRoom,
    request: TokenRequest,
    sink: TokenSink,
) {
    let met = tokio::select! {
        met = meet(&room) => met,
        () = sink.closed() => return,
    };
    match met {
        Ok(()) => worker.submit_transferred(&request, sink),
        Err(error) => {
            let at = format!("{}:{}", room.address.host, room.address.port);
            sink.fail(PlaneError::Engine(format!(
                "the prompt did not come from {at}: {error}"
            )));
        }
    }
}

/// Passes on the one token of a prompt, after the time that handing it over takes.
pub(super) async fn prefill(
    part: PrefillPart,
    request: TokenRequest,
    mut stream: TokenStream,
    sink: TokenSink,
) {
    let room = request.context.bootstrap.as_ref().map(|room| room.room);
    let open = match (&part.meeting, room) {
        (Some(meeting), Some(room)) => match meeting.open(room) {
            Some(open) => Some(open),
            None => return sink.fail(PlaneError::Engine("too many meetings".to_owned())),
        },
        _ => None,
    };
    let tokens = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
    let mut said = false;
    loop {
        let item = tokio::select! {
            item = stream.next() => item,
            () = sink.closed() => return,
        };
        let mut item = match item {
            Some(Ok(item)) => item,
            Some(Err(error)) => return sink.fail(error),
            None => return,
        };
        if !said {
            said = true;
            if !part.per_token.is_zero() {
                tokio::time::sleep(part.per_token * tokens).await;
            }
            let params =
                json!({"kvasir_mock": {"request": request.id.to_string(), "tokens": tokens}});
            item.disaggregated_params = Some(params.to_string().into());
            if let Some(open) = &open {
                open.ready();
            }
        }
        if !sink.push(item) {
            return;
        }
    }
}
