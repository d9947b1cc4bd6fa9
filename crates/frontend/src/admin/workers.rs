//! `/workers`: who serves what; adding and removing at run time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use kvasir_host::PeerRow;
use kvasir_openai::ApiError;
use kvasir_router::{LearnedTimes, Router, WorkerSpec};
use kvasir_types::{Transport, WorkerId, WorkerRecord};
use kvasir_upstream::{
    AddressError, parse_api_key, parse_remote_worker, parse_url, set_api_key, set_field,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::read_short;
use crate::App;
use crate::fleet::members::{JoinOutcome, Member, MemberState, MembersError, SourceName};
use crate::http::reply::{self, Reply};
use crate::models::{ServedModel, model_of_prefill_pool};

/// `GET /workers`: who serves what, and how busy the router thinks they are; apart from them, who is a
/// member and serves nothing.
pub(crate) fn workers(app: &App) -> Reply {
    let members: BTreeMap<WorkerId, Member> = app.members().list().into_iter().collect();
    let mut rows = Vec::new();
    let mut serving: BTreeSet<WorkerId> = BTreeSet::new();
    let pools = app.prefill_pools().all();
    for model in app.models().all().into_iter().chain(pools) {
        let specs = model.specs();
        serving.extend(specs.iter().map(|spec| spec.id));
        let row = |router: &Router, spec| {
            let mut row = served_row(&model, router, spec);
            if let Some(member) = members.get(&spec.id) {
                add_member(&mut row, member);
            }
            row
        };
        model
            .host
            .ask(|router| rows.extend(specs.iter().map(|spec| row(router, spec))));
    }
    let absent = members.iter().filter(|(id, _)| !serving.contains(*id));
    let absent: Vec<Value> = absent.map(|(id, m)| member_row(*id, m)).collect();
    let mut body = json!({ "workers": rows, "absent": absent });
    if let Some(peers) = app.peers().rows() {
        let row = |peer: &PeerRow| peer_row(app, peer);
        body["replicas"] = peers.iter().map(row).collect::<Vec<_>>().into();
    }
    reply::json(StatusCode::OK, body.to_string())
}

fn served_row(model: &Arc<ServedModel>, router: &Router, spec: &WorkerSpec) -> Value {
    let ranks: Vec<Value> = spec
        .rank_iter()
        .map(|rank| {
            let load = router.load(rank).unwrap_or_default();
            json!({
                "dp_rank": rank.rank.0,
                "active_requests": load.requests,
                "active_decode_blocks": load.active_blocks,
                "active_prefill_tokens": load.prefill_tokens,
                "learned": router.learned(rank).map(|times| learned_row(&times)),
                "cache": model.host.views().get(rank).map(|view| view.row()),
            })
        })
        .collect();
    let member = router.fleet().member(spec.id);
    json!({
        "worker_id": spec.id.0,
        "model": model_of_prefill_pool(&model.name),
        "url": model.url_of(spec.id),
        "tokens_from": model.tokens_from(),
        "state": MemberState::Serving.name(),
        "role": model.links().role(spec.id).name(),
        "block_size": model.block_size,
        "kv_total_blocks": spec.kv_total_blocks,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "busy": member.is_some_and(|member| member.is_busy()),
        "down": member.is_some_and(|member| member.ejected_until().is_some()),
        "draining": member.is_some_and(|member| member.is_draining()),
        "reuses_connections": model.links().http(spec.id).map(|pool| pool.reuses_connections()),
        "ranks": ranks,
    })
}

/// How long prompts and steps take there, where that is learned: in figures that one can check.
pub(super) fn learned_row(times: &LearnedTimes) -> Value {
    let law = &times.law;
    json!({
        "prompt_8k_s": law.chunk + law.work(8192.0, 0.0),
        "step_64x2k_s": law.decode(64.0, 64.0 * 2048.0),
        "prompt_factor": times.prompt_factor,
        "step_factor": times.step_factor,
        "prompt_samples": times.prompt_samples,
        "step_samples": times.step_samples,
        "seconds": {
            "chunk": law.chunk,
            "token": law.token,
            "pair": law.pair,
            "step": law.step,
            "stream": law.stream,
            "attend": law.attend,
        },
    })
}

/// A named replica that is connected.
fn peer_row(app: &App, peer: &PeerRow) -> Value {
    let clock = app.clock();
    json!({
        "replica": peer.id.0,
        "address": peer.address,
        "connected_secs": (clock.now() - peer.since).as_secs(),
        "ranks_agreed": peer.ranks_agreed,
        "ranks_differing": peer.ranks_differing,
    })
}

/// What `POST /workers` would make of these words.
#[must_use]
pub fn read_worker(words: &str) -> Option<WorkerRecord> {
    let new: NewWorker = serde_json::from_str(words).ok()?;
    new.record().ok()
}

/// A worker that serves no model.
fn member_row(id: WorkerId, member: &Member) -> Value {
    let mut row = json!({
        "worker_id": id.0,
        "model": null,
        "busy": false,
        "down": member.state == MemberState::Unreachable,
        "draining": member.state == MemberState::Draining,
        "ranks": [],
    });
    add_member(&mut row, member);
    row
}

fn add_member(row: &mut Value, member: &Member) {
    let mut origins: Vec<&str> = Vec::new();
    for name in &member.sources {
        if !origins.contains(&name.kind) {
            origins.push(name.kind);
        }
    }
    let record = &member.record;
    row["url"] = match record.transport.http() {
        Some(endpoint) => endpoint.to_string().into(),
        None => Value::Null,
    };
    row["state"] = member.state.name().into();
    row["origins"] = origins.into();
    row["sources"] = sources(member);
    row["address"] = plane_address(member).into();
    row["role"] = record.role.name().into();
    row["told"] = json!({
        "block_size": record.block_size,
        "data_parallel_size": record.ranks,
        "device": record.device.map(kvasir_types::Device::name),
        "events": record.events.publish(),
        "replay": record.events.replay(),
        "taints": record.taints.iter().map(|taint| &**taint).collect::<Vec<_>>(),
    });
}

/// Who wants a worker, in full.
pub(super) fn sources(member: &Member) -> Value {
    let names = member
        .sources
        .iter()
        .map(|name| SourceName::to_string(name));
    names.collect::<Vec<String>>().into()
}

/// Where a token worker is.
pub(super) fn plane_address(member: &Member) -> Option<String> {
    match &member.record.transport {
        Transport::Plane(endpoint) => Some(endpoint.to_string()),
        Transport::Http(_) => None,
    }
}

/// The body of `POST /workers`: what `--worker` says, by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewWorker {
    url: String,
    block_size: Option<u32>,
    kv_blocks: Option<u32>,
    max_num_batched_tokens: Option<u32>,
    max_num_seqs: Option<u32>,
    data_parallel_size: Option<u32>,
    device: Option<String>,
    role: Option<String>,
    bootstrap_port: Option<u32>,
    #[serde(default)]
    topology: Vec<String>,
    kv_transfer_domain: Option<String>,
    kv_transfer_preferred_weight: Option<f64>,
    events: Option<String>,
    replay: Option<String>,
    #[serde(default)]
    taints: Vec<String>,
    api_key: Option<String>,
}

