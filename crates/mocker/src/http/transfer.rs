//! How a mock server hands prompts to others and takes them over: in vLLM's words or in SGLang's.
//!
//! Answers one question: what does a request say about where its prompt is, and what follows if that is wrong? As recorded of vLLM 0.32 with NIXL
//! (`testdata/vllm-disagg`): hardly anything is checked, and some objects end the engine.
//!
//! What always holds: only a server that was started for it looks at these fields.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use kvasir_types::{BootstrapAddress, BootstrapRoom};
use serde_json::{Value, json};

use super::ask::{Ask, Fields};
use super::error::{Refusal, text};
use super::server::Mock;
use super::side_channel::{Fetch, SideChannel};
use crate::plane::{MeetingPoint, OpenRoom, meet};

/// The host by which SGLang is told that nobody is to be met.
const NOBODY: &str = "2.2.2.2";

/// The part of requests that a server computes, and whose words it speaks about it.
#[derive(Clone, Debug, Default)]
pub enum HttpPart {
    /// All of it, as a server without a connector.
    #[default]
    Whole,
    /// vLLM with a KV connector: either part, as each request says.
    Connector {
        /// Where its prompts are fetched.
        side: Arc<SideChannel>,
        /// How long fetching a token of a prompt takes.
        per_token: Duration,
    },
    /// SGLang in mode prefill.
    SglangPrefill {
        /// Where others meet it.
        meeting: Arc<MeetingPoint>,
        /// How long handing over a token of a prompt takes.
        per_token: Duration,
    },
    /// SGLang in mode decode: it computes no prompts.
    SglangDecode,
}

impl HttpPart {
    /// Its vLLM connector, if it has one.
    pub(crate) fn side(&self) -> Option<&Arc<SideChannel>> {
        match self {
            Self::Connector { side, .. } => Some(side),
            _ => None,
        }
    }

    /// What an SGLang server says of its settings.
    pub(crate) fn server_info(&self, mock: &Mock) -> Option<Value> {
        let (mode, port) = match self {
            Self::SglangPrefill { meeting, .. } => ("prefill", Some(meeting.address().port())),
            Self::SglangDecode => ("decode", None),
            Self::Whole | Self::Connector { .. } => return None,
        };
        let options = mock.worker.options();
        let engine = &options.engine;
        let mut info = json!({
            "model_path": mock.root,
            "served_model_name": &*mock.model,
            "version": "0.5.23",
            "page_size": engine.block_size,
            "dp_size": options.ranks,
            "disable_radix_cache": !engine.prefix_caching,
            "max_total_num_tokens": u64::from(engine.num_blocks) * u64::from(engine.block_size),
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "mock",
        });
        if let Some(port) = port {
            info["disaggregation_bootstrap_port"] = port.into();
        }
        Some(info)
    }
}

/// What a request says about its prompt.
#[derive(Clone, Debug, Default)]
pub(crate) enum Wish {
    /// Nothing.
    #[default]
    Nothing,
    /// It is computed here and kept for another.
    Keep,
    /// Another keeps it (vLLM).
    Fetch(FetchParams),
    /// The two meet (SGLang), in one room for each answer.
    Meet(Vec<BootstrapRoom>),
}

/// Where a prompt is, as a request says: nothing of it need be there.
#[derive(Clone, Debug, Default)]
pub(crate) struct FetchParams {
    blocks: Option<usize>,
    engine_id: Option<String>,
    request_id: String,
    host: String,
    port: u16,
}

impl Wish {
    /// Reads it.
    pub(crate) fn read(mock: &Mock, fields: &Fields, answers: usize) -> Result<Self, Refusal> {
        match &mock.part {
            HttpPart::Whole => Ok(Self::Nothing),
            HttpPart::Connector { .. } => connector(fields),
            HttpPart::SglangPrefill { .. } | HttpPart::SglangDecode => sglang(fields, answers),
        }
    }
}

