//! Which path is answered by what.

use std::sync::Arc;

use bytes::Bytes;
use http::header::ALLOW;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body::Body;
use kvasir_openai::Scan;
use serde_json::{Value, json};

use super::ask::{Fields, chat_prompt};
use super::body::{self, Reply};
use super::error::Refusal;
use super::server::{Hangup, Mock};
use super::{control, generate, metrics};

/// Paths and the one method each has.
const ROUTES: [(&str, Method); 12] = [
    ("/v1/chat/completions", Method::POST),
    ("/v1/completions", Method::POST),
    ("/tokenize", Method::POST),
    ("/detokenize", Method::POST),
    ("/reset_prefix_cache", Method::POST),
    ("/v1/models", Method::GET),
    ("/health", Method::GET),
    ("/ping", Method::GET),
    ("/version", Method::GET),
    ("/load", Method::GET),
    ("/metrics", Method::GET),
    ("/kv_event_sources", Method::GET),
];

/// Answers any request.
pub(crate) async fn route<B>(mock: Arc<Mock>, request: Request<B>) -> Result<Reply, Hangup>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (parts, incoming) = request.into_parts();
    let path = parts.uri.path();
    let known = ROUTES.iter().find(|(known, _)| *known == path);
    if let Some((_, method)) = known
        && *method != parts.method
    {
        return Ok(wrong_method(method));
    }
    let body = match body::read(incoming).await {
        Ok(body) => body,
        Err(refusal) => return Ok(refusal.reply()),
    };
    if parts.method == Method::POST && !path.starts_with("/mock/") {
        mock.received.keep(&parts, &body);
    }
    match path {
        "/v1/chat/completions" => generate::answer(&mock, &parts.headers, &body, true).await,
        "/v1/completions" => generate::answer(&mock, &parts.headers, &body, false).await,
        _ => Ok(small(&mock, &parts.method, path, &parts.headers, &body).await),
    }
}

async fn small(
    mock: &Mock,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Reply {
    let ok = |text: String| body::json(StatusCode::OK, text);
    match path {
        "/v1/models" => ok(models(mock)),
        "/health" | "/ping" => body::empty(StatusCode::OK),
        "/version" => ok("{\"version\":\"0.32.0\"}".to_owned()),
        "/load" => {
            let load = mock
                .worker
                .status()
                .map(|s| s.load.running + s.load.waiting)
                .sum::<u32>();
            ok(format!("{{\"server_load\":{load}}}"))
        }
        "/metrics" => body::metrics(metrics::page(mock)),
        "/kv_event_sources" => ok(event_sources(mock).to_string()),
        "/server_info" | "/get_server_info" => match mock.part.server_info(mock) {
            Some(info) => ok(info.to_string()),
            None => body::json(StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}"),
        },
        "/tokenize" => tokenize(mock, headers, body).map_or_else(|r| r.reply(), ok),
        "/detokenize" => detokenize(mock, headers, body).map_or_else(|r| r.reply(), ok),
        "/reset_prefix_cache" => {
            let success = mock.worker.clear_cache().await;
            ok(format!("{{\"success\":{success}}}"))
        }
        _ => match control::answer(mock, method, path, body).await {
            Some(reply) => reply,
            None => body::json(StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}"),
        },
    }
}

/// Where each rank publishes, as vLLM lists it.
fn event_sources(mock: &Mock) -> Value {
    let Some(events) = mock.events() else {
        return json!({});
    };
    let source = |rank: u32| {
        let (at, replay) = events.addresses(rank)?;
        let row = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": format!("tcp://{at}"),
            "replay_endpoint": replay.map(|at| format!("tcp://{at}")),
            "topic": String::from_utf8_lossy(events.topic()),
        });
        Some((rank.to_string(), row))
    };
    let sources = (0..events.ranks()).filter_map(source);
    Value::Object(sources.collect())
}

fn wrong_method(allowed: &Method) -> Reply {
    let detail = "{\"detail\":\"Method Not Allowed\"}";
    let mut reply = body::json(StatusCode::METHOD_NOT_ALLOWED, detail);
    if let Ok(value) = HeaderValue::from_str(allowed.as_str()) {
        reply.headers_mut().insert(ALLOW, value);
    }
    reply
}

fn models(mock: &Mock) -> String {
    let created = mock.unix_secs();
    let row = |id: &str, root: &str, parent: Option<&str>, max_model_len: Option<u32>| {
        json!({
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [{
                "id": format!("modelperm-{}", mock.next_name()),
                "object": "model_permission",
                "created": created,
                "allow_create_engine": false,
                "allow_sampling": true,
                "allow_logprobs": true,
                "allow_search_indices": false,
                "allow_view": true,
                "allow_fine_tuning": false,
                "organization": "*",
                "group": null,
                "is_blocking": false,
            }],
        })
    };
    let base = row(&mock.model, &mock.root, None, Some(mock.max_model_len()));
    let adapters = mock.adapters.iter();
    let adapters = adapters.map(|a| row(&a.name, &a.path, Some(&mock.model), None));
    let data: Vec<Value> = std::iter::once(base).chain(adapters).collect();
    json!({ "object": "list", "data": data }).to_string()
}

fn tokenize(mock: &Mock, headers: &HeaderMap, body: &[u8]) -> Result<String, Refusal> {
    let fields = Fields::read(headers, body)?;
    mock.check_model(&fields)?;
    let scan = Scan::parse(body).map_err(|error| Refusal::form(&error.to_string(), None))?;
    let tokens = match fields.get("prompt").and_then(Value::as_str) {
        Some(prompt) => {
            let special = fields
                .get("add_special_tokens")
                .and_then(Value::as_bool)
                .unwrap_or(true);
            let tokens = mock.text.encode(prompt, special);
            tokens.map_err(|error| Refusal::bad(error.to_string(), None))?
        }
        None => chat_prompt(mock, &scan, fields.len())?.to_vec(),
    };
    let names = fields.flag("return_token_strs").then(|| {
        let name = |token: &u32| {
            mock.text
                .tokenizer()
                .decode(&[*token], false)
                .unwrap_or_default()
        };
        tokens.iter().map(name).collect::<Vec<_>>()
    });
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": mock.max_model_len(),
        "tokens": tokens,
        "token_strs": names,
    })
    .to_string())
}

fn detokenize(mock: &Mock, headers: &HeaderMap, body: &[u8]) -> Result<String, Refusal> {
    let fields = Fields::read(headers, body)?;
    mock.check_model(&fields)?;
    let Some(list) = fields.get("tokens").and_then(Value::as_array) else {
        return Err(Refusal::missing("tokens", fields.len()));
    };
    let read = |token: &Value| u32::try_from(token.as_u64()?).ok();
    let Some(tokens) = list.iter().map(read).collect::<Option<Vec<u32>>>() else {
        return Err(Refusal::bad("tokens must be token ids", Some("tokens")));
    };
    let text = mock.text.tokenizer().decode(&tokens, false);
    let text = text.map_err(|error| Refusal::bad(error.to_string(), None))?;
    Ok(json!({ "prompt": text }).to_string())
}