impl NewWorker {
    fn record(self) -> Result<WorkerRecord, AddressError> {
        let count = |count: Option<u32>| count.map(|count| count.to_string());
        let said = [
            ("block-size", count(self.block_size)),
            ("kv-blocks", count(self.kv_blocks)),
            ("max-num-batched-tokens", count(self.max_num_batched_tokens)),
            ("max-num-seqs", count(self.max_num_seqs)),
            ("data-parallel-size", count(self.data_parallel_size)),
            ("device", self.device),
            ("role", self.role),
            ("bootstrap-port", count(self.bootstrap_port)),
            ("kv-transfer-domain", self.kv_transfer_domain),
            (
                "kv-transfer-preferred-weight",
                self.kv_transfer_preferred_weight
                    .map(|weight| weight.to_string()),
            ),
            ("events", self.events),
            ("replay", self.replay),
        ];
        let mut worker = parse_remote_worker(&self.url)?;
        for (name, value) in said {
            if let Some(value) = value {
                set_field(&mut worker, name, &value)?;
            }
        }
        for taint in &self.taints {
            set_field(&mut worker, "taint", taint)?;
        }
        for place in &self.topology {
            set_field(&mut worker, "topology", place)?;
        }
        if let Some(key) = self.api_key {
            set_api_key(&mut worker, parse_api_key(&key)?)?;
        }
        Ok(worker)
    }
}

/// `POST /workers`: one more worker, or other words about one.
pub(crate) async fn add_worker(app: &App, request: Request<Incoming>) -> Reply {
    let (parts, incoming) = request.into_parts();
    let read = async {
        let body = read_short(app, &parts, incoming).await?;
        let new: NewWorker = serde_json::from_slice(&body)
            .map_err(|error| ApiError::bad_request(format!("Validation: {error}")))?;
        // A key stays where it was given.
        let words = (new.api_key.is_none()).then(|| String::from_utf8_lossy(&body).into_owned());
        let worker = new
            .record()
            .map_err(|error| ApiError::bad_request(format!("Validation: {error}")))?;
        Ok::<_, ApiError>((worker, words))
    };
    let (worker, words) = match read.await {
        Ok(read) => read,
        Err(error) => return reply::error(&error),
    };
    let (id, url) = (worker.id, worker.transport.to_string());
    match app.operators().join(worker) {
        Ok(outcome) => {
            if let Some(words) = words {
                app.peers().said(url, Some(words), &app.clock());
            }
            let status = match outcome {
                JoinOutcome::New => StatusCode::CREATED,
                JoinOutcome::Changed | JoinOutcome::Same => StatusCode::OK,
            };
            member_reply(app, id, status)
        }
        Err(error) => refusal(error),
    }
}