fn connector(fields: &Fields) -> Result<Wish, Refusal> {
    let Some(params) = fields.get("kv_transfer_params") else {
        return Ok(Wish::Nothing);
    };
    let Value::Object(params) = params else {
        let params = params.to_string().replace('"', "'");
        let details = format!(
            "{{'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': {params}}}"
        );
        return Err(Refusal::form(&details, Some("body.kv_transfer_params")));
    };
    let is = |name: &str| params.get(name) == Some(&Value::Bool(true));
    let word = |name: &str| params.get(name).and_then(Value::as_str).map(str::to_owned);
    if is("do_remote_prefill") {
        let blocks = params.get("remote_block_ids").and_then(Value::as_array);
        let first = blocks.map(|groups| groups.first().and_then(Value::as_array));
        let port = params.get("remote_port").and_then(Value::as_u64);
        return Ok(Wish::Fetch(FetchParams {
            blocks: first.map(|ids| ids.map_or(0, Vec::len)),
            engine_id: word("remote_engine_id"),
            request_id: word("remote_request_id").unwrap_or_default(),
            host: word("remote_host").unwrap_or_default(),
            port: port.and_then(|port| port.try_into().ok()).unwrap_or(0),
        }));
    }
    Ok(match is("do_remote_decode") {
        true => Wish::Keep,
        false => Wish::Nothing,
    })
}

fn sglang(fields: &Fields, answers: usize) -> Result<Wish, Refusal> {
    let missing = || {
        let message = "Disaggregated request received without bootstrap room id.";
        Refusal::bad(message, Some("bootstrap_room"))
    };
    let of = |name: &str, at: usize| {
        let value = fields.get(name)?;
        Some(match value {
            Value::Array(list) => (list.get(at)?, 0),
            one => (one, at),
        })
    };
    let room = |at: usize| {
        let (room, beyond) = of("bootstrap_room", at)?;
        let (host, _) = of("bootstrap_host", at)?;
        let port = of("bootstrap_port", at).and_then(|(port, _)| port.as_u64());
        Some(BootstrapRoom {
            address: BootstrapAddress {
                host: host.as_str()?.trim_matches(['[', ']']).into(),
                port: u16::try_from(port.unwrap_or(0)).ok()?,
            },
            room: room.as_u64()?.checked_add(beyond as u64)?,
            handoff: None,
        })
    };
    let rooms: Option<Vec<BootstrapRoom>> = (0..answers).map(room).collect();
    Ok(Wish::Meet(rooms.ok_or_else(missing)?))
}

/// What became of the prompt before the answer begins.
pub(crate) enum Arrangement {
    /// It is computed here.
    Here,
    /// It is computed here, and handed over in these rooms.
    HandedOver(Vec<OpenRoom>),
    /// Another has computed it.
    TakenOver,
}

