//! Stream events that tell of a whole call of a tool, or of all reasoning, as soon as it is complete.
//!
//! Answers one question: what may a client begin with before the answer has ended? The deltas carry the same; these events stand before
//! the delta with which it became complete (`--enable-streaming-tool-dispatch`, `--enable-streaming-reasoning-dispatch`).
//!
//! What always holds: each call and each piece of reasoning is told of once; one of more than [`KEPT_BYTES_MAX`] bytes is not told of.

use bytes::{BufMut, BytesMut};
use kvasir_openai::AnswerParts;
use serde_json::{Value, json};

use crate::StreamDispatch;

/// Bytes of a call's arguments, or of reasoning, that are kept for its event.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// What the choices of an answer have said and was not told of.
#[derive(Debug)]
pub(super) struct Dispatcher {
    events: StreamDispatch,
    choices: Vec<Untold>,
}

#[derive(Clone, Debug, Default)]
struct Untold {
    reasoning: String,
    /// Calls that are not complete: number, id, name, arguments.
    calls: Vec<(u32, String, String, String)>,
}

impl Dispatcher {
    /// None, if no events are sent.
    pub(super) fn new(events: StreamDispatch, choices: usize) -> Option<Self> {
        (events.tool_calls || events.reasoning).then(|| Self {
            events,
            choices: vec![Untold::default(); choices],
        })
    }

    /// New parts of a choice; `ended`: its last ones. Events go to `out`.
    pub(super) fn note(
        &mut self,
        index: u32,
        parts: &AnswerParts,
        ended: bool,
        out: &mut BytesMut,
    ) {
        let Some(untold) = self.choices.get_mut(index as usize) else {
            return;
        };
        // In the order in which models write them.
        if self.events.reasoning {
            untold.reasoning(index, parts, ended, out);
        }
        if self.events.tool_calls {
            untold.calls(index, parts, ended, out);
        }
    }
}

impl Untold {
    fn calls(&mut self, choice: u32, parts: &AnswerParts, ended: bool, out: &mut BytesMut) {
        for part in &parts.calls {
            if let Some((id, name)) = &part.head {
                let call = (part.index, id.clone(), name.clone(), String::new());
                self.calls.push(call);
            }
            if let Some(call) = self.calls.iter_mut().find(|call| call.0 == part.index) {
                call.3.push_str(&part.arguments);
            }
        }
        let is_over = |index: u32| ended || parts.ended_calls.contains(&index);
        self.calls.retain(|(index, id, name, arguments)| {
            if arguments.len() > KEPT_BYTES_MAX {
                return false;
            }
            let is_over = is_over(*index);
            if is_over {
                let function = json!({"name": name, "arguments": arguments});
                let call =
                    json!({"index": index, "id": id, "type": "function", "function": function});
                let told = json!({"choice_index": choice, "tool_call": call});
                write_event("tool_call_dispatch", &told, out);
            }
            !is_over
        });
    }

    fn reasoning(&mut self, choice: u32, parts: &AnswerParts, ended: bool, out: &mut BytesMut) {
        if self.reasoning.len() <= KEPT_BYTES_MAX {
            self.reasoning.push_str(&parts.reasoning);
        }
        let goes_on = parts.content.is_empty() && parts.calls.is_empty() && !ended;
        if self.reasoning.is_empty() || goes_on {
            return;
        }
        let reasoning = std::mem::take(&mut self.reasoning);
        if reasoning.len() <= KEPT_BYTES_MAX {
            let told = json!({"index": choice, "reasoning_content": reasoning});
            write_event("reasoning_dispatch", &told, out);
        }
    }
}

fn write_event(name: &str, data: &Value, out: &mut BytesMut) {
    out.put_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
}