/// `DELETE /workers/{id or URL}`: it ends what it has and goes; with `force` it goes at once.
pub(crate) fn remove_worker(app: &App, name: &str, query: Option<&str>) -> Reply {
    let by_url = || {
        let url = parse_url(name).ok()?.to_string();
        let at_url = |member: &Member| member.record.transport.to_string() == url;
        let mut all = app.members().list().into_iter();
        all.find(|(_, member)| at_url(member)).map(|(id, _)| id)
    };
    let id = name.parse().map(WorkerId).ok().or_else(by_url);
    let force = match forced(query) {
        Ok(force) => force,
        Err(error) => return reply::error(&error),
    };
    let Some(id) = id else {
        let text = "A worker is named by its id or its URL, percent-encoded";
        return reply::error(&ApiError::bad_request(text));
    };
    let url = app
        .members()
        .get(id)
        .map(|m| m.record.transport.to_string());
    match app.members().remove(id, force) {
        Ok(true) => {
            if let Some(url) = url {
                app.peers().said(url, None, &app.clock());
            }
            member_reply(app, id, StatusCode::ACCEPTED)
        }
        Ok(false) => reply::error(&ApiError::new(404, "No such worker")),
        Err(error) => refusal(error),
    }
}

/// `?force`, `?force=true` and `?force=1` mean it; anything unknown is refused.
fn forced(query: Option<&str>) -> Result<bool, ApiError> {
    match query.unwrap_or_default() {
        "" | "force=false" | "force=0" => Ok(false),
        "force" | "force=true" | "force=1" => Ok(true),
        _ => Err(ApiError::bad_request(
            "The query may be `force=true` and nothing else",
        )),
    }
}

fn member_reply(app: &App, id: WorkerId, status: StatusCode) -> Reply {
    let row = match app.members().get(id) {
        Some(member) => member_row(id, &member),
        // It went in the meantime.
        None => json!({ "worker_id": id.0, "url": null, "state": MemberState::Draining.name() }),
    };
    reply::json(status, row.to_string())
}

fn refusal(error: MembersError) -> Reply {
    let status = match error {
        MembersError::Fixed => 501,
        MembersError::Full => 409,
    };
    reply::error(&ApiError::new(status, error.to_string()))
}

#[cfg(test)]
mod tests {
    use kvasir_upstream::parse_worker;

    use super::*;

    #[test]
    fn force_is_said_in_one_of_few_ways() {
        assert!(!forced(None).unwrap());
        assert!(forced(Some("force")).unwrap() && forced(Some("force=true")).unwrap());
        assert!(!forced(Some("force=false")).unwrap());
        assert!(forced(Some("forse=true")).is_err());
    }

    #[test]
    fn a_new_worker_says_what_a_flag_can() {
        let new = r#"{"url":"http://a:1","block_size":32,"events":"tcp://a:5557","taints":["b","a=1"],"api_key":"k"}"#;
        let record = serde_json::from_str::<NewWorker>(new).unwrap().record();
        let mut flag =
            parse_worker("http://a:1,block-size=32,events=tcp://a:5557,taint=a=1,taint=b").unwrap();
        set_api_key(&mut flag, parse_api_key("k").unwrap()).unwrap();
        assert_eq!(record, Ok(flag));
        let short = r#"{"url":"http://a:1,block-size=32"}"#;
        let short = serde_json::from_str::<NewWorker>(short).unwrap().record();
        assert_eq!(short.unwrap().block_size, Some(32));
        for wrong in [
            r#"{"url":"a:1"}"#,
            r#"{"url":"http://a:1","block_size":0}"#,
            r#"{"url":"http://a:1,block-size=x"}"#,
            r#"{"url":"http://a:1,api-key-file=/etc/hostname"}"#,
            r#"{"url":"http://a:1","api_key":"secret\nb"}"#,
            r#"{"url":"http://u:secret@a:1"}"#,
            r#"{"url":"http://a:1","events":"tcp://u:secret@a:5557"}"#,
        ] {
            let new: NewWorker = serde_json::from_str(wrong).unwrap();
            let error = new.record().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(serde_json::from_str::<NewWorker>(r#"{"url":"http://a:1","x":1}"#).is_err());
    }
}