/// Takes the prompt over, or gets ready to hand it over. An engine that dies of what it is told answers nothing any more.
pub(crate) async fn arrange(mock: &Mock, ask: &Ask) -> Result<Arrangement, Refusal> {
    let broken = || Refusal::server(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error");
    match (&ask.wish, &mock.part) {
        (Wish::Fetch(params), HttpPart::Connector { side, per_token }) => {
            let tokens = ask.prompts.iter().map(|p| p.len()).max().unwrap_or(0);
            let block = mock.worker.options().engine.block_size.max(1) as usize;
            let blocks = params.blocks.unwrap_or(0);
            if blocks < tokens.div_ceil(block) {
                mock.die();
                let message =
                    "EngineCore encountered an issue. See stack trace (above) for the root cause.";
                return Err(Refusal::server(StatusCode::INTERNAL_SERVER_ERROR, message));
            }
            let Some(engine_id) = params.engine_id.clone() else {
                // It dies when its client gives up.
                let _dies = DiesWith(mock);
                return std::future::pending().await;
            };
            let wanted = Fetch {
                engine_id,
                request_id: params.request_id.clone(),
            };
            // A client that leaves meanwhile does not stop it: who is told of a prompt fetches it, or says that nobody will.
            let (side, params) = (Arc::clone(side), params.clone());
            let fetch = async move {
                let at = (params.host.as_str(), params.port);
                side.fetch(at, &wanted).await
            };
            let fetched = mock.tasks.spawn(fetch).await;
            if !matches!(fetched, Ok(Some(Ok(())))) {
                return Err(broken());
            }
            travel(*per_token, tokens).await;
            Ok(Arrangement::TakenOver)
        }
        (Wish::Meet(rooms), HttpPart::SglangPrefill { meeting, .. }) => {
            let is_met = |room: &&BootstrapRoom| &*room.address.host != NOBODY;
            let rooms = rooms.iter().filter(is_met);
            let open: Option<Vec<OpenRoom>> = rooms.map(|room| meeting.open(room.room)).collect();
            open.map(Arrangement::HandedOver).ok_or_else(broken)
        }
        (Wish::Meet(rooms), _) => {
            for room in rooms.iter().filter(|room| &*room.address.host != NOBODY) {
                meet(room).await.map_err(|_| broken())?;
            }
            Ok(Arrangement::TakenOver)
        }
        _ => Ok(Arrangement::Here),
    }
}

/// Ends its engine when it is dropped.
struct DiesWith<'a>(&'a Mock);

impl Drop for DiesWith<'_> {
    fn drop(&mut self) {
        self.0.die();
    }
}

/// Hands a computed prompt over to who waits for it.
pub(crate) async fn hand_over(mock: &Mock, ask: &Ask, rooms: &[OpenRoom]) {
    if let HttpPart::SglangPrefill { per_token, .. } = &mock.part {
        let tokens: usize = ask.prompts.iter().map(|p| p.len()).sum();
        travel(*per_token, tokens).await;
    }
    for room in rooms {
        room.ready();
    }
}

/// Waits as long as so many tokens of a prompt are on their way.
async fn travel(per_token: Duration, tokens: usize) {
    // A timer takes a millisecond even where it is to take nothing.
    if !per_token.is_zero() {
        tokio::time::sleep(per_token * u32::try_from(tokens).unwrap_or(u32::MAX)).await;
    }
}

/// Keeps a computed prompt for another, if the request asks for that; what its answer says of it.
pub(crate) fn keep(mock: &Mock, ask: &Ask, id: &str, cached: u64) -> Option<String> {
    let (Wish::Keep, Some(side)) = (&ask.wish, mock.part.side()) else {
        return None;
    };
    // As vLLM does, it says where the first prompt is and keeps them all.
    let tokens = ask.prompts.first().map_or(0, |p| p.len());
    let block = mock.worker.options().engine.block_size.max(1) as usize;
    let blocks = u32::try_from(tokens.div_ceil(block)).unwrap_or(u32::MAX);
    let mut first = None;
    for _ in &ask.prompts {
        let suffix: String = mock.next_name().chars().take(8).collect();
        let request_id = format!("{id}-{suffix}");
        side.keep(&request_id, blocks);
        first.get_or_insert(request_id);
    }
    let list: Vec<String> = (1..=blocks).map(|block| block.to_string()).collect();
    let at = side.address();
    Some(format!(
        "{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[[{}]],\"remote_engine_id\":{},\"remote_request_id\":{},\"remote_host\":{},\"remote_port\":{},\"tp_size\":1,\"dcp_size\":1,\"pp_size\":1,\"remote_num_tokens\":{tokens},\"remote_blocks_expiry_time\":null,\"transfer_mode\":\"pull\",\"remote_prefill_cached_tokens\":{cached}}}",
        list.join(","),
        text(side.engine_id()),
        text(&first.unwrap_or_default()),
        text(&at.ip().to_string()),
        at.port()
    ))
}
